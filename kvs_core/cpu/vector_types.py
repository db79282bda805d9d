"""Vector types for Numba kernels and the LLVM helpers their instructions are made of.

Kernels import ``simd``; this module is for code that generates instructions (``simd``, ``matmul_tile``).
"""

# mypy: ignore-errors
# Code generators work on values that Python's type system cannot describe.

from __future__ import annotations

import platform

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import models, register_model

N_LANES = 16
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64", "i686")

I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
F32 = ir.FloatType()
F16 = ir.HalfType()


class VectorType(types.Type):
    """Numba type of ``lanes`` elements held in vector registers; ``element`` is a Numba scalar type."""

    def __init__(self, element, lanes, name) -> None:
        self.element = element
        self.lanes = lanes
        super().__init__(name=name)


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type) -> None:
        element = dmm.lookup(fe_type.element).get_value_type()
        super().__init__(dmm, fe_type, ir.VectorType(element, fe_type.lanes))


f32x16 = VectorType(types.float32, N_LANES, "f32x16")
i32x16 = VectorType(types.int32, N_LANES, "i32x16")
u8x16 = VectorType(types.uint8, N_LANES, "u8x16")

VECTOR_F32 = ir.VectorType(F32, N_LANES)
VECTOR_F16 = ir.VectorType(F16, N_LANES)
VECTOR_I32 = ir.VectorType(I32, N_LANES)
VECTOR_I16 = ir.VectorType(I16, N_LANES)
VECTOR_I8 = ir.VectorType(I8, N_LANES)


# ---------------------------------------------------------------------------------------------------------
# Code generation helpers


def splat(builder, scalar, vector_type):
    lane0 = builder.insert_element(ir.Constant(vector_type, ir.Undefined), scalar, ir.Constant(I32, 0))
    lanes = ir.Constant(ir.VectorType(I32, vector_type.count), [0] * vector_type.count)
    return builder.shuffle_vector(lane0, ir.Constant(vector_type, ir.Undefined), lanes)


def constant(value_type, value):
    """A constant of a scalar type, or a vector with that constant in every lane."""
    is_vector = isinstance(value_type, ir.VectorType)
    return ir.Constant(value_type, [value] * value_type.count if is_vector else value)


def _half_types(bits_type):
    """int32, float and half types with as many lanes as ``bits_type``, an i16 or a vector of i16."""
    return (VECTOR_I32, VECTOR_F32, VECTOR_F16) if isinstance(bits_type, ir.VectorType) else (I32, F32, F16)


def shuffle(builder, vector, lanes):
    mask = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


def call_llvm(builder, name, result_type, args):
    function_type = ir.FunctionType(result_type, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), args)


def item_pointer(context, builder, array_type, array_value, index, pointee):
    """Address of item ``index`` of a C-contiguous array, as a pointer to ``pointee``."""
    array = context.make_array(array_type)(context, builder, array_value)
    return builder.bitcast(builder.gep(array.data, [index]), pointee.as_pointer())


def _is_flat_array(array_type) -> bool:
    return isinstance(array_type, types.Array) and array_type.layout == "C"


def make_load(pointee, finish, result):
    """Typing and code of ``load(array, index)``: read ``pointee`` unaligned, then apply ``finish``."""

    def load(typingctx, array, index):
        if not (_is_flat_array(array) and isinstance(index, types.Integer)):
            return None

        def codegen(context, builder, sig, args):
            index_value = context.cast(builder, args[1], sig.args[1], types.intp)
            pointer = item_pointer(context, builder, sig.args[0], args[0], index_value, pointee)
            return finish(context, builder, builder.load(pointer, align=1))

        return result(array, index), codegen

    return load


def make_store(value_type, prepare):
    """Typing and code of ``store(array, index, value)``; ``prepare`` turns the value into what is written."""

    def store(typingctx, array, index, value):
        if not (_is_flat_array(array) and array.mutable and isinstance(index, types.Integer)):
            return None

        def codegen(context, builder, sig, args):
            stored = prepare(context, builder, context.cast(builder, args[2], sig.args[2], value_type))
            index_value = context.cast(builder, args[1], sig.args[1], types.intp)
            pointer = item_pointer(context, builder, sig.args[0], args[0], index_value, stored.type)
            builder.store(stored, pointer, align=1)
            return context.get_dummy_value()

        return types.void(array, index, value_type), codegen

    return store


def make_map(argument, result, emit):
    """Typing and code of a function of one vector."""

    def apply(typingctx, value):
        if value != argument:
            return None

        def codegen(context, builder, sig, args):
            return emit(context, builder, args[0])

        return result(argument), codegen

    return apply


# ---------------------------------------------------------------------------------------------------------
# Conversions between 16-bit floats and float32; 16-bit values are handled as integers


def _has_half_instructions(context) -> bool:
    """Whether LLVM can convert half itself; without F16C it would call a library that is not there."""
    return not _IS_X86 or "+f16c" in context.codegen()._tm_features


def half_to_float(context, builder, value):
    """``value`` is the half's bits, one integer or a vector of them."""
    wide, single, half = _half_types(value.type)
    if _has_half_instructions(context):
        return builder.fpext(builder.bitcast(value, half), single)

    bits = builder.zext(value, wide)
    magnitude = builder.and_(bits, constant(wide, 0x7FFF))
    shifted = builder.shl(magnitude, constant(wide, 13))
    # The exponent bias differs by 112; the product is exact, subnormal halves included.
    scaled = builder.fmul(builder.bitcast(shifted, single), constant(single, 2.0**112))
    is_special = builder.icmp_unsigned(">=", magnitude, constant(wide, 0x7C00))
    special = builder.or_(shifted, constant(wide, 0x7F80_0000))
    finite_or_special = builder.select(is_special, special, builder.bitcast(scaled, wide))
    sign = builder.shl(builder.and_(bits, constant(wide, 0x8000)), constant(wide, 16))
    return builder.bitcast(builder.or_(finite_or_special, sign), single)


def float_to_half(context, builder, value):
    """Round to nearest even; gives the half's bits."""
    narrow = VECTOR_I16 if isinstance(value.type, ir.VectorType) else I16
    wide, single, half = _half_types(narrow)
    if _has_half_instructions(context):
        return builder.bitcast(builder.fptrunc(value, half), narrow)

    bits = builder.bitcast(value, wide)
    magnitude = builder.and_(bits, constant(wide, 0x7FFF_FFFF))
    odd = builder.and_(builder.lshr(magnitude, constant(wide, 13)), constant(wide, 1))
    rounded = builder.add(builder.add(magnitude, odd), constant(wide, 0x0FFF - 0x3800_0000))
    normal = builder.lshr(rounded, constant(wide, 13))
    # Adding 0.5 lines a subnormal half up with the last bit of a float32, which rounds it there.
    raised = builder.fadd(builder.bitcast(magnitude, single), constant(single, 0.5))
    subnormal = builder.sub(builder.bitcast(raised, wide), constant(wide, 0x3F00_0000))
    is_normal = builder.icmp_unsigned(">=", magnitude, constant(wide, 0x3880_0000))
    result = builder.select(is_normal, normal, subnormal)
    is_infinite = builder.icmp_unsigned(">=", magnitude, constant(wide, 0x477F_F000))
    result = builder.select(is_infinite, constant(wide, 0x7C00), result)
    is_nan = builder.icmp_unsigned(">", magnitude, constant(wide, 0x7F80_0000))
    result = builder.select(is_nan, constant(wide, 0x7E00), result)
    sign = builder.and_(builder.lshr(bits, constant(wide, 16)), constant(wide, 0x8000))
    return builder.trunc(builder.or_(result, sign), narrow)


def bfloat_to_float(context, builder, value):
    wide, single, _ = _half_types(value.type)
    return builder.bitcast(builder.shl(builder.zext(value, wide), constant(wide, 16)), single)


def float_to_bfloat(context, builder, value):
    """Round to nearest even, NaN to a quiet NaN; gives the bfloat16's bits."""
    narrow = VECTOR_I16 if isinstance(value.type, ir.VectorType) else I16
    wide, _, _ = _half_types(narrow)
    bits = builder.bitcast(value, wide)
    odd = builder.and_(builder.lshr(bits, constant(wide, 16)), constant(wide, 1))
    rounded = builder.add(builder.add(bits, odd), constant(wide, 0x7FFF))
    quiet = builder.or_(bits, constant(wide, 0x0040_0000))
    result = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
    return builder.trunc(builder.lshr(result, constant(wide, 16)), narrow)
