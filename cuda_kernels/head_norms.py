"""RMS norms of query, key and value heads of a decode step in one launch, in place. Other norms are in ``norm``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import float32, int32, int64, types

from cuda_kernels.intrinsics import FULL_WARP, fma
from cuda_kernels.launch import Kernel, address_of, check_array, device_function, kernel_builder
from cuda_kernels.overlap import wait_for_previous
from cuda_kernels.quantise import SHRINK, load_four, load_recent_four, store_four
from kvs_core.errors import KernelArgumentError
from kvs_core.units import ceil_div

MAX_ARRAYS = 3
N_WARPS = 4
_ADDRESSES, _COUNTS = types.UniTuple(types.int64, MAX_ARRAYS), types.UniTuple(types.int32, MAX_ARRAYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """``x`` float32 [n_rows, head_dim]; ``weight`` float32 [head_dim], or None: 1 throughout."""

    x: Any
    weight: Any


@device_function
def _sum_of_squares(x, n_quads, lane, shrink):
    """The same in every lane."""
    total = float32(0.0)
    quad = lane
    while quad < n_quads:
        a, b, c, d = load_recent_four(x + int64(quad) * 16)
        a, b, c, d = a * shrink, b * shrink, c * shrink, d * shrink
        total = fma(d, d, fma(c, c, fma(b, b, fma(a, a, total))))
        quad += int32(32)
    for step in (16, 8, 4, 2, 1):
        total += cuda.shfl_xor_sync(FULL_WARP, total, step)
    return total


@kernel_builder
def build_norm_heads_kernel() -> Kernel:
    """A warp takes one head of one token, so each token has the bits of a step of its own."""

    def norm_heads_kernel(arrays, rows, weights, n_quads, eps):
        lane = int32(cuda.threadIdx.x) & int32(31)
        row = int32(cuda.blockIdx.x) * int32(N_WARPS) + (int32(cuda.threadIdx.x) >> int32(5))
        x, weight, n_rows = arrays[0], weights[0], rows[0]
        if row >= n_rows:
            row -= n_rows
            x, weight, n_rows = arrays[1], weights[1], rows[1]
            if row >= n_rows:
                row -= n_rows
                x, weight, n_rows = arrays[2], weights[2], rows[2]
        if row >= n_rows:
            return
        x += int64(row) * n_quads * 16
        wait_for_previous()

        shrink = float32(1.0)
        total = _sum_of_squares(x, n_quads, lane, shrink)
        if total == float32(math.inf):  # values beyond 1e19: a mean of infinity would turn the head to zeros
            shrink = float32(SHRINK)
            total = _sum_of_squares(x, n_quads, lane, shrink)
        factor = float32(1.0) / math.sqrt(total / float32(4 * n_quads) + eps * shrink * shrink)

        quad = lane
        while quad < n_quads:
            at = int64(quad) * 16
            a, b, c, d = load_recent_four(x + at)
            a, b, c, d = a * shrink * factor, b * shrink * factor, c * shrink * factor, d * shrink * factor
            if weight != 0:
                wa, wb, wc, wd = load_four(weight + at)
                a, b, c, d = a * wa, b * wb, c * wc, d * wd
            store_four(x + at, a, b, c, d)
            quad += int32(32)

    signature = (_ADDRESSES, _COUNTS, _ADDRESSES, types.int32, types.float32)
    return Kernel(norm_heads_kernel, signature, n_threads=32 * N_WARPS, overlaps=True)


def norm_heads(heads: Sequence[Heads], *, eps: float, stream: Any) -> None:
    """``x = x / sqrt(mean(x^2) + eps) * weight`` for each row of up to three arrays of one head size, in place.

    Raises   KernelArgumentError if shapes or dtypes disagree.
    """
    if not 1 <= len(heads) <= MAX_ARRAYS:
        raise KernelArgumentError(f"norm_heads: {len(heads)} arrays, needs 1 to {MAX_ARRAYS}")
    head_dim = heads[0].x.shape[1]
    for i, one in enumerate(heads):
        check_array(f"heads {i}", one.x, np.float32, (None, head_dim))
        if one.weight is not None:
            check_array(f"weight {i}", one.weight, np.float32, (head_dim,))
    if head_dim % 4:
        raise KernelArgumentError(f"norm_heads: heads of {head_dim}, needs a multiple of 4")
    if not eps > 0.0:
        raise KernelArgumentError(f"eps {eps}: needs a number above 0, which also guards rows of zeros")
    n_missing = MAX_ARRAYS - len(heads)
    rows = [*(one.x.shape[0] for one in heads), *[0] * n_missing]
    build_norm_heads_kernel().launch(
        (ceil_div(sum(rows), N_WARPS),),
        stream,
        [*(address_of(one.x) for one in heads), *[0] * n_missing],
        rows,
        [*(0 if one.weight is None else address_of(one.weight) for one in heads), *[0] * n_missing],
        head_dim // 4,
        eps,
    )
