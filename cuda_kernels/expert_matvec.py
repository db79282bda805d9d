"""Products of experts with the few pairs of a decode step; only the rows of experts that some token takes are read.

Ids come from device memory, so a recorded step follows whatever the router says. Every pair is reduced by itself as
``matvec`` reduces one vector: a step of several tokens gives each the bits of a step of its own. Launches, and which
form of the kernels they take, are in ``expert_decode``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from numba import cuda
from numba.cuda import float32, int32, int64, types

from cuda_kernels.activation import Activation, build_gated_value
from cuda_kernels.emit import Emitter, Value, emitted
from cuda_kernels.intrinsics import FULL_WARP, add, fma, load_float, load_float_past_l1, store_float
from cuda_kernels.launch import Kernel, address_of, check_array, kernel_builder
from cuda_kernels.overlap import let_next_start, wait_for_all_before, wait_for_previous
from cuda_kernels.row_loop import build_lane_steps, build_row_sums
from cuda_kernels.row_units import SCALE_BYTES, RowUnits, takes_float_activations, unit_elements
from cuda_kernels.unit_formats import GROUP_ELEMENTS
from cuda_kernels.weights import MAX_PLANES, WeightGeometry
from kvs_core.errors import KernelArgumentError
from kvs_core.units import ceil_div

N_WARPS = 4
MAX_USED = 32
GATED_WARP_ROWS = 1
"""Rows of gate and of up that a warp reduces together; no bit depends on it."""
GATED_MIN_BLOCKS = 6
"""Blocks of a multiprocessor that registers leave room for."""
WARPS_AT_ONCE, MAX_PARTS = 3168, 8
"""Warps that an H200 holds of these kernels; where there are more rows, a warp goes on to the next ones, which are on
their way by then. No bit depends on it."""

_PLANES, _STRIDES = types.UniTuple(types.int64, 2 * MAX_PLANES), types.UniTuple(types.int64, MAX_PLANES)
_I32, _I64 = types.int32, types.int64
GATED_SIGNATURE = (
    *(_PLANES, _STRIDES),  # planes of gate and up, row strides, which both share
    *(_I32, _I32),  # rows from one expert to the next, rows of one
    *(_I64, _I64, _I64, _I64),  # out, biases of gate and up or 0, ids
    *(_I64, _I64, _I32, _I32, _I32),  # vectors, scales, columns, pairs of a vector, parts
)
SUM_SIGNATURE = (
    *(_STRIDES, _STRIDES),  # planes, row strides
    *(_I32, _I64, _I64, _I64, _I64),  # rows of an expert, out, bias or 0, ids, weights
    *(_I64, _I64, _I32),  # vectors, scales, columns
)


def build_prefetch_rows(n_rows: int) -> Any:
    """Intrinsic ``prefetch(gate, up, stride, lane)``: the first plane of some rows of both on its way to the L2 cache.

    A row of an expert is a few steps long; without this its loads wait for memory once a step.
    """

    def prefetch(emit: Emitter, gate: Value, up: Value, stride: Value, lane: Value) -> None:
        offset = emit.widen(emit.shift_left(lane, 7))
        for row in (gate, up):
            for _ in range(n_rows):
                text = "{.reg .pred p; setp.lt.s64 p,$1,$2; @p prefetch.global.L2 [$0];}"
                emit.asm(text, "", "lll", [emit.add(row, offset), offset, stride], ordered=True)
                row = emit.add(row, stride)

    return emitted(types.void, *[types.int64] * 3, types.int32)(prefetch)


def count_parts(n_warps: int) -> int:
    """Groups of rows that a warp takes one after another, for this many groups in all."""
    return min(MAX_PARTS, ceil_div(n_warps, WARPS_AT_ONCE))


@emitted(types.int32, types.int64)
def load_recent_int(emit: Emitter, address: Value) -> Value:
    """An int32 that the kernel before may have written."""
    return emit.load_recent(address, 0, 1)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMatrix:
    """Matrices of all experts, one after another.

    matrix     uint8   [geometry.n_bytes]        device layout of ``n_expert`` times as many rows (``weights``)
    bias       float32 [n_expert, rows] or None
    """

    matrix: Any
    geometry: WeightGeometry
    n_expert: int
    bias: Any = None

    @property
    def n_rows(self) -> int:
        """Rows of one expert."""
        return self.geometry.n_rows // self.n_expert

    def check(self, name: str) -> None:
        self.geometry.check()
        check_array(name, self.matrix, np.uint8, (self.geometry.n_bytes,))
        if self.geometry.n_rows % self.n_expert:
            raise KernelArgumentError(f"{name}: {self.geometry.n_rows} rows of {self.n_expert} experts")
        if self.bias is not None:
            check_array(f"{name} bias", self.bias, np.float32, (self.n_expert, self.n_rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedPair:
    """Gate and up of every expert: two tensors, or one whose experts are rows of the gate, then rows of up."""

    gate: ExpertMatrix
    up: ExpertMatrix | None

    @property
    def n_rows(self) -> int:
        """Gated values of one expert."""
        return self.gate.n_rows if self.up is not None else self.gate.n_rows // 2

    @property
    def has_bias(self) -> bool:
        return self.gate.bias is not None

    def check(self) -> None:
        self.gate.check("gate")
        if self.up is None:
            if self.gate.n_rows % 2 or self.gate.bias is not None:
                raise KernelArgumentError(f"gate and up in one: {self.gate.n_rows} rows, needs an even number, no bias")
            return
        self.up.check("up")
        if self.up.geometry != self.gate.geometry or (self.up.bias is None) != (self.gate.bias is None):
            raise KernelArgumentError(f"gate and up differ: {self.gate.geometry} and {self.up.geometry}")

    def planes(self) -> tuple[list[int], list[int]]:
        """Addresses of the planes of gate and of up, and the row strides that both share."""
        planes, strides = self.gate.geometry.plane_arguments(address_of(self.gate.matrix))
        if self.up is None:
            halves = zip(planes, strides, strict=True)
            return [*planes, *(plane + self.n_rows * stride for plane, stride in halves)], strides
        return [*planes, *self.up.geometry.plane_arguments(address_of(self.up.matrix))[0]], strides

    def biases(self) -> list[int]:
        return [0 if one is None or one.bias is None else address_of(one.bias) for one in (self.gate, self.up)]


def _count_min_blocks(weight_type: GGMLQuantizationType, n_warp_rows: int) -> int:
    """Blocks of a multiprocessor that registers leave room for, 0: as many as it comes to; no bit depends on it."""
    if n_warp_rows > 1 or unit_elements(weight_type) > 32:
        return 0
    return 3 if weight_type is GGMLQuantizationType.Q6_K else GATED_MIN_BLOCKS


@kernel_builder
def build_expert_gated_kernel(
    weight_type: GGMLQuantizationType, activation: Activation, n_warp_rows: int, has_bias: bool
) -> Kernel:
    """The x of the grid is the pair, so that pairs of one expert read its rows at about the same time.

    Rows of gate and up are reduced together and share the activations that a lane reads.
    """
    one, both = RowUnits(weight_type, n_warp_rows, 1), RowUnits(weight_type, 2 * n_warp_rows, 1)
    load, accumulate, zeros, lane_total = one.load, both.add, both.zeros, both.total
    lanes_per_total, lane_steps = both.lanes_per_total, build_lane_steps(one)
    element_bytes = 4 if takes_float_activations(weight_type) else 1
    gated_value, prefetch = build_gated_value(activation), build_prefetch_rows(n_warp_rows)

    def expert_gated_kernel(
        planes, strides, expert_rows, n_rows, out, gate_bias, up_bias, ids, vectors, scales, n_cols, n_used, n_parts
    ):
        lane = int32(cuda.threadIdx.x) & int32(31)
        pair = int32(cuda.blockIdx.x)
        warp = int32(cuda.blockIdx.y) * int32(N_WARPS) + (int32(cuda.threadIdx.x) >> int32(5))
        own_row = warp * n_parts * int32(n_warp_rows)
        if own_row >= n_rows:
            return
        vector = pair // n_used
        vectors += int64(vector) * n_cols * element_bytes
        scales += int64(vector) * (n_cols // int32(GROUP_ELEMENTS)) * SCALE_BYTES
        stride_0, stride_1, stride_2, stride_3 = strides
        n_steps, first_lane = lane_steps(n_cols, lane)
        wait_for_all_before()
        let_next_start()
        expert = int64(load_recent_int(ids + int64(pair) * 4))
        end_row = min(own_row + n_parts * int32(n_warp_rows), n_rows)
        first = (expert * expert_rows + own_row) * stride_0
        prefetch(planes[0] + first, planes[4] + first, stride_0, lane)
        while own_row < end_row:
            row = min(own_row, n_rows - int32(n_warp_rows))  # the last warp may repeat rows of the one before
            source = expert * expert_rows + row
            gate_0, gate_1 = planes[0] + source * stride_0, planes[1] + source * stride_1
            gate_2, gate_3 = planes[2] + source * stride_2, planes[3] + source * stride_3
            up_0, up_1 = planes[4] + source * stride_0, planes[5] + source * stride_1
            up_2, up_3 = planes[6] + source * stride_2, planes[7] + source * stride_3
            gate = load(gate_0, gate_1, gate_2, gate_3, stride_0, stride_1, stride_2, stride_3, 0, first_lane)
            up = load(up_0, up_1, up_2, up_3, stride_0, stride_1, stride_2, stride_3, 0, first_lane)
            if own_row + int32(n_warp_rows) < end_row:
                further = int64(n_warp_rows) * stride_0
                prefetch(gate_0 + further, up_0 + further, stride_0, lane)
            sums = zeros()
            for step in range(n_steps):
                loaded = gate + up
                if step + 1 < n_steps:
                    gate = load(gate_0, gate_1, gate_2, gate_3, stride_0, stride_1, stride_2, stride_3, step + 1, lane)
                    up = load(up_0, up_1, up_2, up_3, stride_0, stride_1, stride_2, stride_3, step + 1, lane)
                sums = accumulate(sums, loaded, step, lane, vectors, scales, n_cols)
            cuda.syncwarp(FULL_WARP)

            x = lane_total(sums, lane)
            factor = cuda.shfl_xor_sync(FULL_WARP, x, 16)  # the upper lanes have the sums of the upper rows
            of_row = lane // int32(lanes_per_total)
            if lane % int32(lanes_per_total) == 0 and of_row < int32(n_warp_rows) and row + of_row >= own_row:
                if has_bias:
                    at = (expert * n_rows + row + of_row) * 4
                    x = add(x, load_float(gate_bias + at))
                    factor = add(factor, load_float(up_bias + at))
                store_float(out + (int64(pair) * n_rows + row + of_row) * 4, gated_value(x, factor))
            own_row += int32(n_warp_rows)

    return Kernel(
        expert_gated_kernel,
        GATED_SIGNATURE,
        n_threads=32 * N_WARPS,
        min_blocks=_count_min_blocks(weight_type, n_warp_rows),
        overlaps=True,
    )


def count_sum_rows(weight_type: GGMLQuantizationType) -> int:
    """Rows that a warp of ``expert_sum`` reduces together; no bit depends on it.

    Best of 1, 2 and 4 on an H200 for Q8_0 (704 columns), Q6_K (768) and MXFP4 (2880).
    """
    return 4 if weight_type is GGMLQuantizationType.Q8_0 else 2


@kernel_builder
def build_expert_sum_kernel(weight_type: GGMLQuantizationType, n_used: int, n_warp_rows: int) -> Kernel:
    """A block takes a few rows of one token, a warp of it one slot; then the slots are added in order."""
    units = RowUnits(weight_type, n_warp_rows, 1)
    row_sums, lane_total = build_row_sums(units, waits=False), units.total
    n_sums, lanes_per_total = units.n_sums, units.lanes_per_total
    element_bytes = 4 if takes_float_activations(weight_type) else 1
    n_totals = n_used * n_warp_rows

    def expert_sum_kernel(planes, strides, n_rows, out, bias, ids, weights, vectors, scales, n_cols):
        totals = cuda.shared.array(n_totals, float32)
        lane = int32(cuda.threadIdx.x) & int32(31)
        slot = int32(cuda.threadIdx.x) >> int32(5)
        token = int32(cuda.blockIdx.y)
        own_row = int32(cuda.blockIdx.x) * int32(n_warp_rows)
        row = min(own_row, n_rows - int32(n_warp_rows))  # the last block may repeat rows of the one before
        pair = token * int32(n_used) + slot
        vectors += int64(pair) * n_cols * element_bytes
        scales += int64(pair) * (n_cols // int32(GROUP_ELEMENTS)) * SCALE_BYTES
        stride_0, stride_1, stride_2, stride_3 = strides
        wait_for_previous()
        source = int64(load_recent_int(ids + int64(pair) * 4)) * n_rows + row
        plane_0, plane_1 = planes[0] + source * stride_0, planes[1] + source * stride_1
        plane_2, plane_3 = planes[2] + source * stride_2, planes[3] + source * stride_3

        sums = row_sums(plane_0, plane_1, plane_2, plane_3, strides, vectors, scales, n_cols, lane)
        total = lane_total(sums, lane)
        of_row = lane // int32(lanes_per_total)
        if lane % int32(lanes_per_total) == 0 and of_row < int32(n_sums):
            if bias != 0:
                total = add(total, load_float(bias + (source + of_row) * 4))
            totals[slot * int32(n_warp_rows) + of_row] = total
        cuda.syncthreads()

        of_row = int32(cuda.threadIdx.x)
        if of_row < int32(n_warp_rows) and row + of_row >= own_row:
            result = float32(0.0)
            for i in range(n_used):
                weight = load_float_past_l1(weights + int64(token * int32(n_used) + i) * 4)
                result = fma(weight, totals[i * n_warp_rows + of_row], result)
            store_float(out + (int64(token) * n_rows + row + of_row) * 4, result)

    return Kernel(expert_sum_kernel, SUM_SIGNATURE, n_threads=32 * n_used, overlaps=True)


def gated_kernel(
    weight_type: GGMLQuantizationType, n_rows: int, activation: Activation, *, has_bias: bool
) -> tuple[Kernel, int]:
    """The kernel of a launch and the rows of an expert that one of its blocks takes."""
    n_warp_rows = min(GATED_WARP_ROWS, n_rows)
    return build_expert_gated_kernel(weight_type, activation, n_warp_rows, has_bias), N_WARPS * n_warp_rows


def sum_kernel(weight_type: GGMLQuantizationType, n_used: int, n_rows: int) -> tuple[Kernel, int]:
    """The kernel of a launch and the rows that one of its blocks takes."""
    n_warp_rows = min(count_sum_rows(weight_type), n_rows)
    return build_expert_sum_kernel(weight_type, n_used, n_warp_rows), n_warp_rows
