"""TurboQuant's KV types: rotated rows as a norm for each group and the nearest of 4, 8 or 16 levels for each element.

Rows come here rotated and are read back rotated (``kvs_core.kv_rotation``). After the rotation the elements of a group
are close to normally distributed, and the levels are fitted to that. Source: TurboQuant, Zandieh et al. 2025 (arXiv
2504.19874), without its residual; levels, thresholds and bit order are those of the llama.cpp fork with these types.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, call-arg, var-annotated, unreachable"
# Compiled bodies work on values that Python's type system cannot describe.

from __future__ import annotations

import math

import numpy as np

from kvs_core.cpu.attention_tiles import inlined, inner
from kvs_core.cpu.packed_bits import (
    load_bits1x16,
    load_bits2x16,
    load_bits4x16,
    make_count_reached,
    make_levels,
    pick_level,
    store_bits1x16,
    store_bits2x16,
    store_bits4x16,
)
from kvs_core.cpu.simd import (
    bit_and,
    fma,
    load_f16_splat,
    load_f32x16,
    shift_left,
    shift_right,
    splat_f32x16,
    store_f16,
    store_f32x16,
    sum_lanes,
    zero_f32x16,
)
from kvs_core.cpu.vector_types import N_LANES

# For elements of standard deviation sqrt(1 / 128): what a unit vector of 128 elements has.
_LEVELS_2 = (0.039994, 0.133462)
_LEVELS_3 = (0.021460, 0.065717, 0.117832, 0.190685)
_LEVELS_4 = (0.011353, 0.034311, 0.058069, 0.083317, 0.111065, 0.143047, 0.182907, 0.241556)
_THRESHOLDS_2 = (0.086728,)
_THRESHOLDS_3 = (0.043589, 0.091775, 0.154259)
_THRESHOLDS_4 = (0.022832, 0.046190, 0.070693, 0.097191, 0.127056, 0.162977, 0.212232)
_LEVELS_GROUP = np.float32(128.0)

_SMALLEST_NORM = np.float32(1e-10)


def _mirrored(positive, middle=()):
    return (*(-value for value in reversed(positive)), *middle, *positive)


_levels_2 = make_levels(_mirrored(_LEVELS_2))
_levels_3 = make_levels(_mirrored(_LEVELS_3))
_levels_4 = make_levels(_mirrored(_LEVELS_4))
_nearest_2 = make_count_reached(_mirrored(_THRESHOLDS_2, (0.0,)))
_nearest_3 = make_count_reached(_mirrored(_THRESHOLDS_3, (0.0,)))
_nearest_4 = make_count_reached(_mirrored(_THRESHOLDS_4, (0.0,)))


# ---------------------------------------------------------------------------------------------------------
# Loaders: ``n_elements``, whole groups of ``group``, from their planes


@inner
def load_turbo2(arena, quants_at, scales_at, group, n_elements, floats, floats_at):
    for idx in range(0, n_elements, group):
        levels = _levels_2() * load_f16_splat(arena, scales_at + 2 * (idx // group))
        for at in range(idx, idx + group, N_LANES):
            store_f32x16(floats, floats_at + at, pick_level(levels, load_bits2x16(arena, quants_at + at // 4)))


@inner
def load_turbo3(arena, quants_at, high_at, scales_at, group, n_elements, floats, floats_at):
    for idx in range(0, n_elements, group):
        levels = _levels_3() * load_f16_splat(arena, scales_at + 2 * (idx // group))
        for at in range(idx, idx + group, N_LANES):
            high = shift_left(load_bits1x16(arena, high_at + at // 8), 2)
            quants = load_bits2x16(arena, quants_at + at // 4) | high
            store_f32x16(floats, floats_at + at, pick_level(levels, quants))


@inner
def load_turbo4(arena, quants_at, scales_at, group, n_elements, floats, floats_at):
    for idx in range(0, n_elements, group):
        levels = _levels_4() * load_f16_splat(arena, scales_at + 2 * (idx // group))
        for at in range(idx, idx + group, N_LANES):
            store_f32x16(floats, floats_at + at, pick_level(levels, load_bits4x16(arena, quants_at + at // 2)))


# ---------------------------------------------------------------------------------------------------------
# Storers: one rotated row of one head. The stored scale is the norm over that of the levels, so that the group's
# length is kept.


@inner
def _norm(values, begin, group):
    total = zero_f32x16()
    for idx in range(begin, begin + group, N_LANES):
        vector = load_f32x16(values, idx)
        total = fma(vector, vector, total)
    return np.float32(math.sqrt(sum_lanes(total)))


@inlined
def _factor(norm, group):
    """What a group's elements are multiplied by to be compared with thresholds; 0 for zeros and what is not finite."""
    if not (_SMALLEST_NORM < norm < np.float32(np.inf)):
        return np.float32(0.0)
    return np.float32(math.sqrt(np.float32(group) / _LEVELS_GROUP)) / norm


@inlined
def _store_scale(arena, at, norm, squares):
    """``squares`` sums the chosen levels' squares by lane."""
    scale = norm
    if _SMALLEST_NORM < norm < np.float32(np.inf):
        scale = norm / np.float32(math.sqrt(sum_lanes(squares)))
    elif norm <= _SMALLEST_NORM:
        scale = np.float32(0.0)
    store_f16(arena, at, scale)


@inner
def store_turbo2(values, values_at, head_dim, arena, quants_at, scales_at, group):
    for begin in range(0, head_dim, group):
        norm = _norm(values, values_at + begin, group)
        factor = splat_f32x16(_factor(norm, group))
        squares = zero_f32x16()
        for idx in range(begin, begin + group, N_LANES):
            quants = _nearest_2(load_f32x16(values, values_at + idx) * factor)
            level = pick_level(_levels_2(), quants)
            squares = fma(level, level, squares)
            store_bits2x16(arena, quants_at + idx // 4, quants)
        _store_scale(arena, scales_at + 2 * (begin // group), norm, squares)


@inner
def store_turbo3(values, values_at, head_dim, arena, quants_at, high_at, scales_at, group):
    for begin in range(0, head_dim, group):
        norm = _norm(values, values_at + begin, group)
        factor = splat_f32x16(_factor(norm, group))
        squares = zero_f32x16()
        for idx in range(begin, begin + group, N_LANES):
            quants = _nearest_3(load_f32x16(values, values_at + idx) * factor)
            level = pick_level(_levels_3(), quants)
            squares = fma(level, level, squares)
            store_bits2x16(arena, quants_at + idx // 4, bit_and(quants, 3))
            store_bits1x16(arena, high_at + idx // 8, shift_right(quants, 2))
        _store_scale(arena, scales_at + 2 * (begin // group), norm, squares)


@inner
def store_turbo4(values, values_at, head_dim, arena, quants_at, scales_at, group):
    for begin in range(0, head_dim, group):
        norm = _norm(values, values_at + begin, group)
        factor = splat_f32x16(_factor(norm, group))
        squares = zero_f32x16()
        for idx in range(begin, begin + group, N_LANES):
            quants = _nearest_4(load_f32x16(values, values_at + idx) * factor)
            level = pick_level(_levels_4(), quants)
            squares = fma(level, level, squares)
            store_bits4x16(arena, quants_at + idx // 2, quants)
        _store_scale(arena, scales_at + 2 * (begin // group), norm, squares)
