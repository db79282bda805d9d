"""Quantised weights in registers: the formats of units (``unit_formats``), type by type.

Block formats: the GGUF specification and its reference dequantisation in the ``gguf`` package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gguf import GGMLQuantizationType

from cuda_kernels.emit import Emitter, Value
from cuda_kernels.k_units import K_PAIRS, K_UNITS
from cuda_kernels.unit_formats import (
    LOW_NIBBLES,
    Group,
    Unit,
    UnitFormat,
    at,
    load,
    load_byte,
    load_half,
    small_to_float,
)

_T = GGMLQuantizationType


def _uniform(
    n_words: int,
    load: Callable[[Emitter, Sequence[Value], Unit], list[Value]],
    decode: Callable[[Emitter, list[Value], Unit], list[Group]],
) -> UnitFormat:
    """Of units that are a block of 32 weights each."""
    return UnitFormat(
        elements=32, n_words=n_words, n_groups=2, is_uniform=True, is_block=True, load=load, decode=decode
    )


def _nibbles(emit: Emitter, words: list[Value]) -> tuple[list[Value], list[Value]]:
    low = [emit.bit_and(word, LOW_NIBBLES) for word in words]
    return low, [emit.bit_and(emit.shift_right(word, 4), LOW_NIBBLES) for word in words]


def _two_groups(
    emit: Emitter, unit: Unit, low: list[Value], high: list[Value], scale: Value, shift: Value
) -> list[Group]:
    """Blocks of 32: the low nibbles are the first 16 weights, the high ones the others."""
    first = emit.multiply(unit.number, 32)
    pairs = ((0, low), (16, high))
    return [Group(first=first, further=n, quants=quants, scale=scale, shift=shift) for n, quants in pairs]


# -- Q8_0: planes q32, d ------------------------------------------------------------------------------------------


def _load_q8_0(emit: Emitter, rows: Sequence[Value], unit: Unit) -> list[Value]:
    scale = load_half(emit, at(emit, rows[1], emit.shift_right(unit.number, 1), 2))
    return [*load(emit, at(emit, rows[0], unit.number, 16), 0, 4), scale]


def _decode_q8_0(emit: Emitter, words: list[Value], unit: Unit) -> list[Group]:
    scale = emit.low_half_to_float(words[4])
    return [Group(first=emit.multiply(unit.number, 16), further=0, quants=words[:4], scale=scale, shift=None)]


# -- Q4_0, Q4_1, Q5_0, Q5_1: planes of nibbles, of high bits (Q5), of d or d and m -----------------------------------


def _load_q4_0(emit: Emitter, rows: Sequence[Value], unit: Unit) -> list[Value]:
    quants = load(emit, at(emit, rows[0], unit.number, 16), 0, 4)
    return [*quants, load_half(emit, at(emit, rows[1], unit.number, 2))]


def _decode_q4_0(emit: Emitter, words: list[Value], unit: Unit) -> list[Group]:
    low, high = _nibbles(emit, words[:4])
    scale = emit.low_half_to_float(words[4])
    return _two_groups(emit, unit, low, high, scale, emit.float_multiply(scale, emit.float(-8.0)))


def _load_q4_1(emit: Emitter, rows: Sequence[Value], unit: Unit) -> list[Value]:
    quants = load(emit, at(emit, rows[0], unit.number, 16), 0, 4)
    return [*quants, *load(emit, at(emit, rows[1], unit.number, 4), 0, 1)]


def _decode_q4_1(emit: Emitter, words: list[Value], unit: Unit) -> list[Group]:
    low, high = _nibbles(emit, words[:4])
    shift = emit.high_half_to_float(words[4])
    return _two_groups(emit, unit, low, high, emit.low_half_to_float(words[4]), shift)


def _add_fifth_bits(emit: Emitter, bits: Value, words: list[Value]) -> tuple[list[Value], list[Value]]:
    """Bit k of byte b of the fifth bits belongs to byte b of word k of the low nibbles, bit 4 + k to the high ones."""
    low, high = _nibbles(emit, words)
    low = [emit.bit_or(word, emit.bit_and(emit.shift_left(bits, 4 - k), 0x10101010)) for k, word in enumerate(low)]
    high = [
        emit.bit_or(word, emit.bit_and(emit.shift_right(bits, k) if k else bits, 0x10101010))
        for k, word in enumerate(high)
    ]
    return low, high


def _load_q5_0(emit: Emitter, rows: Sequence[Value], unit: Unit) -> list[Value]:
    quants = load(emit, at(emit, rows[0], unit.number, 16), 0, 4)
    bits = load(emit, at(emit, rows[1], unit.number, 4), 0, 1)
    return [*quants, *bits, load_half(emit, at(emit, rows[2], unit.number, 2))]


def _decode_q5_0(emit: Emitter, words: list[Value], unit: Unit) -> list[Group]:
    low, high = _add_fifth_bits(emit, words[4], words[:4])
    scale = emit.low_half_to_float(words[5])
    return _two_groups(emit, unit, low, high, scale, emit.float_multiply(scale, emit.float(-16.0)))


def _load_q5_1(emit: Emitter, rows: Sequence[Value], unit: Unit) -> list[Value]:
    quants = load(emit, at(emit, rows[0], unit.number, 16), 0, 4)
    return [*quants, *(load(emit, at(emit, rows[plane], unit.number, 4), 0, 1)[0] for plane in (1, 2))]


def _decode_q5_1(emit: Emitter, words: list[Value], unit: Unit) -> list[Group]:
    low, high = _add_fifth_bits(emit, words[4], words[:4])
    shift = emit.high_half_to_float(words[5])
    return _two_groups(emit, unit, low, high, emit.low_half_to_float(words[5]), shift)


# -- Q4_K and Q5_K: d dmin | scales and mins | (4 bytes of fifth bits a unit) | 16 bytes of nibbles a unit ------------


def _load_block_k(emit: Emitter, rows: Sequence[Value], unit: Unit, block_bytes: int) -> list[Value]:
    """Quants, then the header, which eight lanes read together."""
    block = at(emit, rows[0], unit.eighth, block_bytes)
    quants = load(emit, at(emit, block, unit.part, 16), block_bytes - 128, 4)
    return [*quants, *load(emit, block, 0, 4)]


def _decode_block_k(emit: Emitter, header: list[Value], unit: Unit, low: list[Value], high: list[Value]) -> list[Group]:
    """Unit j is sub-block j. Byte j of the second and third word: six bits of scale, two of the minimum; then four more
    of the minimum are digit j of the fourth word."""
    packed = emit.permute(header[1], header[2], unit.part)
    scale = small_to_float(emit, emit.bit_and(packed, 0x3F))
    upper = emit.bit_and(emit.shift_right(packed, 2), 0x30)
    lower = emit.bit_and(emit.shift_right(header[3], emit.shift_left(unit.part, 2)), 0xF)
    minimum = small_to_float(emit, emit.bit_or(upper, lower))
    d, minus_d_min = emit.low_half_to_float(header[0]), emit.float_negate(emit.high_half_to_float(header[0]))
    shift = emit.float_multiply(minus_d_min, minimum)
    return _two_groups(emit, unit, low, high, emit.float_multiply(d, scale), shift)


def _load_q4_k(emit: Emitter, rows: Sequence[Value], unit: Unit) -> list[Value]:
    return _load_block_k(emit, rows, unit, 144)


def _decode_q4_k(emit: Emitter, words: list[Value], unit: Unit) -> list[Group]:
    return _decode_block_k(emit, words[4:8], unit, *_nibbles(emit, words[:4]))


def _load_q5_k(emit: Emitter, rows: Sequence[Value], unit: Unit) -> list[Value]:
    bits = load(emit, at(emit, at(emit, rows[0], unit.eighth, 176), unit.part, 4), 16, 1)
    return [*_load_block_k(emit, rows, unit, 176), *bits]


def _decode_q5_k(emit: Emitter, words: list[Value], unit: Unit) -> list[Group]:
    return _decode_block_k(emit, words[4:8], unit, *_add_fifth_bits(emit, words[8], words[:4]))


# -- Q6_K: 16 scales | 8 bytes of bit pairs a unit | 16 bytes of nibbles a unit; a plane of d -------------------------


def _load_q6_k(emit: Emitter, rows: Sequence[Value], unit: Unit) -> list[Value]:
    block = at(emit, rows[0], unit.eighth, 208)
    quants = load(emit, at(emit, block, unit.part, 16), 80, 4)
    bits = load(emit, at(emit, block, unit.part, 8), 16, 2)
    scales = load_half(emit, at(emit, block, unit.part, 2))
    return [*quants, *bits, scales, load_half(emit, at(emit, rows[1], unit.eighth, 2))]


def _decode_q6_k(emit: Emitter, words: list[Value], unit: Unit) -> list[Group]:
    """Bytes are four times the weight less 32: bits 2 to 5 are a nibble, above them bits 2 k and 2 k + 1 of byte b for
    byte b of word k, turned over so that the upper one is a sign. Scales are 128 too large."""
    turned = [emit.rotate_right(word, 4) for word in words[:4]]
    d = emit.float_multiply(emit.low_half_to_float(words[7]), emit.float(0.25))
    first = emit.multiply(unit.number, 32)
    groups = []
    for i, (nibbles, bits) in enumerate(zip((words[:4], turned), words[4:6], strict=True)):
        tops = [emit.shift_left(bits, 6 - 2 * k) if k < 3 else bits for k in range(4)]
        quants = [
            emit.bit_or(emit.bit_and(nibble, 0x3C3C3C3C), emit.bit_and(top, 0xC0C0C0C0))
            for nibble, top in zip(nibbles, tops, strict=True)
        ]
        byte = emit.permute(words[6], emit.word(0x4B000000), 0x7440 + i)
        factor = emit.float_subtract(emit.as_float(byte), emit.float(8388608.0 + 128.0))
        scale = emit.float_multiply(d, factor)
        groups.append(Group(first=first, further=16 * i, quants=quants, scale=scale, shift=None))
    return groups


# -- IQ4_NL, IQ4_XS and MXFP4: planes of nibbles that number levels, and of what belongs to a block ------------------
# A word of nibbles has the numbers of four weights, digit by digit, and above them those of the four 16 further.

_IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_RAISED_E2M1_LEVELS = (1, 2, 3, 4, 5, 7, 9, 13, 1, 0, -1, -2, -3, -5, -7, -11)
"""Twice the level, and 1 more: then as many of them as have a partner are below 0."""


def _number_levels(levels: Sequence[int]) -> tuple[int, ...]:
    """A number for each level; two that differ by 8 have the same sign."""
    below = [i for i in range(16) if levels[i] < 0]
    others = [i for i in range(16) if levels[i] >= 0]
    pairs = [*zip(below[::2], below[1::2], strict=True), *zip(others[::2], others[1::2], strict=True)]
    return tuple(pairs.index(pair) + 8 * pair.index(i) for i in range(16) for pair in pairs if i in pair)


LEVEL_NUMBERS = {
    _T.IQ4_NL: _number_levels(_IQ4_LEVELS),
    _T.IQ4_XS: _number_levels(_IQ4_LEVELS),
    _T.MXFP4: _number_levels(_RAISED_E2M1_LEVELS),
}
"""Nibbles on the device for the nibbles in the file (``weights``)."""


def _table_words(levels: Sequence[int]) -> list[int]:
    return [sum((levels[4 * i + j] & 0xFF) << (8 * j) for j in range(4)) for i in range(4)]


def _by_number(levels: Sequence[int]) -> list[int]:
    found = [0] * 16
    for level, number in zip(levels, _number_levels(levels), strict=True):
        found[number] = level
    return found


def _summand_table(levels: Sequence[int]) -> list[int]:
    """a[k], then b[k]: number k is a[k] and the sign of b[k], number k + 8 is b[k] and the sign of a[k], added up."""
    by_number = _by_number(levels)
    found = []
    for one, other in zip(by_number[:8], by_number[8:], strict=True):
        pairs = ((a, b) for a in (one, one + 1) for b in (other, other + 1))
        found.append(next((a, b) for a, b in pairs if a - (b < 0) == one and b - (a < 0) == other))
    return [a for a, _ in found] + [b for _, b in found]


def _look_up(emit: Emitter, words: list[Value], levels: Sequence[int], number: Value) -> list[list[Value]]:
    """The levels of the four lower digits of every word, and of the upper ones, as signed bytes; then their summands.

    A digit below 8 picks its byte of a table, one of 8 and more the sign of the byte of what is left, eight times. So
    the tables of both halves are asked, the second with digits of 8 more or less, and one answer is a level, the other
    0 or all bits. These turn a complement over where both are combined: levels below 0 in the second table are
    complements. In products each is multiplied by itself instead, and all bits are -1.
    """
    by_number = _by_number(levels)
    complemented = [level if level >= 0 else ~level for level in by_number[8:]]
    whole = emit.held_words(_table_words([*by_number[:8], *complemented]), number)
    parts = emit.held_words(_table_words(_summand_table(levels)), number)

    def ask_both(table: list[Value], digits: Value) -> list[Value]:
        return [
            emit.permute(*table[:2], digits),
            emit.permute(*table[2:], emit.bit_xor(digits, 0x88888888)),
        ]

    found: list[list[Value]] = [[], [], [], []]
    for word in words:
        for i, digits in enumerate((word, emit.shift_right(word, 16))):
            found[i].append(emit.bit_xor(*ask_both(whole, digits)))
            found[2 + i] += ask_both(parts, digits)
    return found


def _levels_of_unit(
    emit: Emitter, unit: Unit, words: list[Value], levels: Sequence[int], scale: Value, shift: Value | None = None
) -> list[Group]:
    low, high, *summands = _look_up(emit, words, levels, emit.as_float(unit.part))
    first = emit.multiply(unit.number, 32)
    return [
        Group(first=first, further=n, quants=quants, scale=scale, shift=shift, summands=parts)
        for n, quants, parts in ((0, low, summands[0]), (16, high, summands[1]))
    ]


def _decode_iq4_nl(emit: Emitter, words: list[Value], unit: Unit) -> list[Group]:
    return _levels_of_unit(emit, unit, words[:4], _IQ4_LEVELS, emit.low_half_to_float(words[4]))


def _load_iq4_xs(emit: Emitter, rows: Sequence[Value], unit: Unit) -> list[Value]:
    quants = load(emit, at(emit, rows[0], unit.number, 16), 0, 4)
    return [*quants, *load(emit, at(emit, rows[1], unit.eighth, 8), 0, 2)]


def _decode_iq4_xs(emit: Emitter, words: list[Value], unit: Unit) -> list[Group]:
    """The header is d, two high bits and then four low bits of the scale of each of eight sub-blocks."""
    low_bits = emit.bit_and(emit.shift_right(words[5], emit.shift_left(unit.part, 2)), 0xF)
    high_bits = emit.shift_right(words[4], emit.add(emit.shift_left(unit.part, 1), 16))
    scale = emit.bit_or(low_bits, emit.shift_left(emit.bit_and(high_bits, 3), 4))
    factor = emit.float_subtract(small_to_float(emit, scale), emit.float(32.0))
    scaled = emit.float_multiply(emit.low_half_to_float(words[4]), factor)
    return _levels_of_unit(emit, unit, words[:4], _IQ4_LEVELS, scaled)


def _load_mxfp4(emit: Emitter, rows: Sequence[Value], unit: Unit) -> list[Value]:
    quants = load(emit, at(emit, rows[0], unit.number, 16), 0, 4)
    return [*quants, load_byte(emit, at(emit, rows[1], unit.number, 1))]


def _decode_mxfp4(emit: Emitter, words: list[Value], unit: Unit) -> list[Group]:
    """The scale is half of the power of two that its byte names, as the levels are doubled; subnormal for 0 and 1,
    whose bits are larger than those that the others are made by.

    Everything is exact: a product of a scale is an integer times a power of two.
    """
    exponent = words[4]
    normal = emit.add(emit.shift_left(exponent, 23), -(1 << 23))
    subnormal = emit.add(emit.shift_left(exponent, 21), 1 << 21)
    scale = emit.as_float(emit.maximum(normal, subnormal))
    return _levels_of_unit(emit, unit, words[:4], _RAISED_E2M1_LEVELS, scale, emit.float_negate(scale))


UNIT_FORMATS = {
    _T.Q8_0: UnitFormat(elements=16, n_words=5, n_groups=1, load=_load_q8_0, decode=_decode_q8_0),
    _T.Q4_0: _uniform(5, _load_q4_0, _decode_q4_0),
    _T.Q4_1: _uniform(5, _load_q4_1, _decode_q4_1),
    _T.Q5_0: _uniform(6, _load_q5_0, _decode_q5_0),
    _T.Q5_1: _uniform(6, _load_q5_1, _decode_q5_1),
    _T.Q4_K: _uniform(8, _load_q4_k, _decode_q4_k),
    _T.Q5_K: _uniform(9, _load_q5_k, _decode_q5_k),
    _T.Q6_K: UnitFormat(elements=32, n_words=8, n_groups=2, is_block=True, load=_load_q6_k, decode=_decode_q6_k),
    **K_UNITS,
    _T.IQ4_NL: _uniform(5, _load_q4_0, _decode_iq4_nl),
    _T.IQ4_XS: _uniform(6, _load_iq4_xs, _decode_iq4_xs),
    _T.MXFP4: _uniform(5, _load_mxfp4, _decode_mxfp4),
}

PAIR_FORMATS = K_PAIRS
"""Twice as large units, for products in which half of a warp has a row; the others have no such."""


def float_elements(weight_type: GGMLQuantizationType) -> int:
    """Weights in 16 bytes of an unquantised type."""
    return {_T.F32: 4, _T.F16: 8, _T.BF16: 8}[weight_type]


def decode_floats(emit: Emitter, weight_type: GGMLQuantizationType, words: list[Value]) -> list[Value]:
    """16 bytes of an unquantised type as float32."""
    if weight_type is _T.F32:
        return [emit.as_float(word) for word in words]
    if weight_type is _T.F16:
        return [half(word) for word in words for half in (emit.low_half_to_float, emit.high_half_to_float)]
    pairs = [(emit.shift_left(word, 16), emit.bit_and(word, 0xFFFF0000)) for word in words]
    return [emit.as_float(half) for pair in pairs for half in pair]
