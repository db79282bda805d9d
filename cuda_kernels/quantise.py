"""Activations as 8-bit blocks for products with quantised weights, alone or together with the RMS norm before them.

A block is 32 activations: nearest integers of 127 x / largest, one scale, and the sum of every 16 quants.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import float32, int32, int64, types

from cuda_kernels.emit import Emitter, Value, emitted, floats
from cuda_kernels.intrinsics import FULL_WARP, fma, multiply, store_byte, store_two_floats
from cuda_kernels.launch import Kernel, address_of, check_array, device_function, kernel_builder
from cuda_kernels.overlap import wait_for_previous
from cuda_kernels.unit_formats import GROUP_ELEMENTS
from kvs_core.errors import KernelArgumentError
from kvs_core.units import ceil_div

QUANT_BLOCK = 32
"""Activations that share one scale."""

QUANTISE_THREADS = 256
NORM_THREADS = 1024
_NORM_WARPS = NORM_THREADS // 32
SHRINK = 2.0**-96
"""A factor that is exact and brings the square of every float32 number into range."""


@emitted(floats(4), types.int64)
def load_recent_four(emit: Emitter, address: Value) -> list[Value]:
    """Four float32 that the kernel before may have written."""
    return emit.load_recent_floats(address, 0, 4)


@emitted(floats(4), types.int64)
def load_four(emit: Emitter, address: Value) -> list[Value]:
    """Four float32 that no kernel writes."""
    return emit.load_floats(address, 0, 4)


@emitted(types.void, types.int64, types.float32, types.float32, types.float32, types.float32)
def store_four(emit: Emitter, address: Value, *values: Value) -> None:
    emit.store_words(address, 0, [emit.as_word(value) for value in values])


@emitted(types.int32, types.float32)
def round_to_int(emit: Emitter, value: Value) -> Value:
    """Nearest integer, halves to even."""
    return emit.round_to_int(value)


@emitted(types.void, types.int64, types.int32, types.int32, types.int32, types.int32)
def store_four_bytes(emit: Emitter, address: Value, *values: Value) -> None:
    """The low bytes of four integers."""
    pairs = [emit.permute(values[i], values[i + 1], 0x0040) for i in (0, 2)]
    emit.asm("st.global.u32 [$0],$1;", "", "lr", [address, emit.permute(*pairs, 0x5410)], ordered=True)


@device_function
def store_quants(a, b, c, d, quant_at, scale_at, lane, is_present):
    """Quantise a block that eight lanes share, four values each; the whole warp takes part."""
    largest = max(max(abs(a), abs(b)), max(abs(c), abs(d)))
    for step in (4, 2, 1):
        largest = max(largest, cuda.shfl_xor_sync(FULL_WARP, largest, step))
    scale = largest / float32(127.0)
    inverse = float32(127.0) / largest if largest > float32(0.0) else float32(0.0)
    qa = round_to_int(multiply(a, inverse))
    qb = round_to_int(multiply(b, inverse))
    qc = round_to_int(multiply(c, inverse))
    qd = round_to_int(multiply(d, inverse))
    total = qa + qb + qc + qd
    total += cuda.shfl_xor_sync(FULL_WARP, total, 2)
    total += cuda.shfl_xor_sync(FULL_WARP, total, 1)
    if is_present:
        store_four_bytes(quant_at, qa, qb, qc, qd)
        if lane & int32(3) == 0:
            store_two_floats(scale_at, scale, float32(total))


@device_function
def store_quant(value, lane, quant_at, scale_at):
    """Quantise a block that the 32 lanes of a warp share, a value each. ``scale_at``: of this lane's 16 values."""
    largest = abs(value)
    for step in (16, 8, 4, 2, 1):
        largest = max(largest, cuda.shfl_xor_sync(FULL_WARP, largest, step))
    scale = largest / float32(127.0)
    inverse = float32(127.0) / largest if largest > float32(0.0) else float32(0.0)
    quant = round_to_int(multiply(value, inverse))
    total = quant
    for step in (8, 4, 2, 1):
        total += cuda.shfl_xor_sync(FULL_WARP, total, step)
    store_byte(quant_at, quant)
    if lane & int32(GROUP_ELEMENTS - 1) == 0:
        store_two_floats(scale_at, scale, float32(total))


@kernel_builder
def build_quantise_kernel() -> Kernel:
    """A thread quantises four activations."""

    def quantise_kernel(x, quants, scales, n_quads):
        lane = int32(cuda.threadIdx.x) & int32(31)
        quad = int64(cuda.blockIdx.x) * QUANTISE_THREADS + cuda.threadIdx.x
        is_present = quad < n_quads
        wait_for_previous()
        a, b, c, d = load_recent_four(x + min(quad, n_quads - 1) * 16)
        store_quants(a, b, c, d, quants + quad * 4, scales + (quad >> 2) * 8, lane, is_present)

    return Kernel(quantise_kernel, [types.int64] * 4, n_threads=QUANTISE_THREADS, overlaps=True)


@device_function
def norm_sum(value, partial, tid):
    """Sum over a block of ``NORM_THREADS``, the same in every thread; ``partial``: shared float32, one a warp."""
    for step in (16, 8, 4, 2, 1):
        value += cuda.shfl_xor_sync(FULL_WARP, value, step)
    if tid & int32(31) == 0:
        partial[tid >> int32(5)] = value
    cuda.syncthreads()
    total = partial[tid & int32(31)] if tid & int32(31) < int32(_NORM_WARPS) else float32(0.0)
    for step in (16, 8, 4, 2, 1):
        total += cuda.shfl_xor_sync(FULL_WARP, total, step)
    cuda.syncthreads()
    return total


@kernel_builder
def build_norm_quantise_kernel() -> Kernel:
    """A block normalises and quantises one row, four activations a thread at a time."""

    def norm_quantise_kernel(x, weight, out, quants, scales, n_quads, eps):
        partial = cuda.shared.array(_NORM_WARPS, float32)
        tid = int32(cuda.threadIdx.x)
        lane = tid & int32(31)
        row = int64(cuda.blockIdx.x)
        row_at = x + row * n_quads * 16
        n_steps = (n_quads + int32(NORM_THREADS - 1)) // int32(NORM_THREADS)
        wa, wb, wc, wd = load_four(weight + int64(min(tid, n_quads - int32(1))) * 16)
        wait_for_previous()

        total = float32(0.0)
        for step in range(n_steps):
            quad = step * int32(NORM_THREADS) + tid
            if quad < n_quads:
                a, b, c, d = load_recent_four(row_at + int64(quad) * 16)
                total = fma(d, d, fma(c, c, fma(b, b, fma(a, a, total))))
        total = norm_sum(total, partial, tid)
        shrink = float32(1.0)
        if total == float32(math.inf):  # values beyond 1e19: a mean of infinity would turn the row to zeros
            shrink = float32(SHRINK)
            total = float32(0.0)
            for step in range(n_steps):
                quad = step * int32(NORM_THREADS) + tid
                if quad < n_quads:
                    a, b, c, d = load_recent_four(row_at + int64(quad) * 16)
                    a, b, c, d = a * shrink, b * shrink, c * shrink, d * shrink
                    total = fma(d, d, fma(c, c, fma(b, b, fma(a, a, total))))
            total = norm_sum(total, partial, tid)
        factor = float32(1.0) / math.sqrt(total / float32(4 * n_quads) + eps * shrink * shrink)

        for step in range(n_steps):
            quad = step * int32(NORM_THREADS) + tid
            is_present = quad < n_quads
            held = int64(min(quad, n_quads - int32(1)))
            a, b, c, d = load_recent_four(row_at + held * 16)
            if step > 0:
                wa, wb, wc, wd = load_four(weight + held * 16)
            a, b, c, d = a * shrink, b * shrink, c * shrink, d * shrink
            a, b, c, d = a * factor * wa, b * factor * wb, c * factor * wc, d * factor * wd
            at = row * n_quads + held
            if is_present:
                store_four(out + at * 16, a, b, c, d)
            store_quants(a, b, c, d, quants + at * 4, scales + (at >> 2) * 8, lane, is_present)

    signature = [types.int64] * 5 + [types.int32, types.float32]
    return Kernel(norm_quantise_kernel, signature, n_threads=NORM_THREADS, overlaps=True)


def quantise(x: Any, quants: Any, scales: Any, *, stream: Any) -> None:
    """Blocks of 32 activations as 8-bit quants, for ``matvec``.

    x        float32 [n_vectors, n_cols]             n_cols a multiple of 32
    quants   int8    [n_vectors, n_cols]
    scales   float32 [n_vectors, n_cols / 16, 2]     scale of the block, sum of these 16 quants
    Raises   KernelArgumentError if shapes or dtypes disagree.
    """
    _check("quantise", x, quants, scales)
    n_quads = x.shape[0] * x.shape[1] // 4
    grid = (ceil_div(n_quads, QUANTISE_THREADS),)
    build_quantise_kernel().launch(grid, stream, address_of(x), address_of(quants), address_of(scales), n_quads)


def norm_quantise(x: Any, weight: Any, out: Any, quants: Any, scales: Any, *, eps: float, stream: Any) -> None:
    """RMS norm of every row, as floats and as 8-bit blocks.

    x, out   float32 [n_rows, n_cols]                n_cols a multiple of 32
    weight   float32 [n_cols]
    quants   int8    [n_rows, n_cols]
    scales   float32 [n_rows, n_cols / 16, 2]        scale of the block, sum of these 16 quants
    Raises   KernelArgumentError if shapes or dtypes disagree.
    """
    _check("norm_quantise", x, quants, scales)
    check_array("weight", weight, np.float32, (x.shape[1],))
    check_array("out", out, np.float32, x.shape)
    if not eps > 0.0:
        raise KernelArgumentError(f"eps {eps}: needs a number above 0, which also guards rows of zeros")
    arrays = (address_of(array) for array in (x, weight, out, quants, scales))
    build_norm_quantise_kernel().launch((x.shape[0],), stream, *arrays, x.shape[1] // 4, eps)


def _check(name: str, x: Any, quants: Any, scales: Any) -> None:
    n_rows, n_cols = x.shape
    check_array("x", x, np.float32, (None, None))
    check_array("quants", quants, np.int8, (n_rows, n_cols))
    check_array("scales", scales, np.float32, (n_rows, n_cols // GROUP_ELEMENTS, 2))
    if n_cols % QUANT_BLOCK:
        raise KernelArgumentError(f"{name}: {n_cols} columns, needs a multiple of {QUANT_BLOCK}")
