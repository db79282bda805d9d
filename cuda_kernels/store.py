"""New key and value rows into their pages, in the cache's type. The attention kernels read them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import float32, int32, int64, types

from cuda_kernels.emit import Emitter, Value, emitted
from cuda_kernels.intrinsics import FULL_WARP, load_address, load_float, load_int, store_byte
from cuda_kernels.launch import Kernel, address_of, check_array, device_function, kernel_builder
from kvs_core.errors import KernelArgumentError
from kvs_core.kv_types import KvType, PageGeometry, RegionGeometry
from kvs_core.units import ceil_div

N_WARPS = 4
N_THREADS = 32 * N_WARPS
BLOCK_ELEMENTS = 32


@emitted(types.int32, types.float32)
def round_half_away(emit: Emitter, value: Value) -> Value:
    """Nearest integer, halves away from zero: the rounding of q8_0 blocks."""
    whole = emit.asm("cvt.rzi.f32.f32 $0,$1;", "f", "f", [value])
    rest = emit.float_subtract(value, whole)  # exact
    magnitude = emit.asm("abs.f32 $0,$1;", "f", "f", [rest])
    step = emit.asm("copysign.f32 $0,$1,$2;", "f", "ff", [value, emit.float(1.0)])
    stays = emit.float_less(magnitude, emit.float(0.5))
    nearest = emit.select(stays, whole, emit.float_add(whole, step))
    return emit.asm("cvt.rzi.s32.f32 $0,$1;", "r", "f", [nearest])


@emitted(types.void, types.int64, types.float32)
def store_half(emit: Emitter, address: Value, value: Value) -> None:
    """As float16, rounded to nearest."""
    text = "{.reg .b16 h; cvt.rn.f16.f32 h,$1; st.global.b16 [$0],h;}"
    emit.asm(text, "", "lf", [address, value], ordered=True)


@emitted(types.void, types.int64, types.float32)
def store_single(emit: Emitter, address: Value, value: Value) -> None:
    emit.store_float(address, 0, value)


def build_write_element(region: RegionGeometry) -> Any:
    """Device function ``write_element(region_at, slot, block, lane, value)``: element ``32 block + lane`` of a row.

    The 32 lanes of a warp write one block together, each with its value; lanes beyond the head have 0.
    """
    is_quantised, is_half, head_dim = region.kv_type is KvType.Q8_0, region.kv_type is KvType.F16, region.head_dim
    row_bytes, scale_row_bytes, scale_offset = region.row_bytes, region.scale_row_bytes, region.scale_offset

    @device_function
    def write_element(region_at, slot, block, lane, value):
        element = block * int32(BLOCK_ELEMENTS) + lane
        if is_quantised:
            largest = abs(value)
            for step in (16, 8, 4, 2, 1):
                largest = max(largest, cuda.shfl_xor_sync(FULL_WARP, largest, step))
            scale = largest / float32(127.0)
            inverse = float32(1.0) / scale if scale > float32(0.0) else float32(0.0)
            store_byte(region_at + slot * row_bytes + element, round_half_away(value * inverse))
            if lane == 0:
                store_half(region_at + scale_offset + slot * scale_row_bytes + 2 * block, scale)
        elif element < head_dim:
            if is_half:
                store_half(region_at + slot * row_bytes + 2 * element, value)
            else:
                store_single(region_at + slot * row_bytes + 4 * element, value)

    return write_element


@kernel_builder
def build_store_rows_kernel(region: RegionGeometry, n_head: int, first_region: int) -> Kernel:
    """A warp stores 32 elements of one row. ``first_region``: where head 0's region starts in a page."""
    n_blocks = ceil_div(region.head_dim, BLOCK_ELEMENTS)
    head_dim, page_tokens, region_bytes = region.head_dim, region.page_tokens, region.n_bytes
    write_element = build_write_element(region)

    def store_rows_kernel(rows, pages, positions, n_tokens):
        lane = int32(cuda.threadIdx.x) & int32(31)
        task = int64(cuda.blockIdx.x) * N_WARPS + (int32(cuda.threadIdx.x) >> int32(5))
        block = int32(task % n_blocks)
        head = int32(task // n_blocks % n_head)
        token = task // (n_blocks * n_head)
        if token >= n_tokens:
            return
        element = block * int32(BLOCK_ELEMENTS) + lane
        position = load_int(positions + token * 4)
        page = load_address(pages + int64(position // int32(page_tokens)) * 8)
        slot = int64(position % int32(page_tokens))

        value = float32(0.0)
        if element < head_dim:
            value = load_float(rows + ((token * n_head + head) * head_dim + element) * 4)
        write_element(page + first_region + int64(head) * region_bytes, slot, block, lane, value)

    return Kernel(store_rows_kernel, [types.int64] * 3 + [types.int32], n_threads=N_THREADS)


def store_rows(k: Any, v: Any, pages: Any, positions: Any, *, page: PageGeometry, stream: Any) -> None:
    """Write the keys and values of new tokens into their pages.

    k          float32 [n_tokens, n_head_kv, head_dim_k]   after RoPE
    v          float32 [n_tokens, n_head_kv, head_dim_v]
    pages      int64   [n_pages]                           device address of each page, by page index
    positions  int32   [n_tokens]                          all different
    Raises     KernelArgumentError if shapes or dtypes disagree, or a head size does not fit its type.
    """
    n_tokens = k.shape[0]
    check_array("k", k, np.float32, (None, page.n_head_kv, page.head_dim_k))
    check_array("v", v, np.float32, (n_tokens, page.n_head_kv, page.head_dim_v))
    check_array("pages", pages, np.int64, (None,))
    check_array("positions", positions, np.int32, (n_tokens,))
    check_regions(page)
    for rows, region, first_region in ((k, page.k_region, 0), (v, page.v_region, page.v_offset)):
        kernel = build_store_rows_kernel(region, page.n_head_kv, first_region)
        n_tasks = n_tokens * page.n_head_kv * ceil_div(region.head_dim, BLOCK_ELEMENTS)
        grid = (ceil_div(n_tasks, N_WARPS),)
        kernel.launch(grid, stream, address_of(rows), address_of(pages), address_of(positions), n_tokens)


def check_regions(page: PageGeometry) -> None:
    """Raise KernelArgumentError if a head size does not fit its type."""
    for region in (page.k_region, page.v_region):
        if region.head_dim % region.kv_type.block_elements:
            raise KernelArgumentError(
                f"store_rows: head size {region.head_dim} with {region.kv_type.value}, "
                f"needs a multiple of {region.kv_type.block_elements}"
            )
