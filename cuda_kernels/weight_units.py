"""Quantised weights in registers: what one lane loads at once, as integers with a scale and an offset.

A unit is 16 bytes of quants of one row and whatever belongs to them. It decodes to groups of 16 consecutive weights,

    weight = scale * q + shift,       q: four words of four bytes, signed or small enough not to matter

so matrix-vector products (``matvec``) and dequantisation (``dequant``) need no code per type. Block formats: the GGUF
specification and its reference dequantisation in the ``gguf`` package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gguf import GGMLQuantizationType

from cuda_kernels.emit import Emitter, Value

GROUP_ELEMENTS = 16

_T = GGMLQuantizationType
_LOW_NIBBLES = 0x0F0F0F0F


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """16 consecutive weights from column ``first + further`` on. ``shift`` None means 0.

    All groups of a unit share ``first``, so that one address serves what belongs to their columns.
    """

    first: Value
    further: int
    quants: list[Value]
    scale: Value
    shift: Value | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Unit ``32 step + lane`` of a row. A lane's place in a block of eight units is the same in every step."""

    number: Value
    eighth: Value
    part: Value

    @classmethod
    def of(cls, emit: Emitter, step: Value, lane: Value) -> Unit:
        return cls(
            number=emit.add(emit.shift_left(step, 5), lane),
            eighth=emit.add(emit.shift_left(step, 2), emit.shift_right(lane, 3)),
            part=emit.bit_and(lane, 7),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFormat:
    """Units of one quantised type.

    is_uniform                the groups of a unit share scale and shift

    load(emit, rows, unit)    words of a unit of a row; ``rows``: the row's address in each plane
    decode(emit, words, unit) its groups
    """

    elements: int
    n_words: int
    n_groups: int
    load: Callable[[Emitter, Sequence[Value], Unit], list[Value]]
    decode: Callable[[Emitter, list[Value], Unit], list[Group]]
    is_uniform: bool = False


def _uniform(
    n_words: int,
    load: Callable[[Emitter, Sequence[Value], Unit], list[Value]],
    decode: Callable[[Emitter, list[Value], Unit], list[Group]],
) -> UnitFormat:
    """Of units that are a block of 32 weights each."""
    return UnitFormat(elements=32, n_words=n_words, n_groups=2, is_uniform=True, load=load, decode=decode)


def move(emit: Emitter, address: Value, n_bytes: Value) -> Value:
    """An address in global or shared memory, so many bytes (a word) further."""
    return emit.add(address, n_bytes if emit.is_shared(address) else emit.widen(n_bytes))


def _at(emit: Emitter, row: Value, index: Value, n_bytes: int) -> Value:
    return move(emit, row, emit.multiply(index, n_bytes))


def _load(emit: Emitter, address: Value, offset: int, n_words: int) -> list[Value]:
    """Words of weights: read once from global memory, or from where a copy in shared memory put them."""
    if emit.is_shared(address):
        return emit.load_shared_words(address, offset, n_words)
    return emit.load_stream(address, offset, n_words)


def _nibbles(emit: Emitter, words: list[Value]) -> tuple[list[Value], list[Value]]:
    low = [emit.bit_and(word, _LOW_NIBBLES) for word in words]
    return low, [emit.bit_and(emit.shift_right(word, 4), _LOW_NIBBLES) for word in words]


def _two_groups(
    emit: Emitter, unit: Unit, low: list[Value], high: list[Value], scale: Value, shift: Value
) -> list[Group]:
    """Blocks of 32: the low nibbles are the first 16 weights, the high ones the others."""
    first = emit.multiply(unit.number, 32)
    pairs = ((0, low), (16, high))
    return [Group(first=first, further=n, quants=quants, scale=scale, shift=shift) for n, quants in pairs]


# -- Q8_0: planes q32, d ------------------------------------------------------------------------------------------


def _load_q8_0(emit: Emitter, rows: Sequence[Value], unit: Unit) -> list[Value]:
    scale = emit.load_half(_at(emit, rows[1], emit.shift_right(unit.number, 1), 2), 0)
    return [*_load(emit, _at(emit, rows[0], unit.number, 16), 0, 4), scale]


def _decode_q8_0(emit: Emitter, words: list[Value], unit: Unit) -> list[Group]:
    scale = emit.low_half_to_float(words[4])
    return [Group(first=emit.multiply(unit.number, 16), further=0, quants=words[:4], scale=scale, shift=None)]


# -- Q4_0, Q4_1, Q5_0, Q5_1: planes of nibbles, of high bits (Q5), of d or d and m -----------------------------------


def _load_q4_0(emit: Emitter, rows: Sequence[Value], unit: Unit) -> list[Value]:
    quants = _load(emit, _at(emit, rows[0], unit.number, 16), 0, 4)
    return [*quants, emit.load_half(_at(emit, rows[1], unit.number, 2), 0)]


def _decode_q4_0(emit: Emitter, words: list[Value], unit: Unit) -> list[Group]:
    low, high = _nibbles(emit, words[:4])
    scale = emit.low_half_to_float(words[4])
    return _two_groups(emit, unit, low, high, scale, emit.float_multiply(scale, emit.float(-8.0)))


def _load_q4_1(emit: Emitter, rows: Sequence[Value], unit: Unit) -> list[Value]:
    quants = _load(emit, _at(emit, rows[0], unit.number, 16), 0, 4)
    return [*quants, *_load(emit, _at(emit, rows[1], unit.number, 4), 0, 1)]


def _decode_q4_1(emit: Emitter, words: list[Value], unit: Unit) -> list[Group]:
    low, high = _nibbles(emit, words[:4])
    shift = emit.high_half_to_float(words[4])
    return _two_groups(emit, unit, low, high, emit.low_half_to_float(words[4]), shift)


def _add_fifth_bits(emit: Emitter, bits: Value, low: list[Value], high: list[Value]) -> tuple[list[Value], list[Value]]:
    """Bit i of ``bits`` becomes bit 4 of weight i of the block."""

    def spread(word: Value, first_bit: int) -> Value:
        four = emit.bit_and(emit.shift_right(bits, first_bit) if first_bit else bits, 0xF)
        one_a_byte = emit.bit_and(emit.multiply(four, 0x00204081), 0x01010101)
        return emit.bit_or(word, emit.shift_left(one_a_byte, 4))

    return [spread(w, 4 * i) for i, w in enumerate(low)], [spread(w, 16 + 4 * i) for i, w in enumerate(high)]


def _load_q5_0(emit: Emitter, rows: Sequence[Value], unit: Unit) -> list[Value]:
    quants = _load(emit, _at(emit, rows[0], unit.number, 16), 0, 4)
    bits = _load(emit, _at(emit, rows[1], unit.number, 4), 0, 1)
    return [*quants, *bits, emit.load_half(_at(emit, rows[2], unit.number, 2), 0)]


def _decode_q5_0(emit: Emitter, words: list[Value], unit: Unit) -> list[Group]:
    low, high = _add_fifth_bits(emit, words[4], *_nibbles(emit, words[:4]))
    scale = emit.low_half_to_float(words[5])
    return _two_groups(emit, unit, low, high, scale, emit.float_multiply(scale, emit.float(-16.0)))


def _load_q5_1(emit: Emitter, rows: Sequence[Value], unit: Unit) -> list[Value]:
    quants = _load(emit, _at(emit, rows[0], unit.number, 16), 0, 4)
    return [*quants, *(_load(emit, _at(emit, rows[plane], unit.number, 4), 0, 1)[0] for plane in (1, 2))]


def _decode_q5_1(emit: Emitter, words: list[Value], unit: Unit) -> list[Group]:
    low, high = _add_fifth_bits(emit, words[4], *_nibbles(emit, words[:4]))
    shift = emit.high_half_to_float(words[5])
    return _two_groups(emit, unit, low, high, emit.low_half_to_float(words[5]), shift)


# -- Q4_K and Q5_K: d dmin | scales and mins | (4 bytes of fifth bits a unit) | 16 bytes of nibbles a unit ------------


def _load_block_k(emit: Emitter, rows: Sequence[Value], unit: Unit, block_bytes: int) -> list[Value]:
    """Quants, then the header, which eight lanes read together."""
    block = _at(emit, rows[0], unit.eighth, block_bytes)
    quants = _load(emit, _at(emit, block, unit.part, 16), block_bytes - 128, 4)
    return [*quants, *_load(emit, block, 0, 4)]


def _decode_block_k(emit: Emitter, header: list[Value], unit: Unit, low: list[Value], high: list[Value]) -> list[Group]:
    """Unit j is sub-block j. Byte j of the second and third word: six bits of scale, two of the minimum; then four more
    of the minimum are digit j of the fourth word."""
    packed = emit.permute(header[1], header[2], unit.part)
    scale = _small_to_float(emit, emit.bit_and(packed, 0x3F))
    upper = emit.bit_and(emit.shift_right(packed, 2), 0x30)
    lower = emit.bit_and(emit.shift_right(header[3], emit.shift_left(unit.part, 2)), 0xF)
    minimum = _small_to_float(emit, emit.bit_or(upper, lower))
    d, minus_d_min = emit.low_half_to_float(header[0]), emit.float_negate(emit.high_half_to_float(header[0]))
    shift = emit.float_multiply(minus_d_min, minimum)
    return _two_groups(emit, unit, low, high, emit.float_multiply(d, scale), shift)


def _small_to_float(emit: Emitter, word: Value) -> Value:
    """A word below 2**23 as float32: put under the bits of 2**23, which is then taken off."""
    return emit.float_subtract(emit.as_float(emit.bit_or(word, emit.word(0x4B000000))), emit.float(8388608.0))


def _load_q4_k(emit: Emitter, rows: Sequence[Value], unit: Unit) -> list[Value]:
    return _load_block_k(emit, rows, unit, 144)


def _decode_q4_k(emit: Emitter, words: list[Value], unit: Unit) -> list[Group]:
    return _decode_block_k(emit, words[4:8], unit, *_nibbles(emit, words[:4]))


def _load_q5_k(emit: Emitter, rows: Sequence[Value], unit: Unit) -> list[Value]:
    bits = _load(emit, _at(emit, _at(emit, rows[0], unit.eighth, 176), unit.part, 4), 16, 1)
    return [*_load_block_k(emit, rows, unit, 176), *bits]


def _decode_q5_k(emit: Emitter, words: list[Value], unit: Unit) -> list[Group]:
    """Bit k of byte b of the fifth bits belongs to byte b of word k of the low nibbles, bit 4 + k to the high ones."""
    low, high = _nibbles(emit, words[:4])
    bits = words[8]
    low = [emit.bit_or(word, emit.bit_and(emit.shift_left(bits, 4 - k), 0x10101010)) for k, word in enumerate(low)]
    high = [
        emit.bit_or(word, emit.bit_and(emit.shift_right(bits, k) if k else bits, 0x10101010))
        for k, word in enumerate(high)
    ]
    return _decode_block_k(emit, words[4:8], unit, low, high)


# -- Q6_K: planes of 128 bytes of low nibbles, 64 of high bit pairs, 16 signed scales, d --------------------------


def _load_q6_k(emit: Emitter, rows: Sequence[Value], unit: Unit) -> list[Value]:
    block, part = unit.eighth, unit.part
    quants = _load(emit, _at(emit, rows[0], unit.number, 16), 0, 4)
    half_bits = emit.add(emit.shift_left(emit.shift_right(part, 2), 1), emit.bit_and(part, 1))
    bits = _load(emit, _at(emit, _at(emit, rows[1], block, 64), half_bits, 16), 0, 4)
    scales = _load(emit, _at(emit, rows[2], block, 16), 0, 4)
    return [*quants, *bits, *scales, emit.load_half(_at(emit, rows[3], block, 2), 0)]


def _decode_q6_k(emit: Emitter, words: list[Value], unit: Unit) -> list[Group]:
    """Part j holds 16 weights at 128 (j / 4) + 16 (j % 4) in its low nibbles, those 64 further in its high ones."""
    part = unit.part
    quarter = emit.bit_and(part, 3)
    pair = emit.bit_and(quarter, 2)  # bits 0 and 1 of the byte for the first 32 weights, 2 and 3 for the next
    shifted = [emit.shift_right(word, pair) for word in words[4:8]]
    low, high = _nibbles(emit, words[:4])
    low = [
        emit.bit_or(word, emit.bit_and(emit.shift_left(bits, 4), 0x30303030))
        for word, bits in zip(low, shifted, strict=True)
    ]
    high = [emit.bit_or(word, emit.bit_and(bits, 0x30303030)) for word, bits in zip(high, shifted, strict=True)]

    d = emit.low_half_to_float(words[12])
    is_second_half = emit.less(emit.word(3), part)
    of_low = emit.select(is_second_half, words[10], words[8])  # scales 0 to 3 of this half of the block
    of_high = emit.select(is_second_half, words[11], words[9])  # scales 4 to 7
    up = emit.subtract(emit.word(24), emit.shift_left(quarter, 3))
    first = emit.add(
        emit.add(emit.shift_left(unit.eighth, 8), emit.shift_left(emit.shift_right(part, 2), 7)),
        emit.shift_left(quarter, 4),
    )
    groups = []
    for i, (quants, scales) in enumerate(((low, of_low), (high, of_high))):
        signed = emit.shift_right_signed(emit.shift_left(scales, up), 24)
        scale = emit.float_multiply(d, emit.int_to_float(signed))
        shift = emit.float_multiply(scale, emit.float(-32.0))
        groups.append(Group(first=first, further=64 * i, quants=quants, scale=scale, shift=shift))
    return groups


UNIT_FORMATS = {
    _T.Q8_0: UnitFormat(elements=16, n_words=5, n_groups=1, load=_load_q8_0, decode=_decode_q8_0),
    _T.Q4_0: _uniform(5, _load_q4_0, _decode_q4_0),
    _T.Q4_1: _uniform(5, _load_q4_1, _decode_q4_1),
    _T.Q5_0: _uniform(6, _load_q5_0, _decode_q5_0),
    _T.Q5_1: _uniform(6, _load_q5_1, _decode_q5_1),
    _T.Q4_K: _uniform(8, _load_q4_k, _decode_q4_k),
    _T.Q5_K: _uniform(9, _load_q5_k, _decode_q5_k),
    _T.Q6_K: UnitFormat(elements=32, n_words=13, n_groups=2, load=_load_q6_k, decode=_decode_q6_k),
}


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
