"""Reading and writing the rows of each KV type: one loader and one storer per type, nothing else to add.

The type is looked up per tile or row at run time, so kernels are compiled once for all pairs of types. Where rows lie is decided in ``kvs_core.kv_types``; this file knows what their bytes mean.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# Compiled bodies work on values that Python's type system cannot describe.

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
from numba import njit

from kvs_core.cpu.simd import (
    absolute,
    f32_to_i32,
    i32_to_f32,
    load_f16,
    load_f16x16,
    load_f32x16,
    load_i8x16_as_f32,
    max_lanes,
    maximum,
    splat_f32x16,
    store_f16,
    store_f16x16,
    store_f32x16,
    store_i8x16,
)
from kvs_core.kv_types import KvType, PageGeometry, RegionGeometry

_F32 = 0
_F16 = 1
_Q8_0 = 2
_TYPE_CODES = {KvType.F32: _F32, KvType.F16: _F16, KvType.Q8_0: _Q8_0}

# Kernels see a page geometry as one int64 array. These index it; the seven numbers of a region follow K or V.
PAGE_TOKENS = 0
N_HEAD_KV = 1
PAGE_BYTES = 2
K = 3
V = 10

HEAD_DIM = 0
_TYPE = 1
_REGION_AT = 2  # bytes from the page's start to the region of head 0
_REGION_BYTES = 3
_ROW_BYTES = 4
_SCALE_OFFSET = 5
_SCALE_ROW_BYTES = 6

_Q8_0_BLOCK = 32
_Q8_0_LARGEST = np.float32(127.0)
# Far below half's range (such a scale is stored as 0), far above the floats whose reciprocal overflows.
_Q8_0_SMALLEST_SCALE = np.float32(1e-30)


@lru_cache(maxsize=64)
def layout_of(geometry: PageGeometry) -> npt.NDArray[np.int64]:
    """The numbers of ``geometry`` that kernels need, int64 [17], read-only."""

    def region(geometry: RegionGeometry, region_at: int) -> list[int]:
        return [
            geometry.head_dim,
            _TYPE_CODES[geometry.kv_type],
            region_at,
            geometry.n_bytes,
            geometry.row_bytes,
            geometry.scale_offset,
            geometry.scale_row_bytes,
        ]

    numbers = [geometry.page_tokens, geometry.n_head_kv, geometry.page_bytes]
    numbers += region(geometry.k_region, 0) + region(geometry.v_region, geometry.v_offset)
    layout = np.array(numbers, dtype=np.int64)
    layout.flags.writeable = False
    return layout


# ---------------------------------------------------------------------------------------------------------
# Loaders: n_rows consecutive rows of one head -> float32 [n_rows, head_dim]


@njit(nogil=True)
def load_rows(layout, side, arena, page_at, head_kv_idx, row, n_rows, floats, floats_at):
    """Unpack consecutive rows of one head into ``floats[floats_at:]``, row after row.

    layout     from ``layout_of``; ``side`` is K or V
    arena      uint8 [n_bytes]; ``page_at`` is the byte where the page starts
    row        first row inside the page
    floats     float32 [n]; ``n_rows * head_dim`` elements are written
    """
    region_at = page_at + layout[side + _REGION_AT] + head_kv_idx * layout[side + _REGION_BYTES]
    quants_at = region_at + row * layout[side + _ROW_BYTES]
    scales_at = region_at + layout[side + _SCALE_OFFSET] + row * layout[side + _SCALE_ROW_BYTES]
    n_elements = n_rows * layout[side + HEAD_DIM]
    type_code = layout[side + _TYPE]
    if type_code == _F16:
        _load_f16(arena, quants_at, n_elements, floats, floats_at)
    elif type_code == _Q8_0:
        _load_q8_0(arena, quants_at, scales_at, n_elements, floats, floats_at)
    else:
        _load_f32(arena, quants_at, n_elements, floats, floats_at)


@njit(nogil=True)
def _load_f32(arena, at, n_elements, floats, floats_at):
    for idx in range(0, n_elements, 16):
        store_f32x16(floats, floats_at + idx, load_f32x16(arena, at + 4 * idx))


@njit(nogil=True)
def _load_f16(arena, at, n_elements, floats, floats_at):
    for idx in range(0, n_elements, 16):
        store_f32x16(floats, floats_at + idx, load_f16x16(arena, at + 2 * idx))


@njit(nogil=True)
def _load_q8_0(arena, quants_at, scales_at, n_elements, floats, floats_at):
    for block_idx in range(n_elements // _Q8_0_BLOCK):
        scale = splat_f32x16(load_f16(arena, scales_at + 2 * block_idx))
        idx = block_idx * _Q8_0_BLOCK
        store_f32x16(floats, floats_at + idx, scale * load_i8x16_as_f32(arena, quants_at + idx))
        store_f32x16(floats, floats_at + idx + 16, scale * load_i8x16_as_f32(arena, quants_at + idx + 16))


# ---------------------------------------------------------------------------------------------------------
# Storers: one row of one head, float32 [head_dim] -> its bytes


@njit(nogil=True)
def store_row(layout, side, values, values_at, arena, page_at, head_kv_idx, row):
    """Pack one head's row, the elements of the float32 array ``values`` from flat index ``values_at`` on."""
    region_at = page_at + layout[side + _REGION_AT] + head_kv_idx * layout[side + _REGION_BYTES]
    quants_at = region_at + row * layout[side + _ROW_BYTES]
    scales_at = region_at + layout[side + _SCALE_OFFSET] + row * layout[side + _SCALE_ROW_BYTES]
    head_dim = layout[side + HEAD_DIM]
    type_code = layout[side + _TYPE]
    if type_code == _F16:
        _store_f16(values, values_at, head_dim, arena, quants_at)
    elif type_code == _Q8_0:
        _store_q8_0(values, values_at, head_dim, arena, quants_at, scales_at)
    else:
        _store_f32(values, values_at, head_dim, arena, quants_at)


@njit(nogil=True)
def _store_f32(values, values_at, head_dim, arena, at):
    for idx in range(0, head_dim, 16):
        store_f32x16(arena, at + 4 * idx, load_f32x16(values, values_at + idx))


@njit(nogil=True)
def _store_f16(values, values_at, head_dim, arena, at):
    for idx in range(0, head_dim, 16):
        store_f16x16(arena, at + 2 * idx, load_f32x16(values, values_at + idx))


@njit(nogil=True, error_model="numpy")
def _store_q8_0(values, values_at, head_dim, arena, quants_at, scales_at):
    """Scale ``d = max|x| / 127``, stored as half; quants are ``x / d`` rounded, halves away from zero.

    The quants use the unrounded d, as llama.cpp does. A block with a NaN or an infinity keeps a scale that is
    not finite, so the fault is seen in the logits and not hidden in the cache.
    """
    for block_idx in range(head_dim // _Q8_0_BLOCK):
        at = values_at + block_idx * _Q8_0_BLOCK
        low = load_f32x16(values, at)
        high = load_f32x16(values, at + 16)

        zero = splat_f32x16(np.float32(0.0))
        is_finite = max_lanes(absolute(low * zero + high * zero)) == np.float32(0.0)
        scale = max_lanes(maximum(absolute(low), absolute(high))) / _Q8_0_LARGEST
        inverse = np.float32(1.0) / scale if scale > _Q8_0_SMALLEST_SCALE else np.float32(0.0)
        if not is_finite:
            scale = np.float32(np.nan)
            low = zero
            high = zero

        store_f16(arena, scales_at + 2 * block_idx, scale)
        quant_at = quants_at + block_idx * _Q8_0_BLOCK
        store_i8x16(arena, quant_at, _round_half_away(low * splat_f32x16(inverse)))
        store_i8x16(arena, quant_at + 16, _round_half_away(high * splat_f32x16(inverse)))


@njit(nogil=True)
def _round_half_away(vector):
    """Nearest int32, halves away from zero. Adding 0.5 and cutting would round 0.49999997 up."""
    whole = f32_to_i32(vector)
    rest = vector - i32_to_f32(whole)
    return whole + f32_to_i32(rest + rest)
