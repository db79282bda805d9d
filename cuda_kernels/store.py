"""New key and value rows into their pages, in the cache's type (``kv_encode``). The attention kernels read them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import int32, int64, types

from cuda_kernels.emit import Emitter, Value, emitted, floats
from cuda_kernels.intrinsics import load_address, load_int
from cuda_kernels.kv_encode import BLOCK_ELEMENTS, RowEncoder, count_groups
from cuda_kernels.launch import Kernel, address_of, check_array, kernel_builder
from kvs_core.errors import KernelArgumentError
from kvs_core.kv_types import PageGeometry, RegionGeometry
from kvs_core.units import ceil_div

N_WARPS = 4
N_THREADS = 32 * N_WARPS


@kernel_builder
def build_store_rows_kernel(region: RegionGeometry, n_head: int, first_region: int) -> Kernel:
    """A warp stores one group of one row (``RowEncoder``). ``first_region``: where head 0's region starts in a page."""
    encoder = RowEncoder(region)
    n_groups, group_elements = encoder.n_groups, BLOCK_ELEMENTS * encoder.group_blocks
    head_dim, page_tokens, region_bytes = region.head_dim, region.page_tokens, region.n_bytes
    encode, load_elements = encoder.encode, build_load_elements(encoder.group_blocks)

    def store_rows_kernel(rows, pages, positions, n_tokens):
        lane = int32(cuda.threadIdx.x) & int32(31)
        task = int64(cuda.blockIdx.x) * N_WARPS + (int32(cuda.threadIdx.x) >> int32(5))
        group = int32(task % n_groups)
        head = int32(task // n_groups % n_head)
        token = task // (n_groups * n_head)
        if token >= n_tokens:
            return
        position = load_int(positions + token * 4)
        page = load_address(pages + int64(position // int32(page_tokens)) * 8)
        slot = int64(position % int32(page_tokens))

        first = group * int32(group_elements)
        row = rows + (token * n_head + head) * (4 * head_dim)
        values = load_elements(row + int64(first) * 4, int32(head_dim) - first, lane)
        encode(page + first_region + int64(head) * region_bytes, slot, group, lane, values)

    return Kernel(store_rows_kernel, [types.int64] * 3 + [types.int32], n_threads=N_THREADS)


def build_load_elements(n_blocks: int) -> Any:
    """Intrinsic ``load(address, n_elements, lane)``: elements 32 i + lane of float32, 0 from ``n_elements`` on."""

    def load_elements(emit: Emitter, address: Value, n_elements: Value, lane: Value) -> list[Value]:
        values = []
        for i in range(n_blocks):
            is_inside = emit.less(emit.add(lane, 32 * i), n_elements)
            place = emit.select(is_inside, emit.add(lane, 32 * i), emit.word(0))
            loaded = emit.load_float(emit.add(address, emit.widen(emit.multiply(place, 4))), 0)
            values.append(emit.select(is_inside, loaded, emit.float(0.0)))
        return values

    return emitted(floats(n_blocks), types.int64, types.int32, types.int32)(load_elements)


def store_rows(k: Any, v: Any, pages: Any, positions: Any, *, page: PageGeometry, stream: Any) -> None:
    """Write the keys and values of new tokens into their pages.

    k          float32 [n_tokens, n_head_kv, head_dim_k]   after RoPE
    v          float32 [n_tokens, n_head_kv, head_dim_v]   None where the page keeps values as a part of the keys
    pages      int64   [n_pages]                           device address of each page, by page index
    positions  int32   [n_tokens]                          all different
    Raises     KernelArgumentError if shapes or dtypes disagree, or a head size does not fit its type.
    """
    n_tokens = k.shape[0]
    check_array("k", k, np.float32, (None, page.n_head_kv, page.head_dim_k))
    if (v is None) != page.v_in_k:
        raise KernelArgumentError(f"store_rows: values {'missing' if v is None else 'given'} for such pages")
    regions = [(k, page.k_region, 0)]
    if v is not None:
        check_array("v", v, np.float32, (n_tokens, page.n_head_kv, page.head_dim_v))
        regions.append((v, page.v_region, page.v_offset))
    check_array("pages", pages, np.int64, (None,))
    check_array("positions", positions, np.int32, (n_tokens,))
    check_regions(page)
    for rows, region, first_region in regions:
        kernel = build_store_rows_kernel(region, page.n_head_kv, first_region)
        n_tasks = n_tokens * page.n_head_kv * count_groups(region)
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
