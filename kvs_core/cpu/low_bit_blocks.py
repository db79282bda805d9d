"""Unpacking of weight types of two and three bits, and of four bits with a table of levels; 32 weights at a time.

The other types, and the rules that all of them keep, are in ``weight_blocks``.
"""

# mypy: ignore-errors
# Bodies are compiled by Numba and work on vector values.

from __future__ import annotations

import numpy as np
from numba import njit

from kvs_core.cpu.simd import (
    bit_and,
    bits_as_f32x16,
    fma,
    high_nibbles,
    i32_to_f32,
    load_f16,
    load_f16_splat,
    load_u8,
    load_u8x16,
    load_u8x16_as_i32,
    load_u32,
    low_nibbles,
    make_level_look_up,
    shift_left,
    shift_right,
    splat_f32x16,
    splat_i32x16,
)

# What a quant of IQ4_NL and IQ4_XS stands for, before its scale.
_iq4_level = make_level_look_up((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
# Twice the numbers of E2M1: sign, two bits of exponent, one of mantissa.
_e2m1_level = make_level_look_up((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))


@njit(nogil=True)
def some_bits(data, begin, shift, mask):
    """Some bits of each of 16 bytes, as an i32x16."""
    return bit_and(shift_right(load_u8x16_as_i32(data, begin), shift), mask)


def load_q2_k(kind, data, row_begin, index):
    """A block is 16 bytes of scale (low nibble) and minimum (high nibble) for 16 weights each, 64 of quants, d, dmin.

    Each 32 bytes of quants hold four parts of 32 weights, one in every two bits.
    """
    block = row_begin + 84 * (index >> 3)
    part = index & 7
    d = load_f16(data, block + 80)
    d_min = load_f16(data, block + 82)
    first_scale = np.int32(load_u8(data, block + 2 * part))
    second_scale = np.int32(load_u8(data, block + 2 * part + 1))
    quants = block + 16 + 32 * (part >> 2)
    shift = 2 * (part & 3)
    first = fma(
        i32_to_f32(some_bits(data, quants, shift, 3)),
        splat_f32x16(d * np.float32(first_scale & np.int32(15))),
        splat_f32x16(-d_min * np.float32(first_scale >> np.int32(4))),
    )
    second = fma(
        i32_to_f32(some_bits(data, quants + 16, shift, 3)),
        splat_f32x16(d * np.float32(second_scale & np.int32(15))),
        splat_f32x16(-d_min * np.float32(second_scale >> np.int32(4))),
    )
    return first, second


@njit(nogil=True)
def _q3_k_scale(data, block, index):
    """Scale ``index`` of 16 as a signed integer: four low bits in bytes 96-103, two high bits in bytes 104-107."""
    low = np.int32(load_u8(data, block + 96 + (index & 7))) >> np.int32(4 * (index >> 3))
    high = np.int32(load_u8(data, block + 104 + (index & 3))) >> np.int32(2 * (index >> 2))
    return ((low & np.int32(15)) | ((high & np.int32(3)) << np.int32(4))) - np.int32(32)


def load_q3_k(kind, data, row_begin, index):
    """A block is 32 bytes with the third bit of eight parts of 32 weights, 64 with the other two as in Q2_K, 12 of
    scales for 16 weights each, d."""
    block = row_begin + 110 * (index >> 3)
    part = index & 7
    d = load_f16(data, block + 108)
    quants = block + 32 + 32 * (part >> 2)
    shift = 2 * (part & 3)
    four = splat_i32x16(4)
    first_high = shift_left(some_bits(data, block, part, 1), 2)
    second_high = shift_left(some_bits(data, block + 16, part, 1), 2)
    first = i32_to_f32((some_bits(data, quants, shift, 3) | first_high) - four)
    second = i32_to_f32((some_bits(data, quants + 16, shift, 3) | second_high) - four)
    first_d = splat_f32x16(d * np.float32(_q3_k_scale(data, block, 2 * part)))
    second_d = splat_f32x16(d * np.float32(_q3_k_scale(data, block, 2 * part + 1)))
    return first * first_d, second * second_d


@njit(nogil=True)
def _iq4_xs_scale(data, block, part):
    """d times the scale of one part: six bits, the low four in bytes 4-7, the high two in bytes 2-3."""
    low = np.int32(load_u8(data, block + 4 + (part >> 1))) >> np.int32(4 * (part & 1))
    high = np.int32(load_u32(data, block + 2) >> np.uint32(2 * part))
    scale = ((low & np.int32(15)) | ((high & np.int32(3)) << np.int32(4))) - np.int32(32)
    return splat_f32x16(load_f16(data, block) * np.float32(scale))


@njit(nogil=True)
def _mxfp4_scale(data, block):
    """Half of the power of two that the byte names, as the levels are doubled; subnormal for 0 and 1."""
    exponent = np.int32(load_u8(data, block))
    bits = (exponent - np.int32(1)) << np.int32(23)
    if exponent < 2:
        bits = np.int32(0x00200000) << exponent
    return bits_as_f32x16(splat_i32x16(bits))


def load_iq4_nl(kind, data, row_begin, index):
    block = row_begin + 18 * index
    d = load_f16_splat(data, block)
    quants = load_u8x16(data, block + 2)
    return _iq4_level(low_nibbles(quants)) * d, _iq4_level(high_nibbles(quants)) * d


def load_iq4_xs(kind, data, row_begin, index):
    block = row_begin + 136 * (index >> 3)
    part = index & 7
    d = _iq4_xs_scale(data, block, part)
    quants = load_u8x16(data, block + 8 + 16 * part)
    return _iq4_level(low_nibbles(quants)) * d, _iq4_level(high_nibbles(quants)) * d


def load_mxfp4(kind, data, row_begin, index):
    block = row_begin + 17 * index
    d = _mxfp4_scale(data, block)
    quants = load_u8x16(data, block + 1)
    return _e2m1_level(low_nibbles(quants)) * d, _e2m1_level(high_nibbles(quants)) * d
