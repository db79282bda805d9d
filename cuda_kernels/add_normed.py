"""What follows products in blocks with a norm at their end: RMS norms of their rows, added to the residual."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import float32, int32, int64, types

from cuda_kernels.intrinsics import fma, load_float, multiply
from cuda_kernels.launch import Kernel, address_of, check_array, device_function, kernel_builder
from cuda_kernels.overlap import wait_for_previous
from cuda_kernels.quantise import NORM_THREADS, SHRINK, load_four, load_recent_four, norm_sum, store_four
from kvs_core.errors import KernelArgumentError

_N_WARPS = NORM_THREADS // 32


@device_function
def _sum_of_squares(row_at, n_quads, tid, shrink):
    total = float32(0.0)
    quad = tid
    while quad < n_quads:
        a, b, c, d = load_recent_four(row_at + int64(quad) * 16)
        a, b, c, d = a * shrink, b * shrink, c * shrink, d * shrink
        total = fma(d, d, fma(c, c, fma(b, b, fma(a, a, total))))
        quad += int32(NORM_THREADS)
    return total


@device_function
def _factors_of(row_at, n_quads, tid, eps, partial):
    """What to multiply a row by, one after the other: 1 or an exact power of two, and what makes its mean square 1."""
    shrink = float32(1.0)
    total = norm_sum(_sum_of_squares(row_at, n_quads, tid, shrink), partial, tid)
    if total == float32(math.inf):  # values beyond 1e19: a mean of infinity would turn the row to zeros
        shrink = float32(SHRINK)
        total = norm_sum(_sum_of_squares(row_at, n_quads, tid, shrink), partial, tid)
    return shrink, float32(1.0) / math.sqrt(total / float32(4 * n_quads) + eps * shrink * shrink)


@kernel_builder
def build_add_normed_kernel(is_scaled: bool) -> Kernel:
    """A block takes one row, a thread four elements at a time; ``is_scaled``: the sum is multiplied by ``scale``."""

    def add_normed_kernel(x, weight, residual, scale, n_quads, eps):
        partial = cuda.shared.array(_N_WARPS, float32)
        tid = int32(cuda.threadIdx.x)
        row_at = int64(cuda.blockIdx.x) * n_quads * 16
        x_at, residual_at = x + row_at, residual + row_at
        wa, wb, wc, wd = load_four(weight + int64(min(tid, n_quads - int32(1))) * 16)
        last = float32(1.0)
        if is_scaled:
            last = load_float(scale)
        wait_for_previous()
        shrink, factor = _factors_of(x_at, n_quads, tid, eps, partial)

        quad = tid
        while quad < n_quads:
            at = int64(quad) * 16
            a, b, c, d = load_recent_four(x_at + at)
            ra, rb, rc, rd = load_recent_four(residual_at + at)
            if quad != tid:
                wa, wb, wc, wd = load_four(weight + at)
            a, b, c, d = a * shrink * factor, b * shrink * factor, c * shrink * factor, d * shrink * factor
            ra, rb, rc, rd = fma(a, wa, ra), fma(b, wb, rb), fma(c, wc, rc), fma(d, wd, rd)
            if is_scaled:
                ra, rb, rc, rd = multiply(ra, last), multiply(rb, last), multiply(rc, last), multiply(rd, last)
            store_four(residual_at + at, ra, rb, rc, rd)
            quad += int32(NORM_THREADS)

    signature = [types.int64] * 4 + [types.int32, types.float32]
    return Kernel(add_normed_kernel, signature, n_threads=NORM_THREADS, overlaps=True)


@kernel_builder
def build_add_normed_pair_kernel(is_scaled: bool) -> Kernel:
    """As ``add_normed`` of the sum of two normalised rows, which takes the place of the first of them."""

    def add_normed_pair_kernel(x, y, x_weight, y_weight, weight, residual, scale, n_quads, eps):
        partial = cuda.shared.array(_N_WARPS, float32)
        tid = int32(cuda.threadIdx.x)
        row_at = int64(cuda.blockIdx.x) * n_quads * 16
        x_at, y_at, residual_at = x + row_at, y + row_at, residual + row_at
        last = float32(1.0)
        if is_scaled:
            last = load_float(scale)
        wait_for_previous()
        x_shrink, x_factor = _factors_of(x_at, n_quads, tid, eps, partial)
        y_shrink, y_factor = _factors_of(y_at, n_quads, tid, eps, partial)

        quad = tid
        while quad < n_quads:
            at = int64(quad) * 16
            a, b, c, d = load_recent_four(x_at + at)
            wa, wb, wc, wd = load_four(x_weight + at)
            a, b = multiply(a * x_shrink * x_factor, wa), multiply(b * x_shrink * x_factor, wb)
            c, d = multiply(c * x_shrink * x_factor, wc), multiply(d * x_shrink * x_factor, wd)
            ya, yb, yc, yd = load_recent_four(y_at + at)
            wa, wb, wc, wd = load_four(y_weight + at)
            a, b = fma(ya * y_shrink * y_factor, wa, a), fma(yb * y_shrink * y_factor, wb, b)
            c, d = fma(yc * y_shrink * y_factor, wc, c), fma(yd * y_shrink * y_factor, wd, d)
            store_four(x_at + at, a, b, c, d)  # the same thread reads it again
            quad += int32(NORM_THREADS)
        shrink, factor = _factors_of(x_at, n_quads, tid, eps, partial)

        quad = tid
        while quad < n_quads:
            at = int64(quad) * 16
            a, b, c, d = load_recent_four(x_at + at)
            ra, rb, rc, rd = load_recent_four(residual_at + at)
            wa, wb, wc, wd = load_four(weight + at)
            ra, rb = fma(a * shrink * factor, wa, ra), fma(b * shrink * factor, wb, rb)
            rc, rd = fma(c * shrink * factor, wc, rc), fma(d * shrink * factor, wd, rd)
            if is_scaled:
                ra, rb, rc, rd = multiply(ra, last), multiply(rb, last), multiply(rc, last), multiply(rd, last)
            store_four(residual_at + at, ra, rb, rc, rd)
            quad += int32(NORM_THREADS)

    signature = [types.int64] * 7 + [types.int32, types.float32]
    return Kernel(add_normed_pair_kernel, signature, n_threads=NORM_THREADS, overlaps=True)


def add_normed(x: Any, weight: Any, residual: Any, *, scale: Any = None, eps: float, stream: Any) -> None:
    """``residual = (residual + x / sqrt(mean(x^2) + eps) * weight) * scale`` for each row, in place.

    x, residual   float32 [n_rows, n_cols]     n_cols a multiple of 4
    weight        float32 [n_cols]
    scale         float32 [1], or None for 1
    Raises        KernelArgumentError if shapes or dtypes disagree.
    """
    _check("add_normed", [x, residual], [weight], scale, eps)
    arrays = [address_of(array) for array in (x, weight, residual)]
    scale_at = 0 if scale is None else address_of(scale)
    build_add_normed_kernel(scale is not None).launch((x.shape[0],), stream, *arrays, scale_at, x.shape[1] // 4, eps)


def add_normed_pair(
    x: Any, y: Any, weights: Sequence[Any], residual: Any, *, scale: Any = None, eps: float, stream: Any
) -> None:
    """``add_normed`` of what the norms of ``x`` and ``y`` add up to, which takes the place of ``x``.

    x, y, residual   float32 [n_rows, n_cols]     n_cols a multiple of 4
    weights          float32 [n_cols] each: of the norm of x, of y, of the sum
    scale            float32 [1], or None for 1
    Raises           KernelArgumentError if shapes or dtypes disagree.
    """
    _check("add_normed_pair", [x, y, residual], weights, scale, eps)
    arrays = [address_of(array) for array in (x, y, *weights, residual)]
    scale_at = 0 if scale is None else address_of(scale)
    kernel = build_add_normed_pair_kernel(scale is not None)
    kernel.launch((x.shape[0],), stream, *arrays, scale_at, x.shape[1] // 4, eps)


def _check(name: str, rows: Sequence[Any], weights: Sequence[Any], scale: Any, eps: float) -> None:
    check_array("x", rows[0], np.float32, (None, None))
    for array in rows[1:]:
        check_array("rows", array, np.float32, rows[0].shape)
    for weight in weights:
        check_array("weight", weight, np.float32, (rows[0].shape[1],))
    if scale is not None:
        check_array("scale", scale, np.float32, (1,))
    if rows[0].shape[1] % 4:
        raise KernelArgumentError(f"{name}: {rows[0].shape[1]} columns, needs a multiple of 4")
    if not eps > 0.0:
        raise KernelArgumentError(f"eps {eps}: needs a number above 0, which also guards rows of zeros")
