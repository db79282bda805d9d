"""Products of quantised matrices with two to eight vectors on tensor cores, with the bits of ``matvec``'s one vector.

``matvec`` adds a row's units in 32 lanes, every 32nd unit in each, and the lanes in a tree. Here a block takes 16 rows;
warp w of eight holds in lane (g, t) the units of lane 4 w + t there, for rows g and g + 8. An integer product of 16
rows by 32 bytes by 8 columns would sum over the four lanes of a row, so its columns are (lane t, one of two vectors),
and a column has zeros for the other lanes: every sum of 16 products arrives apart, in the lane whose unit it belongs
to. Integers are exact, the floats that follow are added as there.
"""

from __future__ import annotations

import math
from typing import Any

from gguf import GGMLQuantizationType
from numba import cuda
from numba.cuda import float32, int32, int64, types, uint32

from cuda_kernels.emit import FLOAT_INTEGER_WORD, Emitter, Value, emitted, floats, words
from cuda_kernels.intrinsics import (
    FULL_WARP,
    add,
    load_float,
    load_float_past_l1,
    multiply,
    shared_address,
    store_float,
)
from cuda_kernels.launch import Kernel, device_function, kernel_builder
from cuda_kernels.overlap import let_next_start, wait_for_previous
from cuda_kernels.row_units import SCALE_BYTES, RowUnits
from cuda_kernels.weight_units import GROUP_ELEMENTS, UNIT_FORMATS, Group, Unit
from cuda_kernels.weights import MAX_MATRICES, MAX_PLANES
from kvs_core.units import ceil_div

N_WARPS = 8
N_THREADS = 32 * N_WARPS
BLOCK_ROWS = 16
_MANY = types.UniTuple
SIGNATURE = (
    _MANY(types.int64, MAX_MATRICES * MAX_PLANES),  # addresses
    _MANY(types.int64, MAX_PLANES),  # row strides, which all share
    _MANY(types.int64, MAX_MATRICES),  # out
    _MANY(types.int64, MAX_MATRICES),  # bias, or 0
    _MANY(types.int32, MAX_MATRICES),  # rows
    types.int64,  # vectors
    types.int64,  # scales
    types.int32,  # columns
)


class MmaUnits:
    """The inner step of the product for one weight type: a lane's unit of row g and of row g + 8.

    Attributes that are intrinsics:
    add(sums, words of row g, of row g + 8, step, unit lane, lane, vectors, scales, n_cols)
                            sums [2 rows, n_vectors] plus the products of unit 32 step + unit lane
    keep(is_new, new, old)  the new sums where ``is_new`` (a word) is not 0
    store(shared, sums)     as rows, vectors, lanes t; ``shared`` is the place of row g, vector 0, lane t
    zeros()                 cleared sums
    """

    def __init__(self, weight_type: GGMLQuantizationType, n_vectors: int) -> None:
        self.n_vectors = n_vectors
        self.unit_format = UNIT_FORMATS[weight_type]
        sums, loaded = floats(2 * n_vectors), words(self.unit_format.n_words)
        i32, i64 = types.int32, types.int64
        self.add = emitted(sums, sums, loaded, loaded, i32, i32, i32, i64, i64, i32)(self._add)
        self.keep = emitted(sums, i32, sums, sums)(self._keep)
        self.store = emitted(types.void, types.uint32, sums)(self._store)
        self.zeros = emitted(sums)(lambda emit: [emit.float(0.0)] * (2 * n_vectors))

    def _add(self, emit: Emitter, sums: list[Value], near: list[Value], far: list[Value], *rest: Value) -> list[Value]:
        step, unit_lane, lane, vectors, scales, n_cols = rest
        unit = Unit.of(emit, step, unit_lane)
        rows = [self.unit_format.decode(emit, loaded, unit) for loaded in (near, far)]
        result = list(sums)
        for pair in range(ceil_div(self.n_vectors, 2)):
            dots = self._dots(emit, rows, pair, lane, vectors, n_cols)
            for v in range(2 * pair, min(2 * pair + 2, self.n_vectors)):
                column = emit.add(rows[0][0].first, emit.multiply(n_cols, v))
                scales_at = emit.add(scales, emit.widen(emit.multiply(emit.shift_right(column, 4), SCALE_BYTES)))
                for i, dots_of_group in enumerate(dots):
                    offset = rows[0][i].further // GROUP_ELEMENTS * SCALE_BYTES
                    x_scale, x_sum = emit.load_recent_floats(scales_at, offset, 2)
                    for r in range(2):
                        group, at = rows[r][i], r * self.n_vectors + v
                        dot = emit.from_float_integer(dots_of_group[2 * r + v % 2])
                        term = emit.float_multiply(group.scale, dot)
                        if group.shift is not None:
                            term = emit.fma(group.shift, x_sum, term)
                        result[at] = emit.fma(x_scale, term, result[at])
        return result

    def _dots(
        self, emit: Emitter, rows: list[list[Group]], pair: int, lane: Value, vectors: Value, n_cols: Value
    ) -> list[list[Value]]:
        """For each group: the integer products of (row g, row g + 8) with vectors 2 ``pair`` and 2 ``pair`` + 1."""
        # column g of the right operand belongs to lane t = g / 2 and to the pair's vector g % 2
        is_own = emit.flag(emit.equal(emit.shift_right(lane, 3), emit.bit_and(lane, 3)))
        vector = emit.word(2 * pair)
        if 2 * pair + 1 < self.n_vectors:
            vector = emit.add(emit.bit_and(emit.shift_right(lane, 2), 1), 2 * pair)
        at = emit.add(vectors, emit.widen(emit.add(rows[0][0].first, emit.multiply(n_cols, vector))))
        dots = []
        for near, far in zip(*rows, strict=True):
            x = emit.load_recent_if(is_own, at, near.further)
            total = [emit.word(FLOAT_INTEGER_WORD)] * 4
            for k in (0, 2):
                a = [near.quants[k], far.quants[k], near.quants[k + 1], far.quants[k + 1]]
                total = emit.mma_bytes(a, x[k : k + 2], total)
            dots.append(total)
        return dots

    def _keep(self, emit: Emitter, is_new: Value, new: list[Value], old: list[Value]) -> list[Value]:
        condition = emit.less(emit.word(0), is_new)
        return [emit.select(condition, a, b) for a, b in zip(new, old, strict=True)]

    def _store(self, emit: Emitter, shared: Value, sums: list[Value]) -> None:
        for r in range(2):
            for v in range(self.n_vectors):
                offset = 4 * (r * 8 * self.n_vectors * 4 + v * 4)
                emit.store_shared_words(shared, offset, [emit.as_word(sums[r * self.n_vectors + v])])


def build_row_total(n_warp_floats: int) -> Any:
    """Device function ``row_total(exchange, element)``: the sums of 32 lanes of ``matvec``, in the order of its tree.

    Lanes 16, 8 and 4 apart there are warps here, those 2 and 1 apart are lanes.
    """

    @device_function
    def row_total(exchange, element):
        even = (exchange[element] + exchange[element + 4 * n_warp_floats]) + (
            exchange[element + 2 * n_warp_floats] + exchange[element + 6 * n_warp_floats]
        )
        odd = (exchange[element + n_warp_floats] + exchange[element + 5 * n_warp_floats]) + (
            exchange[element + 3 * n_warp_floats] + exchange[element + 7 * n_warp_floats]
        )
        total = even + odd
        total += cuda.shfl_xor_sync(FULL_WARP, total, 2)
        total += cuda.shfl_xor_sync(FULL_WARP, total, 1)
        return total

    return row_total


@kernel_builder
def build_matvec_mma_kernel(
    weight_type: GGMLQuantizationType, n_vectors: int, is_added: bool, is_gated: bool
) -> Kernel:
    """The kernel for one weight type and number of vectors, up to three matrices.

    ``is_added``: to what ``out`` holds. ``is_gated``: the first two matrices are gate and up, of equal shape, a block
    takes 8 rows of each, and ``silu(gate) * up`` goes to the first ``out``.
    """
    units = RowUnits(weight_type, 1, 1)
    load, elements = units.load, units.elements
    tiles = MmaUnits(weight_type, n_vectors)
    add_unit, keep, zeros, store_sums = tiles.add, tiles.keep, tiles.zeros, tiles.store
    n_warp_floats = BLOCK_ROWS * n_vectors * 4  # of one warp: rows, vectors, lanes t
    n_shared = N_WARPS * n_warp_floats
    half_floats = n_warp_floats // 2
    tile_rows = BLOCK_ROWS // 2 if is_gated else BLOCK_ROWS
    n_finals = half_floats if is_gated else n_warp_floats
    row_total = build_row_total(n_warp_floats)

    def matvec_mma_kernel(planes, strides, outs, biases, rows, vectors, scales, n_cols):
        exchange = cuda.shared.array(n_shared, float32)
        tid = int32(cuda.threadIdx.x)
        warp, lane = tid >> int32(5), tid & int32(31)
        g, t = lane >> int32(2), lane & int32(3)
        plane_0, plane_1, plane_2, plane_3 = planes[0], planes[1], planes[2], planes[3]
        stride_0, stride_1, stride_2, stride_3 = strides
        out, bias, n_rows = outs[0], biases[0], rows[0]
        block = int32(cuda.blockIdx.x)
        if not is_gated:
            n_blocks = (n_rows + int32(BLOCK_ROWS - 1)) // int32(BLOCK_ROWS)
            if block >= n_blocks:
                block -= n_blocks
                plane_0, plane_1, plane_2, plane_3 = planes[4], planes[5], planes[6], planes[7]
                out, bias, n_rows = outs[1], biases[1], rows[1]
                n_blocks = (n_rows + int32(BLOCK_ROWS - 1)) // int32(BLOCK_ROWS)
                if block >= n_blocks:
                    block -= n_blocks
                    plane_0, plane_1, plane_2, plane_3 = planes[8], planes[9], planes[10], planes[11]
                    out, bias, n_rows = outs[2], biases[2], rows[2]
        first_row = block * int32(tile_rows)
        near = int64(min(first_row + g, n_rows - int32(1)))
        near_0, near_1 = plane_0 + near * stride_0, plane_1 + near * stride_1
        near_2, near_3 = plane_2 + near * stride_2, plane_3 + near * stride_3
        if is_gated:
            far_0, far_1 = planes[4] + near * stride_0, planes[5] + near * stride_1
            far_2, far_3 = planes[6] + near * stride_2, planes[7] + near * stride_3
        else:
            far = int64(min(first_row + g + int32(8), n_rows - int32(1)))
            far_0, far_1 = plane_0 + far * stride_0, plane_1 + far * stride_1
            far_2, far_3 = plane_2 + far * stride_2, plane_3 + far * stride_3

        n_units = n_cols // int32(elements)
        n_steps = (n_units + int32(31)) // int32(32)
        unit = min(warp * int32(4) + t, n_units - int32(1))
        at, unit_lane = unit >> int32(5), unit & int32(31)
        near_words = load(near_0, near_1, near_2, near_3, stride_0, stride_1, stride_2, stride_3, at, unit_lane)
        far_words = load(far_0, far_1, far_2, far_3, stride_0, stride_1, stride_2, stride_3, at, unit_lane)
        wait_for_previous()
        let_next_start()
        sums = zeros()
        for step in range(n_steps):
            is_used = int32(1) if step * int32(32) + warp * int32(4) + t < n_units else int32(0)
            next_unit = min((step + int32(1)) * int32(32) + warp * int32(4) + t, n_units - int32(1))
            next_at, next_lane = next_unit >> int32(5), next_unit & int32(31)
            next_near, next_far = near_words, far_words
            if step + 1 < n_steps:
                next_near = load(
                    near_0, near_1, near_2, near_3, stride_0, stride_1, stride_2, stride_3, next_at, next_lane
                )
                next_far = load(far_0, far_1, far_2, far_3, stride_0, stride_1, stride_2, stride_3, next_at, next_lane)
            added = add_unit(sums, near_words, far_words, at, unit_lane, lane, vectors, scales, n_cols)
            sums = keep(is_used, added, sums)
            near_words, far_words, at, unit_lane = next_near, next_far, next_at, next_lane

        own_place = warp * int32(n_warp_floats) + g * int32(4 * n_vectors) + t
        store_sums(uint32(shared_address(exchange) + uint32(own_place * int32(4))), sums)
        cuda.syncthreads()
        for element in range(tid, n_finals, N_THREADS):
            total = row_total(exchange, element)
            if is_gated:
                factor = row_total(exchange, element + half_floats)
                total = multiply(total / (float32(1.0) + math.exp(-total)), factor)
            vector = (element >> int32(2)) % int32(n_vectors)
            row = first_row + (element >> int32(2)) // int32(n_vectors)
            if element & int32(3) == 0 and row < n_rows:
                if bias != 0:
                    total = add(total, load_float(bias + int64(row) * 4))
                target = out + (int64(vector) * n_rows + row) * 4
                if is_added:
                    total = add(load_float_past_l1(target), total)
                store_float(target, total)

    return Kernel(matvec_mma_kernel, SIGNATURE, n_threads=N_THREADS, min_blocks=2, overlaps=True)
