"""Sixteen rows of Q2_K or Q3_K times up to eight vectors by integer tensor cores, four warps together.

Sums of 16 products are integers, so they are those of ``row_units``, and what is done with them is done in the same
order: a warp takes every fourth block of the rows and keeps the sums of its four units apart, as four lanes do there.
It has its blocks copied to places of its own in shared memory, ahead of their use.

Lane 4 g + t has rows g and g + 8 and the vectors of columns 2 t and 2 t + 1 of a product; of up to four vectors only
the even columns are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gguf import GGMLQuantizationType
from numba.cuda import types

from cuda_kernels.emit import FLOAT_INTEGER_WORD, Emitter, Value, emitted, floats
from cuda_kernels.k_units import scale_q3_k
from cuda_kernels.unit_formats import LOW_NIBBLES
from cuda_kernels.weights import MAX_PLANES
from kvs_core.units import ceil_div

TEAM_WARPS = 4
TILE_ROWS = 16
_T = GGMLQuantizationType
TEAM_TYPES = (_T.Q2_K, _T.Q3_K)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    """What is copied of a plane for a block of each row: ``n_pieces`` times ``piece`` bytes, ``pitch`` apart."""

    plane: int
    block_bytes: int
    piece: int
    n_pieces: int
    begin: int
    pitch: int


_ROW = 80  # eight rows a multiple of 16 bytes apart that no two share banks
_Q3_ROW = 112
_FIELDS = {
    _T.Q2_K: (
        _Field(plane=0, block_bytes=64, piece=16, n_pieces=4, begin=0, pitch=_ROW),
        _Field(plane=1, block_bytes=16, piece=16, n_pieces=1, begin=64, pitch=_ROW),
        _Field(plane=2, block_bytes=4, piece=4, n_pieces=1, begin=TILE_ROWS * _ROW, pitch=4),
    ),
    _T.Q3_K: (
        _Field(plane=0, block_bytes=64, piece=16, n_pieces=4, begin=0, pitch=_Q3_ROW),
        _Field(plane=1, block_bytes=32, piece=16, n_pieces=2, begin=64, pitch=_Q3_ROW),
        _Field(plane=2, block_bytes=12, piece=4, n_pieces=3, begin=96, pitch=_Q3_ROW),
        _Field(plane=3, block_bytes=2, piece=4, n_pieces=1, begin=108, pitch=_Q3_ROW),
    ),
}
STAGE_BYTES = {_T.Q2_K: TILE_ROWS * (_ROW + 4), _T.Q3_K: TILE_ROWS * _Q3_ROW}
"""A block of 256 weights of every row of a tile in shared memory."""


class _RowQ2K:
    """One of a lane's rows of a block."""

    begin = 0

    def __init__(self, emit: Emitter, stage: Value, row: Value, half: Value) -> None:
        self.emit, self.at = emit, emit.add(stage, emit.multiply(row, _ROW))
        self.scales = emit.load_shared_words(self.at, 64, 4)
        factors = emit.load_shared_words(emit.add(stage, emit.shift_left(row, 2)), TILE_ROWS * _ROW, 1)[0]
        self.d, self.minus_d_min = emit.low_half_to_float(factors), emit.float_negate(emit.high_half_to_float(factors))

    def operands(self, p: int, t: Value) -> list[Value]:
        """Four weights of each group of unit ``p``."""
        emit = self.emit
        turned = [emit.shift_right(word, emit.shift_left(t, 1)) for word in emit.load_shared_words(self.at, 16 * p, 4)]
        return [emit.bit_and(word, 0x03030303) for word in turned]

    def term(self, p: int, pair: int, dots: Sequence[Value], sums: Value) -> Value:
        """As ``row_units`` adds up a pair of groups."""
        emit = self.emit
        scales = emit.bit_and(self.scales[p], LOW_NIBBLES)
        minima = emit.bit_and(emit.shift_right(self.scales[p], 4), LOW_NIBBLES)
        scaled = emit.scaled_dot_pair(emit.pack_low_halves(*dots), scales, self.d, upper=pair == 1)
        return emit.fma(self.minus_d_min, emit.dot_pair(sums, minima, upper=pair == 1), scaled)


class _RowQ3K:
    """One of a lane's rows of a block. ``half``: which of the word with d is d."""

    begin = FLOAT_INTEGER_WORD

    def __init__(self, emit: Emitter, stage: Value, row: Value, half: Value) -> None:
        self.emit, self.at = emit, emit.add(stage, emit.multiply(row, _Q3_ROW))
        *self.scales, d = emit.load_shared_words(self.at, 96, 4)
        self.d = emit.shift_right(d, emit.shift_left(half, 4))

    def operands(self, p: int, t: Value) -> list[Value]:
        """Quads t and 4 + t of both sub-blocks (``k_units``)."""
        emit = self.emit
        words = emit.load_shared_words(self.at, 16 * p, 4)
        others = emit.load_shared_words(self.at, 64 + 8 * p, 2)
        is_odd, is_upper = emit.bit_and(t, 1), emit.less(emit.word(1), t)
        three = emit.multiply(is_odd, 3)
        shift = emit.select(is_upper, emit.word(6), three)
        mask = emit.select(is_upper, emit.word(0xC0C0C0C0), emit.word(0xE0E0E0E0))
        lowest_shift = emit.subtract(emit.word(5), is_odd)
        lowest_mask = emit.select(is_upper, emit.word(0x20202020), emit.word(0))
        found = []
        for pair in range(2):
            a, b, c = words[2 * pair], words[2 * pair + 1], others[pair]
            found.append(emit.bit_and(emit.shift_left(emit.select(is_upper, b, a), three), 0xE0E0E0E0))
            other = emit.select(is_upper, emit.select(emit.less(emit.word(0), is_odd), b, a), c)
            lowest = emit.bit_and(emit.shift_left(c, lowest_shift), lowest_mask)
            found.append(emit.bit_or(emit.bit_and(emit.shift_left(other, shift), mask), lowest))
        return found

    def term(self, p: int, pair: int, dots: Sequence[Value], sums: Value) -> Value:
        emit = self.emit
        nibbles, pairs = self.scales[p // 2], self.scales[2]
        factors = scale_q3_k(emit, nibbles, pairs, self.d, emit.word(p), range(2 * pair, 2 * pair + 2))
        x, y = (emit.unbiased(dot) for dot in dots)
        return emit.fma(factors[1], y, emit.float_multiply(factors[0], x))


class TeamTile:
    """What a lane does with one block of 256 weights of its two rows. Intrinsics:

    begin(planes, strides, block, lane)                     addresses of what a lane copies; ``planes``: of row 0
    bring(stage, addresses, lane)                           start the copies of a block; addresses four blocks further
    add(sums, stage, first, x_at, scales_at, lane)          sums [unit, row, vector] plus the products of this block;
                                                            ``first``: its number in the plane, for the first row
    total(sums)                                             [row, vector], the four units added
    """

    def __init__(self, weight_type: GGMLQuantizationType, n_vectors: int, n_blocks: int) -> None:
        self.weight_type, self.n_vectors, self.n_blocks = weight_type, n_vectors, n_blocks
        self.n_places = 4 if n_vectors <= 4 else 8
        self.n_own = self.n_places // 4
        self.n_sums = 4 * 2 * self.n_own
        i32, i64, u32 = types.int32, types.int64, types.uint32
        sums, planes = floats(self.n_sums), types.UniTuple(i64, MAX_PLANES)
        addresses = types.UniTuple(i64, self.n_copies)
        self.begin = emitted(addresses, planes, planes, i32, i32)(self._begin)
        self.bring = emitted(addresses, u32, addresses, i32)(self._bring)
        self.add = emitted(sums, sums, u32, i32, u32, u32, i32)(self._add)
        self.zeros = emitted(sums)(lambda emit: [emit.float(0.0)] * self.n_sums)
        self.total = emitted(floats(2 * self.n_own), sums)(self._total)

    @property
    def n_copies(self) -> int:
        return sum(ceil_div(TILE_ROWS * field.n_pieces, 32) for field in _FIELDS[self.weight_type])

    @property
    def block_bytes(self) -> int:
        """Bytes of the vectors for a block: quants, and behind all of them scales and sums."""
        return 256 * self.n_places

    @property
    def scale_bytes(self) -> int:
        return 8 * 8 * self.n_places

    def _copies(self, emit: Emitter, lane: Value) -> Iterator[tuple[_Field, Value, Value]]:
        """What a lane copies of a block: row and piece of a field. Some lanes copy the last one again."""
        for field in _FIELDS[self.weight_type]:
            n = TILE_ROWS * field.n_pieces
            for first in range(0, n, 32):
                number = emit.add(lane, first)
                if n - first < 32:
                    number = emit.select(emit.less(number, emit.word(n)), number, emit.word(n - 1))
                yield field, emit.divide(number, field.n_pieces), emit.remainder(number, field.n_pieces)

    def _begin(
        self, emit: Emitter, planes: list[Value], strides: list[Value], block: Value, lane: Value
    ) -> list[Value]:
        found = []
        for field, row, piece in self._copies(emit, lane):
            address = emit.add(planes[field.plane], emit.multiply(emit.widen(row), strides[field.plane]))
            within = emit.add(emit.multiply(block, field.block_bytes), emit.multiply(piece, field.piece))
            address = emit.add(address, emit.widen(within))
            if field.block_bytes == 2:  # the word that has it
                address = emit.subtract(address, emit.widen(emit.bit_and(emit.narrow(address), 2)))
            found.append(address)
        return found

    def _bring(self, emit: Emitter, stage: Value, addresses: list[Value], lane: Value) -> list[Value]:
        found = []
        for (field, row, piece), address in zip(self._copies(emit, lane), addresses, strict=True):
            within = emit.add(emit.multiply(row, field.pitch), emit.multiply(piece, field.piece))
            target = emit.add(stage, emit.add(within, field.begin))
            if field.piece == 16:
                emit.copy_16_async(target, address, (0, 0), emit.word(16))
            else:
                emit.copy_4_async(target, address)
            found.append(emit.add(address, emit.widen(emit.word(TEAM_WARPS * field.block_bytes))))
        return found

    def _add(self, emit: Emitter, sums: list[Value], *rest: Value) -> list[Value]:
        stage, first_block, x_at, scales_at, lane = rest
        t, g = emit.bit_and(lane, 3), emit.shift_right(lane, 2)
        column = g if self.n_places == 8 else emit.shift_right(g, 1)
        x_at = emit.add(x_at, emit.add(emit.multiply(column, 64), emit.multiply(t, 16)))
        own_scales = emit.add(scales_at, emit.multiply(t, 8 * self.n_own))
        kind = _RowQ2K if self.weight_type is _T.Q2_K else _RowQ3K
        rows = []
        for row in (g, emit.add(g, 8)):
            half = emit.bit_and(emit.add(first_block, emit.multiply(row, self.n_blocks)), 1)
            rows.append(kind(emit, stage, row, half))
        result = list(sums)
        for p in range(4):
            x = emit.load_shared_words(x_at, p * 64 * self.n_places, 4)
            operands = [row.operands(p, t) for row in rows]
            for pair in range(2):
                groups = (2 * pair, 2 * pair + 1)
                begin = [emit.word(kind.begin)] * 4
                products = [emit.mma_bytes([of_row[i] for of_row in operands], x[i], begin) for i in groups]
                own = emit.load_shared_words(own_scales, (2 * p + pair) * 8 * self.n_places, 2 * self.n_own)
                for r, row in enumerate(rows):
                    for v in range(self.n_own):
                        term = row.term(p, pair, [found[2 * r + v] for found in products], own[2 * v + 1])
                        at = (2 * p + r) * self.n_own + v
                        result[at] = emit.fma(emit.as_float(own[2 * v]), term, result[at])
        return result

    def _total(self, emit: Emitter, sums: list[Value]) -> list[Value]:
        n = 2 * self.n_own
        of_units = [sums[p * n : (p + 1) * n] for p in range(4)]
        return [
            emit.float_add(emit.float_add(a, b), emit.float_add(c, d)) for a, b, c, d in zip(*of_units, strict=True)
        ]
