"""RMS norm, alone or after adding a branch to the residual stream. One block a row, one order for any row count."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import float32, types

from cuda_kernels.dequant import OutputType
from cuda_kernels.launch import Kernel, check_array, device_function, kernel_builder
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
def build_rms_norm_kernel(output: OutputType) -> Kernel:
    """``out = x / sqrt(mean(x^2) + eps) * weight``."""
    is_half = output is OutputType.F16
    result = types.float16 if is_half else types.float32

    def rms_norm_kernel(x, weight, out, eps):
        scratch = cuda.shared.array(BLOCK_THREADS, float32)
        row = cuda.blockIdx.x
        n_cols = x.shape[1]

        total = float32(0.0)
        for i in range(cuda.threadIdx.x, n_cols, BLOCK_THREADS):
            total += x[row, i] * x[row, i]
        total = block_sum(total, scratch)
        shrink = shrink_of(total)
        if shrink != float32(1.0):  # values beyond 1e19: a mean of infinity would turn the row to zeros
            total = float32(0.0)
            for i in range(cuda.threadIdx.x, n_cols, BLOCK_THREADS):
                total += (x[row, i] * shrink) * (x[row, i] * shrink)
            total = block_sum(total, scratch)
        mean = total / float32(n_cols)
        factor = float32(1.0) / math.sqrt(mean + eps * shrink * shrink)

        for i in range(cuda.threadIdx.x, n_cols, BLOCK_THREADS):
            out[row, i] = result(x[row, i] * shrink * factor * weight[i])

    return Kernel(
        rms_norm_kernel, (_MATRIX, _VECTOR, _HALVES if is_half else _MATRIX, types.float32), n_threads=BLOCK_THREADS
    )


@kernel_builder
def build_add_rms_norm_kernel() -> Kernel:
    """``residual += branch``, then the norm of the sum: what every sub-layer ends and the next one begins with."""

    def add_rms_norm_kernel(residual, branch, weight, out, eps):
        scratch = cuda.shared.array(BLOCK_THREADS, float32)
        row = cuda.blockIdx.x
        n_cols = residual.shape[1]

        total = float32(0.0)
        for i in range(cuda.threadIdx.x, n_cols, BLOCK_THREADS):
            value = residual[row, i] + branch[row, i]
            residual[row, i] = value
            total += value * value
        total = block_sum(total, scratch)
        shrink = shrink_of(total)
        if shrink != float32(1.0):  # values beyond 1e19: a mean of infinity would turn the row to zeros
            total = float32(0.0)
            for i in range(cuda.threadIdx.x, n_cols, BLOCK_THREADS):
                total += (residual[row, i] * shrink) * (residual[row, i] * shrink)
            total = block_sum(total, scratch)
        mean = total / float32(n_cols)
        factor = float32(1.0) / math.sqrt(mean + eps * shrink * shrink)

        for i in range(cuda.threadIdx.x, n_cols, BLOCK_THREADS):  # each thread reads what it wrote
            out[row, i] = residual[row, i] * shrink * factor * weight[i]

    signature = (_MATRIX, _MATRIX, _VECTOR, _MATRIX, types.float32)
    return Kernel(add_rms_norm_kernel, signature, n_threads=BLOCK_THREADS)


def rms_norm(x: Any, weight: Any, out: Any, *, eps: float, stream: Any) -> None:
    """Normalise every row; rows are tokens, or heads of tokens (``weight`` as long as a row).

    x        float32 [n_rows, n_cols]
    out      the same, and then it may be ``x``; or float16 of that shape, for a product of many rows
    weight   float32 [n_cols]
    Raises   KernelArgumentError if shapes or dtypes disagree.
    """
    check_array("x", x, np.float32, (None, None))
    check_array("weight", weight, np.float32, (x.shape[1],))
    output = OutputType.F16 if out.dtype == np.float16 else OutputType.F32
    check_array("out", out, output.value, x.shape)
    _check_eps(eps)
    build_rms_norm_kernel(output).launch((x.shape[0],), stream, x, weight, out, eps)


def add_rms_norm(residual: Any, branch: Any, weight: Any, out: Any, *, eps: float, stream: Any) -> None:
    """Add ``branch`` to ``residual`` in place and write the norm of the sum.

    residual, branch, out   float32 [n_rows, n_cols]
    weight                  float32 [n_cols]
    Raises                  KernelArgumentError if shapes or dtypes disagree.
    """
    check_array("residual", residual, np.float32, (None, None))
    check_array("branch", branch, np.float32, residual.shape)
    check_array("weight", weight, np.float32, (residual.shape[1],))
    check_array("out", out, np.float32, residual.shape)
    _check_eps(eps)
    build_add_rms_norm_kernel().launch((residual.shape[0],), stream, residual, branch, weight, out, eps)


def _check_eps(eps: float) -> None:
    if not eps > 0.0:
        raise KernelArgumentError(f"eps {eps}: needs a number above 0, which also guards rows of zeros")
