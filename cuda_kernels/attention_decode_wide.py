"""Decode attention of wide heads without f32: 512, and latent caches. The launcher: ``attention_decode``.

Keys and values go through shared memory: up to 128 query heads read one row of a latent cache, which serves as key and
as value, and the values of a head of 512 do not fit the registers of a warp.
"""

from __future__ import annotations

from numba import cuda
from numba.cuda import float32, int32, int64, types, uint32

from cuda_kernels.attention_common import LOG2_E, partition_bounds_on_device
from cuda_kernels.emit import Emitter, Value, emitted
from cuda_kernels.intrinsics import load_int, shared_address, store_two_floats
from cuda_kernels.launch import Kernel, device_function, kernel_builder
from cuda_kernels.overlap import let_next_start, wait_for_all_before
from cuda_kernels.prefill_pieces import store_int
from cuda_kernels.wide_tiles import N_THREADS, WideFragments, WideShape
from cuda_kernels.wide_walk import build_take_query, build_walk
from kvs_core.cuda_scratch import LARGE_BEGIN
from kvs_core.kv_types import PageGeometry
from kvs_core.units import ceil_div


@emitted(types.int32, types.int32)
def warp_maximum(emit: Emitter, value: Value) -> Value:
    """Over the warp, in a register that all lanes share: the others are full."""
    return emit.asm("redux.sync.max.s32 $0,$1,0xffffffff;", "r", "r", [value], ordered=True)


@emitted(types.int32, types.int32)
def warp_minimum(emit: Emitter, value: Value) -> Value:
    return emit.asm("redux.sync.min.s32 $0,$1,0xffffffff;", "r", "r", [value], ordered=True)


def count_row_tiles(gqa_ratio: int) -> int:
    """16-row tiles of a block: no bit depends on it. Heads that one tile does not hold share what a block reads."""
    return 1 if gqa_ratio <= 16 else 2


def grid_of(page: PageGeometry, gqa_ratio: int, n_tokens: int, n_partitions: int) -> tuple[int, int]:
    """Blocks of a launch; those that read the same keys are neighbours."""
    block_rows = 16 * count_row_tiles(gqa_ratio)
    return page.n_head_kv * ceil_div(n_tokens * gqa_ratio, block_rows), n_partitions


@kernel_builder
def build_attention_decode_wide_kernel(page: PageGeometry, gqa_ratio: int) -> Kernel:
    """The kernel for one page layout and one number of query heads per KV head; without windows.

    A block reduces one partition of one KV head for 16 or 32 query rows (row = token * gqa_ratio + head of the group).
    Same arguments as ``build_attention_decode_kernel``.
    """
    n_row_tiles = count_row_tiles(gqa_ratio)
    shape = WideShape(page=page, n_row_tiles=n_row_tiles)
    tile_keys, limits_at, block_rows = shape.tile_keys, shape.limits_at, shape.block_rows
    fragments = WideFragments(page, n_row_tiles)
    take_query, walk = build_take_query(shape, fragments, gqa_ratio), build_walk(shape, fragments)
    head_dim_v, n_head_kv = page.head_dim_v, page.n_head_kv
    n_head, has_two_tiles, n_halves = n_head_kv * gqa_ratio, n_row_tiles == 2, 2 * n_row_tiles
    zeros, initial_state, join = fragments.zeros, fragments.initial_state, fragments.join
    finish = fragments.finish
    stored_sums, stored_state = fragments.stored_sums, fragments.stored_state
    store_row_0, store_row_1 = fragments.store_rows[:2]
    store_row_2, store_row_3 = fragments.store_rows[-2:]

    def attention_decode_wide_kernel(q, pages, positions, out, max_sum, n_tokens, first_partition, _window, scale):
        shared = shared_address(cuda.shared.array(0, float32, alignment=16))

        tid = int32(cuda.threadIdx.x)
        warp, lane = tid >> int32(5), tid & int32(31)
        g, t = lane >> int32(2), lane & int32(3)
        head_kv = int32(cuda.blockIdx.x) % int32(n_head_kv)
        first_row = int32(cuda.blockIdx.x) // int32(n_head_kv) * int32(block_rows)
        local_partition = int32(cuda.blockIdx.y)
        last = n_tokens * int32(gqa_ratio) - int32(1)
        first_head = head_kv * int32(gqa_ratio)
        partition_begin, partition_end = partition_bounds_on_device(first_partition + local_partition, LARGE_BEGIN)
        wait_for_all_before()

        row = min(first_row + lane % int32(block_rows), last)
        upper = load_int(positions + int64(row // int32(gqa_ratio)) * 4) + int32(1)
        upper_most, upper_least = warp_maximum(upper), warp_minimum(upper)
        begin, end = int32(partition_begin), min(int32(partition_end), upper_most)
        if end <= begin:
            return  # beyond the last key: the fold never reads this partial
        if tid < block_rows:
            store_int(uint32(shared + uint32(limits_at) + uint32(tid * 4)), upper)
        n_tiles = (end - begin + int32(tile_keys - 1)) // int32(tile_keys)

        row_0 = first_row + g
        row_1, row_2, row_3 = row_0 + int32(8), row_0 + int32(16), row_0 + int32(24)
        query = take_query(q, shared, first_row, last, first_head)
        scale_log2 = scale * float32(LOG2_E)
        running = join(zeros(), initial_state())
        running = walk(
            query,
            running,
            shared,
            pages,
            head_kv,
            begin,
            n_tiles,
            end,
            min(upper_least, end),
            scale_log2,
        )

        let_next_start()  # the fold, whose blocks would be in the way of this launch any earlier
        sums, finished = stored_sums(running), finish(stored_state(running), scale_log2)
        first_out = int64(local_partition) * n_tokens * n_head
        out_at = out + int64(int32(16) * warp + int32(2) * t) * 4
        if row_0 <= last:
            at = first_out + head_offset(row_0, first_head)
            store_row_0(out_at + at * (4 * head_dim_v), sums)
            if tid < 32 and t == 0:
                store_two_floats(max_sum + at * 8, finished[0], finished[n_halves])
        if row_1 <= last:
            at = first_out + head_offset(row_1, first_head)
            store_row_1(out_at + at * (4 * head_dim_v), sums)
            if tid < 32 and t == 0:
                store_two_floats(max_sum + at * 8, finished[1], finished[n_halves + 1])
        if has_two_tiles and row_2 <= last:
            at = first_out + head_offset(row_2, first_head)
            store_row_2(out_at + at * (4 * head_dim_v), sums)
            if tid < 32 and t == 0:
                store_two_floats(max_sum + at * 8, finished[n_halves - 2], finished[2 * n_halves - 2])
        if has_two_tiles and row_3 <= last:
            at = first_out + head_offset(row_3, first_head)
            store_row_3(out_at + at * (4 * head_dim_v), sums)
            if tid < 32 and t == 0:
                store_two_floats(max_sum + at * 8, finished[n_halves - 1], finished[2 * n_halves - 1])

    @device_function
    def head_offset(row, first_head):
        """Heads before a query row's in arrays of all heads of all tokens."""
        return int64(row) // gqa_ratio * n_head + first_head + int64(row) % gqa_ratio

    signature = [types.int64] * 5 + [types.int32] * 3 + [types.float32]
    return Kernel(
        attention_decode_wide_kernel,
        signature,
        n_threads=N_THREADS,
        min_blocks=3 if n_row_tiles == 1 else 2,
        dynamic_bytes=shape.shared_bytes,
        overlaps=True,
    )
