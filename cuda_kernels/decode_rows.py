"""Rows of the cache in the lanes of decode attention: which part of a row a lane loads, per cache type.

What is made of the words: ``decode_codes``; which keys a lane holds: ``decode_tiles``.
"""

from __future__ import annotations

from cuda_kernels.decode_codes import Chunk, Context, Loaded, split_row
from cuda_kernels.emit import Emitter, Value
from kvs_core.kv_types import RegionGeometry

SPLIT_BLOCK_WORDS = 4


class RowLoads:
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

    def load_group_scales(self, emit: Emitter, region_at: Value, slot: Value, key: int) -> list[Value]:
        """All scales of two keys, ``key`` (even) and the next: half a + n * b is that of key b and group a of n."""
        address = emit.add(region_at, emit.multiply(slot, self.region.scale_row_bytes))
        offset = self.scale_offset_of(key)
        if self.row_step != 1:  # rows of one group then
            both = [emit.load_half(address, self.scale_offset_of(one), recent=True) for one in (key, key + 1)]
            return [emit.permute(*both, 0x5410)]
        if self.n_groups_of_scale == 2:
            return emit.load_stream(address, offset, 2, recent=True)
        return [emit.load_stream(address, offset + 4 * i, 1, recent=True)[0] for i in range(self.n_groups_of_scale)]

    def scale_offset_of(self, key: int) -> int:
        """Of the key ``key`` keys behind a row, in bytes."""
        return self.region.scale_offset + key * self.row_step * self.region.scale_row_bytes

    def block_of(self, emit: Emitter, chunk: Chunk, part: Value) -> Value:
        """Block of 32 that this lane's part lies in, counted from the chunk's first, which starts a block."""
        return emit.shift_right(emit.multiply(part, chunk.n_words), (32 // chunk.word_dims).bit_length() - 1)

    def context(self, emit: Emitter, chunk: Chunk, part: Value, table: Value, exponents: list[Value]) -> Context:
        """Of a chunk, still without scales."""
        place = emit.bit_and(emit.multiply(part, chunk.n_words), SPLIT_BLOCK_WORDS - 1) if self.key_highs else None
        return Context(kv_type=self.kv_type, word_dims=chunk.word_dims, place=place, table=table, exponents=exponents)

    def part_of(self, quants: list[Value], highs: list[Value], chunk_idx: int) -> Loaded:
        """Chunk ``chunk_idx`` of one key's words."""
        first = sum(chunk.n_words for chunk in self.chunks[:chunk_idx])
        own = quants[first : first + self.chunks[chunk_idx].n_words]
        return Loaded(words=own, high=highs[chunk_idx] if highs else None)
