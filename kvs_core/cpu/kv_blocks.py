"""KV types of four and five bits: blocks of 32 elements, one loader and one storer per type.

Values are those of ``gguf.quants`` and of GGML's reference quantisers, bit for bit, also the rounded product before an
offset is added. Dispatch by type is in ``kv_rows``; the planes are described in ``kvs_core.kv_types``.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, call-arg, var-annotated, unreachable"
# Compiled bodies work on values that Python's type system cannot describe.

from __future__ import annotations

from itertools import pairwise

import numpy as np

from kvs_core.cpu.attention_tiles import inlined, inner
from kvs_core.cpu.packed_bits import (
    add_lanes_in_order,
    load_bits1x16,
    make_count_reached,
    make_levels,
    pick_level,
    store_bits1x16,
)
from kvs_core.cpu.simd import (
    bit_and,
    f32_to_i32,
    high_nibbles,
    i32_to_f32,
    load_f16_splat,
    load_f32,
    load_f32x16,
    load_u8x16,
    load_u8x16_as_i32,
    low_nibbles,
    max_lanes,
    maximum,
    minimum,
    shift_left,
    shift_right,
    splat_f32x16,
    splat_i32x16,
    store_f16,
    store_f32x16,
    store_i8x16,
    sum_lanes,
    u8_to_f32,
)

_BLOCK = 32
ZERO = np.float32(0.0)
# Far below half's range (such a scale is stored as 0), far above the floats whose reciprocal overflows.
SMALLEST_SCALE = np.float32(1e-30)

_IQ4_NL_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_IQ4_NL_LOWEST = np.float32(_IQ4_NL_LEVELS[0])
_IQ4_NL_SMALLEST = np.float32(1e-15)  # GGML's limit for a block of zeros
_iq4_nl_levels = make_levels(_IQ4_NL_LEVELS)
_nearest_iq4_nl = make_count_reached([(low + high) / 2 for low, high in pairwise(_IQ4_NL_LEVELS)])


# ---------------------------------------------------------------------------------------------------------
# Loaders: ``n_elements``, whole blocks, from their planes


@inner
def load_q4_0(arena, quants_at, scales_at, n_elements, floats, floats_at):
    eight = splat_f32x16(np.float32(8.0))
    for block in range(n_elements // _BLOCK):
        scale = load_f16_splat(arena, scales_at + 2 * block)
        quants = load_u8x16(arena, quants_at + 16 * block)
        at = floats_at + _BLOCK * block
        store_f32x16(floats, at, scale * (u8_to_f32(low_nibbles(quants)) - eight))
        store_f32x16(floats, at + 16, scale * (u8_to_f32(high_nibbles(quants)) - eight))


@inner
def load_q4_1(arena, quants_at, scales_at, n_elements, floats, floats_at):
    for block in range(n_elements // _BLOCK):
        scale = load_f16_splat(arena, scales_at + 4 * block)
        least = load_f16_splat(arena, scales_at + 4 * block + 2)
        quants = load_u8x16(arena, quants_at + 16 * block)
        at = floats_at + _BLOCK * block
        store_f32x16(floats, at, scale * u8_to_f32(low_nibbles(quants)) + least)
        store_f32x16(floats, at + 16, scale * u8_to_f32(high_nibbles(quants)) + least)


@inner
def _five_bits(arena, quants_at, high_at, block):
    """The quants of one block as two f32x16: a nibble and a bit of the plane of high bits each."""
    nibbles = load_u8x16_as_i32(arena, quants_at + 16 * block)
    first = bit_and(nibbles, 15) | shift_left(load_bits1x16(arena, high_at + 4 * block), 4)
    second = shift_right(nibbles, 4) | shift_left(load_bits1x16(arena, high_at + 4 * block + 2), 4)
    return i32_to_f32(first), i32_to_f32(second)


@inner
def load_q5_0(arena, quants_at, high_at, scales_at, n_elements, floats, floats_at):
    sixteen = splat_f32x16(np.float32(16.0))
    for block in range(n_elements // _BLOCK):
        scale = load_f16_splat(arena, scales_at + 2 * block)
        first, second = _five_bits(arena, quants_at, high_at, block)
        at = floats_at + _BLOCK * block
        store_f32x16(floats, at, scale * (first - sixteen))
        store_f32x16(floats, at + 16, scale * (second - sixteen))


@inner
def load_q5_1(arena, quants_at, high_at, scales_at, n_elements, floats, floats_at):
    for block in range(n_elements // _BLOCK):
        scale = load_f16_splat(arena, scales_at + 4 * block)
        least = load_f16_splat(arena, scales_at + 4 * block + 2)
        first, second = _five_bits(arena, quants_at, high_at, block)
        at = floats_at + _BLOCK * block
        store_f32x16(floats, at, scale * first + least)
        store_f32x16(floats, at + 16, scale * second + least)


@inner
def load_iq4_nl(arena, quants_at, scales_at, n_elements, floats, floats_at):
    for block in range(n_elements // _BLOCK):
        levels = _iq4_nl_levels() * load_f16_splat(arena, scales_at + 2 * block)
        nibbles = load_u8x16_as_i32(arena, quants_at + 16 * block)
        at = floats_at + _BLOCK * block
        store_f32x16(floats, at, pick_level(levels, bit_and(nibbles, 15)))
        store_f32x16(floats, at + 16, pick_level(levels, shift_right(nibbles, 4)))


# ---------------------------------------------------------------------------------------------------------
# Storers: one row of one head, whole blocks


@inlined
def is_finite(low, high):
    """Whether no lane of two f32x16 is NaN or infinite."""
    zero = splat_f32x16(ZERO)
    return sum_lanes(low * zero + high * zero) == ZERO


@inlined
def inverse_of(scale):
    return np.float32(1.0) / scale if abs(scale) > SMALLEST_SCALE else ZERO


@inner
def _furthest_from_zero(values, at):
    """The element of a block with the largest magnitude; the first among equals."""
    furthest = ZERO
    for idx in range(at, at + _BLOCK):
        value = load_f32(values, idx)
        if abs(value) > abs(furthest):
            furthest = value
    return furthest


@inlined
def _cut(vector, largest):
    """Whole part of lanes that are not negative, at most ``largest``."""
    return f32_to_i32(minimum(vector, splat_f32x16(largest)))


@inner
def _signed_quants(values, at, arena, scale_at, n_levels):
    """Quants of a type without minimum, two i32x16, and its scale to the arena: the block's furthest element gets the
    most negative level."""
    low, high = load_f32x16(values, at), load_f32x16(values, at + 16)
    scale = _furthest_from_zero(values, at) / np.float32(-n_levels // 2)
    if not is_finite(low, high):
        scale = np.float32(np.nan)
        low = high = splat_f32x16(ZERO)
    store_f16(arena, scale_at, scale)
    inverse = splat_f32x16(inverse_of(scale))
    middle = splat_f32x16(np.float32(n_levels // 2) + np.float32(0.5))
    largest = np.float32(n_levels - 1)
    return _cut(low * inverse + middle, largest), _cut(high * inverse + middle, largest)


@inner
def _raised_quants(values, at, arena, scale_at, n_levels):
    """Quants of a type with a minimum, two i32x16; its scale and minimum to the arena."""
    low, high = load_f32x16(values, at), load_f32x16(values, at + 16)
    zero = splat_f32x16(ZERO)
    least = ZERO - max_lanes(maximum(zero - low, zero - high))
    scale = (max_lanes(maximum(low, high)) - least) / np.float32(n_levels - 1)
    if not is_finite(low, high):
        scale = least = np.float32(np.nan)
        low = high = zero
    store_f16(arena, scale_at, scale)
    store_f16(arena, scale_at + 2, least)
    if not scale > SMALLEST_SCALE:
        least = ZERO
        low = high = zero
    inverse, begin = splat_f32x16(inverse_of(scale)), splat_f32x16(least)
    half = splat_f32x16(np.float32(0.5))
    largest = np.float32(n_levels - 1)
    return _cut((low - begin) * inverse + half, largest), _cut((high - begin) * inverse + half, largest)


@inlined
def _store_nibbles(arena, at, first, second):
    """The low four bits of both quants of each byte."""
    store_i8x16(arena, at, bit_and(first, 15) | shift_left(bit_and(second, 15), 4))


@inlined
def _store_high_bits(arena, at, first, second):
    store_bits1x16(arena, at, shift_right(first, 4))
    store_bits1x16(arena, at + 2, shift_right(second, 4))


@inner
def store_q4_0(values, values_at, head_dim, arena, quants_at, scales_at):
    for block in range(head_dim // _BLOCK):
        first, second = _signed_quants(values, values_at + _BLOCK * block, arena, scales_at + 2 * block, 16)
        _store_nibbles(arena, quants_at + 16 * block, first, second)


@inner
def store_q4_1(values, values_at, head_dim, arena, quants_at, scales_at):
    for block in range(head_dim // _BLOCK):
        first, second = _raised_quants(values, values_at + _BLOCK * block, arena, scales_at + 4 * block, 16)
        _store_nibbles(arena, quants_at + 16 * block, first, second)


@inner
def store_q5_0(values, values_at, head_dim, arena, quants_at, high_at, scales_at):
    for block in range(head_dim // _BLOCK):
        first, second = _signed_quants(values, values_at + _BLOCK * block, arena, scales_at + 2 * block, 32)
        _store_nibbles(arena, quants_at + 16 * block, first, second)
        _store_high_bits(arena, high_at + 4 * block, first, second)


@inner
def store_q5_1(values, values_at, head_dim, arena, quants_at, high_at, scales_at):
    for block in range(head_dim // _BLOCK):
        first, second = _raised_quants(values, values_at + _BLOCK * block, arena, scales_at + 4 * block, 32)
        _store_nibbles(arena, quants_at + 16 * block, first, second)
        _store_high_bits(arena, high_at + 4 * block, first, second)


@inner
def store_iq4_nl(values, values_at, head_dim, arena, quants_at, scales_at):
    """Levels are the nearest to ``x * -127 / furthest``; the scale is then the best one for them, weighted by x^2."""
    for block in range(head_dim // _BLOCK):
        at = values_at + _BLOCK * block
        low, high = load_f32x16(values, at), load_f32x16(values, at + 16)
        furthest = _furthest_from_zero(values, at)
        scale = ZERO
        first = second = splat_i32x16(0)
        if not is_finite(low, high):
            scale = np.float32(np.nan)
        elif abs(furthest) >= _IQ4_NL_SMALLEST:
            inverse = splat_f32x16(np.float32(1.0) / (furthest / _IQ4_NL_LOWEST))
            first, second = _nearest_iq4_nl(low * inverse), _nearest_iq4_nl(high * inverse)
            first_level, second_level = pick_level(_iq4_nl_levels(), first), pick_level(_iq4_nl_levels(), second)
            first_weighted, second_weighted = low * low * first_level, high * high * second_level
            along = add_lanes_in_order(add_lanes_in_order(ZERO, first_weighted * low), second_weighted * high)
            square = add_lanes_in_order(
                add_lanes_in_order(ZERO, first_weighted * first_level), second_weighted * second_level
            )
            scale = along / square if square > ZERO else ZERO
        store_f16(arena, scales_at + 2 * block, scale)
        _store_nibbles(arena, quants_at + 16 * block, first, second)
