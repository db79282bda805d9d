"""Sizes of the workspace that CPU attention needs. Integers only: the planner imports this file.

No arrays and no kernels; ``attention.py`` cuts its scratch by the same functions, so plan and run agree.

    prefill    | counter | thread 0 | thread 1 | ...
               one thread:   Q rows | output rows | max, sum | K tile transposed | row tile | scores, factors
    decode     | counter | thread 0 | thread 1 | ... | partials of a group of pages
               one thread:   Q rows | row tile | scores, factors
               one partial:  output rows | max | sum        of one (page, K/V head) and all tokens of the step

Everything is counted in float32 elements and every part starts on a 64-byte line.
"""

from __future__ import annotations

from kvs_core.kv_types import PageGeometry
from kvs_core.units import align_up, ceil_div

N_LANES = 16  # elements of a vector; head sizes must be a multiple
FLOAT_BYTES = 4
LINE_BYTES = 64

# Keys handled together. 64 keys of head size 64 keep both tiles (32 KiB) inside a 48 KiB first-level cache.
TILE_KEYS_MAX = 64

# Query rows (tokens x heads that share a K/V head) that walk the keys together: unpacking and transposing a tile
# then costs 3 % of the products on it, and the rows (2 x 48 KiB at head size 64) stay in the second-level cache.
PREFILL_ROWS_MAX = 192
PREFILL_ROWS_MIN = 24
# A step too short for full query tiles is cut into this many, so that more than one thread has work.
PREFILL_TILES_WANTED = 4
# Rows of one register block; a query tile is padded to a multiple.
PREFILL_ROW_BLOCK = 6

# Tokens of one decode step, and pages whose partials are kept before they are folded.
DECODE_TOKENS_MAX = 8
DECODE_PAGES_PER_GROUP = 16


def tile_keys(page_tokens: int) -> int:
    """Keys of one tile; tiles never cross a page, so they are fixed by position."""
    return min(page_tokens, TILE_KEYS_MAX)


def prefill_tile_tokens(n_tokens: int, group: int) -> int:
    """Tokens of one query tile, for ``group`` query heads per K/V head; grows with ``n_tokens``."""
    low = ceil_div(PREFILL_ROWS_MIN, group)
    high = max(low, PREFILL_ROWS_MAX // group)
    return min(max(ceil_div(n_tokens, PREFILL_TILES_WANTED), low), high)


def prefill_tile_rows(n_tokens: int, group: int) -> int:
    """Rows of one query tile, padding included."""
    return align_up(prefill_tile_tokens(n_tokens, group) * group, PREFILL_ROW_BLOCK)


def row_tile_floats(geometry: PageGeometry) -> int:
    """One tile of unpacked K or V rows."""
    return tile_keys(geometry.page_tokens) * max(geometry.head_dim_k, geometry.head_dim_v)


def prefill_thread_floats(geometry: PageGeometry, n_head: int, n_tokens: int) -> int:
    """Scratch of one thread during prefill."""
    rows = prefill_tile_rows(n_tokens, n_head // geometry.n_head_kv)
    keys = tile_keys(geometry.page_tokens)
    per_row = geometry.head_dim_k + geometry.head_dim_v
    scores = PREFILL_ROW_BLOCK * keys + N_LANES
    state = 2 * align_up(rows, N_LANES)
    return align_up(rows * per_row + state + keys * geometry.head_dim_k + row_tile_floats(geometry) + scores, N_LANES)


def decode_thread_floats(geometry: PageGeometry, n_head: int, n_tokens: int) -> int:
    """Scratch of one thread during decode."""
    rows = n_tokens * (n_head // geometry.n_head_kv)
    keys = tile_keys(geometry.page_tokens)
    factors = n_tokens * align_up(n_head // geometry.n_head_kv, N_LANES)
    return rows * (geometry.head_dim_k + keys) + row_tile_floats(geometry) + factors


def decode_partial_floats(geometry: PageGeometry, n_head: int, n_tokens: int) -> int:
    """One partial: the un-normalised output, maximum and sum of one page and K/V head."""
    rows = n_tokens * (n_head // geometry.n_head_kv)
    return rows * geometry.head_dim_v + 2 * align_up(rows, N_LANES)


def prefill_scratch_bytes(geometry: PageGeometry, *, n_head: int, n_tokens: int, n_threads: int) -> int:
    """Scratch for ``attend_prefill`` on up to ``n_tokens`` tokens and ``n_threads`` threads; context does not matter."""
    return _with_counter(n_threads * prefill_thread_floats(geometry, n_head, n_tokens))


def decode_scratch_bytes(geometry: PageGeometry, *, n_head: int, n_tokens: int, n_threads: int) -> int:
    """Scratch for ``attend_decode`` on up to ``n_tokens`` tokens and ``n_threads`` threads; context does not matter."""
    partials = DECODE_PAGES_PER_GROUP * geometry.n_head_kv * decode_partial_floats(geometry, n_head, n_tokens)
    return _with_counter(n_threads * decode_thread_floats(geometry, n_head, n_tokens) + partials)


def attention_state_bytes(*, n_head: int, head_dim_v: int, n_tokens: int) -> int:
    """Bytes of an ``AttentionState``: output sums, maxima and sums, each on its own lines."""
    per_row = align_up(n_tokens * n_head * FLOAT_BYTES, LINE_BYTES)
    return align_up(n_tokens * n_head * head_dim_v * FLOAT_BYTES, LINE_BYTES) + 2 * per_row


def _with_counter(n_floats: int) -> int:
    # One line to reach a 64-byte boundary wherever the caller's bytes start, one for the work counter.
    return 2 * LINE_BYTES + n_floats * FLOAT_BYTES
