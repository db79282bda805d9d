"""Decode attention of heads of 512 with keys and values of their own, without f32. The launcher: ``attention_decode``.

A warp of ``attention_decode_mma`` has no registers for the sums of so many columns, so here the four warps of a block
take the same keys and each has a quarter of the columns, again from global memory straight into fragments::

    scores   a warp's products are one of four shares of each score, added in shared memory in the order of the warps
    sums     every warp makes the same probabilities and adds up its own columns of the values
"""

from __future__ import annotations

from typing import Any

from numba import cuda
from numba.cuda import float32, int32, int64, types, uint32

from cuda_kernels.attention_common import LOG2_E, LOWEST, divide, partition_bounds_from
from cuda_kernels.attention_decode_mma import N_THREADS, N_WARPS, ROWS, SMALL_BITS, page_at
from cuda_kernels.decode_codes import fill_nothing, table_of, word_elements
from cuda_kernels.decode_softmax import TileSoftmax
from cuda_kernels.decode_tiles import TILE_KEYS, KeyTile, are_keys_apart
from cuda_kernels.decode_values import ValueTile
from cuda_kernels.emit import Emitter, Value, emitted, floats
from cuda_kernels.intrinsics import FULL_WARP, load_address, load_int, multiply, shared_address, store_two_floats
from cuda_kernels.launch import Kernel, kernel_builder
from cuda_kernels.overlap import let_next_start, wait_for_all_before
from kvs_core.cuda_scratch import is_wide
from kvs_core.kv_types import KvType, PageGeometry, RegionGeometry
from kvs_core.units import ceil_div

MIN_BLOCKS = 4  # of a multiprocessor, that the registers leave room for


def columns_of(region: RegionGeometry) -> RegionGeometry:
    """The same bytes as rows of a quarter of the columns, four to a key: that of a warp is the key's first plus it."""
    return RegionGeometry(
        kv_type=region.kv_type, head_dim=region.head_dim // N_WARPS, page_tokens=N_WARPS * region.page_tokens
    )


def has_columns(page: PageGeometry) -> bool:
    """Whether this kernel takes the page: quarters of rows keep their groups of a scale, and lanes can share them."""
    if not is_wide(page) or page.v_in_k or KvType.F32 in (page.type_k, page.type_v):
        return False
    for region, n_lanes in ((page.k_region, 4), (page.v_region, 8)):
        own = columns_of(region)
        step = own.group_elements if own.kv_type.is_turbo else n_lanes * word_elements(own.kv_type)
        if own.head_dim % step or own.group_elements != region.group_elements:
            return False
    return True


def count_subs(page: PageGeometry) -> int:
    """Tiles of 16 keys that go through an exchange of shares together."""
    regions = (page.k_region, page.v_region)
    bits = max(8 * region.n_bytes // (region.page_tokens * region.head_dim) for region in regions)
    return 2 if bits < SMALL_BITS else 1


def grid_of(page: PageGeometry, n_rows: int, n_partitions: int) -> tuple[int, int]:
    """Blocks of a launch for ``n_rows`` query rows of a KV head; those that read the same keys are neighbours."""
    return page.n_head_kv * ceil_div(n_rows, ROWS), n_partitions


class ShareExchange:
    """Scores of a tile as sums of the warps' shares, which lie in shared memory; a share holds 16 bytes a lane for
    each 16 keys.

    Attributes that are intrinsics:
    store(address, scores)   this warp's share; ``address``: its place for this lane
    add_up(address)          the scores; ``address``: the first warp's place for this lane
    """

    def __init__(self, n_scores: int) -> None:
        self.n_scores, self.share_bytes = n_scores, 128 * n_scores
        self.store = emitted(types.void, types.uint32, floats(n_scores))(self._store)
        self.add_up = emitted(floats(n_scores), types.uint32)(self._add_up)

    def _store(self, emit: Emitter, address: Value, scores: list[Value]) -> None:
        for i in range(0, self.n_scores, 4):
            emit.store_shared_words(address, 128 * i, [emit.as_word(score) for score in scores[i : i + 4]])

    def _add_up(self, emit: Emitter, address: Value) -> list[Value]:
        scores = []
        for i in range(0, self.n_scores, 4):
            total, *others = (
                emit.load_shared_floats(address, warp * self.share_bytes + 128 * i, 4) for warp in range(N_WARPS)
            )
            for share in others:
                total = [emit.float_add(a, b) for a, b in zip(total, share, strict=True)]
            scores += total
        return scores


def build_write_rows(v_tile: ValueTile) -> Any:
    """Intrinsic: two query rows' sums to the addresses of this warp's columns, each where its flag is not 0."""

    def write_rows(emit: Emitter, rows: list[tuple[Value, Value]], sums: list[Value], g: Value) -> None:
        dims = [v_tile._first_dim(emit, emit.word(group), g) for group in range(v_tile.n_groups)]
        for i, (row_at, flag) in enumerate(rows):
            with emit.when(emit.less(emit.word(0), flag)):
                for group, dim in enumerate(dims):
                    address = emit.add(row_at, emit.widen(emit.multiply(dim, 4)))
                    emit.store_two_floats(address, 0, sums[4 * group + i], sums[4 * group + i + 2])

    i32, i64 = types.int32, types.int64
    return emitted(types.void, i64, i32, i64, i32, floats(v_tile.n_sums), i32)(
        lambda emit, row_0, flag_0, row_1, flag_1, sums, g: write_rows(
            emit, [(row_0, flag_0), (row_1, flag_1)], sums, g
        )
    )


@kernel_builder
def build_attention_decode_columns_kernel(page: PageGeometry, gqa_ratio: int) -> Kernel:
    """The kernel for one page layout and one number of query heads per KV head; without windows.

    A block reduces one partition of one KV head for up to 8 query rows (row = token * gqa_ratio + head of the group).
    There is one barrier a tile, behind which shares are read; the next tile's go to another place. The next keys are
    loaded before it, the next values when those before them are used. Same arguments as
    ``build_attention_decode_kernel``.
    """
    n_subs = count_subs(page)
    v_region = columns_of(page.v_region)
    k_tile = KeyTile(columns_of(page.k_region), n_subs, are_apart=are_keys_apart(v_region), row_step=N_WARPS)
    v_tile = ValueTile(v_region, n_subs, row_step=N_WARPS)
    row_of, first_value_row = k_tile.row_of, v_tile.first_row
    softmax, exchange = TileSoftmax(n_subs), ShareExchange(4 * n_subs)
    found = (table_of(kv_type, N_THREADS) for kv_type in (page.type_k, page.type_v))
    tables = list(dict.fromkeys(table for table in found if table is not None))

    head_dim_k, head_dim_v, n_head_kv, page_tokens = page.head_dim_k, page.head_dim_v, page.n_head_kv, page.page_tokens
    own_dims_k, own_dims_v = k_tile.region.head_dim, v_tile.region.head_dim
    n_head, tile_keys = n_head_kv * gqa_ratio, n_subs * TILE_KEYS
    k_bytes, v_bytes, v_offset = page.k_region.n_bytes, page.v_region.n_bytes, page.v_offset
    query_bytes, share_bytes = k_tile.query_bytes, exchange.share_bytes
    place_bytes = N_WARPS * share_bytes  # of a tile's shares
    query_floats, share_floats = N_WARPS * query_bytes // 4, 2 * place_bytes // 4
    load_k, load_query, store_query, scores_of = k_tile.load, k_tile.load_query, k_tile.store_query, k_tile.scores
    load_v, keep_v, accumulate, zeros = v_tile.load, v_tile.keep, v_tile.accumulate, v_tile.zeros
    rescale, write_rows = v_tile.rescale, build_write_rows(v_tile)
    store_share, add_shares = exchange.store, exchange.add_up
    hide, rises, maxima_of = softmax.hide, softmax.rises, softmax.maxima
    shrinks_of, weigh = softmax.shrinks, softmax.weigh
    add_up, pack, total_of = softmax.add_up, softmax.pack, softmax.total
    bounds_of = partition_bounds_from(page, in_window=False)
    limit_ints = 2 * ROWS + 2
    fill_first, fill_second = (*(table.fill for table in tables), fill_nothing, fill_nothing)[:2]
    second_at = tables[0].n_bytes if len(tables) == 2 else 0

    def attention_decode_columns_kernel(q, pages, positions, out, max_sum, n_tokens, first_partition, window, scale):
        table_words = cuda.shared.array(0, float32, alignment=16)
        query_words = cuda.shared.array(query_floats, float32, alignment=16)
        shares = cuda.shared.array(share_floats, float32, alignment=16)
        limits = cuda.shared.array(limit_ints, int32, alignment=16)

        warp = int32(cuda.threadIdx.x) >> int32(5)
        lane = int32(cuda.threadIdx.x) & int32(31)
        g = lane >> int32(2)
        t = lane & int32(3)
        n_rows = int32(n_tokens * int32(gqa_ratio))
        row_group, head_kv = divide(cuda.blockIdx.x, n_head_kv)
        first_row = int32(row_group * int32(ROWS))
        # large partitions first: the last blocks are short ones
        local_partition = int32(int32(cuda.gridDim.y) - int32(1) - int32(cuda.blockIdx.y))

        own_row = int32(first_row + g)  # the query row of column g
        is_valid = int32(1) if own_row < n_rows else int32(0)
        token, head = divide(min(own_row, int32(n_rows - 1)), gqa_ratio)
        first_head = int32(head_kv * int32(gqa_ratio))
        partition_begin, partition_end = bounds_of(positions, first_partition + local_partition, window)
        key = int32(partition_begin)
        page, slot = divide(key, page_tokens)
        page_address = load_address(pages + int64(page) * 8)  # asked for before it is known to be in use
        upper = int32(load_int(positions + int64(token) * 4) + int32(1))  # a row sees the keys before it

        table_at = shared_address(table_words)
        fill_first(uint32(table_at), int32(cuda.threadIdx.x))
        fill_second(uint32(table_at + uint32(second_at)), int32(cuda.threadIdx.x))

        upper_most, upper_least = upper, upper
        for step in (4, 8, 16):
            upper_most = int32(max(upper_most, cuda.shfl_xor_sync(FULL_WARP, upper_most, step)))
            upper_least = int32(min(upper_least, cuda.shfl_xor_sync(FULL_WARP, upper_least, step)))
        end = int32(min(int32(partition_end), upper_most))
        if end <= key:
            return  # beyond the last key: the fold never reads this partial
        wait_for_all_before()
        k_head, v_head = int64(head_kv) * k_bytes, v_offset + int64(head_kv) * v_bytes
        own_slot = int32(slot * int32(N_WARPS) + warp)
        k = load_k(page_address + k_head, own_slot, lane)
        v = load_v(page_address + v_head, own_slot, lane)

        scale_log2 = scale * float32(LOG2_E)
        k_column = uint32(table_at + uint32(lane * int32(4)))  # this lane's in the level table
        v_column = uint32(k_column + uint32(second_at))
        query_at = uint32(shared_address(query_words) + uint32(warp * int32(query_bytes) + lane * int32(16)))
        query = q + ((int64(token) * n_head + first_head + head) * head_dim_k + warp * int32(own_dims_k)) * 4
        store_query(query_at, load_query(query, t, is_valid))
        if warp == 0:
            limits[g], limits[ROWS + g] = int32(0), upper
            limits[2 * ROWS], limits[2 * ROWS + 1] = int32(0), upper_most
        cuda.syncthreads()

        limits_at = uint32(shared_address(limits) + uint32(t * int32(8)))
        shares_at = uint32(shared_address(shares) + uint32(lane * int32(16)))
        place = int32(0)
        sums = zeros()
        maxima = (float32(LOWEST), float32(LOWEST))  # of query rows 2t and 2t + 1
        totals = (float32(0.0), float32(0.0))
        is_more = True
        while is_more:
            next_key = int32(key + int32(tile_keys))
            is_more = next_key < end
            next_page, next_slot = page_address, slot
            if is_more:
                next_page, next_slot = page_at(pages, next_key, page_tokens)
            own_slot = int32(next_slot * int32(N_WARPS) + warp)
            share = scores_of(query_at, k, lane, k_column)
            if is_more:
                k = load_k(next_page + k_head, own_slot, lane)
            tile_at = uint32(shares_at + uint32(place))
            store_share(uint32(tile_at + uint32(warp * int32(share_bytes))), share)
            cuda.syncthreads()
            scores = add_shares(tile_at)

            if next_key > upper_least:
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
            if is_more:
                v = load_v(next_page + v_head, own_slot, lane)
            page_address, slot, key = next_page, next_slot, next_key
            place = int32(int32(place_bytes) - place)

        let_next_start()  # the fold, whose blocks would be in the way of this launch any earlier
        totals = total_of(totals)
        row_0 = int32(first_row + int32(2) * t)
        row_1 = int32(row_0 + int32(1))
        is_row_0 = int32(1) if row_0 < n_rows else int32(0)
        is_row_1 = int32(1) if row_1 < n_rows else int32(0)
        token_0, head_0 = divide(row_0, gqa_ratio)
        token_1, head_1 = divide(row_1, gqa_ratio)
        first = int64(local_partition) * n_tokens
        at_0 = (first + token_0) * n_head + first_head + head_0
        at_1 = (first + token_1) * n_head + first_head + head_1
        if warp == 0 and g == 0:
            if is_row_0 != 0:
                store_two_floats(max_sum + at_0 * 8, multiply(maxima[0], scale_log2), totals[0])
            if is_row_1 != 0:
                store_two_floats(max_sum + at_1 * 8, multiply(maxima[1], scale_log2), totals[1])
        out_at = out + int64(warp) * (4 * own_dims_v)
        write_rows(out_at + at_0 * (4 * head_dim_v), is_row_0, out_at + at_1 * (4 * head_dim_v), is_row_1, sums, g)

    signature = [types.int64] * 5 + [types.int32] * 3 + [types.float32]
    return Kernel(
        attention_decode_columns_kernel,
        signature,
        n_threads=N_THREADS,
        min_blocks=MIN_BLOCKS,
        dynamic_bytes=sum(table.n_bytes for table in tables),
        overlaps=True,
    )
