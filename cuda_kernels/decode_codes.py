"""What a lane of decode attention makes of the words it loaded: operands of the products, per cache type.

A *chunk* is part of a row that the lanes sharing the row load at once, ``n_words`` words a lane. Keys are expanded to
pairs of elements of one key, values to pairs of keys for one element: that is what the tensor cores sum over. Types
with a codebook look pairs up in shared memory (``LevelTable``); the turbo types among them stay without their scale,
which belongs to a whole group: ``decode_tiles`` applies it to the products of keys and to the probabilities of values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numba.cuda import types

from cuda_kernels.emit import BIASED_HALF2, Emitter, Value, emitted
from cuda_kernels.kv_units import (
    LEVELS,
    POSITIVE_LEVELS,
    bfloat_halves,
    byte_planes,
    fifth_bits,
    mirrored_levels,
    pick_bytes,
    scale_biased,
    scale_quants,
    unsigned_middle,
)
from kvs_core.kv_types import KvType, RegionGeometry

_LOW_NIBBLES = 0x0F0F0F0F
TABLE_STRIDE = 128  # bytes from entry to entry: every lane has the word in its own bank
_SPLIT = (KvType.Q5_1, KvType.Q5_0, KvType.Q4_1, KvType.Q4_0, KvType.IQ4_NL)


def word_elements(kv_type: KvType) -> int:
    """Elements whose quants lie in one word."""
    return 32 * kv_type.block_elements // (8 * kv_type.quant_bytes_per_block)


def is_split(kv_type: KvType) -> bool:
    """Whether a word holds elements 4 i to 4 i + 3 of a block of 32 in its low nibbles, 16 further in the high ones."""
    return kv_type in _SPLIT


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Part of a row that ``n_lanes`` lanes load at once: ``n_words`` words each, lane after lane.

    ``word_bytes`` 2: a lane's part is half a word, in its low half.
    """

    first_dim: int
    n_words: int
    word_dims: int
    word_bytes: int = 4

    @property
    def lane_dims(self) -> int:
        return self.n_words * self.word_dims

    @property
    def byte_offset(self) -> int:
        return self.first_dim // self.word_dims * self.word_bytes

    @property
    def first_word(self) -> int:
        return self.first_dim // self.word_dims


def split_row(region: RegionGeometry, n_lanes: int) -> list[Chunk]:
    """Cut a row into the widest loads that ``n_lanes`` lanes can share evenly; of turbo types, into its groups."""
    word_dims, head_dim = word_elements(region.kv_type), region.head_dim
    if region.kv_type.is_turbo:
        lane_dims = region.group_elements // n_lanes
        n_words, rest = divmod(lane_dims, word_dims)
        shape: dict[str, Any] = {"n_words": n_words, "word_dims": word_dims}
        if rest:
            shape = {"n_words": 1, "word_dims": word_dims // 2, "word_bytes": 2}
        return [Chunk(first_dim=first, **shape) for first in range(0, head_dim, region.group_elements)]
    chunks = []
    first_dim = 0
    for n_words in (4, 2, 1):
        while head_dim - first_dim >= n_lanes * n_words * word_dims:
            chunks.append(Chunk(first_dim=first_dim, n_words=n_words, word_dims=word_dims))
            first_dim += n_lanes * n_words * word_dims
    if first_dim != head_dim:
        raise ValueError(f"a row of {head_dim} {region.kv_type.value} elements cannot be shared by {n_lanes} lanes")
    return chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A lane's part of one chunk of one key: words, and high bits if the type has any."""

    words: Sequence[Value]
    high: Value | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What expanding needs beside the words.

    scale, minimum    words of two float16: of one key twice, of two keys in the halves
    place             the lane's first word within its block, counted in words, of types with a fifth bit
    table             shared address of this lane's column of the level table
    exponents         of the float16 1024 and 64, twice each, of q4_0 and q4_1: in registers that the assembler keeps
    n_permuted        words of a lane's part that byte permutations decode instead of the table, of turbo4
    planes            what they take: both bytes of the positive levels, in registers that the assembler keeps
    """

    kv_type: KvType
    word_dims: int
    scale: Value | None = None
    minimum: Value | None = None
    place: Value | None = None
    table: Value | None = None
    exponents: Sequence[Value] = ()
    n_permuted: int = 0
    planes: Sequence[Sequence[Value]] = ()


# -- keys: pairs of elements --------------------------------------------------------------------------------------


def key_pairs(kv_type: KvType, chunk: Chunk) -> list[tuple[int, int]]:
    """Which elements of the lane's chunk (``chunk_dims``) the words of ``expand_key`` pair, in order."""
    within = {
        KvType.Q4_0: [(0, 2), (4, 6), (1, 3), (5, 7)],
        KvType.Q4_1: [(0, 2), (4, 6), (1, 3), (5, 7)],
        KvType.IQ4_NL: [(0, 4), (1, 5), (2, 6), (3, 7)],
    }.get(kv_type, [(i, i + 1) for i in range(0, chunk.word_dims, 2)])
    return [(first + a, first + b) for first in range(0, chunk.lane_dims, chunk.word_dims) for a, b in within]


def expand_key(emit: Emitter, context: Context, key: Loaded) -> Iterator[Value]:
    """Words of two elements each, paired as ``key_pairs`` says, made when they are asked for: registers are short."""
    kv_type = context.kv_type
    if kv_type is KvType.TURBO3:
        yield from _third_bit_pairs(emit, context, key)
        return
    for k, word in enumerate(key.words):
        if kv_type is KvType.F16:
            yield word
        elif kv_type is KvType.BF16:
            yield bfloat_halves(emit, word)
        elif kv_type is KvType.Q8_0:
            yield from emit.dequantise_bytes(word, context.scale)
        elif kv_type in (KvType.Q4_0, KvType.Q4_1):
            yield from _four_pairs(emit, context, word)
        elif kv_type in (KvType.Q5_0, KvType.Q5_1):
            for four in _five_bit_bytes(emit, context, word, key.high, k):
                for digits in (0x4140, 0x4342):
                    biased = emit.permute(four, emit.word(0x64646464), digits)
                    yield scale_biased(emit, kv_type, biased, _scale(context), context.minimum)
        elif kv_type is KvType.TURBO2:
            bytes_of = [emit.bit_and(shifted, _LOW_NIBBLES) for shifted in (word, emit.shift_right(word, 4))]
            yield from (_look_up_byte(emit, context, four, i) for i in range(4) for four in bytes_of)
        elif k < context.n_permuted:
            yield from mirrored_levels(emit, context.planes, word)
        else:
            for i in range(4):
                level = _look_up_byte(emit, context, word, i)
                yield level if kv_type.is_turbo else emit.half2_multiply(level, context.scale)


def _scale(context: Context) -> Value:
    assert context.scale is not None
    return context.scale


def _four_pairs(emit: Emitter, context: Context, pairs: Value) -> list[Value]:
    """The four nibbles of both halves of a word as values of q4_0 or q4_1, from the lowest nibble up.

    A nibble u in the mantissa of 1024 is 1024 + u, four bits further up in that of 64 it is 64 + u.
    """
    result = []
    low, high = context.exponents
    for shifted in (pairs, emit.shift_right(pairs, 8)):
        for mask, exponent, base in ((0x000F000F, low, 1024), (0x00F000F0, high, 64)):
            biased = emit.bit_or(emit.bit_and(shifted, mask), exponent)
            zero = base + unsigned_middle(context.kv_type)
            result.append(scale_quants(emit, biased, zero, _scale(context), context.minimum))
    return result


def _five_bit_bytes(emit: Emitter, context: Context, word: Value, high: Value | None, k: int) -> list[Value]:
    """The quants of the low nibbles of word ``k`` of a lane's part, then those of the high ones, as unsigned bytes."""
    first = emit.shift_left(emit.add(context.place, k), 2)
    low, upper = emit.bit_and(word, _LOW_NIBBLES), emit.bit_and(emit.shift_right(word, 4), _LOW_NIBBLES)
    return [
        emit.bit_or(low, fifth_bits(emit, high, first)),
        emit.bit_or(upper, fifth_bits(emit, high, emit.add(first, 16))),
    ]


def _third_bit_pairs(emit: Emitter, context: Context, key: Loaded) -> Iterator[Value]:
    """turbo3 keys, one or two words of 16 elements."""
    first, last = key.words[0], key.words[-1]
    even, odd = emit.permute(first, last, 0x6420), emit.permute(first, last, 0x7531)
    fields = _third_bit_fields(emit, even, odd, key.high)
    for m in range(2 * len(key.words)):
        yield from (_look_up_byte(emit, context, field, m) for field in fields)


def _third_bit_fields(emit: Emitter, even: Value, odd: Value, high: Value) -> list[Value]:
    """Table entries of turbo3, one in every byte: two low pairs, two high bits, and two bits that do not matter.

    Byte m of ``even`` and ``odd`` holds elements 8 m to 8 m + 3 and 8 m + 4 to 8 m + 7, byte m of ``high`` their bits;
    of the results, elements 8 m + 2 i and 8 m + 2 i + 1.
    """
    return [
        emit.bit_select(_LOW_NIBBLES, even, emit.shift_left(high, 4)),
        emit.bit_select(_LOW_NIBBLES, emit.shift_right(even, 4), emit.shift_left(high, 2)),
        emit.bit_select(_LOW_NIBBLES, odd, high),
        emit.bit_select(_LOW_NIBBLES, emit.shift_right(odd, 4), emit.shift_right(high, 2)),
    ]


# -- values: pairs of keys ----------------------------------------------------------------------------------------


def expand_values(emit: Emitter, context: Context, a: Loaded, b: Loaded) -> Iterator[Value]:
    """For each element of the chunk in order (``chunk_dims``) a word of two keys' values, with the scales of both."""
    kv_type = context.kv_type
    for k, pair in enumerate(zip(a.words, b.words, strict=True)):
        if kv_type in (KvType.F16, KvType.BF16):
            if kv_type is KvType.BF16:
                pair = tuple(bfloat_halves(emit, word) for word in pair)
            yield from (emit.permute(*pair, selector) for selector in (0x5410, 0x7632))
        elif kv_type is KvType.Q8_0:
            for i in range(4):
                yield emit.unbias(emit.bit_xor(_byte_pair(emit, *pair, i), BIASED_HALF2), context.scale)
        elif kv_type in (KvType.Q5_0, KvType.Q5_1):
            yield from _five_bit_values(emit, context, a, b, k)
        elif kv_type in (KvType.Q4_0, KvType.Q4_1):
            yield from _nibble_values(emit, context, *pair)
        else:
            yield from _iq4_nl_values(emit, context, *pair)


def _byte_pair(emit: Emitter, a: Value, b: Value, i: int) -> Value:
    """Byte i of either word in the low bytes of the two halves."""
    return emit.bit_and(emit.permute(a, b, i | (4 + i) << 8), 0x00FF00FF)


def _five_bit_values(emit: Emitter, context: Context, a: Loaded, b: Loaded, k: int) -> Iterator[Value]:
    """Word ``k`` of q5_0 and q5_1."""
    fours = (_five_bit_bytes(emit, context, part.words[k], part.high, k) for part in (a, b))
    for four in zip(*fours, strict=True):
        for i in range(4):
            biased = emit.bit_or(_byte_pair(emit, *four, i), emit.word(0x64006400))
            yield scale_biased(emit, context.kv_type, biased, _scale(context), context.minimum)


def _nibble_values(emit: Emitter, context: Context, a: Value, b: Value) -> list[Value]:
    """q4_0 and q4_1: half a word of either key side by side, then as keys."""
    low_half, high_half = (_four_pairs(emit, context, emit.permute(a, b, digits)) for digits in (0x5410, 0x7632))
    return [*low_half[0::2], *high_half[0::2], *low_half[1::2], *high_half[1::2]]


def _iq4_nl_values(emit: Emitter, context: Context, a: Value, b: Value) -> Iterator[Value]:
    """Nibbles of both keys joined to bytes: the low ones of the words, then the high ones, times the scales."""
    even = emit.bit_select(_LOW_NIBBLES, a, emit.shift_left(b, 4))
    odd = emit.bit_select(_LOW_NIBBLES, emit.shift_right(a, 4), b)
    for fields in (even, odd):
        yield from (emit.half2_multiply(_look_up_byte(emit, context, fields, i), context.scale) for i in range(4))


def expand_value_pairs(emit: Emitter, context: Context, a: Loaded, b: Loaded) -> Iterator[tuple[Value, Value]]:
    """turbo types: for each pair of elements of the chunk in order its levels in key ``a`` and in key ``b``."""
    if context.kv_type is not KvType.TURBO3:
        yield from zip(expand_key(emit, context, a), expand_key(emit, context, b), strict=True)
        return
    is_half = context.word_dims == 8  # the parts of both keys side by side
    digits = (0x0040, 0x0051, 0x0040) if is_half else (0x6420, 0x7531, 0x5410)
    parts = ((a.words[0], b.words[0]), (a.words[0], b.words[0]), (a.high, b.high))
    fields = _third_bit_fields(emit, *(emit.permute(*part, d) for part, d in zip(parts, digits, strict=True)))
    n_bytes = context.word_dims // 8
    for m in range(n_bytes):
        for field in fields:
            yield _look_up_byte(emit, context, field, m), _look_up_byte(emit, context, field, n_bytes + m)


def held_planes(emit: Emitter, kv_type: KvType, table: Value) -> list[list[Value]]:
    """Low bytes and high bytes of the positive levels as float16; ``table``: any address of shared memory."""
    levels = np.array(POSITIVE_LEVELS[kv_type], np.float16)
    planes = np.ascontiguousarray(levels.view(np.uint8).reshape(-1, 2).T).view("<u4")
    held = emit.held_words([int(word) for word in planes.reshape(-1)], emit.as_float(table))
    return [held[:2], held[2:]]


# -- level tables -------------------------------------------------------------------------------------------------


def _look_up_byte(emit: Emitter, context: Context, word: Value, i: int) -> Value:
    """The table's word for byte i of ``word``."""
    assert context.table is not None
    return emit.load_shared_words(emit.add_byte_times_128(word, i, context.table), 0, 1)[0]


class LevelTable:
    """Pairs of levels of a type in shared memory: an entry for every pair of quants, once for each lane.

    Entry: the two quants' bits side by side; of turbo3 their two low bits side by side, both third bits, and two bits
    that do not matter.
    fill(base, thread)    intrinsic: ``n_threads`` threads write the whole table at shared address ``base``
    """

    def __init__(self, kv_type: KvType, n_threads: int) -> None:
        self.kv_type, self.n_threads = kv_type, n_threads
        self.n_entries = {KvType.TURBO2: 16}.get(kv_type, 256)
        self.n_bytes = self.n_entries * TABLE_STRIDE
        self.fill = emitted(types.void, types.uint32, types.int32)(self._fill)

    def _fill(self, emit: Emitter, base: Value, thread: Value) -> None:
        """A thread writes one entry, or part of one; neighbours begin at different banks."""
        n_parts = max(1, self.n_threads // self.n_entries)  # threads of an entry
        n_pieces = TABLE_STRIDE // 16 // n_parts
        part = emit.bit_and(thread, n_parts - 1)
        for first in range(0, self.n_entries, self.n_threads // n_parts):
            entry = emit.add(emit.divide(thread, n_parts), first)
            pair = self._pair(emit, entry)
            row = emit.add(base, emit.multiply(entry, TABLE_STRIDE))
            for i in range(n_pieces):
                turned = emit.bit_and(emit.add(entry, i), n_pieces - 1)
                piece = emit.add(emit.multiply(part, n_pieces), turned)
                emit.store_shared_words(emit.add(row, emit.multiply(piece, 16)), 0, [pair] * 4)

    def _pair(self, emit: Emitter, entry: Value) -> Value:
        if self.kv_type in (KvType.TURBO2, KvType.TURBO3):
            digits = emit.bit_or(emit.bit_and(entry, 3), emit.shift_left(emit.bit_and(entry, 12), 2))
            if self.kv_type is KvType.TURBO3:
                third = emit.bit_or(
                    emit.bit_and(emit.shift_right(entry, 2), 4), emit.shift_left(emit.bit_and(entry, 32), 1)
                )
                digits = emit.bit_or(digits, third)
        else:
            digits = entry
        low, high = pick_bytes(emit, byte_planes(emit, LEVELS[self.kv_type], np.float16), digits)
        return emit.permute(low, high, 0x5140)


class ExponentTable:
    """Two words for each lane instead of levels. As constants they would be moved into a register before every use.

    Same attributes as ``LevelTable``.
    """

    WORDS = (0x64006400, 0x54005400)

    def __init__(self) -> None:
        self.n_bytes = len(self.WORDS) * TABLE_STRIDE
        self.fill = emitted(types.void, types.uint32, types.int32)(self._fill)

    def _fill(self, emit: Emitter, base: Value, thread: Value) -> None:
        place = emit.add(base, emit.multiply(emit.bit_and(thread, 31), 4))
        for i, word in enumerate(self.WORDS):
            emit.store_shared_words(place, i * TABLE_STRIDE, [emit.word(word)])

    @classmethod
    def load(cls, emit: Emitter, table: Value) -> list[Value]:
        return [emit.load_shared_words(table, i * TABLE_STRIDE, 1)[0] for i in range(len(cls.WORDS))]


@emitted(types.void, types.uint32, types.int32)
def fill_nothing(emit: Emitter, base: Value, thread: Value) -> None:
    """``LevelTable.fill`` of no table."""


@lru_cache(maxsize=16)
def table_of(kv_type: KvType, n_threads: int) -> LevelTable | ExponentTable | None:
    """What a type keeps in shared memory, one object for each; None for types that need nothing there."""
    if uses_exponents(kv_type):
        return _EXPONENTS
    return LevelTable(kv_type, n_threads) if kv_type in LEVELS else None


def uses_exponents(kv_type: KvType) -> bool:
    return kv_type in (KvType.Q4_0, KvType.Q4_1)


_EXPONENTS = ExponentTable()
