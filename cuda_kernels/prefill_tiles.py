"""Tiles of prefill attention in shared memory, and the tensor-core fragments that are read from them.

Rows of float16 lie in shared memory so that eight rows at one column fall into different banks: rows of a multiple
of 64 elements swap their 16-byte pieces by row number, other rows are padded to an odd number of pieces.
A warp owns ``n_row_tiles`` times 16 query rows. With lane = 4 g + t it holds, of every 16 x 8 accumulator, the
elements (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1). The kernel is in ``attention_prefill``.
"""

from __future__ import annotations

from dataclasses import dataclass

from numba.cuda import types

from cuda_kernels.attention_common import LOG2_E, LOWEST, cap_scores
from cuda_kernels.emit import Emitter, Value, emitted, floats

PIECE_BYTES = 16
PIECE_ELEMENTS = 8  # float16


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRows:
    """Rows of ``head_dim`` float16 in shared memory."""

    head_dim: int

    @property
    def is_swizzled(self) -> bool:
        return self.head_dim % 64 == 0

    @property
    def row_bytes(self) -> int:
        n_pieces = self.head_dim // PIECE_ELEMENTS
        return PIECE_BYTES * (n_pieces if self.is_swizzled else n_pieces | 1)

    def place(self, emit: Emitter, base: Value, row: Value, piece: Value) -> Value:
        """Shared address of one piece of one row."""
        swapped = emit.bit_xor(piece, emit.bit_and(row, 7)) if self.is_swizzled else piece
        return emit.add(emit.add(base, emit.multiply(row, self.row_bytes)), emit.multiply(swapped, PIECE_BYTES))

    def load_matrices(
        self, emit: Emitter, base: Value, row: Value, piece: Value, first: tuple[int, int], *, transposed: bool = False
    ) -> list[Value]:
        """Fragments at row ``first[0] + row`` and piece ``first[1] + piece``.

        ``row`` (below 16) and ``piece`` (0 or 1) belong to the lane; ``first`` is a multiple of 8 rows and 2 pieces,
        which leaves the swap of pieces to the lane: only the bits below 8 pieces depend on it.
        """
        first_row, first_piece = first
        low = first_piece % 8 if self.is_swizzled else 0
        lane_piece = emit.bit_xor(emit.bit_xor(piece, emit.bit_and(row, 7)), low) if self.is_swizzled else piece
        address = emit.add(emit.add(base, emit.multiply(row, self.row_bytes)), emit.multiply(lane_piece, PIECE_BYTES))
        offset = first_row * self.row_bytes + (first_piece - low) * PIECE_BYTES
        return emit.load_matrices(address, offset, transposed=transposed)


class PrefillFragments:
    """Operations of one warp on its rows; every attribute below is an intrinsic.

    place_query(base, row, piece)                shared address of 16 bytes
    zeros(), initial_state()                     cleared accumulators; the state before any key
    scores(q_base, k_base, lane)                 rows x keys of a tile; ``q_base`` is the warp's first row
    cap(scores, scale_log2)                      the soft cap of ``cap_scores``; then in units of log2
    hide(scores, key, limits, window)            minus infinity where not limit - window <= key < limit; ``key``: the
                                                 first + 2t, ``limits``: shared address of row g's limit
    softmax(scores, state, scale_log2)           probabilities, the new state and the factors of the sums, end to end;
                                                 ``probabilities``, ``new_state`` and ``factors`` take it apart
    are_ones(factors)                            1 if every factor is exactly 1
    rescale(sums, factors)                       every row of the sums times its factor
    accumulate(sums, probabilities, v_base, lane)
    normalise(sums, state)                       sums over the totals of all four lanes of a row; 0 where that is 0
    normalise_with(sums, state, sinks, scale_log2)
                                                 the same, after the sink of each row half joined its total
    load_sinks(sinks, head, row)                 those of row g and the others, of a group that begins with ``head``
    store_rows(out, sums)                        intrinsics, one for each row half: 8-byte stores from a row's address
    load_state(address), store_state(address, sums, state)
                                                 sums and state, one float32 every 128 bytes; ``stored_sums`` and
                                                 ``stored_state`` take a loaded one apart

    The state of a row half is its maximum and this lane's share of its sum: ``n_rows`` maxima, then ``n_rows`` shares.
    """

    def __init__(
        self, head_dim_k: int, head_dim_v: int, n_row_tiles: int, tile_keys: int, *, gqa_ratio: int, softcap: float
    ) -> None:
        self.k_rows, self.v_rows = SharedRows(head_dim=head_dim_k), SharedRows(head_dim=head_dim_v)
        self.n_row_tiles, self.tile_keys, self.gqa_ratio = n_row_tiles, tile_keys, gqa_ratio
        self.n_key_columns = tile_keys // 8
        self.n_value_columns = head_dim_v // 8
        self.n_rows = 2 * n_row_tiles
        self.n_sums = 4 * n_row_tiles * self.n_value_columns
        self.n_scores = 4 * n_row_tiles * self.n_key_columns
        self.n_state = self.n_sums + 2 * self.n_rows

        scores, sums = floats(self.n_scores), floats(self.n_sums)
        state, rows = floats(2 * self.n_rows), floats(self.n_rows)
        u32, i32, i64 = types.uint32, types.int32, types.int64
        self.place_query = emitted(u32, u32, u32, u32)(self.k_rows.place)
        self.zeros = emitted(sums)(lambda emit: [emit.float(0.0)] * self.n_sums)
        initial = [LOWEST] * self.n_rows + [0.0] * self.n_rows
        self.initial_state = emitted(state)(lambda emit: [emit.float(value) for value in initial])
        self.are_ones = emitted(i32, rows)(self._are_ones)
        self.scores = emitted(scores, u32, u32, u32)(self._scores)
        self.cap = emitted(scores, scores, types.float32)(
            lambda emit, values, scale_log2: cap_scores(emit, values, scale_log2, softcap)
        )
        self.hide = emitted(scores, scores, i32, u32, i32)(self._hide)
        self.softmax = emitted(floats(self.n_scores + 3 * self.n_rows), scores, state, types.float32)(self._softmax)
        n_probabilities, n_state = self.n_scores, 2 * self.n_rows
        folded = n_probabilities + n_state + self.n_rows
        self.probabilities = _part(folded, 0, n_probabilities)
        self.new_state = _part(folded, n_probabilities, n_probabilities + n_state)
        self.factors = _part(folded, n_probabilities + n_state, folded)
        self.stored_sums = _part(self.n_state, 0, self.n_sums)
        self.stored_state = _part(self.n_state, self.n_sums, self.n_state)
        self.rescale = emitted(sums, sums, rows)(self._rescale)
        self.accumulate = emitted(sums, sums, scores, u32, u32)(self._accumulate)
        self.normalise = emitted(sums, sums, state)(self._normalise)
        self.normalise_with = emitted(sums, sums, state, rows, types.float32)(self._normalise_with)
        self.load_sinks = emitted(rows, i64, i32, i32)(self._load_sinks)
        self.store_rows = [self._row_store(row) for row in range(self.n_rows)]
        self.load_state = emitted(floats(self.n_state), i64)(self._load_state)
        self.store_state = emitted(types.void, i64, sums, state)(self._store_state)

    def _scores(self, emit: Emitter, q_base: Value, k_base: Value, lane: Value) -> list[Value]:
        q_row, q_piece = emit.bit_and(lane, 15), emit.shift_right(lane, 4)
        k_row = emit.add(emit.bit_and(lane, 7), emit.shift_left(emit.shift_right(lane, 4), 3))
        k_piece = emit.bit_and(emit.shift_right(lane, 3), 1)
        sums = [emit.float(0.0)] * self.n_scores
        for piece in range(0, self.k_rows.head_dim // PIECE_ELEMENTS, 2):
            q = [
                self.k_rows.load_matrices(emit, q_base, q_row, q_piece, (16 * m, piece))
                for m in range(self.n_row_tiles)
            ]
            for n in range(0, self.n_key_columns, 2):
                k = self.k_rows.load_matrices(emit, k_base, k_row, k_piece, (8 * n, piece))
                for m in range(self.n_row_tiles):
                    for column in range(2):
                        at = 4 * (m * self.n_key_columns + n + column)
                        sums[at : at + 4] = emit.mma(q[m], k[2 * column : 2 * column + 2], sums[at : at + 4])
        return sums

    def _hide(self, emit: Emitter, scores: list[Value], key: Value, limits: Value, window: Value) -> list[Value]:
        hidden = emit.float(float("-inf"))
        upper = [emit.load_shared_words(limits, 32 * row, 1)[0] for row in range(self.n_rows)]
        lower = [emit.subtract(limit, window) for limit in upper]
        result = []
        for i, score in enumerate(scores):
            here = emit.add(key, 8 * (i // 4 % self.n_key_columns) + i % 2)
            row = self._row_of(i, self.n_key_columns)
            recent = emit.select(emit.less(here, lower[row]), hidden, score)
            result.append(emit.select(emit.less(here, upper[row]), recent, hidden))
        return result

    def _softmax(self, emit: Emitter, scores: list[Value], state: list[Value], scale_log2: Value) -> list[Value]:
        maxima, totals, factors = [], [], []
        probabilities = list(scores)
        for row in range(self.n_rows):
            mine = [i for i in range(self.n_scores) if self._row_of(i, self.n_key_columns) == row]
            largest = state[row]
            for i in mine:
                largest = emit.float_maximum(largest, scores[i])
            for lane_mask in (1, 2):
                largest = emit.float_maximum(largest, emit.exchange(largest, lane_mask))
            shift = emit.float_multiply(emit.float_negate(largest), scale_log2)
            # a difference first: without any key both are the same huge number, and the factor must be 1
            factor = emit.exp2(emit.float_multiply(emit.float_subtract(state[row], largest), scale_log2))
            total = emit.float_multiply(state[self.n_rows + row], factor)
            for i in mine:
                probabilities[i] = emit.exp2(emit.fma(scores[i], scale_log2, shift))
                total = emit.float_add(total, probabilities[i])
            maxima.append(largest)
            totals.append(total)
            factors.append(factor)
        return probabilities + maxima + totals + factors

    def _are_ones(self, emit: Emitter, factors: list[Value]) -> Value:
        smallest = factors[0]
        for factor in factors[1:]:
            smallest = emit.float_minimum(smallest, factor)
        is_one = emit.float_equal(smallest, emit.float(1.0))  # a factor is never above 1
        return emit.flag(is_one)

    def _rescale(self, emit: Emitter, sums: list[Value], factors: list[Value]) -> list[Value]:
        return [
            emit.float_multiply(value, factors[self._row_of(i, self.n_value_columns)]) for i, value in enumerate(sums)
        ]

    def _accumulate(
        self, emit: Emitter, sums: list[Value], probabilities: list[Value], v_base: Value, lane: Value
    ) -> list[Value]:
        v_row, v_piece = emit.bit_and(lane, 15), emit.shift_right(lane, 4)
        result = list(sums)
        for key_tile in range(self.tile_keys // 16):
            operands = []
            for m in range(self.n_row_tiles):
                at = 4 * (m * self.n_key_columns + 2 * key_tile)
                p = probabilities[at : at + 8]
                operands.append([emit.pack_half2(p[i], p[i + 1]) for i in (0, 2, 4, 6)])
            for n in range(0, self.n_value_columns, 2):
                v = self.v_rows.load_matrices(emit, v_base, v_row, v_piece, (16 * key_tile, n), transposed=True)
                for m in range(self.n_row_tiles):
                    for column in range(2):
                        at = 4 * (m * self.n_value_columns + n + column)
                        result[at : at + 4] = emit.mma(operands[m], v[2 * column : 2 * column + 2], result[at : at + 4])
        return result

    def _normalise(self, emit: Emitter, sums: list[Value], state: list[Value]) -> list[Value]:
        inverses = []
        for row in range(self.n_rows):
            total = self._total(emit, state, row)
            inverse = emit.float_divide(emit.float(1.0), total)
            is_empty = emit.float_equal(total, emit.float(0.0))
            inverses.append(emit.select(is_empty, emit.float(0.0), inverse))
        return self._rescale(emit, sums, inverses)

    def _normalise_with(
        self, emit: Emitter, sums: list[Value], state: list[Value], sinks: list[Value], scale_log2: Value
    ) -> list[Value]:
        factors = []
        for row in range(self.n_rows):
            maximum = emit.float_multiply(state[row], scale_log2)
            sink = emit.float_multiply(sinks[row], emit.float(LOG2_E))
            largest = emit.float_maximum(maximum, sink)
            factor = emit.exp2(emit.float_subtract(maximum, largest))
            share = emit.exp2(emit.float_subtract(sink, largest))
            total = emit.fma(self._total(emit, state, row), factor, share)
            factors.append(emit.float_divide(factor, total))
        return self._rescale(emit, sums, factors)

    def _total(self, emit: Emitter, state: list[Value], row: int) -> Value:
        total = state[self.n_rows + row]
        for lane_mask in (1, 2):
            total = emit.float_add(total, emit.exchange(total, lane_mask))
        return total

    def _load_sinks(self, emit: Emitter, sinks: Value, head: Value, row: Value) -> list[Value]:
        result = []
        for half in range(self.n_rows):
            in_group = emit.remainder(emit.add(row, 8 * half), self.gqa_ratio)
            at = emit.multiply(emit.add(head, in_group), 4)
            result.append(emit.load_float(emit.add(sinks, emit.widen(at)), 0))
        return result

    def _row_store(self, row: int) -> object:
        def store_row(emit: Emitter, address: Value, sums: list[Value]) -> None:
            for n in range(self.n_value_columns):
                at = 4 * (row // 2 * self.n_value_columns + n) + 2 * (row % 2)
                emit.store_two_floats(address, 32 * n, sums[at], sums[at + 1])

        return emitted(types.void, types.int64, floats(self.n_sums))(store_row)

    def _load_state(self, emit: Emitter, address: Value) -> list[Value]:
        return [emit.load_float(address, 128 * i) for i in range(self.n_state)]

    def _store_state(self, emit: Emitter, address: Value, sums: list[Value], state: list[Value]) -> None:
        for i, value in enumerate(sums + state):
            emit.store_float(address, 128 * i, value)

    @staticmethod
    def _row_of(i: int, n_columns: int) -> int:
        """Row half of accumulator register ``i``: 2 m for row g of tile m, 2 m + 1 for row g + 8."""
        return 2 * (i // 4 // n_columns) + i // 2 % 2


def _part(n: int, begin: int, end: int) -> object:
    """Intrinsic: elements ``begin`` to ``end - 1`` of a fragment of ``n``; Numba slices tuples by literals only."""
    return emitted(floats(end - begin), floats(n))(lambda emit, fragment: fragment[begin:end])
