"""Gate and up projection of a feed-forward layer in one launch: ``act(gate x) * (up x)`` for one to eight vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from numba import cuda
from numba.cuda import int32, int64

from cuda_kernels.activation import Activation, build_gated_end
from cuda_kernels.intrinsics import FULL_WARP, store_float
from cuda_kernels.launch import Kernel, address_of, check_array, kernel_builder
from cuda_kernels.matvec import N_THREADS, N_WARPS, ProductKernel, check_vectors, fit_warp_rows
from cuda_kernels.matvec_stream import build_stream_matvec_kernel, can_stream, stream_grid
from cuda_kernels.matvec_team import team_kernel
from cuda_kernels.overlap import wait_for_previous
from cuda_kernels.row_loop import build_lane_steps, build_sum_index
from cuda_kernels.row_units import SIGNATURE, RowUnits, count_row_lanes, takes_float_activations
from cuda_kernels.vector_input import Norm, VectorInput
from cuda_kernels.weight_ring import gated_ring
from cuda_kernels.weights import MAX_PLANES, WeightGeometry
from kvs_core.errors import KernelArgumentError
from kvs_core.units import ceil_div


def count_warp_rows(weight_type: GGMLQuantizationType, n_vectors: int) -> int:
    """Rows of each matrix that a warp reduces together."""
    if count_row_lanes(weight_type) < 32:
        return 4 if n_vectors <= 4 else 2
    return 1 if n_vectors == 1 else 2


def count_half_blocks(weight_type: GGMLQuantizationType, n_vectors: int) -> int:
    """Blocks of a multiprocessor that registers leave room for, where halves of warps have rows; best on an H200."""
    if n_vectors == 1:
        return 5 if weight_type is GGMLQuantizationType.Q2_K else 3
    return 3 if weight_type is GGMLQuantizationType.Q3_K else 0


@kernel_builder
def build_gated_matvec_kernel(
    weight_type: GGMLQuantizationType, n_vectors: int, n_warp_rows: int, activation: Activation
) -> Kernel:
    """The kernel for one weight type and number of vectors. A warp reduces the same rows of both matrices.

    ``n_warp_rows`` changes no bit.
    """
    n_lanes = count_row_lanes(weight_type)
    is_halved = n_lanes < 32
    units = RowUnits(weight_type, n_warp_rows, n_vectors, n_lanes=n_lanes)
    load, accumulate, zeros, lane_total = units.load, units.add, units.zeros, units.total
    n_sums, lanes_per_total = n_warp_rows * n_vectors, units.lanes_per_total
    lane_steps, sum_index = build_lane_steps(units), build_sum_index(units)
    gated_value = build_gated_end(activation)

    def gated_matvec_kernel(planes, strides, outs, biases, rows, vectors, scales, n_cols):
        lane = int32(cuda.threadIdx.x) & int32(31)
        warp = int32(cuda.blockIdx.x) * int32(N_WARPS) + (int32(cuda.threadIdx.x) >> int32(5))
        own_row = warp * int32(n_warp_rows)
        out, n_rows = outs[0], rows[0]
        if own_row >= n_rows:
            return
        row = min(own_row, n_rows - int32(n_warp_rows))  # the last warp may repeat rows of the one before
        stride_0, stride_1, stride_2, stride_3 = strides
        gate_0 = planes[0] + int64(row) * stride_0
        gate_1 = planes[1] + int64(row) * stride_1
        gate_2 = planes[2] + int64(row) * stride_2
        gate_3 = planes[3] + int64(row) * stride_3
        up_0 = planes[4] + int64(row) * stride_0
        up_1 = planes[5] + int64(row) * stride_1
        up_2 = planes[6] + int64(row) * stride_2
        up_3 = planes[7] + int64(row) * stride_3

        n_steps, first_lane = lane_steps(n_cols, lane)
        gate = load(gate_0, gate_1, gate_2, gate_3, stride_0, stride_1, stride_2, stride_3, 0, first_lane)
        up = load(up_0, up_1, up_2, up_3, stride_0, stride_1, stride_2, stride_3, 0, first_lane)
        wait_for_previous()
        gate_sums, up_sums = zeros(), zeros()
        for step in range(n_steps):
            next_gate, next_up = gate, up
            if step + 1 < n_steps:
                next_gate = load(gate_0, gate_1, gate_2, gate_3, stride_0, stride_1, stride_2, stride_3, step + 1, lane)
                next_up = load(up_0, up_1, up_2, up_3, stride_0, stride_1, stride_2, stride_3, step + 1, lane)
            gate_sums = accumulate(gate_sums, gate, step, lane, vectors, scales, n_cols)
            up_sums = accumulate(up_sums, up, step, lane, vectors, scales, n_cols)
            gate, up = next_gate, next_up
        cuda.syncwarp(FULL_WARP)

        x = lane_total(gate_sums, lane)
        factor = lane_total(up_sums, lane)
        index = sum_index(lane)
        of_row = index // int32(n_vectors)
        if lane % int32(lanes_per_total) == 0 and index < int32(n_sums) and row + of_row >= own_row:
            store_float(out + (int64(index % int32(n_vectors)) * n_rows + row + of_row) * 4, gated_value(x, factor))

    min_blocks = 6 if n_vectors == 1 else 0
    if is_halved:
        min_blocks = count_half_blocks(weight_type, n_vectors)
    return Kernel(gated_matvec_kernel, SIGNATURE, n_threads=N_THREADS, min_blocks=min_blocks, overlaps=True)


def gated_kernel(
    weight_type: GGMLQuantizationType,
    n_vectors: int,
    n_rows: int,
    n_cols: int,
    activation: Activation,
    *,
    kind: VectorInput = VectorInput.QUANTS,
) -> ProductKernel:
    """What a launch runs."""
    ring = gated_ring(weight_type, n_vectors, n_cols, n_rows) if can_stream() else None
    if ring is not None:
        kernel = build_stream_matvec_kernel(ring, n_vectors, False, kind, activation)
        return ProductKernel(kernel=kernel, grid=stream_grid(ring, (n_rows,)), ring=ring)
    team = team_kernel(weight_type, n_vectors, (n_rows,), n_cols, activation=activation)
    if team is not None:
        return ProductKernel(kernel=team[0], grid=team[1], ring=None)
    n_warp_rows = fit_warp_rows(weight_type, count_warp_rows(weight_type, n_vectors), n_rows)
    kernel = build_gated_matvec_kernel(weight_type, n_vectors, n_warp_rows, activation)
    return ProductKernel(kernel=kernel, grid=(ceil_div(n_rows, N_WARPS * n_warp_rows),), ring=None)


def gated_takes_floats(weight_type: GGMLQuantizationType, n_vectors: int, n_rows: int, n_cols: int) -> bool:
    """Whether ``gated_matvec`` with quantised weights also takes an input that is not quantised yet."""
    ring = gated_ring(weight_type, n_vectors, n_cols, n_rows) if can_stream() else None
    return ring is not None and ring.vector_bytes > 0


def gated_matvec(
    gate: Any,
    up: Any,
    vectors: Any,
    scales: Any | None,
    out: Any,
    *,
    geometry: WeightGeometry,
    activation: Activation,
    stream: Any,
    kind: VectorInput = VectorInput.QUANTS,
    norm: Norm | None = None,
) -> None:
    """``out[v] = activation(gate @ vectors[v]) * (up @ vectors[v])``.

    gate, up   uint8   [geometry.n_bytes]             device layout (``weights``), both of this geometry
    vectors    int8    [n_vectors, n_cols]            with quantised weights: ``quantise``; n_vectors 1 to 8
               float32 [n_vectors, n_cols]            with float weights, or ``kind`` other than QUANTS
    scales     float32 [n_vectors, n_cols / 16, 2]    with int8: scale of the activations, sum of 16 of their quants
    out        float32 [n_vectors, n_rows]
    norm       with kind NORMED
    Raises     KernelArgumentError if shapes or dtypes disagree, or the type has no kernel.
    """
    n_vectors = check_vectors(geometry, vectors, scales, kind, norm)
    for name, matrix in (("gate", gate), ("up", up)):
        check_array(name, matrix, np.uint8, (geometry.n_bytes,))
    check_array("out", out, np.float32, (n_vectors, geometry.n_rows))
    is_float = takes_float_activations(geometry.weight_type) or kind is not VectorInput.QUANTS
    if is_float != (scales is None):
        raise KernelArgumentError(f"gated_matvec: scales go with quantised weights, not {geometry.weight_type.name}")
    gate_planes, strides = geometry.plane_arguments(address_of(gate))
    up_planes, _ = geometry.plane_arguments(address_of(up))
    found = gated_kernel(geometry.weight_type, n_vectors, geometry.n_rows, geometry.n_cols, activation, kind=kind)
    found.kernel.launch(
        found.grid,
        stream,
        [*gate_planes, *up_planes, *[0] * MAX_PLANES],
        strides,
        [address_of(out), 0, 0],
        [0, 0, 0],
        [geometry.n_rows, geometry.n_rows, 0],
        *found.vector_arguments(vectors, scales, norm, geometry.n_cols),
    )
