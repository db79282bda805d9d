"""The tensor-core kernel of decode attention, for every pair of types without f32. The launcher: ``attention_decode``.

Keys and values go from global memory straight into fragments (``decode_tiles``); shared memory holds level tables.
"""

from __future__ import annotations

from numba import cuda
from numba.cuda import float32, int32, int64, types, uint32

from cuda_kernels.attention_common import LOG2_E, LOWEST, divide, partition_bounds_from
from cuda_kernels.decode_codes import ExponentTable, LevelTable, fill_nothing, table_of, word_elements
from cuda_kernels.decode_softmax import TileSoftmax
from cuda_kernels.decode_tiles import TILE_KEYS, KeyTile, are_keys_apart
from cuda_kernels.decode_values import ValueTile
from cuda_kernels.intrinsics import (
    FULL_WARP,
    exp2_approx,
    fma,
    load_address,
    load_int,
    load_shared_four_floats,
    multiply,
    shared_address,
    store_float,
    store_two_floats,
)
from cuda_kernels.launch import Kernel, device_function, kernel_builder
from cuda_kernels.overlap import let_next_start, wait_for_all_before
from kvs_core.kv_types import KvType, PageGeometry
from kvs_core.units import ceil_div

N_WARPS = 4
N_THREADS = 32 * N_WARPS
ROWS = 8  # query rows of a block: the columns of the transposed output

SMALL_BITS = 6  # types of fewer bits an element take 32 keys a warp: 16 are too few bytes on their way
_WIDE = (KvType.F16, KvType.BF16)


def count_subs(page: PageGeometry) -> int:
    """Tiles of 16 keys that a warp loads together."""
    bits = max(
        8 * region.n_bytes // (region.page_tokens * region.head_dim) for region in (page.k_region, page.v_region)
    )
    return 2 if bits < SMALL_BITS and max(page.head_dim_k, page.head_dim_v) <= 128 else 1


def count_min_blocks(page: PageGeometry) -> int:
    """Blocks of a multiprocessor that the registers leave room for: as many as cost hardly any spills."""
    if page.type_k in _WIDE or page.type_v in _WIDE:
        return 2
    return 3 if max(page.head_dim_k, page.head_dim_v) > 128 else 4


def takes_partitions_first(page: PageGeometry) -> bool:
    """Whether neighbouring blocks take the partitions of one head, or the heads of one partition."""
    is_wide = page.type_k in _WIDE or page.type_v in _WIDE
    return not is_wide and max(page.head_dim_k, page.head_dim_v) <= 128 and count_subs(page) == 1


def loads_values_early(page: PageGeometry) -> bool:
    """Whether values are loaded as soon as those before them are used, or a little later: registers are short."""
    return max(page.head_dim_k, page.head_dim_v) <= 128 or KvType.Q8_0 not in (page.type_k, page.type_v)


def shares_queries(page: PageGeometry) -> bool:
    """Whether all warps of a block load its queries, or one: unquantised types, and q8_0 up to 128, lose by it."""
    return page.type_k.is_quantised and (page.type_k is not KvType.Q8_0 or page.head_dim_k > 128)


def is_narrow(page: PageGeometry, gqa_ratio: int, n_tokens: int) -> bool:
    """Whether four columns of the products are enough for the query rows, and values can use the other four."""
    return page.type_v.is_turbo and n_tokens * gqa_ratio <= 4


def has_fragments(page: PageGeometry) -> bool:
    """Whether this kernel takes the page: no f32, and value rows that eight lanes can share."""
    if KvType.F32 in (page.type_k, page.type_v):
        return False
    return page.type_v.is_turbo or page.head_dim_v % (8 * word_elements(page.type_v)) == 0


@device_function
def page_at(pages, key, page_tokens):
    """Address of the page that a key lies in, and the key's place there."""
    page, slot = divide(key, page_tokens)
    return load_address(pages + int64(page) * 8), slot


def _table_of(kv_type: KvType) -> LevelTable | ExponentTable | None:
    return table_of(kv_type, N_THREADS)


def grid_of(page: PageGeometry, n_rows: int, n_partitions: int) -> tuple[int, int]:
    """Blocks of a launch for ``n_rows`` query rows of a KV head; those that read the same keys are neighbours."""
    n_row_groups = ceil_div(n_rows, ROWS)
    if takes_partitions_first(page):
        return n_row_groups * n_partitions, page.n_head_kv
    return page.n_head_kv * n_row_groups, n_partitions


@kernel_builder
def build_attention_decode_kernel(
    page: PageGeometry, gqa_ratio: int, in_window: bool, softcap: float, is_narrow: bool
) -> Kernel:
    """The kernel for one page layout and one number of query heads per KV head.

    in_window   partitions are those of a window layer
    softcap     of scores, 0 for none
    is_narrow   see ``is_narrow``

    A block reduces one partition of one KV head for up to 8 query rows (row = token * gqa_ratio + head of the
    group); its four warps take tiles of 16 keys in turn and are combined through shared memory at the end. The
    next keys are loaded before the softmax of the current ones, the current values before their scores.
    """
    n_subs, column_mask = count_subs(page), 3 if is_narrow else 7
    k_tile = KeyTile(page.k_region, n_subs, are_apart=are_keys_apart(page.v_region))
    v_tile = ValueTile(page.v_region, n_subs, is_narrow=is_narrow)
    softmax = TileSoftmax(n_subs, softcap)
    tables = list(dict.fromkeys(table for table in map(_table_of, (page.type_k, page.type_v)) if table is not None))
    is_partition_major = takes_partitions_first(page)
    is_early, no_values = loads_values_early(page), v_tile.nothing

    head_dim_k, head_dim_v, n_head_kv, page_tokens = page.head_dim_k, page.head_dim_v, page.n_head_kv, page.page_tokens
    n_head = n_head_kv * gqa_ratio
    k_bytes, v_bytes, v_offset = page.k_region.n_bytes, page.v_region.n_bytes, page.v_offset
    tile_keys = n_subs * TILE_KEYS
    block_keys = N_WARPS * tile_keys
    has_whole_steps = page_tokens % block_keys == 0  # the first tiles of all warps lie in one page
    n_groups = v_tile.n_groups
    warp_bytes = n_groups * 512
    query_floats = k_tile.query_bytes // 4
    row_of, first_value_row = k_tile.row_of, v_tile.first_row
    load_k, load_query, store_query = k_tile.load, k_tile.load_query, k_tile.store_query
    share_query, scores_of = k_tile.share_query, k_tile.scores
    is_shared = k_tile.can_share_query and shares_queries(page)
    load_v, keep_v, accumulate, zeros = v_tile.load, v_tile.keep, v_tile.accumulate, v_tile.zeros
    rescale, store_sums, first_dim = v_tile.rescale, v_tile.store, v_tile.first_dim
    hide, rises, maxima_of = softmax.hide, softmax.rises, softmax.maxima
    shrinks_of, weigh = softmax.shrinks, softmax.weigh
    add_up, pack, total_of = softmax.add_up, softmax.pack, softmax.total
    is_capped, cap, bounds_of = softcap > 0.0, softmax.cap, partition_bounds_from(page, in_window=in_window)
    maxima_floats, limit_ints = N_WARPS * ROWS, 2 * ROWS + 2

    # the level tables are needed until the last key, the exchange after it: they share bytes
    fill_first, fill_second = (*(table.fill for table in tables), fill_nothing, fill_nothing)[:2]
    second_at = tables[0].n_bytes if len(tables) == 2 else 0
    table_bytes = sum(table.n_bytes for table in tables)
    exchange_floats = 0 if tables else N_WARPS * n_groups * 128
    dynamic_bytes = max(N_WARPS * warp_bytes, table_bytes) if tables else 0

    def attention_decode_kernel(q, pages, positions, out, max_sum, n_tokens, first_partition, window, scale):
        exchange = cuda.shared.array(exchange_floats, float32, alignment=16)
        query_words = cuda.shared.array(query_floats, float32, alignment=16)
        limits = cuda.shared.array(limit_ints, int32, alignment=16)
        row_max = cuda.shared.array(maxima_floats, float32)
        row_sum = cuda.shared.array(maxima_floats, float32)

        warp = int32(cuda.threadIdx.x) >> int32(5)
        lane = int32(cuda.threadIdx.x) & int32(31)
        g = lane >> int32(2)
        t = lane & int32(3)
        n_rows = int32(n_tokens * int32(gqa_ratio))
        if is_partition_major:
            n_row_groups = divide(n_rows + int32(ROWS - 1), ROWS)[0]
            head_kv = int32(cuda.blockIdx.y)
            place, row_group = divide(cuda.blockIdx.x, n_row_groups)
            n_places = divide(cuda.gridDim.x, n_row_groups)[0]
        else:
            row_group, head_kv = divide(cuda.blockIdx.x, n_head_kv)
            place, n_places = int32(cuda.blockIdx.y), int32(cuda.gridDim.y)
        local_partition = int32(n_places - int32(1) - place)  # large partitions first: the last blocks are short ones
        first_row = int32(row_group * int32(ROWS))

        own_row = int32(first_row + (g & int32(column_mask)))  # the query row of column g
        is_valid = int32(1) if own_row < n_rows else int32(0)
        token, head = divide(min(own_row, int32(n_rows - 1)), gqa_ratio)
        head = int32(head + head_kv * int32(gqa_ratio))
        partition_begin, partition_end = bounds_of(positions, first_partition + local_partition, window)
        begin = int32(partition_begin)
        # asked for before it is known to be in use, beside the positions: two waits for memory become one
        asked = begin
        if in_window:  # a partition behind the last key may lie behind the table too
            asked = int32(min(begin, load_int(positions + int64(n_tokens - int32(1)) * 4)))
        page, slot = divide(asked, page_tokens)
        page_address = load_address(pages + int64(page) * 8)
        position = load_int(positions + int64(token) * 4)
        first_new = load_int(positions + int64(min(lane & int32(7), n_tokens - int32(1))) * 4)

        exchange_at = shared_address(exchange)
        fill_first(uint32(exchange_at), int32(cuda.threadIdx.x))
        fill_second(uint32(exchange_at + uint32(second_at)), int32(cuda.threadIdx.x))

        # integer arithmetic widens to 64 bits unless it is told not to
        upper = int32(position + int32(1))  # a row sees keys lower <= key < upper
        lower = int32(max(int32(upper - window), int32(0))) if in_window else int32(0)
        upper_most, upper_least, lower_most, lower_least = upper, upper, lower, lower
        for step in (4, 8, 16):
            upper_most = int32(max(upper_most, cuda.shfl_xor_sync(FULL_WARP, upper_most, step)))
            upper_least = int32(min(upper_least, cuda.shfl_xor_sync(FULL_WARP, upper_least, step)))
            if in_window:
                lower_most = int32(max(lower_most, cuda.shfl_xor_sync(FULL_WARP, lower_most, step)))
                lower_least = int32(min(lower_least, cuda.shfl_xor_sync(FULL_WARP, lower_least, step)))
        end = int32(min(int32(partition_end), upper_most))
        is_unused = end <= begin
        if not in_window:
            # never so: without it the assembler asks for the page and the positions only after this test
            is_unused |= (page_address == int64(0)) | (first_new < int32(0))
        if is_unused:
            return  # beyond the last key: the fold never reads this partial
        key = int32(begin + warp * int32(tile_keys))
        if lower_least > begin:
            key = int32(key + divide(lower_least - begin, block_keys)[0] * int32(block_keys))
            if in_window and int32(key + int32(tile_keys)) <= lower_least:
                key = int32(key + int32(block_keys))  # nobody sees the tile, and its page may be gone
        if lower_least > begin or not has_whole_steps:
            # a warp without keys loads the last ones, whose page is there, and does nothing with them
            last_tile = int32(divide(upper_most - int32(1), tile_keys)[0] * int32(tile_keys))
            page_address, slot = page_at(pages, key if key < end else last_tile, page_tokens)
        else:
            slot = int32(slot + warp * int32(tile_keys))
        k_head, v_head = int64(head_kv) * k_bytes, v_offset + int64(head_kv) * v_bytes
        for step in (4, 2, 1):
            first_new = int32(min(first_new, cuda.shfl_xor_sync(FULL_WARP, first_new, step)))
        is_old = int32(key + int32(tile_keys)) <= first_new  # not of this step: the kernels before do not write them
        if not is_old:
            wait_for_all_before()
        k = load_k(page_address + k_head, slot, lane)
        v = no_values()
        if is_early:
            v = load_v(page_address + v_head, slot, lane)
        if is_old:
            wait_for_all_before()

        scale_log2 = product_scale = scale * float32(LOG2_E)
        if is_capped:
            scale_log2 = float32(1.0)
        k_column = uint32(exchange_at + uint32(lane * int32(4)))  # this lane's in the level table
        v_column = uint32(k_column + uint32(second_at))
        query_address = uint32(shared_address(query_words) + uint32(lane * int32(16)))
        # out of the way of the fragments: registers decide how many blocks run at a time
        query_row = q + (int64(token) * n_head + head) * (4 * head_dim_k)
        if is_shared:
            share_query(query_address, query_row, t, is_valid, warp)
        elif warp == 0:
            store_query(query_address, load_query(query_row, t, is_valid))
        if warp == 0:
            limits[g], limits[ROWS + g] = lower, upper
            limits[2 * ROWS], limits[2 * ROWS + 1] = lower_least, upper_most
        cuda.syncthreads()

        limits_at = uint32(shared_address(limits) + uint32(t * int32(8)))
        sums = zeros()
        maxima = (float32(LOWEST), float32(LOWEST))  # of query rows 2t and 2t + 1
        totals = (float32(0.0), float32(0.0))
        is_more = key < end
        while is_more:
            next_page, next_slot, next_key = page_address, slot, int32(key + int32(block_keys))
            is_more = next_key < end
            if is_more:
                next_page, next_slot = page_at(pages, next_key, page_tokens)
            if not is_early:
                v = load_v(page_address + v_head, slot, lane)

            scores = scores_of(query_address, k, lane, k_column)

            if is_more:
                k = load_k(next_page + k_head, next_slot, lane)

            if is_capped:
                scores = cap(scores, product_scale)
            if int32(key + int32(tile_keys)) > upper_least or key < lower_most:
                scores = hide(scores, int32(key + row_of(g)), limits_at)
                # a probability of 0 does not silence a NaN in a row that nobody has written yet
                v = keep_v(v, int32(key + first_value_row(t)), limits[2 * ROWS], limits[2 * ROWS + 1])
            shrinks = (float32(1.0), float32(1.0))
            if cuda.any_sync(FULL_WARP, rises(scores, maxima, scale_log2)):
                new_maxima = maxima_of(scores, maxima, scale_log2)
                shrinks = shrinks_of(maxima, new_maxima, scale_log2)
                maxima = new_maxima
                sums = rescale(sums, shrinks[0], shrinks[1])  # a factor of 1 changes no bit
            probabilities = weigh(scores, maxima, scale_log2)
            totals = add_up(probabilities, totals, shrinks)
            sums = accumulate(sums, pack(probabilities), v, lane, v_column)

            if is_early and is_more:
                v = load_v(next_page + v_head, next_slot, lane)
            page_address, slot, key = next_page, next_slot, next_key

        let_next_start()  # the fold, whose blocks would be in the way of this launch any earlier
        totals = total_of(totals)
        if g == 0:
            row_max[warp * ROWS + 2 * t], row_max[warp * ROWS + 2 * t + 1] = maxima
            row_sum[warp * ROWS + 2 * t], row_sum[warp * ROWS + 2 * t + 1] = totals
        cuda.syncthreads()

        max_0, max_1 = float32(LOWEST), float32(LOWEST)
        for w in range(N_WARPS):
            max_0 = max(max_0, row_max[w * ROWS + 2 * t])
            max_1 = max(max_1, row_max[w * ROWS + 2 * t + 1])
        factor_0 = exp2_approx(multiply(maxima[0] - max_0, scale_log2))
        factor_1 = exp2_approx(multiply(maxima[1] - max_1, scale_log2))
        store_sums(uint32(exchange_at + uint32(warp * int32(warp_bytes) + lane * int32(16))), sums, factor_0, factor_1)
        if warp == 0 and t == 0 and first_row + g < n_rows:
            best = float32(LOWEST)
            for w in range(N_WARPS):
                best = max(best, row_max[w * ROWS + g])
            weight = float32(0.0)
            for w in range(N_WARPS):
                weight = fma(
                    row_sum[w * ROWS + g], exp2_approx(multiply(row_max[w * ROWS + g] - best, scale_log2)), weight
                )
            partial = int64(local_partition) * n_tokens + token
            store_two_floats(max_sum + (partial * n_head + head) * 8, multiply(best, scale_log2), weight)
        cuda.syncthreads()

        row_0 = int32(first_row + (int32(2) * t & int32(column_mask)))
        row_1 = int32(row_0 + int32(1))
        token_0, head_0 = divide(row_0, gqa_ratio)
        token_1, head_1 = divide(row_1, gqa_ratio)
        first_head = int64(head_kv) * gqa_ratio
        first_out = out + int64(local_partition) * n_tokens * (n_head * 4 * head_dim_v)
        out_0 = first_out + (int64(token_0) * n_head + first_head + head_0) * (4 * head_dim_v)
        out_1 = first_out + (int64(token_1) * n_head + first_head + head_1) * (4 * head_dim_v)
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
            if is_narrow:
                dim += int64(t >> int32(1))  # columns 4 to 7 are the next dimension of rows 0 to 3
                if row_0 < n_rows:
                    store_float(out_0 + dim * 4, x0)
                    store_float(out_0 + (dim * 4 + 8), x2)
                if row_1 < n_rows:
                    store_float(out_1 + dim * 4, x1)
                    store_float(out_1 + (dim * 4 + 8), x3)
            else:
                if row_0 < n_rows:
                    store_two_floats(out_0 + dim * 4, x0, x2)
                if row_1 < n_rows:
                    store_two_floats(out_1 + dim * 4, x1, x3)

    signature = [types.int64] * 5 + [types.int32] * 3 + [types.float32]
    return Kernel(
        attention_decode_kernel,
        signature,
        n_threads=N_THREADS,
        min_blocks=count_min_blocks(page),
        dynamic_bytes=dynamic_bytes,
        overlaps=True,
    )
