"""Vector loads, stores, reductions and functions, lane by lane against numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numba import njit
from numpy.typing import NDArray

from kvs_core.cpu import simd, vector_types
from kvs_core.cpu.vector_math import cos_sin_f32x16, exp_f32x16, tanh_f32x16

ALL_HALVES = np.arange(65536, dtype=np.uint16)


def map_floats(function: Callable[..., object], x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Apply a jitted function of f32x16 to every 16 elements."""

    @njit
    def apply(x: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        for idx in range(0, x.size, 16):
            simd.store_f32x16(out, idx, function(simd.load_f32x16(x, idx)))

    out = np.full_like(x, np.nan)
    apply(x, out)
    return out


def interesting_floats() -> NDArray[np.float32]:
    """All sizes, specials, and everything next to where half rounding changes."""
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 2**32, 1 << 18, dtype=np.uint64).astype(np.uint32).view(np.float32)
    subnormal = (np.arange(1 << 16) / 2**26).astype(np.float32)
    edges = np.array([0.0, -0.0, 65504, 65519.99, 65520, 2**-14, 2**-24, 2**-25, np.inf, np.nan], dtype=np.float32)
    edges = np.concatenate([edges, np.nextafter(edges, np.float32(1)), -edges, np.zeros(2, dtype=np.float32)])
    return np.concatenate([bits, subnormal, -subnormal, edges])


def check_halves() -> None:
    """Every half widens exactly; every float narrows as numpy does; vectors and scalars agree."""

    @njit
    def widen(halves: NDArray[np.uint16], out: NDArray[np.float32], one: NDArray[np.float32]) -> None:
        for idx in range(0, halves.size, 16):
            simd.store_f32x16(out, idx, simd.load_f16x16(halves, idx))
        for idx in range(halves.size):
            one[idx] = simd.load_f16(halves, idx)

    @njit
    def narrow(x: NDArray[np.float32], out: NDArray[np.uint16], one: NDArray[np.uint16]) -> None:
        for idx in range(0, x.size, 16):
            simd.store_f16x16(out, idx, simd.load_f32x16(x, idx))
        for idx in range(x.size):
            simd.store_f16(one, idx, x[idx])

    out, one = np.empty((2, 65536), dtype=np.float32)
    widen(ALL_HALVES, out, one)
    np.testing.assert_array_equal(out, ALL_HALVES.view(np.float16).astype(np.float32))
    np.testing.assert_array_equal(one, out)

    x = interesting_floats()
    narrow_out, narrow_one = np.empty((2, x.size), dtype=np.uint16)
    narrow(x, narrow_out, narrow_one)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    np.testing.assert_array_equal(narrow_out.view(np.float16), expected)
    np.testing.assert_array_equal(narrow_one, narrow_out)
    not_nan = ~np.isnan(x)
    np.testing.assert_array_equal(np.signbit(narrow_out.view(np.float16))[not_nan], np.signbit(expected)[not_nan])


def test_halves_convert_as_ieee_says() -> None:
    check_halves()


def test_halves_convert_alike_without_instructions_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_types, "_has_half_instructions", lambda context: False)
    check_halves()


def test_bfloat16_widens_exactly() -> None:
    @njit
    def widen(halves: NDArray[np.uint16], out: NDArray[np.float32], one: NDArray[np.float32]) -> None:
        for idx in range(0, halves.size, 16):
            simd.store_f32x16(out, idx, simd.load_bf16x16(halves, idx))
        for idx in range(halves.size):
            one[idx] = simd.load_bf16(halves, idx)

    out, one = np.empty((2, 65536), dtype=np.float32)
    widen(ALL_HALVES, out, one)
    np.testing.assert_array_equal(out.view(np.uint32), ALL_HALVES.astype(np.uint32) << 16)
    np.testing.assert_array_equal(one, out)


def test_bytes_convert_with_and_without_sign() -> None:
    @njit
    def convert(data: NDArray[np.uint8], out: NDArray[np.float32], stored: NDArray[np.uint8]) -> None:
        for idx in range(0, 256, 16):
            values = simd.load_u8x16(data, idx)
            simd.store_f32x16(out, idx, simd.u8_to_f32(values))
            simd.store_f32x16(out, 256 + idx, simd.load_i8x16_as_f32(data, idx))
            simd.store_f32x16(out, 512 + idx, simd.u8_to_f32(simd.low_nibbles(values)))
            simd.store_f32x16(out, 768 + idx, simd.u8_to_f32(simd.high_nibbles(values)))
            simd.store_i8x16(stored, idx, simd.f32_to_i32(simd.load_i8x16_as_f32(data, idx)))

    data = np.random.default_rng(0).permutation(256).astype(np.uint8)
    out, stored = np.empty(4 * 256, dtype=np.float32), np.empty(256, dtype=np.uint8)
    convert(data, out, stored)
    signed = data.view(np.int8)
    np.testing.assert_array_equal(out, np.concatenate([data, signed, data & 15, data >> 4]).astype(np.float32))
    np.testing.assert_array_equal(stored, data)


def test_integer_lanes() -> None:
    @njit
    def convert(data: NDArray[np.uint8], word: int, out: NDArray[np.float32]) -> None:
        wide = simd.load_u8x16_as_i32(data, 0)
        simd.store_f32x16(out, 0, simd.i32_to_f32(simd.bit_and(simd.shift_right(wide, 3), 7)))
        simd.store_f32x16(out, 16, simd.i32_to_f32(simd.shift_left(wide, 4)))
        simd.store_f32x16(out, 32, simd.i32_to_f32(simd.add_where_bit(wide, word, -16)))
        simd.store_f32x16(out, 48, simd.i32_to_f32((wide | simd.splat_i32x16(256)) - simd.splat_i32x16(1)))
        simd.store_f32x16(out, 64, simd.u8_to_f32(simd.shift_right(simd.load_u8x16(data, 0), 5)))

    data = np.array([0, 1, 7, 8, 15, 16, 63, 64, 127, 128, 129, 200, 240, 254, 255, 85], dtype=np.uint8)
    out = np.empty(80, dtype=np.float32)
    convert(data, 0xABCD_8421, out)
    wide = data.astype(np.int32)
    is_set = (0x8421 >> np.arange(16)) & 1
    expected = [(wide >> 3) & 7, wide << 4, wide - 16 * is_set, (wide | 256) - 1, wide >> 5]
    np.testing.assert_array_equal(out, np.concatenate(expected).astype(np.float32))


def test_unaligned_and_flat_indices() -> None:
    @njit
    def copy(source: NDArray[np.uint8], target: NDArray[np.float32]) -> None:
        simd.store_f32x16(target, 3, simd.load_f32x16(source, 5))

    source = np.random.default_rng(1).integers(0, 100, 80, dtype=np.uint8)
    target = np.zeros((4, 5), dtype=np.float32)
    copy(source, target)
    np.testing.assert_array_equal(target.reshape(-1)[3:19].view(np.uint8), source[5:69])
    assert not target.reshape(-1)[[0, 1, 2, 19]].any()


def test_sums_follow_the_documented_tree() -> None:
    @njit
    def reduce(x: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        for idx in range(out.shape[0]):
            vector = simd.load_f32x16(x, 16 * idx)
            out[idx, 0] = simd.sum_lanes(vector)
            out[idx, 1] = simd.max_lanes(vector)

    x = (np.random.default_rng(2).standard_normal((500, 16)) * 10.0 ** np.arange(-8, 8)).astype(np.float32)
    out = np.empty((500, 2), dtype=np.float32)
    reduce(x, out)
    level = x
    while level.shape[1] > 1:
        half = level.shape[1] // 2
        level = level[:, :half] + level[:, half:]
    np.testing.assert_array_equal(out[:, 0], level[:, 0])
    np.testing.assert_array_equal(out[:, 1], x.max(axis=1))


def test_lane_selection() -> None:
    @njit
    def select(x: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        a, b = simd.load_f32x16(x, 0), simd.load_f32x16(x, 16)
        even, odd = simd.even_lanes(a, b), simd.odd_lanes(a, b)
        simd.store_f32x16(out, 0, even)
        simd.store_f32x16(out, 16, odd)
        simd.store_f32x16(out, 32, simd.interleave_low(even, odd))
        simd.store_f32x16(out, 48, simd.interleave_high(even, odd))
        simd.store_f32x16(out, 64, simd.keep_lanes_below(a, 5, np.float32(-1.0)))
        simd.store_f32x16(out, 80, simd.maximum(a, b))
        simd.store_f32x16(out, 96, simd.minimum(a, b))
        simd.store_f32x16(out, 112, simd.absolute(a))
        out[128] = simd.first_lane(b)

    x = np.random.default_rng(5).standard_normal(32).astype(np.float32)
    out = np.empty(129, dtype=np.float32)
    select(x, out)
    a, b = x[:16], x[16:]
    kept = np.where(np.arange(16) < 5, a, -1)
    expected = [x[::2], x[1::2], x, kept, np.maximum(a, b), np.minimum(a, b), abs(a), b[:1]]
    np.testing.assert_array_equal(out, np.concatenate(expected))


def test_fma_rounds_once_and_operators_twice() -> None:
    @njit
    def compute(x: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        a, b, c = simd.load_f32x16(x, 0), simd.load_f32x16(x, 16), simd.load_f32x16(x, 32)
        simd.store_f32x16(out, 0, simd.fma(a, b, c))
        simd.store_f32x16(out, 16, a * b + c)
        out[32] = simd.fma(x[0], x[16], x[32])

    rng = np.random.default_rng(8)
    a, b = rng.standard_normal((2, 16)).astype(np.float32)
    c = -(a * b)
    out = np.empty(33, dtype=np.float32)
    compute(np.concatenate([a, b, c]), out)
    once = (a.astype(np.float64) * b + c).astype(np.float32)
    np.testing.assert_array_equal(out[:16], once)
    np.testing.assert_array_equal(out[16:32], 0.0)
    assert out[32] == once[0]
    assert once.any()


def test_exp_is_within_one_unit_in_the_last_place() -> None:
    x = np.concatenate([np.linspace(-105, 90, 1 << 19), np.linspace(-1e-3, 1e-3, 1 << 12)]).astype(np.float32)
    result = map_floats(exp_f32x16, x)
    with np.errstate(over="ignore", under="ignore"):
        exact = np.exp(x.astype(np.float64))
        rounded = exact.astype(np.float32)
    np.testing.assert_array_equal(np.isinf(result), np.isinf(rounded))
    is_normal = np.isfinite(rounded) & (rounded >= np.finfo(np.float32).tiny)
    units = np.abs(result - exact)[is_normal] / np.spacing(rounded[is_normal])
    assert units.max() < 1.0, x[is_normal][units.argmax()]
    is_tiny = rounded < np.finfo(np.float32).tiny
    assert np.abs(result - exact)[is_tiny].max() <= 2 * 2.0**-149


def test_exp_of_specials() -> None:
    x = np.zeros(16, dtype=np.float32)
    x[:7] = [np.nan, -np.inf, np.inf, 0.0, -0.0, -200.0, 200.0]
    np.testing.assert_array_equal(map_floats(exp_f32x16, x)[:7], [np.nan, 0.0, np.inf, 1.0, 1.0, 0.0, np.inf])


def test_tanh_is_within_two_units_in_the_last_place() -> None:
    sizes = np.concatenate([np.linspace(0, 12, 1 << 18), np.logspace(-30, 0, 1 << 12), [1e-38, 80.0, 3e38]])
    x = np.resize(np.concatenate([sizes, -sizes]), 1 << 20).astype(np.float32)
    result = map_floats(tanh_f32x16, x)
    exact = np.tanh(x.astype(np.float64))
    units = np.abs(result - exact) / np.spacing(np.abs(exact).astype(np.float32))
    assert units.max() < 2.0, (x[units.argmax()], result[units.argmax()])


def test_tanh_of_specials() -> None:
    x = np.zeros(16, dtype=np.float32)
    x[:5] = [np.nan, -np.inf, np.inf, 0.0, -0.0]
    result = map_floats(tanh_f32x16, x)[:5]
    np.testing.assert_array_equal(result, [np.nan, -1.0, 1.0, 0.0, -0.0])
    assert np.signbit(result[4])


@pytest.mark.parametrize("which", [0, 1])
def test_cosine_and_sine_hold_for_large_angles(which: int) -> None:
    @njit
    def apply(x: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        for idx in range(0, x.size, 16):
            simd.store_f32x16(out, idx, cos_sin_f32x16(simd.load_f32x16(x, idx))[which])

    rng = np.random.default_rng(6)
    turns = np.arange(1 << 14) * (np.pi / 2)
    near_zeros = np.concatenate([turns, np.nextafter(turns.astype(np.float32), np.float32(0))])
    x = np.concatenate([rng.uniform(-10, 10, 1 << 16), 10.0 ** rng.uniform(-8, 6.8, 1 << 16), near_zeros])
    x = np.concatenate([x, -x]).astype(np.float32)
    out = np.empty_like(x)
    apply(x, out)
    exact = (np.cos, np.sin)[which](x.astype(np.float64))
    units = np.abs(out - exact) / np.maximum(np.spacing(np.abs(exact).astype(np.float32)), 1e-9)
    assert units.max() < 1.6, (x[units.argmax()], out[units.argmax()], exact[units.argmax()])


def test_cosine_of_zero_is_one_and_of_nan_is_nan() -> None:
    @njit
    def apply(x: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        cosine, sine = cos_sin_f32x16(simd.load_f32x16(x, 0))
        simd.store_f32x16(out, 0, cosine)
        simd.store_f32x16(out, 16, sine)

    x = np.zeros(16, dtype=np.float32)
    x[1:3] = [np.nan, np.inf]
    out = np.empty(32, dtype=np.float32)
    apply(x, out)
    np.testing.assert_array_equal(out[[0, 1, 2, 16, 17, 18]], [1.0, np.nan, np.nan, 0.0, np.nan, np.nan])


def test_levels_of_every_index_with_and_without_a_byte_shuffle(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = (-128, 127, -1, 0, 1, 2, -77, 99, 5, -5, 64, -64, 32, -32, 16, -16)
    index = np.random.default_rng(3).permutation(np.arange(16, dtype=np.uint8))
    results = []
    for shuffle in (simd._BYTE_SHUFFLE, None):
        monkeypatch.setattr(simd, "_BYTE_SHUFFLE", shuffle)
        look_up_level = simd.make_level_look_up(levels)

        @njit
        def look_up_all(index: NDArray[np.uint8], out: NDArray[np.float32], look_up_level: Any = look_up_level) -> None:
            simd.store_f32x16(out, 0, look_up_level(simd.load_u8x16(index, 0)))

        out = np.empty(16, dtype=np.float32)
        look_up_all(index, out)
        results.append(out)
    np.testing.assert_array_equal(results, [np.array(levels, dtype=np.float32)[index]] * 2)
