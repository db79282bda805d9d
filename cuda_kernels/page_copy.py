"""Copies of pages and of rows between pages, by address: slots of the arena, or page-locked host memory mapped for it.

Contiguous spans of several MiB belong to the copy engine; these kernels take what is scattered or small.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import int32, int64, types

from cuda_kernels.emit import Emitter, Value, emitted
from cuda_kernels.intrinsics import load_address, load_int
from cuda_kernels.launch import Kernel, address_of, check_array, kernel_builder
from kvs_core.errors import KernelArgumentError
from kvs_core.kv_types import PageGeometry, RegionGeometry
from kvs_core.units import ceil_div

N_THREADS = 256
PIECES_AT_ONCE = 4
"""16-byte loads that a thread has under way: reads of host memory need many in flight."""

_PIECE_BYTES = 16
_PASS_BYTES = N_THREADS * _PIECE_BYTES
_BLOCK_BYTES = _PASS_BYTES * PIECES_AT_ONCE


@emitted(types.void, types.int64, types.int64)
def copy_pieces(emit: Emitter, source: Value, target: Value) -> None:
    """16 bytes ``PIECES_AT_ONCE`` times, one pass of the block apart; everything is loaded before the first store."""
    loaded = [emit.load_stream(source, i * _PASS_BYTES, 4) for i in range(PIECES_AT_ONCE)]
    for i, piece in enumerate(loaded):
        emit.store_words(target, i * _PASS_BYTES, piece)


@emitted(types.void, types.int64, types.int64)
def copy_piece(emit: Emitter, source: Value, target: Value) -> None:
    """16 bytes."""
    emit.store_words(target, 0, emit.load_stream(source, 0, 4))


@emitted(types.void, types.int64, types.int64)
def copy_half(emit: Emitter, source: Value, target: Value) -> None:
    """2 bytes."""
    text = "{.reg .b16 h; ld.global.b16 h,[$1]; st.global.b16 [$0],h;}"
    emit.asm(text, "", "ll", [target, source], ordered=True)


@kernel_builder
def build_copy_pages_kernel() -> Kernel:
    """Blocks of one column of the grid share a page."""

    def copy_pages_kernel(sources, targets, n_bytes):
        page = int64(cuda.blockIdx.y)
        source = load_address(sources + page * 8)
        target = load_address(targets + page * 8)
        thread_at = int64(cuda.threadIdx.x) * _PIECE_BYTES

        for begin in range(int64(cuda.blockIdx.x) * _BLOCK_BYTES, n_bytes, int64(cuda.gridDim.x) * _BLOCK_BYTES):
            if begin + _BLOCK_BYTES <= n_bytes:
                copy_pieces(source + begin + thread_at, target + begin + thread_at)
            else:
                for offset in range(begin + thread_at, n_bytes, _PASS_BYTES):
                    copy_piece(source + offset, target + offset)

    return Kernel(copy_pages_kernel, [types.int64] * 3, n_threads=N_THREADS)


def copy_pages(sources: Any, targets: Any, *, page_bytes: int, blocks_per_page: int, stream: Any) -> None:
    """Copy whole pages.

    sources, targets   int64 [n_pages]    addresses that the device can read and write, 16-byte aligned; no page is both
                                          source and target of one call
    blocks_per_page    how many blocks share a page: 1 keeps the link busy with 132 pages or more at a time
    Raises             KernelArgumentError if shapes or dtypes disagree or ``page_bytes`` is not a multiple of 16.
    """
    check_array("sources", sources, np.int64, (None,))
    check_array("targets", targets, np.int64, sources.shape)
    if page_bytes % _PIECE_BYTES or blocks_per_page < 1:
        raise KernelArgumentError(
            f"copy_pages: {page_bytes} bytes by {blocks_per_page} blocks, needs multiples of {_PIECE_BYTES} by 1 up"
        )
    n_blocks = min(blocks_per_page, ceil_div(page_bytes, _BLOCK_BYTES))
    grid = (n_blocks, sources.shape[0])
    build_copy_pages_kernel().launch(grid, stream, address_of(sources), address_of(targets), page_bytes)


@kernel_builder
def build_copy_rows_kernel(page: PageGeometry) -> Kernel:
    """A block copies the rows of one region (one head's keys or values) of one pair of pages."""
    n_head_kv, v_offset = page.n_head_kv, page.v_offset
    k_bytes, v_bytes = page.k_region.n_bytes, page.v_region.n_bytes
    k_row_bytes, v_row_bytes = page.k_region.row_bytes, page.v_region.row_bytes
    k_scales, v_scales = page.k_region.scale_offset, page.v_region.scale_offset
    k_scale_row, v_scale_row = page.k_region.scale_row_bytes, page.v_region.scale_row_bytes

    def copy_rows_kernel(sources, targets, first_slots, n_slots):
        pair = int64(cuda.blockIdx.y)
        region = int32(cuda.blockIdx.x)
        first = int64(load_int(first_slots + pair * 4))
        count = int64(load_int(n_slots + pair * 4))
        is_key = region < n_head_kv
        region_at = int64(region) * k_bytes if is_key else v_offset + int64(region - n_head_kv) * v_bytes
        row_bytes = k_row_bytes if is_key else v_row_bytes
        scale_row = k_scale_row if is_key else v_scale_row
        scales_at = region_at + (k_scales if is_key else v_scales)
        source = load_address(sources + pair * 8)
        target = load_address(targets + pair * 8)

        rows_at = region_at + first * row_bytes
        for offset in range(int64(cuda.threadIdx.x) * _PIECE_BYTES, count * row_bytes, N_THREADS * _PIECE_BYTES):
            copy_piece(source + rows_at + offset, target + rows_at + offset)
        scale_rows_at = scales_at + first * scale_row
        for offset in range(int64(cuda.threadIdx.x) * 2, count * scale_row, N_THREADS * 2):
            copy_half(source + scale_rows_at + offset, target + scale_rows_at + offset)

    return Kernel(copy_rows_kernel, [types.int64] * 4, n_threads=N_THREADS)


def copy_rows(sources: Any, targets: Any, first_slots: Any, n_slots: Any, *, page: PageGeometry, stream: Any) -> None:
    """Copy some positions of pages, keys and values of every head: rows scattered into tail pages.

    sources, targets       int64 [n]    page addresses
    first_slots, n_slots   int32 [n]    which positions of the page
    Raises                 KernelArgumentError if shapes or dtypes disagree or rows are not multiples of 16 bytes.
    """
    check_array("sources", sources, np.int64, (None,))
    n = sources.shape[0]
    check_array("targets", targets, np.int64, (n,))
    check_array("first_slots", first_slots, np.int32, (n,))
    check_array("n_slots", n_slots, np.int32, (n,))
    _check_rows(page.k_region)
    _check_rows(page.v_region)
    arrays = (sources, targets, first_slots, n_slots)
    grid = (2 * page.n_head_kv, n)
    build_copy_rows_kernel(page).launch(grid, stream, *(address_of(array) for array in arrays))


def _check_rows(region: RegionGeometry) -> None:
    if region.row_bytes % _PIECE_BYTES:
        raise KernelArgumentError(f"copy_rows: rows of {region.row_bytes} bytes, needs a multiple of {_PIECE_BYTES}")
