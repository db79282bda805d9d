"""Rotation of heads before they are cached, and back: the fast Walsh-Hadamard transform in place.

Which heads are rotated is decided in ``kvs_core.kv_rotation``.
"""

# mypy: disable-error-code="no-untyped-call, untyped-decorator, call-arg, var-annotated, unreachable"
# The kernel is compiled by Numba and cannot be typed for Python.

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.extending import intrinsic

from kvs_core.cpu.arguments import FLOAT32, check_array
from kvs_core.cpu.kernel_cache import cached_njit
from kvs_core.cpu.simd import load_f32x16, store_f32x16
from kvs_core.cpu.tasks import kernel_task, run_tasks
from kvs_core.cpu.threads import ALONE, ThreadTeam
from kvs_core.cpu.vector_types import N_LANES, VECTOR_F32, f32x16, make_map, shuffle
from kvs_core.errors import KernelArgumentError
from kvs_core.kv_rotation import TURBO_SIGNS, Rotation

# About 2 us of work: ten times what handing out a task to another thread costs.
_TASK_ELEMENTS = 8192


def rotate_heads(
    x: npt.NDArray[np.float32], rotation: Rotation, team: ThreadTeam = ALONE, *, inverse: bool = False
) -> None:
    """Rotate each ``rotation.size`` elements of every row in place, or back.

    x        float32 [n_tokens, width], a multiple of the size wide
    Bits     of a row depend on that row only.
    Raises   KernelArgumentError
    """
    check_array("x", x, FLOAT32, (None, None))
    if x.shape[1] % rotation.size:
        raise KernelArgumentError(f"rows of {x.shape[1]} elements are not whole runs of {rotation.size}")
    before, after = _factors(rotation, inverse)
    rotate_kernel(team.control, x, rotation.size, before, after)


@lru_cache(maxsize=16)
def _factors(rotation: Rotation, inverse: bool) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """What elements are multiplied by before and after the sums, float32 [size]; nothing after is [0]."""
    scale = np.float32(1.0 / math.sqrt(rotation.size))
    if not rotation.is_signed:
        return np.full(rotation.size, scale), np.empty(0, dtype=np.float32)
    signs = [np.array(vector[: rotation.size], dtype=np.float32) for vector in TURBO_SIGNS]
    first, second = reversed(signs) if inverse else signs
    return first * scale, second


@cached_njit()
def rotate_kernel(team: Any, x: Any, size: Any, before: Any, after: Any) -> None:
    task_runs = max(1, _TASK_ELEMENTS // size)
    n_runs = x.size // size
    run_tasks(team, (n_runs + task_runs - 1) // task_runs, _rotate_runs, (x, size, before, after, task_runs))


@kernel_task
def _rotate_runs(task: Any, thread_idx: Any, x: Any, size: Any, before: Any, after: Any, task_runs: Any) -> None:
    for run in range(task * task_runs, min(x.size // size, (task + 1) * task_runs)):
        begin = run * size
        for idx in range(0, size, N_LANES):
            values = load_f32x16(x, begin + idx) * load_f32x16(before, idx)
            store_f32x16(x, begin + idx, _hadamard_16(values))
        half = N_LANES
        while half < size:
            for pair in range(begin, begin + size, 2 * half):
                for idx in range(pair, pair + half, N_LANES):
                    low, high = load_f32x16(x, idx), load_f32x16(x, idx + half)
                    store_f32x16(x, idx, low + high)
                    store_f32x16(x, idx + half, low - high)
            half *= 2
        for idx in range(0, after.size, N_LANES):
            store_f32x16(x, begin + idx, load_f32x16(x, begin + idx) * load_f32x16(after, idx))


def _transform_lanes(context: Any, builder: Any, vector: Any) -> Any:
    """The unnormalised transform of 16 lanes: sums and differences of lanes 1, 2, 4 and 8 apart."""
    for step in (1, 2, 4, 8):
        other = shuffle(builder, vector, [lane ^ step for lane in range(N_LANES)])
        signs = ir.Constant(VECTOR_F32, [-1.0 if lane & step else 1.0 for lane in range(N_LANES)])
        vector = builder.fadd(other, builder.fmul(vector, signs))
    return vector


_hadamard_16 = intrinsic(make_map(f32x16, f32x16, _transform_lanes))
