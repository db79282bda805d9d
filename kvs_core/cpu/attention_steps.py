"""What prefill and decode attention have in common: query rows, the softmax of a tile, the check of page offsets.

All working values lie in ``floats``, one float32 array cut as ``attention_scratch.py`` describes; ``_at`` marks an
offset into it.
"""

# mypy: ignore-errors
# Compiled bodies work on values that Python's type system cannot describe.

from __future__ import annotations

import numpy as np

from kvs_core.cpu.attention_tiles import exp_of_weight, inlined, inner, largest_of_eight_rows, sum_eight_rows
from kvs_core.cpu.simd import (
    fma,
    keep_lanes_below,
    keep_lanes_from,
    load_f32x16,
    maximum,
    splat_f32x16,
    store_f32x16,
    zero_f32x16,
)
from kvs_core.cpu.vector_math import tanh_f32x16
from kvs_core.cpu.vector_types import N_LANES

NO_KEY = np.float32(-np.inf)
LOWEST = np.finfo(np.float32).min
ZERO = np.float32(0.0)
ONE = np.float32(1.0)


@inlined
def round_up(n, multiple):
    return (n + multiple - 1) // multiple * multiple


@inner
def fill(floats, begin, end, value):
    """Set ``floats[begin:end]``, a multiple of 16 elements."""
    for idx in range(begin, end, N_LANES):
        store_f32x16(floats, idx, splat_f32x16(value))


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
def softmax_block(
    floats, scores_at, stride, n_columns, n_rows, visible, softcap, row_max_at, row_sum_at, factors_at, lanes_at
):
    """Turn a tile's scores into weights and update each row's maximum and sum: one step of online softmax.

    scores_at                [n_rows, n_columns], at most 8 rows ``stride`` apart; becomes exp(score - maximum),
                             0 where masked
    visible                  (most, first, row, group, window): with n = first + (row + r) // group, row r of the block
                             sees the columns below min(most, n) and not below n - window
    softcap                  scores are first put through softcap * tanh(score / softcap); 0: they are not
    row_max_at, row_sum_at   the rows' states, [16] with unused lanes at the end
    factors_at               [16]: gets what each row's earlier output must be multiplied by
    lanes_at                 [9, 16] of scratch
    Source                   online softmax, Milakov and Gimelshein 2018 (arXiv 1805.02867)
    """
    most, first, first_row, group, window = visible
    if softcap != ZERO:
        for row in range(n_rows):
            _cap_scores(floats, scores_at + row * stride, n_columns, softcap)
    last_hidden = first + (first_row + n_rows - 1) // group - window
    if min(most, first + first_row // group) >= n_columns and last_hidden <= 0:
        for row in range(n_rows):
            at = scores_at + row * stride
            largest = load_f32x16(floats, at)
            for column in range(N_LANES, n_columns, N_LANES):
                largest = maximum(load_f32x16(floats, at + column), largest)
            store_f32x16(floats, lanes_at + row * N_LANES, largest)
    else:
        for row in range(n_rows):
            n_seen = first + (first_row + row) // group
            n_visible = min(most, n_seen)
            n_hidden = n_seen - window
            at = scores_at + row * stride
            largest = splat_f32x16(NO_KEY)
            for column in range(0, n_columns, N_LANES):
                scores = keep_lanes_below(load_f32x16(floats, at + column), n_visible - column, NO_KEY)
                scores = keep_lanes_from(scores, n_hidden - column, NO_KEY)
                store_f32x16(floats, at + column, scores)
                largest = maximum(scores, largest)
            store_f32x16(floats, lanes_at + row * N_LANES, largest)

    # From here one vector holds a number of each row. A row that has seen no key yet has the maximum -inf; scores
    # are then taken relative to the lowest finite number, so that inf - inf is never formed.
    old_max = load_f32x16(floats, row_max_at)
    new_max = maximum(largest_of_eight_rows(floats, lanes_at), old_max)
    reference = maximum(new_max, splat_f32x16(LOWEST))
    factors = exp_of_weight(old_max - reference)
    store_f32x16(floats, row_max_at, new_max)
    store_f32x16(floats, factors_at, factors)
    reference_at = lanes_at + 8 * N_LANES
    store_f32x16(floats, reference_at, reference)

    for row in range(n_rows):
        at = scores_at + row * stride
        row_reference = splat_f32x16(floats[reference_at + row])
        total = zero_f32x16()
        for column in range(0, n_columns, N_LANES):
            weights = exp_of_weight(load_f32x16(floats, at + column) - row_reference)
            store_f32x16(floats, at + column, weights)
            total = total + weights
        store_f32x16(floats, lanes_at + row * N_LANES, total)
    row_sum = fma(load_f32x16(floats, row_sum_at), factors, sum_eight_rows(floats, lanes_at))
    store_f32x16(floats, row_sum_at, row_sum)


@inner
def _cap_scores(floats, at, n_columns, softcap):
    cap = splat_f32x16(softcap)
    for column in range(0, n_columns, N_LANES):
        store_f32x16(floats, at + column, cap * tanh_f32x16(load_f32x16(floats, at + column) / cap))


@inner
def find_bad_page(layout, arena, page_offsets, page_begin, n_visible, page_end):
    """First page of the span that is needed but does not lie inside the arena, or -1."""
    needed_end = min(page_end, round_up(n_visible, layout.page_tokens) // layout.page_tokens)
    for page_idx in range(page_begin, needed_end):
        page_at = page_offsets[page_idx]
        if page_at < 0 or page_at + layout.page_bytes > arena.size:
            return page_idx
    return -1
