"""Rows of a weight matrix times vectors, in registers: what one lane of a warp loads, multiplies and adds up.

A lane takes every 32nd unit of 16 bytes of its rows, in order; then the lanes are added in a fixed tree. Every vector
is reduced by the same instructions in the same order, however many there are, so a step of several tokens gives each
the bits of a step of its own. The kernels are in ``matvec`` and ``gated_matvec``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gguf import GGMLQuantizationType
from numba.cuda import types

from cuda_kernels.emit import Emitter, Value, emitted, floats, words
from cuda_kernels.unit_formats import GROUP_ELEMENTS, Group, Unit, UnitFormat, move
from cuda_kernels.weight_units import PAIR_FORMATS, UNIT_FORMATS, decode_floats, float_elements
from cuda_kernels.weights import MAX_MATRICES, MAX_PLANES
from kvs_core.units import ceil_div

SCALE_BYTES = 8  # scale and sum of a group of activations

_FLOAT_TYPES = (GGMLQuantizationType.F16, GGMLQuantizationType.BF16, GGMLQuantizationType.F32)


_MANY = types.UniTuple
SIGNATURE = (
    _MANY(types.int64, MAX_MATRICES * MAX_PLANES),  # addresses of planes
    _MANY(types.int64, MAX_PLANES),  # row strides, which all matrices share
    _MANY(types.int64, MAX_MATRICES),  # out
    _MANY(types.int64, MAX_MATRICES),  # bias, or 0
    _MANY(types.int32, MAX_MATRICES),  # rows
    types.int64,  # vectors
    types.int64,  # scales
    types.int32,  # columns
)
"""Parameters of every kernel of products."""


def takes_float_activations(weight_type: GGMLQuantizationType) -> bool:
    """Whether products read the vectors as float32 (unquantised weights) or as 8-bit blocks."""
    return weight_type in _FLOAT_TYPES


def unit_elements(weight_type: GGMLQuantizationType) -> int:
    """Weights of one unit, what a lane reads at a time."""
    if takes_float_activations(weight_type):
        return float_elements(weight_type)
    return UNIT_FORMATS[weight_type].elements


def count_row_lanes(weight_type: GGMLQuantizationType) -> int:
    """Lanes of a warp that share a row in products: half of them where there are units of 64 weights."""
    return 16 if weight_type in PAIR_FORMATS else 32


class RowUnits:
    """The inner step of a product of ``n_rows`` rows and ``n_vectors`` vectors for one weight type.

    With ``n_lanes`` 16 instead of 32 the halves of a warp take half of the rows each; both read the same activations.

    Attributes that are intrinsics (``plane_0`` .. ``plane_3``: addresses of the first row in each plane):
    load(plane_0 .. plane_3, stride_0 .. stride_3, step, lane)  words of unit 32 step + lane of the rows
    add(sums, words, step, lane, vectors, scales, n_cols)       sums [rows, vectors] plus the products of this unit
    total(sums, lane)                                           sum ``lane // lanes_per_total``, all lanes added
    number(lane)                                                which of all sums a lane of halves has
    zeros()                                                     cleared sums
    """

    def __init__(
        self,
        weight_type: GGMLQuantizationType,
        n_rows: int,
        n_vectors: int,
        *,
        has_shared_vectors: bool = False,
        n_lanes: int = 32,
    ) -> None:
        self.weight_type, self.n_vectors, self.n_lanes = weight_type, n_vectors, n_lanes
        self.n_rows = n_rows if n_lanes == 32 else ceil_div(n_rows, 2)
        self.skipped_rows = n_rows - self.n_rows
        is_float = takes_float_activations(weight_type)
        self.n_words = 4 if is_float else self.unit_format.n_words
        self.elements = float_elements(weight_type) if is_float else self.unit_format.elements
        self.n_sums = self.n_rows * n_vectors
        i32, i64 = types.int32, types.int64
        sums, loaded = floats(self.n_sums), words(self.n_rows * self.n_words)
        self.load = emitted(loaded, *[i64] * (2 * MAX_PLANES), i32, i32)(self._load)
        self.load_shared = emitted(loaded, types.uint32, i32, i32, i32)(self._load_shared)
        body = self._add_floats if is_float else self.emit_add
        at = types.uint32 if has_shared_vectors else i64
        self.add = emitted(sums, sums, loaded, i32, i32, at, at, i32)(body)
        self.total = emitted(types.float32, sums, i32)(self._total)
        self.number = emitted(i32, i32)(self._number)
        self.zeros = emitted(sums)(lambda emit: [emit.float(0.0)] * self.n_sums)

    @property
    def unit_format(self) -> UnitFormat:
        return (UNIT_FORMATS if self.n_lanes == 32 else PAIR_FORMATS)[self.weight_type]

    @property
    def lanes_per_total(self) -> int:
        """Adjacent lanes that end up with the same total; a power of two. Of halves: ``number`` says it."""
        return 32 >> (self.n_sums - 1).bit_length() if self.n_lanes == 32 else 1

    def _unit(self, emit: Emitter, step: Value, lane: Value) -> Unit:
        own = lane if self.n_lanes == 32 else emit.bit_and(lane, self.n_lanes - 1)
        return Unit.of(emit, step, own, self.n_lanes)

    def _number(self, emit: Emitter, lane: Value) -> Value:
        """Beyond all sums for lanes that have none of their own."""
        bits = (self.n_sums - 1).bit_length()
        half, own = emit.shift_right(lane, 4), emit.bit_and(lane, 15)
        within = emit.word(0)
        for i in range(bits):
            bit = emit.bit_and(emit.shift_right(lane, i), 1)
            within = emit.bit_or(within, emit.shift_left(bit, bits - 1 - i))
        has_one = emit.select(emit.less(own, emit.word(1 << bits)), within, emit.word(self.n_sums))
        number = emit.add(emit.multiply(half, self.n_sums if self.skipped_rows else 2 * self.n_sums), within)
        return emit.select(emit.less(has_one, emit.word(self.n_sums)), number, emit.word(2 * self.n_sums))

    def _load(self, emit: Emitter, *arguments: Value) -> list[Value]:
        planes, strides = arguments[:MAX_PLANES], arguments[MAX_PLANES:-2]
        unit = self._unit(emit, *arguments[-2:])
        loaded = []
        rows = list(planes)
        if self.skipped_rows:
            skipped = emit.widen(emit.multiply(emit.shift_right(arguments[-1], 4), self.skipped_rows))
            rows = [emit.add(row, emit.multiply(stride, skipped)) for row, stride in zip(rows, strides, strict=True)]
        for _ in range(self.n_rows):
            if takes_float_activations(self.weight_type):
                loaded += emit.load_stream(emit.add(rows[0], emit.widen(emit.multiply(unit.number, 16))), 0, 4)
            else:
                loaded += self.unit_format.load(emit, rows, unit)
            rows = [emit.add(row, stride) for row, stride in zip(rows, strides, strict=True)]
        return loaded

    def _load_shared(self, emit: Emitter, row: Value, row_bytes: Value, step: Value, lane: Value) -> list[Value]:
        """From rows of one plane in shared memory, ``row_bytes`` apart."""
        unit = Unit.of(emit, step, lane)
        loaded = []
        for _ in range(self.n_rows):
            loaded += self.unit_format.load(emit, [row], unit)
            row = emit.add(row, row_bytes)
        return loaded

    def emit_add(self, emit: Emitter, sums: list[Value], loaded: list[Value], *rest: Value) -> list[Value]:
        """What ``add`` is with quantised weights."""
        step, lane, vectors, scales, n_cols = rest
        unit_format, unit = self.unit_format, self._unit(emit, step, lane)
        if unit_format.decode_pairs is not None:
            return self._add_pairs(emit, sums, loaded, unit, *rest[2:])
        words_of_rows = [loaded[r * self.n_words : (r + 1) * self.n_words] for r in range(self.n_rows)]
        rows = [unit_format.decode(emit, words_of_row, unit) for words_of_row in words_of_rows]
        if self.n_vectors > 1:  # quants are made once, summands are multiplied by every vector
            rows = [[replace(group, summands=None) for group in groups] for groups in rows]
        n_together = 2 if unit_format.is_block else 1
        result = list(sums)
        for begin in range(0, unit_format.n_groups, n_together):
            furthers = [group.further for group in rows[0][begin : begin + n_together]]
            for v in range(self.n_vectors):
                column = emit.add(rows[0][0].first, emit.multiply(n_cols, v))
                scales_at = move(emit, scales, emit.multiply(emit.shift_right(column, 4), SCALE_BYTES))
                x = self._load_vector(emit, vectors, rows[0][0].first, furthers, n_cols, v)
                x_scale, x_sums = _load_scale_and_sums(emit, scales_at, furthers)
                if unit_format.is_uniform:
                    x_sums = [emit.float_add(*x_sums)]
                for r in range(self.n_rows):
                    groups = rows[r][begin : begin + n_together]
                    if unit_format.is_uniform:
                        groups = [_joined(groups)]
                    term = _add_groups(emit, groups, x, x_sums)
                    at = r * self.n_vectors + v
                    result[at] = emit.fma(x_scale, term, result[at])
        return result

    def _add_pairs(
        self, emit: Emitter, sums: list[Value], loaded: list[Value], unit: Unit, *rest: Value
    ) -> list[Value]:
        """Where scales and minima are bytes: groups are added up as integers."""
        vectors, scales, n_cols = rest
        decode = self.unit_format.decode_pairs
        assert decode is not None
        rows = [decode(emit, loaded[r * self.n_words : (r + 1) * self.n_words], unit) for r in range(self.n_rows)]
        first, result = rows[0].first, list(sums)
        for i, further in enumerate(rows[0].furthers):
            furthers = [further, further + GROUP_ELEMENTS]
            quants = [row.quants(i) for row in rows]
            for v in range(self.n_vectors):
                column = emit.add(first, emit.multiply(n_cols, v))
                scales_at = move(emit, scales, emit.multiply(emit.shift_right(column, 4), SCALE_BYTES))
                x = self._load_vector(emit, vectors, first, furthers, n_cols, v)
                x_scale, x_sums = _load_scale_and_sums(emit, scales_at, furthers)
                both = emit.pack_low_halves(*(emit.to_half_integer(x_sum) for x_sum in x_sums))
                for r, row in enumerate(rows):
                    dots = [emit.sum_products(quants[r][g : g + 4], x[g : g + 4], emit.word(0)) for g in (0, 4)]
                    scaled = emit.scaled_dot_pair(emit.pack_low_halves(*dots), row.scales, row.d, upper=i == 1)
                    term = emit.fma(row.minus_d_min, emit.dot_pair(both, row.minima, upper=i == 1), scaled)
                    at = r * self.n_vectors + v
                    result[at] = emit.fma(x_scale, term, result[at])
        return result

    def _load_vector(
        self, emit: Emitter, vectors: Value, first: Value, furthers: list[int], n_cols: Value, v: int
    ) -> list[Value]:
        """Quants of 16 columns each. Of two pieces of 16 bytes in shared memory, the even ones come first
        (``vector_input``)."""
        row = emit.multiply(n_cols, v)
        if not emit.is_shared(vectors):
            at = move(emit, vectors, emit.add(first, row))
            return [word for further in furthers for word in emit.load_recent(at, further, 4)]
        if len(furthers) == 1:
            return emit.load_shared_words(move(emit, vectors, emit.add(first, row)), furthers[0], 4)
        even = move(emit, vectors, emit.add(emit.shift_right(first, 1), row))
        pieces = (even, move(emit, even, emit.shift_right(n_cols, 1)))
        return [word for piece in pieces for word in emit.load_shared_words(piece, 0, 4)]

    def _add_floats(self, emit: Emitter, sums: list[Value], loaded: list[Value], *rest: Value) -> list[Value]:
        step, lane, vectors, _, n_cols = rest
        unit = Unit.of(emit, step, lane)
        rows = [decode_floats(emit, self.weight_type, loaded[4 * r : 4 * r + 4]) for r in range(self.n_rows)]
        result = list(sums)
        for v in range(self.n_vectors):
            column = emit.add(emit.multiply(unit.number, self.elements), emit.multiply(n_cols, v))
            at_x = emit.add(vectors, emit.widen(emit.multiply(column, 4)))
            x = [value for i in range(0, self.elements, 4) for value in emit.load_recent_floats(at_x, 4 * i, 4)]
            for r in range(self.n_rows):
                at = r * self.n_vectors + v
                for weight, value in zip(rows[r], x, strict=True):
                    result[at] = emit.fma(weight, value, result[at])
        return result

    def _total(self, emit: Emitter, sums: list[Value], lane: Value) -> Value:
        """In each round a lane gives half of its sums away and gets the partner's share of the others.

        The pairs that are added are those of a plain butterfly, so the bits do not depend on how many sums there are.
        """
        values = list(sums)
        for mask in (16, 8, 4, 2, 1) if self.n_lanes == 32 else (1, 2, 4, 8):
            if len(values) == 1:
                values = [emit.float_add(values[0], emit.exchange(values[0], mask))]
                continue
            half = (1 << (len(values) - 1).bit_length()) // 2
            low, high = values[:half], [*values[half:], *[emit.float(0.0)] * (2 * half - len(values))]
            is_upper = emit.less(emit.word(0), emit.bit_and(lane, mask))
            kept = [emit.select(is_upper, b, a) for a, b in zip(low, high, strict=True)]
            given = [emit.select(is_upper, a, b) for a, b in zip(low, high, strict=True)]
            values = [emit.float_add(a, emit.exchange(b, mask)) for a, b in zip(kept, given, strict=True)]
        return values[0]


def _joined(groups: Sequence[Group]) -> Group:
    """Neighbours that share scale and shift."""
    summands = [word for group in groups for word in group.summands or ()]
    return replace(groups[0], quants=[word for group in groups for word in group.quants], summands=summands or None)


def _add_groups(emit: Emitter, groups: Sequence[Group], x: Sequence[Value], x_sums: Sequence[Value]) -> Value:
    """Groups times the quants of as many columns; ``x_sums``: of each group, for those with a shift."""
    term = None
    for group, x_sum in zip(groups, x_sums, strict=False):
        n_words = len(group.quants)
        own, x = x[:n_words], x[n_words:]
        if group.summands is None:
            dot = emit.dot_bytes(group.quants, own)
        else:
            dot = emit.dot_bytes(group.summands, [word for word in own for _ in range(2)])
        term = emit.float_multiply(group.scale, dot) if term is None else emit.fma(group.scale, dot, term)
        if group.shift is not None:
            term = emit.fma(group.shift, x_sum, term)
    return term


def _load_words(emit: Emitter, address: Value, offset: int, n_words: int) -> list[Value]:
    """Words that the kernel before wrote, or a copy of them in shared memory."""
    if emit.is_shared(address):
        return emit.load_shared_words(address, offset, n_words)
    return emit.load_recent(address, offset, n_words)


def _load_scale_and_sums(emit: Emitter, address: Value, furthers: list[int]) -> tuple[Value, list[Value]]:
    """Scale and sum of one group of 16 quants, or both sums of two next to each other that form a block."""
    offset = furthers[0] // GROUP_ELEMENTS * SCALE_BYTES
    loaded = [emit.as_float(word) for word in _load_words(emit, address, offset, 2 * len(furthers))]
    return loaded[0], loaded[1::2]
