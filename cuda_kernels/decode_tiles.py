"""Key and value fragments of decode attention: global memory straight into tensor-core registers, per cache type.

A warp owns a tile of 16 keys. With lane = 4 g + t, its registers are the operands of two products:

    S = Q K^T    A = queries (row g = query row g, rows 8 to 15 zero), B = keys: the lane holds key g and key 8 + g
    O^T = V^T P  A = values: the lane holds keys 2t, 2t+1, 2t+8, 2t+9;  B = probabilities, exactly the layout of S

The order in which a product sums the dimensions of a head is free as long as both operands agree, so a lane's widest
load is itself a fragment: no shared memory and no shuffles. The kernel that uses the tiles is in ``attention_decode``.
"""

from __future__ import annotations

from dataclasses import dataclass

from numba.cuda import types

from cuda_kernels.emit import BIASED_HALF2, Emitter, Value, emitted, floats, words
from kvs_core.kv_types import KvType, RegionGeometry
from kvs_core.units import ceil_div

TILE_KEYS = 16
_ELEMENT_BYTES = {KvType.F16: 2, KvType.Q8_0: 1}
_VALUE_KEYS = (0, 1, 8, 9)  # added to 2t: the four keys of a lane's value fragment


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Part of a row that the lanes sharing the row load at once: ``n_words`` words each, lane after lane."""

    first_dim: int
    n_words: int
    element_bytes: int

    @property
    def lane_dims(self) -> int:
        return 4 * self.n_words // self.element_bytes

    @property
    def byte_offset(self) -> int:
        return self.first_dim * self.element_bytes


def split_row(head_dim: int, element_bytes: int, n_lanes: int) -> list[Chunk]:
    """Cut a row of ``head_dim`` elements into the widest loads that ``n_lanes`` lanes can share evenly."""
    chunks = []
    first_dim = 0
    for n_words in (4, 2, 1):
        dims = n_lanes * 4 * n_words // element_bytes
        while head_dim - first_dim >= dims:
            chunks.append(Chunk(first_dim=first_dim, n_words=n_words, element_bytes=element_bytes))
            first_dim += dims
    if first_dim != head_dim:
        raise ValueError(f"a head of {head_dim} elements of {element_bytes} bytes cannot be shared by {n_lanes} lanes")
    return chunks


class KeyTile:
    """16 keys of one head as B operands, and the query rows as A operands in the same order of dimensions.

    Attributes that are intrinsics:
    load(row, scale_row, t)          words: keys g and g + 8; addresses of key g and of its scales
    load_query(row, t, is_valid)     words: one query row, float32 at ``row``, rounded to float16; zeros if not valid
    store_query(shared, query)       the words, 16 bytes a lane, into shared memory at this lane's place
    scores(shared, keys, t)          floats(4): row g (words at this lane's place) against keys 2t, 2t+1, 8+2t, 9+2t
    """

    def __init__(self, region: RegionGeometry) -> None:
        self.region = region
        self.chunks = split_row(region.head_dim, _ELEMENT_BYTES[region.kv_type], n_lanes=4)
        self.n_query_words = region.head_dim // 8
        self.query_bytes = ceil_div(self.n_query_words, 4) * 512  # one warp's words in shared memory
        n_keys = 2 * (sum(chunk.n_words for chunk in self.chunks) + self._n_scale_words)

        self.load = emitted(words(n_keys), types.int64, types.int64, types.int32)(self._load)
        self.load_query = emitted(words(self.n_query_words), types.int64, types.int32, types.int32)(self._load_query)
        self.store_query = emitted(types.void, types.uint32, words(self.n_query_words))(self._store_query)
        self.scores = emitted(floats(4), types.uint32, words(n_keys), types.int32)(self._scores)

    @property
    def _n_scale_blocks(self) -> int:
        return self.region.head_dim // 32 if self.region.kv_type is KvType.Q8_0 else 0

    @property
    def _scales_in_pairs(self) -> bool:
        """Rows of an even number of scales load as words of two; otherwise each lane loads just the one it uses."""
        return self._n_scale_blocks % 2 == 0

    @property
    def _n_scale_words(self) -> int:
        if not self._n_scale_blocks:
            return 0
        return self._n_scale_blocks // 2 if self._scales_in_pairs else len(self.chunks)

    def _load(self, emit: Emitter, row: Value, scale_row: Value, t: Value) -> list[Value]:
        fragment = []
        for half in range(2):
            for chunk in self.chunks:
                address = emit.add(row, emit.widen(emit.multiply(t, 4 * chunk.n_words)))
                offset = half * 8 * self.region.row_bytes + chunk.byte_offset
                fragment += emit.load_stream(address, offset, chunk.n_words)
        for half in range(2):
            fragment += self._load_scales(emit, scale_row, half * 8 * self.region.scale_row_bytes, t)
        return fragment

    def _load_scales(self, emit: Emitter, scale_row: Value, offset: int, t: Value) -> list[Value]:
        if not self._n_scale_blocks:
            return []
        if self._scales_in_pairs:
            row_bytes = self.region.scale_row_bytes
            n_words = 4 if row_bytes % 16 == 0 else 2 if row_bytes % 8 == 0 else 1
            loads = (emit.load_stream(scale_row, offset + i, n_words) for i in range(0, row_bytes, 4 * n_words))
            return [word for load in loads for word in load]
        fragment = []
        for chunk in self.chunks:
            block_of_lane = emit.shift_right(emit.multiply(t, chunk.lane_dims), 5)
            address = emit.add(scale_row, emit.widen(emit.multiply(block_of_lane, 2)))
            fragment.append(emit.load_half(address, offset + chunk.first_dim // 32 * 2))
        return fragment

    def _load_query(self, emit: Emitter, row: Value, t: Value, is_valid: Value) -> list[Value]:
        fragment = []
        valid = emit.less(emit.word(0), is_valid)
        for chunk in self.chunks:
            address = emit.add(row, emit.widen(emit.multiply(t, 4 * chunk.lane_dims)))
            for i in range(0, chunk.lane_dims, 4):
                values = emit.load_recent_floats(address, 4 * (chunk.first_dim + i), 4)
                pairs = (emit.pack_half2(values[0], values[1]), emit.pack_half2(values[2], values[3]))
                fragment += [emit.select(valid, pair, emit.word(0)) for pair in pairs]
        return fragment

    def _store_query(self, emit: Emitter, shared: Value, query: list[Value]) -> None:
        for i in range(0, self.n_query_words, 4):
            emit.store_shared_words(shared, i // 4 * 512, query[i : i + 4])

    def _scores(self, emit: Emitter, shared: Value, keys: list[Value], t: Value) -> list[Value]:
        zero = emit.word(0)
        query: list[Value] = []
        sums = [[emit.float(0.0)] * 4, [emit.float(0.0)] * 4]
        n_used = 0
        for chunk_idx, chunk in enumerate(self.chunks):
            for i in range(chunk.lane_dims // 4):
                if n_used == len(query):
                    n_words = min(4, self.n_query_words - n_used)
                    query += emit.load_shared_words(shared, n_used // 4 * 512, n_words)
                a = [query[n_used], zero, query[n_used + 1], zero]
                n_used += 2
                for half in range(2):
                    b = self._key_operand(emit, keys, half, chunk_idx, i, t)
                    sums[half] = emit.mma(a, b, sums[half])
        return [sums[0][0], sums[0][1], sums[1][0], sums[1][1]]

    def _key_operand(
        self, emit: Emitter, keys: list[Value], half: int, chunk_idx: int, i: int, t: Value
    ) -> list[Value]:
        """Four elements of key g + 8 half as two words of float16, elements 4 i to 4 i + 3 of the lane's chunk."""
        n_quants = sum(chunk.n_words for chunk in self.chunks)
        first = half * n_quants + sum(chunk.n_words for chunk in self.chunks[:chunk_idx])
        if self.region.kv_type is KvType.F16:
            return keys[first + 2 * i : first + 2 * i + 2]
        scales = keys[2 * n_quants + half * self._n_scale_words :]
        return emit.dequantise_bytes(keys[first + i], self._key_scale(emit, scales, chunk_idx, t))

    def _key_scale(self, emit: Emitter, scales: list[Value], chunk_idx: int, t: Value) -> Value:
        """The scale of the lane's elements in this chunk, in both halves of a word."""
        if not self._scales_in_pairs:
            return emit.permute(scales[chunk_idx], emit.word(0), 0x1010)
        block = self.chunks[chunk_idx].first_dim // 32
        if self.chunks[chunk_idx].lane_dims == 16:  # the four lanes cover two blocks: lanes 2 and 3 use the second
            upper = emit.less(emit.word(1), t)
            selector = emit.select(upper, emit.word(0x3232), emit.word(0x1010))
        else:
            selector = emit.word(0x3232 if block % 2 else 0x1010)
        return emit.permute(scales[block // 2], emit.word(0), selector)


class ValueTile:
    """16 values of one head as A operands; the accumulator is the transposed output, head dimensions by query rows.

    Attributes that are intrinsics:
    load(row, scale_row, g)                 words: keys 2t, 2t+1, 2t+8, 2t+9; ``row`` is the address of key 2t
    keep(values, keep_0 .. keep_3)          the words with the keys whose flag is 0 replaced by zeros, scales too
    accumulate(sums, p0, p1, values)        sums + V^T P; ``p0``, ``p1`` are two float16 probabilities each
    zeros()                                 a cleared accumulator
    rescale(sums, factor_0, factor_1)       query row 2t times ``factor_0``, row 2t+1 times ``factor_1``
    store(shared, sums, factor_0, factor_1) the rescaled sums, 16 bytes a lane and group of 16 dimensions
    first_dim(group, g)                     the first of the two adjacent dimensions this lane holds of a group
    """

    def __init__(self, region: RegionGeometry) -> None:
        self.region = region
        self.chunks = split_row(region.head_dim, _ELEMENT_BYTES[region.kv_type], n_lanes=8)
        self.n_groups = region.head_dim // 16
        self.n_sums = 4 * self.n_groups
        self._is_quantised = region.kv_type is KvType.Q8_0
        self._key_words = sum(chunk.n_words for chunk in self.chunks)
        self._key_scales = len(self.chunks) if self._is_quantised else 0
        n_values = 4 * (self._key_words + self._key_scales)

        sums, values = floats(self.n_sums), words(n_values)
        self.load = emitted(values, types.int64, types.int64, types.int32)(self._load)
        self.keep = emitted(values, values, types.int32, types.int32, types.int32, types.int32)(self._keep)
        self.accumulate = emitted(sums, sums, types.uint32, types.uint32, values)(self._accumulate)
        self.zeros = emitted(sums)(self._zeros)
        self.rescale = emitted(sums, sums, types.float32, types.float32)(self._rescale)
        self.store = emitted(types.void, types.uint32, sums, types.float32, types.float32)(self._store)
        self.first_dim = emitted(types.int32, types.int32, types.int32)(self._first_dim)

    def _load(self, emit: Emitter, row: Value, scale_row: Value, g: Value) -> list[Value]:
        fragment = []
        for key in _VALUE_KEYS:
            for chunk in self.chunks:
                address = emit.add(row, emit.widen(emit.multiply(g, 4 * chunk.n_words)))
                fragment += emit.load_stream(address, key * self.region.row_bytes + chunk.byte_offset, chunk.n_words)
        if self._is_quantised:
            for key in _VALUE_KEYS:
                for chunk in self.chunks:
                    block_of_lane = emit.shift_right(emit.multiply(g, chunk.lane_dims), 5)
                    address = emit.add(scale_row, emit.widen(emit.multiply(block_of_lane, 2)))
                    offset = key * self.region.scale_row_bytes + chunk.first_dim // 32 * 2
                    fragment.append(emit.load_half(address, offset))
        return fragment

    def _keep(self, emit: Emitter, values: list[Value], *flags: Value) -> list[Value]:
        n_words, n_scales = self._key_words, self._key_scales
        keys = [key for key in range(4) for _ in range(n_words)] + [key for key in range(4) for _ in range(n_scales)]
        kept = [emit.less(emit.word(0), flag) for flag in flags]
        return [emit.select(kept[key], word, emit.word(0)) for key, word in zip(keys, values, strict=True)]

    def _accumulate(self, emit: Emitter, sums: list[Value], p0: Value, p1: Value, values: list[Value]) -> list[Value]:
        result = []
        for chunk_idx, chunk in enumerate(self.chunks):
            for i in range(chunk.lane_dims // 2):
                a = self._value_operand(emit, values, chunk_idx, i)
                position = len(result)
                result += emit.mma(a, [p0, p1], sums[position : position + 4])
        return result

    def _value_operand(self, emit: Emitter, values: list[Value], chunk_idx: int, i: int) -> list[Value]:
        """Elements 2 i and 2 i + 1 of the lane's chunk: each of the four words pairs one element of two keys."""
        n_before = sum(chunk.n_words for chunk in self.chunks[:chunk_idx])
        if self.region.kv_type is KvType.F16:
            w = [values[key * self._key_words + n_before + i] for key in range(4)]
            return [emit.permute(w[k], w[k + 1], selector) for k in (0, 2) for selector in (0x5410, 0x7632)]
        w = [values[key * self._key_words + n_before + i // 2] for key in range(4)]
        scales = [values[4 * self._key_words + key * self._key_scales + chunk_idx] for key in range(4)]
        operand = []
        for k in (0, 2):
            scale = emit.permute(scales[k], scales[k + 1], 0x5410)
            for byte in (2 * (i % 2), 2 * (i % 2) + 1):
                pair = emit.permute(w[k], w[k + 1], byte | (4 + byte) << 8)  # this byte of either key, in bytes 0 and 2
                operand.append(emit.unbias(emit.bit_xor(emit.bit_and(pair, 0x00FF00FF), BIASED_HALF2), scale))
        return operand

    def _zeros(self, emit: Emitter) -> list[Value]:
        return [emit.float(0.0)] * self.n_sums

    def _rescale(self, emit: Emitter, sums: list[Value], factor_0: Value, factor_1: Value) -> list[Value]:
        return [emit.float_multiply(value, (factor_0, factor_1)[i % 2]) for i, value in enumerate(sums)]

    def _store(self, emit: Emitter, shared: Value, sums: list[Value], factor_0: Value, factor_1: Value) -> None:
        rescaled = [emit.as_word(value) for value in self._rescale(emit, sums, factor_0, factor_1)]
        for group in range(self.n_groups):
            emit.store_shared_words(shared, group * 512, rescaled[4 * group : 4 * group + 4])

    def _first_dim(self, emit: Emitter, group: Value, g: Value) -> Value:
        result = emit.word(0)
        first_group = 0
        for chunk in self.chunks:
            within = emit.multiply(emit.add(group, -first_group), 2)
            dim = emit.add(emit.add(emit.multiply(g, chunk.lane_dims), within), chunk.first_dim)
            result = emit.select(emit.less(group, emit.word(first_group)), result, dim)
            first_group += chunk.lane_dims // 2
        return result
