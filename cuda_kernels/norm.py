"""RMS norm. One block a row, one order for any row count."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import float32, types

from cuda_kernels.dequant import OutputType
from cuda_kernels.launch import Kernel, check_array, device_function, kernel_builder
from cuda_kernels.overlap import wait_for_previous
from cuda_kernels.reduce import BLOCK_THREADS, block_sum
from kvs_core.errors import KernelArgumentError

_MATRIX = types.Array(types.float32, 2, "C")
_HALVES = types.Array(types.float16, 2, "C")
_VECTOR = types.Array(types.float32, 1, "C")

_SHRINK = 2.0**-96
"""A factor that is exact and brings the square of every float32 number into range."""


@device_function
def shrink_of(total):
    """1 for a sum of squares, the same in every thread, that float32 could hold; else what to multiply values by."""
    return float32(_SHRINK) if total == float32(math.inf) else float32(1.0)


@kernel_builder
def build_rms_norm_kernel(output: OutputType, is_weighted: bool = True) -> Kernel:
    """``out = x / sqrt(mean(x^2) + eps) * weight * gain`` for ``n_cols`` of a row; F16: also rounded in ``half``.

    A thread reads four elements before it uses the first, so that its loads overlap.
    """
    is_half = output is OutputType.F16

    @device_function
    def sum_of_squares(x, row, n_cols, shrink):
        total = float32(0.0)
        i = cuda.threadIdx.x
        while i + 3 * BLOCK_THREADS < n_cols:
            a, b = x[row, i] * shrink, x[row, i + BLOCK_THREADS] * shrink
            c, d = x[row, i + 2 * BLOCK_THREADS] * shrink, x[row, i + 3 * BLOCK_THREADS] * shrink
            total += a * a
            total += b * b
            total += c * c
            total += d * d
            i += 4 * BLOCK_THREADS
        while i < n_cols:
            total += (x[row, i] * shrink) * (x[row, i] * shrink)
            i += BLOCK_THREADS
        return total

    @device_function
    def write(out, half, row, i, value, weight, gain):
        if is_weighted:
            value *= weight[i]
        value *= gain
        out[row, i] = value
        if is_half:
            half[row, i] = types.float16(value)

    def rms_norm_kernel(x, weight, out, half, n_cols, eps, gain):
        scratch = cuda.shared.array(BLOCK_THREADS, float32)
        row = cuda.blockIdx.x
        wait_for_previous()

        total = block_sum(sum_of_squares(x, row, n_cols, float32(1.0)), scratch)
        shrink = shrink_of(total)
        if shrink != float32(1.0):  # values beyond 1e19: a mean of infinity would turn the row to zeros
            total = block_sum(sum_of_squares(x, row, n_cols, shrink), scratch)
        mean = total / float32(n_cols)
        factor = float32(1.0) / math.sqrt(mean + eps * shrink * shrink)

        i = cuda.threadIdx.x
        while i + 3 * BLOCK_THREADS < n_cols:
            a, b = x[row, i], x[row, i + BLOCK_THREADS]
            c, d = x[row, i + 2 * BLOCK_THREADS], x[row, i + 3 * BLOCK_THREADS]
            write(out, half, row, i, a * shrink * factor, weight, gain)
            write(out, half, row, i + BLOCK_THREADS, b * shrink * factor, weight, gain)
            write(out, half, row, i + 2 * BLOCK_THREADS, c * shrink * factor, weight, gain)
            write(out, half, row, i + 3 * BLOCK_THREADS, d * shrink * factor, weight, gain)
            i += 4 * BLOCK_THREADS
        while i < n_cols:
            write(out, half, row, i, x[row, i] * shrink * factor, weight, gain)
            i += BLOCK_THREADS

    signature = (_MATRIX, _VECTOR, _MATRIX, _HALVES, types.int64, types.float32, types.float32)
    return Kernel(rms_norm_kernel, signature, n_threads=BLOCK_THREADS, overlaps=True)


def rms_norm(x: Any, weight: Any, out: Any, *, half: Any = None, factor: float = 1.0, eps: float, stream: Any) -> None:
    """Normalise every row; rows are tokens, or heads of tokens (``weight`` as long as a row, or None: 1 throughout).

    x, out   float32 [n_rows, n_cols]     ``out`` may be ``x``
    half     float16 [n_rows, n_cols]     what is in ``out``, for a product of many rows; None: not wanted
    weight   float32 [n_cols] or None
    factor   of all weights
    Raises   KernelArgumentError if shapes or dtypes disagree.
    """
    check_array("x", x, np.float32, (None, None))
    if weight is not None:
        check_array("weight", weight, np.float32, (x.shape[1],))
    check_array("out", out, np.float32, x.shape)
    output = OutputType.F32
    if half is not None:
        check_array("half", half, np.float16, x.shape)
        output = OutputType.F16
    _check_eps(eps)
    # what is None the kernel never touches: any array does
    kernel = build_rms_norm_kernel(output) if weight is not None else build_rms_norm_kernel(output, False)
    arrays = (x, out if weight is None else weight, out, out if half is None else half)
    kernel.launch((x.shape[0],), stream, *arrays, x.shape[1], eps, factor)


def norm_first(x: Any, weight: Any, *, eps: float, stream: Any) -> None:
    """Normalise as many first elements of every row as ``weight`` has, in place; the others stay.

    x        float32 [n_rows, n_cols]
    weight   float32 [n]                 n up to n_cols
    Raises   KernelArgumentError if shapes or dtypes disagree.
    """
    check_array("x", x, np.float32, (None, None))
    check_array("weight", weight, np.float32, (None,))
    if weight.shape[0] > x.shape[1]:
        raise KernelArgumentError(f"norm_first: a weight of {weight.shape[0]} elements for rows of {x.shape[1]}")
    _check_eps(eps)
    build_rms_norm_kernel(OutputType.F32).launch((x.shape[0],), stream, x, weight, x, x, weight.shape[0], eps, 1.0)


def _check_eps(eps: float) -> None:
    if not eps > 0.0:
        raise KernelArgumentError(f"eps {eps}: needs a number above 0, which also guards rows of zeros")
