"""The rotation of heads before they are cached, and back: the fast Walsh-Hadamard transform in a warp's registers.

Bit for bit ``kvs_core.cpu.rotation``: the scale (with signs) first, then sums and differences of elements 1, 2, 4, ...
apart, then the other signs. Which heads are rotated is decided in ``kvs_core.kv_rotation``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import int32, int64, types

from cuda_kernels.emit import Emitter, Value, emitted
from cuda_kernels.intrinsics import load_float
from cuda_kernels.launch import Kernel, address_of, check_array, kernel_builder
from cuda_kernels.overlap import wait_for_previous
from cuda_kernels.quantise import store_quant
from cuda_kernels.unit_formats import GROUP_ELEMENTS
from kvs_core.errors import KernelArgumentError
from kvs_core.kv_rotation import TURBO_SIGNS, Rotation
from kvs_core.units import ceil_div

N_WARPS = 4
N_THREADS = 32 * N_WARPS


def rotate_values(
    emit: Emitter, rotation: Rotation | None, lane: Value, values: list[Value], *, inverse: bool = False
) -> list[Value]:
    """Whole runs of ``rotation.size`` elements, ``values[i]`` holding element 32 i + lane; None: as they are."""
    if rotation is None:
        return values
    n_blocks = rotation.size // 32
    if len(values) % n_blocks:
        raise ValueError(f"{32 * len(values)} elements are not whole runs of {rotation.size}")
    runs = (values[i : i + n_blocks] for i in range(0, len(values), n_blocks))
    return [value for run in runs for value in _rotate_run(emit, rotation, lane, run, inverse)]


def _rotate_run(emit: Emitter, rotation: Rotation, lane: Value, values: list[Value], inverse: bool) -> list[Value]:
    before, after = (_sign_masks(rotation, which ^ inverse) for which in (False, True))
    scale = emit.as_word(emit.float(float(np.float32(1.0 / math.sqrt(rotation.size)))))
    scales = [emit.as_float(_turn_sign(emit, scale, mask, lane)) for mask in before]
    run = [emit.float_multiply(value, factor) for value, factor in zip(values, scales, strict=True)]
    for step in (1, 2, 4, 8, 16):
        is_upper = emit.less(emit.word(0), emit.bit_and(lane, step))
        others = [emit.exchange(value, step) for value in run]
        run = [
            emit.select(is_upper, emit.float_subtract(other, value), emit.float_add(value, other))
            for value, other in zip(run, others, strict=True)
        ]
    step = 1
    while step < len(run):
        for i in (i for i in range(len(run)) if not i & step):
            low, high = run[i], run[i + step]
            run[i], run[i + step] = emit.float_add(low, high), emit.float_subtract(low, high)
        step *= 2
    return [
        emit.as_float(_turn_sign(emit, emit.as_word(value), mask, lane)) for value, mask in zip(run, after, strict=True)
    ]


def _sign_masks(rotation: Rotation, is_second: bool) -> list[int]:
    """For each 32 elements of a run a word of negative signs, bit by element."""
    if not rotation.is_signed:
        return [0] * (rotation.size // 32)
    signs = TURBO_SIGNS[is_second][: rotation.size]
    return [sum(1 << i for i in range(32) if signs[first + i] < 0) for first in range(0, rotation.size, 32)]


def _turn_sign(emit: Emitter, word: Value, mask: int, lane: Value) -> Value:
    if not mask:
        return word
    sign = emit.shift_left(emit.shift_right(emit.word(mask), lane), 31)
    return emit.bit_xor(word, sign)


@kernel_builder
def build_rotate_heads_kernel(rotation: Rotation, inverse: bool, is_quantised: bool) -> Kernel:
    """A warp rotates one run of ``rotation.size`` elements in place, and quantises the result if asked to."""
    n_blocks, run_elements = rotation.size // 32, rotation.size

    def rotate_run(emit: Emitter, address: Value, lane: Value) -> None:
        values = [emit.load_float(address, 128 * i) for i in range(n_blocks)]
        for i, value in enumerate(rotate_values(emit, rotation, lane, values, inverse=inverse)):
            emit.store_float(address, 128 * i, value)

    rotate = emitted(types.void, types.int64, types.int32)(rotate_run)

    def rotate_heads_kernel(x, quants, scales, n_runs):
        lane = int32(cuda.threadIdx.x) & int32(31)
        run = int64(cuda.blockIdx.x) * N_WARPS + (int32(cuda.threadIdx.x) >> int32(5))
        element = run * run_elements + lane
        wait_for_previous()
        if run >= n_runs:
            return
        rotate(x + element * 4, lane)
        if is_quantised:
            for _ in range(n_blocks):
                store_quant(load_float(x + element * 4), lane, quants + element, scales + (element >> 4) * 8)
                element += 32

    return Kernel(rotate_heads_kernel, [types.int64] * 4, n_threads=N_THREADS, overlaps=True)


def rotate_heads(
    x: Any, rotation: Rotation, *, inverse: bool = False, quants: Any = None, scales: Any = None, stream: Any
) -> None:
    """Rotate each ``rotation.size`` elements of every row in place, or back.

    x        float32 [n_tokens, width], a multiple of the size wide
    quants   int8    [n_tokens, width]           the result as ``quantise`` gives it, written with it;
    scales   float32 [n_tokens, width / 16, 2]   None: not wanted
    Raises   KernelArgumentError if shapes or dtypes disagree.
    """
    check_array("x", x, np.float32, (None, None))
    n_tokens, width = x.shape
    if width % rotation.size:
        raise KernelArgumentError(f"rows of {width} elements are not whole runs of {rotation.size}")
    if quants is not None:
        check_array("quants", quants, np.int8, (n_tokens, width))
        check_array("scales", scales, np.float32, (n_tokens, width // GROUP_ELEMENTS, 2))
    n_runs = n_tokens * width // rotation.size
    addresses = (0, 0) if quants is None else (address_of(quants), address_of(scales))
    kernel = build_rotate_heads_kernel(rotation, inverse, quants is not None)
    kernel.launch((ceil_div(n_runs, N_WARPS),), stream, address_of(x), *addresses, n_runs)
