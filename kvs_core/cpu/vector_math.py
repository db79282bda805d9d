"""Exponential, sine, cosine and hyperbolic tangent of f32x16 vectors, made of what ``simd`` has."""

# mypy: ignore-errors
# Jitted bodies and code generators work on vector values.

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from kvs_core.cpu.simd import absolute, fma, larger, smaller, splat_f32x16
from kvs_core.cpu.vector_types import VECTOR_F32, VECTOR_I32, constant, f32x16, splat

_ROUNDING_SHIFT = np.float32(1.5 * 2**23)  # adding it leaves the nearest integer in the low bits of a float32
_LOG2_E = np.float32(1.4426950408889634)
_LN_2_HIGH = np.float32(0.693145751953125)  # 16 significant bits, so that n * high is exact
_LN_2_LOW = np.float32(1.428606765330187e-06)
_EXP_LOWEST = np.float32(-104.0)  # e^-104 rounds to zero, also as a subnormal
_EXP_HIGHEST = np.float32(89.0)  # e^89 rounds to infinity
_TWO_OVER_PI = np.float32(2.0 / np.pi)
# pi/2 in three parts of 24 bits, each the rounded rest of the one before
_HALF_PI_1 = np.float32(np.pi / 2.0)
_HALF_PI_2 = np.float32(np.pi / 2.0 - float(_HALF_PI_1))
_TANH_POLYNOMIAL_END = np.float32(0.625)
_HALF_PI_3 = np.float32(6.123233995736766e-17 + (np.pi / 2.0 - float(_HALF_PI_1) - float(_HALF_PI_2)))


@intrinsic
def _clamp_keeping_nan(typingctx, vector, low, high):
    if not (vector == f32x16 and low == high == types.float32):
        return None

    def codegen(context, builder, sig, args):
        floor = smaller(builder, splat(builder, args[2], VECTOR_F32), args[0])
        return larger(builder, splat(builder, args[1], VECTOR_F32), floor)

    return f32x16(vector, low, high), codegen


@intrinsic
def _scale_by_shifted_power(typingctx, vector, shifted):
    """``vector * 2**n`` where the low bits of ``shifted`` hold n; in two factors, so that n reaches -150..129."""
    if not (vector == shifted == f32x16):
        return None

    def codegen(context, builder, sig, args):
        origin = int(_ROUNDING_SHIFT.view(np.int32))
        exponent = builder.sub(builder.bitcast(args[1], VECTOR_I32), constant(VECTOR_I32, origin))
        first = builder.ashr(exponent, constant(VECTOR_I32, 1))
        second = builder.sub(exponent, first)
        result = args[0]
        for part in (first, second):
            biased = builder.shl(builder.add(part, constant(VECTOR_I32, 127)), constant(VECTOR_I32, 23))
            result = builder.fmul(result, builder.bitcast(biased, VECTOR_F32))
        return result

    return f32x16(vector, shifted), codegen


@njit(nogil=True)
def exp_f32x16(x):
    """e to the power of each lane.

    Within 1 unit in the last place of the exact value (2 among subnormals); NaN gives NaN, -inf gives 0.
    Source  e^x = 2^n e^r with |r| <= ln(2)/2, and the Taylor polynomial of degree 7 for e^r, whose
            remainder r^8/8! is below 6e-9.
    """
    clamped = _clamp_keeping_nan(x, _EXP_LOWEST, _EXP_HIGHEST)
    shifted = fma(clamped, splat_f32x16(_LOG2_E), splat_f32x16(_ROUNDING_SHIFT))
    n = shifted - splat_f32x16(_ROUNDING_SHIFT)
    r = fma(n, splat_f32x16(-_LN_2_HIGH), clamped)
    r = fma(n, splat_f32x16(-_LN_2_LOW), r)

    polynomial = splat_f32x16(np.float32(1.0 / 5040.0))
    polynomial = fma(polynomial, r, splat_f32x16(np.float32(1.0 / 720.0)))
    polynomial = fma(polynomial, r, splat_f32x16(np.float32(1.0 / 120.0)))
    polynomial = fma(polynomial, r, splat_f32x16(np.float32(1.0 / 24.0)))
    polynomial = fma(polynomial, r, splat_f32x16(np.float32(1.0 / 6.0)))
    polynomial = fma(polynomial, r, splat_f32x16(np.float32(0.5)))
    polynomial = fma(polynomial, r, splat_f32x16(np.float32(1.0)))
    polynomial = fma(polynomial, r, splat_f32x16(np.float32(1.0)))
    return _scale_by_shifted_power(polynomial, shifted)


@intrinsic
def _pick_quadrant(typingctx, shifted, n_quarters, sine, cosine):
    """Sine of the angle ``r + (n + n_quarters) * pi/2``, where the low bits of ``shifted`` hold n."""
    if not (shifted == sine == cosine == f32x16 and isinstance(n_quarters, types.Integer)):
        return None

    def codegen(context, builder, sig, args):
        quarters = splat(builder, context.cast(builder, args[1], sig.args[1], types.int32), VECTOR_I32)
        quadrant = builder.add(builder.bitcast(args[0], VECTOR_I32), quarters)
        is_odd = builder.icmp_signed("!=", builder.and_(quadrant, constant(VECTOR_I32, 1)), constant(VECTOR_I32, 0))
        chosen = builder.select(is_odd, args[3], args[2])
        sign = builder.shl(builder.and_(quadrant, constant(VECTOR_I32, 2)), constant(VECTOR_I32, 30))
        return builder.bitcast(builder.xor(builder.bitcast(chosen, VECTOR_I32), sign), VECTOR_F32)

    return f32x16(shifted, n_quarters, sine, cosine), codegen


@njit(nogil=True)
def cos_sin_f32x16(x):
    """Cosine and sine of each lane, in radians.

    Within 1.5 units in the last place, or 1e-9 absolute near the zeros of large angles, for |x| up to 6.5e6. NaN and
    infinity give NaN.
    Source  Cody and Waite's reduction by multiples of pi/2 in three parts: with fused multiply-adds the first is
            exact. Taylor polynomials up to r^11 and r^12 for |r| <= pi/4, remainders below 1e-10.
    """
    shifted = fma(x, splat_f32x16(_TWO_OVER_PI), splat_f32x16(_ROUNDING_SHIFT))
    n = shifted - splat_f32x16(_ROUNDING_SHIFT)
    r = fma(n, splat_f32x16(-_HALF_PI_1), x)
    r = fma(n, splat_f32x16(-_HALF_PI_2), r)
    r = fma(n, splat_f32x16(-_HALF_PI_3), r)
    square = r * r

    sine = splat_f32x16(np.float32(-1.0 / 39916800.0))
    sine = fma(sine, square, splat_f32x16(np.float32(1.0 / 362880.0)))
    sine = fma(sine, square, splat_f32x16(np.float32(-1.0 / 5040.0)))
    sine = fma(sine, square, splat_f32x16(np.float32(1.0 / 120.0)))
    sine = fma(sine, square, splat_f32x16(np.float32(-1.0 / 6.0)))
    sine = fma(sine * square, r, r)

    cosine = splat_f32x16(np.float32(-1.0 / 3628800.0))
    cosine = fma(cosine, square, splat_f32x16(np.float32(1.0 / 40320.0)))
    cosine = fma(cosine, square, splat_f32x16(np.float32(-1.0 / 720.0)))
    cosine = fma(cosine, square, splat_f32x16(np.float32(1.0 / 24.0)))
    cosine = fma(cosine, square, splat_f32x16(np.float32(-0.5)))
    cosine = fma(cosine, square, splat_f32x16(np.float32(1.0)))

    return _pick_quadrant(shifted, 1, sine, cosine), _pick_quadrant(shifted, 0, sine, cosine)


@intrinsic
def _where_below(typingctx, tested, limit, below, other):
    """Lanes of ``below`` where the lane of ``tested`` is below ``limit``, of ``other`` elsewhere and for NaN."""
    if not (tested == below == other == f32x16 and limit == types.float32):
        return None

    def codegen(context, builder, sig, args):
        is_below = builder.fcmp_ordered("<", args[0], splat(builder, args[1], VECTOR_F32))
        return builder.select(is_below, args[2], args[3])

    return f32x16(tested, limit, below, other), codegen


@intrinsic
def _with_sign_of(typingctx, magnitude, signed):
    """``magnitude``, which is not negative, with the sign of each lane of ``signed``."""
    if not (magnitude == signed == f32x16):
        return None

    def codegen(context, builder, sig, args):
        sign = builder.and_(builder.bitcast(args[1], VECTOR_I32), constant(VECTOR_I32, -(2**31)))
        return builder.bitcast(builder.or_(builder.bitcast(args[0], VECTOR_I32), sign), VECTOR_F32)

    return f32x16(magnitude, signed), codegen


@njit(nogil=True)
def tanh_f32x16(x):
    """Hyperbolic tangent of each lane, within 2 units in the last place; NaN gives NaN.

    Source  below 0.625 an odd polynomial fitted to tanh(x) / x at Chebyshev nodes, relative error below 2e-8; above,
            1 - 2 / (e^2x + 1), which loses nothing there.
    """
    size = absolute(x)
    one = splat_f32x16(np.float32(1.0))
    two = splat_f32x16(np.float32(2.0))
    large = one - two / (exp_f32x16(size + size) + one)

    square = size * size
    small = splat_f32x16(np.float32(-0.006085455))
    small = fma(small, square, splat_f32x16(np.float32(0.020986497)))
    small = fma(small, square, splat_f32x16(np.float32(-0.053847467)))
    small = fma(small, square, splat_f32x16(np.float32(0.133327275)))
    small = fma(small, square, splat_f32x16(np.float32(-0.333333275)))
    small = fma(small * square, size, size)
    return _with_sign_of(_where_below(size, _TANH_POLYNOMIAL_END, small, large), x)
