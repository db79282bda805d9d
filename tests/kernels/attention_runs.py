"""Running a whole attention through the CPU kernels and judging it, shared by the tests of its variants."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvs_core.attention_rule import AttentionRule
from kvs_core.cpu.attention import (
    NO_SINKS,
    attend_decode,
    attend_prefill,
    begin_attention,
    carve_attention_state,
    finish_attention,
)
from kvs_core.cpu.attention_scratch import attention_state_bytes, decode_scratch_bytes, prefill_scratch_bytes
from kvs_core.cpu.threads import ThreadTeam
from tests.kernels.paged_cache import PagedCache
from tests.oracles.attention import attend, read_kv

SEED = 20261
GUARD_BYTES = 128
GUARD = 0x5A
RULE = AttentionRule(scale=0.125)

KERNELS = {"decode": (attend_decode, decode_scratch_bytes), "prefill": (attend_prefill, prefill_scratch_bytes)}
Floats = npt.NDArray[np.float32]


def run(
    kernel: str,
    cache: PagedCache,
    q: Floats,
    team: ThreadTeam,
    *,
    first_pos: int,
    n_kv: int | None = None,
    spans: Sequence[int] | None = None,
    rule: AttentionRule = RULE,
    first_page: int = 0,
    sinks: Floats = NO_SINKS,
) -> Floats:
    """Whole attention; ``spans`` lists page indices from ``first_page`` to the end.

    Workspace is exactly as large as promised.
    """
    attend_span, scratch_bytes = KERNELS[kernel]
    n_tokens, n_head, _ = q.shape
    geometry = cache.geometry
    bounds = [first_page, cache.n_pages] if spans is None else spans
    n_state = attention_state_bytes(n_head=n_head, head_dim_v=geometry.head_dim_v, n_tokens=n_tokens)
    n_scratch = scratch_bytes(geometry, n_head=n_head, n_tokens=n_tokens, n_threads=team.n_threads)
    guarded = np.full(n_scratch + 2 * GUARD_BYTES, GUARD, dtype=np.uint8)
    scratch = guarded[GUARD_BYTES:-GUARD_BYTES]
    scratch.fill(0xFF)
    state = carve_attention_state(
        np.full(n_state, 0xFF, dtype=np.uint8), n_tokens=n_tokens, n_head=n_head, head_dim_v=geometry.head_dim_v
    )
    out = np.full((n_tokens, n_head, geometry.head_dim_v), np.nan, dtype=np.float32)

    begin_attention(state)
    for begin, end in pairwise(bounds):
        attend_span(
            cache.arena,
            geometry,
            cache.page_offsets,
            begin,
            end,
            cache.n_kv if n_kv is None else n_kv,
            q,
            first_pos,
            rule,
            state,
            scratch,
            team,
        )
    finish_attention(state, out, sinks)

    assert (guarded[:GUARD_BYTES] == GUARD).all()
    assert (guarded[-GUARD_BYTES:] == GUARD).all()
    return out


def random_queries(rng: np.random.Generator, cache: PagedCache, n_tokens: int, group: int) -> Floats:
    shape = (n_tokens, cache.geometry.n_head_kv * group, cache.geometry.head_dim_k)
    return rng.standard_normal(shape, dtype=np.float32)


def assert_close(
    out: Floats,
    cache: PagedCache,
    q: Floats,
    *,
    first_pos: int,
    rule: AttentionRule = RULE,
    sinks: Floats | None = None,
) -> None:
    """At most four times as far from the oracle as numpy in float32, both on the rows as they are stored.

    Four, because our sums run in another order and our products in other groups than numpy's; the floor of one unit
    in the last place of V is for contexts so short that numpy is exact by luck.
    """
    numbers: dict[str, Any] = {"scale": rule.scale, "n_swa": rule.n_swa, "softcap": rule.softcap, "sinks": sinks}
    k, v = read_kv(cache.arena, cache.geometry, cache.page_offsets, cache.n_kv)
    expected = attend(q, k, v, first_pos=first_pos, **numbers)
    plain = attend(q, k, v, first_pos=first_pos, **numbers, dtype=np.float32)
    floor = np.finfo(np.float32).eps * np.abs(v).max()
    allowed = 4.0 * max(float(np.abs(plain - expected).max()), float(floor))
    error = np.abs(out - expected)
    worst = np.unravel_index(np.nanargmax(error), error.shape)
    n_wrong = int((~(error <= allowed)).sum())
    assert n_wrong == 0, f"{n_wrong} of {error.size} wrong, worst {worst}: {out[worst]} needs {expected[worst]}"


def assert_same_bits(a: Floats, b: Floats) -> None:
    n_different = int((a.view(np.uint32) != b.view(np.uint32)).sum())
    assert n_different == 0, f"{n_different} of {a.size} differ, by at most {np.nanmax(np.abs(a - b))}"
