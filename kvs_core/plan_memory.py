"""Whether a plan fits: constants beside weights and arena, predictions of memory, refusals with the figures. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvs_core.config import ArenaMode
from kvs_core.cpu.fast_types import FAST_WEIGHT_TYPES
from kvs_core.device_budget import DeviceBudget, DeviceKind
from kvs_core.errors import PlanError
from kvs_core.units import MIB, align_up, show_size

if TYPE_CHECKING:
    from kvs_core.plan import RunPlan

_CPU_MARGIN_BYTES = 256 * MIB
"""Memory left alone on the CPU: interpreter and libraries."""

CONTEXT_BYTES = {DeviceKind.CPU: 0, DeviceKind.CUDA: 536 * MIB}
"""What driver, loaded kernels and cuBLASLt take beside weights and arena; 535 MiB on an H200, without a host store.

Kernels are loaded when they are first launched and cuBLASLt loads its own for each shape, so the figure grows by tens
of MiB until a run has been through both phases, and recorded steps take a little each.
``scripts/measure_cuda_memory.py`` measures it."""

_STORE_BYTES_PER_TABLE_BYTE = 512
"""The driver maps locked host memory in pages of 4 KiB, eight bytes of device memory each, however it was allocated:
2 MiB a GiB (``scripts/measure_page_locking.py``)."""
_TABLE_BYTES = 4096
"""One table of 512 entries."""

_HEADROOM_BYTES = 64 * MIB
"""Device memory that has to be free after the warm-up: recorded steps and kernels of other shapes are still to come."""

_PROCESS_BYTES = 72 * MIB
_PROCESS_BYTES_PER_TOKEN_ID = 900
"""Interpreter, libraries and compiled kernels, and a vocabulary with its merges: `kvs run` on a tiny model and on
SmolLM2 (Python 3.11, numba 0.68, kernels from the cache). Measure again with scripts/measure_streaming.py."""

_HOST_CONTEXT_BYTES = {DeviceKind.CPU: 0, DeviceKind.CUDA: 250 * MIB}
"""What the GPU's driver, cuBLASLt and the kernel compiler keep in the process, file mappings excluded.

Runs on an H200 at 8192, 65536 and 131072 tokens lay within 0.5 % of the prediction that it is part of
(``scripts/measure_cuda_memory.py``)."""


def table_bytes(kind: DeviceKind, store_bytes: int) -> int:
    """Predicted device memory of the driver's page tables of the locked host store, whole pages of its own."""
    return align_up(store_bytes // _STORE_BYTES_PER_TABLE_BYTE, _TABLE_BYTES) if kind is DeviceKind.CUDA else 0


def margin_bytes(kind: DeviceKind) -> int:
    """Device memory that weights and arena have to leave alone.

    On a GPU what driver and kernels take, and the headroom that a warmed-up run has to keep; so weights, arena and
    ``CONTEXT_BYTES`` never exceed what is free.
    """
    return _CPU_MARGIN_BYTES if kind is DeviceKind.CPU else CONTEXT_BYTES[kind] + _HEADROOM_BYTES


def host_context_bytes(budget: DeviceBudget) -> int:
    """Predicted host memory of the device's driver and libraries: a constant too."""
    return _HOST_CONTEXT_BYTES[budget.kind]


def process_bytes(plan: RunPlan, *, results_bytes: int) -> int:
    """Predicted memory of the process that no file backs (RssAnon + RssShmem), with the context full.

    ``results_bytes`` is what logits take that come from a device of its own. Mapped weights do not count; on a GPU
    their pages are given back once they are on the device.
    """
    shape, budget = plan.shape, plan.budget
    store_bytes = 0 if plan.config.store_path is not None else plan.store_bytes
    total = _PROCESS_BYTES + _PROCESS_BYTES_PER_TOKEN_ID * shape.n_vocab + host_context_bytes(budget) + store_bytes
    if budget.shares_host_memory:
        return total + shape.expanded_bytes(FAST_WEIGHT_TYPES) + plan.arena_bytes
    return total + results_bytes


def _way_out(plan: RunPlan, store_in_memory: int) -> str:
    """What else relieves host memory in a run on the CPU."""
    if store_in_memory:
        return "keep the host store in a file with --kv-stream-store PATH"
    if plan.config.arena.mode is ArenaMode.OFF:
        return "give an arena and --kv-stream-store PATH"
    return "use a smaller arena (--kv-stream-arena-mib)"


def check_memory(plan: RunPlan) -> None:
    """Refuse what the device or the host cannot hold, with the figures."""
    budget = plan.budget
    margin = margin_bytes(budget.kind)
    store_in_memory = 0 if plan.config.store_path is not None else plan.store_bytes
    if budget.shares_host_memory:
        needed = plan.device_bytes + store_in_memory + margin
        if needed > budget.free_bytes:
            raise PlanError(
                f"-c {plan.n_ctx} needs {show_size(needed)} of memory (weights {show_size(plan.weights_bytes)}, "
                f"KV cache and workspace {show_size(plan.arena_bytes)}, host store {show_size(store_in_memory)}, "
                f"margin {show_size(margin)}); {show_size(budget.free_bytes)} are free",
                required_bytes=needed,
                available_bytes=budget.free_bytes,
                hint=f"lower the context (-c), use a smaller KV type, or {_way_out(plan, store_in_memory)}",
            )
        return
    if plan.device_bytes + margin > budget.free_bytes:
        raise PlanError(
            f"weights {show_size(plan.weights_bytes)}, arena {show_size(plan.arena_bytes + plan.table_bytes)} and "
            f"{show_size(margin)} for driver, kernels and a reserve exceed the {show_size(budget.free_bytes)} free "
            f"({budget.kind.value} {budget.name})",
            required_bytes=plan.device_bytes + margin,
            available_bytes=budget.free_bytes,
            hint=_less_device_memory(plan),
        )
    if store_in_memory and plan.process_bytes > budget.host_free_bytes:
        raise PlanError(
            f"-c {plan.n_ctx} needs {show_size(plan.process_bytes)} of host memory, {show_size(store_in_memory)} of it "
            f"for the host store; {show_size(budget.host_free_bytes)} are free",
            required_bytes=plan.process_bytes,
            available_bytes=budget.host_free_bytes,
            hint="lower the context (-c) or use a smaller KV type",
        )


def _less_device_memory(plan: RunPlan) -> str:
    """What helps a plan that a GPU does not hold: only other weights when the smallest arena does not fit either."""
    margin = margin_bytes(plan.budget.kind)
    if plan.weights_bytes + plan.minimum_arena_bytes + margin > plan.budget.free_bytes:
        return "lower -ub, use a model file with smaller weights or another device, or --device cpu"
    if plan.config.arena.mode is ArenaMode.FIXED:
        return "lower --kv-stream-arena-mib, or use auto"
    return "give --kv-stream-arena-mib auto, lower the context (-c), or use a smaller KV type"


def check_after_warm_up(plan: RunPlan, budget: DeviceBudget) -> None:
    """Refuse to go on when a warmed-up GPU has no room left: ``budget`` is what it says now.

    Raises PlanError with the planned figures and what was really taken since the plan was made. A CPU is not asked:
    its memory becomes real only when it is used.
    """
    if budget.shares_host_memory or budget.free_bytes >= _HEADROOM_BYTES:
        return
    taken = plan.budget.free_bytes - budget.free_bytes
    raise PlanError(
        f"after the warm-up {show_size(budget.free_bytes)} are free on {budget.name}, {show_size(_HEADROOM_BYTES)} "
        f"are needed: {show_size(taken)} were taken since the plan was made, {show_size(plan.device_bytes)} of them "
        f"by weights {show_size(plan.weights_bytes)} and arena {show_size(plan.arena_bytes + plan.table_bytes)}",
        required_bytes=plan.device_bytes + _HEADROOM_BYTES,
        available_bytes=plan.budget.free_bytes,
        hint="lower --kv-stream-arena-mib or the context (-c), or end what else uses the device",
    )
