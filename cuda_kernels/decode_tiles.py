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
    held_planes,
    is_split,
    key_pairs,
    split_row,
    uses_exponents,
)
from cuda_kernels.emit import Emitter, Value, emitted, floats, words
from cuda_kernels.kv_units import WITH_MINIMUM
from kvs_core.kv_types import KvType, RegionGeometry
from kvs_core.units import ceil_div

TILE_KEYS = 16
N_SHARES = 4  # warps that load a query row together
_SPLIT_BLOCK_WORDS = 4


def are_keys_apart(region_v: RegionGeometry) -> bool:
    """Whether the two keys of a word of probabilities are four rows apart instead of neighbours, by the values' rows.

    The four lanes that share a dimension then load rows of values that follow each other (H200, turbo4, head size 128,
    131072 keys: 49.3 instead of 51.0 us), but every scale by itself: where rows are not of 64 bytes that costs more.
    """
    return region_v.kv_type is KvType.TURBO4 and region_v.head_dim == 128


class Tile:
    """Where the lanes of a row find their parts of it. ``n_lanes`` lanes share a row, each with the number ``part``.

    ``row_step``: rows from one key to the next, more than one where a row holds some columns of a key only.
    """

    def __init__(self, region: RegionGeometry, n_lanes: int, n_subs: int, row_step: int) -> None:
        self.region, self.kv_type, self.n_subs, self.row_step = region, region.kv_type, n_subs, row_step
        self.chunks = split_row(region, n_lanes)
        self.key_words = sum(chunk.n_words for chunk in self.chunks)
        self.key_highs = len(self.chunks) if region.high_row_bytes else 0
        self.n_groups_of_scale = region.head_dim // region.group_elements if self.kv_type.is_turbo else 0

    def load_quants(self, emit: Emitter, region_at: Value, slot: Value, key: int, part: Value) -> list[Value]:
        """This lane's words of the key ``key`` keys behind row ``slot``."""
        row = emit.add(region_at, emit.multiply(slot, self.region.row_bytes))
        first_byte = key * self.row_step * self.region.row_bytes
        loaded = []
        for chunk in self.chunks:
            address = emit.add(row, emit.widen(emit.multiply(part, chunk.word_bytes * chunk.n_words)))
            offset = first_byte + chunk.byte_offset
            if chunk.word_bytes == 2:
                loaded.append(emit.load_half(address, offset, recent=True))
            else:
                loaded += emit.load_stream(address, offset, chunk.n_words, recent=True)
        return loaded

    def load_highs(self, emit: Emitter, region_at: Value, slot: Value, key: int, part: Value) -> list[Value]:
        """This lane's high bits of each chunk: of turbo types those of its own elements, else those of its block."""
        if not self.key_highs:
            return []
        row = emit.add(region_at, emit.multiply(slot, self.region.high_row_bytes))
        first_byte = self.region.high_offset + key * self.row_step * self.region.high_row_bytes
        loaded = []
        for chunk in self.chunks:
            offset = first_byte
            if not self.kv_type.is_turbo:
                address = emit.add(row, emit.widen(emit.multiply(self.block_of(emit, chunk, part), 4)))
                loaded += emit.load_stream(address, offset + chunk.first_dim // 32 * 4, 1, recent=True)
                continue
            n_bytes = chunk.lane_dims // 8
            address = emit.add(row, emit.widen(emit.multiply(part, n_bytes)))
            offset += chunk.first_dim // 8
            if n_bytes == 4:
                loaded += emit.load_stream(address, offset, 1, recent=True)
            else:
                load = emit.load_half if n_bytes == 2 else emit.load_byte
                loaded.append(load(address, offset, recent=True))
        return loaded

    def load_block_scales(self, emit: Emitter, region_at: Value, slot: Value, key: int, part: Value) -> list[Value]:
        """Of each chunk the scale of this lane's block, with the minimum if the type has one."""
        row = emit.add(region_at, emit.multiply(slot, self.region.scale_row_bytes))
        offset = self.scale_offset_of(key)
        n_bytes = self.kv_type.scale_bytes_per_block
        loaded = []
        for chunk in self.chunks:
            address = emit.add(row, emit.widen(emit.multiply(self.block_of(emit, chunk, part), n_bytes)))
            here = offset + chunk.first_dim // 32 * n_bytes
            loaded.append(
                emit.load_half(address, here, recent=True)
                if n_bytes == 2
                else emit.load_stream(address, here, 1, recent=True)[0]
            )
        return loaded

    def load_group_scales(self, emit: Emitter, region_at: Value, slot: Value, keys: tuple[int, int]) -> list[Value]:
        """All scales of two keys behind row ``slot``: half a + n * b is that of key b and group a of n.

        Rows that are neighbours begin at a multiple of 4 bytes.
        """
        row_bytes, n = self.region.scale_row_bytes, self.n_groups_of_scale
        address = emit.add(region_at, emit.multiply(slot, row_bytes))
        offset, next_offset = map(self.scale_offset_of, keys)
        if next_offset == offset + row_bytes:
            if n == 2:
                return emit.load_stream(address, offset, 2, recent=True)
            return [emit.load_stream(address, offset + 4 * i, 1, recent=True)[0] for i in range(n)]
        if n % 2 == 0:
            starts = [at + 4 * i for at in (offset, next_offset) for i in range(n // 2)]
            return [emit.load_stream(address, at, 1, recent=True)[0] for at in starts]
        halves = [emit.load_half(address, at + 2 * i, recent=True) for at in (offset, next_offset) for i in range(n)]
        return [emit.permute(*halves[i : i + 2], 0x5410) for i in range(0, 2 * n, 2)]

    def scale_offset_of(self, key: int) -> int:
        """Of the key ``key`` keys behind a row, in bytes."""
        return self.region.scale_offset + key * self.row_step * self.region.scale_row_bytes

    def block_of(self, emit: Emitter, chunk: Chunk, part: Value) -> Value:
        """Block of 32 that this lane's part lies in, counted from the chunk's first, which starts a block."""
        return emit.shift_right(emit.multiply(part, chunk.n_words), (32 // chunk.word_dims).bit_length() - 1)

    def context(self, emit: Emitter, chunk: Chunk, part: Value, table: Value, exponents: list[Value]) -> Context:
        """Of a chunk, still without scales."""
        place = emit.bit_and(emit.multiply(part, chunk.n_words), _SPLIT_BLOCK_WORDS - 1) if self.key_highs else None
        return Context(kv_type=self.kv_type, word_dims=chunk.word_dims, place=place, table=table, exponents=exponents)

    def part_of(self, quants: list[Value], highs: list[Value], chunk_idx: int) -> Loaded:
        """Chunk ``chunk_idx`` of one key's words."""
        first = sum(chunk.n_words for chunk in self.chunks[:chunk_idx])
        own = quants[first : first + self.chunks[chunk_idx].n_words]
        return Loaded(words=own, high=highs[chunk_idx] if highs else None)


class KeyTile(Tile):
    """``n_subs`` times 16 keys of one head as A operands, and the query rows as B operands in the same order.

    A product waits for the one before it in its chain: 16 keys of 4 or 5 bits have ``n_chains`` two.

    Attributes that are intrinsics:
    load(region, slot, lane)         words: keys g and g + 8 of each 16 from row ``slot`` on of the region at an address
    row_of(g)                        the row of key g, of eight; key g + 8 is in the eighth row after it
    load_query(row, t, is_valid)     words: one query row, float32 at ``row``, rounded to float16; zeros if not valid
    store_query(shared, query)       the words, 16 bytes a lane, into shared memory at this lane's place
    share_query(shared, row, t, is_valid, warp)
                                     a warp's quarter of both, where ``can_share_query``
    scores(shared, keys, lane, table)
                                     floats(4 n_subs): keys g and 8 + g of each 16 against query rows 2t and 2t + 1;
                                     ``table``: this lane's column of the type's level table
    """

    def __init__(self, region: RegionGeometry, n_subs: int = 1, *, are_apart: bool = False, row_step: int = 1) -> None:
        super().__init__(region, 4, n_subs, row_step)
        self.are_apart = are_apart
        self.n_chains = 2 if n_subs == 1 and is_split(self.kv_type) else 1
        self.n_query_words = region.head_dim // 8
        self.query_bytes = ceil_div(self.n_query_words, 4) * 512  # one warp's words in shared memory
        self._scale_words = self._count_scale_words()
        self._sub_words = 2 * (self.key_words + self.key_highs + self._scale_words)
        keys = words(n_subs * self._sub_words)

        i32, i64, u32 = types.int32, types.int64, types.uint32
        self.load = emitted(keys, i64, i32, i32)(self._load)
        self.row_of = emitted(i32, i32)(self._row_of)
        self.load_query = emitted(words(self.n_query_words), i64, i32, i32)(self._load_query)
        self.store_query = emitted(types.void, u32, words(self.n_query_words))(self._store_query)
        self.share_query = emitted(types.void, u32, i64, i32, i32, i32)(self._share_query)
        self.scores = emitted(floats(4 * n_subs), u32, keys, i32, u32)(self._scores)

    @property
    def can_share_query(self) -> bool:
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
        own_row = self._row_of(emit, emit.shift_right(lane, 2))
        own_slot = emit.widen(emit.add(slot, emit.multiply(own_row, self.row_step)))
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

    def _row_of(self, emit: Emitter, g: Value) -> Value:
        if not self.are_apart:
            return g
        return emit.add(emit.shift_right(g, 1), emit.multiply(emit.bit_and(g, 1), 4))

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
            if n_permuted := self._count_permuted(chunk):
                context = replace(context, n_permuted=n_permuted, planes=held_planes(emit, self.kv_type, table))
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

    def _count_permuted(self, chunk: Chunk) -> int:
        """Words of turbo4 that are decoded without the table, which keeps the path to shared memory busy."""
        if self.kv_type is not KvType.TURBO4:
            return 0
        return chunk.n_words // (4 if self.region.head_dim <= 128 else 2)

    def _group_scale(self, emit: Emitter, keys: list[Value], sub: int, half: int, group: int) -> Value:
        """The scale of key g + 8 half for one group, float32."""
        first = sub * self._sub_words + 2 * (self.key_words + self.key_highs) + half * self._scale_words
        if self.n_groups_of_scale != 2:
            return emit.low_half_to_float(keys[first + group])
        return (emit.low_half_to_float, emit.high_half_to_float)[group](keys[first])


def split_word_dim(emit: Emitter, word: Value) -> Value:
    """The first element in the low nibbles of a word of a row of blocks of 32."""
    within = emit.multiply(emit.bit_and(word, _SPLIT_BLOCK_WORDS - 1), 4)
    return emit.add(emit.multiply(emit.shift_right(word, 2), 32), within)
