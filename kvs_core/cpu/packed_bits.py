"""Packed small integers and tables of levels for Numba kernels: what the low-bit KV types need beside ``simd``.

Fields lie in ascending bits of a little-endian number: element i of ``n_bits``-bit fields is at bits
``i * n_bits ..`` from the given byte on.
"""

# mypy: ignore-errors
# Code generators work on values that Python's type system cannot describe.

from __future__ import annotations

from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from kvs_core.cpu.vector_types import (
    F32,
    I32,
    N_LANES,
    VECTOR_F32,
    VECTOR_I32,
    call_llvm,
    constant,
    f32x16,
    i32x16,
    make_load,
    make_store,
    shuffle,
    splat,
)

_HALF = N_LANES // 2
_FEATURES = binding.get_host_cpu_features()


def _shifts(n_bits):
    """By how much each lane's field is shifted within its 32-bit word."""
    return ir.Constant(VECTOR_I32, [lane * n_bits % 32 for lane in range(N_LANES)])


def _spread(n_bits):
    """Code that turns an integer of 16 fields into an i32x16."""
    width = N_LANES * n_bits

    def spread(context, builder, value):
        if width <= 32:
            words = splat(builder, builder.zext(value, I32) if width < 32 else value, VECTOR_I32)
        else:
            pair = builder.bitcast(value, ir.VectorType(I32, width // 32))
            words = shuffle(builder, pair, [lane * n_bits // 32 for lane in range(N_LANES)])
        return builder.and_(builder.lshr(words, _shifts(n_bits)), constant(VECTOR_I32, 2**n_bits - 1))

    return spread


def _gather(n_bits):
    """Code that turns an i32x16 of fields into one integer."""
    width = N_LANES * n_bits

    def gather(context, builder, value):
        shifted = builder.shl(value, _shifts(n_bits))
        per_word = 32 // n_bits
        step = 1
        while step < min(per_word, N_LANES):
            moved = shuffle(builder, shifted, [lane ^ step for lane in range(N_LANES)])
            shifted = builder.or_(shifted, moved)
            step *= 2
        if width <= 32:
            word = builder.extract_element(shifted, I32(0))
            return builder.trunc(word, ir.IntType(width)) if width < 32 else word
        words = shuffle(builder, shifted, range(0, N_LANES, per_word))
        return builder.bitcast(words, ir.IntType(width))

    return gather


# 16 fields of 1, 2 or 4 bits, that is 2, 4 or 8 bytes, as an i32x16; the stores need fields that fit.
load_bits1x16 = intrinsic(make_load(ir.IntType(16), _spread(1), i32x16))
load_bits2x16 = intrinsic(make_load(ir.IntType(32), _spread(2), i32x16))
load_bits4x16 = intrinsic(make_load(ir.IntType(64), _spread(4), i32x16))
store_bits1x16 = intrinsic(make_store(i32x16, _gather(1)))
store_bits2x16 = intrinsic(make_store(i32x16, _gather(2)))
store_bits4x16 = intrinsic(make_store(i32x16, _gather(4)))


# ---------------------------------------------------------------------------------------------------------
# Levels


def make_levels(values):
    """A function that gives up to 16 constants as an f32x16; fewer, a power of two of them, are repeated."""
    repeated = [float(values[lane % len(values)]) for lane in range(N_LANES)]

    @intrinsic
    def levels(typingctx):
        def codegen(context, builder, sig, args):
            return ir.Constant(VECTOR_F32, repeated)

        return f32x16(), codegen

    return levels


def _permute_halves(builder, table, index):
    """Picks from 8 of the table's items with AVX2, which knows no longer table; ``index`` uses 3 bits."""
    halves = [
        call_llvm(
            builder,
            "llvm.x86.avx2.permps",
            ir.VectorType(F32, _HALF),
            [table, shuffle(builder, index, range(begin, begin + _HALF))],
        )
        for begin in (0, _HALF)
    ]
    return builder.shuffle_vector(*halves, ir.Constant(VECTOR_I32, list(range(N_LANES))))


def _pick(builder, table, index):
    if _FEATURES.get("avx512f"):
        return call_llvm(builder, "llvm.x86.avx512.permvar.sf.512", VECTOR_F32, [table, index])
    if _FEATURES.get("avx2"):
        low = _permute_halves(builder, shuffle(builder, table, range(_HALF)), index)
        high = _permute_halves(builder, shuffle(builder, table, range(_HALF, N_LANES)), index)
        return builder.select(_bit_is_set(builder, index, 3), high, low)
    items = [splat(builder, builder.extract_element(table, I32(lane)), VECTOR_F32) for lane in range(N_LANES)]
    for bit in range(4):
        is_set = _bit_is_set(builder, index, bit)
        items = [builder.select(is_set, high, low) for low, high in zip(items[::2], items[1::2], strict=True)]
    return items[0]


def _bit_is_set(builder, vector, bit):
    return builder.icmp_unsigned("!=", builder.and_(vector, constant(VECTOR_I32, 1 << bit)), constant(VECTOR_I32, 0))


@intrinsic
def pick_level(typingctx, table, index):
    """Lane i is the lane of ``table`` that lane i of ``index``, in 0..15, names; on every processor."""
    if not (table == f32x16 and index == i32x16):
        return None

    def codegen(context, builder, sig, args):
        return _pick(builder, *args)

    return f32x16(table, index), codegen


def make_count_reached(thresholds):
    """A function of an f32x16 that counts, lane by lane, how many of the constants the lane is at or above."""
    limits = [float(threshold) for threshold in thresholds]

    @intrinsic
    def count_reached(typingctx, vector):
        if vector != f32x16:
            return None

        def codegen(context, builder, sig, args):
            count = constant(VECTOR_I32, 0)
            for limit in limits:
                is_reached = builder.fcmp_ordered(">=", args[0], constant(VECTOR_F32, limit))
                count = builder.add(count, builder.zext(is_reached, VECTOR_I32))
            return count

        return i32x16(vector), codegen

    return count_reached


@intrinsic
def add_lanes_in_order(typingctx, start, vector):
    """``((start + lane 0) + lane 1) + ...``: the sum as a loop over elements rounds it."""
    if not (start == types.float32 and vector == f32x16):
        return None

    def codegen(context, builder, sig, args):
        total = args[0]
        for lane in range(N_LANES):
            total = builder.fadd(total, builder.extract_element(args[1], I32(lane)))
        return total

    return types.float32(start, vector), codegen
