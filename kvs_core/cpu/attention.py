"""Attention over paged K and V on the CPU: decode and prefill, each consuming any span of pages.

Storing rows is in ``store.py``, reading them in ``kv_rows.py``, the unrolled loops in ``attention_tiles.py``.

Both walk the pages of a layer in logical order and fold what they find into an ``AttentionState``, so a key
range may arrive in any number of spans and give the same bits:

    begin_attention(state)
    attend_decode(..., page_begin=0, page_end=5, ...)      or attend_prefill; the caller decides by phase
    attend_decode(..., page_begin=5, page_end=9, ...)
    finish_attention(state, out)

Decode    one partial per (page, K/V head, token), computed by any thread, folded from left to right.
Prefill   query tiles of several tokens and all heads that share a K/V head walk key tiles in order; threads
          take whole query tiles. Key tiles are fixed by position, so neither spans nor threads shape a sum.

A query row sees the keys at positions ``<= first_pos + row`` and ``< n_kv``, with a sliding window only the last
``n_swa`` of them. Later rows of a page may hold anything: they are masked before the softmax, and their values are
never multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvs_core.attention_rule import AttentionRule
from kvs_core.cpu.arguments import FLOAT32, UINT8, check_array, check_geometry, check_page_arguments
from kvs_core.cpu.attention_decode import attend_decode_kernel
from kvs_core.cpu.attention_finish import finish_attention_kernel
from kvs_core.cpu.attention_prefill import attend_prefill_kernel
from kvs_core.cpu.attention_scratch import (
    DECODE_TOKENS_MAX,
    FLOAT_BYTES,
    LINE_BYTES,
    attention_state_bytes,
    decode_parts,
    decode_scratch_bytes,
    prefill_parts,
    prefill_scratch_bytes,
)
from kvs_core.cpu.kv_rows import layout_numbers
from kvs_core.errors import KernelArgumentError
from kvs_core.kv_types import PageGeometry
from kvs_core.units import align_up

if TYPE_CHECKING:
    from kvs_core.cpu.threads import ThreadTeam

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


NO_WINDOW = 1 << 30
"""A window that no position is outside of; its distances still fit 32 bits."""

NO_SINKS = np.empty(0, dtype=np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionState:
    """Attention over the keys seen so far, not yet normalised.

    acc    float32 [n_tokens, n_head, head_dim_v]   sum of exp(score - max) * V
    max    float32 [n_tokens, n_head]               largest scaled score
    sum    float32 [n_tokens, n_head]               sum of exp(score - max)
    """

    acc: Floats
    max: Floats
    sum: Floats


def carve_attention_state(workspace: Bytes, *, n_tokens: int, n_head: int, head_dim_v: int) -> AttentionState:
    """Views of ``workspace``: uint8 [at least attention_state_bytes()], at a multiple of 4. Values are left alone."""
    n_bytes = attention_state_bytes(n_head=n_head, head_dim_v=head_dim_v, n_tokens=n_tokens)
    if workspace.dtype != np.uint8 or workspace.ndim != 1 or workspace.size < n_bytes:
        raise KernelArgumentError(
            f"workspace is {workspace.dtype} {list(workspace.shape)}; attention state needs uint8 [{n_bytes}]"
        )
    per_row = align_up(n_tokens * n_head * FLOAT_BYTES, LINE_BYTES)
    acc_bytes = n_tokens * n_head * head_dim_v * FLOAT_BYTES
    max_at = align_up(acc_bytes, LINE_BYTES)
    row_bytes = n_tokens * n_head * FLOAT_BYTES
    rows = (n_tokens, n_head)
    return AttentionState(
        acc=workspace[:acc_bytes].view(np.float32).reshape(*rows, head_dim_v),
        max=workspace[max_at : max_at + row_bytes].view(np.float32).reshape(rows),
        sum=workspace[max_at + per_row : max_at + per_row + row_bytes].view(np.float32).reshape(rows),
    )


def begin_attention(state: AttentionState) -> None:
    """Forget all keys: maximum -inf, sum and output 0."""
    state.max.fill(-np.inf)
    state.sum.fill(0.0)
    state.acc.fill(0.0)


def attend_decode(
    arena: Bytes,
    geometry: PageGeometry,
    page_offsets: Integers,
    page_begin: int,
    page_end: int,
    n_kv: int,
    q: Floats,
    first_pos: int,
    rule: AttentionRule,
    state: AttentionState,
    scratch: Bytes,
    team: ThreadTeam,
) -> None:
    """Fold pages ``page_begin .. page_end`` into ``state`` for a step of 1 to 8 tokens.

    arena           uint8 [n_bytes]
    page_offsets    int64 [n_pages]   byte of the arena where each logical page starts; entries outside the span,
                                      and pages no row sees, are not read
    n_kv            positions that hold keys
    q               float32 [n_tokens, n_head, head_dim_k]; row i is at position first_pos + i
    rule            how scores are made; pages that lie before the window of every row may be left out
    scratch         uint8 [at least decode_scratch_bytes()] for this token count and the team's threads
    Bits            depend on the keys a token sees only: not on spans, threads, or the step's other tokens.
    Raises          KernelArgumentError
    """
    if q.ndim == 3 and not 1 <= q.shape[0] <= DECODE_TOKENS_MAX:
        raise KernelArgumentError(f"a decode step has 1 to {DECODE_TOKENS_MAX} tokens, got {q.shape[0]}")
    _check_arguments(arena, geometry, page_offsets, page_begin, page_end, n_kv, q, first_pos, state)
    part_numbers, n_bytes = _decode_cut(geometry, q.shape[1], q.shape[0], team.n_threads)
    bad_page = attend_decode_kernel(
        layout_numbers(geometry),
        part_numbers,
        arena,
        page_offsets,
        page_begin,
        page_end,
        n_kv,
        q,
        first_pos,
        np.float32(rule.scale),
        rule.n_swa or NO_WINDOW,
        np.float32(rule.softcap),
        state.acc,
        state.max,
        state.sum,
        _floats_of(scratch, n_bytes),
        team.n_threads,
        team.control,
    )
    _refuse_bad_page(bad_page, page_offsets, geometry, arena)


@lru_cache(maxsize=256)
def _decode_cut(geometry: PageGeometry, n_head: int, n_tokens: int, n_threads: int) -> tuple[Integers, int]:
    parts = decode_parts(geometry, n_head, n_tokens)
    n_bytes = decode_scratch_bytes(geometry, n_head=n_head, n_tokens=n_tokens, n_threads=n_threads)
    return np.array(parts, dtype=np.int64), n_bytes


def attend_prefill(
    arena: Bytes,
    geometry: PageGeometry,
    page_offsets: Integers,
    page_begin: int,
    page_end: int,
    n_kv: int,
    q: Floats,
    first_pos: int,
    rule: AttentionRule,
    state: AttentionState,
    scratch: Bytes,
    team: ThreadTeam,
) -> None:
    """Fold pages ``page_begin .. page_end`` into ``state`` for a micro-batch of any size.

    Arguments as in ``attend_decode``, with prefill_scratch_bytes() of scratch. V of the positions below ``n_kv``
    must be finite: a key that comes after a row has weight 0 there, and 0 * inf is not 0.
    Bits      do not depend on spans or threads; they differ from those of ``attend_decode``.
    Raises    KernelArgumentError
    """
    _check_arguments(arena, geometry, page_offsets, page_begin, page_end, n_kv, q, first_pos, state)
    part_numbers, n_bytes = _prefill_cut(geometry, q.shape[1], q.shape[0], team.n_threads)
    bad_page = attend_prefill_kernel(
        layout_numbers(geometry),
        part_numbers,
        arena,
        page_offsets,
        page_begin,
        page_end,
        n_kv,
        q,
        first_pos,
        np.float32(rule.scale),
        rule.n_swa or NO_WINDOW,
        np.float32(rule.softcap),
        state.acc,
        state.max,
        state.sum,
        _floats_of(scratch, n_bytes),
        team.control,
    )
    _refuse_bad_page(bad_page, page_offsets, geometry, arena)


@lru_cache(maxsize=256)
def _prefill_cut(geometry: PageGeometry, n_head: int, n_tokens: int, n_threads: int) -> tuple[Integers, int]:
    parts = prefill_parts(geometry, n_head, n_tokens)
    n_bytes = prefill_scratch_bytes(geometry, n_head=n_head, n_tokens=n_tokens, n_threads=n_threads)
    return np.array(parts, dtype=np.int64), n_bytes


def finish_attention(state: AttentionState, out: Floats, sinks: Floats = NO_SINKS) -> None:
    """Divide by the sums: ``out`` float32 [n_tokens, n_head, head_dim_v]; rows that saw no key become 0.

    sinks   float32 [n_head]: a score of each head that takes its share of the weights and brings no value
    """
    if sinks is not NO_SINKS:
        check_array("sinks", sinks, FLOAT32, (state.acc.shape[1],))
    _check_state(state, state.acc.shape[0], state.acc.shape[1], state.acc.shape[2])
    check_array("out", out, FLOAT32, state.acc.shape)
    finish_attention_kernel(state.acc, state.max, state.sum, sinks, out)


def _check_arguments(
    arena: Bytes,
    geometry: PageGeometry,
    page_offsets: Integers,
    page_begin: int,
    page_end: int,
    n_kv: int,
    q: Floats,
    first_pos: int,
    state: AttentionState,
) -> None:
    check_geometry(geometry)
    check_page_arguments(arena, page_offsets)
    if not 0 <= page_begin <= page_end <= page_offsets.size:
        raise KernelArgumentError(
            f"pages {page_begin}..{page_end} are not a span of the {page_offsets.size} pages with an offset"
        )
    if n_kv < 0 or first_pos < 0:
        raise KernelArgumentError(f"n_kv {n_kv} and first_pos {first_pos} must not be negative")
    check_array("q", q, FLOAT32, (None, None, geometry.head_dim_k))
    n_tokens, n_head, _ = q.shape
    if n_head == 0 or n_head % geometry.n_head_kv:
        raise KernelArgumentError(f"q has {n_head} heads, not a multiple of the {geometry.n_head_kv} K/V heads")
    _check_state(state, n_tokens, n_head, geometry.head_dim_v)


def _check_state(state: AttentionState, n_tokens: int, n_head: int, head_dim_v: int) -> None:
    check_array("state.acc", state.acc, FLOAT32, (n_tokens, n_head, head_dim_v))
    check_array("state.max", state.max, FLOAT32, (n_tokens, n_head))
    check_array("state.sum", state.sum, FLOAT32, (n_tokens, n_head))


def _floats_of(scratch: Bytes, n_bytes: int) -> Floats:
    """The part of ``scratch`` that starts on a 64-byte line, as float32."""
    check_array("scratch", scratch, UINT8, (None,))
    if scratch.size < n_bytes:
        raise KernelArgumentError(f"scratch has {scratch.size} bytes; this step needs {n_bytes}")
    address: int = scratch.__array_interface__["data"][0]
    begin = -address % LINE_BYTES
    return scratch[begin : begin + n_bytes - LINE_BYTES].view(np.float32)


def _refuse_bad_page(bad_page: int, page_offsets: Integers, geometry: PageGeometry, arena: Bytes) -> None:
    if bad_page >= 0:
        raise KernelArgumentError(
            f"page {bad_page} at byte {page_offsets[bad_page]} with {geometry.page_bytes} bytes "
            f"lies outside the arena of {arena.size} bytes"
        )
