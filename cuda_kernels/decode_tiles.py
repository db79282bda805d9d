"""Key and value fragments of decode attention: global memory straight into tensor-core registers, per cache type.

A warp owns a tile of 16 keys, or of two times 16. With lane = 4 g + t, its registers are the operands of two products:

    S^T = K Q^T  A = keys: the lane holds keys g and 8 + g;  B = queries: the lane holds query row g
    O^T = V^T P  A = values: the lane holds keys 2t, 2t+1, 2t+8, 2t+9;  B = probabilities of query row g: S^T transposed

The order in which a product sums the dimensions of a head is free as long as both operands agree, so a lane's widest
load is itself a fragment, and shared memory is for levels of codebooks only. What the words of a type become
is in ``decode_codes``; the kernel that uses the tiles is in ``attention_decode_mma``.

Scales of blocks of 32 elements are multiplied with the elements. A turbo scale belongs to a whole group of the row:
the products of its keys are multiplied with it in float32, and the probabilities of its values as float16.

Values of turbo types come from the level table as pairs of elements of one key. They stay so: where other types have a
pair of keys in a word of A, these have two dimensions of one key, and B has the key's probability beside a zero. One
product gives the even dimensions, another the odd ones; of four query rows or fewer ("narrow") one product gives both,
in columns 0 to 3 and 4 to 7. The sums are of the same numbers in the same places either way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from numba.cuda import types

from cuda_kernels.decode_codes import (
    Chunk,
    Context,
    ExponentTable,
    Loaded,
    expand_key,
    expand_value_pairs,
    expand_values,
    is_split,
    key_pairs,
    uses_exponents,
)
from cuda_kernels.decode_rows import SPLIT_BLOCK_WORDS, RowLoads
from cuda_kernels.emit import Emitter, Value, emitted, floats, words
from cuda_kernels.kv_units import WITH_MINIMUM
from kvs_core.kv_types import KvType, RegionGeometry
from kvs_core.units import ceil_div

TILE_KEYS = 16
N_SHARES = 4  # warps that load a query row together
_VALUE_KEYS = (0, 1, 8, 9)  # added to 2t: the four keys of a lane's value fragment
_SIDES = ((0x4410, 0x4432), (0x1044, 0x3244))
"""Selectors of the probabilities of two keys, each beside a zero: in low halves, for even dimensions, in high ones."""


class KeyTile(RowLoads):
    """``n_subs`` times 16 keys of one head as A operands, and the query rows as B operands in the same order.

    A product waits for the one before it in its chain: 16 keys of 4 or 5 bits have ``n_chains`` two.

    Attributes that are intrinsics:
    load(region, slot, lane)         words: keys g and g + 8 of each 16 from row ``slot`` on of the region at an address
    load_query(row, t, is_valid)     words: one query row, float32 at ``row``, rounded to float16; zeros if not valid
    store_query(shared, query)       the words, 16 bytes a lane, into shared memory at this lane's place
    share_query(shared, row, t, is_valid, warp)
                                     a warp's quarter of both, where ``shares_queries``
    scores(shared, keys, lane, table)
                                     floats(4 n_subs): keys g and 8 + g of each 16 against query rows 2t and 2t + 1;
                                     ``table``: this lane's column of the type's level table
    """

    def __init__(self, region: RegionGeometry, n_subs: int = 1, *, row_step: int = 1) -> None:
        super().__init__(region, 4, n_subs, row_step)
        self.n_chains = 2 if n_subs == 1 and is_split(self.kv_type) else 1
        self.n_query_words = region.head_dim // 8
        self.query_bytes = ceil_div(self.n_query_words, 4) * 512  # one warp's words in shared memory
        self._scale_words = self._count_scale_words()
        self._sub_words = 2 * (self.key_words + self.key_highs + self._scale_words)
        keys = words(n_subs * self._sub_words)

        i32, i64, u32 = types.int32, types.int64, types.uint32
        self.load = emitted(keys, i64, i32, i32)(self._load)
        self.load_query = emitted(words(self.n_query_words), i64, i32, i32)(self._load_query)
        self.store_query = emitted(types.void, u32, words(self.n_query_words))(self._store_query)
        self.share_query = emitted(types.void, u32, i64, i32, i32, i32)(self._share_query)
        self.scores = emitted(floats(4 * n_subs), u32, keys, i32, u32)(self._scores)

    @property
    def shares_queries(self) -> bool:
        """Whether four warps can fill the query's words evenly, four words at a time: chunks are alike then."""
        are_alike = len({(chunk.n_words, chunk.word_bytes) for chunk in self.chunks}) == 1
        return are_alike and self.chunks[0].lane_dims % 8 == 0 and self.n_query_words % (4 * N_SHARES) == 0

    @property
    def _scales_in_pairs(self) -> bool:
        """q8_0 rows of an even number of scales load as words of two; else each lane loads just those it uses."""
        return self.kv_type is KvType.Q8_0 and self.region.head_dim // 32 % 2 == 0

    def _count_scale_words(self) -> int:
        """Of one key."""
        if not self.kv_type.is_quantised:
            return 0
        if self.kv_type.is_turbo:
            return 1 if self.n_groups_of_scale == 2 else self.n_groups_of_scale
        return self.region.head_dim // 64 if self._scales_in_pairs else len(self.chunks)

    def _load(self, emit: Emitter, region_at: Value, slot: Value, lane: Value) -> list[Value]:
        t = emit.bit_and(lane, 3)
        own_slot = emit.widen(emit.add(slot, emit.multiply(emit.shift_right(lane, 2), self.row_step)))
        fragment = []
        for sub in range(self.n_subs):
            rows = [TILE_KEYS * sub + 8 * half for half in range(2)]
            for load in (self.load_quants, self.load_highs):
                for row in rows:
                    fragment += load(emit, region_at, own_slot, row, t)
            for row in rows:
                if self.kv_type.is_turbo:
                    fragment += self._load_group_scales(emit, region_at, own_slot, row)
                elif self._scales_in_pairs:
                    fragment += self._load_wide_scales(emit, region_at, own_slot, row)
                elif self.kv_type.is_quantised:
                    fragment += self.load_block_scales(emit, region_at, own_slot, row, t)
        return fragment

    def _load_wide_scales(self, emit: Emitter, region_at: Value, slot: Value, key: int) -> list[Value]:
        row_bytes = self.region.scale_row_bytes
        row = emit.add(region_at, emit.multiply(slot, row_bytes))
        offset = self.scale_offset_of(key)
        n_words = 4 if row_bytes % 16 == 0 else 2 if row_bytes % 8 == 0 else 1
        loads = (emit.load_stream(row, offset + i, n_words, recent=True) for i in range(0, row_bytes, 4 * n_words))
        return [word for load in loads for word in load]

    def _load_group_scales(self, emit: Emitter, region_at: Value, slot: Value, key: int) -> list[Value]:
        """All scales of one row: two in a word, else one each."""
        address = emit.add(region_at, emit.multiply(slot, self.region.scale_row_bytes))
        offset = self.scale_offset_of(key)
        if self.n_groups_of_scale == 2:
            return emit.load_stream(address, offset, 1, recent=True)
        return [emit.load_half(address, offset + 2 * i, recent=True) for i in range(self.n_groups_of_scale)]

    def _load_query(self, emit: Emitter, row: Value, t: Value, is_valid: Value) -> list[Value]:
        fragment = []
        valid = emit.less(emit.word(0), is_valid)
        for chunk in self.chunks:
            elements = self._load_chunk_floats(emit, row, chunk, t)
            pairs = [emit.pack_half2(elements[a], elements[b]) for a, b in key_pairs(self.kv_type, chunk)]
            fragment += [emit.select(valid, pair, emit.word(0)) for pair in pairs]
        return fragment

    def _load_chunk_floats(self, emit: Emitter, row: Value, chunk: Chunk, t: Value) -> list[Value]:
        """The query's elements that face this lane's part of a chunk, in the chunk's order."""
        if not is_split(self.kv_type):
            address = emit.add(row, emit.widen(emit.multiply(t, 4 * chunk.lane_dims)))
            fours = (
                emit.load_recent_floats(address, 4 * (chunk.first_dim + i), 4) for i in range(0, chunk.lane_dims, 4)
            )
            return [value for four in fours for value in four]
        elements = []
        for k in range(chunk.n_words):
            first = split_word_dim(emit, emit.add(emit.multiply(t, chunk.n_words), chunk.first_word + k))
            address = emit.add(row, emit.widen(emit.multiply(first, 4)))
            elements += emit.load_recent_floats(address, 0, 4) + emit.load_recent_floats(address, 64, 4)
        return elements

    def _store_query(self, emit: Emitter, shared: Value, query: list[Value]) -> None:
        for i in range(0, self.n_query_words, 4):
            emit.store_shared_words(shared, i // 4 * 512, query[i : i + 4])

    def _share_query(self, emit: Emitter, shared: Value, row: Value, t: Value, is_valid: Value, warp: Value) -> None:
        n_own, n_of_chunk = self.n_query_words // 4 // N_SHARES, self.chunks[0].lane_dims // 8
        pairs = [pair for pair in key_pairs(self.kv_type, self.chunks[0]) if max(pair) < 8]
        first, valid = emit.multiply(warp, n_own), emit.less(emit.word(0), is_valid)
        query = []
        for i in range(n_own):
            eight = emit.add(first, i)
            chunk_begin = emit.multiply(emit.divide(eight, n_of_chunk), 4 * n_of_chunk)
            within = emit.add(emit.multiply(t, n_of_chunk), emit.remainder(eight, n_of_chunk))
            elements = self._load_eight(emit, row, emit.add(chunk_begin, within))
            packed = [emit.pack_half2(elements[a], elements[b]) for a, b in pairs]
            query.append([emit.select(valid, pair, emit.word(0)) for pair in packed])
        own = emit.add(shared, emit.multiply(first, 512))
        for i, four in enumerate(query):
            emit.store_shared_words(own, i * 512, four)

    def _load_eight(self, emit: Emitter, row: Value, place: Value) -> list[Value]:
        """A query's elements that face word ``place`` of a row of nibbles, or from element 8 ``place`` on."""
        first = split_word_dim(emit, place) if is_split(self.kv_type) else emit.multiply(place, 8)
        address = emit.add(row, emit.widen(emit.multiply(first, 4)))
        second = 64 if is_split(self.kv_type) else 16
        return emit.load_recent_floats(address, 0, 4) + emit.load_recent_floats(address, second, 4)

    def _scores(self, emit: Emitter, shared: Value, keys: list[Value], lane: Value, table: Value) -> list[Value]:
        t = emit.bit_and(lane, 3)
        query, n_used = list[Value](), 0
        exponents = ExponentTable.load(emit, table) if uses_exponents(self.kv_type) else []
        n_chains = self.n_chains
        totals = [[emit.float(0.0)] * 4 for _ in range(n_chains * self.n_subs)]
        for chunk_idx, chunk in enumerate(self.chunks):
            sums = [[emit.float(0.0)] * 4 for _ in totals] if self.kv_type.is_turbo else totals
            context = self.context(emit, chunk, t, table, exponents)
            operands = [
                [self._expand(emit, keys, sub, half, chunk_idx, context, t) for half in range(2)]
                for sub in range(self.n_subs)
            ]
            for _ in range(chunk.lane_dims // 4):
                if n_used == len(query):
                    n_words = min(4, self.n_query_words - n_used)
                    query += emit.load_shared_words(shared, n_used // 4 * 512, n_words)
                for sub in range(self.n_subs):
                    low, high = (list(islice(words_of, 2)) for words_of in operands[sub])
                    a = [low[0], high[0], low[1], high[1]]
                    place = n_chains * sub + n_used // 2 % n_chains
                    sums[place] = emit.mma(a, query[n_used : n_used + 2], sums[place])
                n_used += 2
            if self.kv_type.is_turbo:
                for sub in range(self.n_subs):
                    scales = [self._group_scale(emit, keys, sub, half, chunk_idx) for half in range(2)]
                    totals[sub] = [emit.fma(sums[sub][i], scales[i // 2], totals[sub][i]) for i in range(4)]
        if n_chains == 2:
            totals = [[emit.float_add(*pair) for pair in zip(*totals, strict=True)]]
        return [score for total in totals for score in total]

    def _expand(
        self, emit: Emitter, keys: list[Value], sub: int, half: int, chunk_idx: int, context: Context, t: Value
    ) -> Iterator[Value]:
        """One chunk of key g + 8 half as words of two elements."""
        own = keys[sub * self._sub_words : (sub + 1) * self._sub_words]
        n_quants, n_highs = self.key_words, self.key_highs
        highs = own[2 * n_quants + half * n_highs :][:n_highs]
        scale = minimum = None
        if self.kv_type.is_quantised and not self.kv_type.is_turbo:
            scales = own[2 * (n_quants + n_highs) + half * self._scale_words :]
            if self._scales_in_pairs:
                scale = self._pick_wide_scale(emit, scales, chunk_idx, t)
            else:
                scale = emit.permute(scales[chunk_idx], emit.word(0), 0x1010)
            if self.kv_type in WITH_MINIMUM:
                minimum = emit.permute(scales[chunk_idx], emit.word(0), 0x3232)
        context = replace(context, scale=scale, minimum=minimum)
        return expand_key(emit, context, self.part_of(own[half * n_quants :][:n_quants], highs, chunk_idx))

    def _pick_wide_scale(self, emit: Emitter, scales: list[Value], chunk_idx: int, t: Value) -> Value:
        """The scale of the lane's elements in this chunk, in both halves of a word."""
        block = self.chunks[chunk_idx].first_dim // 32
        if self.chunks[chunk_idx].lane_dims == 16:  # the four lanes cover two blocks: lanes 2 and 3 use the second
            upper = emit.less(emit.word(1), t)
            selector = emit.select(upper, emit.word(0x3232), emit.word(0x1010))
        else:
            selector = emit.word(0x3232 if block % 2 else 0x1010)
        return emit.permute(scales[block // 2], emit.word(0), selector)

    def _group_scale(self, emit: Emitter, keys: list[Value], sub: int, half: int, group: int) -> Value:
        """The scale of key g + 8 half for one group, float32."""
        first = sub * self._sub_words + 2 * (self.key_words + self.key_highs) + half * self._scale_words
        if self.n_groups_of_scale != 2:
            return emit.low_half_to_float(keys[first + group])
        return (emit.low_half_to_float, emit.high_half_to_float)[group](keys[first])


def split_word_dim(emit: Emitter, word: Value) -> Value:
    """The first element in the low nibbles of a word of a row of blocks of 32."""
    within = emit.multiply(emit.bit_and(word, SPLIT_BLOCK_WORDS - 1), 4)
    return emit.add(emit.multiply(emit.shift_right(word, 2), 32), within)


class ValueTile(RowLoads):
    """``n_subs`` times 16 values of one head as A operands; the accumulator is the transposed output, head dimensions
    by query rows.

    Attributes that are intrinsics:
    nothing()                               words of zeros
    load(region, slot, lane)                words: keys 2t, 2t+1, 2t+8, 2t+9 of each 16 from row ``slot`` on
    keep(values, key, low, high)            the words with keys outside low to high - 1 silenced; ``key``: that of 2t
    accumulate(sums, p, values, lane, table) sums + V^T P; ``p``: two words of two float16 probabilities for each 16
    zeros()                                 a cleared accumulator
    rescale(sums, factor_0, factor_1)       query row 2t times ``factor_0``, row 2t+1 times ``factor_1``
    store(shared, sums, factor_0, factor_1) the rescaled sums, 16 bytes a lane and group of 16 dimensions
    first_dim(group, g)                     the first of the two adjacent dimensions this lane holds of a group

    ``is_narrow``: query row 2t of columns 2t and 2t + 4. A group is 32 dimensions then; a lane holds the first two
    sums for dimension ``first_dim`` + t // 2, the other two for the next but one.
    """

    def __init__(self, region: RegionGeometry, n_subs: int = 1, *, is_narrow: bool = False, row_step: int = 1) -> None:
        super().__init__(region, 8, n_subs, row_step)
        self.is_narrow = is_narrow
        self.n_groups = region.head_dim // (32 if is_narrow else 16)
        self.n_sums = 4 * self.n_groups
        self._scale_words = 0  # of all four keys
        if self.kv_type.is_quantised:
            self._scale_words = 2 * self.n_groups_of_scale if self.kv_type.is_turbo else 4 * len(self.chunks)
        self._sub_words = 4 * (self.key_words + self.key_highs) + self._scale_words

        sums, values = floats(self.n_sums), words(n_subs * self._sub_words)
        f32, i32, i64, u32 = types.float32, types.int32, types.int64, types.uint32
        self.load = emitted(values, i64, i32, i32)(self._load)
        self.nothing = emitted(values)(lambda emit: [emit.word(0)] * values.count)
        self.keep = emitted(values, values, i32, i32, i32)(self._keep)
        self.accumulate = emitted(sums, sums, words(2 * n_subs), values, i32, u32)(self._accumulate)
        self.zeros = emitted(sums)(self._zeros)
        self.rescale = emitted(sums, sums, f32, f32)(self._rescale)
        self.store = emitted(types.void, u32, sums, f32, f32)(self._store)
        self.first_dim = emitted(i32, i32, i32)(self._first_dim)

    def _load(self, emit: Emitter, region_at: Value, slot: Value, lane: Value) -> list[Value]:
        g = emit.shift_right(lane, 2)
        own_slot = emit.widen(emit.add(slot, emit.multiply(emit.bit_and(lane, 3), 2 * self.row_step)))
        loads = [self.load_quants, self.load_highs]
        if self.kv_type.is_quantised and not self.kv_type.is_turbo:
            loads.append(self.load_block_scales)
        fragment = []
        for first in range(0, TILE_KEYS * self.n_subs, TILE_KEYS):
            for load in loads:
                for key in _VALUE_KEYS:
                    fragment += load(emit, region_at, own_slot, first + key, g)
            if self.kv_type.is_turbo:
                for key in (0, 8):
                    fragment += self.load_group_scales(emit, region_at, own_slot, first + key)
        return fragment

    def _keep(self, emit: Emitter, values: list[Value], key: Value, low: Value, high: Value) -> list[Value]:
        """Without a scale a hidden row is 0, whatever its quants are; unquantised rows are cleared themselves."""
        result = list(values)
        for sub in range(self.n_subs):
            kept = []
            for i in _VALUE_KEYS:
                here = emit.add(key, TILE_KEYS * sub + i)
                recent = emit.select(emit.less(here, low), emit.word(0), emit.word(1))
                kept.append(emit.select(emit.less(here, high), recent, emit.word(0)))
            begin = sub * self._sub_words
            scales_at = begin + 4 * (self.key_words + self.key_highs)
            if self.kv_type.is_turbo:
                n = self.n_groups_of_scale
                for i in range(2 * n):
                    keys = [2 * (i // n) + (2 * (i % n) + half) // n for half in range(2)]
                    mask = [emit.multiply(kept[k], 0xFFFF << 16 * half) for half, k in enumerate(keys)]
                    result[scales_at + i] = emit.bit_and(values[scales_at + i], emit.bit_or(*mask))
                continue
            first, n_each = (scales_at, len(self.chunks)) if self.kv_type.is_quantised else (begin, self.key_words)
            for i in range(4 * n_each):
                is_kept = emit.less(emit.word(0), kept[i // n_each])
                result[first + i] = emit.select(is_kept, values[first + i], emit.word(0))
        return result

    def _accumulate(
        self, emit: Emitter, sums: list[Value], p: list[Value], values: list[Value], lane: Value, table: Value
    ) -> list[Value]:
        g = emit.shift_right(lane, 2)
        result = list(sums)
        exponents = ExponentTable.load(emit, table) if uses_exponents(self.kv_type) else []
        for sub in range(self.n_subs):
            own = values[sub * self._sub_words : (sub + 1) * self._sub_words]
            position = 0
            for chunk_idx, chunk in enumerate(self.chunks):
                context = self.context(emit, chunk, g, table, exponents)
                weights = self._weights(emit, own, chunk_idx, p[2 * sub : 2 * sub + 2])
                end = position + chunk.lane_dims * (1 if self.is_narrow else 2)
                if self.kv_type.is_turbo:
                    parts = [self._parts(own, key, chunk_idx) for key in (0, 2)]
                    part = result[position:end]
                    result[position:end] = self._accumulate_pairs(emit, part, weights, parts, context, lane)
                    position = end
                    continue
                pairs = [self._expand(emit, own, key, chunk_idx, context) for key in (0, 2)]
                for _ in range(chunk.lane_dims // 2):
                    a = [*islice(pairs[0], 2), *islice(pairs[1], 2)]
                    result[position : position + 4] = emit.mma(a, weights, result[position : position + 4])
                    position += 4
        return result

    def _accumulate_pairs(
        self, emit: Emitter, sums: list[Value], p: list[Value], parts: list[list[Loaded]], context: Context, lane: Value
    ) -> list[Value]:
        """A chunk of a turbo type, ``parts`` of two times two keys: pairs of elements of one key."""
        result = list(sums)
        if self.is_narrow:
            is_first = emit.less(lane, emit.word(16))
            sides = [[emit.select(is_first, emit.word(a), emit.word(b)) for a, b in zip(*_SIDES, strict=True)]]
            places = [(0, 1, 2, 3)]
        else:
            sides, places = [list(side) for side in _SIDES], [(0, 1, 4, 5), (2, 3, 6, 7)]
        for both, two in zip(p, parts, strict=True):
            weights = [[emit.permute(both, emit.word(0), digits) for digits in side] for side in sides]
            levels = expand_value_pairs(emit, context, *two)
            for first in range(0, len(result), 4 * len(sides)):
                (a0, a2), (a1, a3) = islice(levels, 2)
                for own_weights, own_places in zip(weights, places, strict=True):
                    own_sums = [result[first + i] for i in own_places]
                    for i, value in zip(own_places, emit.mma([a0, a1, a2, a3], own_weights, own_sums), strict=True):
                        result[first + i] = value
        return result

    def _parts(self, own: list[Value], key: int, chunk_idx: int) -> list[Loaded]:
        """One chunk of keys ``key`` and ``key`` + 1 of the fragment."""
        n_words, n_highs = self.key_words, self.key_highs
        parts = []
        for k in (key, key + 1):
            highs = own[4 * n_words + k * n_highs :][:n_highs]
            parts.append(self.part_of(own[k * n_words :][:n_words], highs, chunk_idx))
        return parts

    def _expand(self, emit: Emitter, own: list[Value], key: int, chunk_idx: int, context: Context) -> Iterator[Value]:
        """One chunk of keys ``key`` and ``key`` + 1 of the fragment: a word of both for each element."""
        n_words, n_highs, n_chunks = self.key_words, self.key_highs, len(self.chunks)
        parts = self._parts(own, key, chunk_idx)
        scale = minimum = None
        if self.kv_type.is_quantised and not self.kv_type.is_turbo:
            first = 4 * (n_words + n_highs) + chunk_idx
            both = [own[first + k * n_chunks] for k in (key, key + 1)]
            scale = emit.permute(*both, 0x5410)
            minimum = emit.permute(*both, 0x7632) if self.kv_type in WITH_MINIMUM else None
        return expand_values(emit, replace(context, scale=scale, minimum=minimum), *parts)

    def _weights(self, emit: Emitter, own: list[Value], group: int, p: list[Value]) -> list[Value]:
        """Probabilities, times the scales of a turbo group."""
        if not self.kv_type.is_turbo:
            return p
        n, first = self.n_groups_of_scale, 4 * (self.key_words + self.key_highs)
        weights = []
        for pair in range(2):
            halves = [own[first + pair * n + place // 2] for place in (group, n + group)]
            digits = (0x10 if group % 2 == 0 else 0x32) | (0x5400 if (n + group) % 2 == 0 else 0x7600)
            weights.append(emit.half2_multiply(p[pair], emit.permute(*halves, digits)))
        return weights

    def _zeros(self, emit: Emitter) -> list[Value]:
        return [emit.float(0.0)] * self.n_sums

    def _rescale(self, emit: Emitter, sums: list[Value], factor_0: Value, factor_1: Value) -> list[Value]:
        return [emit.float_multiply(value, (factor_0, factor_1)[i % 2]) for i, value in enumerate(sums)]

    def _store(self, emit: Emitter, shared: Value, sums: list[Value], factor_0: Value, factor_1: Value) -> None:
        rescaled = [emit.as_word(value) for value in self._rescale(emit, sums, factor_0, factor_1)]
        for group in range(self.n_groups):
            emit.store_shared_words(shared, group * 512, rescaled[4 * group : 4 * group + 4])

    def _first_dim(self, emit: Emitter, group: Value, g: Value) -> Value:
        if self.is_narrow:
            group = emit.multiply(group, 2)
        result = emit.word(0)
        first_group = 0
        for chunk in self.chunks:
            within = emit.multiply(emit.add(group, -first_group), 2)
            if is_split(self.kv_type):
                word = emit.add(emit.multiply(g, chunk.n_words), emit.shift_right(within, 3))
                first = split_word_dim(emit, emit.add(word, chunk.first_word))
                upper = emit.multiply(emit.bit_and(within, 4), 3)  # of 8 elements the last four are 16 further
                dim = emit.add(first, emit.add(emit.bit_and(within, 7), upper))
            else:
                dim = emit.add(emit.add(emit.multiply(g, chunk.lane_dims), within), chunk.first_dim)
            result = emit.select(emit.less(group, emit.word(first_group)), result, dim)
            first_group += chunk.lane_dims // 2
        return result
