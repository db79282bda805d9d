"""Explicit SIMD for Numba kernels: vectors of 16 lanes as ordinary local variables.

No kernel lives here; the exponential and its kin are in ``vector_math``. Each function is an ``@intrinsic`` that
emits one or a few generic LLVM vector instructions, so the same kernel source runs on AVX-512, AVX2 and NEON; LLVM
splits vectors that are wider than the machine's registers.

Types      f32x16, i32x16, u8x16. A value lives in registers; it cannot be stored in a list or returned to
           Python. Keep vectors inside one ``njit`` function and the ``njit`` functions it calls: they cannot
           be arguments of a task (``tasks.run_tasks``), nor of a kernel called from Python.
Memory     ``load_*`` and ``store_*`` take a C-contiguous array of any item type and an index that counts items
           of that array from its first byte: a uint8 array is addressed in bytes, a float32 array in
           elements. No alignment is needed and nothing is bounds-checked.
Operators  ``+ - *`` on equal vector types. They are never contracted; ask for ``fma`` where it is meant.
Half       Numba refuses float16 arrays on the CPU; view them as uint16 or uint8.

    acc = zero_f32x16()
    for idx in range(0, n, 16):
        acc = fma(load_f32x16(a, idx), load_f32x16(b, idx), acc)
    total = sum_lanes(acc)
"""

# mypy: ignore-errors
# Code generators and jitted bodies work on values that Python's type system cannot describe.

from __future__ import annotations

import operator

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin

from kvs_core.cpu.vector_types import (
    F32,
    I8,
    I16,
    I32,
    N_LANES,
    VECTOR_F32,
    VECTOR_I8,
    VECTOR_I16,
    VECTOR_I32,
    bfloat_to_float,
    call_llvm,
    constant,
    f32x16,
    float_to_bfloat,
    float_to_half,
    half_to_float,
    i32x16,
    item_pointer,
    make_load,
    make_map,
    make_store,
    shuffle,
    splat,
    u8x16,
)


def _make_reduce(combine):
    """Typing and code of a reduction over lanes in one fixed tree: (i, i+8), (i, i+4), (i, i+2), (i, i+1)."""

    def emit(context, builder, vector):
        width = vector.type.count
        while width > 1:
            width //= 2
            low = shuffle(builder, vector, range(width))
            high = shuffle(builder, vector, range(width, 2 * width))
            vector = combine(builder, low, high)
        return builder.extract_element(vector, ir.Constant(I32, 0))

    return make_map(f32x16, types.float32, emit)


def larger(builder, a, b):
    """Code of the larger of two values or lanes; ``b`` where they cannot be compared."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def smaller(builder, a, b):
    """Code of the smaller of two values or lanes; ``b`` where they cannot be compared."""
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


def _keep(context, builder, value):
    return value


def _unsigned_to_float(context, builder, value):
    # Through signed 32-bit integers: every machine converts those in one instruction.
    return builder.sitofp(builder.zext(value, VECTOR_I32), VECTOR_F32)


def _signed_to_float(context, builder, value):
    return builder.sitofp(builder.sext(value, VECTOR_I32), VECTOR_F32)


def _find_byte_shuffle():
    """LLVM's name of the instruction that picks 16 bytes out of 16, or None."""
    features = llvm.get_host_cpu_features()
    if features.get("ssse3", False):
        return "llvm.x86.ssse3.pshuf.b.128"
    return "llvm.aarch64.neon.tbl1.v16i8" if features.get("neon", False) else None


_BYTE_SHUFFLE = _find_byte_shuffle()

HAS_LOOK_UP = bool(llvm.get_host_cpu_features().get("avx512f", False))
"""Whether one instruction picks from a table of 16 floats; LLVM has no general form of it."""

# ---------------------------------------------------------------------------------------------------------
# Memory

load_f32x16 = intrinsic(make_load(VECTOR_F32, _keep, f32x16))
load_u8x16 = intrinsic(make_load(VECTOR_I8, _keep, u8x16))
load_u8x16_as_i32 = intrinsic(
    make_load(VECTOR_I8, lambda context, builder, value: builder.zext(value, VECTOR_I32), i32x16)
)

# Loads that widen to f32x16: IEEE half, bfloat16, signed bytes.
load_f16x16 = intrinsic(make_load(VECTOR_I16, half_to_float, f32x16))
load_bf16x16 = intrinsic(make_load(VECTOR_I16, bfloat_to_float, f32x16))
load_i8x16_as_f32 = intrinsic(make_load(VECTOR_I8, _signed_to_float, f32x16))

# Scalar loads from any array, typically one item inside packed bytes.
load_f32 = intrinsic(make_load(F32, _keep, types.float32))
load_f16 = intrinsic(make_load(I16, half_to_float, types.float32))
load_bf16 = intrinsic(make_load(I16, bfloat_to_float, types.float32))
load_u8 = intrinsic(make_load(I8, _keep, types.uint8))
load_i8 = intrinsic(make_load(I8, _keep, types.int8))
load_u32 = intrinsic(make_load(I32, _keep, types.uint32))

# One half in every lane. Converting the splat, not the scalar, avoids an instruction (vpinsrw) that waits for the
# register's previous value: loops with one scale per block ran twice as long.
load_f16_splat = intrinsic(
    make_load(
        I16, lambda context, builder, bits: half_to_float(context, builder, splat(builder, bits, VECTOR_I16)), f32x16
    )
)

store_f32x16 = intrinsic(make_store(f32x16, _keep))
# The narrowing stores round to nearest even; a value beyond the range of half becomes infinity.
store_f16x16 = intrinsic(make_store(f32x16, float_to_half))
store_bf16x16 = intrinsic(make_store(f32x16, float_to_bfloat))
# Writes the low byte of each lane: the value must be in -128..255 already.
store_i8x16 = intrinsic(make_store(i32x16, lambda context, builder, value: builder.trunc(value, VECTOR_I8)))

store_f32 = intrinsic(make_store(types.float32, _keep))
store_f16 = intrinsic(make_store(types.float32, float_to_half))


@intrinsic
def prefetch(typingctx, array, index):
    """Ask for the cache line that holds an item, to be read soon; harmless past the end of the array."""
    if not (isinstance(array, types.Array) and array.layout == "C" and isinstance(index, types.Integer)):
        return None

    def codegen(context, builder, sig, args):
        index_value = context.cast(builder, args[1], sig.args[1], types.intp)
        pointer = item_pointer(context, builder, sig.args[0], args[0], index_value, I8)
        to_read, keep_in_all_caches, is_data = I32(0), I32(3), I32(1)
        function_type = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        builder.call(function, [pointer, to_read, keep_in_all_caches, is_data])
        return context.get_dummy_value()

    return types.void(array, index), codegen


# ---------------------------------------------------------------------------------------------------------
# Making and combining vectors


@intrinsic
def zero_f32x16(typingctx):
    """All lanes 0."""

    def codegen(context, builder, sig, args):
        return constant(VECTOR_F32, 0.0)

    return f32x16(), codegen


@intrinsic
def splat_f32x16(typingctx, value):
    """All lanes equal to ``value``, converted to float32."""
    if not isinstance(value, types.Number):
        return None

    def codegen(context, builder, sig, args):
        return splat(builder, context.cast(builder, args[0], sig.args[0], types.float32), VECTOR_F32)

    return f32x16(value), codegen


@intrinsic
def splat_i32x16(typingctx, value):
    """All lanes equal to ``value``, converted to int32."""
    if not isinstance(value, types.Integer):
        return None

    def codegen(context, builder, sig, args):
        return splat(builder, context.cast(builder, args[0], sig.args[0], types.int32), VECTOR_I32)

    return i32x16(value), codegen


@intrinsic
def lane_numbers_f32x16(typingctx):
    """0, 1, ... 15."""

    def codegen(context, builder, sig, args):
        return ir.Constant(VECTOR_F32, [float(lane) for lane in range(N_LANES)])

    return f32x16(), codegen


def make_level_look_up(levels):
    """A function that turns lanes 0..15 of a u8x16 into the float of that place in ``levels``, 16 signed bytes.

    One byte shuffle on x86 and ARM, selects elsewhere.
    """

    @intrinsic
    def look_up_level(typingctx, index):
        if index != u8x16:
            return None

        def codegen(context, builder, sig, args):
            table = ir.Constant(VECTOR_I8, [level & 0xFF for level in levels])
            if _BYTE_SHUFFLE:
                picked = call_llvm(builder, _BYTE_SHUFFLE, VECTOR_I8, [table, args[0]])
            else:
                picked = select_bytes(builder, levels, args[0])
            return _signed_to_float(context, builder, picked)

        return f32x16(index), codegen

    return look_up_level


def select_bytes(builder, items, index):
    """One of 16 constants for each byte of ``index`` below 16, by a tree of selects over its bits."""
    candidates = [constant(VECTOR_I8, item & 0xFF) for item in items]
    for bit in range(4):
        is_set = builder.icmp_unsigned("!=", builder.and_(index, constant(VECTOR_I8, 1 << bit)), constant(VECTOR_I8, 0))
        pairs = zip(candidates[::2], candidates[1::2], strict=True)
        candidates = [builder.select(is_set, high, low) for low, high in pairs]
    return candidates[0]


@intrinsic
def look_up(typingctx, table, index):
    """Lane i is the lane of ``table`` that the low 4 bits of lane i of ``index`` name; only if HAS_LOOK_UP."""
    if not (table == f32x16 and index == i32x16):
        return None

    def codegen(context, builder, sig, args):
        return call_llvm(builder, "llvm.x86.avx512.permvar.sf.512", VECTOR_F32, args)

    return f32x16(table, index), codegen


@intrinsic
def fma(typingctx, a, b, c):
    """``a * b + c`` per lane, rounded once; scalars of float32 work too."""
    if not (a == b == c and a in (f32x16, types.float32)):
        return None
    name = "llvm.fma.v16f32" if a == f32x16 else "llvm.fma.f32"

    def codegen(context, builder, sig, args):
        return call_llvm(builder, name, args[0].type, args)

    return a(a, b, c), codegen


@intrinsic
def maximum(typingctx, a, b):
    """Larger of each lane; where a lane of either is NaN the lane of ``b`` is taken."""
    if not (a == b == f32x16):
        return None

    def codegen(context, builder, sig, args):
        return larger(builder, *args)

    return a(a, b), codegen


@intrinsic
def minimum(typingctx, a, b):
    """Smaller of each lane; where a lane of either is NaN the lane of ``b`` is taken."""
    if not (a == b == f32x16):
        return None

    def codegen(context, builder, sig, args):
        return smaller(builder, *args)

    return a(a, b), codegen


def _make_keep_lanes(condition):
    """Typing and code of a function that keeps the lanes whose number is ``condition`` an integer, and fills others."""

    def keep_lanes(typingctx, vector, lane, fill):
        if not (vector == f32x16 and isinstance(lane, types.Integer) and fill == types.float32):
            return None

        def codegen(context, builder, sig, args):
            limit = splat(builder, context.cast(builder, args[1], sig.args[1], types.int32), VECTOR_I32)
            lane_ids = ir.Constant(VECTOR_I32, list(range(N_LANES)))
            is_kept = builder.icmp_signed(condition, lane_ids, limit)
            return builder.select(is_kept, args[0], splat(builder, args[2], VECTOR_F32))

        return f32x16(vector, lane, fill), codegen

    return keep_lanes


# Lanes below, or from, a lane of ``vector``; every other lane is set to ``fill``. For the ends of a range.
keep_lanes_below = intrinsic(_make_keep_lanes("<"))
keep_lanes_from = intrinsic(_make_keep_lanes(">="))


absolute = intrinsic(
    make_map(
        f32x16, f32x16, lambda context, builder, value: call_llvm(builder, "llvm.fabs.v16f32", value.type, [value])
    )
)

# Reductions over the lanes of one vector, always in the same order. A NaN survives the sum, not the maximum.
sum_lanes = intrinsic(_make_reduce(lambda builder, a, b: builder.fadd(a, b)))
max_lanes = intrinsic(_make_reduce(larger))


def _make_shuffle(lanes):
    """Typing and code of a function that picks 16 of the 32 lanes of two vectors."""

    def pick(typingctx, a, b):
        if not (a == b == f32x16):
            return None

        def codegen(context, builder, sig, args):
            return builder.shuffle_vector(args[0], args[1], ir.Constant(VECTOR_I32, list(lanes)))

        return f32x16(a, b), codegen

    return pick


# Pairs that lie side by side in memory: 32 elements taken apart into two vectors, and put together again.
even_lanes = intrinsic(_make_shuffle(range(0, 32, 2)))
odd_lanes = intrinsic(_make_shuffle(range(1, 32, 2)))
interleave_low = intrinsic(_make_shuffle([lane // 2 + N_LANES * (lane % 2) for lane in range(16)]))
interleave_high = intrinsic(_make_shuffle([lane // 2 + N_LANES * (lane % 2) for lane in range(16, 32)]))

first_lane = intrinsic(
    make_map(f32x16, types.float32, lambda context, builder, value: builder.extract_element(value, I32(0)))
)

# ---------------------------------------------------------------------------------------------------------
# Integers and conversions

low_nibbles = intrinsic(
    make_map(u8x16, u8x16, lambda context, builder, value: builder.and_(value, constant(VECTOR_I8, 15)))
)
high_nibbles = intrinsic(
    make_map(u8x16, u8x16, lambda context, builder, value: builder.lshr(value, constant(VECTOR_I8, 4)))
)

u8_to_f32 = intrinsic(make_map(u8x16, f32x16, _unsigned_to_float))
i32_to_f32 = intrinsic(make_map(i32x16, f32x16, lambda context, builder, value: builder.sitofp(value, VECTOR_F32)))
# Cuts towards zero; a lane that does not fit int32 gives an unspecified integer.
f32_to_i32 = intrinsic(make_map(f32x16, i32x16, lambda context, builder, value: builder.fptosi(value, VECTOR_I32)))


bits_as_f32x16 = intrinsic(make_map(i32x16, f32x16, lambda context, builder, value: builder.bitcast(value, VECTOR_F32)))


@intrinsic
def shift_right(typingctx, vector, n_bits):
    """Lanes of a u8x16 or i32x16 shifted right, zeros coming in; ``n_bits`` is below the lane's width."""
    if not (vector in (u8x16, i32x16) and isinstance(n_bits, types.Integer)):
        return None

    def codegen(context, builder, sig, args):
        count = context.cast(builder, args[1], sig.args[1], sig.args[0].element)
        return builder.lshr(args[0], splat(builder, count, args[0].type))

    return vector(vector, n_bits), codegen


@intrinsic
def bit_and(typingctx, vector, mask):
    """Lanes of a u8x16 or i32x16 combined with one scalar mask."""
    if not (vector in (u8x16, i32x16) and isinstance(mask, types.Integer)):
        return None

    def codegen(context, builder, sig, args):
        bits = context.cast(builder, args[1], sig.args[1], sig.args[0].element)
        return builder.and_(args[0], splat(builder, bits, args[0].type))

    return vector(vector, mask), codegen


@intrinsic
def shift_left(typingctx, vector, n_bits):
    """Lanes of an i32x16 shifted left, zeros coming in; ``n_bits`` is below 32."""
    if not (vector == i32x16 and isinstance(n_bits, types.Integer)):
        return None

    def codegen(context, builder, sig, args):
        count = context.cast(builder, args[1], sig.args[1], types.int32)
        return builder.shl(args[0], splat(builder, count, VECTOR_I32))

    return vector(vector, n_bits), codegen


@intrinsic
def add_where_bit(typingctx, vector, bits, amount):
    """Lanes i of an i32x16 plus ``amount`` where bit i of the integer ``bits`` is 1; bits above 15 are ignored."""
    if not (vector == i32x16 and isinstance(bits, types.Integer) and isinstance(amount, types.Integer)):
        return None

    def codegen(context, builder, sig, args):
        word = context.cast(builder, args[1], sig.args[1], types.int32)
        addend = splat(builder, context.cast(builder, args[2], sig.args[2], types.int32), VECTOR_I32)
        lane_bits = ir.Constant(VECTOR_I32, [1 << lane for lane in range(N_LANES)])
        zero = constant(VECTOR_I32, 0)
        is_set = builder.icmp_unsigned("!=", builder.and_(splat(builder, word, VECTOR_I32), lane_bits), zero)
        return builder.select(is_set, builder.add(args[0], addend), args[0])

    return vector(vector, bits, amount), codegen


# ---------------------------------------------------------------------------------------------------------
# Operators


def _register_operator(function, vector, emit):
    @infer_global(function)
    class _VectorOperator(AbstractTemplate):
        def generic(self, args, kws):
            if len(args) == 2 and not kws and args[0] == args[1] == vector:
                return signature(vector, vector, vector)
            return None

    @lower_builtin(function, vector, vector)
    def _lower(context, builder, sig, args):
        return emit(builder, *args)


_register_operator(operator.add, f32x16, lambda builder, a, b: builder.fadd(a, b))
_register_operator(operator.sub, f32x16, lambda builder, a, b: builder.fsub(a, b))
_register_operator(operator.mul, f32x16, lambda builder, a, b: builder.fmul(a, b))
_register_operator(operator.truediv, f32x16, lambda builder, a, b: builder.fdiv(a, b))
for _integers in (i32x16, u8x16):
    _register_operator(operator.add, _integers, lambda builder, a, b: builder.add(a, b))
    _register_operator(operator.sub, _integers, lambda builder, a, b: builder.sub(a, b))
    _register_operator(operator.or_, _integers, lambda builder, a, b: builder.or_(a, b))
