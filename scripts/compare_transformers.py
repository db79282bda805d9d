"""Decode deep in a long context beside Hugging Face transformers: the 8B shape, plain and offloaded cache.

    python -m scripts.compare_transformers MODEL [--ctx N] [--decode N] [--arena MIB] [--type TYPE] [--only-streamed]

MODEL is a file that ``make_shape 8b`` wrote, with as many layers. transformers runs the same shape with random bfloat16
weights made on the device, attention ``sdpa``, and a cache that is filled with random numbers instead of by a prompt;
kvs runs its own file with a prompt of random tokens. All then decode a few tokens, one by one. The first step after the
prompt is named by itself: the offloaded cache may lock new host memory in it. Each part is a process. They prepare side
by side (together they need about 75 GB of the device and 70 GB of the host) and are timed one after the other, while
the others wait. A part that cannot run says why, and what is judged by it has failed. Exit code 1 when a line says
FAIL. Needs torch and transformers, which kvs does not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache
from inspect import signature
from pathlib import Path
from threading import Timer
from time import perf_counter
from typing import Any

import numpy as np

from kvs_core.backend import Backend, open_backend
from kvs_core.config import RunConfig
from kvs_core.kv_types import KvType
from kvs_core.model_file import open_model
from kvs_core.model_reader import read_model_shape
from kvs_core.model_shape import ModelShape
from kvs_core.plan import plan_run, with_arena
from kvs_core.session import Session
from kvs_core.units import MIB
from scripts.cuda_checks.sessions import verdict
from scripts.make_shape import SHAPES

SHAPE = SHAPES["8b"]
PLAIN, OFFLOADED = "transformers, plain cache", "transformers, offloaded cache"
KVS_OFF, KVS_ARENA = "kvs, arena off", "kvs, arena"
NEEDED = ((KVS_ARENA, OFFLOADED, 5.0), (KVS_OFF, PLAIN, 3.0))
"""(what is judged, against what, times as many tokens a second)."""
PARTS = {"plain": (PLAIN,), "offloaded": (OFFLOADED,), "kvs": (KVS_ARENA, KVS_OFF)}
PART_SECONDS = 300
READY = "ready"

Decode = Callable[[], None]
"""Runs one step."""


def prepare_transformers(arguments: argparse.Namespace, *, is_offloaded: bool) -> tuple[Decode, str]:
    """A step over a cache of random numbers, and what runs."""
    import torch
    import transformers

    device = torch.device(arguments.device)
    torch.set_default_dtype(torch.bfloat16)
    config = transformers.LlamaConfig(
        vocab_size=SHAPE.n_vocab,
        hidden_size=SHAPE.n_embd,
        intermediate_size=SHAPE.n_ff,
        num_hidden_layers=arguments.layers,
        num_attention_heads=SHAPE.n_head,
        num_key_value_heads=SHAPE.n_head_kv,
        head_dim=SHAPE.head_dim,
        max_position_embeddings=1 << 20,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    with device:
        model = transformers.LlamaForCausalLM(config).eval()
    if {p.dtype for p in model.parameters()} != {torch.bfloat16} or model.config._attn_implementation != "sdpa":
        raise RuntimeError("the model is not bfloat16 with sdpa attention")
    held = make_offloaded_cache(transformers, config) if is_offloaded else transformers.DynamicCache()
    with torch.inference_mode():
        for layer in range(arguments.layers):
            shape = (1, SHAPE.n_head_kv, arguments.ctx, SHAPE.head_dim)
            held.update(torch.randn(shape, device=device), torch.randn(shape, device=device), layer)
        model(input_ids=torch.full((1, 1), 3, device=device), use_cache=True)  # loads kernels; its cache is dropped
    token = torch.full((1, 1), 3, device=device)
    keyword = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"  # as the version has it

    def decode() -> None:
        with torch.inference_mode():
            logits = model(input_ids=token, use_cache=True, **{keyword: held}).logits
            token.copy_(logits[:, -1].argmax(-1, keepdim=True))
        token.item()  # as generation does: the host has to know it
        if device.type == "cuda":
            torch.cuda.synchronize()

    return decode, f"torch {torch.__version__}, transformers {transformers.__version__}, bf16"


def make_offloaded_cache(transformers: Any, config: Any) -> Any:
    """The offloaded dynamic cache: an option of DynamicCache since 4.56, a class of its own before."""
    if hasattr(transformers, "OffloadedCache"):
        return transformers.OffloadedCache()
    return transformers.DynamicCache(config=config, offloading=True)


@cache
def open_kvs(device: str, model: Path, closing: ExitStack) -> tuple[Backend, ModelShape]:
    """A backend that holds the weights, for all sessions of the process."""
    backend = open_backend(device, n_threads=None)
    closing.callback(backend.close)
    with open_model(model) as model_file:
        backend.load_weights(model_file)
        return backend, read_model_shape(model_file)


def prepare_kvs(arguments: argparse.Namespace, n_arena_mib: int, closing: ExitStack) -> tuple[Decode, str]:
    """A step after a prompt of the whole context, and what runs."""
    backend, shape = open_kvs(arguments.device, arguments.model, closing)
    if (shape.n_layer, shape.n_embd) != (arguments.layers, SHAPE.n_embd):
        raise RuntimeError(f"{arguments.model} has {shape.n_layer} layers, {shape.n_embd} wide")
    kv_type = KvType(arguments.type)
    config = RunConfig(
        model_path=arguments.model, n_ctx=arguments.ctx + 1 + arguments.decode, type_k=kv_type, type_v=kv_type
    )
    plan = plan_run(with_arena(config, n_arena_mib * MIB), shape, backend.budget())
    session = closing.enter_context(Session(plan, backend))
    tokens = np.random.default_rng(1).integers(3, shape.n_vocab, plan.n_ctx).tolist()
    session.warm_up()
    session.prefill(tokens[: arguments.ctx])
    link = f", link {session.copy_rate / 1e9:.1f} GB/s" if session.copy_rate else ""

    def decode() -> None:
        session.decode([tokens[session.n_past]])
        predicted = plan.streamed_bytes_of_run(arguments.ctx, session.n_past - arguments.ctx)
        if session.counters.bytes_streamed != predicted:
            raise RuntimeError(f"{session.counters.bytes_streamed} bytes streamed, {predicted} planned")

    return decode, (
        f"Q4_K, {plan.prediction().decode_step_bytes / 1e9:.1f} of {plan.kv_bytes / 1e9:.1f} GB of cache "
        f"({arguments.type}) streamed a token{link}, -ub {plan.n_ubatch}"
    )


def rows_of(arguments: argparse.Namespace, part: str) -> list[str]:
    """The rows of a part that were asked for."""
    return [name for name in PARTS[part] if not arguments.only_streamed or name in (OFFLOADED, KVS_ARENA)]


def run_part(arguments: argparse.Namespace) -> None:
    """Prepare, say so, wait for a line, then time: a JSON line for each row, with seconds of its steps or the error."""
    closing = ExitStack()
    prepare: Mapping[str, Callable[[], tuple[Decode, str]]] = {
        PLAIN: lambda: prepare_transformers(arguments, is_offloaded=False),
        OFFLOADED: lambda: prepare_transformers(arguments, is_offloaded=True),
        KVS_OFF: lambda: prepare_kvs(arguments, 0, closing),
        KVS_ARENA: lambda: prepare_kvs(arguments, arguments.arena, closing),
    }
    prepared: dict[str, tuple[Decode, str]] = {}
    errors: dict[str, str] = {}
    for name in rows_of(arguments, arguments.part):
        try:
            prepared[name] = prepare[name]()
        except Exception as error:  # any reason is worth its line
            errors[name] = f"{type(error).__name__}: {error}"
    print(READY, flush=True)
    sys.stdin.readline()
    for name in rows_of(arguments, arguments.part):
        row: dict[str, Any] = {"name": name}
        try:
            if name not in errors:
                row |= {"steps": [time_step(prepared[name][0]) for _ in range(1 + arguments.decode)]}
                row["what"] = prepared[name][1]
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
        if name in errors:
            row["error"] = errors[name]
        print(json.dumps(row), flush=True)
    closing.close()


def time_step(decode: Decode) -> float:
    begun = perf_counter()
    decode()
    return perf_counter() - begun


def run_parts(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Rows by name: every part is prepared, then one after the other is timed."""
    processes = {part: start_part(arguments, part) for part in PARTS if rows_of(arguments, part)}
    timers = [Timer(PART_SECONDS, process.kill) for process in processes.values()]
    for timer in timers:
        timer.start()
    for process in processes.values():
        assert process.stdout is not None
        while (line := process.stdout.readline()) and line.strip() != READY:
            pass
    rows: dict[str, dict[str, Any]] = {}
    for part, process in processes.items():
        output = process.communicate("\n")[0]
        found = [json.loads(line) for line in output.splitlines() if line.startswith('{"name"')]
        missing = f"the process ended with {process.returncode}"
        rows |= {name: {"name": name, "error": missing} for name in rows_of(arguments, part)}
        rows |= {row["name"]: row for row in found}
    for timer in timers:
        timer.cancel()
    return rows


def start_part(arguments: argparse.Namespace, part: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "scripts.compare_transformers", str(arguments.model), "--part", part]
    for name in ("ctx", "decode", "arena", "layers", "type", "device"):
        command += [f"--{name}", str(getattr(arguments, name))]
    command += ["--only-streamed"] * arguments.only_streamed
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def rate_of(row: Mapping[str, Any]) -> float | None:
    """Tokens per second by the median step, the first left out; None for a row that was not timed."""
    return None if "error" in row else 1 / statistics.median(row["steps"][1:])


def describe(row: Mapping[str, Any]) -> str:
    rate = rate_of(row)
    if rate is None:
        return f"     {row['name']:31} did not run: {row['error']}"
    first, *steps = (1e3 * seconds for seconds in row["steps"])
    return (
        f"     {row['name']:31} {rate:8.2f} t/s, median of {len(steps)}; first step {first:.1f} ms, then "
        f"{min(steps):.2f} to {max(steps):.2f}; {row['what']}"
    )


def judge(rows: Mapping[str, Mapping[str, Any]]) -> list[tuple[bool, str]]:
    """A verdict for each line of ``NEEDED``."""
    verdicts = []
    for own, other, times in NEEDED:
        if own not in rows:
            continue  # not asked for
        own_rate, other_rate = rate_of(rows[own]), rate_of(rows[other])
        if own_rate is None or other_rate is None:
            verdicts.append((False, f"{own} against {other}: not measured, {times:g} times needed"))
            continue
        ratio = own_rate / other_rate
        verdicts.append((ratio >= times, f"{own} against {other}: {ratio:.2f} times, {times:g} needed"))
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--ctx", type=int, default=131072)
    parser.add_argument("--decode", type=int, default=4, help="timed tokens of each row after the first")
    parser.add_argument("--arena", type=int, default=2048, help="MiB")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--type", choices=[t.value for t in KvType], default="f16", help="of the cache of kvs")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script itself")
    parser.add_argument("--only-streamed", action="store_true", help="only the offloaded cache and the arena")
    parser.add_argument("--part", choices=PARTS, help="what one process measures; main starts them")
    arguments = parser.parse_args()
    if arguments.decode < 1:
        parser.error("needs --decode 1 or more")
    if arguments.part:
        run_part(arguments)
        return 0
    started = perf_counter()
    rows = run_parts(arguments)
    print(
        f"decode at depth {arguments.ctx}, {arguments.layers} layers of the 8B shape, arena {arguments.arena} MiB; "
        f"{perf_counter() - started:.0f} s in all"
    )
    for row in rows.values():
        print(describe(row))
    verdicts = judge(rows)
    for good, text in verdicts:
        print(f"{verdict(good)} {text}")
    return 0 if all(good for good, _ in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
