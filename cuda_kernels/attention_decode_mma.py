"""The tensor-core kernel of decode attention, for f16 and q8_0 pages. The launcher is in ``attention_decode``.

Keys and values go from global memory straight into fragments (``decode_tiles``), without shared memory.
"""

from __future__ import annotations

import numpy as np
from numba import cuda
from numba.cuda import float32, int32, int64, types, uint32

from cuda_kernels.attention_common import LOG2_E, LOWEST, partition_bounds_on_device
from cuda_kernels.decode_tiles import TILE_KEYS, KeyTile, ValueTile
from cuda_kernels.intrinsics import (
    FULL_WARP,
    exp2_approx,
    fma,
    load_address,
    load_int,
    load_shared_four_floats,
    multiply,
    pack_half2,
    shared_address,
    store_two_floats,
)
from cuda_kernels.launch import Kernel, kernel_builder
from cuda_kernels.overlap import let_next_start, wait_for_previous
from kvs_core.kv_types import KvType, PageGeometry
from kvs_core.units import ceil_div

N_WARPS = 4
N_THREADS = 32 * N_WARPS
ROWS = 8  # query rows of a block: the columns of the transposed output

_BLOCK_KEYS = N_WARPS * TILE_KEYS


def count_min_blocks(page: PageGeometry) -> int:
    """Blocks of a multiprocessor that the registers leave room for: as many as cost hardly any spills."""
    if KvType.F16 in (page.type_k, page.type_v):
        return 2
    return 3 if max(page.head_dim_k, page.head_dim_v) > 128 else 4


def takes_partitions_first(page: PageGeometry) -> bool:
    """Whether neighbouring blocks take the partitions of one head, or the heads of one partition."""
    return KvType.F16 not in (page.type_k, page.type_v) and max(page.head_dim_k, page.head_dim_v) <= 128


def grid_of(page: PageGeometry, n_rows: int, n_partitions: int) -> tuple[int, int]:
    """Blocks of a launch for ``n_rows`` query rows of a KV head; those that read the same keys are neighbours."""
    n_row_groups = ceil_div(n_rows, ROWS)
    if takes_partitions_first(page):
        return n_row_groups * n_partitions, page.n_head_kv
    return page.n_head_kv * n_row_groups, n_partitions


@kernel_builder
def build_attention_decode_kernel(page: PageGeometry, gqa_ratio: int) -> Kernel:
    """The kernel for one page layout and one number of query heads per KV head.

    A block reduces one partition of one KV head for up to 8 query rows (row = token * gqa_ratio + head of the
    group); its four warps take tiles of 16 keys in turn and are combined through shared memory at the end. The
    next keys are loaded before the softmax of the current ones, the current values before their scores.
    """
    k_tile, v_tile = KeyTile(page.k_region), ValueTile(page.v_region)
    is_partition_major = takes_partitions_first(page)

    head_dim_k, head_dim_v, n_head_kv, page_tokens = page.head_dim_k, page.head_dim_v, page.n_head_kv, page.page_tokens
    n_head = n_head_kv * gqa_ratio
    k_bytes, k_row_bytes = page.k_region.n_bytes, page.k_region.row_bytes
    k_scales, k_scale_row = page.k_region.scale_offset, page.k_region.scale_row_bytes
    v_offset, v_bytes, v_row_bytes = page.v_offset, page.v_region.n_bytes, page.v_region.row_bytes
    v_scales, v_scale_row = page.v_region.scale_offset, page.v_region.scale_row_bytes
    n_groups = v_tile.n_groups
    warp_bytes = n_groups * 512
    exchange_floats = N_WARPS * n_groups * 128
    query_floats = k_tile.query_bytes // 4
    load_k, load_query, store_query = k_tile.load, k_tile.load_query, k_tile.store_query
    scores = k_tile.scores
    load_v, keep_v, accumulate, zeros = v_tile.load, v_tile.keep, v_tile.accumulate, v_tile.zeros
    rescale, store_sums, first_dim = v_tile.rescale, v_tile.store, v_tile.first_dim
    maxima_floats, limit_ints = N_WARPS * ROWS, 2 * ROWS + 2

    def attention_decode_kernel(q, pages, positions, out, max_sum, n_tokens, first_partition, window, scale):
        exchange = cuda.shared.array(exchange_floats, float32, alignment=16)
        query_words = cuda.shared.array(query_floats, float32, alignment=16)
        limits = cuda.shared.array(limit_ints, int32)
        row_max = cuda.shared.array(maxima_floats, float32)
        row_sum = cuda.shared.array(maxima_floats, float32)

        warp = int32(cuda.threadIdx.x) >> int32(5)
        lane = int32(cuda.threadIdx.x) & int32(31)
        g = lane >> int32(2)
        t = lane & int32(3)
        n_rows = n_tokens * int32(gqa_ratio)
        if is_partition_major:
            n_row_groups = (n_rows + int32(ROWS - 1)) // int32(ROWS)
            head_kv = int32(cuda.blockIdx.y)
            first_row = int32(cuda.blockIdx.x) % n_row_groups * int32(ROWS)
            local_partition = int32(cuda.blockIdx.x) // n_row_groups
        else:
            head_kv = int32(cuda.blockIdx.x) % int32(n_head_kv)
            first_row = int32(cuda.blockIdx.x) // int32(n_head_kv) * int32(ROWS)
            local_partition = int32(cuda.blockIdx.y)

        row = first_row + g
        is_valid = int32(1) if row < n_rows else int32(0)
        row = min(row, n_rows - int32(1))
        token = row // int32(gqa_ratio)
        head = head_kv * int32(gqa_ratio) + row % int32(gqa_ratio)
        partition_begin, partition_end = partition_bounds_on_device(first_partition + local_partition)
        begin = int32(partition_begin)
        # asked for before it is known to be in use, beside the position: two waits for memory become one
        page_address = load_address(pages + int64(begin // int32(page_tokens)) * 8)
        upper = load_int(positions + int64(token) * 4) + int32(1)  # a row sees keys lower <= key < upper
        lower = max(upper - window, int32(0))
        upper_most = upper
        lower_least = lower
        upper_least = upper
        lower_most = lower
        for step in (4, 8, 16):
            upper_most = max(upper_most, cuda.shfl_xor_sync(FULL_WARP, upper_most, step))
            upper_least = min(upper_least, cuda.shfl_xor_sync(FULL_WARP, upper_least, step))
            lower_most = max(lower_most, cuda.shfl_xor_sync(FULL_WARP, lower_most, step))
            lower_least = min(lower_least, cuda.shfl_xor_sync(FULL_WARP, lower_least, step))
        end = min(int32(partition_end), upper_most)
        if end <= begin:
            return  # beyond the last key: the fold never reads this partial
        first_step = max(lower_least - begin, int32(0)) // int32(_BLOCK_KEYS)
        n_steps = (end - begin + int32(_BLOCK_KEYS - 1)) // int32(_BLOCK_KEYS)

        key = begin + first_step * int32(_BLOCK_KEYS) + warp * int32(TILE_KEYS)
        if first_step > 0:
            page_address = load_address(pages + int64(key // int32(page_tokens)) * 8)
        keys_at = page_address + int64(head_kv) * k_bytes
        slot = int64(key % int32(page_tokens) + g)
        first_new = load_int(positions + int64(min(lane & int32(7), n_tokens - int32(1))) * 4)
        for step in (4, 2, 1):
            first_new = min(first_new, cuda.shfl_xor_sync(FULL_WARP, first_new, step))
        if key + int32(TILE_KEYS) <= first_new:  # not of this step: the kernels before do not write them
            k = load_k(keys_at + slot * k_row_bytes, keys_at + (k_scales + slot * k_scale_row), t)
            wait_for_previous()
        else:
            wait_for_previous()
            k = load_k(keys_at + slot * k_row_bytes, keys_at + (k_scales + slot * k_scale_row), t)
        let_next_start()

        scale_log2 = scale * float32(LOG2_E)
        query_address = uint32(shared_address(query_words) + uint32(lane * int32(16)))
        if warp == 0:
            # out of the way of the fragments: registers decide how many blocks run at a time
            store_query(query_address, load_query(q + (int64(token) * n_head + head) * (4 * head_dim_k), t, is_valid))
            limits[g], limits[ROWS + g] = lower, upper
            limits[2 * ROWS], limits[2 * ROWS + 1] = lower_least, upper_most
        cuda.syncthreads()

        sums = zeros()
        m = float32(LOWEST)
        total = float32(0.0)
        for step in range(first_step, n_steps):
            next_page = page_address
            next_key = key + int32(_BLOCK_KEYS)
            if step + 1 < n_steps:
                next_page = load_address(pages + int64(next_key // int32(page_tokens)) * 8)
            values_at = page_address + (v_offset + int64(head_kv) * v_bytes)
            slot = int64(key % int32(page_tokens) + 2 * t)
            v = load_v(values_at + slot * v_row_bytes, values_at + (v_scales + slot * v_scale_row), g)

            s0, s1, s2, s3 = scores(query_address, k, t)

            if step + 1 < n_steps:
                keys_at = next_page + int64(head_kv) * k_bytes
                slot = int64(next_key % int32(page_tokens) + g)
                k = load_k(keys_at + slot * k_row_bytes, keys_at + (k_scales + slot * k_scale_row), t)

            if key + int32(TILE_KEYS) > upper_least or key < lower_most:
                k0 = key + int32(2) * t
                low, high = limits[g], limits[ROWS + g]
                hidden = float32(-np.inf)
                s0 = s0 if k0 >= low and k0 < high else hidden
                s1 = s1 if k0 + 1 >= low and k0 + 1 < high else hidden
                s2 = s2 if k0 + 8 >= low and k0 + 8 < high else hidden
                s3 = s3 if k0 + 9 >= low and k0 + 9 < high else hidden
                # a probability of 0 does not silence a NaN in a row that nobody has written yet
                low, high = limits[2 * ROWS], limits[2 * ROWS + 1]
                v = keep_v(
                    v,
                    k0 >= low and k0 < high,
                    k0 + 1 >= low and k0 + 1 < high,
                    k0 + 8 >= low and k0 + 8 < high,
                    k0 + 9 >= low and k0 + 9 < high,
                )
            new_max = max(max(m, max(s0, s1)), max(s2, s3))
            new_max = max(new_max, cuda.shfl_xor_sync(FULL_WARP, new_max, 1))
            new_max = max(new_max, cuda.shfl_xor_sync(FULL_WARP, new_max, 2))
            shrink = exp2_approx(multiply(m - new_max, scale_log2))
            m = new_max
            shift = multiply(-m, scale_log2)
            s0 = exp2_approx(fma(s0, scale_log2, shift))
            s1 = exp2_approx(fma(s1, scale_log2, shift))
            s2 = exp2_approx(fma(s2, scale_log2, shift))
            s3 = exp2_approx(fma(s3, scale_log2, shift))
            total = fma(total, shrink, (s0 + s1) + (s2 + s3))
            if not cuda.all_sync(FULL_WARP, shrink == float32(1.0)):  # a factor of 1 changes no bit
                shrink_0 = cuda.shfl_sync(FULL_WARP, shrink, t * 8)
                shrink_1 = cuda.shfl_sync(FULL_WARP, shrink, t * 8 + 4)
                sums = rescale(sums, shrink_0, shrink_1)
            sums = accumulate(sums, pack_half2(s0, s1), pack_half2(s2, s3), v)
            page_address = next_page
            key = next_key

        total += cuda.shfl_xor_sync(FULL_WARP, total, 1)
        total += cuda.shfl_xor_sync(FULL_WARP, total, 2)
        if t == 0:
            row_max[warp * ROWS + g] = m
            row_sum[warp * ROWS + g] = total
        cuda.syncthreads()

        max_0 = row_max[2 * t]
        max_1 = row_max[2 * t + 1]
        for w in range(1, N_WARPS):
            max_0 = max(max_0, row_max[w * ROWS + 2 * t])
            max_1 = max(max_1, row_max[w * ROWS + 2 * t + 1])
        factor_0 = exp2_approx(multiply(row_max[warp * ROWS + 2 * t] - max_0, scale_log2))
        factor_1 = exp2_approx(multiply(row_max[warp * ROWS + 2 * t + 1] - max_1, scale_log2))
        exchange_at = shared_address(exchange)
        store_sums(uint32(exchange_at + uint32(warp * warp_bytes + lane * 16)), sums, factor_0, factor_1)
        if warp == 0 and t == 0 and is_valid > 0:
            best = row_max[g]
            for w in range(1, N_WARPS):
                best = max(best, row_max[w * ROWS + g])
            weight = float32(0.0)
            for w in range(N_WARPS):
                weight = fma(
                    row_sum[w * ROWS + g], exp2_approx(multiply(row_max[w * ROWS + g] - best, scale_log2)), weight
                )
            partial = int64(local_partition) * n_tokens + token
            store_two_floats(max_sum + (partial * n_head + head) * 8, multiply(best, scale_log2), weight)
        cuda.syncthreads()

        row_0 = first_row + 2 * t
        row_1 = row_0 + int32(1)
        token_0, token_1 = row_0 // int32(gqa_ratio), row_1 // int32(gqa_ratio)
        head_0 = head_kv * int32(gqa_ratio) + row_0 % int32(gqa_ratio)
        head_1 = head_kv * int32(gqa_ratio) + row_1 % int32(gqa_ratio)
        out_0 = out + ((int64(local_partition) * n_tokens + token_0) * n_head + head_0) * (4 * head_dim_v)
        out_1 = out + ((int64(local_partition) * n_tokens + token_1) * n_head + head_1) * (4 * head_dim_v)
        for group in range(warp, n_groups, N_WARPS):
            at = uint32(exchange_at + uint32(group * 512 + lane * 16))
            x0, x1, x2, x3 = load_shared_four_floats(at)
            for w in range(1, N_WARPS):
                y0, y1, y2, y3 = load_shared_four_floats(uint32(at + uint32(w * warp_bytes)))
                x0 += y0
                x1 += y1
                x2 += y2
                x3 += y3
            dim = int64(first_dim(int32(group), g))
            if row_0 < n_rows:
                store_two_floats(out_0 + dim * 4, x0, x2)
            if row_1 < n_rows:
                store_two_floats(out_1 + dim * 4, x1, x3)

    signature = [types.int64] * 5 + [types.int32] * 3 + [types.float32]
    return Kernel(
        attention_decode_kernel, signature, n_threads=N_THREADS, min_blocks=count_min_blocks(page), overlaps=True
    )
