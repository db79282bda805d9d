"""Value fragments of decode attention: global memory straight into tensor-core registers, per cache type.

What a lane holds of keys and values: ``decode_tiles``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from numba.cuda import types

from cuda_kernels.decode_codes import (
    Context,
    ExponentTable,
    Loaded,
    expand_value_pairs,
    expand_values,
    held_planes,
    is_split,
    uses_exponents,
)
from cuda_kernels.decode_tiles import TILE_KEYS, Tile, are_keys_apart, split_word_dim
from cuda_kernels.emit import Emitter, Value, emitted, floats, words
from cuda_kernels.kv_units import WITH_MINIMUM
from kvs_core.kv_types import RegionGeometry

_SIDES = ((0x4410, 0x4432), (0x1044, 0x3244))
"""Selectors of the probabilities of two keys, each beside a zero: in low halves, for even dimensions, in high ones."""


class ValueTile(Tile):
    """``n_subs`` times 16 values of one head as A operands; the accumulator is the transposed output, head dimensions
    by query rows.

    Attributes that are intrinsics:
    nothing()                               words of zeros
    load(region, slot, lane)                words: keys 2t, 2t+1, 2t+8, 2t+9 of each 16 from row ``slot`` on
    first_row(t)                            the row of key 2t, of sixteen
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
        self.are_apart = are_keys_apart(region)
        self.rows = (0, 4, 8, 12) if self.are_apart else (0, 1, 8, 9)  # of the four keys, behind the first one's
        self.n_groups = region.head_dim // (32 if is_narrow else 16)
        self.n_sums = 4 * self.n_groups
        self._scale_words = 0  # of all four keys
        if self.kv_type.is_quantised:
            self._scale_words = 2 * self.n_groups_of_scale if self.kv_type.is_turbo else 4 * len(self.chunks)
        self._sub_words = 4 * (self.key_words + self.key_highs) + self._scale_words

        sums, values = floats(self.n_sums), words(n_subs * self._sub_words)
        f32, i32, i64, u32 = types.float32, types.int32, types.int64, types.uint32
        self.load = emitted(values, i64, i32, i32)(self._load)
        self.first_row = emitted(i32, i32)(self._first_row)
        self.nothing = emitted(values)(lambda emit: [emit.word(0)] * values.count)
        self.keep = emitted(values, values, i32, i32, i32)(self._keep)
        self.accumulate = emitted(sums, sums, words(2 * n_subs), values, i32, u32)(self._accumulate)
        self.zeros = emitted(sums)(self._zeros)
        self.rescale = emitted(sums, sums, f32, f32)(self._rescale)
        self.store = emitted(types.void, u32, sums, f32, f32)(self._store)
        self.first_dim = emitted(i32, i32, i32)(self._first_dim)

    def _load(self, emit: Emitter, region_at: Value, slot: Value, lane: Value) -> list[Value]:
        g = emit.shift_right(lane, 2)
        own_row = self._first_row(emit, emit.bit_and(lane, 3))
        own_slot = emit.widen(emit.add(slot, emit.multiply(own_row, self.row_step)))
        loads = [self.load_quants, self.load_highs]
        if self.kv_type.is_quantised and not self.kv_type.is_turbo:
            loads.append(self.load_block_scales)
        fragment = []
        for first in range(0, TILE_KEYS * self.n_subs, TILE_KEYS):
            for load in loads:
                for key in self.rows:
                    fragment += load(emit, region_at, own_slot, first + key, g)
            if self.kv_type.is_turbo:
                for i in (0, 2):
                    rows = (first + self.rows[i], first + self.rows[i + 1])
                    fragment += self.load_group_scales(emit, region_at, own_slot, rows)
        return fragment

    def _first_row(self, emit: Emitter, t: Value) -> Value:
        return t if self.are_apart else emit.multiply(t, 2)

    def _keep(self, emit: Emitter, values: list[Value], key: Value, low: Value, high: Value) -> list[Value]:
        """Without a scale a hidden row is 0, whatever its quants are; unquantised rows are cleared themselves."""
        result = list(values)
        for sub in range(self.n_subs):
            kept = []
            for i in self.rows:
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
                if self.are_apart:  # half of the words without the table, as some of the keys'
                    planes = held_planes(emit, self.kv_type, table)
                    context = replace(context, n_permuted=chunk.n_words // 2, planes=planes)
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
