"""Products of matrices with one to eight vectors: 8-bit activations for quantised weights, float32 for float ones.

Up to three matrices of one type that share their input are one launch, and a result may be added to what is there
already. A warp reduces a few rows (``row_units``). Longer runs of tokens: ``dequant`` and cuBLASLt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from numba import cuda
from numba.cuda import int32, int64

from cuda_kernels.intrinsics import add, load_float, load_float_past_l1, store_float
from cuda_kernels.launch import Kernel, address_of, check_array, kernel_builder
from cuda_kernels.matvec_stream import build_stream_matvec_kernel, can_stream, stream_grid
from cuda_kernels.matvec_team import team_kernel
from cuda_kernels.row_loop import build_row_sums, build_sum_index
from cuda_kernels.row_units import SIGNATURE, RowUnits, count_row_lanes, takes_float_activations
from cuda_kernels.unit_formats import GROUP_ELEMENTS
from cuda_kernels.vector_input import Norm, VectorInput
from cuda_kernels.weight_ring import WeightRing, product_ring
from cuda_kernels.weights import MAX_MATRICES, MAX_PLANES, WeightGeometry
from kvs_core.errors import KernelArgumentError
from kvs_core.units import ceil_div

MAX_VECTORS = 8

N_WARPS = 4
N_THREADS = 32 * N_WARPS


FEW_ROWS = 5120
"""Rows that an H200 takes at once, two a warp, with registers for five blocks a multiprocessor."""

HALVES_WAVE_ROWS = 12288
"""Rows that an H200 takes at once where halves of warps have two rows each."""
FLOAT_WAVE_ROWS = 4096
"""Rows of float weights that an H200 takes at once, one a warp."""

_T = GGMLQuantizationType
_THREE_BLOCKS = (_T.Q4_K, _T.Q5_K, _T.Q6_K, _T.Q5_0, _T.Q5_1, _T.IQ4_NL, _T.IQ4_XS, _T.MXFP4, _T.Q2_K, _T.Q3_K)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One matrix of a launch.

    matrix   uint8   [geometry.n_bytes]        device layout (``weights``)
    bias     float32 [n_rows] or None          added to every result
    out      float32 [n_vectors, n_rows]
    """

    matrix: Any
    geometry: WeightGeometry
    out: Any
    bias: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductKernel:
    """What a launch runs; ``ring`` if it streams, with some parameters more."""

    kernel: Kernel
    grid: tuple[int]
    ring: WeightRing | None

    def vector_arguments(self, vectors: Any, scales: Any | None, norm: Norm | None, n_cols: int) -> list[Any]:
        """The last parameters of the kernel."""
        if norm is not None:
            return [address_of(vectors), address_of(norm.weight), n_cols, address_of(norm.out), norm.eps]
        arguments = [address_of(vectors), 0 if scales is None else address_of(scales), n_cols]
        return arguments if self.ring is None else [*arguments, 0, 0.0]


def count_warp_rows(weight_type: GGMLQuantizationType, n_vectors: int, n_rows: int) -> int:
    """Rows that a warp reduces together; they share the activations that it reads, which count for several vectors.

    Best of 1, 2 and 4 on an H200, 17408 x 5120, of 2 to 16 for halves of warps; one vector of float types, and of those
    halves, also 5120 x 17408 and 4096 x 4096. Loading two units ahead instead of one gained nothing there.
    """
    if count_row_lanes(weight_type) < 32:
        if n_vectors == 1:
            return 8 if n_rows > HALVES_WAVE_ROWS else 4
        return 6 if n_vectors <= 4 else 4
    if n_vectors > 1:
        return 4
    if not takes_float_activations(weight_type) or FLOAT_WAVE_ROWS < n_rows <= FEW_ROWS:
        return 2
    if n_rows <= FLOAT_WAVE_ROWS:
        return 1
    return 2 if weight_type is _T.F32 else 4


def fit_warp_rows(weight_type: GGMLQuantizationType, n_warp_rows: int, n_rows: int) -> int:
    """The same for a matrix of ``n_rows``; even, or 1, where halves of a warp share the rows."""
    if n_warp_rows <= n_rows or count_row_lanes(weight_type) == 32:
        return min(n_warp_rows, n_rows)
    return max(1, n_rows // 2 * 2)


def count_min_blocks(weight_type: GGMLQuantizationType, n_vectors: int, n_rows: int) -> int:
    """Blocks of a multiprocessor that the registers leave room for, 0: as many as it comes to; no bit depends on it.

    On an H200. One vector: six blocks take 5 to 10 % less time where there are rows for them; a launch of few rows runs
    all at once anyway and does better with registers for loads ahead (Q4_K, 4096 x 14336: 12 %). Four vectors of types
    of five and six bits: 12 to 22 % less time with three blocks, of types with levels 15 %; of Q4_0 and Q4_1 no
    difference. Q2_K and Q3_K: 17408 rows are 4.1 blocks a multiprocessor, so five take them in one wave.
    """
    if takes_float_activations(weight_type):
        return 0
    if n_vectors > 1:
        return 3 if n_vectors <= 4 and weight_type in _THREE_BLOCKS else 0
    if count_row_lanes(weight_type) < 32:
        return 5 if n_rows > HALVES_WAVE_ROWS else 0
    if weight_type is _T.Q8_0:
        return 9
    return 6 if n_rows > FEW_ROWS else 0


@kernel_builder
def build_matvec_kernel(
    weight_type: GGMLQuantizationType, n_vectors: int, n_warp_rows: int, is_added: bool, min_blocks: int
) -> Kernel:
    """The kernel for one weight type and number of vectors. A lane loads the next unit before it uses one.

    ``n_warp_rows``: rows that a warp reduces together; it changes no bit. ``is_added``: to what ``out`` holds.
    """
    units = RowUnits(weight_type, n_warp_rows, n_vectors, n_lanes=count_row_lanes(weight_type))
    row_sums, lane_total, sum_index = build_row_sums(units), units.total, build_sum_index(units)
    n_sums, lanes_per_total = n_warp_rows * n_vectors, units.lanes_per_total
    block_rows = N_WARPS * n_warp_rows

    def matvec_kernel(planes, strides, outs, biases, rows, vectors, scales, n_cols):
        lane = int32(cuda.threadIdx.x) & int32(31)
        plane_0, plane_1, plane_2, plane_3 = planes[0], planes[1], planes[2], planes[3]
        stride_0, stride_1, stride_2, stride_3 = strides
        out, bias, n_rows = outs[0], biases[0], rows[0]
        block = int32(cuda.blockIdx.x)
        n_blocks = (n_rows + int32(block_rows - 1)) // int32(block_rows)
        if block >= n_blocks:
            block -= n_blocks
            plane_0, plane_1, plane_2, plane_3 = planes[4], planes[5], planes[6], planes[7]
            out, bias, n_rows = outs[1], biases[1], rows[1]
            n_blocks = (n_rows + int32(block_rows - 1)) // int32(block_rows)
            if block >= n_blocks:
                block -= n_blocks
                plane_0, plane_1, plane_2, plane_3 = planes[8], planes[9], planes[10], planes[11]
                out, bias, n_rows = outs[2], biases[2], rows[2]
        own_row = (block * int32(N_WARPS) + (int32(cuda.threadIdx.x) >> int32(5))) * int32(n_warp_rows)
        if own_row >= n_rows:
            return
        row = min(own_row, n_rows - int32(n_warp_rows))  # the last warp may repeat rows of the one before
        plane_0 += int64(row) * stride_0
        plane_1 += int64(row) * stride_1
        plane_2 += int64(row) * stride_2
        plane_3 += int64(row) * stride_3

        total = lane_total(row_sums(plane_0, plane_1, plane_2, plane_3, strides, vectors, scales, n_cols, lane), lane)
        index = sum_index(lane)
        of_row = index // int32(n_vectors)
        if lane % int32(lanes_per_total) == 0 and index < int32(n_sums) and row + of_row >= own_row:
            vector = index % int32(n_vectors)
            if bias != 0:
                total = add(total, load_float(bias + int64(row + of_row) * 4))
            at = out + (int64(vector) * n_rows + row + of_row) * 4
            if is_added:
                total = add(load_float_past_l1(at), total)
            store_float(at, total)

    return Kernel(matvec_kernel, SIGNATURE, n_threads=N_THREADS, min_blocks=min_blocks, overlaps=True)


def product_kernel(
    weight_type: GGMLQuantizationType,
    n_vectors: int,
    rows: Sequence[int],
    n_cols: int,
    *,
    is_added: bool,
    kind: VectorInput = VectorInput.QUANTS,
) -> ProductKernel:
    """What a launch for matrices of these rows runs."""
    ring = product_ring(weight_type, n_vectors, n_cols, min(rows)) if can_stream() else None
    if ring is not None:
        kernel = build_stream_matvec_kernel(ring, n_vectors, is_added, kind)
        return ProductKernel(kernel=kernel, grid=stream_grid(ring, rows), ring=ring)
    team = team_kernel(weight_type, n_vectors, rows, n_cols, is_added=is_added)
    if team is not None:
        return ProductKernel(kernel=team[0], grid=team[1], ring=None)
    n_warp_rows = fit_warp_rows(weight_type, count_warp_rows(weight_type, n_vectors, sum(rows)), min(rows))
    min_blocks = count_min_blocks(weight_type, n_vectors, sum(rows))
    kernel = build_matvec_kernel(weight_type, n_vectors, n_warp_rows, is_added, min_blocks)
    grid = (sum(ceil_div(n_rows, N_WARPS * n_warp_rows) for n_rows in rows),)
    return ProductKernel(kernel=kernel, grid=grid, ring=None)


def takes_floats(weight_type: GGMLQuantizationType, n_vectors: int, rows: Sequence[int], n_cols: int) -> bool:
    """Whether ``matvec`` with quantised weights also takes an input that is not quantised yet."""
    ring = product_ring(weight_type, n_vectors, n_cols, min(rows)) if can_stream() else None
    return ring is not None and ring.vector_bytes > 0


def matvec(
    products: Sequence[Product],
    vectors: Any,
    scales: Any | None,
    *,
    is_added: bool,
    stream: Any,
    kind: VectorInput = VectorInput.QUANTS,
    norm: Norm | None = None,
) -> None:
    """``out[v] = matrix @ vectors[v] + bias`` for one to three matrices of one type and row length.

    vectors   int8    [n_vectors, n_cols]            with quantised weights: ``quantise``; n_vectors 1 to 8
              float32 [n_vectors, n_cols]            with float weights, or a ``kind`` other than QUANTS
    scales    float32 [n_vectors, n_cols / 16, 2]    with int8: scale of the activations, sum of 16 of their quants
    is_added  add the product to what ``out`` holds
    kind      what ``vectors`` are, with quantised weights: floats only where ``takes_floats``
    norm      with kind NORMED
    Raises    KernelArgumentError if shapes or dtypes disagree, or the type has no kernel.
    """
    first = products[0].geometry
    n_vectors = check_vectors(first, vectors, scales, kind, norm)
    if not 1 <= len(products) <= MAX_MATRICES:
        raise KernelArgumentError(f"matvec: {len(products)} matrices, needs 1 to {MAX_MATRICES}")
    planes: list[int] = []
    strides: list[int] = []
    for product in products:
        geometry = product.geometry
        if (geometry.weight_type, geometry.n_cols) != (first.weight_type, first.n_cols):
            raise KernelArgumentError(
                f"matvec: matrices of {first.weight_type.name} x {first.n_cols} and {geometry.weight_type.name} x "
                f"{geometry.n_cols} in one launch"
            )
        check_array("matrix", product.matrix, np.uint8, (geometry.n_bytes,))
        check_array("out", product.out, np.float32, (n_vectors, geometry.n_rows))
        if product.bias is not None:
            check_array("bias", product.bias, np.float32, (geometry.n_rows,))
        own_planes, strides = geometry.plane_arguments(address_of(product.matrix))
        planes += own_planes
    rows = [product.geometry.n_rows for product in products]
    found = product_kernel(first.weight_type, n_vectors, rows, first.n_cols, is_added=is_added, kind=kind)
    n_unused = MAX_MATRICES - len(products)
    found.kernel.launch(
        found.grid,
        stream,
        [*planes, *[0] * (n_unused * MAX_PLANES)],
        strides,
        [*(address_of(product.out) for product in products), *[0] * n_unused],
        [*(0 if product.bias is None else address_of(product.bias) for product in products), *[0] * n_unused],
        [*rows, *[0] * n_unused],
        *found.vector_arguments(vectors, scales, norm, first.n_cols),
    )


def check_vectors(
    geometry: WeightGeometry, vectors: Any, scales: Any | None, kind: VectorInput, norm: Norm | None
) -> int:
    """Raise KernelArgumentError unless the vectors fit the weights; their number."""
    geometry.check()
    is_quantised = not takes_float_activations(geometry.weight_type) and kind is VectorInput.QUANTS
    n_vectors = int(vectors.shape[0])
    check_array("vectors", vectors, np.int8 if is_quantised else np.float32, (None, geometry.n_cols))
    if is_quantised:
        check_array("scales", scales, np.float32, (n_vectors, geometry.n_cols // GROUP_ELEMENTS, 2))
    if (norm is not None) != (kind is VectorInput.NORMED):
        raise KernelArgumentError(f"matvec: input {kind.value} {'without' if norm is None else 'with'} a norm")
    if norm is not None:
        check_array("norm.weight", norm.weight, np.float32, (geometry.n_cols,))
        check_array("norm.out", norm.out, np.float32, (n_vectors, geometry.n_cols))
    if not 1 <= n_vectors <= MAX_VECTORS:
        raise KernelArgumentError(f"matvec: {n_vectors} vectors, needs 1 to {MAX_VECTORS}")
    return n_vectors
