"""What every format of units of quantised weights is described by, and loads that all of them share.

A unit is what one lane loads at once: some bytes of quants of one row, mostly 16, and whatever belongs to them. It
decodes to groups of 16 consecutive weights,

    weight = scale * q + shift,       q: four words of four bytes, signed or small enough not to matter

so matrix-vector products (``matvec``) and dequantisation (``dequant``) need no code per type. The formats are in
``weight_units``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cuda_kernels.emit import Emitter, Value

GROUP_ELEMENTS = 16

LOW_NIBBLES = 0x0F0F0F0F


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """16 consecutive weights from column ``first + further`` on. ``shift`` None means 0.

    ``summands``, where there are any, are words of bytes, two of which are one of ``quants`` when they are added up:
    products with them take fewer instructions. What is not used is not computed.

    All groups of a unit share ``first``, so that one address serves what belongs to their columns.
    """

    first: Value
    further: int
    quants: list[Value]
    scale: Value
    shift: Value | None
    summands: list[Value] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BytePairs:
    """Weights of a unit in pairs of groups, whose scales and minima are bytes for two factors.

    weight = d * scale * q + minus_d_min * minimum

    furthers         columns of the first group of each pair, further than ``first``
    quants(pair)     eight words of both groups
    scales, minima   a byte for every group
    """

    first: Value
    furthers: tuple[int, ...]
    quants: Callable[[int], list[Value]]
    scales: Value
    minima: Value
    d: Value
    minus_d_min: Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Unit ``n_lanes step + lane`` of a row. A lane's place in a block of eight units is the same in every step."""

    number: Value
    eighth: Value
    part: Value

    @classmethod
    def of(cls, emit: Emitter, step: Value, lane: Value, n_lanes: int = 32) -> Unit:
        bits = n_lanes.bit_length() - 1
        return cls(
            number=emit.add(emit.shift_left(step, bits), lane),
            eighth=emit.add(emit.shift_left(step, bits - 3), emit.shift_right(lane, 3)),
            part=emit.bit_and(lane, 7),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFormat:
    """Units of one quantised type.

    is_uniform                the groups of a unit share scale and shift
    is_block                  its groups come in pairs, next to each other, multiplied with one block of activations

    load(emit, rows, unit)    words of a unit of a row; ``rows``: the row's address in each plane
    decode(emit, words, unit) its groups
    """

    elements: int
    n_words: int
    n_groups: int
    load: Callable[[Emitter, Sequence[Value], Unit], list[Value]]
    decode: Callable[[Emitter, list[Value], Unit], list[Group]]
    decode_pairs: Callable[[Emitter, list[Value], Unit], BytePairs] | None = None
    is_uniform: bool = False
    is_block: bool = False


def move(emit: Emitter, address: Value, n_bytes: Value) -> Value:
    """An address in global or shared memory, so many bytes (a word) further."""
    return emit.add(address, n_bytes if emit.is_shared(address) else emit.widen(n_bytes))


def at(emit: Emitter, row: Value, index: Value, n_bytes: int) -> Value:
    return move(emit, row, emit.multiply(index, n_bytes))


def load(emit: Emitter, address: Value, offset: int, n_words: int) -> list[Value]:
    """Words of weights: read once from global memory, or from where a copy in shared memory put them."""
    if emit.is_shared(address):
        return emit.load_shared_words(address, offset, n_words)
    return emit.load_stream(address, offset, n_words)


def load_half(emit: Emitter, address: Value) -> Value:
    return emit.load_shared_half(address) if emit.is_shared(address) else emit.load_half(address, 0)


def load_byte(emit: Emitter, address: Value) -> Value:
    return emit.load_shared_byte(address) if emit.is_shared(address) else emit.load_byte(address, 0)


def small_to_float(emit: Emitter, word: Value) -> Value:
    """A word below 2**23 as float32: put under the bits of 2**23, which is then taken off."""
    return emit.float_subtract(emit.as_float(emit.bit_or(word, emit.word(0x4B000000))), emit.float(8388608.0))
