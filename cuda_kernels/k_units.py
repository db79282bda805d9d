"""Units of Q2_K and Q3_K: a sub-block of 32 weights, or two of them, 128 columns apart. 16 weights have a scale.

Sub-blocks p and p + 4 of a block, p from 0 to 3, lie together. A lane that takes both has sub-blocks next to those of
its neighbours, so that the lanes of a product read activations side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gguf import GGMLQuantizationType

from cuda_kernels.emit import Emitter, Value
from cuda_kernels.unit_formats import LOW_NIBBLES, BytePairs, Group, Unit, UnitFormat, at, load, load_half

_FURTHERS = (0, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a unit of one or two sub-blocks is: its block, the first p, ``upper`` 1 for sub-block p + 4 alone."""

    block: Value
    p: Value
    upper: Value | None
    first: Value

    @classmethod
    def of(cls, emit: Emitter, unit: Unit, n_pairs: int) -> _Place:
        p = emit.bit_and(unit.part, 3)
        if n_pairs == 1:
            upper = emit.shift_right(unit.part, 2)
            return cls(block=unit.eighth, p=p, upper=upper, first=emit.multiply(unit.number, 32))
        block = emit.shift_right(unit.number, 2)
        first = emit.add(emit.shift_left(block, 8), emit.shift_left(p, 5))
        return cls(block=block, p=p, upper=None, first=first)

    def at(self, emit: Emitter, row: Value, p_bytes: int) -> Value:
        """In a plane that has so many bytes for p and p + 4 together."""
        found = at(emit, at(emit, row, self.block, 4 * p_bytes), self.p, p_bytes)
        return found if self.upper is None else at(emit, found, self.upper, p_bytes // 2)


def _times_bytes(
    emit: Emitter, factor: Value, numbers: Value, base: int, selectors: Sequence[int], offset: float
) -> list[Value]:
    """``factor`` times bytes as numbers, each rounded once.

    base, selectors   a word whose bytes, with one of ``numbers`` among them, are that and ``offset`` as a float32
    offset            of few bits, so that ``factor`` times it is exact
    """
    moved, word = emit.float_multiply(factor, emit.float(-offset)), emit.word(base)
    return [emit.fma(factor, emit.as_float(emit.permute(numbers, word, digits)), moved) for digits in selectors]


class _Q2K:
    """Planes: bit pairs, scales and minima, d and that of the minima.

    Bits 2 k and 2 k + 1 of byte b of a word belong to weight 4 k + b of 16; a byte is their scale and their minimum.
    """

    def __init__(self, n_pairs: int) -> None:
        self.n_pairs, self.n_quants = n_pairs, 2 * n_pairs
        self.format = UnitFormat(
            elements=32 * n_pairs,
            n_words=self.n_quants + 2,
            n_groups=2 * n_pairs,
            is_block=True,
            load=self._load,
            decode=self._decode,
            decode_pairs=self._decode_pairs,
        )

    def _load(self, emit: Emitter, rows: Sequence[Value], unit: Unit) -> list[Value]:
        place = _Place.of(emit, unit, self.n_pairs)
        quants = load(emit, place.at(emit, rows[0], 16), 0, self.n_quants)
        scales_at = place.at(emit, rows[1], 4)
        scales = load_half(emit, scales_at) if self.n_pairs == 1 else load(emit, scales_at, 0, 1)[0]
        return [*quants, scales, *load(emit, at(emit, rows[2], place.block, 4), 0, 1)]

    def _decode_pairs(self, emit: Emitter, words: list[Value], unit: Unit) -> BytePairs:
        def quants(pair: int) -> list[Value]:
            shifts = ((word, 2 * k) for word in words[2 * pair : 2 * pair + 2] for k in range(4))
            return [emit.bit_and(emit.shift_right(word, n) if n else word, 0x03030303) for word, n in shifts]

        packed, factors = words[self.n_quants], words[self.n_quants + 1]
        return BytePairs(
            first=_Place.of(emit, unit, self.n_pairs).first,
            furthers=_FURTHERS[: self.n_pairs],
            quants=quants,
            scales=emit.bit_and(packed, LOW_NIBBLES),
            minima=emit.bit_and(emit.shift_right(packed, 4), LOW_NIBBLES),
            d=emit.low_half_to_float(factors),
            minus_d_min=emit.float_negate(emit.high_half_to_float(factors)),
        )

    def _decode(self, emit: Emitter, words: list[Value], unit: Unit) -> list[Group]:
        found = self._decode_pairs(emit, words, unit)
        selectors = [0x7440 + i for i in range(2 * self.n_pairs)]
        scales = _times_bytes(emit, found.d, found.scales, 0x4B000000, selectors, 2.0**23)
        shifts = _times_bytes(emit, found.minus_d_min, found.minima, 0x4B000000, selectors, 2.0**23)
        groups = []
        for pair, further in enumerate(found.furthers):
            quants = found.quants(pair)
            for j in range(2):
                i, own = 2 * pair + j, quants[4 * j : 4 * j + 4]
                group = Group(first=found.first, further=further + 16 * j, quants=own, scale=scales[i], shift=shifts[i])
                groups.append(group)
        return groups


def scale_q3_k(
    emit: Emitter,
    nibbles: Value,
    pairs: Value,
    d: Value,
    p: Value,
    groups: Sequence[int],
    upper: Value | None = None,
) -> list[Value]:
    """Factors of groups of a unit. A scale's lower four bits are a nibble, turned to bits 2 to 5, above which the upper
    two belong; the words are those of units p and p ^ 1, and of all four.
    """
    turned = emit.rotate_right(nibbles, emit.shift_left(emit.bit_and(p, 1), 2))
    tops = emit.shift_left(pairs, emit.subtract(emit.word(6), emit.shift_left(p, 1)))
    scales = emit.bit_or(emit.bit_and(turned, 0x3C3C3C3C), emit.bit_and(tops, 0xC0C0C0C0))
    if upper is not None:
        scales = emit.shift_right(scales, emit.shift_left(upper, 4))
    factor = emit.float_multiply(emit.low_half_to_float(d), emit.float(1.0 / 128.0))
    return _times_bytes(emit, factor, scales, 0x47000000, [0x7404 + (i << 4) for i in groups], 2.0**15 + 128.0)


class _Q3K:
    """Planes: two words of each sub-block, the third ones, scales, d.

    A byte of each of three words has two triples of bits, and in what is left the upper two bits, twice, and the
    lowest, of two more. Turned over, a triple on top of a byte is 32 times the weight less 4.
    """

    def __init__(self, n_pairs: int) -> None:
        self.n_pairs, self.n_quants = n_pairs, 2 * n_pairs
        self.format = UnitFormat(
            elements=32 * n_pairs,
            n_words=3 * n_pairs + 3,
            n_groups=2 * n_pairs,
            is_block=True,
            load=self._load,
            decode=self._decode,
        )

    def _load(self, emit: Emitter, rows: Sequence[Value], unit: Unit) -> list[Value]:
        place = _Place.of(emit, unit, self.n_pairs)
        quants = load(emit, place.at(emit, rows[0], 16), 0, self.n_quants)
        others = load(emit, place.at(emit, rows[1], 8), 0, self.n_pairs)
        scales_at = at(emit, rows[2], place.block, 12)
        nibbles = load(emit, at(emit, scales_at, emit.shift_right(place.p, 1), 4), 0, 1)
        pairs = load(emit, scales_at, 8, 1)
        return [*quants, *others, *nibbles, *pairs, load_half(emit, at(emit, rows[3], place.block, 2))]

    def _decode(self, emit: Emitter, words: list[Value], unit: Unit) -> list[Group]:
        place = _Place.of(emit, unit, self.n_pairs)
        nibbles, pairs, d = words[3 * self.n_pairs :]
        groups_of = range(2 * self.n_pairs)
        factors = scale_q3_k(emit, nibbles, pairs, d, place.p, groups_of, place.upper)
        groups = []
        for pair, further in enumerate(_FURTHERS[: self.n_pairs]):
            a, b, c = words[2 * pair], words[2 * pair + 1], words[self.n_quants + pair]
            triples = [emit.bit_and(emit.shift_left(word, n), 0xE0E0E0E0) for word in (a, b, c) for n in (0, 3)]
            for word, n in ((a, 5), (b, 4)):
                upper, lowest = emit.shift_left(word, 6), emit.shift_left(c, n)
                triples.append(emit.bit_or(emit.bit_and(upper, 0xC0C0C0C0), emit.bit_and(lowest, 0x20202020)))
            for j in range(2):
                own, scale = triples[4 * j : 4 * j + 4], factors[2 * pair + j]
                groups.append(Group(first=place.first, further=further + 16 * j, quants=own, scale=scale, shift=None))
        return groups


_T = GGMLQuantizationType
K_UNITS = {_T.Q2_K: _Q2K(1).format, _T.Q3_K: _Q3K(1).format}
K_PAIRS = {_T.Q2_K: _Q2K(2).format, _T.Q3_K: _Q3K(2).format}
"""Units of two sub-blocks."""
