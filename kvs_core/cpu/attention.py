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

A query row sees the keys at positions ``<= first_pos + row`` and ``< n_kv``. Rows of a page outside that may
hold anything: they are masked before the softmax, and their values are never multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import get_num_threads

from kvs_core.cpu.arguments import check_array, check_geometry, check_page_arguments
from kvs_core.cpu.attention_kernels import attend_decode_kernel, attend_prefill_kernel, finish_attention_kernel
from kvs_core.cpu.attention_scratch import (
    DECODE_TOKENS_MAX,
    FLOAT_BYTES,
    LINE_BYTES,
    attention_state_bytes,
    decode_partial_floats,
    decode_scratch_bytes,
    decode_thread_floats,
    prefill_scratch_bytes,
    prefill_thread_floats,
    prefill_tile_tokens,
    row_tile_floats,
    tile_keys,
)
from kvs_core.cpu.kv_rows import layout_of
from kvs_core.errors import KernelArgumentError
from kvs_core.kv_types import PageGeometry
from kvs_core.units import align_up

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


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
    """Views of ``workspace``, uint8 [at least attention_state_bytes()] and aligned to 4 bytes; values are left alone."""
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
    scale: float,
    state: AttentionState,
    scratch: Bytes,
) -> None:
    """Fold pages ``page_begin .. page_end`` into ``state`` for a step of 1 to 8 tokens.

    arena           uint8 [n_bytes]
    page_offsets    int64 [n_pages]   byte of the arena where each logical page starts; entries outside the span,
                                      and pages no row sees, are not read
    n_kv            positions that hold keys
    q               float32 [n_tokens, n_head, head_dim_k]; row i is at position first_pos + i
    scale           factor of the scores
    scratch         uint8 [at least decode_scratch_bytes()] for this token count and ``numba.get_num_threads()``
    Bits            depend on the keys a token sees only: not on spans, threads, or the step's other tokens.
    Raises          KernelArgumentError
    """
    if q.ndim == 3 and not 1 <= q.shape[0] <= DECODE_TOKENS_MAX:
        raise KernelArgumentError(f"a decode step has 1 to {DECODE_TOKENS_MAX} tokens, got {q.shape[0]}")
    _check_arguments(arena, geometry, page_offsets, page_begin, page_end, n_kv, q, first_pos, state)
    n_tokens, n_head, _ = q.shape
    n_threads = get_num_threads()
    needed = decode_scratch_bytes(geometry, n_head=n_head, n_tokens=n_tokens, n_threads=n_threads)
    counter, floats = _cut_scratch(scratch, needed)
    bad_page = attend_decode_kernel(
        n_threads,
        counter,
        layout_of(geometry),
        tile_keys(geometry.page_tokens),
        arena,
        page_offsets,
        page_begin,
        page_end,
        n_kv,
        q,
        first_pos,
        np.float32(scale),
        state.acc,
        state.max,
        state.sum,
        floats,
        decode_thread_floats(geometry, n_head, n_tokens),
        row_tile_floats(geometry),
        decode_partial_floats(geometry, n_head, n_tokens),
    )
    _refuse_bad_page(bad_page, page_offsets, geometry, arena)


def attend_prefill(
    arena: Bytes,
    geometry: PageGeometry,
    page_offsets: Integers,
    page_begin: int,
    page_end: int,
    n_kv: int,
    q: Floats,
    first_pos: int,
    scale: float,
    state: AttentionState,
    scratch: Bytes,
) -> None:
    """Fold pages ``page_begin .. page_end`` into ``state`` for a micro-batch of any size.

    Arguments as in ``attend_decode``, with scratch of prefill_scratch_bytes(). V of the positions below ``n_kv``
    must be finite: a key that comes after a row has weight 0 there, and 0 * inf is not 0.
    Bits      do not depend on spans or threads; they differ from those of ``attend_decode``.
    Raises    KernelArgumentError
    """
    _check_arguments(arena, geometry, page_offsets, page_begin, page_end, n_kv, q, first_pos, state)
    n_tokens, n_head, _ = q.shape
    n_threads = get_num_threads()
    needed = prefill_scratch_bytes(geometry, n_head=n_head, n_tokens=n_tokens, n_threads=n_threads)
    counter, floats = _cut_scratch(scratch, needed)
    bad_page = attend_prefill_kernel(
        n_threads,
        counter,
        layout_of(geometry),
        tile_keys(geometry.page_tokens),
        arena,
        page_offsets,
        page_begin,
        page_end,
        n_kv,
        q,
        first_pos,
        np.float32(scale),
        state.acc,
        state.max,
        state.sum,
        floats,
        prefill_thread_floats(geometry, n_head, n_tokens),
        prefill_tile_tokens(n_tokens, n_head // geometry.n_head_kv),
        row_tile_floats(geometry),
    )
    _refuse_bad_page(bad_page, page_offsets, geometry, arena)


def finish_attention(state: AttentionState, out: Floats) -> None:
    """Divide by the sums: ``out`` float32 [n_tokens, n_head, head_dim_v]; rows that saw no key become 0."""
    _check_state(state, state.acc.shape[0], state.acc.shape[1], state.acc.shape[2])
    check_array("out", out, np.float32, state.acc.shape)
    finish_attention_kernel(state.acc, state.sum, out)


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
    check_array("q", q, np.float32, (None, None, geometry.head_dim_k))
    n_tokens, n_head, _ = q.shape
    if n_head == 0 or n_head % geometry.n_head_kv:
        raise KernelArgumentError(f"q has {n_head} heads, not a multiple of the {geometry.n_head_kv} K/V heads")
    _check_state(state, n_tokens, n_head, geometry.head_dim_v)


def _check_state(state: AttentionState, n_tokens: int, n_head: int, head_dim_v: int) -> None:
    check_array("state.acc", state.acc, np.float32, (n_tokens, n_head, head_dim_v))
    check_array("state.max", state.max, np.float32, (n_tokens, n_head))
    check_array("state.sum", state.sum, np.float32, (n_tokens, n_head))


def _cut_scratch(scratch: Bytes, n_bytes: int) -> tuple[Integers, Floats]:
    """The work counter on a line of its own, and everything behind it as float32."""
    check_array("scratch", scratch, np.uint8, (None,))
    if scratch.size < n_bytes:
        raise KernelArgumentError(f"scratch has {scratch.size} bytes; this step needs {n_bytes}")
    address: int = scratch.__array_interface__["data"][0]
    counter_at = -address % LINE_BYTES
    floats_at = counter_at + LINE_BYTES
    floats_end = floats_at + (n_bytes - 2 * LINE_BYTES)
    return scratch[counter_at : counter_at + 8].view(np.int64), scratch[floats_at:floats_end].view(np.float32)


def _refuse_bad_page(bad_page: int, page_offsets: Integers, geometry: PageGeometry, arena: Bytes) -> None:
    if bad_page >= 0:
        raise KernelArgumentError(
            f"page {bad_page} at byte {page_offsets[bad_page]} with {geometry.page_bytes} bytes "
            f"lies outside the arena of {arena.size} bytes"
        )
