"""Reading and writing the rows of each KV type: one loader and one storer per type, nothing else to add.

The type is looked up per tile or row at run time, so kernels are compiled once for all pairs of types and head
sizes. Where rows lie is decided in ``kvs_core.kv_types``; this file, ``kv_blocks`` (four and five bits) and
``kv_turbo`` know what their bytes mean.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, call-arg, var-annotated, unreachable"
# Compiled bodies work on values that Python's type system cannot describe.

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvs_core.cpu import kv_blocks, kv_turbo
from kvs_core.cpu.attention_tiles import inlined, inner
from kvs_core.cpu.simd import (
    absolute,
    f32_to_i32,
    i32_to_f32,
    load_bf16x16,
    load_f16_splat,
    load_f16x16,
    load_f32x16,
    load_i8x16_as_f32,
    max_lanes,
    maximum,
    splat_f32x16,
    store_bf16x16,
    store_f16,
    store_f16x16,
    store_f32x16,
    store_i8x16,
    sum_lanes,
)
from kvs_core.kv_types import KvType, PageGeometry, RegionGeometry

(_F32, _F16, _BF16, _Q8_0, _Q5_1, _Q5_0, _Q4_1, _Q4_0, _IQ4_NL, _TURBO4, _TURBO3, _TURBO2) = range(12)
_TYPE_CODES = {
    KvType.F32: _F32,
    KvType.F16: _F16,
    KvType.BF16: _BF16,
    KvType.Q8_0: _Q8_0,
    KvType.Q5_1: _Q5_1,
    KvType.Q5_0: _Q5_0,
    KvType.Q4_1: _Q4_1,
    KvType.Q4_0: _Q4_0,
    KvType.IQ4_NL: _IQ4_NL,
    KvType.TURBO4: _TURBO4,
    KvType.TURBO3: _TURBO3,
    KvType.TURBO2: _TURBO2,
}

_REGION_NUMBERS = 10
_Q8_0_BLOCK = 32
_Q8_0_LARGEST = np.float32(127.0)
# Far below half's range (such a scale is stored as 0), far above the floats whose reciprocal overflows.
_Q8_0_SMALLEST_SCALE = np.float32(1e-30)


# ---------------------------------------------------------------------------------------------------------
# Page geometry as kernels see it


class RegionLayout(NamedTuple):
    """All heads' K or all heads' V inside a page; bytes, ``begin`` counted from the page's start."""

    head_dim: int
    type_code: int
    begin: int
    head_bytes: int
    row_bytes: int
    high_offset: int
    high_row_bytes: int
    scale_offset: int
    scale_row_bytes: int
    group_elements: int


class PageLayout(NamedTuple):
    """A ``PageGeometry`` for compiled code; with ``v_in_k`` not 0, ``v`` says no more than the size of a value."""

    page_tokens: int
    n_head_kv: int
    page_bytes: int
    v_in_k: int
    k: RegionLayout
    v: RegionLayout


@lru_cache(maxsize=64)
def layout_numbers(geometry: PageGeometry) -> npt.NDArray[np.int64]:
    """``geometry`` as the one array that launchers hand to kernels, int64 [24]; see page_layout."""

    def region(geometry: RegionGeometry, begin: int) -> list[int]:
        return [
            geometry.head_dim,
            _TYPE_CODES[geometry.kv_type],
            begin,
            geometry.n_bytes,
            geometry.row_bytes,
            geometry.high_offset,
            geometry.high_row_bytes,
            geometry.scale_offset,
            geometry.scale_row_bytes,
            geometry.group_elements,
        ]

    numbers = [geometry.page_tokens, geometry.n_head_kv, geometry.page_bytes, int(geometry.v_in_k)]
    numbers += region(geometry.k_region, 0) + region(geometry.v_region, geometry.v_offset)
    return np.array(numbers, dtype=np.int64)


@inlined
def _region_layout(numbers, at):
    return RegionLayout(
        numbers[at],
        numbers[at + 1],
        numbers[at + 2],
        numbers[at + 3],
        numbers[at + 4],
        numbers[at + 5],
        numbers[at + 6],
        numbers[at + 7],
        numbers[at + 8],
        numbers[at + 9],
    )


@inlined
def page_layout(numbers):
    """The named form of ``layout_numbers``. An array is the cheapest thing to pass from Python."""
    k = _region_layout(numbers, 4)
    v = _region_layout(numbers, 4 + _REGION_NUMBERS)
    return PageLayout(numbers[0], numbers[1], numbers[2], numbers[3], k, v)


# ---------------------------------------------------------------------------------------------------------
# Loaders: n_rows consecutive rows of one head -> float32 [n_rows, head_dim]


@inner
def load_rows(region, arena, page_at, head_kv_idx, row, n_rows, floats, floats_at):
    """Unpack rows ``row .. row + n_rows`` of one head into ``floats[floats_at:]``, row after row.

    region     RegionLayout; ``page_at`` is the byte of ``arena``, uint8 [n_bytes], where the page starts
    floats     float32 [n]; ``n_rows * head_dim`` elements are written
    """
    region_at = page_at + region.begin + head_kv_idx * region.head_bytes
    quants_at = region_at + row * region.row_bytes
    high_at = region_at + region.high_offset + row * region.high_row_bytes
    scales_at = region_at + region.scale_offset + row * region.scale_row_bytes
    n_elements = n_rows * region.head_dim
    if region.type_code == _F16:
        _load_f16(arena, quants_at, n_elements, floats, floats_at)
    elif region.type_code == _BF16:
        _load_bf16(arena, quants_at, n_elements, floats, floats_at)
    elif region.type_code == _Q8_0:
        _load_q8_0(arena, quants_at, scales_at, n_elements, floats, floats_at)
    elif region.type_code == _Q5_1:
        kv_blocks.load_q5_1(arena, quants_at, high_at, scales_at, n_elements, floats, floats_at)
    elif region.type_code == _Q5_0:
        kv_blocks.load_q5_0(arena, quants_at, high_at, scales_at, n_elements, floats, floats_at)
    elif region.type_code == _Q4_1:
        kv_blocks.load_q4_1(arena, quants_at, scales_at, n_elements, floats, floats_at)
    elif region.type_code == _Q4_0:
        kv_blocks.load_q4_0(arena, quants_at, scales_at, n_elements, floats, floats_at)
    elif region.type_code == _IQ4_NL:
        kv_blocks.load_iq4_nl(arena, quants_at, scales_at, n_elements, floats, floats_at)
    elif region.type_code == _TURBO4:
        kv_turbo.load_turbo4(arena, quants_at, scales_at, region.group_elements, n_elements, floats, floats_at)
    elif region.type_code == _TURBO3:
        kv_turbo.load_turbo3(arena, quants_at, high_at, scales_at, region.group_elements, n_elements, floats, floats_at)
    elif region.type_code == _TURBO2:
        kv_turbo.load_turbo2(arena, quants_at, scales_at, region.group_elements, n_elements, floats, floats_at)
    else:
        _load_f32(arena, quants_at, n_elements, floats, floats_at)


@inlined
def _load_f32(arena, at, n_elements, floats, floats_at):
    for idx in range(0, n_elements, 16):
        store_f32x16(floats, floats_at + idx, load_f32x16(arena, at + 4 * idx))


@inlined
def _load_f16(arena, at, n_elements, floats, floats_at):
    for idx in range(0, n_elements, 16):
        store_f32x16(floats, floats_at + idx, load_f16x16(arena, at + 2 * idx))


@inlined
def _load_bf16(arena, at, n_elements, floats, floats_at):
    for idx in range(0, n_elements, 16):
        store_f32x16(floats, floats_at + idx, load_bf16x16(arena, at + 2 * idx))


@inlined
def _load_q8_0(arena, quants_at, scales_at, n_elements, floats, floats_at):
    for block_idx in range(n_elements // _Q8_0_BLOCK):
        scale = load_f16_splat(arena, scales_at + 2 * block_idx)
        idx = block_idx * _Q8_0_BLOCK
        store_f32x16(floats, floats_at + idx, scale * load_i8x16_as_f32(arena, quants_at + idx))
        store_f32x16(floats, floats_at + idx + 16, scale * load_i8x16_as_f32(arena, quants_at + idx + 16))


# ---------------------------------------------------------------------------------------------------------
# Storers: one row of one head, float32 [head_dim] -> its bytes


@inner
def store_row(region, values, values_at, arena, page_at, head_kv_idx, row):
    """Pack one head's row, ``head_dim`` elements of the float32 array ``values`` from flat index ``values_at`` on."""
    region_at = page_at + region.begin + head_kv_idx * region.head_bytes
    quants_at = region_at + row * region.row_bytes
    high_at = region_at + region.high_offset + row * region.high_row_bytes
    scales_at = region_at + region.scale_offset + row * region.scale_row_bytes
    if region.type_code == _F16:
        _store_f16(values, values_at, region.head_dim, arena, quants_at)
    elif region.type_code == _BF16:
        _store_bf16(values, values_at, region.head_dim, arena, quants_at)
    elif region.type_code == _Q8_0:
        _store_q8_0(values, values_at, region.head_dim, arena, quants_at, scales_at)
    elif region.type_code == _Q5_1:
        kv_blocks.store_q5_1(values, values_at, region.head_dim, arena, quants_at, high_at, scales_at)
    elif region.type_code == _Q5_0:
        kv_blocks.store_q5_0(values, values_at, region.head_dim, arena, quants_at, high_at, scales_at)
    elif region.type_code == _Q4_1:
        kv_blocks.store_q4_1(values, values_at, region.head_dim, arena, quants_at, scales_at)
    elif region.type_code == _Q4_0:
        kv_blocks.store_q4_0(values, values_at, region.head_dim, arena, quants_at, scales_at)
    elif region.type_code == _IQ4_NL:
        kv_blocks.store_iq4_nl(values, values_at, region.head_dim, arena, quants_at, scales_at)
    elif region.type_code == _TURBO4:
        kv_turbo.store_turbo4(values, values_at, region.head_dim, arena, quants_at, scales_at, region.group_elements)
    elif region.type_code == _TURBO3:
        kv_turbo.store_turbo3(
            values, values_at, region.head_dim, arena, quants_at, high_at, scales_at, region.group_elements
        )
    elif region.type_code == _TURBO2:
        kv_turbo.store_turbo2(values, values_at, region.head_dim, arena, quants_at, scales_at, region.group_elements)
    else:
        _store_f32(values, values_at, region.head_dim, arena, quants_at)


@inlined
def _store_f32(values, values_at, head_dim, arena, at):
    for idx in range(0, head_dim, 16):
        store_f32x16(arena, at + 4 * idx, load_f32x16(values, values_at + idx))


@inlined
def _store_f16(values, values_at, head_dim, arena, at):
    for idx in range(0, head_dim, 16):
        store_f16x16(arena, at + 2 * idx, load_f32x16(values, values_at + idx))


@inlined
def _store_bf16(values, values_at, head_dim, arena, at):
    for idx in range(0, head_dim, 16):
        store_bf16x16(arena, at + 2 * idx, load_f32x16(values, values_at + idx))


@inlined
def _store_q8_0(values, values_at, head_dim, arena, quants_at, scales_at):
    """Scale ``d = max|x| / 127``, stored as half; quants are ``x * (1 / d)`` rounded, halves away from zero.

    The quants use the unrounded d, as llama.cpp's do. A block with a NaN or an infinity gets a scale of NaN, so
    that the fault is seen in the logits and not hidden in the cache.
    """
    zero = splat_f32x16(np.float32(0.0))
    for block_idx in range(head_dim // _Q8_0_BLOCK):
        at = values_at + block_idx * _Q8_0_BLOCK
        low = load_f32x16(values, at)
        high = load_f32x16(values, at + 16)

        is_finite = sum_lanes(low * zero + high * zero) == np.float32(0.0)
        scale = max_lanes(maximum(absolute(low), absolute(high))) / _Q8_0_LARGEST
        inverse = np.float32(0.0)
        if scale > _Q8_0_SMALLEST_SCALE:
            inverse = np.float32(1.0) / scale
        if not is_finite:
            scale = np.float32(np.nan)
            low = zero
            high = zero

        store_f16(arena, scales_at + 2 * block_idx, scale)
        quant_at = quants_at + block_idx * _Q8_0_BLOCK
        store_i8x16(arena, quant_at, _round_half_away(low * splat_f32x16(inverse)))
        store_i8x16(arena, quant_at + 16, _round_half_away(high * splat_f32x16(inverse)))


@inlined
def _round_half_away(vector):
    """Nearest int32, halves away from zero. Adding 0.5 and cutting would round 0.49999997 up."""
    whole = f32_to_i32(vector)
    rest = vector - i32_to_f32(whole)
    return whole + f32_to_i32(rest + rest)
