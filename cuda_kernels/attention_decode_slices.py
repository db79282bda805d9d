"""Decode attention of heads of 512 on tensor cores, for pairs of types without f32. Launcher: ``attention_decode``.

Keys and values go from global memory straight into fragments, as in ``attention_decode_mma``; here the four warps of a
block take the same keys and a quarter of their elements each (``decode_slices``).
"""

from __future__ import annotations

from numba import cuda
from numba.cuda import float32, int32, int64, types, uint32

from cuda_kernels.attention_common import LOG2_E, LOWEST, partition_bounds_on_device
from cuda_kernels.attention_decode_mma import ROWS, divide, page_at
from cuda_kernels.decode_codes import fill_nothing, table_of
from cuda_kernels.decode_slices import N_SLICES, SLICE_DIM, KeySlice, ValueSlice
from cuda_kernels.decode_softmax import TileSoftmax
from cuda_kernels.decode_tiles import TILE_KEYS
from cuda_kernels.emit import Emitter, Value, emitted, floats
from cuda_kernels.intrinsics import FULL_WARP, load_int, multiply, shared_address, store_two_floats
from cuda_kernels.launch import Kernel, kernel_builder
from cuda_kernels.overlap import wait_for_previous
from kvs_core.kv_types import KvType, PageGeometry
from kvs_core.units import ceil_div

N_WARPS = N_SLICES
N_THREADS = 32 * N_WARPS

_SMALL_BITS = 6  # types of fewer bits an element take 32 keys at a time


def takes_slices(page: PageGeometry) -> bool:
    """Whether this kernel takes the page: rows of four slices, no f32, values of their own."""
    has_slices = page.head_dim_k == page.head_dim_v == N_SLICES * SLICE_DIM
    return has_slices and not page.v_in_k and KvType.F32 not in (page.type_k, page.type_v)


def count_subs(page: PageGeometry) -> int:
    """Tiles of 16 keys that a block takes at a time."""
    bits = max(8 * region.row_bytes // region.head_dim for region in (page.k_region, page.v_region))
    return 2 if bits < _SMALL_BITS else 1


def grid_of(page: PageGeometry, n_rows: int, n_partitions: int) -> tuple[int, int]:
    """Blocks of a launch for ``n_rows`` query rows of a KV head; those that read the same keys are neighbours."""
    return page.n_head_kv * ceil_div(n_rows, ROWS), n_partitions


@kernel_builder
def build_attention_decode_slices_kernel(page: PageGeometry, gqa_ratio: int) -> Kernel:
    """The kernel for one page layout and one number of query heads per KV head; without windows.

    A block reduces one partition of one KV head for up to 8 query rows (row = token * gqa_ratio + head of the group).
    Each warp multiplies its slice of the keys, the shares of a score are added through shared memory in the order of
    the warps, and every warp makes the same softmax for its slice of the values. There is one barrier for a tile: two
    places for shares take turns.
    """
    n_subs = count_subs(page)
    k_slice, v_slice = KeySlice(page.k_region, n_subs), ValueSlice(page.v_region, n_subs)
    softmax = TileSoftmax(n_subs, 0.0)
    tables = list(
        dict.fromkeys(
            table for table in (table_of(kind, N_THREADS) for kind in (page.type_k, page.type_v)) if table is not None
        )
    )
    head_dim, n_head_kv, page_tokens = page.head_dim_k, page.n_head_kv, page.page_tokens
    n_head, tile_keys = n_head_kv * gqa_ratio, n_subs * TILE_KEYS
    k_bytes, v_bytes, v_offset = page.k_region.n_bytes, page.v_region.n_bytes, page.v_offset
    query_bytes = k_slice.query_bytes
    query_floats, limit_ints = N_WARPS * query_bytes // 4, 2 * ROWS + 2
    share_bytes = 512 * n_subs
    place_bytes = N_WARPS * share_bytes
    share_floats = 2 * place_bytes // 4
    store_share, add_shares = build_exchange(n_subs)
    load_k, load_query, store_query = k_slice.load, k_slice.load_query, k_slice.store_query
    scores_of = k_slice.scores
    load_v, keep_v, accumulate, zeros = v_slice.load, v_slice.keep, v_slice.accumulate, v_slice.zeros
    rescale, store_row_0, store_row_1 = v_slice.rescale, v_slice.store_row_0, v_slice.store_row_1
    hide, maxima_of, shrinks_of, weigh = softmax.hide, softmax.maxima, softmax.shrinks, softmax.weigh
    add_up, pack, total_of = softmax.add_up, softmax.pack, softmax.total
    fill_first, fill_second = (*(table.fill for table in tables), fill_nothing, fill_nothing)[:2]
    second_at = tables[0].n_bytes if len(tables) == 2 else 0

    def attention_decode_slices_kernel(q, pages, positions, out, max_sum, n_tokens, first_partition, _window, scale):
        levels = cuda.shared.array(0, float32, alignment=16)
        shares = cuda.shared.array(share_floats, float32, alignment=16)
        query_words = cuda.shared.array(query_floats, float32, alignment=16)
        limits = cuda.shared.array(limit_ints, int32, alignment=16)

        warp = int32(cuda.threadIdx.x) >> int32(5)
        lane = int32(cuda.threadIdx.x) & int32(31)
        g, t = lane >> int32(2), lane & int32(3)
        n_rows = int32(n_tokens * int32(gqa_ratio))
        row_group, head_kv = divide(cuda.blockIdx.x, n_head_kv)
        local_partition = int32(cuda.gridDim.y - 1 - cuda.blockIdx.y)  # the largest ones first
        first_row = int32(row_group * int32(ROWS))

        is_valid = int32(1) if first_row + g < n_rows else int32(0)
        token, head = divide(min(int32(first_row + g), int32(n_rows - 1)), gqa_ratio)
        head = int32(head + head_kv * int32(gqa_ratio))
        partition_begin, partition_end = partition_bounds_on_device(first_partition + local_partition)
        key = int32(partition_begin)
        page_address, slot = page_at(pages, key, page_tokens)
        upper = load_int(positions + int64(token) * 4) + int32(1)
        upper_most = upper
        upper_least = upper
        for step in (4, 8, 16):
            upper_most = max(upper_most, cuda.shfl_xor_sync(FULL_WARP, upper_most, step))
            upper_least = min(upper_least, cuda.shfl_xor_sync(FULL_WARP, upper_least, step))
        end = int32(min(int32(partition_end), upper_most))
        if end <= key:
            return  # beyond the last key: the fold never reads this partial
        k_head, v_head = int64(head_kv) * k_bytes, v_offset + int64(head_kv) * v_bytes
        first_new = load_int(positions + int64(min(lane & int32(7), n_tokens - int32(1))) * 4)
        for step in (4, 2, 1):
            first_new = min(first_new, cuda.shfl_xor_sync(FULL_WARP, first_new, step))
        is_old = key + int32(tile_keys) <= first_new  # not of this step: the kernels before do not write them
        if not is_old:
            wait_for_previous()
        k = load_k(page_address + k_head, slot, lane, warp)
        v = load_v(page_address + v_head, slot, lane, warp)
        if is_old:
            wait_for_previous()

        levels_at = uint32(shared_address(levels))
        k_column = uint32(levels_at + uint32(lane * int32(4)))  # this lane's in the level table
        v_column = uint32(k_column + uint32(second_at))
        query_address = uint32(shared_address(query_words) + uint32(warp * int32(query_bytes) + lane * int32(16)))
        query_row = q + ((int64(token) * n_head + head) * head_dim + int64(warp) * SLICE_DIM) * 4
        store_query(query_address, load_query(query_row, t, is_valid))
        if warp == 0:
            limits[g], limits[ROWS + g] = int32(0), upper
            limits[2 * ROWS], limits[2 * ROWS + 1] = int32(0), upper_most
        fill_first(levels_at, int32(cuda.threadIdx.x))
        fill_second(uint32(levels_at + uint32(second_at)), int32(cuda.threadIdx.x))
        cuda.syncthreads()

        scale_log2 = scale * float32(LOG2_E)
        limits_at = uint32(shared_address(limits) + uint32(t * int32(8)))
        shares_at = uint32(shared_address(shares) + uint32(lane * int32(16)))
        own_at = uint32(shares_at + uint32(warp * int32(share_bytes)))
        place = uint32(0)
        sums = zeros()
        maxima = (float32(LOWEST), float32(LOWEST))  # of query rows 2t and 2t + 1
        totals = (float32(0.0), float32(0.0))
        while key < end:
            next_page, next_slot, next_key = page_address, slot, int32(key + int32(tile_keys))
            if next_key < end:
                next_page, next_slot = page_at(pages, next_key, page_tokens)
            store_share(uint32(own_at + place), scores_of(query_address, k, lane, k_column))
            if next_key < end:
                k = load_k(next_page + k_head, next_slot, lane, warp)
            cuda.syncthreads()
            scores = add_shares(uint32(shares_at + place))
            place = uint32(place ^ uint32(place_bytes))

            if key + int32(tile_keys) > upper_least:
                scores = hide(scores, int32(key + g), limits_at)
                # a probability of 0 does not silence a NaN in a row that nobody has written yet
                v = keep_v(v, int32(key + int32(2) * t), limits[2 * ROWS], limits[2 * ROWS + 1])
            new_maxima = maxima_of(scores, maxima, scale_log2)
            shrinks = shrinks_of(maxima, new_maxima, scale_log2)
            maxima = new_maxima
            probabilities = weigh(scores, maxima, scale_log2)
            totals = add_up(probabilities, totals, shrinks)
            is_kept = shrinks[0] == float32(1.0) and shrinks[1] == float32(1.0)
            if not cuda.all_sync(FULL_WARP, is_kept):  # a factor of 1 changes no bit
                sums = rescale(sums, shrinks[0], shrinks[1])
            sums = accumulate(sums, pack(probabilities), v, lane, v_column)

            if next_key < end:
                v = load_v(next_page + v_head, next_slot, lane, warp)
            page_address, slot, key = next_page, next_slot, next_key

        totals = total_of(totals)
        row_0, row_1 = int32(first_row + int32(2) * t), int32(first_row + int32(2) * t + int32(1))
        token_0, head_0 = divide(row_0, gqa_ratio)
        token_1, head_1 = divide(row_1, gqa_ratio)
        first_head = (int64(local_partition) * n_tokens * n_head) + int64(head_kv) * gqa_ratio
        at_0 = first_head + int64(token_0) * n_head + head_0
        at_1 = first_head + int64(token_1) * n_head + head_1
        slice_out = out + int64(warp) * (4 * SLICE_DIM)
        if row_0 < n_rows:
            store_row_0(slice_out + at_0 * (4 * head_dim), sums, g)
            if warp == 0 and g == 0:
                store_two_floats(max_sum + at_0 * 8, multiply(maxima[0], scale_log2), totals[0])
        if row_1 < n_rows:
            store_row_1(slice_out + at_1 * (4 * head_dim), sums, g)
            if warp == 0 and g == 0:
                store_two_floats(max_sum + at_1 * 8, multiply(maxima[1], scale_log2), totals[1])

    signature = [types.int64] * 5 + [types.int32] * 3 + [types.float32]
    return Kernel(
        attention_decode_slices_kernel,
        signature,
        n_threads=N_THREADS,
        min_blocks=3,
        dynamic_bytes=sum(table.n_bytes for table in tables),
        overlaps=True,
    )


def build_exchange(n_subs: int) -> tuple[object, object]:
    """Intrinsics ``store(address, scores)`` and ``add(address)``: a warp's shares of the scores, and those of all."""
    scores = floats(4 * n_subs)

    def store(emit: Emitter, address: Value, values: list[Value]) -> None:
        for sub in range(n_subs):
            emit.store_shared_words(address, 512 * sub, [emit.as_word(value) for value in values[4 * sub :][:4]])

    def add(emit: Emitter, address: Value) -> list[Value]:
        result = []
        for sub in range(n_subs):
            total = emit.load_shared_floats(address, 512 * sub, 4)
            for warp in range(1, N_WARPS):
                share = emit.load_shared_floats(address, 512 * (warp * n_subs + sub), 4)
                total = [emit.float_add(a, b) for a, b in zip(total, share, strict=True)]
            result += total
        return result

    return emitted(types.void, types.uint32, scores)(store), emitted(scores, types.uint32)(add)
