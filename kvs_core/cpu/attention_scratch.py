"""Sizes of the workspace that CPU attention needs. Integers only: the planner imports this file.

No arrays and no kernels; the launchers in ``attention.py`` cut their scratch with the same functions, so plan and
run agree.

    prefill    | thread 0 | thread 1 | ...
               one thread:   Q rows | output rows | max | sum | K tile transposed | row tile | scores | factors | lanes
    decode     | thread 0 | thread 1 | ... | partials of a group of pages
               one thread:   Q rows | row tile | scores | factors | lanes
               one partial:  output rows | max | sum        of one (page, K/V head) and all tokens of the step

Parts are counted in float32 elements and start on 64-byte lines. Rows are softmaxed in blocks (prefill: 6 rows, decode:
up to 8 of one token); max and sum have one line for each block, used from its start.
"""

from __future__ import annotations

from typing import NamedTuple

from kvs_core.kv_types import PageGeometry
from kvs_core.units import align_up, ceil_div

N_LANES = 16  # elements of a vector; head sizes must be a multiple
FLOAT_BYTES = 4
LINE_BYTES = 64

# Keys handled together. Prefill: 64 keys of head size 64 keep both tiles (32 KiB) inside a 48 KiB first-level cache.
# Decode: shorter tiles let the processor's own prefetching run ahead while a tile is computed (measured on one
# Zen 5 core, f16 from memory: 0.224, 0.200, 0.226, 0.284 ms for 4096 keys x 9 heads of 64 with 16, 32, 64, 128 keys).
PREFILL_TILE_KEYS = 64
DECODE_TILE_KEYS = 32

# Query rows (tokens x heads that share a K/V head) that walk the keys together: unpacking and transposing a tile
# then costs 3 % of the products on it, and the rows (2 x 48 KiB at head size 64) stay in the second-level cache.
PREFILL_ROWS_MAX = 192
PREFILL_ROWS_MIN = 24
# A step too short for full query tiles is cut into this many, so that more than one thread has work.
PREFILL_TILES_WANTED = 4
# Rows of one register block; a query tile is padded to a multiple.
PREFILL_ROW_BLOCK = 6
DECODE_ROW_BLOCK = 8
_SOFTMAX_LANES = 9 * N_LANES  # see attention_steps.softmax_block

# Tokens of one decode step, and pages whose partials are kept before they are folded.
DECODE_TOKENS_MAX = 8
DECODE_PAGES_PER_GROUP = 16


class PrefillParts(NamedTuple):
    """Where the parts of one thread's prefill scratch begin, ``n_floats`` apart from thread to thread."""

    tile_keys: int
    tile_tokens: int
    q: int
    out: int
    row_max: int
    row_sum: int
    k_tile: int
    row_tile: int
    scores: int
    factors: int
    lanes: int
    n_floats: int


class DecodeParts(NamedTuple):
    """Where the parts of one thread's decode scratch begin, and those of a partial from its own beginning."""

    tile_keys: int
    q: int
    row_tile: int
    scores: int
    factors: int
    lanes: int
    n_floats: int
    partial_max: int
    partial_sum: int
    partial_floats: int


def prefill_tile_tokens(n_tokens: int, group: int) -> int:
    """Tokens of one query tile, for ``group`` query heads per K/V head; never falls as ``n_tokens`` grows."""
    low = ceil_div(PREFILL_ROWS_MIN, group)
    high = max(low, PREFILL_ROWS_MAX // group)
    return min(max(ceil_div(n_tokens, PREFILL_TILES_WANTED), low), high)


def prefill_parts(geometry: PageGeometry, n_head: int, n_tokens: int) -> PrefillParts:
    """Cut one thread's scratch for a micro-batch of ``n_tokens`` tokens."""
    group = n_head // geometry.n_head_kv
    tile_keys = min(geometry.page_tokens, PREFILL_TILE_KEYS)  # tiles never cross a page: they are fixed by position
    tile_tokens = prefill_tile_tokens(n_tokens, group)
    n_rows = align_up(tile_tokens * group, PREFILL_ROW_BLOCK)

    out = n_rows * geometry.head_dim_k
    row_max = out + n_rows * geometry.head_dim_v
    block_lines = n_rows // PREFILL_ROW_BLOCK * N_LANES
    row_sum = row_max + block_lines
    k_tile = row_sum + block_lines
    row_tile = k_tile + tile_keys * geometry.head_dim_k
    scores = row_tile + tile_keys * max(geometry.head_dim_k, geometry.head_dim_v)
    factors = scores + PREFILL_ROW_BLOCK * tile_keys
    lanes = factors + N_LANES
    return PrefillParts(
        tile_keys=tile_keys,
        tile_tokens=tile_tokens,
        q=0,
        out=out,
        row_max=row_max,
        row_sum=row_sum,
        k_tile=k_tile,
        row_tile=row_tile,
        scores=scores,
        factors=factors,
        lanes=lanes,
        n_floats=lanes + _SOFTMAX_LANES,
    )


def decode_parts(geometry: PageGeometry, n_head: int, n_tokens: int) -> DecodeParts:
    """Cut one thread's scratch, and one partial, for a step of ``n_tokens`` tokens."""
    group = n_head // geometry.n_head_kv
    tile_keys = min(geometry.page_tokens, DECODE_TILE_KEYS)
    n_rows = n_tokens * group

    row_tile = n_rows * geometry.head_dim_k
    scores = row_tile + tile_keys * max(geometry.head_dim_k, geometry.head_dim_v)
    block_lines = n_tokens * ceil_div(group, DECODE_ROW_BLOCK) * N_LANES
    factors = scores + n_rows * geometry.page_tokens
    lanes = factors + align_up(group, N_LANES)
    partial_max = n_rows * geometry.head_dim_v
    partial_sum = partial_max + block_lines
    return DecodeParts(
        tile_keys=tile_keys,
        q=0,
        row_tile=row_tile,
        scores=scores,
        factors=factors,
        lanes=lanes,
        n_floats=lanes + _SOFTMAX_LANES,
        partial_max=partial_max,
        partial_sum=partial_sum,
        partial_floats=partial_sum + block_lines,
    )


def prefill_scratch_bytes(geometry: PageGeometry, *, n_head: int, n_tokens: int, n_threads: int) -> int:
    """Scratch of ``attend_prefill`` for up to ``n_tokens`` tokens and ``n_threads`` threads, at any context."""
    return _on_lines(n_threads * prefill_parts(geometry, n_head, n_tokens).n_floats)


def decode_scratch_bytes(geometry: PageGeometry, *, n_head: int, n_tokens: int, n_threads: int) -> int:
    """Scratch of ``attend_decode`` for up to ``n_tokens`` tokens and ``n_threads`` threads, at any context."""
    parts = decode_parts(geometry, n_head, n_tokens)
    n_partials = DECODE_PAGES_PER_GROUP * geometry.n_head_kv
    return _on_lines(n_threads * parts.n_floats + n_partials * parts.partial_floats)


def attention_state_bytes(*, n_head: int, head_dim_v: int, n_tokens: int) -> int:
    """Bytes of an ``AttentionState``: outputs, maxima and sums, each on its own lines."""
    per_row = align_up(n_tokens * n_head * FLOAT_BYTES, LINE_BYTES)
    return align_up(n_tokens * n_head * head_dim_v * FLOAT_BYTES, LINE_BYTES) + 2 * per_row


def _on_lines(n_floats: int) -> int:
    # One line more, to reach a 64-byte boundary wherever the caller's bytes start.
    return LINE_BYTES + n_floats * FLOAT_BYTES
