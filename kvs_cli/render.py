"""Plans and errors as tables, lines or JSON. The only file that imports rich; nothing is computed here."""

from __future__ import annotations

import io
import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole
from rich.table import Table

from kvs_cli.exits import exit_code_of
from kvs_cli.options import name_flags
from kvs_core.device_budget import DeviceKind
from kvs_core.errors import ConfigError, KvsError, Problem
from kvs_core.phase import Phase
from kvs_core.plan import RunPlan
from kvs_core.units import MIB, show_size

_WIDTH = 100
_OWN_CODE = re.compile(r"\b(kvs_cli|kvs_core|cuda_kernels)/")
_MISTAKE_HINT = "run it again with -v for the traceback, and report both"
_REGIONS = ("resident", "ring", "state", "workspace", "unused")


def render_plan(plan: RunPlan) -> str:
    """The plan as two tables and a few lines, plain text that a pipe can keep."""
    return _to_text(_summary_table(plan)) + "\n" + _to_text(_arena_table(plan))


def _summary_table(plan: RunPlan) -> Table:
    table = _make_table()
    table.add_column(no_wrap=True)
    table.add_column()
    shape, prediction = plan.shape, plan.prediction()
    n_pages = plan.cache.n_pages
    changes = ", ".join(name for name, is_so in (("rotated", plan.rotations()), ("padded", plan.pads_heads)) if is_so)
    changed = f" ({changes})" if changes else ""
    rows = {
        "model": f"{shape.name or shape.file_path}, {shape.architecture}, {shape.n_layer} layers",
        "device": _show_device(plan),
        "context": f"{plan.n_ctx} tokens (requested {_show_request(plan)}, training length {shape.n_ctx_train})",
        "batch": f"{plan.n_batch}, run {plan.n_ubatch} at a time" + " (chosen; -ub sets another)" * plan.chose_ubatch,
        "KV cache": f"{show_size(plan.kv_bytes)}: {_describe_types(plan)}{changed}, "
        f"{plan.cache.n_layers} layers of {n_pages} pages of {plan.cache.page_tokens} tokens",
        **({"window buffers": _describe_windows(plan)} if plan.window_layers else {}),
        **({"recurrent state": _describe_recurrent(plan)} if plan.recurrent_layers else {}),
        "weights": show_size(plan.weights_bytes),
        "arena": _describe_arena(plan),
        "host store": _describe_store(plan),
        "smallest arena": f"{plan.minimum_arena_bytes // MIB} MiB",
        "useful maximum": f"{plan.useful_arena_bytes // MIB} MiB",
        "streamed": f"{show_size(prediction.prompt_bytes)} for a prompt that fills the context, "
        f"{show_size(prediction.decode_step_bytes)} for a token at its end",
        "device memory": _show_device_memory(plan),
        "host memory": _show_host_memory(plan),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _describe_types(plan: RunPlan) -> str:
    if plan.config.layer_types:
        return ", ".join(f"{pair} in {count}" for pair, count in plan.layers_of_types().items())
    if plan.kv_layers and all(layer.geometry.v_in_k for layer in plan.kv_layers):
        return f"{plan.config.type_k.value} latent rows, keys and values in one"
    return f"{plan.config.type_k.value} keys, {plan.config.type_v.value} values"


def _arena_table(plan: RunPlan) -> Table:
    table = _make_table()
    table.add_column("region", no_wrap=True)
    for phase in Phase:
        table.add_column(phase.value, justify="right")
    for region in _REGIONS:
        sizes = [getattr(plan.layout(phase), f"{region}_bytes") for phase in Phase]
        table.add_row(region, *(show_size(size) for size in sizes))
    table.add_row("arena", *(show_size(plan.arena_bytes) for _ in Phase))
    layouts = [plan.layout(phase) for phase in Phase]
    table.add_row("resident pages of a layer", *(_show_range(layout.resident_pages) for layout in layouts))
    streamed = [tuple(plan.cache.n_pages - pages for pages in layout.resident_pages) for layout in layouts]
    table.add_row("streamed pages of a layer", *(_show_range(pages) for pages in streamed))
    return table


def _show_range(counts: tuple[int, ...]) -> str:
    low, high = min(counts, default=0), max(counts, default=0)
    return str(low) if low == high else f"{low} to {high}"


def _show_request(plan: RunPlan) -> str:
    if plan.config.n_ctx is None:
        return "the largest that fits" if plan.config.fit else "the training length"
    return str(plan.config.n_ctx) if plan.config.n_ctx else "the training length"


def _describe_arena(plan: RunPlan) -> str:
    if not plan.arena_requested_bytes:
        return f"off; one allocation of {show_size(plan.arena_bytes)} holds everything"
    asked = f"{plan.config.arena.mode.value}, {plan.arena_requested_bytes // MIB} MiB"
    if plan.table_bytes:
        asked += f", {show_size(plan.table_bytes)} of it for the driver's page tables of the host store"
    elif plan.arena_bytes < plan.arena_requested_bytes:
        asked += f", of which {show_size(plan.arena_bytes)} are useful"
    return asked if plan.streams else f"{asked}; everything is resident, nothing streams"


def _describe_windows(plan: RunPlan) -> str:
    windows = plan.window_layers
    seen = _show_range(tuple(layer.n_swa for layer in windows))
    slots = _show_range(tuple(layer.n_slots for layer in windows))
    return (
        f"{show_size(plan.window_bytes)} of state: {len(windows)} layers that see the last {seen} tokens, "
        f"{slots} pages each"
    )


def _describe_recurrent(plan: RunPlan) -> str:
    return f"{show_size(plan.recurrent_bytes)} of state: {len(plan.recurrent_layers)} layers, whatever the context"


def _describe_store(plan: RunPlan) -> str:
    if not plan.streams:
        return "none"
    place = "memory" if plan.config.store_path is None else f"file {plan.config.store_path}"
    return f"{show_size(plan.store_bytes)} in {place}"


def _make_table() -> Table:
    return Table(box=None, pad_edge=False, show_header=True, header_style="")


def _to_text(table: Table) -> str:
    table.show_header = any(column.header for column in table.columns)
    text = io.StringIO()
    RichConsole(file=text, width=_WIDTH, color_system=None, highlight=False, markup=False, emoji=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def error_lines(error: BaseException) -> list[tuple[str, str | None]]:
    """Each line that explains an error, with its hint: one for every problem of a refused configuration."""
    if isinstance(error, ConfigError) and error.problems:
        lines = [(_one_line(str(problem)), problem.hint) for problem in map(name_flags, error.problems)]
        last_message, last_hint = lines[-1]
        return [*lines[:-1], (last_message, last_hint or error.hint)]
    if isinstance(error, KvsError):
        return [(_one_line(str(error)), error.hint)]
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        return [(_one_line(f"{place}{error.strerror}"), None)]
    if isinstance(error, MemoryError):
        return [("out of memory", "lower the context (-c) or the batch (-ub)")]
    if not isinstance(error, Exception):  # a signal: whoever caught it has its line
        return [(type(error).__name__, None)]
    return [(_one_line(f"this is a mistake of kvs: {_describe_mistake(error)}"), _MISTAKE_HINT)]


def _describe_mistake(error: BaseException) -> str:
    """What an error that nobody expected says, and the line of the toolkit's own code it came through last."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _OWN_CODE.search(frame.filename)]
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    return "".join(traceback.format_exception_only(error)).strip() + place


def error_to_json(error: BaseException) -> dict[str, Any]:
    """The ``error`` object of a JSON document."""
    problems = error.problems if isinstance(error, ConfigError) else ()
    lines = error_lines(error)
    return {
        "kind": type(error).__name__,
        "exit_code": exit_code_of(error),
        "message": "; ".join(message for message, _ in lines),
        "hints": list(dict.fromkeys(hint for _, hint in lines if hint)),
        "problems": [problem_to_json(name_flags(problem)) for problem in problems],
    }


def problem_to_json(problem: Problem) -> Mapping[str, str | None]:
    return {"field": problem.field, "value": problem.value, "reason": problem.reason, "hint": problem.hint}


def _one_line(text: str) -> str:
    return " ".join(text.split("\n"))


def _show_device(plan: RunPlan) -> str:
    """Threads are counted on the CPU only: a GPU's run has one that launches."""
    budget = plan.budget
    threads = f", {budget.n_threads} thread{'s' * (budget.n_threads > 1)}" if budget.kind is DeviceKind.CPU else ""
    return f"{budget.kind.value} {budget.name}, {show_size(budget.free_bytes)} free{threads}"


def _show_device_memory(plan: RunPlan) -> str:
    """Weights and arena, and on a GPU what driver and kernels take beside them."""
    beside = f", and about {show_size(plan.context_bytes)} for driver and kernels" if plan.context_bytes else ""
    return f"{show_size(plan.device_bytes)} in all{beside}"


def _show_host_memory(plan: RunPlan) -> str:
    """What the process holds itself, with the context full; mapped weights come and go."""
    beside = f", {show_size(plan.host_context_bytes)} of it for driver and libraries" if plan.host_context_bytes else ""
    return f"{show_size(plan.process_bytes)} in the process with the context full{beside}"
