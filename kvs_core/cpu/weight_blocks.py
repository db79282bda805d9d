"""How each fast weight type unpacks: one function per type that gives 32 consecutive weights of a row.

No loops over rows and no arrays of results: ``weights`` and ``matmul`` build on ``load_weights_32``.

Values are those of the format's definition in float32, bit for bit those of ``gguf.quants.dequantize``: every
product of a scale and a quant fits 24 bits, so only the final addition rounds.
"""

# mypy: ignore-errors
# Bodies are compiled by Numba and work on vector values.

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import NativeValue, models, overload, register_model, typeof_impl, unbox

from kvs_core.cpu.low_bit_blocks import (
    load_iq4_nl,
    load_iq4_xs,
    load_mxfp4,
    load_q2_k,
    load_q3_k,
    some_bits,
)
from kvs_core.cpu.simd import (
    HAS_LOOK_UP,
    add_where_bit,
    bit_and,
    fma,
    high_nibbles,
    i32_to_f32,
    lane_numbers_f32x16,
    load_bf16x16,
    load_f16,
    load_f16_splat,
    load_f16x16,
    load_f32x16,
    load_i8,
    load_i8x16_as_f32,
    load_u8,
    load_u8x16,
    load_u8x16_as_i32,
    load_u32,
    look_up,
    low_nibbles,
    prefetch,
    shift_left,
    shift_right,
    splat_f32x16,
    splat_i32x16,
    u8_to_f32,
)
from kvs_core.units import ceil_div


class BlockKindType(types.Type):
    """Numba type of a BlockKind; each name is a type of its own, so kernels are compiled once per kind."""

    def __init__(self, name) -> None:
        self.kind_name = name
        super().__init__(name=f"BlockKind({name})")


register_model(BlockKindType)(models.OpaqueModel)


class BlockKind:
    """A weight type as a kernel argument: carries no data, only selects the code.

    name            spelling of the GGML type
    block_weights   weights that share a block; a row is whole blocks
    block_bytes     bytes of a block
    """

    def __init__(self, name: str, block_weights: int, block_bytes: int) -> None:
        self.name = name
        self.block_weights = block_weights
        self.block_bytes = block_bytes
        self._numba_type_ = BlockKindType(name)  # Numba's fast path for finding an argument's type

    def __repr__(self) -> str:
        return f"BlockKind({self.name})"


@typeof_impl.register(BlockKind)
def _typeof_block_kind(value, context):
    return value._numba_type_


@unbox(BlockKindType)
def _unbox_block_kind(numba_type, value, context):
    return NativeValue(context.context.get_dummy_value())


F32 = BlockKind("F32", 1, 4)
F16 = BlockKind("F16", 1, 2)
BF16 = BlockKind("BF16", 1, 2)
Q4_0 = BlockKind("Q4_0", 32, 18)
Q4_1 = BlockKind("Q4_1", 32, 20)
Q5_0 = BlockKind("Q5_0", 32, 22)
Q5_1 = BlockKind("Q5_1", 32, 24)
Q8_0 = BlockKind("Q8_0", 32, 34)
Q4_K = BlockKind("Q4_K", 256, 144)
Q5_K = BlockKind("Q5_K", 256, 176)
Q6_K = BlockKind("Q6_K", 256, 210)
Q2_K = BlockKind("Q2_K", 256, 84)
Q3_K = BlockKind("Q3_K", 256, 110)
IQ4_NL = BlockKind("IQ4_NL", 32, 18)
IQ4_XS = BlockKind("IQ4_XS", 256, 136)
MXFP4 = BlockKind("MXFP4", 32, 17)

_KINDS = (F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, Q2_K, Q3_K, IQ4_NL, IQ4_XS, MXFP4)
BLOCK_KINDS = {kind.name: kind for kind in _KINDS}


def load_weights_32(kind, data, row_begin, index):
    """Weights ``32 * index`` to ``32 * index + 31`` of a row, as two f32x16; inside kernels only.

    data        uint8 [n_out, row_bytes], C-contiguous
    row_begin   int64, bytes before the row
    index       int64
    """
    raise NotImplementedError("only callable from a kernel")


@overload(load_weights_32)
def _overload_load_weights_32(kind, data, row_begin, index):
    if HAS_LOOK_UP and kind.kind_name in LOOK_UP_LOADERS:
        return LOOK_UP_LOADERS[kind.kind_name]
    return LOADERS[kind.kind_name]


def prefetch_rows(kind, data, begin, index):
    """Ask for the part of four consecutive rows, the first at byte ``begin``, that equals step ``index`` of
    ``load_weights_32`` on each of them; inside kernels only. The four parts together are one run of bytes."""
    raise NotImplementedError("only callable from a kernel")


@overload(prefetch_rows)
def _overload_prefetch_rows(kind, data, begin, index):
    block_kind = BLOCK_KINDS[kind.kind_name]
    step_bytes = 4 * 32 * block_kind.block_bytes // block_kind.block_weights
    n_lines = ceil_div(step_bytes, 64)

    def prefetch_lines(kind, data, begin, index):
        for line in range(n_lines):
            prefetch(data, begin + step_bytes * index + 64 * line)

    return prefetch_lines


# ---------------------------------------------------------------------------------------------------------
# Plain floats


def _load_f32(kind, data, row_begin, index):
    begin = row_begin + 128 * index
    return load_f32x16(data, begin), load_f32x16(data, begin + 64)


def _load_f16(kind, data, row_begin, index):
    begin = row_begin + 64 * index
    return load_f16x16(data, begin), load_f16x16(data, begin + 32)


def _load_bf16(kind, data, row_begin, index):
    begin = row_begin + 64 * index
    return load_bf16x16(data, begin), load_bf16x16(data, begin + 32)


# ---------------------------------------------------------------------------------------------------------
# Blocks of 32: the low nibbles are the first 16 weights, the high nibbles the last 16


def _load_q4_0(kind, data, row_begin, index):
    block = row_begin + 18 * index
    d = load_f16_splat(data, block)
    quants = load_u8x16(data, block + 2)
    eight = splat_f32x16(np.float32(8.0))
    return (u8_to_f32(low_nibbles(quants)) - eight) * d, (u8_to_f32(high_nibbles(quants)) - eight) * d


def _load_q4_1(kind, data, row_begin, index):
    block = row_begin + 20 * index
    d = load_f16_splat(data, block)
    m = load_f16_splat(data, block + 2)
    quants = load_u8x16(data, block + 4)
    return fma(u8_to_f32(low_nibbles(quants)), d, m), fma(u8_to_f32(high_nibbles(quants)), d, m)


@njit(nogil=True)
def _five_bit_quants(data, high_bits_begin, quants_begin):
    """32 quants of 5 bits: nibbles plus 16 where a bit of a 32-bit word is set."""
    high_bits = load_u32(data, high_bits_begin)
    quants = load_u8x16_as_i32(data, quants_begin)
    first = add_where_bit(bit_and(quants, 15), high_bits, 16)
    second = add_where_bit(shift_right(quants, 4), high_bits >> np.uint32(16), 16)
    return i32_to_f32(first), i32_to_f32(second)


def _load_q5_0(kind, data, row_begin, index):
    block = row_begin + 22 * index
    d = load_f16_splat(data, block)
    first, second = _five_bit_quants(data, block + 2, block + 6)
    sixteen = splat_f32x16(np.float32(16.0))
    return (first - sixteen) * d, (second - sixteen) * d


def _load_q5_1(kind, data, row_begin, index):
    block = row_begin + 24 * index
    d = load_f16_splat(data, block)
    m = load_f16_splat(data, block + 2)
    first, second = _five_bit_quants(data, block + 4, block + 8)
    return fma(first, d, m), fma(second, d, m)


def _load_q8_0(kind, data, row_begin, index):
    block = row_begin + 34 * index
    d = load_f16_splat(data, block)
    return load_i8x16_as_f32(data, block + 2) * d, load_i8x16_as_f32(data, block + 18) * d


# ---------------------------------------------------------------------------------------------------------
# Blocks of 256, in eight parts of 32


@njit(nogil=True)
def _scale_and_minimum(data, block, part):
    """Scale and negated minimum of one part of a Q4_K or Q5_K block, each in all lanes.

    The block starts with d and dmin; then 12 bytes hold 8 scales and 8 minima of 6 bits:
    bytes 0-3    scale of parts 0-3 in the low 6 bits, top 2 bits of the scale of parts 4-7
    bytes 4-7    the same for the minima
    bytes 8-11   low 4 bits of the scale (low nibble) and minimum (high nibble) of parts 4-7
    """
    packed = block + 4 + (part & 3)
    scale = np.int32(load_u8(data, packed))
    minimum = np.int32(load_u8(data, packed + 4))
    mixed = np.int32(load_u8(data, packed + 8))
    if part < 4:
        scale &= np.int32(63)
        minimum &= np.int32(63)
    else:
        scale = (mixed & np.int32(15)) | ((scale >> np.int32(6)) << np.int32(4))
        minimum = (mixed >> np.int32(4)) | ((minimum >> np.int32(6)) << np.int32(4))
    d = load_f16(data, block) * np.float32(scale)
    m = load_f16(data, block + 2) * np.float32(minimum)
    return splat_f32x16(d), splat_f32x16(-m)


def _load_q4_k(kind, data, row_begin, index):
    block = row_begin + 144 * (index >> 3)
    part = index & 7
    d, m = _scale_and_minimum(data, block, part)
    quants = block + 16 + 32 * (part >> 1)
    shift = 4 * (part & 1)
    first = i32_to_f32(some_bits(data, quants, shift, 15))
    second = i32_to_f32(some_bits(data, quants + 16, shift, 15))
    return fma(first, d, m), fma(second, d, m)


def _load_q5_k(kind, data, row_begin, index):
    block = row_begin + 176 * (index >> 3)
    part = index & 7
    d, m = _scale_and_minimum(data, block, part)
    quants = block + 48 + 32 * (part >> 1)
    shift = 4 * (part & 1)
    first_high = shift_left(some_bits(data, block + 16, part, 1), 4)
    second_high = shift_left(some_bits(data, block + 32, part, 1), 4)
    first = i32_to_f32(some_bits(data, quants, shift, 15) | first_high)
    second = i32_to_f32(some_bits(data, quants + 16, shift, 15) | second_high)
    return fma(first, d, m), fma(second, d, m)


def _load_q6_k(kind, data, row_begin, index):
    block = row_begin + 210 * (index >> 3)
    part = index & 7
    half = part >> 2
    quarter = part & 3
    d = load_f16(data, block + 208)
    scales = block + 192 + 2 * part
    first_d = splat_f32x16(d * np.float32(load_i8(data, scales)))
    second_d = splat_f32x16(d * np.float32(load_i8(data, scales + 1)))
    low = block + 64 * half + 32 * (quarter & 1)
    high = block + 128 + 32 * half
    low_shift = 4 * (quarter >> 1)
    high_shift = 2 * quarter
    first_high = shift_left(some_bits(data, high, high_shift, 3), 4)
    second_high = shift_left(some_bits(data, high + 16, high_shift, 3), 4)
    middle = splat_i32x16(32)
    first = i32_to_f32((some_bits(data, low, low_shift, 15) | first_high) - middle)
    second = i32_to_f32((some_bits(data, low + 16, low_shift, 15) | second_high) - middle)
    return first * first_d, second * second_d


# ---------------------------------------------------------------------------------------------------------
# Types of 16 levels where the processor has a table look-up: all levels of a block are made once, then picked.
# The same values, in 11 instead of 14 vector instructions per 32 weights of Q4_1.


def _look_up_q4_0(kind, data, row_begin, index):
    block = row_begin + 18 * index
    levels = (lane_numbers_f32x16() - splat_f32x16(np.float32(8.0))) * load_f16_splat(data, block)
    quants = load_u8x16_as_i32(data, block + 2)
    return look_up(levels, quants), look_up(levels, shift_right(quants, 4))


def _look_up_q4_1(kind, data, row_begin, index):
    block = row_begin + 20 * index
    levels = fma(lane_numbers_f32x16(), load_f16_splat(data, block), load_f16_splat(data, block + 2))
    quants = load_u8x16_as_i32(data, block + 4)
    return look_up(levels, quants), look_up(levels, shift_right(quants, 4))


def _look_up_q4_k(kind, data, row_begin, index):
    block = row_begin + 144 * (index >> 3)
    part = index & 7
    d, m = _scale_and_minimum(data, block, part)
    levels = fma(lane_numbers_f32x16(), d, m)
    quants = block + 16 + 32 * (part >> 1)
    shift = 4 * (part & 1)
    first = shift_right(load_u8x16_as_i32(data, quants), shift)
    second = shift_right(load_u8x16_as_i32(data, quants + 16), shift)
    return look_up(levels, first), look_up(levels, second)


LOADERS = {
    "F32": _load_f32,
    "F16": _load_f16,
    "BF16": _load_bf16,
    "Q4_0": _load_q4_0,
    "Q4_1": _load_q4_1,
    "Q5_0": _load_q5_0,
    "Q5_1": _load_q5_1,
    "Q8_0": _load_q8_0,
    "Q4_K": _load_q4_k,
    "Q5_K": _load_q5_k,
    "Q6_K": _load_q6_k,
    "Q2_K": load_q2_k,
    "Q3_K": load_q3_k,
    "IQ4_NL": load_iq4_nl,
    "IQ4_XS": load_iq4_xs,
    "MXFP4": load_mxfp4,
}
LOOK_UP_LOADERS = {"Q4_0": _look_up_q4_0, "Q4_1": _look_up_q4_1, "Q4_K": _look_up_q4_k}
