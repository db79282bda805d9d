"""Tiles and fragments of attention with wide heads: 512, and the rows of latent caches, 576 with 512 values in them.

The sums of 16 query rows fill a warp's registers many times over, so the four warps of a block share everything::

    scores   warp w multiplies columns 64 i + 16 w to 64 i + 16 w + 15 of queries and keys; the four shares of every
             score are added in shared memory, always in the order of the warps
    sums     warp w holds the same columns of the values

Every warp makes the same softmax of the same scores, so probabilities never leave the registers they are made in.
Queries stay in registers too: shared memory is for keys and values. What walks the tiles is in ``wide_walk``.
"""

from __future__ import annotations

from dataclasses import dataclass

from numba.cuda import types

from cuda_kernels.emit import Emitter, Value, emitted, floats, words
from cuda_kernels.launch import SHARED_LIMIT
from cuda_kernels.prefill_copies import TileCopies
from cuda_kernels.prefill_tiles import PIECE_BYTES, PIECE_ELEMENTS, PrefillFragments, SharedRows
from kvs_core.kv_types import KvType, PageGeometry

N_WARPS = 4
N_THREADS = 32 * N_WARPS

PART_KEYS = 16
"""Keys that go through softmax and second product together: with more, registers do not suffice."""
_PASS_ROWS, _SWIZZLE_BYTES = N_THREADS // 8, 128
_STEP_COLUMNS = 16 * N_WARPS  # that the warps take at a time, 16 each
_STEP_BYTES = 2 * _STEP_COLUMNS  # whole swizzles: a lane's address is the same in each step, plus this


@dataclass(frozen=True, slots=True, kw_only=True)
class WideShape:
    """Sizes of a block of ``16 * n_row_tiles`` query rows; shared memory::

        | keys | values | raw bytes | shares of scores | limits of rows |      values of their own
        | rows | rows   | raw bytes | shares of scores | limits of rows |      a latent cache

    Float16 rows are copied to their place, other types arrive raw, keys and values in turn, and are converted. There is
    one place for rows of a latent cache where they arrive raw, and no raw bytes where nothing is converted.
    """

    page: PageGeometry
    n_row_tiles: int

    @property
    def block_rows(self) -> int:
        return 16 * self.n_row_tiles

    @property
    def tile_keys(self) -> int:
        """Keys of a tile: the most that fit."""
        return next(n for n in (32, 16) if self._shared_bytes(n) <= SHARED_LIMIT)

    @property
    def shared_bytes(self) -> int:
        return self._shared_bytes(self.tile_keys)

    @property
    def values_at(self) -> int:
        """Where values lie, or the second place for rows."""
        return self.tile_keys * SharedRows(head_dim=self.page.head_dim_k).row_bytes

    @property
    def raw_at(self) -> int:
        return self._tile_bytes(self.tile_keys)

    @property
    def scores_at(self) -> int:
        return self.raw_at + self._raw_bytes(self.tile_keys)

    @property
    def limits_at(self) -> int:
        return self.scores_at + self._score_bytes(self.tile_keys)

    @property
    def has_raw_keys(self) -> bool:
        return self.page.type_k is not KvType.F16

    @property
    def has_raw_values(self) -> bool:
        return not self.page.v_in_k and self.page.type_v is not KvType.F16

    def copies(self, tile_keys: int) -> tuple[TileCopies, TileCopies]:
        """Of keys and of values."""
        k, v = (WideCopies(region, tile_keys, N_THREADS) for region in (self.page.k_region, self.page.v_region))
        return k, v

    def _tile_bytes(self, tile_keys: int) -> int:
        k, v = self.copies(tile_keys)
        if self.page.v_in_k:
            return k.tile_bytes if self.has_raw_keys else 2 * k.tile_bytes
        return k.tile_bytes + v.tile_bytes

    def _raw_bytes(self, tile_keys: int) -> int:
        k, v = self.copies(tile_keys)
        return max(k.raw_bytes if self.has_raw_keys else 0, v.raw_bytes if self.has_raw_values else 0)

    def _score_bytes(self, tile_keys: int) -> int:
        return 4 * N_WARPS * self.block_rows * tile_keys

    def _shared_bytes(self, tile_keys: int) -> int:
        rows_bytes = self._tile_bytes(tile_keys) + self._raw_bytes(tile_keys)
        return rows_bytes + self._score_bytes(tile_keys) + 4 * self.block_rows


class WideCopies(TileCopies):
    """The same copies. Eight threads share a row, so that a thread's places are at constant distances."""

    def _start_direct(
        self, emit: Emitter, tile: Value, region: Value, key: Value, n_valid: Value, thread: Value
    ) -> None:
        row, part = self._own_place(emit, thread)
        place = self.rows.place(emit, tile, row, part)
        offset = emit.add(emit.multiply(emit.add(key, row), self.region.row_bytes), emit.multiply(part, PIECE_BYTES))
        source = emit.add(region, emit.widen(offset))
        for first_row in range(0, self.tile_keys, _PASS_ROWS):
            is_there = emit.less(emit.add(row, first_row), n_valid)
            left = emit.select(is_there, emit.word(PIECE_BYTES), emit.word(0))
            for first_byte in range(0, self.region.row_bytes, _SWIZZLE_BYTES):
                offset_there = first_row * self.region.row_bytes + first_byte
                emit.copy_16_async(place, source, (first_row * self.rows.row_bytes + first_byte, offset_there), left)

    def _convert(self, emit: Emitter, raw: Value, tile: Value, thread: Value) -> None:
        if self.units.n_elements != PIECE_ELEMENTS:
            super()._convert(emit, raw, tile, thread)
            return
        row, part = self._own_place(emit, thread)
        place = self.rows.place(emit, tile, row, part)
        for first_row in range(0, self.tile_keys, _PASS_ROWS):
            for first in range(0, self.units.row_units, 8):
                words_of = self._load_unit(emit, raw, emit.add(row, first_row), emit.add(part, first))
                offset = first_row * self.rows.row_bytes + first * PIECE_BYTES
                emit.store_shared_words(place, offset, self.units.halves(emit, words_of))

    @staticmethod
    def _own_place(emit: Emitter, thread: Value) -> tuple[Value, Value]:
        """Row and piece of the first pass; others are ``_PASS_ROWS`` rows and 8 pieces apart."""
        return emit.divide(thread, 8), emit.bit_and(thread, 7)


class WideFragments(PrefillFragments):
    """Operations of one warp of a block; the inherited ones work on the block's rows and this warp's columns.

    Attributes that are intrinsics, beside the inherited ones:
    load_query(base, warp, lane)            words: this warp's columns of all rows, put there by ``place_query``
    share(query, keys, place, warp, lane)   this warp's share of the scores of 16 keys, into shared memory; ``place``:
                                            this warp's for this lane
    add_shares(address)                     scores of 16 keys; ``address``: the first warp's place for this lane
    accumulate(sums, probabilities, values, warp, lane)
    finish(state, scale_log2)               maxima in log2 units, then totals over the lanes of a row
    join(sums, state)                       end to end, as ``stored_sums`` and ``stored_state`` take it apart
    load_sums(address), store_sums(address, sums), load_softmax(address), store_softmax(address, state)
                                            sums and state, one float32 every 128 bytes
    """

    def __init__(self, page: PageGeometry, n_row_tiles: int) -> None:
        super().__init__(page.head_dim_k, page.head_dim_v // N_WARPS, n_row_tiles, PART_KEYS, gqa_ratio=1, softcap=0.0)
        self.v_rows = SharedRows(head_dim=page.head_dim_k if page.v_in_k else page.head_dim_v)
        self.n_key_steps, self.n_value_steps = page.head_dim_k // _STEP_COLUMNS, page.head_dim_v // _STEP_COLUMNS
        query, scores, sums = words(4 * n_row_tiles * self.n_key_steps), floats(self.n_scores), floats(self.n_sums)
        state = floats(2 * self.n_rows)
        u32, f32 = types.uint32, types.float32
        self.load_query = emitted(query, u32, u32, u32)(self._load_query)
        self.share = emitted(types.void, query, u32, u32, u32, u32)(self._share)
        self.add_shares = emitted(scores, u32)(self._add_shares)
        self.accumulate = emitted(sums, sums, scores, u32, u32, u32)(self._accumulate_columns)
        self.finish = emitted(state, state, f32)(self._finish)
        self.join = emitted(floats(self.n_state), sums, state)(lambda emit, sums, state: sums + state)
        self.load_sums, self.store_sums = self._strided(self.n_sums)
        self.load_softmax, self.store_softmax = self._strided(2 * self.n_rows)

    @staticmethod
    def _strided(n: int) -> tuple[object, object]:
        """Intrinsics that load and store ``n`` numbers."""

        def load(emit: Emitter, address: Value) -> list[Value]:
            return [emit.load_float(address, 128 * i) for i in range(n)]

        def store(emit: Emitter, address: Value, values: list[Value]) -> None:
            for i, value in enumerate(values):
                emit.store_float(address, 128 * i, value)

        i64, fragment = types.int64, floats(n)
        return emitted(fragment, i64)(load), emitted(types.void, i64, fragment)(store)

    @property
    def share_bytes(self) -> int:
        """Of one warp."""
        return 128 * self.n_scores

    def _load_query(self, emit: Emitter, base: Value, warp: Value, lane: Value) -> list[Value]:
        row, piece = emit.bit_and(lane, 15), emit.shift_right(lane, 4)
        address = self._lane_address(emit, self.k_rows, base, row, piece, warp)
        fragment = []
        for step in range(self.n_key_steps):
            for m in range(self.n_row_tiles):
                offset = step * _STEP_BYTES + 16 * m * self.k_rows.row_bytes
                fragment += emit.load_matrices(address, offset)
        return fragment

    def _share(self, emit: Emitter, query: list[Value], k_base: Value, place: Value, warp: Value, lane: Value) -> None:
        k_row = emit.add(emit.bit_and(lane, 7), emit.shift_left(emit.shift_right(lane, 4), 3))
        k_piece = emit.bit_and(emit.shift_right(lane, 3), 1)
        address = self._lane_address(emit, self.k_rows, k_base, k_row, k_piece, warp)
        scores = [emit.float(0.0)] * self.n_scores
        for step in range(self.n_key_steps):
            k = emit.load_matrices(address, step * _STEP_BYTES)
            for m in range(self.n_row_tiles):
                q = query[4 * (step * self.n_row_tiles + m) :][:4]
                for column in range(2):
                    at = 4 * (m * self.n_key_columns + column)
                    scores[at : at + 4] = emit.mma(q, k[2 * column : 2 * column + 2], scores[at : at + 4])
        for i in range(0, self.n_scores, 4):
            emit.store_shared_words(place, 128 * i, [emit.as_word(score) for score in scores[i : i + 4]])

    @staticmethod
    def _lane_address(emit: Emitter, rows: SharedRows, base: Value, row: Value, piece: Value, warp: Value) -> Value:
        """Of piece ``piece`` (0 or 1) of the warp's columns of the first step."""
        own_piece = emit.bit_xor(emit.add(emit.multiply(warp, 2), piece), emit.bit_and(row, 7))
        return emit.add(emit.add(base, emit.multiply(row, rows.row_bytes)), emit.multiply(own_piece, PIECE_BYTES))

    def _add_shares(self, emit: Emitter, address: Value) -> list[Value]:
        scores = []
        for i in range(0, self.n_scores, 4):
            total = emit.load_shared_floats(address, 128 * i, 4)
            for warp in range(1, N_WARPS):
                share = emit.load_shared_floats(address, warp * self.share_bytes + 128 * i, 4)
                total = [emit.float_add(a, b) for a, b in zip(total, share, strict=True)]
            scores += total
        return scores

    def _accumulate_columns(
        self, emit: Emitter, sums: list[Value], probabilities: list[Value], v_base: Value, warp: Value, lane: Value
    ) -> list[Value]:
        v_row, v_piece = emit.bit_and(lane, 15), emit.shift_right(lane, 4)
        address = self._lane_address(emit, self.v_rows, v_base, v_row, v_piece, warp)
        result = list(sums)
        operands = []
        for m in range(self.n_row_tiles):
            p = probabilities[4 * m * self.n_key_columns :][:8]
            operands.append([emit.pack_half2(p[i], p[i + 1]) for i in (0, 2, 4, 6)])
        for step in range(self.n_value_steps):
            v = emit.load_matrices(address, step * _STEP_BYTES, transposed=True)
            for m in range(self.n_row_tiles):
                for column in range(2):
                    at = 4 * (m * self.n_value_columns + 2 * step + column)
                    result[at : at + 4] = emit.mma(operands[m], v[2 * column : 2 * column + 2], result[at : at + 4])
        return result

    def _row_store(self, row: int) -> object:
        """To the row's address, plus 4 bytes for each column before this lane's first one."""

        def store_row(emit: Emitter, address: Value, sums: list[Value]) -> None:
            for n in range(self.n_value_columns):
                at = 4 * (row // 2 * self.n_value_columns + n) + 2 * (row % 2)
                offset = 4 * (n // 2 * _STEP_COLUMNS + n % 2 * 8)
                emit.store_two_floats(address, offset, sums[at], sums[at + 1])

        return emitted(types.void, types.int64, floats(self.n_sums))(store_row)

    def _finish(self, emit: Emitter, state: list[Value], scale_log2: Value) -> list[Value]:
        totals = []
        for total in state[self.n_rows :]:
            for lane_mask in (1, 2):
                total = emit.float_add(total, emit.exchange(total, lane_mask))
            totals.append(total)
        return [emit.float_multiply(maximum, scale_log2) for maximum in state[: self.n_rows]] + totals
