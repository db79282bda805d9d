"""How a warp goes over its rows of a weight matrix, in the kernels of products that read weights from global memory."""

from __future__ import annotations

from typing import Any

from numba import cuda
from numba.cuda import int32

from cuda_kernels.intrinsics import FULL_WARP
from cuda_kernels.launch import device_function
from cuda_kernels.overlap import wait_for_previous
from cuda_kernels.row_units import RowUnits


def build_lane_steps(units: RowUnits) -> Any:
    """Device function ``(n_cols, lane)``: a lane's units of a row, and the lane whose first unit it loads first.

    A lane without a unit loads one of another lane and drops it.
    """
    elements, is_halved = units.elements, units.n_lanes < 32

    @device_function
    def lane_steps(n_cols, lane):
        n_steps = (n_cols // int32(elements) - lane + int32(31)) // int32(32)
        first_lane = min(lane, n_cols // int32(elements) - int32(1))
        if is_halved:
            own = lane & int32(15)
            n_steps = (n_cols // int32(elements) - own + int32(15)) // int32(16)
            first_lane = lane - own + min(own, n_cols // int32(elements) - int32(1))
        return n_steps, first_lane

    return lane_steps


def build_sum_index(units: RowUnits) -> Any:
    """Device function ``(lane)``: which of the warp's sums, rows before vectors, ``units.total`` gives this lane."""
    lanes_per_total, number, is_halved = units.lanes_per_total, units.number, units.n_lanes < 32

    @device_function
    def sum_index(lane):
        index = lane // int32(lanes_per_total)
        if is_halved:
            index = number(index)
        return index

    return sum_index


def build_row_sums(units: RowUnits, *, waits: bool = True) -> Any:
    """Device function ``(plane_0 .. plane_3, strides, vectors, scales, n_cols, lane)``: all products of this lane.

    It loads the next unit before it uses one. ``waits``: for the kernels before, when the first weights are asked for.
    """
    load, accumulate, zeros, lane_steps = units.load, units.add, units.zeros, build_lane_steps(units)

    @device_function
    def row_sums(plane_0, plane_1, plane_2, plane_3, strides, vectors, scales, n_cols, lane):
        stride_0, stride_1, stride_2, stride_3 = strides
        n_steps, first_lane = lane_steps(n_cols, lane)
        loaded = load(plane_0, plane_1, plane_2, plane_3, stride_0, stride_1, stride_2, stride_3, 0, first_lane)
        if waits:
            wait_for_previous()
        sums = zeros()
        for step in range(n_steps):
            ahead = loaded
            if step + 1 < n_steps:
                ahead = load(plane_0, plane_1, plane_2, plane_3, stride_0, stride_1, stride_2, stride_3, step + 1, lane)
            sums = accumulate(sums, loaded, step, lane, vectors, scales, n_cols)
            loaded = ahead
        cuda.syncwarp(FULL_WARP)
        return sums

    return row_sums
