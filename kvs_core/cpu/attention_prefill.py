"""Compiled body of prefill attention; arguments are checked by ``attention.attend_prefill``.

One task is one query tile of one K/V head: the rows of several tokens and of all heads that share it. The tile walks
the span's keys in order, tile by tile; each tile of K is unpacked and transposed once for all rows, and the products
run in blocks of six rows that stay in registers.
"""

# mypy: ignore-errors
# Compiled bodies work on values that Python's type system cannot describe.

from __future__ import annotations

from kvs_core.cpu.attention_scratch import PREFILL_ROW_BLOCK, PrefillParts
from kvs_core.cpu.attention_steps import NO_KEY, ZERO, fill, find_bad_page, load_query_rows, round_up, softmax_block
from kvs_core.cpu.attention_tiles import inlined, multiply_six_rows, scale_and_add_six_rows, transpose
from kvs_core.cpu.kernel_cache import cached_njit
from kvs_core.cpu.kv_rows import load_rows, page_layout
from kvs_core.cpu.simd import load_f32x16, store_f32x16
from kvs_core.cpu.tasks import kernel_task, run_tasks
from kvs_core.cpu.vector_types import N_LANES


@cached_njit()
def attend_prefill_kernel(
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
    team,
):
    """Returns -1, or the first page of the span that is needed but lies outside the arena; nothing is done then.

    layout_numbers    ``kv_rows.layout_numbers``
    part_numbers      ``attention_scratch.PrefillParts`` as int64 [12]
    """
    layout = page_layout(layout_numbers)
    n_tokens = q.shape[0]
    bad_page = find_bad_page(layout, arena, page_offsets, page_begin, min(n_kv, first_pos + n_tokens), page_end)
    if bad_page < 0:
        tile_tokens = _parts(part_numbers).tile_tokens
        n_tasks = (n_tokens + tile_tokens - 1) // tile_tokens * layout.n_head_kv
        span = (page_begin, page_end, n_kv)
        state = (acc, row_max, row_sum)
        rule = (scale, window, softcap)
        arguments = (layout_numbers, part_numbers, arena, page_offsets, span, q, first_pos, rule, state, floats)
        run_tasks(team, n_tasks, _attend_query_tile, arguments)
    return bad_page


@inlined
def _parts(numbers):
    return PrefillParts(
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
        numbers[10],
        numbers[11],
    )


@kernel_task
def _attend_query_tile(
    task, thread_idx, layout_numbers, part_numbers, arena, page_offsets, span, q, first_pos, rule, state, floats
):
    """Fold the span's keys into one query tile; the last tiles, which see most keys, come first."""
    layout = page_layout(layout_numbers)
    parts = _parts(part_numbers)
    acc, row_max, row_sum = state
    scale, window, softcap = rule
    n_tokens, n_head = q.shape[0], q.shape[1]
    group = n_head // layout.n_head_kv
    n_tiles = (n_tokens + parts.tile_tokens - 1) // parts.tile_tokens
    head_kv_idx = task % layout.n_head_kv
    token_begin = (n_tiles - 1 - task // layout.n_head_kv) * parts.tile_tokens
    token_end = min(n_tokens, token_begin + parts.tile_tokens)
    n_rows = (token_end - token_begin) * group
    n_padded = round_up(n_rows, PREFILL_ROW_BLOCK)
    thread_at = thread_idx * parts.n_floats
    q_at = thread_at + parts.q
    out_at = thread_at + parts.out
    row_max_at = thread_at + parts.row_max
    row_sum_at = thread_at + parts.row_sum
    head_dim_k, head_dim_v = layout.k.head_dim, layout.v.head_dim
    value_stride = head_dim_k if layout.v_in_k else head_dim_v

    load_query_rows(q, token_begin, token_end, head_kv_idx * group, group, scale, floats, q_at)
    fill(floats, q_at + n_rows * head_dim_k, q_at + n_padded * head_dim_k, ZERO)
    fill(floats, out_at + n_rows * head_dim_v, out_at + n_padded * head_dim_v, ZERO)
    n_state = n_padded // PREFILL_ROW_BLOCK * N_LANES
    fill(floats, row_max_at, row_max_at + n_state, NO_KEY)
    fill(floats, row_sum_at, row_sum_at + n_state, ZERO)
    for row in range(n_rows):
        token, head = token_begin + row // group, head_kv_idx * group + row % group
        line = row // PREFILL_ROW_BLOCK * N_LANES + row % PREFILL_ROW_BLOCK
        floats[row_max_at + line] = row_max[token, head]
        floats[row_sum_at + line] = row_sum[token, head]
        for idx in range(0, head_dim_v, N_LANES):
            values = load_f32x16(acc, (token * n_head + head) * head_dim_v + idx)
            store_f32x16(floats, out_at + row * head_dim_v + idx, values)

    page_begin, page_end, n_kv = span
    visible_begin = first_pos + token_begin + 1
    visible_end = min(n_kv, first_pos + token_end)
    # Key tiles that lie before the window of every row would change nothing.
    hidden_end = max(visible_begin - window, 0) // parts.tile_keys * parts.tile_keys
    pos = max(page_begin * layout.page_tokens, hidden_end)
    while pos < min(visible_end, page_end * layout.page_tokens):
        # visible_begin and visible_end bound the positions that the tile's first and last token see.
        page_at, row_in_page = page_offsets[pos // layout.page_tokens], pos % layout.page_tokens
        n_keys = min(parts.tile_keys, visible_end - pos)
        k_at = thread_at + parts.k_tile
        tile_at = thread_at + parts.row_tile
        scores_at = thread_at + parts.scores
        factors_at = thread_at + parts.factors
        load_rows(layout.k, arena, page_at, head_kv_idx, row_in_page, n_keys, floats, tile_at)
        transpose(floats, tile_at, parts.tile_keys, head_dim_k, k_at)
        if not layout.v_in_k:  # else the rows of K, whose first elements are the values, stay where they are
            load_rows(layout.v, arena, page_at, head_kv_idx, row_in_page, n_keys, floats, tile_at)

        for row in range(0, n_padded, PREFILL_ROW_BLOCK):
            if visible_begin + (row + PREFILL_ROW_BLOCK - 1) // group <= pos:
                continue
            if visible_begin + row // group - window >= pos + n_keys:
                continue
            multiply_six_rows(
                floats,
                q_at + row * head_dim_k,
                head_dim_k,
                k_at,
                parts.tile_keys,
                scores_at,
                parts.tile_keys,
                head_dim_k,
                parts.tile_keys,
            )
            softmax_block(
                floats,
                scores_at,
                parts.tile_keys,
                parts.tile_keys,
                min(PREFILL_ROW_BLOCK, n_padded - row),
                (n_keys, visible_begin - pos, row, group, window),
                softcap,
                row_max_at + row // PREFILL_ROW_BLOCK * N_LANES,
                row_sum_at + row // PREFILL_ROW_BLOCK * N_LANES,
                factors_at,
                thread_at + parts.lanes,
            )
            scale_and_add_six_rows(
                floats,
                scores_at,
                parts.tile_keys,
                tile_at,
                value_stride,
                out_at + row * head_dim_v,
                head_dim_v,
                n_keys,
                factors_at,
                head_dim_v,
            )
        pos += parts.tile_keys

    for row in range(n_rows):
        token, head = token_begin + row // group, head_kv_idx * group + row % group
        line = row // PREFILL_ROW_BLOCK * N_LANES + row % PREFILL_ROW_BLOCK
        row_max[token, head] = floats[row_max_at + line]
        row_sum[token, head] = floats[row_sum_at + line]
        for idx in range(0, head_dim_v, N_LANES):
            values = load_f32x16(floats, out_at + row * head_dim_v + idx)
            store_f32x16(acc, (token * n_head + head) * head_dim_v + idx, values)
