"""Prefill attention of wide heads: 512, and latent caches. The launcher: ``attention_prefill``.

The state between spans is as large as the other kernels': sums of every row, and eight numbers a row for the softmax.
"""

from __future__ import annotations

from numba import cuda
from numba.cuda import float32, int32, int64, types, uint32

from cuda_kernels.attention_common import LOG2_E
from cuda_kernels.intrinsics import shared_address
from cuda_kernels.launch import Kernel, device_function, kernel_builder
from cuda_kernels.prefill_pieces import store_int
from cuda_kernels.wide_tiles import N_THREADS, N_WARPS, WideFragments, WideShape
from cuda_kernels.wide_walk import build_take_query, build_walk
from kvs_core.kv_types import PageGeometry

N_ROW_TILES = 2
BLOCK_ROWS = 16 * N_ROW_TILES


@kernel_builder
def build_attention_prefill_wide_kernel(page: PageGeometry, gqa_ratio: int) -> Kernel:
    """The kernel for one page layout and one number of query heads per KV head; without windows and sinks.

    A block owns 32 query rows of one KV head (row = token * gqa_ratio + head of the group). Same arguments as
    ``build_attention_prefill_kernel``.
    """
    shape = WideShape(page=page, n_row_tiles=N_ROW_TILES)
    tile_keys, limits_at = shape.tile_keys, shape.limits_at
    fragments = WideFragments(page, N_ROW_TILES)
    take_query, walk = build_take_query(shape, fragments, gqa_ratio), build_walk(shape, fragments)
    head_dim_v, n_head_kv = page.head_dim_v, page.n_head_kv
    n_head, n_sums = n_head_kv * gqa_ratio, fragments.n_sums
    state_bytes = 4 * (N_THREADS * n_sums + 32 * (fragments.n_state - n_sums))
    softmax_at = 4 * N_THREADS * n_sums
    zeros, initial_state, join = fragments.zeros, fragments.initial_state, fragments.join
    normalise = fragments.normalise
    load_sums, load_softmax = fragments.load_sums, fragments.load_softmax
    store_sums, store_softmax = fragments.store_sums, fragments.store_softmax
    stored_sums, stored_state = fragments.stored_sums, fragments.stored_state
    store_row_0, store_row_1, store_row_2, store_row_3 = fragments.store_rows

    def attention_prefill_wide_kernel(
        q, pages, state, out, n_tokens, first_position, key_begin, key_end, _window, scale, is_first, is_last, _sinks
    ):
        shared = shared_address(cuda.shared.array(0, float32, alignment=16))

        tid = int32(cuda.threadIdx.x)
        warp, lane = tid >> int32(5), tid & int32(31)
        g, t = lane >> int32(2), lane & int32(3)
        head_kv = int32(cuda.blockIdx.x) % int32(n_head_kv)
        row_block = int32(cuda.gridDim.x) // int32(n_head_kv) - int32(1) - int32(cuda.blockIdx.x) // int32(n_head_kv)
        first_row = row_block * int32(BLOCK_ROWS)  # the last rows see the most keys: they start first
        n_rows = n_tokens * int32(gqa_ratio)
        first_head = head_kv * int32(gqa_ratio)

        # where the keys end that any row of this block sees, and those that every row sees
        last_row = min(first_row + int32(BLOCK_ROWS), n_rows) - int32(1)
        upper_most = min(first_position + last_row // int32(gqa_ratio) + int32(1), key_end)
        upper_least = first_position + first_row // int32(gqa_ratio) + int32(1)
        n_tiles = max(upper_most - key_begin + int32(tile_keys - 1), int32(0)) // int32(tile_keys)

        if tid < BLOCK_ROWS:
            limit = first_position + (first_row + tid) // int32(gqa_ratio) + int32(1)
            store_int(uint32(shared + uint32(limits_at) + uint32(tid * 4)), limit)
        row_0 = first_row + g
        row_1, row_2, row_3 = row_0 + int32(8), row_0 + int32(16), row_0 + int32(24)
        last = n_rows - int32(1)
        query = take_query(q, shared, first_row, last, first_head)
        # sums of every warp, then the softmax state that all warps have alike
        state_at = state + int64(cuda.blockIdx.x) * state_bytes + int64(lane) * 4
        sums_at = state_at + int64(warp) * (softmax_at // N_WARPS)
        running = join(zeros(), initial_state())
        if is_first == 0:
            running = join(load_sums(sums_at), load_softmax(state_at + softmax_at))

        running = walk(
            query,
            running,
            shared,
            pages,
            head_kv,
            key_begin,
            n_tiles,
            key_end,
            min(upper_least, key_end),
            scale * float32(LOG2_E),
        )

        sums, softmax_state = stored_sums(running), stored_state(running)
        if is_last == 0:
            store_sums(sums_at, sums)
            if warp == 0:
                store_softmax(state_at + softmax_at, softmax_state)
        else:
            sums = normalise(sums, softmax_state)
            out_at = out + int64(int32(16) * warp + int32(2) * t) * 4
            if row_0 < n_rows:
                store_row_0(out_at + row_offset(row_0, first_head) * (4 * head_dim_v), sums)
            if row_1 < n_rows:
                store_row_1(out_at + row_offset(row_1, first_head) * (4 * head_dim_v), sums)
            if row_2 < n_rows:
                store_row_2(out_at + row_offset(row_2, first_head) * (4 * head_dim_v), sums)
            if row_3 < n_rows:
                store_row_3(out_at + row_offset(row_3, first_head) * (4 * head_dim_v), sums)

    @device_function
    def row_offset(row, first_head):
        """Heads before a query row's in arrays of all heads."""
        return int64(row) // gqa_ratio * n_head + first_head + int64(row) % gqa_ratio

    signature = [types.int64] * 4 + [types.int32] * 5 + [types.float32] + [types.int32] * 2 + [types.int64]
    return Kernel(
        attention_prefill_wide_kernel,
        signature,
        n_threads=N_THREADS,
        min_blocks=2,
        dynamic_bytes=shape.shared_bytes,
    )
