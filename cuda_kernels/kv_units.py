"""Rows of every cache type in registers: loaded words as float16 pairs, four elements as float32.

``expand`` gives elements in order, scaled, two to a word, each rounded to float16 once (levels of turbo types twice:
the level, then its product).
What the bytes mean: ``kvs_core.kv_types`` (planes), ``kvs_core.cpu.kv_blocks`` and ``kv_turbo`` (values).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cuda_kernels.emit import Emitter, Value
from kvs_core.kv_types import KvType, RegionGeometry

IQ4_NL_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
POSITIVE_LEVELS = {
    KvType.TURBO2: (0.039994, 0.133462),
    KvType.TURBO3: (0.021460, 0.065717, 0.117832, 0.190685),
    KvType.TURBO4: (0.011353, 0.034311, 0.058069, 0.083317, 0.111065, 0.143047, 0.182907, 0.241556),
}
LEVELS: dict[KvType, tuple[float, ...]] = {
    KvType.IQ4_NL: tuple(float(level) for level in IQ4_NL_LEVELS),
    **{
        kv_type: (*(-level for level in reversed(positive)), *positive) for kv_type, positive in POSITIVE_LEVELS.items()
    },
}
"""What a quant of a type with a codebook stands for, times the scale; float32 on the CPU."""

_IQ4_NL_BIAS = 128  # makes unsigned bytes of its levels
_LOW_NIBBLES = 0x0F0F0F0F
_MIDDLES = {KvType.Q8_0: 128, KvType.Q5_0: 16, KvType.Q4_0: 8, KvType.Q5_1: 0, KvType.Q4_1: 0}
"""Which unsigned quant stands for 0 in types without a codebook."""
WITH_MINIMUM = (KvType.Q4_1, KvType.Q5_1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAt:
    """Addresses (64 bits) of one row in the three planes of its region; planes that a type lacks may be anything."""

    quants: Value
    high: Value
    scales: Value

    @classmethod
    def of(cls, emit: Emitter, region: RegionGeometry, region_at: Value, slot: Value) -> RowAt:
        """Row ``slot`` (64 bits) of the region at ``region_at``."""
        return cls(
            quants=emit.add(region_at, emit.multiply(slot, region.row_bytes)),
            high=emit.add(emit.add(region_at, region.high_offset), emit.multiply(slot, region.high_row_bytes)),
            scales=emit.add(emit.add(region_at, region.scale_offset), emit.multiply(slot, region.scale_row_bytes)),
        )


def expand(
    emit: Emitter, kv_type: KvType, quants: Sequence[Value], high: Value | None, scale: Value | None
) -> list[Value]:
    """Elements in order, two to a word, scaled: of a block of 32; of q8_0 and unquantised types of any number of words.

    ``scale``: in the low half of its word, a minimum in the high half.
    """
    if scale is None:
        return _float_halves(emit, kv_type, list(quants))
    factor = emit.permute(scale, scale, 0x1010)
    if kv_type in LEVELS:
        return level_halves(emit, kv_type, quants, high, factor)
    minimum = emit.permute(scale, scale, 0x3232) if kv_type in WITH_MINIMUM else None
    result = []
    for unsigned in unsigned_bytes(emit, kv_type, quants, high):
        for digits in (0x4140, 0x4342):
            biased = emit.permute(unsigned, emit.word(0x64646464), digits)
            result.append(scale_biased(emit, kv_type, biased, factor, minimum))
    return result


def unsigned_middle(kv_type: KvType) -> int:
    """Which unsigned quant stands for 0; 0 for types with a minimum."""
    return _MIDDLES[kv_type]


def scale_biased(emit: Emitter, kv_type: KvType, biased: Value, scale: Value, minimum: Value | None) -> Value:
    """float16 pairs 1024 + unsigned quant to values, rounded once; scale and minimum for both halves of the word."""
    return scale_quants(emit, biased, 1024 + _MIDDLES[kv_type], scale, minimum)


def scale_quants(emit: Emitter, biased: Value, zero: int, scale: Value, minimum: Value | None) -> Value:
    """float16 pairs (biased - zero) * scale + minimum, rounded once; the difference is exact."""
    quants = emit.half2_subtract(biased, emit.word(int(np.float16(zero).view(np.uint16)) * 0x10001))
    return emit.half2_multiply(quants, scale) if minimum is None else emit.half2_fma(quants, scale, minimum)


def unsigned_bytes(emit: Emitter, kv_type: KvType, quants: Sequence[Value], high: Value | None) -> list[Value]:
    """A block of 32 in order as eight words of four unsigned bytes."""
    if kv_type is KvType.Q8_0:
        return [emit.bit_xor(word, 0x80808080) for word in quants]
    nibbles = [emit.bit_and(word, _LOW_NIBBLES) for word in quants]
    nibbles += [emit.bit_and(emit.shift_right(word, 4), _LOW_NIBBLES) for word in quants]
    if high is None:
        return nibbles
    return [emit.bit_or(word, fifth_bits(emit, high, 4 * i)) for i, word in enumerate(nibbles)]


def fifth_bits(emit: Emitter, high: Value, first: Value | int) -> Value:
    """Bits ``first`` to ``first + 3`` of ``high`` as bit 4 of four bytes."""
    four = emit.bit_and(emit.shift_right(high, first), 0xF)
    return emit.shift_left(emit.bit_and(emit.multiply(four, 0x00204081), 0x01010101), 4)


# -- codebooks: a quant of four bits or fewer is a digit of a permutation's selector ------------------------------


def byte_planes(emit: Emitter, levels: Sequence[float], dtype: type) -> list[list[Value]]:
    """Byte k of every level, packed into words of four, for each k."""
    table = np.array(levels, dtype).view(np.uint8).reshape(len(levels), -1)
    table = np.resize(table, (max(8, len(levels)), table.shape[1]))
    return [[emit.word(int(word)) for word in np.ascontiguousarray(plane).view("<u4")] for plane in table.T]


def scaled_planes(emit: Emitter, levels: Sequence[float], scale: Value) -> list[list[Value]]:
    """``byte_planes`` of the levels as float16 times ``scale``."""
    padded = np.resize(np.array(levels, np.float16), max(8, len(levels)))
    pairs = [emit.half2_multiply(emit.word(int(pair)), scale) for pair in padded.view("<u4")]
    return [[emit.permute(*pairs[i : i + 2], digits) for i in range(0, len(pairs), 2)] for digits in (0x6420, 0x7531)]


def pick_bytes(emit: Emitter, planes: Sequence[Sequence[Value]], digits: Value) -> list[Value]:
    """For each plane, the bytes that four digits (in the low half of ``digits``) name; 8 to 15: of later words."""
    return _pick(emit, planes, _selectors(emit, planes, digits))


def _selectors(emit: Emitter, planes: Sequence[Sequence[Value]], digits: Value) -> list[Value]:
    """What picks the levels of eight digits, four in each half: from words of four, and for 16 levels from those."""
    if len(planes[0]) == 2:
        return [digits]
    upper = emit.bit_or(emit.bit_and(emit.shift_right(digits, 1), 0x44444444), emit.word(0x32103210))
    return [emit.bit_and(digits, 0x77777777), upper]


def _pick(emit: Emitter, planes: Sequence[Sequence[Value]], selectors: Sequence[Value]) -> list[Value]:
    if len(selectors) == 1:
        return [emit.permute(*plane, selectors[0]) for plane in planes]
    low, upper = selectors
    return [emit.permute(emit.permute(a, b, low), emit.permute(c, d, low), upper) for a, b, c, d in planes]


def level_halves(
    emit: Emitter, kv_type: KvType, quants: Sequence[Value], high: Value | None, scale: Value
) -> list[Value]:
    """The levels of a unit of 32 elements in order, two to a word, times ``scale`` (in both halves of its word).

    The codebook is scaled, not the elements. That takes fewer products, and a constant codebook would be moved into
    registers before every use.
    """
    if kv_type is KvType.IQ4_NL:
        return _scaled_integers(emit, quants, scale)
    planes = scaled_planes(emit, POSITIVE_LEVELS[kv_type] if kv_type is KvType.TURBO4 else LEVELS[kv_type], scale)

    def pick(digits: Value, pairs: tuple[int, int]) -> list[Value]:
        """The levels of eight digits, two to a word as ``pairs`` takes those of either half."""
        selectors, picked = _selectors(emit, planes, digits), []
        for half in (selectors, [emit.shift_right(selector, 16) for selector in selectors]):
            low_bytes, high_bytes = _pick(emit, planes, half)
            picked += [emit.permute(low_bytes, high_bytes, pair) for pair in pairs]
        return picked

    if kv_type is KvType.TURBO4:
        return [level for word in quants for level in mirrored_levels(emit, planes, word)]
    result = []
    for i, word in enumerate(quants):  # 16 elements
        even, odd = (emit.bit_and(emit.shift_right(word, n) if n else word, 0x33333333) for n in (0, 2))
        if high is not None:
            even, odd = _third_bits(emit, emit.shift_right(high, 16 * i) if i else high, even, odd)
        for a, b in zip(pick(even, (0x5140, 0x7362)), pick(odd, (0x5140, 0x7362)), strict=True):
            result += [emit.permute(a, b, 0x5410), emit.permute(a, b, 0x7632)]
    return result


def _scaled_integers(emit: Emitter, quants: Sequence[Value], scale: Value) -> list[Value]:
    """A block of iq4_nl: its levels as bytes, which need fewer registers than its scaled levels."""
    planes = byte_planes(emit, [level + _IQ4_NL_BIAS for level in IQ4_NL_LEVELS], np.uint8)
    first: list[Value] = []
    second: list[Value] = []
    for word in quants:
        selectors = _selectors(emit, planes, word)
        for half in (selectors, [emit.shift_right(selector, 16) for selector in selectors]):
            picked = _pick(emit, planes, half)[0]  # digits 0 and 2 are elements j and j + 1, the others j + 16, j + 17
            for found, digits in ((first, 0x4240), (second, 0x4341)):
                biased = emit.permute(picked, emit.word(0x64646464), digits)
                found.append(scale_quants(emit, biased, 1024 + _IQ4_NL_BIAS, scale, None))
    return first + second


def mirrored_levels(emit: Emitter, planes: Sequence[Sequence[Value]], word: Value) -> list[Value]:
    """Digit 8 + i of eight is level i of ``planes``, digit 7 - i its negative."""
    positive = emit.bit_and(word, 0x88888888)
    sevens = emit.subtract(positive, emit.shift_right(positive, 3))
    selectors = emit.bit_and(emit.bit_xor(emit.bit_xor(word, sevens), 0x77777777), 0x77777777)
    shifted, result = emit.shift_left(word, 4), []
    for half, signs in ((selectors, 0xD9C8), (emit.shift_right(selectors, 16), 0xFBEA)):
        low, high = _pick(emit, planes, [half])
        is_positive = emit.permute(shifted, word, signs)  # 0xff where the highest bit of a digit is set
        high = emit.bit_xor(high, emit.bit_and(emit.bit_xor(is_positive, 0xFFFFFFFF), 0x80808080))
        result += [emit.permute(low, high, pair) for pair in (0x5140, 0x7362)]
    return result


def _third_bits(emit: Emitter, high: Value, even: Value, odd: Value) -> tuple[Value, Value]:
    """The low 16 bits of ``high``, one for each element, as bit 2 of the digits of even and of odd elements."""
    spread = emit.bit_and(high, 0xFFFF)
    for n_bits, mask in ((8, 0x00FF00FF), (4, 0x0F0F0F0F), (2, 0x33333333)):
        spread = emit.bit_and(emit.bit_or(spread, emit.shift_left(spread, n_bits)), mask)
    return (
        emit.bit_or(even, emit.bit_and(emit.shift_left(spread, 2), 0x44444444)),
        emit.bit_or(odd, emit.bit_and(emit.shift_left(spread, 1), 0x44444444)),
    )


# -- unquantised types ------------------------------------------------------------------------------------------


def _float_halves(emit: Emitter, kv_type: KvType, words: list[Value]) -> list[Value]:
    if kv_type is KvType.F16:
        return words
    if kv_type is KvType.BF16:
        return [bfloat_halves(emit, word) for word in words]
    values = [emit.as_float(word) for word in words]
    return [emit.pack_finite_half2(values[i], values[i + 1]) for i in range(0, len(values), 2)]


def bfloat_halves(emit: Emitter, word: Value) -> Value:
    """Two bf16 of a word as float16: exact from 2**-17 to 65504, the largest float16 beyond, within 2**-25 below."""
    return emit.pack_finite_half2(*bfloat_pair(emit, word))


def bfloat_pair(emit: Emitter, word: Value) -> list[Value]:
    """Two bf16 of a word as float32."""
    return [emit.as_float(emit.shift_left(word, 16)), emit.as_float(emit.bit_and(word, 0xFFFF0000))]


# -- four elements as float32 ------------------------------------------------------------------------------------


def load_four(emit: Emitter, region: RegionGeometry, row: RowAt, four: Value) -> list[Value]:
    """Elements 4 ``four`` to 4 ``four`` + 3 of a row as float32: exactly what the CPU backend decodes."""
    kv_type = region.kv_type
    if kv_type is KvType.F32:
        return emit.load_floats(_at(emit, row.quants, four, 16), 0, 4)
    if kv_type in (KvType.F16, KvType.BF16):
        pairs = emit.load_cached(_at(emit, row.quants, four, 8), 0, 2)
        convert: Callable[[Emitter, Value], list[Value]] = bfloat_pair if kv_type is KvType.BF16 else _half_pair
        return [value for pair in pairs for value in convert(emit, pair)]
    scale_idx = emit.shift_right(four, (region.group_elements // 4).bit_length() - 1)
    minimum = None
    if kv_type in WITH_MINIMUM:
        scale_word = emit.load_cached(_at(emit, row.scales, scale_idx, 4), 0, 1)[0]
        minimum = emit.high_half_to_float(scale_word)
    else:
        scale_word = emit.load_half(_at(emit, row.scales, scale_idx, 2), 0)
    scale = emit.low_half_to_float(scale_word)
    if kv_type in LEVELS:
        levels = pick_floats(emit, kv_type, _four_digits(emit, kv_type, row, four))
        return [emit.float_multiply(level, scale) for level in levels]
    signed = _four_bytes(emit, kv_type, row, four)
    if kv_type is not KvType.Q8_0:
        signed = emit.subtract(emit.bit_or(signed, emit.word(0x80808080)), emit.word(_MIDDLES[kv_type] * 0x01010101))
        signed = emit.bit_xor(signed, 0x80808080)
    products = [emit.float_multiply(emit.int_to_float(emit.signed_byte(signed, i)), scale) for i in range(4)]
    return products if minimum is None else [emit.float_add(value, minimum) for value in products]


def _half_pair(emit: Emitter, word: Value) -> list[Value]:
    return [emit.low_half_to_float(word), emit.high_half_to_float(word)]


def _four_bytes(emit: Emitter, kv_type: KvType, row: RowAt, four: Value) -> Value:
    """Four quants as bytes: of q8_0 as they are, else unsigned."""
    if kv_type is KvType.Q8_0:
        return emit.load_cached(_at(emit, row.quants, four, 4), 0, 1)[0]
    block, within = emit.shift_right(four, 3), emit.bit_and(four, 7)
    word_at = _at(emit, _at(emit, row.quants, block, 16), emit.bit_and(within, 3), 4)
    word = emit.load_cached(word_at, 0, 1)[0]
    nibbles = emit.bit_and(emit.shift_right(word, emit.bit_and(within, 4)), _LOW_NIBBLES)
    if kv_type not in (KvType.Q5_0, KvType.Q5_1):
        return nibbles
    high = emit.load_cached(_at(emit, row.high, block, 4), 0, 1)[0]
    return emit.bit_or(nibbles, fifth_bits(emit, high, emit.shift_left(within, 2)))


def _four_digits(emit: Emitter, kv_type: KvType, row: RowAt, four: Value) -> Value:
    """Four quants as the digits of a selector."""
    if kv_type is KvType.IQ4_NL:
        spread = _four_bytes(emit, kv_type, row, four)
        return emit.permute(emit.bit_or(spread, emit.shift_right(spread, 4)), emit.word(0), 0x4420)
    n_bits = 4 if kv_type is KvType.TURBO4 else 2
    digits = _field(emit, row.quants, four, 4 * n_bits)
    if n_bits == 4:
        return digits
    digits = emit.bit_and(emit.bit_or(digits, emit.shift_left(digits, 4)), 0x0F0F)
    digits = emit.bit_and(emit.bit_or(digits, emit.shift_left(digits, 2)), 0x3333)
    if kv_type is KvType.TURBO2:
        return digits
    high = _field(emit, row.high, four, 4)
    high = emit.bit_and(emit.bit_or(high, emit.shift_left(high, 6)), 0x0303)
    high = emit.bit_and(emit.bit_or(high, emit.shift_left(high, 3)), 0x1111)
    return emit.bit_or(digits, emit.shift_left(high, 2))


def _field(emit: Emitter, plane: Value, index: Value, n_bits: int) -> Value:
    """Field ``index`` of ``n_bits`` (4, 8 or 16) of a row's plane."""
    per_word = 32 // n_bits
    word = emit.load_cached(_at(emit, plane, emit.divide(index, per_word), 4), 0, 1)[0]
    shift = emit.multiply(emit.bit_and(index, per_word - 1), n_bits)
    return emit.bit_and(emit.shift_right(word, shift), 2**n_bits - 1)


def pick_floats(emit: Emitter, kv_type: KvType, selectors: Value) -> list[Value]:
    """The levels that four digits name, exact."""
    b0, b1, b2, b3 = pick_bytes(emit, byte_planes(emit, LEVELS[kv_type], np.float32), selectors)
    result = []
    for digits in (0x5140, 0x7362):
        low, high = emit.permute(b0, b1, digits), emit.permute(b2, b3, digits)
        result += [emit.as_float(emit.permute(low, high, pair)) for pair in (0x5410, 0x7632)]
    return result


def _at(emit: Emitter, base: Value, index: Value, n_bytes: int) -> Value:
    return emit.add(base, emit.widen(emit.multiply(index, n_bytes)))
