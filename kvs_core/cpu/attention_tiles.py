"""The three inner loops of CPU attention: products of register blocks, row dot products, transposition.

Written as LLVM code generators, because accumulators must be unrolled into registers; nothing here knows
about pages, masks or softmax. Every operand lies in one float32 array and is named by its element offset.
"""

# mypy: ignore-errors
# Code generators and jitted bodies work on values that Python's type system cannot describe.

from __future__ import annotations

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.extending import intrinsic

from kvs_core.cpu.simd import fma, splat_f32x16
from kvs_core.cpu.vector_types import (
    I32,
    N_LANES,
    VECTOR_F32,
    VECTOR_I32,
    call_llvm,
    constant,
    f32x16,
    item_pointer,
    splat,
)

_I64 = ir.IntType(64)

_ROUNDING_SHIFT = np.float32(1.5 * 2**23)  # adding it leaves the nearest integer in the low bits of a float32
_LOG2_E = np.float32(1.4426950408889634)
_LN_2_HIGH = np.float32(0.693145751953125)  # 16 significant bits, so that n * high is exact
_LN_2_LOW = np.float32(1.428606765330187e-06)
_SMALLEST_EXPONENT = np.float32(-87.0)  # e^-87 is the last normal float32

# Vectors in one register block. With 32 registers of 512 bits a block of 6 rows x 4 vectors leaves room for its
# operands; narrower registers hold a vector in two or four pieces, and 6 x 1 fills them.
_HAS_WIDE_REGISTERS = bool(binding.get_host_cpu_features().get("avx512f"))
BLOCK_VECTORS = 4 if _HAS_WIDE_REGISTERS else 1

# For functions that only compiled code calls. Without `_nrt` Numba counts the references of every array passed on, with
# atomic operations that two threads contend for: prefill on 2 threads took 21.0 ms, without counting 12.2. Leaving
# out entry points for Python saves a sixth of the compile time. `inlined` functions are merged into their caller.
inner = njit(nogil=True, _nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)
inlined = njit(nogil=True, inline="always")


class _Code:
    """The few instructions the generators below share; all work on one float32 array."""

    def __init__(self, context, builder, array_type, array_value) -> None:
        self.builder = builder
        self._item = lambda index, pointee: item_pointer(context, builder, array_type, array_value, index, pointee)

    def load(self, index):
        return self.builder.load(self._item(index, VECTOR_F32), align=4)

    def store(self, vector, index):
        self.builder.store(vector, self._item(index, VECTOR_F32), align=4)

    def splat(self, index):
        """One element in every lane."""
        return splat(self.builder, self.builder.load(self._item(index, VECTOR_F32.element)), VECTOR_F32)

    def shuffle(self, a, b, lanes):
        """Lanes 0..15 name lanes of ``a``, 16..31 those of ``b``."""
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, N_LANES), list(lanes)))

    def fma(self, a, b, c):
        return call_llvm(self.builder, "llvm.fma.v16f32", VECTOR_F32, [a, b, c])

    def reduce_pair(self, even, odd, step, combine):
        """Half the lanes of each: lanes with bit ``step`` clear from ``even``, the others from ``odd``."""
        kept = [lane + N_LANES * bool(lane & step) for lane in range(N_LANES)]
        moved = [(lane ^ step) + N_LANES * bool(lane & step) for lane in range(N_LANES)]
        return combine(self.shuffle(even, odd, kept), self.shuffle(even, odd, moved))

    def reduce_eight(self, vectors, combine):
        """Lanes i and i + 8 of the result hold one half of vector i each, combined over its lanes in pairs."""
        for step in (1, 2, 4):
            vectors = [
                self.reduce_pair(vectors[idx], vectors[idx + 1], step, combine) for idx in range(0, len(vectors), 2)
            ]
        return vectors[0]

    def offset(self, index, stride, n):
        return self.builder.add(index, self.builder.mul(stride, ir.Constant(_I64, n)))

    def shifted(self, index, n):
        return self.builder.add(index, ir.Constant(_I64, n))

    def accumulate(self, depth, step, accumulators, advance):
        """Loop over ``range(0, depth, step)`` with ``depth`` > 0; ``advance(idx, values)`` gives the next values."""
        builder = self.builder
        before = builder.block
        loop = builder.append_basic_block("accumulate")
        after = builder.append_basic_block("accumulated")
        builder.branch(loop)

        builder.position_at_end(loop)
        idx = builder.phi(_I64)
        idx.add_incoming(ir.Constant(_I64, 0), before)
        values = [builder.phi(VECTOR_F32) for _ in accumulators]
        results = advance(idx, values)
        for value, start, result in zip(values, accumulators, results, strict=True):
            value.add_incoming(start, before)
            value.add_incoming(result, loop)
        following = self.shifted(idx, step)
        idx.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", following, depth), loop, after)

        builder.position_at_end(after)
        return results


def _is_float32_array(array) -> bool:
    return isinstance(array, types.Array) and array.layout == "C" and array.dtype == types.float32


def _signature(array, n_integers, *literals):
    """``void(array, int64 x n_integers, literals)``, or None where the arguments do not fit."""
    if not (_is_float32_array(array) and all(isinstance(literal, types.IntegerLiteral) for literal in literals)):
        return None
    return types.void(array, *[types.int64] * n_integers, *literals)


@intrinsic(prefer_literal=True)
def _multiply_block(typingctx, floats, a, a_stride, b, b_stride, c, c_stride, depth, scales, n_rows, n_vectors, scaled):
    """One register block of ``C = A B`` or, ``scaled``, of ``C = scale of the row * C + A B``; see multiply_rows."""
    sig = _signature(floats, 8, n_rows, n_vectors, scaled)
    if sig is None:
        return None
    block_rows, block_vectors, is_scaled = n_rows.literal_value, n_vectors.literal_value, scaled.literal_value

    def codegen(context, builder, sig, args):
        code = _Code(context, builder, sig.args[0], args[0])
        a_at, a_step, b_at, b_step, c_at, c_step, n_depth, scales_at = args[1:9]
        a_rows = [code.offset(a_at, a_step, row) for row in range(block_rows)]
        zero = constant(VECTOR_F32, 0.0)

        def advance(idx, sums):
            b_row = builder.add(b_at, builder.mul(idx, b_step))
            vectors = [code.load(code.shifted(b_row, N_LANES * column)) for column in range(block_vectors)]
            results = []
            for row in range(block_rows):
                factor = code.splat(builder.add(a_rows[row], idx))
                for column, vector in enumerate(vectors):
                    results.append(code.fma(factor, vector, sums[row * block_vectors + column]))
            return results

        sums = code.accumulate(n_depth, 1, [zero] * (block_rows * block_vectors), advance)
        for row in range(block_rows):
            row_scale = code.splat(code.shifted(scales_at, row)) if is_scaled else None
            for column in range(block_vectors):
                at = code.shifted(code.offset(c_at, c_step, row), N_LANES * column)
                result = sums[row * block_vectors + column]
                code.store(code.fma(row_scale, code.load(at), result) if is_scaled else result, at)
        return context.get_dummy_value()

    return sig, codegen


@intrinsic
def dot_16_rows(typingctx, floats, a, b, b_stride, depth, out):
    """``out[i] = A . B[i]`` for 16 rows of B, ``depth`` a positive multiple of 16; all offsets into ``floats``.

    Each lane sums the products of every 16th element, then lanes are added pairwise: the order depends on
    ``depth`` only.
    """
    sig = _signature(floats, 5)
    if sig is None:
        return None

    def codegen(context, builder, sig, args):
        code = _Code(context, builder, sig.args[0], args[0])
        a_at, b_at, b_step, n_depth, out_at = args[1:]
        zero = constant(VECTOR_F32, 0.0)

        def sums_of(rows):
            b_rows = [code.offset(b_at, b_step, row) for row in rows]

            def advance(idx, sums):
                factor = code.load(builder.add(a_at, idx))
                return [
                    code.fma(factor, code.load(builder.add(b_row, idx)), total)
                    for b_row, total in zip(b_rows, sums, strict=True)
                ]

            return code.accumulate(n_depth, N_LANES, [zero] * len(rows), advance)

        low = code.reduce_eight(sums_of(range(8)), builder.fadd)
        high = code.reduce_eight(sums_of(range(8, 16)), builder.fadd)
        code.store(code.reduce_pair(low, high, 8, builder.fadd), out_at)
        return context.get_dummy_value()

    return sig, codegen


def _make_reduce_eight_rows(combine):
    """Code of ``reduce(floats, source)``: one f32x16 whose lane i holds row i % 8 of eight vectors, reduced."""

    def reduce_eight_rows(typingctx, floats, source):
        if not (_is_float32_array(floats) and isinstance(source, types.Integer)):
            return None

        def codegen(context, builder, sig, args):
            code = _Code(context, builder, sig.args[0], args[0])
            halves = code.reduce_eight(
                [code.load(code.shifted(args[1], N_LANES * row)) for row in range(8)],
                lambda a, b: combine(builder, a, b),
            )
            return code.reduce_pair(halves, halves, 8, lambda a, b: combine(builder, a, b))

        return f32x16(floats, types.int64), codegen

    return intrinsic(reduce_eight_rows)


sum_eight_rows = _make_reduce_eight_rows(lambda builder, a, b: builder.fadd(a, b))
largest_of_eight_rows = _make_reduce_eight_rows(
    lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b)
)


@intrinsic
def _times_power_of_two(typingctx, factor, shifted):
    """``factor * 2**n`` where the low bits of ``shifted`` hold n in -126..127."""
    if not (factor == shifted == f32x16):
        return None

    def codegen(context, builder, sig, args):
        n = builder.shl(builder.bitcast(args[1], VECTOR_I32), constant(VECTOR_I32, 23))
        power = builder.bitcast(builder.add(n, constant(VECTOR_I32, 127 << 23)), VECTOR_F32)
        return builder.fmul(args[0], power)

    return f32x16(factor, shifted), codegen


@intrinsic
def _zero_where_below(typingctx, values, tested, limit):
    """Lanes of ``values``, 0 where the lane of ``tested`` is below ``limit``; not where it is NaN."""
    if not (values == tested == f32x16 and limit == types.float32):
        return None

    def codegen(context, builder, sig, args):
        is_below = builder.fcmp_ordered("<", args[1], splat(builder, args[2], VECTOR_F32))
        return builder.select(is_below, constant(VECTOR_F32, 0.0), args[0])

    return f32x16(values, tested, limit), codegen


@intrinsic
def _transpose_16x16(typingctx, floats, source, source_stride, target, target_stride):
    sig = _signature(floats, 4)
    if sig is None:
        return None

    def codegen(context, builder, sig, args):
        code = _Code(context, builder, sig.args[0], args[0])
        source_at, source_step, target_at, target_step = args[1:]
        rows = [code.load(code.offset(source_at, source_step, row)) for row in range(N_LANES)]
        # Each step swaps the off-diagonal squares of side `step` inside squares of side 2 * step.
        for step in (1, 2, 4, 8):
            upper = [(lane ^ step) + N_LANES if lane & step else lane for lane in range(N_LANES)]
            lower = [lane + N_LANES if lane & step else lane ^ step for lane in range(N_LANES)]
            for row in range(N_LANES):
                if not row & step:
                    a, b = rows[row], rows[row + step]
                    rows[row], rows[row + step] = code.shuffle(a, b, upper), code.shuffle(a, b, lower)
        for row in range(N_LANES):
            code.store(rows[row], code.offset(target_at, target_step, row))
        return context.get_dummy_value()

    return sig, codegen


@inlined
def exp_of_weight(x):
    """e to the power of each lane for lanes that are not positive: 0 below -87, NaN where NaN.

    Two thirds of the instructions of ``vector_math.exp_f32x16``, which also serves large and subnormal results. Within
    2 units in the last place. Source: e^x = 2^n e^r with |r| <= ln(2)/2 and the Taylor polynomial of degree 7.
    """
    shifted = fma(x, splat_f32x16(_LOG2_E), splat_f32x16(_ROUNDING_SHIFT))
    n = shifted - splat_f32x16(_ROUNDING_SHIFT)
    r = fma(n, splat_f32x16(-_LN_2_HIGH), x)
    r = fma(n, splat_f32x16(-_LN_2_LOW), r)
    power = splat_f32x16(np.float32(1.0 / 5040.0))
    power = fma(power, r, splat_f32x16(np.float32(1.0 / 720.0)))
    power = fma(power, r, splat_f32x16(np.float32(1.0 / 120.0)))
    power = fma(power, r, splat_f32x16(np.float32(1.0 / 24.0)))
    power = fma(power, r, splat_f32x16(np.float32(1.0 / 6.0)))
    power = fma(power, r, splat_f32x16(np.float32(0.5)))
    power = fma(power, r, splat_f32x16(np.float32(1.0)))
    power = fma(power, r, splat_f32x16(np.float32(1.0)))
    return _zero_where_below(_times_power_of_two(power, shifted), x, _SMALLEST_EXPONENT)


@inner
def transpose(floats, source, n_rows, n_columns, target):
    """``target [n_columns, n_rows]`` becomes the transpose of ``source [n_rows, n_columns]``; multiples of 16."""
    for row in range(0, n_rows, 16):
        for column in range(0, n_columns, 16):
            _transpose_16x16(
                floats, source + row * n_columns + column, n_columns, target + column * n_rows + row, n_rows
            )


def _build_block_rows(n_rows, scaled):
    """``n_rows`` rows over all columns, in register blocks as wide as possible and then of one vector."""

    @inner
    def block_rows(floats, a, a_stride, b, b_stride, c, c_stride, depth, scales, n_columns):
        column = 0
        while n_columns - column >= 16 * BLOCK_VECTORS:
            _multiply_block(
                floats,
                a,
                a_stride,
                b + column,
                b_stride,
                c + column,
                c_stride,
                depth,
                scales,
                n_rows,
                BLOCK_VECTORS,
                scaled,
            )
            column += 16 * BLOCK_VECTORS
        while n_columns > column:
            _multiply_block(
                floats, a, a_stride, b + column, b_stride, c + column, c_stride, depth, scales, n_rows, 1, scaled
            )
            column += 16

    return block_rows


_multiply_six_rows = _build_block_rows(6, 0)
_six_rows = _build_block_rows(6, 1)
_four_rows = _build_block_rows(4, 1)
_three_rows = _build_block_rows(3, 1)
_two_rows = _build_block_rows(2, 1)
_one_row = _build_block_rows(1, 1)


@inlined
def multiply_six_rows(floats, a, a_stride, b, b_stride, c, c_stride, depth, n_columns):
    """``C = A B`` for 6 rows of A and C; ``depth`` > 0, ``n_columns`` a multiple of 16."""
    _multiply_six_rows(floats, a, a_stride, b, b_stride, c, c_stride, depth, 0, n_columns)


@inlined
def scale_and_add_six_rows(floats, a, a_stride, b, b_stride, c, c_stride, depth, scales, n_columns):
    """``C[row] = floats[scales + row] * C[row] + A[row] B`` for 6 rows; see scale_and_add_rows."""
    _six_rows(floats, a, a_stride, b, b_stride, c, c_stride, depth, scales, n_columns)


@inner
def scale_and_add_rows(floats, a, a_stride, b, b_stride, c, c_stride, depth, scales, n_rows, n_columns):
    """``C[row] = floats[scales + row] * C[row] + A[row] B`` for any number of rows, 4, 3, 2 or 1 at a time.

    Each element sums its ``depth`` > 0 products in order and is then added to the scaled old one, whatever the
    block it falls into; ``n_columns`` is a multiple of 16.
    """
    done = 0
    while done < n_rows:
        left = n_rows - done
        a_at = a + done * a_stride
        c_at = c + done * c_stride
        if left >= 4:
            _four_rows(floats, a_at, a_stride, b, b_stride, c_at, c_stride, depth, scales + done, n_columns)
            done += 4
        elif left == 3:
            _three_rows(floats, a_at, a_stride, b, b_stride, c_at, c_stride, depth, scales + done, n_columns)
            done += 3
        elif left == 2:
            _two_rows(floats, a_at, a_stride, b, b_stride, c_at, c_stride, depth, scales + done, n_columns)
            done += 2
        else:
            _one_row(floats, a_at, a_stride, b, b_stride, c_at, c_stride, depth, scales + done, n_columns)
            done += 1
