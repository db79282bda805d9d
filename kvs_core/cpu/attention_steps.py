"""What prefill and decode attention have in common: query rows, the softmax of a tile, the check of page offsets.

All working values lie in ``floats``, one float32 array cut as ``attention_scratch.py`` describes; ``_at`` marks an
offset into it.
"""

# mypy: ignore-errors
# Compiled bodies work on values that Python's type system cannot describe.

from __future__ import annotations

import numpy as np

from kvs_core.cpu.attention_tiles import inlined, inner
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
from kvs_core.cpu.vector_types import N_LANES

NO_KEY = np.float32(-np.inf)
ZERO = np.float32(0.0)


@inlined
def round_up(n, multiple):
    return (n + multiple - 1) // multiple * multiple


@inlined
def fill(floats, begin, end, value):
    for idx in range(begin, end):
        floats[idx] = value


@inner
def load_query_rows(q, token_begin, token_end, head_begin, group, scale, floats, rows_at):
    """Heads ``head_begin .. + group`` of each token times ``scale``, one row after another."""
    n_head, head_dim = q.shape[1], q.shape[2]
    factor = splat_f32x16(scale)
    for token in range(token_begin, token_end):
        source = (token * n_head + head_begin) * head_dim
        for idx in range(0, group * head_dim, N_LANES):
            store_f32x16(floats, rows_at + idx, factor * load_f32x16(q, source + idx))
        rows_at += group * head_dim


@inner
def softmax_rows(floats, scores_at, stride, n_columns, n_rows, visible_of_row, row_max_at, row_sum_at, factors_at):
    """Turn a tile's scores into weights and update each row's maximum and sum: one step of online softmax.

    scores_at         [n_rows, n_columns], rows ``stride`` apart; becomes exp(score - maximum), 0 where masked
    visible_of_row    (most, first, row, group): row r of the tile sees its first
                      min(most, first + (row + r) // group) columns, none when that is not positive
    factors_at        [n_rows rounded up to 16]: gets what each row's earlier output must be multiplied by
    Source            online softmax, Milakov and Gimelshein 2018 (arXiv 1805.02867)
    """
    most, first, first_row, group = visible_of_row
    for row in range(n_rows):
        n_visible = min(most, first + (first_row + row) // group)
        at = scores_at + row * stride
        largest = splat_f32x16(NO_KEY)
        for column in range(0, n_columns, N_LANES):
            scores = keep_lanes_below(load_f32x16(floats, at + column), n_visible - column, NO_KEY)
            store_f32x16(floats, at + column, scores)
            largest = maximum(scores, largest)
        old_max = floats[row_max_at + row]
        new_max = max(old_max, max_lanes(largest))
        floats[row_max_at + row] = new_max
        floats[factors_at + row] = old_max - _reference(new_max)

    for row in range(0, n_rows, N_LANES):
        store_f32x16(floats, factors_at + row, exp_f32x16(load_f32x16(floats, factors_at + row)))

    for row in range(n_rows):
        at = scores_at + row * stride
        reference = splat_f32x16(_reference(floats[row_max_at + row]))
        total = zero_f32x16()
        for column in range(0, n_columns, N_LANES):
            weights = exp_f32x16(load_f32x16(floats, at + column) - reference)
            store_f32x16(floats, at + column, weights)
            total = total + weights
        floats[row_sum_at + row] = fma(floats[row_sum_at + row], floats[factors_at + row], sum_lanes(total))


@inlined
def _reference(row_max):
    """What scores are taken relative to; a row that has seen no key must not form inf - inf."""
    return row_max if row_max != NO_KEY else ZERO


@inner
def find_bad_page(layout, arena, page_offsets, page_begin, n_visible, page_end):
    """First page of the span that is needed but does not lie inside the arena, or -1."""
    needed_end = min(page_end, round_up(n_visible, layout.page_tokens) // layout.page_tokens)
    for page_idx in range(page_begin, needed_end):
        page_at = page_offsets[page_idx]
        if page_at < 0 or page_at + layout.page_bytes > arena.size:
            return page_idx
    return -1
