"""How prefill attention reads every cache type: a unit of a row's bytes becomes words of float16.

A unit is what one thread expands at a time: its part of each plane of the region, read from the page or from a copy of
it in shared memory. Integers become float16 exactly and are multiplied by their scale with one rounding; levels of
turbo types are rounded to float16 before, as float32 is. Where units go is decided in ``prefill_copies`` and
``panel_copies``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cuda_kernels.emit import Emitter, Value
from kvs_core.kv_types import KvType, RegionGeometry

_UNDER_BYTES = 0x64646464
"""A byte b under 0x64 is the float16 1024 + b."""
_HALF_1024 = 0x64006400
_IQ4_NL_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_BIAS = 128
_TURBO4_LEVELS = (0.011353, 0.034311, 0.058069, 0.083317, 0.111065, 0.143047, 0.182907, 0.241556)
_TURBO3_LEVELS = (0.021460, 0.065717, 0.117832, 0.190685)
_TURBO2_LEVELS = (0.039994, 0.133462)

_PANEL_ELEMENTS = 64  # 128 bytes of float16: all banks
_NEIGHBOURS = 8

Part = Sequence[Value]
"""Words of one plane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """One plane of a region, cut into the parts of units.

    row_bytes    from one row to the next
    n_bytes      of a unit's part: 2, 4, 8 or 16, or a multiple of 16
    n_sharing    neighbouring units of a row that share a part
    """

    offset: int
    row_bytes: int
    n_bytes: int
    n_sharing: int

    @property
    def n_words(self) -> int:
        return max(1, self.n_bytes // 4)

    def row_offset(self, emit: Emitter, row: Value, unit: Value) -> Value:
        """Bytes from the plane's start to a unit's part."""
        part = emit.divide(unit, self.n_sharing) if self.n_sharing > 1 else unit
        return emit.add(emit.multiply(row, self.row_bytes), emit.multiply(part, self.n_bytes))


class RegionUnits:
    """The units of a region's rows: ``n_elements`` neighbouring elements, a power of two.

    ``planes``: quants, high bits where the type has them, scales where it has them. ``expand(emit, parts)``: the words
    of each plane's part to float16 pairs, in order.
    """

    def __init__(self, region: RegionGeometry, n_elements: int | None = None) -> None:
        kv_type, head_dim = region.kv_type, region.head_dim
        self.n_elements = n_elements or _ELEMENTS.get(kv_type, 32)
        self.row_units = head_dim // self.n_elements
        self._expand = _EXPANSIONS[kv_type]
        planes = [(0, region.row_bytes, region.row_bytes // self.row_units, 1)]
        if region.high_row_bytes:
            planes.append((region.high_offset, region.high_row_bytes, region.high_row_bytes // self.row_units, 1))
        if region.scale_row_bytes:
            n_sharing = max(1, region.group_elements // self.n_elements)
            planes.append((region.scale_offset, region.scale_row_bytes, kv_type.scale_bytes_per_block, n_sharing))
        self.planes = [Plane(offset=o, row_bytes=r, n_bytes=n, n_sharing=s) for o, r, n, s in planes]

    @property
    def n_words(self) -> int:
        """Of all parts of a unit."""
        return sum(plane.n_words for plane in self.planes)

    def expand(self, emit: Emitter, parts: Sequence[Part]) -> list[Value]:
        return self._expand(emit, *parts)

    def split(self, words: Sequence[Value]) -> list[Part]:
        """The parts of a unit whose words were loaded one after the other."""
        parts, begin = [], 0
        for plane in self.planes:
            parts.append(words[begin : begin + plane.n_words])
            begin += plane.n_words
        return parts


@dataclass(frozen=True, slots=True)
class UnitPlaces:
    """Which unit a thread takes: eight neighbouring threads store into eight different groups of four banks.

    Rows of a multiple of 64 elements swap their 16-byte pieces by row number, so eight such threads take what units
    128 bytes of a row have, of as many rows as it needs; in other rows neighbours take neighbours.
    """

    units: RegionUnits
    head_dim: int

    def find(self, emit: Emitter, index: Value) -> tuple[Value, Value]:
        """Row and unit in it; ``index`` counts the units of a tile."""
        n_panels, rest = divmod(self.head_dim, _PANEL_ELEMENTS)
        if rest:
            return emit.divide(index, self.units.row_units), emit.remainder(index, self.units.row_units)
        panel_units = _PANEL_ELEMENTS // self.units.n_elements
        n_rows = _NEIGHBOURS // panel_units
        group = emit.shift_right(index, 3)
        low_row = emit.bit_and(emit.divide(index, panel_units), n_rows - 1)
        row = emit.add(emit.multiply(emit.divide(group, n_panels), n_rows), low_row)
        low_unit = emit.bit_and(index, panel_units - 1)
        return row, emit.add(emit.multiply(emit.remainder(group, n_panels), panel_units), low_unit)


# -- types without blocks


def _keep(emit: Emitter, words: Part) -> list[Value]:
    return list(words)


def _expand_f32(emit: Emitter, words: Part) -> list[Value]:
    values = [emit.as_float(word) for word in words]
    pairs = [emit.pack_half2(values[i], values[i + 1]) for i in range(0, len(values), 2)]
    return [emit.half2_clamp(pair) for pair in pairs]


def expand_bf16(emit: Emitter, words: Part) -> list[Value]:
    """Exact from 2**-17 to 65504; beyond that the largest float16, below it within 2**-25."""
    pairs = [(emit.shift_left(word, 16), emit.bit_and(word, 0xFFFF0000)) for word in words]
    halves = [emit.pack_half2(emit.as_float(low), emit.as_float(high)) for low, high in pairs]
    return [emit.half2_clamp(half2) for half2 in halves]


# -- blocks of integers


def _both(emit: Emitter, halves: Part, i: int = 0) -> Value:
    """Half ``i`` of a word in both halves."""
    return emit.permute(halves[0], emit.word(0), 0x3232 if i else 0x1010)


def _over_1024(emit: Emitter, words: Sequence[Value]) -> list[Value]:
    """Unsigned bytes to float16, 1024 more."""
    return [emit.permute(word, emit.word(_UNDER_BYTES), digits) for word in words for digits in (0x4140, 0x4342)]


def _scaled(emit: Emitter, halves: Sequence[Value], offset: int, scale: Part) -> list[Value]:
    """(h - 1024 - offset) * scale, rounded once."""
    both, zero = _both(emit, scale), emit.word(_HALF_1024 + 0x10001 * offset)
    return [emit.half2_multiply(emit.half2_subtract(half2, zero), both) for half2 in halves]


def _raised(emit: Emitter, halves: Sequence[Value], scale_and_least: Part) -> list[Value]:
    """(h - 1024) * scale + least, rounded once."""
    scale, least = _both(emit, scale_and_least), _both(emit, scale_and_least, 1)
    zero = emit.word(_HALF_1024)
    return [emit.half2_fma(emit.half2_subtract(half2, zero), scale, least) for half2 in halves]


def _nibbles(emit: Emitter, quants: Part) -> list[Value]:
    """The low four bits of every byte, then the high ones: the order of GGML's blocks."""
    low = [emit.bit_and(word, 0x0F0F0F0F) for word in quants]
    return low + [emit.bit_and(emit.shift_right(word, 4), 0x0F0F0F0F) for word in quants]


def _with_fifth_bits(emit: Emitter, nibbles: Sequence[Value], high: Part) -> list[Value]:
    """Bit i of ``high`` belongs to element i. Four bits are spread over four bytes by one product."""
    result = []
    for i, word in enumerate(nibbles):
        bits = emit.bit_and(emit.shift_right(high[0], 4 * i) if i else high[0], 0xF)
        result.append(emit.bit_or(word, emit.bit_and(emit.multiply(bits, 0x02040810), 0x10101010)))
    return result


def _expand_q8_0(emit: Emitter, quants: Part, scale: Part) -> list[Value]:
    both = _both(emit, scale)
    return [half2 for word in quants for half2 in emit.dequantise_bytes(word, both)]


def _expand_q4_0(emit: Emitter, quants: Part, scale: Part) -> list[Value]:
    return _scaled(emit, _over_1024(emit, _nibbles(emit, quants)), 8, scale)


def _expand_q4_1(emit: Emitter, quants: Part, scale: Part) -> list[Value]:
    return _raised(emit, _over_1024(emit, _nibbles(emit, quants)), scale)


def _expand_q5_0(emit: Emitter, quants: Part, high: Part, scale: Part) -> list[Value]:
    return _scaled(emit, _over_1024(emit, _with_fifth_bits(emit, _nibbles(emit, quants), high)), 16, scale)


def _expand_q5_1(emit: Emitter, quants: Part, high: Part, scale: Part) -> list[Value]:
    return _raised(emit, _over_1024(emit, _with_fifth_bits(emit, _nibbles(emit, quants), high)), scale)


def _expand_iq4_nl(emit: Emitter, quants: Part, scale: Part) -> list[Value]:
    raised = np.array([level + _BIAS for level in _IQ4_NL_LEVELS], np.uint8)
    table = [emit.word(word) for word in raised.view("<u4").tolist()]
    low, high = [], []
    under = emit.word(_UNDER_BYTES)
    for word in quants:
        within = emit.bit_and(word, 0x77777777)
        upper = emit.bit_xor(emit.bit_and(emit.shift_right(word, 1), 0x44444444), 0x32103210)
        for shift in (0, 16):  # two bytes, four nibbles at a time
            digits = emit.shift_right(within, shift) if shift else within
            choice = emit.shift_right(upper, shift) if shift else upper
            halves = [emit.permute(table[i], table[i + 1], digits) for i in (0, 2)]
            levels = emit.permute(halves[0], halves[1], choice)
            low.append(emit.permute(levels, under, 0x4240))
            high.append(emit.permute(levels, under, 0x4341))
    return _scaled(emit, low + high, _BIAS, scale)


# -- levels of TurboQuant


def _tables(emit: Emitter, levels: Sequence[float]) -> tuple[list[Value], list[Value]]:
    """Up to eight float16, as words of their low bytes and words of their high bytes."""
    padded = np.zeros(8, np.float16)
    padded[: len(levels)] = levels
    in_bytes = padded.view(np.uint8).reshape(8, 2)
    low, high = (np.ascontiguousarray(in_bytes[:, i]).view("<u4").tolist() for i in range(2))
    return [emit.word(word) for word in low], [emit.word(word) for word in high]


def _pick(emit: Emitter, tables: tuple[list[Value], list[Value]], digits: Value) -> tuple[Value, Value]:
    """Low and high bytes of the levels that four digits name."""
    low, high = (emit.permute(table[0], table[1], digits) for table in tables)
    return low, high


def _joined(emit: Emitter, low: Value, high: Value, both: Value) -> list[Value]:
    """Four levels, given as low and as high bytes, times the scale."""
    return [emit.half2_multiply(emit.permute(low, high, digits), both) for digits in (0x5140, 0x7362)]


def _mirrored(levels: Sequence[float]) -> list[float]:
    return [*(-level for level in reversed(levels)), *levels]


def _expand_turbo4(emit: Emitter, quants: Part, scale: Part) -> list[Value]:
    """Nibble 8 + i is level i, nibble 7 - i its negative."""
    tables, both = _tables(emit, _TURBO4_LEVELS), _both(emit, scale)
    result = []
    for word in quants:
        upper = emit.bit_and(word, 0x88888888)
        sevens = emit.subtract(upper, emit.shift_right(upper, 3))  # 7 in every nibble of the upper half
        digits = emit.bit_and(emit.bit_xor(emit.bit_xor(word, sevens), 0xFFFFFFFF), 0x77777777)
        raised = emit.shift_left(word, 4)
        for shift, signs in ((0, 0xD9C8), (16, 0xFBEA)):
            low, high = _pick(emit, tables, emit.shift_right(digits, shift) if shift else digits)
            positive = emit.permute(raised, word, signs)  # bytes of the signs of four nibbles
            negative = emit.bit_and(emit.bit_xor(positive, 0xFFFFFFFF), 0x80808080)
            result += _joined(emit, low, emit.bit_xor(high, negative), both)
    return result


def _spread(emit: Emitter, bits: Value, steps: Sequence[tuple[int, int]]) -> Value:
    """Move the upper part of each group of bits up, half a group at a time; masks keep what is in its place."""
    for shift, mask in steps:
        bits = emit.bit_and(emit.bit_or(bits, emit.shift_left(bits, shift)), mask)
    return bits


_PAIRS_TO_NIBBLES = ((8, 0x00FF00FF), (4, 0x0F0F0F0F), (2, 0x33333333))
_BITS_TO_NIBBLES = ((12, 0x000F000F), (6, 0x03030303), (3, 0x11111111))


def _pair_digits(emit: Emitter, word: Value) -> list[Value]:
    """Two bits an element to nibbles, eight elements a word."""
    groups = (emit.bit_and(word, 0xFFFF), emit.shift_right(word, 16))
    return [_spread(emit, group, _PAIRS_TO_NIBBLES) for group in groups]


def _expand_turbo3(emit: Emitter, quants: Part, high: Part, scale: Part) -> list[Value]:
    tables, both = _tables(emit, _mirrored(_TURBO3_LEVELS)), _both(emit, scale)
    result = []
    for i, low_digits in enumerate(digits for word in quants for digits in _pair_digits(emit, word)):
        bits = emit.bit_and(emit.shift_right(high[0], 8 * i) if i else high[0], 0xFF)
        third = emit.shift_left(_spread(emit, bits, _BITS_TO_NIBBLES), 2)
        result += _eight_levels(emit, tables, emit.bit_or(low_digits, third), both)
    return result


def _expand_turbo2(emit: Emitter, quants: Part, scale: Part) -> list[Value]:
    tables, both = _tables(emit, _mirrored(_TURBO2_LEVELS)), _both(emit, scale)
    every = [digits for word in quants for digits in _pair_digits(emit, word)]
    return [half2 for digits in every for half2 in _eight_levels(emit, tables, digits, both)]


def _eight_levels(emit: Emitter, tables: tuple[list[Value], list[Value]], digits: Value, both: Value) -> list[Value]:
    """Levels of the eight nibbles of ``digits``."""
    first = _pick(emit, tables, digits)
    second = _pick(emit, tables, emit.shift_right(digits, 16))
    return _joined(emit, *first, both) + _joined(emit, *second, both)


_ELEMENTS = {KvType.F32: 8, KvType.F16: 8, KvType.BF16: 8, KvType.Q8_0: 16}
"""Of a unit; 32 for other types."""
_EXPANSIONS: dict[KvType, Callable[..., list[Value]]] = {
    KvType.F32: _expand_f32,
    KvType.F16: _keep,
    KvType.BF16: expand_bf16,
    KvType.Q8_0: _expand_q8_0,
    KvType.Q5_1: _expand_q5_1,
    KvType.Q5_0: _expand_q5_0,
    KvType.Q4_1: _expand_q4_1,
    KvType.Q4_0: _expand_q4_0,
    KvType.IQ4_NL: _expand_iq4_nl,
    KvType.TURBO4: _expand_turbo4,
    KvType.TURBO3: _expand_turbo3,
    KvType.TURBO2: _expand_turbo2,
}
