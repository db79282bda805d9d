"""How a block of wide attention walks the key tiles of a span or a partition: copies, barriers, products."""

from __future__ import annotations

from typing import Any

from numba import cuda
from numba.cuda import int32, int64, types, uint32

from cuda_kernels.attention_common import NO_WINDOW
from cuda_kernels.emit import Emitter, Value, emitted
from cuda_kernels.intrinsics import FULL_WARP, load_address, wait_all_copies
from cuda_kernels.launch import device_function
from cuda_kernels.prefill_pieces import store_piece
from cuda_kernels.prefill_tiles import PIECE_ELEMENTS
from cuda_kernels.wide_tiles import N_THREADS, N_WARPS, PART_KEYS, WideFragments, WideShape


@emitted(types.UniTuple(types.uint32, 4), types.int64)
def load_query_piece(emit: Emitter, address: Value) -> list[Value]:
    """8 float32 of a query, which the kernel before may have written, rounded to float16."""
    values = emit.load_recent_floats(address, 0, 4) + emit.load_recent_floats(address, 16, 4)
    return [emit.pack_half2(values[i], values[i + 1]) for i in range(0, 8, 2)]


def build_take_query(shape: WideShape, fragments: WideFragments, gqa_ratio: int) -> Any:
    """Device function: the fragment of the block's rows from ``first_row`` on, of a KV head's up to row ``last``.

    They go through the shared memory that keys come to afterwards; there are barriers.
    """
    head_dim_k, n_head = shape.page.head_dim_k, shape.page.n_head_kv * gqa_ratio
    n_pieces = head_dim_k // PIECE_ELEMENTS
    n_all_pieces = shape.block_rows * n_pieces
    place_query, load_query = fragments.place_query, fragments.load_query

    @device_function
    def take_query(q, shared, first_row, last, first_head):
        tid = int32(cuda.threadIdx.x)
        for i in range(tid, n_all_pieces, N_THREADS):
            own_row, piece = int32(i) // int32(n_pieces), int32(i) % int32(n_pieces)
            row = min(first_row + own_row, last)
            head = int64(row // int32(gqa_ratio)) * n_head + first_head + int64(row % int32(gqa_ratio))
            source = q + (head * head_dim_k + int64(piece) * PIECE_ELEMENTS) * 4
            store_piece(place_query(shared, uint32(own_row), uint32(piece)), load_query_piece(source))
        cuda.syncthreads()
        query = load_query(shared, uint32(tid >> int32(5)), uint32(tid & int32(31)))
        cuda.syncthreads()
        return query

    return take_query


def build_walk(shape: WideShape, fragments: WideFragments) -> Any:
    """Device function: ``running`` (sums and softmax state, joined) after ``n_tiles`` tiles from ``first_key`` on.

    query                  fragment of the block's rows
    key_end                keys from here on count as zeros and are not read
    whole_end              keys before it are visible to every row; behind it the limits in shared memory decide

    There are two barriers a tile, more where rows are converted. After the first everyone's shares of the scores are
    there and nobody reads the keys any more, so the next keys are on their way during softmax and second product; after
    the second nobody reads the values any more, so the next values are on their way during the first product. Rows of
    a latent cache are keys and values, two places take turns, and the row after the next is on its way all the time.
    Converted types arrive in one place for raw bytes, free when both barriers around the conversion have passed.
    """
    page, tile_keys = shape.page, shape.tile_keys
    k_copies, v_copies = shape.copies(tile_keys)
    page_tokens, is_latent = page.page_tokens, page.v_in_k
    has_raw_keys, has_raw_values = shape.has_raw_keys, shape.has_raw_values
    k_bytes, v_bytes, v_offset = page.k_region.n_bytes, page.v_region.n_bytes, page.v_offset
    raw_at, values_at = shape.raw_at, shape.values_at
    scores_at, limits_at, share_bytes = shape.scores_at, shape.limits_at, fragments.share_bytes
    part_bytes, n_parts = N_WARPS * share_bytes, tile_keys // PART_KEYS  # of all warps' shares, and parts of a tile
    k_part_bytes, v_part_bytes = (PART_KEYS * rows.row_bytes for rows in (fragments.k_rows, fragments.v_rows))
    takes_turns = is_latent and not has_raw_keys
    start_k = k_copies.start_raw if has_raw_keys else k_copies.start_direct
    start_v = v_copies.start_raw if has_raw_values else v_copies.start_direct
    convert_k, convert_v = k_copies.convert, v_copies.convert
    keys_to = raw_at if has_raw_keys else 0
    values_to = raw_at if has_raw_values else values_at
    stored_sums, stored_state, join = fragments.stored_sums, fragments.stored_state, fragments.join
    share, add_shares = fragments.share, fragments.add_shares
    hide, softmax, rescale, accumulate = fragments.hide, fragments.softmax, fragments.rescale, fragments.accumulate
    probabilities, new_state, factors = fragments.probabilities, fragments.new_state, fragments.factors
    are_ones = fragments.are_ones

    @device_function
    def start_keys(shared, pages, head_kv, key, place, key_end, tid):
        at = load_address(pages + int64(key // int32(page_tokens)) * 8) + int64(head_kv) * k_bytes
        to = uint32(shared + uint32(keys_to))
        if takes_turns:
            to = uint32(to + uint32(place) * uint32(values_at))
        start_k(to, at, key % int32(page_tokens), key_end - key, uint32(tid))

    @device_function
    def start_values(shared, pages, head_kv, key, key_end, tid):
        at = load_address(pages + int64(key // int32(page_tokens)) * 8) + (v_offset + int64(head_kv) * v_bytes)
        start_v(uint32(shared + uint32(values_to)), at, key % int32(page_tokens), key_end - key, uint32(tid))

    @device_function
    def walk(query, running, shared, pages, head_kv, first_key, n_tiles, key_end, whole_end, scale_log2):
        tid = int32(cuda.threadIdx.x)
        warp, lane = tid >> int32(5), tid & int32(31)
        g, t = lane >> int32(2), lane & int32(3)
        share_at = uint32(shared + uint32(scores_at) + uint32(lane * int32(16)))
        sums, state = stored_sums(running), stored_state(running)
        if n_tiles > 0:
            start_keys(shared, pages, head_kv, first_key, int32(0), key_end, tid)
        for tile in range(-1, n_tiles):
            key = int32(first_key + int32(tile) * int32(tile_keys))
            rows_at = uint32(shared)
            if takes_turns:
                rows_at = uint32(rows_at + uint32(tile & 1) * uint32(values_at))
            if tile >= 0:
                if not is_latent:
                    wait_all_copies()
                cuda.syncthreads()
                if has_raw_values:
                    convert_v(uint32(shared + uint32(raw_at)), uint32(shared + uint32(values_at)), uint32(tid))
                    cuda.syncthreads()
                if not is_latent and tile + 1 < n_tiles:
                    start_keys(shared, pages, head_kv, key + int32(tile_keys), int32(0), key_end, tid)

                values = rows_at if is_latent else uint32(shared + uint32(values_at))
                for part in range(n_parts):
                    part_key = int32(key + int32(part) * int32(PART_KEYS))
                    s = add_shares(uint32(share_at + uint32(part) * uint32(part_bytes)))
                    if part_key + int32(PART_KEYS) > whole_end:
                        limits = uint32(shared + uint32(limits_at) + uint32(g * int32(4)))
                        s = hide(s, part_key + int32(2) * t, limits, int32(NO_WINDOW))
                    folded = softmax(s, state, scale_log2)
                    state = new_state(folded)
                    if not cuda.all_sync(FULL_WARP, are_ones(factors(folded))):  # a factor of 1 changes no bit
                        sums = rescale(sums, factors(folded))
                    own_values = uint32(values + uint32(part) * uint32(v_part_bytes))
                    sums = accumulate(sums, probabilities(folded), own_values, uint32(warp), uint32(lane))
            if tile + 1 < n_tiles:
                wait_all_copies()
                cuda.syncthreads()
                if has_raw_keys:
                    convert_k(uint32(shared + uint32(raw_at)), uint32(shared), uint32(tid))
                    cuda.syncthreads()
                if is_latent:
                    if tile + 2 < n_tiles:
                        later = key + int32(2 * tile_keys)
                        start_keys(shared, pages, head_kv, later, int32(tile & 1), key_end, tid)
                else:
                    start_values(shared, pages, head_kv, key + int32(tile_keys), key_end, tid)
                keys = uint32(shared)
                if takes_turns:
                    keys = uint32(keys + uint32((tile + 1) & 1) * uint32(values_at))
                own = uint32(share_at + uint32(warp) * uint32(share_bytes))
                for part in range(n_parts):
                    k_part = uint32(keys + uint32(part) * uint32(k_part_bytes))
                    share(query, k_part, uint32(own + uint32(part) * uint32(part_bytes)), uint32(warp), uint32(lane))
        return join(sums, state)

    return walk
