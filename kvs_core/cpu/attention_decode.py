"""Compiled body of decode attention; arguments are checked by ``attention.attend_decode``.

One task is the partial of one page and K/V head, for every token of the step. Partials of a group of pages are kept,
then folded into the state from left to right, so it does not matter which thread made which, or how pages were grouped.
"""

# mypy: ignore-errors
# Compiled bodies work on values that Python's type system cannot describe.

from __future__ import annotations

from kvs_core.cpu.attention_scratch import DECODE_PAGES_PER_GROUP, DECODE_ROW_BLOCK, DecodeParts
from kvs_core.cpu.attention_steps import (
    NO_KEY,
    ONE,
    ZERO,
    fill,
    find_bad_page,
    load_query_rows,
    round_up,
    softmax_block,
)
from kvs_core.cpu.attention_tiles import dot_16_rows, inlined, inner, scale_and_add_rows
from kvs_core.cpu.kernel_cache import cached_njit
from kvs_core.cpu.kv_rows import load_rows, page_layout
from kvs_core.cpu.simd import fma, load_f32x16, max_lanes, prefetch, splat_f32x16, store_f32x16
from kvs_core.cpu.tasks import kernel_task, run_tasks
from kvs_core.cpu.vector_math import exp_f32x16
from kvs_core.cpu.vector_types import N_LANES

_PARTIALS_AHEAD = 4


@cached_njit()
def attend_decode_kernel(
    layout_numbers,
    part_numbers,
    arena,
    page_offsets,
    page_begin,
    page_end,
    n_kv,
    q,
    first_pos,
    scale,
    window,
    softcap,
    acc,
    row_max,
    row_sum,
    floats,
    n_threads,
    team,
):
    """Returns -1, or the first page of the span that is needed but lies outside the arena; nothing is done then.

    layout_numbers    ``kv_rows.layout_numbers``
    part_numbers      ``attention_scratch.DecodeParts`` as int64 [10]
    """
    layout = page_layout(layout_numbers)
    parts = _parts(part_numbers)
    n_visible = min(n_kv, first_pos + q.shape[0])
    bad_page = find_bad_page(layout, arena, page_offsets, page_begin, n_visible, page_end)
    if bad_page >= 0:
        return bad_page

    partials_at = n_threads * parts.n_floats
    needed_end = min(page_end, (n_visible + layout.page_tokens - 1) // layout.page_tokens)
    for group_begin in range(page_begin, needed_end, DECODE_PAGES_PER_GROUP):
        n_partials = min(DECODE_PAGES_PER_GROUP, needed_end - group_begin) * layout.n_head_kv
        arguments = (
            layout_numbers,
            part_numbers,
            arena,
            page_offsets,
            group_begin,
            n_visible,
            q,
            first_pos,
            (scale, window, softcap),
            floats,
            partials_at,
        )
        run_tasks(team, n_partials, _attend_page, arguments)
        for partial in range(n_partials):
            partial_at = partials_at + partial * parts.partial_floats
            _prefetch_partial(parts, floats, partial_at + _PARTIALS_AHEAD * parts.partial_floats)
            head_begin = partial % layout.n_head_kv * (q.shape[1] // layout.n_head_kv)
            _fold_partial(parts, floats, partial_at, head_begin, q.shape[1] // layout.n_head_kv, acc, row_max, row_sum)
    return -1


@inlined
def _parts(numbers):
    return DecodeParts(
        numbers[0],
        numbers[1],
        numbers[2],
        numbers[3],
        numbers[4],
        numbers[5],
        numbers[6],
        numbers[7],
        numbers[8],
        numbers[9],
    )


@kernel_task
def _attend_page(
    task,
    thread_idx,
    layout_numbers,
    part_numbers,
    arena,
    page_offsets,
    group_begin,
    n_kv,
    q,
    first_pos,
    rule,
    floats,
    partials_at,
):
    """The partial of one page and K/V head for all tokens, each computed as if it were alone in the step."""
    layout = page_layout(layout_numbers)
    parts = _parts(part_numbers)
    scale, window, softcap = rule
    n_tokens = q.shape[0]
    group = q.shape[1] // layout.n_head_kv
    n_rows = n_tokens * group
    token_blocks = round_up(group, DECODE_ROW_BLOCK) // DECODE_ROW_BLOCK
    page_idx = group_begin + task // layout.n_head_kv
    head_kv_idx = task % layout.n_head_kv
    page_at = page_offsets[page_idx]
    head_dim_k, head_dim_v = layout.k.head_dim, layout.v.head_dim
    values, value_stride = layout.v, head_dim_v
    if layout.v_in_k:
        values, value_stride = layout.k, head_dim_k
    thread_at = thread_idx * parts.n_floats
    q_at = thread_at + parts.q
    tile_at = thread_at + parts.row_tile
    scores_at = thread_at + parts.scores
    factors_at = thread_at + parts.factors
    out_at = partials_at + task * parts.partial_floats
    row_max_at = out_at + parts.partial_max
    row_sum_at = out_at + parts.partial_sum

    load_query_rows(q, 0, n_tokens, head_kv_idx * group, group, scale, floats, q_at)
    fill(floats, out_at, out_at + n_rows * head_dim_v, ZERO)
    fill(floats, row_max_at, row_sum_at, NO_KEY)
    fill(floats, row_sum_at, out_at + parts.partial_floats, ZERO)

    page_pos = page_idx * layout.page_tokens
    n_keys = min(layout.page_tokens, n_kv - page_pos)
    for key in range(0, n_keys, parts.tile_keys):
        load_rows(layout.k, arena, page_at, head_kv_idx, key, min(parts.tile_keys, n_keys - key), floats, tile_at)
        for token in range(n_tokens):
            n_visible = min(n_keys, first_pos + token + 1 - page_pos)
            for row in range(token * group, (token + 1) * group):
                for tile_key in range(0, min(parts.tile_keys, n_visible - key), N_LANES):
                    dot_16_rows(
                        floats,
                        q_at + row * head_dim_k,
                        tile_at + tile_key * head_dim_k,
                        head_dim_k,
                        head_dim_k,
                        scores_at + row * layout.page_tokens + key + tile_key,
                    )

    for token in range(n_tokens):
        n_seen = first_pos + token + 1 - page_pos
        n_visible = min(n_keys, n_seen)
        if n_visible <= 0:
            continue
        for head in range(0, group, DECODE_ROW_BLOCK):
            line = (token * token_blocks + head // DECODE_ROW_BLOCK) * N_LANES
            softmax_block(
                floats,
                scores_at + (token * group + head) * layout.page_tokens,
                layout.page_tokens,
                round_up(n_visible, N_LANES),
                min(DECODE_ROW_BLOCK, group - head),
                (n_visible, n_seen, 0, group, window),
                softcap,
                row_max_at + line,
                row_sum_at + line,
                factors_at,
                thread_at + parts.lanes,
            )

    # The whole page was one step of the softmax, so nothing earlier has to be scaled.
    fill(floats, factors_at, factors_at + round_up(group, N_LANES), ONE)
    for key in range(0, n_keys, parts.tile_keys):
        load_rows(values, arena, page_at, head_kv_idx, key, min(parts.tile_keys, n_keys - key), floats, tile_at)
        for token in range(n_tokens):
            n_visible = min(n_keys, first_pos + token + 1 - page_pos)
            if n_visible > key:
                row = token * group
                scale_and_add_rows(
                    floats,
                    scores_at + row * layout.page_tokens + key,
                    layout.page_tokens,
                    tile_at,
                    value_stride,
                    out_at + row * head_dim_v,
                    head_dim_v,
                    min(parts.tile_keys, n_visible - key),
                    factors_at,
                    group,
                    head_dim_v,
                )


@inlined
def _prefetch_partial(parts, floats, partial_at):
    """Ask for a partial that another core may have written; one line at a time, waiting would take longer than folding.

    Behind the last partial this names memory that nobody reads, which does no harm.
    """
    for idx in range(partial_at, partial_at + parts.partial_floats, N_LANES):
        prefetch(floats, idx)


@inner
def _fold_partial(parts, floats, partial_at, head_begin, group, acc, row_max, row_sum):
    """Fold one partial into the state of its heads; rows that saw no key in the page are left alone."""
    n_head, head_dim_v = acc.shape[1], acc.shape[2]
    token_blocks = round_up(group, DECODE_ROW_BLOCK) // DECODE_ROW_BLOCK
    for row in range(acc.shape[0] * group):
        token, head_in_group = row // group, row % group
        head = head_begin + head_in_group
        line = token * token_blocks + head_in_group // DECODE_ROW_BLOCK
        lane = line * N_LANES + head_in_group % DECODE_ROW_BLOCK
        partial_max = floats[partial_at + parts.partial_max + lane]
        partial_sum = floats[partial_at + parts.partial_sum + lane]
        if partial_sum == ZERO:
            continue
        old_max = row_max[token, head]
        new_max = max(old_max, partial_max)
        old_factor = _exp(old_max - new_max)
        partial_factor = _exp(partial_max - new_max)
        row_max[token, head] = new_max
        row_sum[token, head] = fma(row_sum[token, head], old_factor, partial_sum * partial_factor)
        acc_at = (token * n_head + head) * head_dim_v
        for idx in range(0, head_dim_v, N_LANES):
            addend = splat_f32x16(partial_factor) * load_f32x16(floats, partial_at + row * head_dim_v + idx)
            folded = fma(splat_f32x16(old_factor), load_f32x16(acc, acc_at + idx), addend)
            store_f32x16(acc, acc_at + idx, folded)


@inlined
def _exp(x):
    return max_lanes(exp_f32x16(splat_f32x16(x)))
