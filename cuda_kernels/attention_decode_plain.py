"""Decode attention in plain float32: any pair of cache types, no tensor cores, no rounding of queries or probabilities.

The path of pages that hold f32 keys or values, or values that eight lanes cannot share; and the simple twin of
``attention_decode_mma``: same arguments, same partials. float32 multiply-adds bound it, not the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numba import cuda
from numba.cuda import float32, int32, int64, types, uint32

from cuda_kernels.attention_common import LOG2_E, LOWEST, cap_scores, partition_bounds_from
from cuda_kernels.emit import Emitter, Value, emitted, floats
from cuda_kernels.intrinsics import (
    FULL_WARP,
    exp2_approx,
    load_address,
    load_float,
    load_int,
    multiply,
    shared_address,
    store_float,
    store_two_floats,
)
from cuda_kernels.kv_units import RowAt, load_four
from cuda_kernels.launch import Kernel, kernel_builder
from cuda_kernels.partitions import LARGE_KEYS
from kvs_core.cuda_scratch import is_wide
from kvs_core.kv_types import PageGeometry, RegionGeometry
from kvs_core.units import ceil_div

N_WARPS = 4
N_THREADS = 32 * N_WARPS
KEYS_AT_ONCE = 4
"""Keys whose loads are under way together in one lane."""

PASS_KEYS = 64
"""Keys of one pass of all warps over the scores: they never cross a page."""

_LANES_OF_KEY = 8


class PlainRows:
    """The first ``head_dim`` elements of rows of one region as float32, four at a time.

    Attributes that are intrinsics (``region``: address of the head's region in the page):
    dot(region, key_0 .. key_3, lane, queries)             this lane's share of 4 keys x n_rows products, key by key
    add(sums, region, key_0 .. key_3, lane, probabilities) sums + probability x value for 4 keys, in order
    zeros()                                                cleared sums of ``add``

    In ``dot`` eight lanes share a key, in ``add`` all 32 share a row. ``queries`` and ``probabilities`` are shared
    addresses of float32 [n_rows, head_dim] and [n_rows, LARGE_KEYS], the latter from the first of the four keys on.
    """

    def __init__(self, region: RegionGeometry, n_rows: int, head_dim: int) -> None:
        self.region, self.n_rows = region, n_rows
        self.n_fours = head_dim // 4
        self.n_sums = ceil_div(self.n_fours, 32) * 4 * n_rows
        u32, i32, i64 = types.uint32, types.int32, types.int64
        sums = floats(self.n_sums)
        self.dot = emitted(floats(KEYS_AT_ONCE * n_rows), i64, i32, i32, i32, i32, i32, u32)(self._dot)
        self.add = emitted(sums, sums, i64, i32, i32, i32, i32, i32, u32)(self._add)
        self.zeros = emitted(sums)(lambda emit: [emit.float(0.0)] * self.n_sums)

    def _rows_at(self, emit: Emitter, region_at: Value, keys: Sequence[Value]) -> list[RowAt]:
        return [RowAt.of(emit, self.region, region_at, emit.widen(key)) for key in keys]

    def _dot(self, emit: Emitter, region_at: Value, *rest: Value) -> list[Value]:
        *keys, lane, queries = rest
        sums = [emit.float(0.0)] * (KEYS_AT_ONCE * self.n_rows)
        rows = self._rows_at(emit, region_at, keys)
        for first in range(0, self.n_fours, _LANES_OF_KEY):
            four = emit.add(emit.bit_and(lane, _LANES_OF_KEY - 1), first)
            is_inside = None
            if first + _LANES_OF_KEY > self.n_fours:  # the surplus lanes repeat the last elements, times 0
                is_inside = emit.less(four, emit.word(self.n_fours))
                four = emit.clamp(four, 0, self.n_fours - 1)
            loaded = [load_four(emit, self.region, row, four) for row in rows]
            for r in range(self.n_rows):
                at = emit.add(queries, emit.multiply(four, 16))
                query = emit.load_shared_floats(at, 4 * r * self.region.head_dim, 4)
                if is_inside is not None:
                    query = [emit.select(is_inside, value, emit.float(0.0)) for value in query]
                for k in range(KEYS_AT_ONCE):
                    for i in range(4):
                        at_sum = k * self.n_rows + r
                        sums[at_sum] = emit.fma(loaded[k][i], query[i], sums[at_sum])
        return sums

    def _add(self, emit: Emitter, sums: list[Value], region_at: Value, *rest: Value) -> list[Value]:
        *keys, lane, probabilities = rest
        result = list(sums)
        rows = self._rows_at(emit, region_at, keys)
        weights = [emit.load_shared_floats(probabilities, 4 * r * LARGE_KEYS, 4) for r in range(self.n_rows)]
        for block in range(ceil_div(self.n_fours, 32)):
            four = emit.clamp(emit.add(lane, 32 * block), 0, self.n_fours - 1)  # surplus lanes: nobody reads their sums
            loaded = [load_four(emit, self.region, row, four) for row in rows]
            for k in range(KEYS_AT_ONCE):
                for r in range(self.n_rows):
                    for i in range(4):
                        at = (block * self.n_rows + r) * 4 + i
                        result[at] = emit.fma(loaded[k][i], weights[r][k], result[at])
        return result


def count_block_rows(page: PageGeometry, gqa_ratio: int) -> int:
    """Query rows that a block reduces together: a power of two, at most 8, or 4 of wide heads."""
    most = 4 if is_wide(page) else 8
    return next(n for n in (1, 2, 4, 8) if n >= min(gqa_ratio, most))


@kernel_builder
def build_attention_decode_plain_kernel(page: PageGeometry, gqa_ratio: int, in_window: bool, softcap: float) -> Kernel:
    """The kernel for one page layout and one number of query heads per KV head: scores, softmax, weighted sum.

    in_window   partitions are those of a window layer
    softcap     of scores, 0 for none
    """
    n_rows = count_block_rows(page, gqa_ratio)
    v_region = page.k_region if page.v_in_k else page.v_region
    k_rows, v_rows = PlainRows(page.k_region, n_rows, page.head_dim_k), PlainRows(v_region, n_rows, page.head_dim_v)
    head_dim_k, head_dim_v, n_head_kv, page_tokens = page.head_dim_k, page.head_dim_v, page.n_head_kv, page.page_tokens
    n_head = n_head_kv * gqa_ratio
    k_bytes, v_bytes, v_offset = page.k_region.n_bytes, v_region.n_bytes, 0 if page.v_in_k else page.v_offset
    query_floats, score_floats = n_rows * head_dim_k, n_rows * LARGE_KEYS
    exchange_floats = N_WARPS * n_rows * head_dim_v
    dot, add, zeros = k_rows.dot, v_rows.add, v_rows.zeros
    store_sums = build_store_sums(n_rows, head_dim_v)
    store_scores, bounds_of = build_store_scores(n_rows, softcap), partition_bounds_from(page, in_window=in_window)

    def attention_decode_plain_kernel(q, pages, positions, out, max_sum, n_tokens, first_partition, window, scale):
        queries = cuda.shared.array(query_floats, float32, alignment=16)
        scores = cuda.shared.array(score_floats, float32, alignment=16)
        exchange = cuda.shared.array(0, float32, alignment=16)

        tid = int32(cuda.threadIdx.x)
        warp, lane = tid >> int32(5), tid & int32(31)
        head_kv = int32(cuda.blockIdx.x) % int32(n_head_kv)
        first_row = int32(cuda.blockIdx.x) // int32(n_head_kv) * int32(n_rows)
        n_all_rows = n_tokens * int32(gqa_ratio)
        last_row = min(first_row + int32(n_rows), n_all_rows) - int32(1)
        upper = int32(0)
        for row in range(first_row, last_row + 1):
            upper = max(upper, load_int(positions + int64(row // gqa_ratio) * 4) + int32(1))
        partition_begin, partition_end = bounds_of(positions, first_partition + int32(cuda.blockIdx.y), window)
        begin, end = int32(partition_begin), min(int32(partition_end), upper)
        if end <= begin:
            return  # beyond the last key: the fold never reads this partial
        skipped = int32(0)
        if in_window:  # whole passes, so that every warp's keys stay its own
            first_seen = load_int(positions + int64(first_row // gqa_ratio) * 4) + int32(1) - window
            skipped = max(first_seen - begin, int32(0)) // int32(PASS_KEYS) * int32(PASS_KEYS)

        for i in range(tid, query_floats, N_THREADS):
            row = min(first_row + int32(i) // int32(head_dim_k), last_row)
            head = head_kv * int32(gqa_ratio) + row % int32(gqa_ratio)
            at = (int64(row // int32(gqa_ratio)) * n_head + head) * head_dim_k + int64(i) % head_dim_k
            queries[i] = multiply(load_float(q + at * 4), scale * float32(LOG2_E))
        cuda.syncthreads()

        queries_at, scores_at = shared_address(queries), shared_address(scores)
        n_keys = end - begin
        for first in range(skipped + warp * 16, n_keys, PASS_KEYS):
            # 4 groups of 8 lanes take 4 consecutive keys each
            key = begin + int32(first) + lane // int32(8) * int32(KEYS_AT_ONCE)
            page_address = load_address(pages + int64(min(key, end - 1) // int32(page_tokens)) * 8)
            region = page_address + int64(head_kv) * k_bytes
            last = (end - int32(1)) % int32(page_tokens) if end - key < int32(KEYS_AT_ONCE) else int32(page_tokens - 1)
            slot = min(key, end - int32(1)) % int32(page_tokens)
            products = dot(
                region,
                slot,
                min(slot + int32(1), last),
                min(slot + int32(2), last),
                min(slot + int32(3), last),
                lane,
                uint32(queries_at),
            )
            store_scores(uint32(scores_at + uint32((key - begin) * 4)), products, lane)
        cuda.syncthreads()

        for r in range(warp, n_rows, N_WARPS):
            row = min(first_row + int32(r), last_row)
            seen_end = load_int(positions + int64(row // int32(gqa_ratio)) * 4) + int32(1)
            seen_begin = seen_end - window
            largest = float32(LOWEST)
            for i in range(lane, n_keys, 32):
                if begin + i >= seen_begin and begin + i < seen_end:
                    largest = max(largest, scores[r * LARGE_KEYS + i])
            for step in (16, 8, 4, 2, 1):
                largest = max(largest, cuda.shfl_xor_sync(FULL_WARP, largest, step))
            total = float32(0.0)
            for i in range(lane, (n_keys + 15) // 16 * 16, 32):
                probability = float32(0.0)
                if i < n_keys and begin + i >= seen_begin and begin + i < seen_end:
                    probability = exp2_approx(scores[r * LARGE_KEYS + i] - largest)
                scores[r * LARGE_KEYS + i] = probability
                total += probability
            for step in (16, 8, 4, 2, 1):
                total += cuda.shfl_xor_sync(FULL_WARP, total, step)
            if lane == 0 and first_row + r <= last_row:
                head = head_kv * int32(gqa_ratio) + row % int32(gqa_ratio)
                partial = int64(cuda.blockIdx.y) * n_tokens + row // int32(gqa_ratio)
                store_two_floats(max_sum + (partial * n_head + head) * 8, largest, total)
        cuda.syncthreads()

        sums = zeros()
        for first in range(skipped + warp * KEYS_AT_ONCE, n_keys, N_WARPS * KEYS_AT_ONCE):
            key = begin + int32(first)
            page_address = load_address(pages + int64(key // int32(page_tokens)) * 8)
            region = page_address + (v_offset + int64(head_kv) * v_bytes)
            slot = key % int32(page_tokens)
            last = slot + min(end - int32(1) - key, int32(KEYS_AT_ONCE - 1))
            sums = add(
                sums,
                region,
                slot,
                min(slot + int32(1), last),
                min(slot + int32(2), last),
                min(slot + int32(3), last),
                lane,
                uint32(scores_at + uint32(first * 4)),
            )
        exchange_at = shared_address(exchange)
        store_sums(uint32(exchange_at + uint32(warp * (n_rows * head_dim_v * 4))), sums, lane)
        cuda.syncthreads()

        for i in range(tid, n_rows * head_dim_v, N_THREADS):
            row = first_row + int32(i) // int32(head_dim_v)
            if row <= last_row:
                total = exchange[i]
                for w in range(1, N_WARPS):
                    total += exchange[w * (n_rows * head_dim_v) + i]
                head = head_kv * int32(gqa_ratio) + row % int32(gqa_ratio)
                partial = int64(cuda.blockIdx.y) * n_tokens + row // int32(gqa_ratio)
                store_float(out + ((partial * n_head + head) * head_dim_v + int64(i) % head_dim_v) * 4, total)

    signature = [types.int64] * 5 + [types.int32] * 3 + [types.float32]
    return Kernel(
        attention_decode_plain_kernel, signature, n_threads=N_THREADS, min_blocks=2, dynamic_bytes=4 * exchange_floats
    )


def build_store_scores(n_rows: int, softcap: float) -> Any:
    """Intrinsic ``store(address, products, lane)``: the shares of eight lanes added, 4 keys' scores of every row.

    Products and scores are in units of log2; ``softcap`` 0: none.
    """

    def store_scores(emit: Emitter, address: Value, products: list[Value], lane: Value) -> None:
        for r in range(n_rows):
            for k in range(KEYS_AT_ONCE):
                total = products[k * n_rows + r]
                for lane_mask in (4, 2, 1):
                    total = emit.float_add(total, emit.exchange(total, lane_mask))
                products[k * n_rows + r] = total
            scores = [products[k * n_rows + r] for k in range(KEYS_AT_ONCE)]
            if softcap:
                scores = cap_scores(emit, scores, emit.float(1.0), softcap)
            words_of_row = [emit.as_word(score) for score in scores]
            emit.store_shared_words(address, 4 * r * LARGE_KEYS, words_of_row)  # eight lanes write the same

    return emitted(types.void, types.uint32, floats(KEYS_AT_ONCE * n_rows), types.int32)(store_scores)


def build_store_sums(n_rows: int, head_dim: int) -> Any:
    """Intrinsic ``store(address, sums, lane)``: one warp's sums into shared float32 [n_rows, head_dim]."""
    n_blocks = ceil_div(head_dim // 4, 32)

    def store_sums(emit: Emitter, address: Value, sums: list[Value], lane: Value) -> None:
        for block in range(n_blocks):
            four = emit.clamp(emit.add(lane, 32 * block), 0, head_dim // 4 - 1)  # surplus lanes hold the last four too
            place = emit.add(address, emit.multiply(four, 16))
            for r in range(n_rows):
                at = (block * n_rows + r) * 4
                emit.store_shared_words(place, 4 * r * head_dim, [emit.as_word(value) for value in sums[at : at + 4]])

    return emitted(types.void, types.uint32, floats(n_blocks * 4 * n_rows), types.int32)(store_sums)
