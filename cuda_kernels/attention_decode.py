"""Decode attention: one to eight new tokens against every key, cut into partitions that each leave a partial.

The kernels are in ``attention_decode_mma``, ``attention_decode_columns`` (heads of 512), ``attention_decode_wide``
(latent caches) and ``attention_decode_plain`` (pairs with f32); the fold that combines partials in ``merge``; longer
runs of tokens are ``attention_prefill``'s.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cuda_kernels import attention_decode_columns as columns
from cuda_kernels import attention_decode_mma as mma
from cuda_kernels import attention_decode_plain as plain
from cuda_kernels import attention_decode_wide as wide
from cuda_kernels.attention_common import NO_WINDOW, check_heads, check_page
from cuda_kernels.launch import Kernel, address_of, check_array, device_multiprocessors
from cuda_kernels.partitions import partition_bounds
from kvs_core.cuda_scratch import is_wide, large_begin_of
from kvs_core.errors import KernelArgumentError
from kvs_core.kv_types import PageGeometry
from kvs_core.units import ceil_div

MAX_TOKENS = 8


def decode_kernel(
    page: PageGeometry, gqa_ratio: int, n_tokens: int, *, in_window: bool = False, softcap: float = 0.0
) -> Kernel:
    """The kernel for a page layout, a step of so many tokens, a layer with or without a window, and a soft cap of its
    scores (0: none)."""
    if columns.has_columns(page):
        return columns.build_attention_decode_columns_kernel(page, gqa_ratio)
    if is_wide(page) and mma.has_fragments(page):
        return wide.build_attention_decode_wide_kernel(page, gqa_ratio)
    if mma.has_fragments(page):
        is_narrow = mma.is_narrow(page, gqa_ratio, n_tokens)
        return mma.build_attention_decode_kernel(page, gqa_ratio, in_window, softcap, is_narrow)
    return plain.build_attention_decode_plain_kernel(page, gqa_ratio, in_window, softcap)


def decode_grid(page: PageGeometry, gqa_ratio: int, n_tokens: int, n_partitions: int) -> tuple[int, int]:
    """Blocks of a launch."""
    if columns.has_columns(page):
        return columns.grid_of(page, n_tokens * gqa_ratio, n_partitions)
    if is_wide(page) and mma.has_fragments(page):
        return wide.grid_of(page, gqa_ratio, n_tokens, n_partitions)
    if mma.has_fragments(page):
        return mma.grid_of(page, n_tokens * gqa_ratio, n_partitions)
    n_row_groups = ceil_div(n_tokens * gqa_ratio, plain.count_block_rows(page, gqa_ratio))
    return page.n_head_kv * n_row_groups, n_partitions


def starts_early(page: PageGeometry, grid: tuple[int, int]) -> bool:
    """Whether a launch may start before the kernels before it have ended: only where it has its places at once.

    A longer one would begin beside products that fill shared memory, and keep their small first-level cache, through
    which its loads pass, to its end. 8B shape on an H200: a step at 131072 tokens takes 5.64 ms instead of 6.36.
    """
    return mma.has_fragments(page) and grid[0] * grid[1] <= mma.count_min_blocks(page) * device_multiprocessors()


def attention_decode(
    q: Any,
    pages: Any,
    positions: Any,
    partials: Any,
    max_sum: Any,
    *,
    page: PageGeometry,
    first_partition: int,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    stream: Any,
) -> None:
    """Partial attention of ``n_tokens`` queries over partitions ``first_partition`` and following.

    q          float32 [n_tokens, n_head, head_dim_k]              n_tokens 1 to 8, after RoPE
    pages      int64   [n_pages]                                   device address of each page, by page index; entries
                                                                   of pages without visible keys may hold anything
    positions  int32   [n_tokens]                                  a token sees keys 0 to its position
    partials   float32 [n_partitions, n_tokens, n_head, head_dim_v]
    max_sum    float32 [n_partitions, n_tokens, n_head, 2]         maximum (log2 units), sum of 2**(score - maximum)
    window     a token sees only the last ``window`` keys, and partitions are those of window layers; positions then
               follow each other; None: all
    softcap    above 0: scores are ``softcap * tanh(score / softcap)``

    A partition that starts beyond every token's position leaves its partial unwritten; ``merge_partials`` does not
    read it. Each token gets the bits that it would get in a step of its own.
    Raises     KernelArgumentError if shapes or dtypes disagree, or the page layout has no kernel.
    """
    n_tokens, n_head, _ = q.shape
    n_partitions = partials.shape[0]
    check_array("q", q, np.float32, (None, None, page.head_dim_k))
    check_array("pages", pages, np.int64, (None,))
    check_array("positions", positions, np.int32, (n_tokens,))
    check_array("partials", partials, np.float32, (None, n_tokens, n_head, page.head_dim_v))
    check_array("max_sum", max_sum, np.float32, (n_partitions, n_tokens, n_head, 2))
    check_page(page, has_rule=window is not None or softcap > 0.0)
    if not 1 <= n_tokens <= MAX_TOKENS:
        raise KernelArgumentError(f"attention_decode: {n_tokens} tokens, needs 1 to {MAX_TOKENS}")
    last_begin, _ = partition_bounds(first_partition + n_partitions - 1, large_begin_of(page))
    if window is None and last_begin // page.page_tokens >= pages.shape[0]:
        raise KernelArgumentError(
            f"attention_decode: the last partition starts in page {last_begin // page.page_tokens}, "
            f"the table has {pages.shape[0]}"
        )
    gqa_ratio = check_heads(page, n_head)
    grid = decode_grid(page, gqa_ratio, n_tokens, n_partitions)
    arrays = (q, pages, positions, partials, max_sum)
    seen = NO_WINDOW if window is None else window
    decode_kernel(page, gqa_ratio, n_tokens, in_window=window is not None, softcap=softcap).launch(
        grid,
        stream,
        *(address_of(array) for array in arrays),
        n_tokens,
        first_partition,
        seen,
        scale,
        may_overlap=starts_early(page, grid),
    )
