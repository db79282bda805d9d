"""Compiled bodies of CPU attention; arguments are checked by the launchers in ``attention.py``.

All working values lie in ``floats``, one float32 array cut as ``attention_scratch.py`` describes; names ending
in ``_at`` are offsets into it (or, for ``page_at``, into the arena).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# Compiled bodies work on values that Python's type system cannot describe.

from __future__ import annotations

import numpy as np
from numba import njit, prange

from kvs_core.cpu.attention_scratch import DECODE_PAGES_PER_GROUP, N_LANES, PREFILL_ROW_BLOCK
from kvs_core.cpu.attention_tiles import (
    dot_16_rows,
    multiply_six_rows,
    scale_and_add_product,
    take_next,
    transpose,
)
from kvs_core.cpu.kv_rows import HEAD_DIM, N_HEAD_KV, PAGE_BYTES, PAGE_TOKENS, K, V, load_rows
from kvs_core.cpu.simd import (
    exp_f32x16,
    fma,
    keep_lanes_below,
    load_f32x16,
    max_lanes,
    maximum,
    splat_f32x16,
    store_f32x16,
    sum_lanes,
    zero_f32x16,
)

_NO_KEY = np.float32(-np.inf)
_ZERO = np.float32(0.0)


# ---------------------------------------------------------------------------------------------------------
# Shared steps


@njit(nogil=True)
def _align_lanes(n):
    return (n + N_LANES - 1) // N_LANES * N_LANES


@njit(nogil=True)
def _exp(x):
    return max_lanes(exp_f32x16(splat_f32x16(x)))


@njit(nogil=True)
def _finite_or_zero(maximum_seen):
    """What scores are taken relative to; a row that has seen no key must not form inf - inf."""
    return maximum_seen if maximum_seen != _NO_KEY else _ZERO


@njit(nogil=True)
def _copy_query_rows(q, token_begin, token_end, head_begin, group, scale, floats, rows_at):
    """Heads ``head_begin .. + group`` of each token, scaled, one row after another."""
    n_head, head_dim = q.shape[1], q.shape[2]
    factor = splat_f32x16(scale)
    for token in range(token_begin, token_end):
        source = (token * n_head + head_begin) * head_dim
        for idx in range(0, group * head_dim, N_LANES):
            store_f32x16(floats, rows_at + idx, factor * load_f32x16(q, source + idx))
        rows_at += group * head_dim


@njit(nogil=True)
def _fill(floats, begin, end, value):
    for idx in range(begin, end):
        floats[idx] = value


@njit(nogil=True)
def _softmax_rows(floats, scores_at, stride, n_columns, n_rows, first_row, group, first_visible, max_visible, row_max_at, row_sum_at, factors_at):
    """Turn a tile's scores into weights and update each row's maximum and sum; one step of online softmax.

    scores_at     [n_rows, n_columns], rows ``stride`` apart; becomes exp(score - maximum), 0 where masked
    row r sees the first min(max_visible, first_visible + (first_row + r) // group) columns, none if that is <= 0
    factors_at    [n_rows rounded up to 16]: receives what the row's earlier output must be multiplied by
    """
    for row in range(n_rows):
        visible = min(max_visible, first_visible + (first_row + row) // group)
        at = scores_at + row * stride
        largest = splat_f32x16(_NO_KEY)
        for column in range(0, n_columns, N_LANES):
            scores = keep_lanes_below(load_f32x16(floats, at + column), visible - column, _NO_KEY)
            store_f32x16(floats, at + column, scores)
            largest = maximum(scores, largest)
        old_max = floats[row_max_at + row]
        new_max = max(old_max, max_lanes(largest))
        floats[row_max_at + row] = new_max
        floats[factors_at + row] = old_max - _finite_or_zero(new_max)

    for row in range(0, n_rows, N_LANES):
        store_f32x16(floats, factors_at + row, exp_f32x16(load_f32x16(floats, factors_at + row)))

    for row in range(n_rows):
        at = scores_at + row * stride
        reference = splat_f32x16(_finite_or_zero(floats[row_max_at + row]))
        total = zero_f32x16()
        for column in range(0, n_columns, N_LANES):
            weights = exp_f32x16(load_f32x16(floats, at + column) - reference)
            store_f32x16(floats, at + column, weights)
            total = total + weights
        floats[row_sum_at + row] = fma(floats[row_sum_at + row], floats[factors_at + row], sum_lanes(total))


@njit(nogil=True)
def _bad_page(layout, arena, page_offsets, page_begin, page_end, n_visible):
    """First page of the span that is needed and does not lie inside the arena, or -1."""
    needed = min(page_end, (n_visible + layout[PAGE_TOKENS] - 1) // layout[PAGE_TOKENS])
    for page_idx in range(page_begin, needed):
        page_at = page_offsets[page_idx]
        if page_at < 0 or page_at + layout[PAGE_BYTES] > arena.size:
            return page_idx
    return -1


# ---------------------------------------------------------------------------------------------------------
# Prefill


@njit(nogil=True)
def _walk_key_tiles(layout, keys, arena, page_offsets, page_begin, page_end, head_kv_idx, n_visible, first_visible, group, n_rows, floats, q_at, out_at, row_max_at, row_sum_at, k_at, tile_at, scores_at, factors_at):
    """Fold the span's keys into one query tile of ``n_rows`` rows (a multiple of the row block).

    n_visible        end of the positions that the tile's last token sees
    first_visible    end of the positions that its first token sees, ``n_kv`` left aside
    """
    page_tokens = layout[PAGE_TOKENS]
    head_dim_k = layout[K + HEAD_DIM]
    head_dim_v = layout[V + HEAD_DIM]
    for page_idx in range(page_begin, page_end):
        for row_in_page in range(0, page_tokens, keys):
            pos = page_idx * page_tokens + row_in_page
            n_keys = min(keys, n_visible - pos)
            if n_keys <= 0:
                return

            page_at = page_offsets[page_idx]
            load_rows(layout, K, arena, page_at, head_kv_idx, row_in_page, n_keys, floats, tile_at)
            transpose(floats, tile_at, keys, head_dim_k, k_at)
            load_rows(layout, V, arena, page_at, head_kv_idx, row_in_page, n_keys, floats, tile_at)

            for row in range(0, n_rows, PREFILL_ROW_BLOCK):
                if first_visible + (row + PREFILL_ROW_BLOCK - 1) // group <= pos:
                    continue
                multiply_six_rows(
                    floats, q_at + row * head_dim_k, head_dim_k, k_at, keys, scores_at, keys, head_dim_k, keys
                )
                _softmax_rows(
                    floats, scores_at, keys, keys, PREFILL_ROW_BLOCK, row, group, first_visible - pos, n_keys,
                    row_max_at + row, row_sum_at + row, factors_at,
                )
                scale_and_add_product(
                    floats, scores_at, keys, tile_at, head_dim_v, out_at + row * head_dim_v, head_dim_v, n_keys,
                    factors_at, PREFILL_ROW_BLOCK, head_dim_v,
                )


@njit(nogil=True)
def _prefill_query_tiles(slot, counter, layout, keys, arena, page_offsets, page_begin, page_end, n_kv, q, first_pos, scale, acc, row_max, row_sum, floats, thread_floats, tile_tokens, tile_floats):
    """Take query tiles until none is left, the ones with most keys first; ``slot`` names this thread's scratch."""
    n_tokens, n_head = q.shape[0], q.shape[1]
    n_head_kv = layout[N_HEAD_KV]
    head_dim_k = layout[K + HEAD_DIM]
    head_dim_v = layout[V + HEAD_DIM]
    group = n_head // n_head_kv
    rows_max = (tile_tokens * group + PREFILL_ROW_BLOCK - 1) // PREFILL_ROW_BLOCK * PREFILL_ROW_BLOCK

    q_at = slot * thread_floats
    out_at = q_at + rows_max * head_dim_k
    row_max_at = out_at + rows_max * head_dim_v
    row_sum_at = row_max_at + _align_lanes(rows_max)
    k_at = row_sum_at + _align_lanes(rows_max)
    tile_at = k_at + keys * head_dim_k
    scores_at = tile_at + tile_floats
    factors_at = scores_at + PREFILL_ROW_BLOCK * keys

    n_tiles = (n_tokens + tile_tokens - 1) // tile_tokens
    item = take_next(counter)
    while item < n_tiles * n_head_kv:
        head_kv_idx = item % n_head_kv
        token_begin = (n_tiles - 1 - item // n_head_kv) * tile_tokens
        token_end = min(n_tokens, token_begin + tile_tokens)
        n_rows = (token_end - token_begin) * group
        n_padded = (n_rows + PREFILL_ROW_BLOCK - 1) // PREFILL_ROW_BLOCK * PREFILL_ROW_BLOCK

        _copy_query_rows(q, token_begin, token_end, head_kv_idx * group, group, scale, floats, q_at)
        _fill(floats, q_at + n_rows * head_dim_k, q_at + n_padded * head_dim_k, _ZERO)
        _fill(floats, out_at + n_rows * head_dim_v, out_at + n_padded * head_dim_v, _ZERO)
        _fill(floats, row_max_at + n_rows, row_max_at + n_padded, _NO_KEY)
        _fill(floats, row_sum_at + n_rows, row_sum_at + n_padded, _ZERO)
        for row in range(n_rows):
            token, head = token_begin + row // group, head_kv_idx * group + row % group
            floats[row_max_at + row] = row_max[token, head]
            floats[row_sum_at + row] = row_sum[token, head]
            for idx in range(0, head_dim_v, N_LANES):
                value = load_f32x16(acc, (token * n_head + head) * head_dim_v + idx)
                store_f32x16(floats, out_at + row * head_dim_v + idx, value)

        _walk_key_tiles(
            layout, keys, arena, page_offsets, page_begin, page_end, head_kv_idx, min(n_kv, first_pos + token_end),
            first_pos + token_begin + 1, group, n_padded, floats, q_at, out_at, row_max_at, row_sum_at, k_at, tile_at,
            scores_at, factors_at,
        )

        for row in range(n_rows):
            token, head = token_begin + row // group, head_kv_idx * group + row % group
            row_max[token, head] = floats[row_max_at + row]
            row_sum[token, head] = floats[row_sum_at + row]
            for idx in range(0, head_dim_v, N_LANES):
                value = load_f32x16(floats, out_at + row * head_dim_v + idx)
                store_f32x16(acc, (token * n_head + head) * head_dim_v + idx, value)
        item = take_next(counter)


@njit(nogil=True, parallel=True, cache=True)
def attend_prefill_kernel(n_slots, counter, layout, keys, arena, page_offsets, page_begin, page_end, n_kv, q, first_pos, scale, acc, row_max, row_sum, floats, thread_floats, tile_tokens, tile_floats):
    """Returns -1, or the first page of the span that is needed but lies outside the arena (nothing is done then)."""
    bad_page = _bad_page(layout, arena, page_offsets, page_begin, page_end, min(n_kv, first_pos + q.shape[0]))
    if bad_page >= 0:
        return bad_page
    counter[0] = 0
    for slot in prange(n_slots):
        _prefill_query_tiles(
            slot, counter, layout, keys, arena, page_offsets, page_begin, page_end, n_kv, q, first_pos, scale, acc,
            row_max, row_sum, floats, thread_floats, tile_tokens, tile_floats,
        )
    return -1


# ---------------------------------------------------------------------------------------------------------
# Decode


@njit(nogil=True)
def _attend_page(layout, keys, arena, page_at, page_pos, head_kv_idx, n_kv, q, first_pos, scale, floats, q_at, tile_at, scores_at, factors_at, out_at, row_max_at, row_sum_at):
    """The partial of one page and K/V head for every token of the step; each token as if it were alone."""
    n_tokens = q.shape[0]
    group = q.shape[1] // layout[N_HEAD_KV]
    head_dim_k = layout[K + HEAD_DIM]
    head_dim_v = layout[V + HEAD_DIM]
    n_rows = n_tokens * group

    _copy_query_rows(q, 0, n_tokens, head_kv_idx * group, group, scale, floats, q_at)
    _fill(floats, out_at, out_at + n_rows * head_dim_v, _ZERO)
    _fill(floats, row_max_at, row_max_at + n_rows, _NO_KEY)
    _fill(floats, row_sum_at, row_sum_at + n_rows, _ZERO)

    for row_in_page in range(0, layout[PAGE_TOKENS], keys):
        pos = page_pos + row_in_page
        n_keys = min(keys, min(n_kv, first_pos + n_tokens) - pos)
        if n_keys <= 0:
            return

        load_rows(layout, K, arena, page_at, head_kv_idx, row_in_page, n_keys, floats, tile_at)
        for token in range(n_tokens):
            n_visible = min(n_keys, first_pos + token + 1 - pos)
            if n_visible <= 0:
                continue
            row = token * group
            for head in range(group):
                for key in range(0, n_visible, N_LANES):
                    dot_16_rows(
                        floats, q_at + (row + head) * head_dim_k, tile_at + key * head_dim_k, head_dim_k, head_dim_k,
                        scores_at + (row + head) * keys + key,
                    )
            _softmax_rows(
                floats, scores_at + row * keys, keys, _align_lanes(n_visible), group, 0, group, n_visible, n_visible,
                row_max_at + row, row_sum_at + row, factors_at + token * _align_lanes(group),
            )

        load_rows(layout, V, arena, page_at, head_kv_idx, row_in_page, n_keys, floats, tile_at)
        for token in range(n_tokens):
            n_visible = min(n_keys, first_pos + token + 1 - pos)
            if n_visible <= 0:
                continue
            row = token * group
            scale_and_add_product(
                floats, scores_at + row * keys, keys, tile_at, head_dim_v, out_at + row * head_dim_v, head_dim_v,
                n_visible, factors_at + token * _align_lanes(group), group, head_dim_v,
            )


@njit(nogil=True)
def _decode_pages(slot, counter, layout, keys, arena, page_offsets, page_begin, n_pages, n_kv, q, first_pos, scale, floats, thread_floats, tile_floats, partials_at, partial_floats):
    """Take (page, K/V head) pairs until none is left; ``slot`` names this thread's scratch."""
    n_head_kv = layout[N_HEAD_KV]
    group = q.shape[1] // n_head_kv
    n_rows = q.shape[0] * group
    head_dim_k = layout[K + HEAD_DIM]
    head_dim_v = layout[V + HEAD_DIM]

    q_at = slot * thread_floats
    tile_at = q_at + n_rows * head_dim_k
    scores_at = tile_at + tile_floats
    factors_at = scores_at + n_rows * keys

    item = take_next(counter)
    while item < n_pages * n_head_kv:
        page_idx = page_begin + item // n_head_kv
        out_at = partials_at + item * partial_floats
        row_max_at = out_at + n_rows * head_dim_v
        row_sum_at = row_max_at + _align_lanes(n_rows)
        _attend_page(
            layout, keys, arena, page_offsets[page_idx], page_idx * layout[PAGE_TOKENS], item % n_head_kv, n_kv, q,
            first_pos, scale, floats, q_at, tile_at, scores_at, factors_at, out_at, row_max_at, row_sum_at,
        )
        item = take_next(counter)


@njit(nogil=True)
def _fold_partials(layout, n_pages, floats, partials_at, partial_floats, n_tokens, group, acc, row_max, row_sum):
    """Fold a group's partials into the state, strictly from left to right; a partial that saw no key is skipped."""
    n_head_kv = layout[N_HEAD_KV]
    head_dim_v = layout[V + HEAD_DIM]
    n_rows = n_tokens * group
    for item in range(n_pages * n_head_kv):
        out_at = partials_at + item * partial_floats
        row_max_at = out_at + n_rows * head_dim_v
        row_sum_at = row_max_at + _align_lanes(n_rows)
        for row in range(n_rows):
            token, head = row // group, item % n_head_kv * group + row % group
            partial_max = floats[row_max_at + row]
            partial_sum = floats[row_sum_at + row]
            if partial_sum == _ZERO:
                continue
            old_max = row_max[token, head]
            new_max = max(old_max, partial_max)
            old_factor = _exp(old_max - new_max)
            partial_factor = _exp(partial_max - new_max)
            row_max[token, head] = new_max
            row_sum[token, head] = fma(row_sum[token, head], old_factor, partial_sum * partial_factor)
            acc_at = (token * acc.shape[1] + head) * head_dim_v
            for idx in range(0, head_dim_v, N_LANES):
                partial = splat_f32x16(partial_factor) * load_f32x16(floats, out_at + row * head_dim_v + idx)
                folded = fma(splat_f32x16(old_factor), load_f32x16(acc, acc_at + idx), partial)
                store_f32x16(acc, acc_at + idx, folded)


@njit(nogil=True, parallel=True, cache=True)
def attend_decode_kernel(n_slots, counter, layout, keys, arena, page_offsets, page_begin, page_end, n_kv, q, first_pos, scale, acc, row_max, row_sum, floats, thread_floats, tile_floats, partial_floats):
    """Returns -1, or the first page of the span that is needed but lies outside the arena (nothing is done then)."""
    n_tokens = q.shape[0]
    n_visible = min(n_kv, first_pos + n_tokens)
    bad_page = _bad_page(layout, arena, page_offsets, page_begin, page_end, n_visible)
    if bad_page >= 0:
        return bad_page

    needed_end = min(page_end, (n_visible + layout[PAGE_TOKENS] - 1) // layout[PAGE_TOKENS])
    partials_at = n_slots * thread_floats
    for group_begin in range(page_begin, needed_end, DECODE_PAGES_PER_GROUP):
        n_pages = min(DECODE_PAGES_PER_GROUP, needed_end - group_begin)
        counter[0] = 0
        for slot in prange(n_slots):
            _decode_pages(
                slot, counter, layout, keys, arena, page_offsets, group_begin, n_pages, n_kv, q, first_pos, scale,
                floats, thread_floats, tile_floats, partials_at, partial_floats,
            )
        _fold_partials(
            layout, n_pages, floats, partials_at, partial_floats, n_tokens, q.shape[1] // layout[N_HEAD_KV], acc,
            row_max, row_sum,
        )
    return -1


# ---------------------------------------------------------------------------------------------------------
# Finish


@njit(nogil=True, cache=True, error_model="numpy")
def finish_attention_kernel(acc, row_sum, out):
    head_dim_v = acc.shape[2]
    for token in range(acc.shape[0]):
        for head in range(acc.shape[1]):
            total = row_sum[token, head]
            inverse = np.float32(1.0) / total if total != _ZERO else _ZERO
            at = (token * acc.shape[1] + head) * head_dim_v
            for idx in range(0, head_dim_v, N_LANES):
                store_f32x16(out, at + idx, load_f32x16(acc, at + idx) * splat_f32x16(inverse))
