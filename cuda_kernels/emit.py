"""Numba intrinsics written as Python functions that emit PTX: a Python loop around the emitter is an unrolled loop.

Numba has no unroll pragma, and arrays in local memory that miss one optimisation silently land on a stack. Here
a fragment (the registers one lane holds of a tile) is a tuple of 32-bit values; the functions below take tuples
apart, emit one instruction per element, and put the results together again, so everything stays in registers.
No kernel lives here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from cuda_kernels.emit_memory import MemoryEmitter

I8 = ir.IntType(8)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
F32 = ir.FloatType()

BIASED_HALF2 = 0x64806480
"""Twice the float16 1152: a byte b under 0x64 is 1024 + b, and 128 of that is the bias of a signed byte."""
FLOAT_INTEGER_WORD, _FLOAT_INTEGER = 0x4B400000, 12582912.0
"""1.5 * 2**23 as bits and as float: integers below 2**22 added to the bits are added to the value."""

_RESULT_TYPES = {"r": I32, "l": I64, "f": F32, "d": ir.DoubleType()}

Value = Any  # an llvmlite value; the package ships no annotations


def words(n: int) -> Any:
    """Numba type of a fragment of ``n`` 32-bit registers."""
    return types.UniTuple(types.uint32, n)


def floats(n: int) -> Any:
    """Numba type of a fragment of ``n`` float32 registers."""
    return types.UniTuple(types.float32, n)


def emitted(result: Any, *parameters: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a Numba intrinsic of ``body(emit, *values)``.

    ``result`` and ``parameters`` are Numba types: scalars, ``words(n)`` or ``floats(n)``; ``types.void`` for no result.
    A fragment reaches the body as a Python list of LLVM values and leaves it as one.
    """

    def decorate(body: Callable[..., Any]) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Sequence[Value]) -> Value:
            emit = Emitter(builder)
            returned = body(emit, *(_unpack(builder, ty, arg) for ty, arg in zip(parameters, args, strict=True)))
            if result is types.void:
                return context.get_dummy_value()
            if isinstance(result, types.UniTuple):
                return context.make_tuple(builder, result, returned)
            return returned

        def typer(typing_context: Any, *args: Any) -> Any:
            return result(*parameters), codegen

        # Numba counts the arguments of an intrinsic by its signature, so it has to be spelt out.
        names = ["typing_context", *(f"argument_{i}" for i in range(len(parameters)))]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        typer.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
        typer.__name__ = body.__name__
        typer.__doc__ = body.__doc__
        return intrinsic(typer)

    return decorate


def _unpack(builder: Any, ty: Any, value: Value) -> Value:
    if isinstance(ty, types.UniTuple):
        return [builder.extract_value(value, i) for i in range(ty.count)]
    return value


class Emitter(MemoryEmitter):
    """PTX instructions on LLVM values. ``word`` means a 32-bit register, ``half2`` a word of two float16."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def asm(
        self,
        text: str,
        results: str,
        operands: Sequence[str],
        values: Sequence[Value],
        *,
        ordered: bool = False,
    ) -> Any:
        """Instructions. ``results`` and ``operands`` are constraints (r, l, f, d), one per register; an operand that
        is the number of a result shares its register.

        ``ordered`` keeps the instruction in place among other ordered ones and memory accesses. Returns a value,
        a list when there are several results, None when there is none.
        """
        result_types = [_RESULT_TYPES[letter] for letter in results]
        if not result_types:
            result_type: Any = ir.VoidType()
        elif len(result_types) == 1:
            result_type = result_types[0]
        else:
            result_type = ir.LiteralStructType(result_types)
        constraints = ",".join([*("=" + letter for letter in results), *operands] + (["~{memory}"] if ordered else []))
        function_type = ir.FunctionType(result_type, [value.type for value in values])
        call = self.builder.call(ir.InlineAsm(function_type, text, constraints, side_effect=ordered), list(values))
        if len(result_types) > 1:
            return [self.builder.extract_value(call, i) for i in range(len(result_types))]
        return call if result_types else None

    # -- words and addresses --------------------------------------------------------------------------------------

    def word(self, value: int) -> Value:
        return ir.Constant(I32, value & 0xFFFFFFFF)

    def held_words(self, values: Sequence[int], number: Value) -> list[Value]:
        """Constants in registers of their own; the assembler moves others into one before every use.

        ``number`` is any finite float: it does not know that what is left of it less itself is 0.
        """
        zero = self.asm("{.reg .f32 t; sub.rn.f32 t,$1,$1; mov.b32 $0,t;}", "r", "f", [number])
        return [self.asm("or.b32 $0,$1,$2;", "r", "rr", [zero, self.word(value)]) for value in values]

    def add(self, a: Value, b: Value | int) -> Value:
        return self.builder.add(a, self._like(a, b))

    def subtract(self, a: Value, b: Value) -> Value:
        return self.builder.sub(a, b)

    def multiply(self, a: Value, b: int) -> Value:
        return self.builder.mul(a, self._like(a, b))

    def divide(self, a: Value, b: int) -> Value:
        """Quotient of an unsigned word."""
        return self.builder.udiv(a, self._like(a, b))

    def remainder(self, a: Value, b: int) -> Value:
        """Remainder of an unsigned word."""
        return self.builder.urem(a, self._like(a, b))

    def shift_left(self, a: Value, n_bits: Value | int) -> Value:
        return self.builder.shl(a, self._like(a, n_bits))

    def shift_right(self, a: Value, n_bits: Value | int) -> Value:
        return self.builder.lshr(a, self._like(a, n_bits))

    def shift_right_signed(self, a: Value, n_bits: int) -> Value:
        return self.builder.ashr(a, self._like(a, n_bits))

    def rotate_right(self, a: Value, n_bits: Value | int) -> Value:
        if isinstance(n_bits, int):
            return self.asm(f"shf.r.wrap.b32 $0,$1,$1,{n_bits};", "r", "r", [a])
        return self.asm("shf.r.wrap.b32 $0,$1,$1,$2;", "r", "rr", [a, n_bits])

    def bit_and(self, a: Value, mask: Value | int) -> Value:
        return self.builder.and_(a, self._like(a, mask))

    def bit_or(self, a: Value, b: Value) -> Value:
        return self.builder.or_(a, b)

    def bit_select(self, mask: int, a: Value, b: Value) -> Value:
        """Bits of ``a`` where the mask has ones, of ``b`` elsewhere: one instruction, which two masks would not be."""
        return self.asm("lop3.b32 $0,$1,$2,$3,0xE4;", "r", "rrr", [a, b, self.word(mask)])

    def bit_xor(self, a: Value, b: Value | int) -> Value:
        return self.builder.xor(a, self._like(a, b))

    def widen(self, a: Value) -> Value:
        """32-bit to 64-bit, sign-extended: for addresses."""
        return self.builder.sext(a, I64)

    def narrow(self, a: Value) -> Value:
        """The low word of an address."""
        return self.builder.trunc(a, I32)

    def clamp(self, a: Value, low: int, high: int) -> Value:
        """A signed word held between two constants."""
        above = self.asm("max.s32 $0,$1,$2;", "r", "rr", [a, self.word(low)])
        return self.asm("min.s32 $0,$1,$2;", "r", "rr", [above, self.word(high)])

    def maximum(self, a: Value, b: Value) -> Value:
        """Of signed words."""
        return self.asm("max.s32 $0,$1,$2;", "r", "rr", [a, b])

    def warp_maximum(self, a: Value) -> Value:
        """The largest of the signed words of all lanes."""
        return self.asm("redux.sync.max.s32 $0,$1,0xffffffff;", "r", "r", [a], ordered=True)

    def warp_minimum(self, a: Value) -> Value:
        return self.asm("redux.sync.min.s32 $0,$1,0xffffffff;", "r", "r", [a], ordered=True)

    def less(self, a: Value, b: Value) -> Value:
        """A condition on signed words."""
        return self.builder.icmp_signed("<", a, b)

    def is_not_zero(self, a: Value) -> Value:
        """A condition on a word or an address."""
        return self.builder.icmp_signed("!=", a, ir.Constant(a.type, 0))

    def when(self, condition: Value) -> Any:
        """Context: what is emitted within is done where the condition holds."""
        return self.builder.if_then(condition)

    def equal(self, a: Value, b: Value) -> Value:
        """A condition on words."""
        return self.builder.icmp_unsigned("==", a, b)

    def select(self, condition: Value, a: Value, b: Value) -> Value:
        return self.builder.select(condition, a, b)

    def flag(self, condition: Value) -> Value:
        """A condition as the word 0 or 1."""
        return self.builder.zext(condition, I32)

    @staticmethod
    def _like(a: Value, b: Value | int) -> Value:
        return ir.Constant(a.type, b) if isinstance(b, int) else b

    def is_shared(self, address: Value) -> bool:
        """Whether an address is one in shared memory, which have 32 bits."""
        return bool(address.type != I64)

    # -- float32 arithmetic, one rounding each, never contracted --------------------------------------------------

    def float(self, value: float) -> Value:
        return ir.Constant(F32, value)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        return self.asm("fma.rn.f32 $0,$1,$2,$3;", "f", "fff", [a, b, c])

    def float_multiply(self, a: Value, b: Value) -> Value:
        return self.asm("mul.rn.f32 $0,$1,$2;", "f", "ff", [a, b])

    def float_add(self, a: Value, b: Value) -> Value:
        return self.asm("add.rn.f32 $0,$1,$2;", "f", "ff", [a, b])

    def float_subtract(self, a: Value, b: Value) -> Value:
        return self.asm("sub.rn.f32 $0,$1,$2;", "f", "ff", [a, b])

    def float_divide(self, a: Value, b: Value) -> Value:
        return self.asm("div.rn.f32 $0,$1,$2;", "f", "ff", [a, b])

    def float_reciprocal(self, a: Value) -> Value:
        """1 / ``a``, 1 unit in the last place; infinity gives 0."""
        return self.asm("rcp.approx.ftz.f32 $0,$1;", "f", "f", [a])

    def float_negate(self, a: Value) -> Value:
        return self.asm("neg.f32 $0,$1;", "f", "f", [a])

    def float_maximum(self, a: Value, b: Value) -> Value:
        return self.asm("max.f32 $0,$1,$2;", "f", "ff", [a, b])

    def float_minimum(self, a: Value, b: Value) -> Value:
        return self.asm("min.f32 $0,$1,$2;", "f", "ff", [a, b])

    def float_equal(self, a: Value, b: Value) -> Value:
        """A condition; false with NaN."""
        return self.builder.fcmp_ordered("==", a, b)

    def float_less(self, a: Value, b: Value) -> Value:
        """A condition; false with NaN."""
        return self.builder.fcmp_ordered("<", a, b)

    def float_absolute(self, a: Value) -> Value:
        return self.asm("abs.f32 $0,$1;", "f", "f", [a])

    def float_square_root(self, a: Value) -> Value:
        return self.asm("sqrt.rn.f32 $0,$1;", "f", "f", [a])

    def float_to_int(self, a: Value) -> Value:
        """The whole part as a signed word; NaN gives 0."""
        return self.asm("cvt.rzi.s32.f32 $0,$1;", "r", "f", [a])

    def exp2(self, a: Value) -> Value:
        """2 to the power ``a``, 2 units in the last place; minus infinity gives exactly 0."""
        return self.asm("ex2.approx.ftz.f32 $0,$1;", "f", "f", [a])

    def round_to_int(self, a: Value) -> Value:
        """Nearest integer, halves to even."""
        return self.asm("cvt.rni.s32.f32 $0,$1;", "r", "f", [a])

    def int_to_float(self, a: Value) -> Value:
        return self.asm("cvt.rn.f32.s32 $0,$1;", "f", "r", [a])

    def as_float(self, word: Value) -> Value:
        return self.builder.bitcast(word, F32)

    def as_word(self, value: Value) -> Value:
        return self.builder.bitcast(value, I32)

    def exchange(self, a: Value, lane_mask: int) -> Value:
        """The value of the lane whose number differs in the bits of ``lane_mask``; the whole warp takes part."""
        text = f"shfl.sync.bfly.b32 $0,$1,{lane_mask},31,0xffffffff;"
        return self.asm(text, "f", "f", [a], ordered=True)

    def exchange_word(self, a: Value, lane_mask: int) -> Value:
        return self.as_word(self.exchange(self.as_float(a), lane_mask))

    def from_lane(self, a: Value, lane: Value) -> Value:
        """The float of one lane for all."""
        return self.asm("shfl.sync.idx.b32 $0,$1,$2,31,0xffffffff;", "f", "fr", [a, lane], ordered=True)

    def ballot(self, condition: Value) -> Value:
        """A word of the conditions of all lanes, bit by lane."""
        text = "{.reg .pred p; setp.ne.s32 p,$1,0; vote.sync.ballot.b32 $0,p,0xffffffff;}"
        return self.asm(text, "r", "r", [self.flag(condition)], ordered=True)

    def lowest_bit(self, a: Value) -> Value:
        """Number of the lowest bit that is set; 32 if none is."""
        return self.asm("{.reg .b32 t; brev.b32 t,$1; clz.b32 $0,t;}", "r", "r", [a])

    # -- float16 pairs, bytes and matrices ------------------------------------------------------------------------

    def pack_half2(self, low: Value, high: Value) -> Value:
        return self.asm("cvt.rn.f16x2.f32 $0,$2,$1;", "r", "ff", [low, high])

    def float_to_half(self, a: Value) -> Value:
        """A float16, rounded to nearest, in the low half of a word."""
        return self.asm("{.reg .b16 h; cvt.rn.f16.f32 h,$1; cvt.u32.u16 $0,h;}", "r", "f", [a])

    def pack_finite_half2(self, low: Value, high: Value) -> Value:
        """``pack_half2`` with the largest numbers instead of infinities; NaN stays."""
        return self.asm("cvt.rn.satfinite.f16x2.f32 $0,$2,$1;", "r", "ff", [low, high])

    def low_half_to_float(self, word: Value) -> Value:
        return self.asm("{.reg .b16 l,h; mov.b32 {l,h},$1; cvt.f32.f16 $0,l;}", "f", "r", [word])

    def high_half_to_float(self, word: Value) -> Value:
        return self.asm("{.reg .b16 l,h; mov.b32 {l,h},$1; cvt.f32.f16 $0,h;}", "f", "r", [word])

    def half2_subtract(self, a: Value, b: Value) -> Value:
        return self.asm("sub.rn.f16x2 $0,$1,$2;", "r", "rr", [a, b])

    def half2_multiply(self, a: Value, b: Value) -> Value:
        return self.asm("mul.rn.f16x2 $0,$1,$2;", "r", "rr", [a, b])

    def half2_fma(self, a: Value, b: Value, c: Value) -> Value:
        return self.asm("fma.rn.f16x2 $0,$1,$2,$3;", "r", "rrr", [a, b, c])

    def permute(self, a: Value, b: Value, selector: int | Value) -> Value:
        """Pick four of the eight bytes of ``a`` (0 to 3) and ``b`` (4 to 7), one selector digit each.

        A digit of 8 more gives the sign of its byte eight times.
        """
        digits = self.word(selector) if isinstance(selector, int) else selector
        return self.asm("prmt.b32 $0,$1,$2,$3;", "r", "rrr", [a, b, digits])

    def dot4(self, a: Value, b: Value, accumulator: Value) -> Value:
        """Sum of four products of signed bytes, added to a 32-bit integer."""
        return self.asm("dp4a.s32.s32 $0,$1,$2,$3;", "r", "rrr", [a, b, accumulator])

    def dot2(self, a: Value, b: Value, accumulator: Value, *, upper: bool) -> Value:
        """Sum of the products of two signed halves of ``a`` with the lower or upper two signed bytes of ``b``."""
        return self.asm(f"dp2a.{'hi' if upper else 'lo'}.s32.s32 $0,$1,$2,$3;", "r", "rrr", [a, b, accumulator])

    def pack_low_halves(self, a: Value, b: Value) -> Value:
        """The lower halves of two words in one."""
        return self.permute(a, b, 0x5410)

    def add_byte_times_128(self, word: Value, i: int, base: Value) -> Value:
        """``base`` + 128 times unsigned byte ``i``: a table's address, by a dot product of bytes."""
        return self.asm("dp4a.u32.u32 $0,$1,$2,$3;", "r", "rrr", [word, self.word(0x80 << 8 * i), base])

    def transpose(self, a: Value) -> Value:
        """An 8x8 matrix of float16, lane 4 g + t with elements (g, 2t) and (g, 2t + 1), transposed."""
        return self.asm("movmatrix.sync.aligned.m8n8.trans.b16 $0,$1;", "r", "r", [a], ordered=True)

    def mma(self, a: Sequence[Value], b: Sequence[Value], c: Sequence[Value]) -> list[Value]:
        """``c + a @ b`` for a 16x16 by 16x8 product of float16 with float32 accumulators."""
        text = (
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3},{$4,$5,$6,$7},{$8,$9},{$10,$11,$12,$13};"
        )
        return list(self.asm(text, "ffff", "rrrrrrffff", [*a, *b, *c]))

    def mma_bytes(self, a: Sequence[Value], b: Value, c: Sequence[Value]) -> list[Value]:
        """``c + a @ b`` for a 16x16 by 16x8 product of signed bytes with 32-bit integers."""
        text = "mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {$0,$1,$2,$3},{$4,$5},{$6},{$7,$8,$9,$10};"
        return list(self.asm(text, "rrrr", "rrrrrrr", [*a, b, *c]))

    def signed_byte(self, word: Value, i: int) -> Value:
        """Byte ``i`` of a word, sign-extended."""
        return self.shift_right_signed(self.shift_left(word, 24 - 8 * i), 24)

    def dot_bytes(self, a: Sequence[Value], b: Sequence[Value]) -> Value:
        """Sum of the products of the signed bytes of two lists of words, as float32; exact below 2**22.

        The sum is a float all along and needs no conversion.
        """
        return self.unbiased(self.sum_products(a, b, self.word(FLOAT_INTEGER_WORD)))

    def sum_products(self, a: Sequence[Value], b: Sequence[Value], total: Value) -> Value:
        """``total`` and the products of the signed bytes of two lists of words."""
        for x, y in zip(a, b, strict=True):
            total = self.dot4(x, y, total)
        return total

    def dot_pair(self, a: Value, b: Value, *, upper: bool) -> Value:
        """``dot2`` as float32; exact below 2**22."""
        return self.unbiased(self.dot2(a, b, self.word(FLOAT_INTEGER_WORD), upper=upper))

    def scaled_dot_pair(self, a: Value, b: Value, factor: Value, *, upper: bool) -> Value:
        """``factor`` times ``dot_pair``, rounded once; the factor was a float16, so that what is taken off is exact."""
        total = self.dot2(a, b, self.word(FLOAT_INTEGER_WORD), upper=upper)
        return self.fma(factor, self.as_float(total), self.float_multiply(factor, self.float(-_FLOAT_INTEGER)))

    def unbiased(self, total: Value) -> Value:
        """A sum that began with ``FLOAT_INTEGER_WORD``, as float32."""
        return self.float_subtract(self.as_float(total), self.float(_FLOAT_INTEGER))

    def to_half_integer(self, value: Value) -> Value:
        """A float32 that is an integer, in the lower half of a word."""
        return self.as_word(self.float_add(value, self.float(_FLOAT_INTEGER)))

    def unbias(self, biased: Value, scale: Value) -> Value:
        """float16 pairs 1152 + q (exact) to q * scale, rounded once; ``scale`` in both halves of its word."""
        return self.half2_multiply(self.half2_subtract(biased, self.word(BIASED_HALF2)), scale)

    def dequantise_bytes(self, quants: Value, scale: Value) -> list[Value]:
        """Four signed bytes times a scale, as two words of float16."""
        biased = self.bit_xor(quants, 0x80808080)
        halves = [self.permute(biased, self.word(0x64646464), digits) for digits in (0x4140, 0x4342)]
        return [self.unbias(half2, scale) for half2 in halves]
