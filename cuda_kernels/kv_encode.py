"""Rows into the bytes of every cache type: what the 32 lanes of a warp do with 32, 64 or 128 consecutive elements.

Rounding, the order of sums and what becomes of blocks that are not finite are those of ``kvs_core.cpu.kv_rows``,
``kv_blocks`` and ``kv_turbo``: the same float32 row gives the same bytes. Only the payload of a NaN may differ.
The kernels that load rows and rotate them are in ``store`` and ``rotate_store``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numba.cuda import types

from cuda_kernels.emit import Emitter, Value, emitted, floats
from cuda_kernels.kv_units import IQ4_NL_LEVELS, RowAt, pick_floats
from kvs_core.kv_types import KvType, RegionGeometry
from kvs_core.units import ceil_div

BLOCK_ELEMENTS = 32

_SMALLEST_SCALE = 1e-30  # smaller ones are stored as 0 and have no reciprocal
_SMALLEST_NORM = 1e-10
_IQ4_NL_SMALLEST = 1e-15
_NAN_HALF = 0x7E00
_THRESHOLDS: dict[KvType, tuple[float, ...]] = {
    KvType.TURBO2: (0.086728,),
    KvType.TURBO3: (0.043589, 0.091775, 0.154259),
    KvType.TURBO4: (0.022832, 0.046190, 0.070693, 0.097191, 0.127056, 0.162977, 0.212232),
}
_QUANT_LEVELS = {KvType.Q5_1: 32, KvType.Q5_0: 32, KvType.Q4_1: 16, KvType.Q4_0: 16}


def count_group_blocks(region: RegionGeometry) -> int:
    """Blocks of 32 elements that are encoded together."""
    return max(1, region.group_elements // BLOCK_ELEMENTS) if region.kv_type.is_turbo else 1


def count_groups(region: RegionGeometry) -> int:
    """Groups of a row; the last may be cut."""
    return ceil_div(region.head_dim, BLOCK_ELEMENTS * count_group_blocks(region))


class RowEncoder:
    """Encodes ``group_blocks`` times 32 elements of a row at a time: of turbo types a group, else one block.

    Attributes that are intrinsics (``region``: address of the head's region in the page):
    encode(region, slot, group, lane, values)   group ``group`` of row ``slot``; ``values[i]`` is element 32 i + lane of
                                                the group, 0 beyond the head
    ``write_row`` does that for a whole row, ``values[i]`` its element 32 i + lane, inside another intrinsic.
    """

    def __init__(self, region: RegionGeometry) -> None:
        self.region, self.kv_type = region, region.kv_type
        self.group_blocks, self.n_groups = count_group_blocks(region), count_groups(region)
        i32, i64 = types.int32, types.int64
        self.encode = emitted(types.void, i64, i64, i32, i32, floats(self.group_blocks))(self._encode)

    def write_row(self, emit: Emitter, region_at: Value, slot: Value, lane: Value, values: list[Value]) -> None:
        for group in range(self.n_groups):
            own = values[group * self.group_blocks : (group + 1) * self.group_blocks]
            self._encode(emit, region_at, slot, emit.word(group), lane, own)

    def _encode(
        self, emit: Emitter, region_at: Value, slot: Value, group: Value, lane: Value, values: list[Value]
    ) -> None:
        row = RowAt.of(emit, self.region, region_at, slot)
        if self.kv_type.is_turbo:
            self._encode_turbo(emit, row, group, lane, values)
        elif not self.kv_type.is_quantised:
            self._encode_float(emit, row, group, lane, values[0])
        elif self.kv_type is KvType.Q8_0:
            self._encode_q8_0(emit, row, group, lane, values[0])
        else:
            self._encode_block(emit, row, group, lane, values[0])

    # -- unquantised ------------------------------------------------------------------------------------------------

    def _encode_float(self, emit: Emitter, row: RowAt, block: Value, lane: Value, value: Value) -> None:
        element = emit.add(emit.multiply(block, BLOCK_ELEMENTS), lane)
        is_inside = emit.flag(emit.less(element, emit.word(self.region.head_dim)))
        if self.kv_type is KvType.F32:
            emit.store_word_if(is_inside, _at(emit, row.quants, element, 4), emit.as_word(value))
            return
        half = emit.float_to_half(value) if self.kv_type is KvType.F16 else _bfloat_of(emit, value)
        emit.store_half_if(is_inside, _at(emit, row.quants, element, 2), half)

    # -- blocks of 32 -----------------------------------------------------------------------------------------------

    def _encode_q8_0(self, emit: Emitter, row: RowAt, block: Value, lane: Value, value: Value) -> None:
        zero = emit.float(0.0)
        is_finite = _are_finite(emit, value)
        scale = emit.float_divide(_largest(emit, emit.float_absolute(value)), emit.float(127.0))
        inverse = _inverse(emit, scale)
        quant = round_half_away(emit, emit.float_multiply(emit.select(is_finite, value, zero), inverse))
        element = emit.add(emit.multiply(block, BLOCK_ELEMENTS), lane)
        emit.store_byte_if(emit.word(1), _at(emit, row.quants, element, 1), quant)
        self._store_half(emit, row, block, lane, 0, emit.select(is_finite, emit.float_to_half(scale), _nan(emit)))

    def _encode_block(self, emit: Emitter, row: RowAt, block: Value, lane: Value, value: Value) -> None:
        """Four and five bits: a lane's quant is a nibble of a byte that it shares with the lane 16 further."""
        is_finite = _are_finite(emit, value)
        if self.kv_type is KvType.IQ4_NL:
            quant, *scales = self._quantise_iq4_nl(emit, value, is_finite)
        elif self.kv_type in (KvType.Q4_0, KvType.Q5_0):
            quant, *scales = self._quantise_signed(emit, value, is_finite)
        else:
            quant, *scales = self._quantise_raised(emit, value, is_finite)
        other = emit.exchange_word(quant, 16)
        is_low = emit.flag(emit.less(lane, emit.word(16)))
        byte = emit.bit_or(emit.bit_and(quant, 15), emit.shift_left(emit.bit_and(other, 15), 4))
        emit.store_byte_if(is_low, emit.add(_at(emit, row.quants, block, 16), emit.widen(lane)), byte)
        if self.region.high_row_bytes:
            bits = emit.ballot(emit.less(emit.word(15), quant))
            emit.store_word_if(_is_first(emit, lane), _at(emit, row.high, block, 4), bits)
        for i, scale in enumerate(scales):
            self._store_half(emit, row, block, lane, i, emit.select(is_finite, emit.float_to_half(scale), _nan(emit)))

    def _quantise_signed(self, emit: Emitter, value: Value, is_finite: Value) -> tuple[Value, Value]:
        """The element furthest from zero gets the most negative level."""
        n_levels = _QUANT_LEVELS[self.kv_type]
        scale = emit.float_divide(_furthest(emit, value), emit.float(-n_levels / 2))
        inverse = emit.select(is_finite, _inverse(emit, scale), emit.float(0.0))
        scaled = emit.float_multiply(emit.select(is_finite, value, emit.float(0.0)), inverse)
        raised = emit.float_add(scaled, emit.float(n_levels / 2 + 0.5))
        return _cut(emit, raised, n_levels), scale

    def _quantise_raised(self, emit: Emitter, value: Value, is_finite: Value) -> tuple[Value, Value, Value]:
        n_levels, zero = _QUANT_LEVELS[self.kv_type], emit.float(0.0)
        least = emit.float_subtract(zero, _largest(emit, emit.float_subtract(zero, value)))
        scale = emit.float_divide(emit.float_subtract(_largest(emit, value), least), emit.float(n_levels - 1))
        is_used = emit.bit_and(emit.flag(is_finite), emit.flag(emit.float_less(emit.float(_SMALLEST_SCALE), scale)))
        is_used = emit.less(emit.word(0), is_used)
        inverse = emit.select(is_used, emit.float_divide(emit.float(1.0), scale), zero)
        begin = emit.select(is_used, least, zero)
        scaled = emit.float_multiply(emit.float_subtract(emit.select(is_used, value, zero), begin), inverse)
        return _cut(emit, emit.float_add(scaled, emit.float(0.5)), n_levels), scale, least

    def _quantise_iq4_nl(self, emit: Emitter, value: Value, is_finite: Value) -> tuple[Value, Value]:
        """The nearest levels, then the best scale for them; sums run over the elements in order."""
        furthest = _furthest(emit, value)
        is_small = emit.float_less(emit.float_absolute(furthest), emit.float(_IQ4_NL_SMALLEST))
        is_used = emit.less(emit.flag(is_small), emit.flag(is_finite))
        inverse = emit.float_divide(emit.float(1.0), emit.float_divide(furthest, emit.float(IQ4_NL_LEVELS[0])))
        limits = [(low + high) / 2 for low, high in pairwise(IQ4_NL_LEVELS)]
        nearest = _count_reached(emit, emit.float_multiply(value, inverse), limits)
        quant = emit.select(is_used, nearest, emit.word(0))
        level = pick_floats(emit, self.kv_type, quant)[0]
        weighted = emit.float_multiply(emit.float_multiply(value, value), level)
        along = _add_in_order(emit, emit.float_multiply(weighted, value))
        square = _add_in_order(emit, emit.float_multiply(weighted, level))
        scale = emit.select(emit.float_less(emit.float(0.0), square), emit.float_divide(along, square), emit.float(0.0))
        return quant, emit.select(is_used, scale, emit.float(0.0))

    def _store_half(self, emit: Emitter, row: RowAt, block: Value, lane: Value, i: int, half: Value) -> None:
        """Half ``i`` of what belongs to a block (or group) in the scales plane."""
        address = _at(emit, row.scales, block, self.kv_type.scale_bytes_per_block)
        emit.store_half_if(_is_first(emit, lane), emit.add(address, 2 * i), half)

    # -- turbo ------------------------------------------------------------------------------------------------------

    def _encode_turbo(self, emit: Emitter, row: RowAt, group: Value, lane: Value, values: list[Value]) -> None:
        norm = emit.float_square_root(_sum_by_sixteen(emit, lane, values, values))
        is_used = emit.less(
            emit.word(1),
            emit.add(
                emit.flag(emit.float_less(emit.float(_SMALLEST_NORM), norm)),
                emit.flag(emit.float_less(norm, emit.float(float("inf")))),
            ),
        )
        spread = float(np.float32(math.sqrt(np.float32(self.region.group_elements) / np.float32(128.0))))
        factor = emit.select(is_used, emit.float_divide(emit.float(spread), norm), emit.float(0.0))
        positive = _THRESHOLDS[self.kv_type]
        limits = (*(-limit for limit in reversed(positive)), 0.0, *positive)
        quants = [_count_reached(emit, emit.float_multiply(value, factor), limits) for value in values]
        levels = [pick_floats(emit, self.kv_type, quant)[0] for quant in quants]
        length = emit.float_square_root(_sum_by_sixteen(emit, lane, levels, levels))
        is_small = emit.float_less(emit.float(_SMALLEST_NORM), norm)
        other = emit.select(_is_nan_or(emit, is_small, norm), norm, emit.float(0.0))
        scale = emit.select(is_used, emit.float_divide(norm, length), other)
        self._store_half(emit, row, group, lane, 0, emit.float_to_half(scale))
        for i, quant in enumerate(quants):
            block = emit.add(emit.multiply(group, self.group_blocks), i)
            self._store_digits(emit, row, block, lane, quant)

    def _store_digits(self, emit: Emitter, row: RowAt, block: Value, lane: Value, quant: Value) -> None:
        """32 quants side by side; third bits in the other plane."""
        n_bits = 4 if self.kv_type is KvType.TURBO4 else 2
        byte = emit.bit_and(quant, 2**n_bits - 1)
        per_byte = 8 // n_bits
        step = 1
        while step < per_byte:
            byte = emit.bit_or(byte, emit.shift_left(emit.exchange_word(byte, step), n_bits * step))
            step *= 2
        is_first = emit.flag(emit.less(emit.bit_and(lane, per_byte - 1), emit.word(1)))
        at = emit.add(
            emit.multiply(block, BLOCK_ELEMENTS // per_byte), emit.shift_right(lane, per_byte.bit_length() - 1)
        )
        emit.store_byte_if(is_first, _at(emit, row.quants, at, 1), byte)
        if self.region.high_row_bytes:
            bits = emit.ballot(emit.less(emit.word(3), quant))
            emit.store_word_if(_is_first(emit, lane), _at(emit, row.high, block, 4), bits)


# -- pieces ---------------------------------------------------------------------------------------------------------


def round_half_away(emit: Emitter, value: Value) -> Value:
    """Nearest integer, halves away from zero: the rounding of q8_0 blocks."""
    whole = emit.int_to_float(emit.float_to_int(value))
    rest = emit.float_subtract(value, whole)  # exact
    return emit.float_to_int(emit.float_add(whole, emit.int_to_float(emit.float_to_int(emit.float_add(rest, rest)))))


def _bfloat_of(emit: Emitter, value: Value) -> Value:
    """Nearest bf16, halves to even; NaN stays one."""
    bits = emit.as_word(value)
    odd = emit.bit_and(emit.shift_right(bits, 16), 1)
    rounded = emit.add(emit.add(bits, odd), 0x7FFF)
    quiet = emit.bit_or(bits, emit.word(0x00400000))
    return emit.shift_right(emit.select(emit.float_equal(value, value), rounded, quiet), 16)


def _are_finite(emit: Emitter, value: Value) -> Value:
    """Whether no lane is infinite or NaN."""
    finite = emit.ballot(emit.float_less(emit.float_absolute(value), emit.float(float("inf"))))
    return emit.equal(finite, emit.word(0xFFFFFFFF))


def _largest(emit: Emitter, value: Value) -> Value:
    for mask in (16, 8, 4, 2, 1):
        value = emit.float_maximum(value, emit.exchange(value, mask))
    return value


def _furthest(emit: Emitter, value: Value) -> Value:
    """The first of the elements furthest from zero; 0 if all are zero."""
    magnitude = emit.float_absolute(value)
    largest = _largest(emit, magnitude)
    first = emit.bit_and(emit.lowest_bit(emit.ballot(emit.float_equal(magnitude, largest))), 31)
    is_zero = emit.float_equal(largest, emit.float(0.0))
    return emit.select(is_zero, emit.float(0.0), emit.from_lane(value, first))


def _inverse(emit: Emitter, scale: Value) -> Value:
    is_used = emit.float_less(emit.float(_SMALLEST_SCALE), emit.float_absolute(scale))
    return emit.select(is_used, emit.float_divide(emit.float(1.0), scale), emit.float(0.0))


def _cut(emit: Emitter, raised: Value, n_levels: int) -> Value:
    return emit.float_to_int(emit.float_minimum(raised, emit.float(n_levels - 1)))


def _count_reached(emit: Emitter, value: Value, limits: Sequence[float]) -> Value:
    count = emit.word(0)
    for limit in limits:
        is_below = emit.float_less(value, emit.float(float(np.float32(limit))))
        is_number = emit.float_equal(value, value)
        reached = emit.select(is_number, emit.subtract(emit.word(1), emit.flag(is_below)), emit.word(0))
        count = emit.add(count, reached)
    return count


def _add_in_order(emit: Emitter, value: Value) -> Value:
    """((0 + lane 0) + lane 1) + ...: as a loop over the elements rounds it."""
    total = emit.float(0.0)
    for lane in range(32):
        total = emit.float_add(total, emit.from_lane(value, emit.word(lane)))
    return total


def _sum_by_sixteen(emit: Emitter, lane: Value, a: Sequence[Value], b: Sequence[Value]) -> Value:
    """Sum of products as vectors of 16 lanes make it: each lane every 16th, then lanes 8, 4, 2 and 1 apart."""
    is_low = emit.less(lane, emit.word(16))
    total = emit.float(0.0)
    for x, y in zip(a, b, strict=True):
        other_x, other_y = emit.exchange(x, 16), emit.exchange(y, 16)
        total = emit.fma(emit.select(is_low, x, other_x), emit.select(is_low, y, other_y), total)
        total = emit.fma(emit.select(is_low, other_x, x), emit.select(is_low, other_y, y), total)
    for mask in (8, 4, 2, 1):
        total = emit.float_add(total, emit.exchange(total, mask))
    return total


def _is_nan_or(emit: Emitter, condition: Value, value: Value) -> Value:
    is_number = emit.flag(emit.float_equal(value, value))
    return emit.less(emit.word(0), emit.add(emit.flag(condition), emit.subtract(emit.word(1), is_number)))


def _is_first(emit: Emitter, lane: Value) -> Value:
    return emit.flag(emit.less(lane, emit.word(1)))


def _nan(emit: Emitter) -> Value:
    return emit.word(_NAN_HALF)


def _at(emit: Emitter, base: Value, index: Value, n_bytes: int) -> Value:
    return emit.add(base, emit.widen(emit.multiply(index, n_bytes)))
