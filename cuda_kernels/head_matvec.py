"""Products with a matrix for each head: how latent attention goes to its cache and back.

The inputs of all heads are put head after head first (``take_heads``), as the products read them: quantised, or float32
for float weights, for one to eight tokens; float16 for the products of longer runs, which are cuBLASLt's.
"""

from __future__ import annotations

from enum import Enum
from math import gcd
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from numba import cuda
from numba.cuda import float32, int32, int64, types

from cuda_kernels.intrinsics import load_float, store_float, store_half
from cuda_kernels.launch import Kernel, address_of, check_array, kernel_builder
from cuda_kernels.matvec import MAX_VECTORS, N_THREADS, N_WARPS, count_min_blocks, count_warp_rows
from cuda_kernels.overlap import wait_for_previous
from cuda_kernels.quantise import QUANT_BLOCK, store_quant
from cuda_kernels.row_loop import build_row_sums, build_sum_index
from cuda_kernels.row_units import RowUnits, count_row_lanes, takes_float_activations
from cuda_kernels.unit_formats import GROUP_ELEMENTS
from cuda_kernels.weights import MAX_PLANES, WeightGeometry
from kvs_core.errors import KernelArgumentError
from kvs_core.units import ceil_div


class HeadInput(Enum):
    """What products with heads read."""

    QUANTS = "quants"
    FLOATS = "floats"
    HALVES = "halves"

    @classmethod
    def of(cls, weight_type: GGMLQuantizationType) -> HeadInput:
        """Of few tokens."""
        return cls.FLOATS if takes_float_activations(weight_type) else cls.QUANTS


_DTYPES = {HeadInput.QUANTS: np.int8, HeadInput.FLOATS: np.float32, HeadInput.HALVES: np.float16}


@kernel_builder
def build_take_heads_kernel(kind: HeadInput) -> Kernel:
    """A warp takes 32 elements of a head: to the inputs, or as they are behind the place of the products."""
    is_quantised, is_half = kind is HeadInput.QUANTS, kind is HeadInput.HALVES

    def take_heads_kernel(x, inputs, scales, out, n_tokens, n_head, width, n_in, n_out):
        lane = int32(cuda.threadIdx.x) & int32(31)
        task = int64(cuda.blockIdx.x) * N_WARPS + (int32(cuda.threadIdx.x) >> int32(5))
        n_blocks = (width + int32(31)) // int32(32)
        token_head = task // n_blocks
        element = int32(task % n_blocks) * int32(32) + lane
        wait_for_previous()
        if token_head >= int64(n_tokens) * n_head:
            return
        token, head = token_head // n_head, token_head % n_head
        value = float32(0.0)
        if element < width:
            value = load_float(x + (token_head * width + element) * 4)
        at = (head * n_tokens + token) * n_in + element
        if element < n_in:
            if is_quantised:
                store_quant(value, lane, inputs + at, scales + (at >> 4) * 8)
            elif is_half:
                store_half(inputs + at * 2, value)
            else:
                store_float(inputs + at * 4, value)
        elif element < width:
            store_float(out + (token_head * (n_out + width - n_in) + n_out + element - n_in) * 4, value)

    signature = [types.int64] * 4 + [types.int32] * 5
    return Kernel(take_heads_kernel, signature, n_threads=N_THREADS, overlaps=True)


def take_heads(x: Any, inputs: Any, scales: Any | None, out: Any, *, n_in: int, n_out: int, stream: Any) -> None:
    """The first ``n_in`` elements of every head to ``inputs``, the others behind the first ``n_out`` of ``out``.

    x        float32 [n_tokens, n_head, width]
    inputs   int8, float32 or float16 [n_head, n_tokens, n_in]
    scales   float32 [n_head, n_tokens, n_in / 16, 2]    with int8: as ``quantise`` gives them
    out      float32 [n_tokens, n_head, n_out + width - n_in]
    Raises   KernelArgumentError if shapes or dtypes disagree.
    """
    n_tokens, n_head, width = x.shape
    kind = next((kind for kind, dtype in _DTYPES.items() if inputs.dtype == dtype), None)
    if kind is None or width < n_in or (kind is HeadInput.QUANTS and n_in % QUANT_BLOCK):
        raise KernelArgumentError(f"take_heads: {n_in} of {width} elements as {inputs.dtype}")
    check_array("x", x, np.float32, (None, None, None))
    check_array("inputs", inputs, _DTYPES[kind], (n_head, n_tokens, n_in))
    check_array("out", out, np.float32, (n_tokens, n_head, n_out + width - n_in))
    if kind is HeadInput.QUANTS:
        check_array("scales", scales, np.float32, (n_head, n_tokens, n_in // GROUP_ELEMENTS, 2))
    grid = (ceil_div(n_tokens * n_head * ceil_div(width, 32), N_WARPS),)
    addresses = (address_of(x), address_of(inputs), 0 if scales is None else address_of(scales), address_of(out))
    build_take_heads_kernel(kind).launch(grid, stream, *addresses, n_tokens, n_head, width, n_in, n_out)


@kernel_builder
def build_head_matvec_kernel(
    weight_type: GGMLQuantizationType, n_vectors: int, n_warp_rows: int, min_blocks: int
) -> Kernel:
    """The kernel for one weight type and number of tokens: ``build_matvec_kernel`` with vectors of each head's own.

    ``n_warp_rows``: rows that a warp reduces together, all of one head; it changes no bit.
    """
    units = RowUnits(weight_type, n_warp_rows, n_vectors, n_lanes=count_row_lanes(weight_type))
    row_sums, lane_total, sum_index = build_row_sums(units), units.total, build_sum_index(units)
    n_sums, lanes_per_total = n_warp_rows * n_vectors, units.lanes_per_total
    takes_floats = takes_float_activations(weight_type)

    def head_matvec_kernel(planes, strides, vectors, scales, out, n_rows, n_head, n_out, out_width, n_cols):
        lane = int32(cuda.threadIdx.x) & int32(31)
        plane_0, plane_1, plane_2, plane_3 = planes
        stride_0, stride_1, stride_2, stride_3 = strides
        row = (int32(cuda.blockIdx.x) * int32(N_WARPS) + (int32(cuda.threadIdx.x) >> int32(5))) * int32(n_warp_rows)
        if row >= n_rows:
            return
        head = row // n_out
        plane_0 += int64(row) * stride_0
        plane_1 += int64(row) * stride_1
        plane_2 += int64(row) * stride_2
        plane_3 += int64(row) * stride_3
        first = int64(head) * n_vectors * n_cols
        vectors += first * 4 if takes_floats else first
        scales += (first >> 4) * 8

        total = lane_total(row_sums(plane_0, plane_1, plane_2, plane_3, strides, vectors, scales, n_cols, lane), lane)
        index = sum_index(lane)
        if lane % int32(lanes_per_total) == 0 and index < int32(n_sums):
            own_row, vector = row - head * n_out + index // int32(n_vectors), index % int32(n_vectors)
            store_float(out + ((int64(vector) * n_head + head) * out_width + own_row) * 4, total)

    many = types.UniTuple(types.int64, MAX_PLANES)
    signature = [many, many, *[types.int64] * 3, *[types.int32] * 5]
    return Kernel(head_matvec_kernel, signature, n_threads=N_THREADS, min_blocks=min_blocks, overlaps=True)


def head_matvec_launch(
    weight_type: GGMLQuantizationType, n_vectors: int, n_rows: int, n_out: int
) -> tuple[Kernel, tuple[int]]:
    """The kernel for a matrix of all heads, and its grid."""
    n_warp_rows = gcd(count_warp_rows(weight_type, n_vectors, n_rows), n_out)
    bound = count_min_blocks(weight_type, n_vectors, n_rows)
    min_blocks = bound if count_row_lanes(weight_type) == 32 else 0  # the addresses of heads take registers more
    kernel = build_head_matvec_kernel(weight_type, n_vectors, n_warp_rows, min_blocks)
    return kernel, (ceil_div(n_rows, N_WARPS * n_warp_rows),)


def head_matvec(
    matrix: Any, inputs: Any, scales: Any | None, out: Any, *, geometry: WeightGeometry, stream: Any
) -> None:
    """``out[token, head, :n_out] = matrix of the head @ inputs[head, token]``; what follows in ``out`` stays.

    matrix   uint8   [geometry.n_bytes]                  rows of all heads, head after head
    inputs   as ``take_heads`` leaves them, of one to eight tokens: int8 for quantised weights, else float32; scales too
    out      float32 [n_tokens, n_head, n_out or more]
    Raises   KernelArgumentError if shapes or dtypes disagree.
    """
    n_tokens, n_head, width = out.shape
    n_out, rest = divmod(geometry.n_rows, n_head)
    if rest or width < n_out or not 1 <= n_tokens <= MAX_VECTORS:
        raise KernelArgumentError(f"head_matvec: {geometry.n_rows} rows for {n_tokens} x {n_head} heads of {width}")
    kind = HeadInput.of(geometry.weight_type)
    check_array("matrix", matrix, np.uint8, (geometry.n_bytes,))
    check_array("inputs", inputs, _DTYPES[kind], (n_head, n_tokens, geometry.n_cols))
    if kind is HeadInput.QUANTS:
        check_array("scales", scales, np.float32, (n_head, n_tokens, geometry.n_cols // GROUP_ELEMENTS, 2))
    check_array("out", out, np.float32, (n_tokens, n_head, width))
    kernel, grid = head_matvec_launch(geometry.weight_type, n_tokens, geometry.n_rows, n_out)
    kernel.launch(
        grid,
        stream,
        *geometry.plane_arguments(address_of(matrix)),
        address_of(inputs),
        0 if scales is None else address_of(scales),
        address_of(out),
        geometry.n_rows,
        n_head,
        n_out,
        width,
        geometry.n_cols,
    )
