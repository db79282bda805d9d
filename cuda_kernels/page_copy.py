"""Copies of pages, by address: slots of the arena, or page-locked host memory mapped for it.

Contiguous spans of several MiB belong to the copy engine; these kernels take what is scattered or small.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import int64, types

from cuda_kernels.emit import Emitter, Value, emitted
from cuda_kernels.intrinsics import load_address
from cuda_kernels.launch import Kernel, address_of, check_array, kernel_builder
from kvs_core.errors import KernelArgumentError
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
