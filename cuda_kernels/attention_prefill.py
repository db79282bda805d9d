"""Prefill attention: many query rows against the keys of a span, on tensor cores through ``mma``.

Every query tile walks the key tiles in logical order and keeps its float32 state; at the end of a span the state is
stored and the next span takes it up again, which changes no bit. Fragments and tiles are in ``prefill_tiles``;
devices of compute capability 9.0 have ``attention_prefill_wgmma`` for most page layouts; heads of 512 and latent caches
have ``attention_prefill_wide``; up to eight tokens are ``attention_decode``'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import float32, int32, int64, types, uint32

from cuda_kernels import attention_prefill_wide as wide
from cuda_kernels.attention_common import LOG2_E, NO_WINDOW, check_heads, check_page
from cuda_kernels.attention_prefill_wgmma import BLOCK_ROWS, build_attention_prefill_wgmma_kernel
from cuda_kernels.intrinsics import (
    FULL_WARP,
    load_address,
    shared_address,
    wait_all_copies,
)
from cuda_kernels.launch import (
    SHARED_LIMIT,
    Kernel,
    address_of,
    check_array,
    device_capability,
    device_function,
    kernel_builder,
)
from cuda_kernels.prefill_copies import TileCopies
from cuda_kernels.prefill_pieces import load_query_piece, store_int, store_piece
from cuda_kernels.prefill_tiles import PIECE_ELEMENTS, PrefillFragments, SharedRows
from kvs_core.cuda_scratch import WGMMA, is_wide, prefill_kernel_name, prefill_state_floats
from kvs_core.errors import KernelArgumentError
from kvs_core.kv_types import KvType, PageGeometry
from kvs_core.units import ceil_div

N_WARPS = 4
N_THREADS = 32 * N_WARPS


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillShape:
    """Sizes that follow from the page layout alone, so that a row's bits depend on nothing else.

    f16 keys and values are copied straight into two alternating pairs of tiles. Other types arrive raw in one staging
    pair and are converted into one pair of float16 tiles:

        | queries | keys 0 | values 0 | keys 1 | values 1 |                 direct
        | queries | keys | values | raw keys, scales | raw values, scales | staged
    """

    page: PageGeometry

    @property
    def is_direct(self) -> bool:
        return self.page.type_k is KvType.F16 and self.page.type_v is KvType.F16

    @property
    def n_row_tiles(self) -> int:
        """16-row tiles of a warp: two share every key and value fragment, if the registers hold their sums."""
        return 2 if self.page.head_dim_v <= 128 else 1

    @property
    def block_rows(self) -> int:
        return 16 * self.n_row_tiles * N_WARPS

    @property
    def query_bytes(self) -> int:
        return self.block_rows * SharedRows(head_dim=self.page.head_dim_k).row_bytes

    @property
    def tile_keys(self) -> int:
        """Keys of a tile: the most that fit beside the queries."""
        return next(n for n in (64, 32, 16) if self._tile_bytes(n) + 4 * self.block_rows <= SHARED_LIMIT)

    @property
    def tile_bytes(self) -> int:
        """Shared memory of the queries and all tiles; the limit of each row follows."""
        return self._tile_bytes(self.tile_keys)

    @property
    def shared_bytes(self) -> int:
        return self.tile_bytes + 4 * self.block_rows

    def copies(self, tile_keys: int) -> tuple[TileCopies, TileCopies]:
        """Of keys and of values."""
        regions = (self.page.k_region, self.page.v_region)
        k, v = (TileCopies(region, tile_keys, N_THREADS) for region in regions)
        return k, v

    def _tile_bytes(self, tile_keys: int) -> int:
        k, v = self.copies(tile_keys)
        pair_bytes = k.tile_bytes + v.tile_bytes
        return self.query_bytes + pair_bytes + (pair_bytes if self.is_direct else k.raw_bytes + v.raw_bytes)

    @property
    def state_floats(self) -> int:
        """float32 numbers that a block stores between spans."""
        n_sums = 4 * self.n_row_tiles * (self.page.head_dim_v // 8)
        return N_THREADS * (n_sums + 4 * self.n_row_tiles)


@kernel_builder
def build_attention_prefill_kernel(page: PageGeometry, gqa_ratio: int, softcap: float, has_sinks: bool) -> Kernel:
    """The kernel for one page layout and one number of query heads per KV head, a cap of scores (0: none) and sinks.

    A block owns ``block_rows`` query rows of one KV head (row = token * gqa_ratio + head of the group), so the heads
    of a group share the tiles they read. Direct types need one barrier a tile: the next pair is copied meanwhile.
    """
    shape = PrefillShape(page=page)
    tile_keys, block_rows, is_direct = shape.tile_keys, shape.block_rows, shape.is_direct
    fragments = PrefillFragments(
        page.head_dim_k, page.head_dim_v, shape.n_row_tiles, tile_keys, gqa_ratio=gqa_ratio, softcap=softcap
    )
    k_copies, v_copies = shape.copies(tile_keys)
    head_dim_k, head_dim_v, n_head_kv, page_tokens = page.head_dim_k, page.head_dim_v, page.n_head_kv, page.page_tokens
    n_head, n_pieces = n_head_kv * gqa_ratio, head_dim_k // PIECE_ELEMENTS
    k_bytes, v_bytes, v_offset = page.k_region.n_bytes, page.v_region.n_bytes, page.v_offset
    k_tile_bytes, pair_bytes = k_copies.tile_bytes, k_copies.tile_bytes + v_copies.tile_bytes
    query_bytes, tile_bytes, warp_rows = shape.query_bytes, shape.tile_bytes, 16 * shape.n_row_tiles
    raw_at = query_bytes + pair_bytes
    raw_v_at = raw_at + k_copies.raw_bytes
    state_bytes, has_two_tiles = 4 * shape.state_floats, shape.n_row_tiles == 2
    initial_state, are_ones = fragments.initial_state, fragments.are_ones
    probabilities, new_state, factors = fragments.probabilities, fragments.new_state, fragments.factors
    stored_sums, stored_state = fragments.stored_sums, fragments.stored_state
    place_query, zeros, scores, hide = fragments.place_query, fragments.zeros, fragments.scores, fragments.hide
    softmax, rescale, accumulate = fragments.softmax, fragments.rescale, fragments.accumulate
    normalise, load_state, store_state = fragments.normalise, fragments.load_state, fragments.store_state
    normalise_with, load_sinks = fragments.normalise_with, fragments.load_sinks
    is_capped, cap = softcap > 0.0, fragments.cap
    store_row_0, store_row_1 = fragments.store_rows[:2]
    store_row_2, store_row_3 = fragments.store_rows[-2:]
    start_k = k_copies.start_direct if is_direct else k_copies.start_raw
    start_v = v_copies.start_direct if is_direct else v_copies.start_raw
    convert_k, convert_v = k_copies.convert, v_copies.convert

    def attention_prefill_kernel(
        q, pages, state, out, n_tokens, first_position, key_begin, key_end, window, scale, is_first, is_last, sinks
    ):
        shared = shared_address(cuda.shared.array(0, float32, alignment=16))
        limits_at = uint32(shared + uint32(tile_bytes))

        tid = int32(cuda.threadIdx.x)
        warp, lane = tid >> int32(5), tid & int32(31)
        g, t = lane >> int32(2), lane & int32(3)
        head_kv = int32(cuda.blockIdx.x) % int32(n_head_kv)
        row_block = int32(cuda.gridDim.x) // int32(n_head_kv) - int32(1) - int32(cuda.blockIdx.x) // int32(n_head_kv)
        first_row = row_block * int32(block_rows)  # the last rows see the most keys: they start first
        n_rows = n_tokens * int32(gqa_ratio)
        first_head = head_kv * int32(gqa_ratio)

        # keys that any row of this block sees, and keys that every row sees
        last_row = min(first_row + int32(block_rows), n_rows) - int32(1)
        upper_most = min(first_position + last_row // int32(gqa_ratio) + int32(1), key_end)
        upper_least = first_position + first_row // int32(gqa_ratio) + int32(1)
        lower_least = max(upper_least - window, key_begin)
        lower_most = first_position + last_row // int32(gqa_ratio) + int32(1) - window
        first_key = lower_least // int32(tile_keys) * int32(tile_keys)
        n_tiles = max(upper_most - first_key + int32(tile_keys - 1), int32(0)) // int32(tile_keys)

        for i in range(tid, block_rows * n_pieces, N_THREADS):
            row = min(first_row + int32(i) // int32(n_pieces), n_rows - int32(1))
            piece = int32(i) % int32(n_pieces)
            head = first_head + row % int32(gqa_ratio)
            source = q + ((int64(row) // gqa_ratio * n_head + head) * head_dim_k + piece * PIECE_ELEMENTS) * 4
            place = place_query(shared, uint32(int32(i) // int32(n_pieces)), uint32(piece))
            store_piece(place, load_query_piece(source))
        if tid < block_rows:
            # in shared memory, because few tiles need them and the registers are full
            store_int(uint32(limits_at + uint32(tid * 4)), first_position + (first_row + tid) // int32(gqa_ratio) + 1)

        sums = zeros()
        softmax_state = initial_state()
        if is_first == 0:
            stored = load_state(state + state_offset(warp, lane))
            sums = stored_sums(stored)
            softmax_state = stored_state(stored)

        query_at = uint32(shared + uint32(warp * int32(warp_rows)) * uint32(query_bytes // block_rows))
        scale_log2 = product_scale = scale * float32(LOG2_E)
        if is_capped:
            scale_log2 = float32(1.0)
        for tile in range(-1, n_tiles):
            # tile -1 only starts the first copies
            wait_all_copies()
            cuda.syncthreads()
            if not is_direct and tile >= 0:
                convert_k(uint32(shared + uint32(raw_at)), uint32(shared + uint32(query_bytes)), uint32(tid))
                convert_v(
                    uint32(shared + uint32(raw_v_at)), uint32(shared + uint32(query_bytes + k_tile_bytes)), uint32(tid)
                )
                cuda.syncthreads()
            if tile + 1 < n_tiles:
                next_key = first_key + int32(tile + 1) * int32(tile_keys)
                page_address = load_address(pages + int64(next_key // int32(page_tokens)) * 8)
                k_region = page_address + int64(head_kv) * k_bytes
                v_region = page_address + (v_offset + int64(head_kv) * v_bytes)
                slot = next_key % int32(page_tokens)
                n_valid = key_end - next_key
                if is_direct:
                    to = uint32(shared + uint32(query_bytes) + uint32((tile + 1) & 1) * uint32(pair_bytes))
                    start_k(to, k_region, slot, n_valid, uint32(tid))
                    start_v(uint32(to + uint32(k_tile_bytes)), v_region, slot, n_valid, uint32(tid))
                else:
                    start_k(uint32(shared + uint32(raw_at)), k_region, slot, n_valid, uint32(tid))
                    start_v(uint32(shared + uint32(raw_v_at)), v_region, slot, n_valid, uint32(tid))
            if tile >= 0:
                key = first_key + int32(tile) * int32(tile_keys)
                k_at = uint32(shared + uint32(query_bytes))
                if is_direct:
                    k_at = uint32(k_at + uint32(tile & 1) * uint32(pair_bytes))
                s = scores(query_at, k_at, uint32(lane))
                if is_capped:
                    s = cap(s, product_scale)
                if key + int32(tile_keys) > min(upper_least, key_end) or key < lower_most:
                    s = hide(s, key + int32(2) * t, uint32(limits_at + uint32((warp * warp_rows + g) * 4)), window)
                folded = softmax(s, softmax_state, scale_log2)
                softmax_state = new_state(folded)
                if not cuda.all_sync(FULL_WARP, are_ones(factors(folded))):  # a factor of 1 changes no bit
                    sums = rescale(sums, factors(folded))
                sums = accumulate(sums, probabilities(folded), uint32(k_at + uint32(k_tile_bytes)), uint32(lane))

        if is_last == 0:
            store_state(state + state_offset(warp, lane), sums, softmax_state)
        else:
            if has_sinks:
                of_rows = load_sinks(sinks, first_head, first_row + warp * int32(warp_rows) + g)
                sums = normalise_with(sums, softmax_state, of_rows, scale_log2)
            else:
                sums = normalise(sums, softmax_state)
            out_at = out + int64(2 * t) * 4
            row_0 = first_row + warp * int32(warp_rows) + g
            row_1, row_2, row_3 = row_0 + int32(8), row_0 + int32(16), row_0 + int32(24)
            if row_0 < n_rows:
                store_row_0(out_at + row_offset(row_0, first_head), sums)
            if row_1 < n_rows:
                store_row_1(out_at + row_offset(row_1, first_head), sums)
            if has_two_tiles and row_2 < n_rows:
                store_row_2(out_at + row_offset(row_2, first_head), sums)
            if has_two_tiles and row_3 < n_rows:
                store_row_3(out_at + row_offset(row_3, first_head), sums)

    @device_function
    def state_offset(warp, lane):
        """Bytes from the start of the state to this lane's first number."""
        return int64(cuda.blockIdx.x) * state_bytes + int64(warp) * (state_bytes // N_WARPS) + int64(lane) * 4

    @device_function
    def row_offset(row, first_head):
        """Bytes from the start of the output to a query row."""
        token = int64(row) // gqa_ratio
        return (token * n_head + first_head + int64(row) % gqa_ratio) * (4 * head_dim_v)

    signature = [types.int64] * 4 + [types.int32] * 5 + [types.float32] + [types.int32] * 2 + [types.int64]
    return Kernel(
        attention_prefill_kernel,
        signature,
        n_threads=N_THREADS,
        min_blocks=2,
        dynamic_bytes=shape.shared_bytes,
    )


def count_state_floats(page: PageGeometry, n_tokens: int, gqa_ratio: int) -> int:
    """float32 numbers of state that ``attention_prefill`` carries from span to span, whichever kernel runs."""
    return prefill_state_floats(page, page.n_head_kv * gqa_ratio, n_tokens)


@cache
def prefill_kernel(
    page: PageGeometry, gqa_ratio: int, name: str, *, softcap: float = 0.0, has_sinks: bool = False
) -> tuple[Kernel, int]:
    """The kernel of this name (MMA, WGMMA) for a page layout, and the query rows of one of its blocks."""
    if name == WGMMA:
        return build_attention_prefill_wgmma_kernel(page, gqa_ratio, softcap, has_sinks), BLOCK_ROWS
    if is_wide(page):
        return wide.build_attention_prefill_wide_kernel(page, gqa_ratio), wide.BLOCK_ROWS
    return build_attention_prefill_kernel(page, gqa_ratio, softcap, has_sinks), PrefillShape(page=page).block_rows


def attention_prefill(
    q: Any,
    pages: Any,
    state: Any,
    out: Any,
    *,
    page: PageGeometry,
    first_position: int,
    key_begin: int,
    key_end: int,
    is_first: bool,
    is_last: bool,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Any = None,
    kernel_name: str | None = None,
    stream: Any,
) -> None:
    """Attention of consecutive tokens over the keys ``key_begin`` to ``key_end - 1``; causal, queries last.

    q        float32 [n_tokens, n_head, head_dim_k]         after RoPE; token i is at ``first_position + i``
    pages    int64   [n_pages]                              device address of each page, by page index
    state    float32 [count_state_floats(page, n_tokens, gqa_ratio)]
                                                            read unless ``is_first``, written unless ``is_last``
    out      float32 [n_tokens, n_head, head_dim_v]         written if ``is_last``
    window   a token sees only the last ``window`` keys; None: all
    softcap  above 0: scores are ``softcap * tanh(score / softcap)``
    sinks    float32 [n_head]                               a score of each head that brings no value; None: none
    kernel_name  MMA or WGMMA instead of what the device runs for this page layout: for checks and measurements

    Spans of one micro-batch follow each other in logical order; a span that is not the last ends at a page boundary.
    Raises   KernelArgumentError if shapes, dtypes or the span are wrong, or the page layout has no kernel.
    """
    n_tokens, n_head, _ = q.shape
    check_array("q", q, np.float32, (None, None, page.head_dim_k))
    check_array("pages", pages, np.int64, (None,))
    check_array("out", out, np.float32, (n_tokens, n_head, page.head_dim_v))
    check_page(page, has_rule=window is not None or softcap > 0.0 or sinks is not None)
    gqa_ratio = check_heads(page, n_head)
    check_array("state", state, np.float32, (count_state_floats(page, n_tokens, gqa_ratio),))
    n_keys = first_position + n_tokens
    ends_right = key_end == n_keys if is_last else key_end < n_keys and key_end % page.page_tokens == 0
    if key_begin % page.page_tokens or not 0 <= key_begin < key_end or not ends_right:
        raise KernelArgumentError(
            f"attention_prefill: span {key_begin} to {key_end} of {n_keys} keys, "
            f"needs page boundaries of {page.page_tokens}"
        )
    name = prefill_kernel_name(page, device_capability()) if kernel_name is None else kernel_name
    if sinks is not None:
        check_array("sinks", sinks, np.float32, (n_head,))
    kernel, block_rows = prefill_kernel(page, gqa_ratio, name, softcap=softcap, has_sinks=sinks is not None)
    grid = (page.n_head_kv * ceil_div(n_tokens * gqa_ratio, block_rows),)
    kernel.launch(
        grid,
        stream,
        *(address_of(array) for array in (q, pages, state, out)),
        n_tokens,
        first_position,
        key_begin,
        key_end,
        NO_WINDOW if window is None else window,
        scale,
        int(is_first),
        int(is_last),
        0 if sinks is None else address_of(sinks),
    )
