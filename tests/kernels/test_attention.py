"""CPU attention against the float64 oracle, and what must not change a bit: spans, threads, other tokens, garbage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvs_core.attention_rule import AttentionRule
from kvs_core.cpu.attention import attend_decode, begin_attention, carve_attention_state, finish_attention
from kvs_core.cpu.attention_scratch import (
    DECODE_TOKENS_MAX,
    LINE_BYTES,
    attention_state_bytes,
    prefill_tile_tokens,
)
from kvs_core.cpu.store import store_kv
from kvs_core.cpu.threads import ThreadTeam
from kvs_core.errors import KernelArgumentError
from kvs_core.kv_types import KvType
from tests.kernels.attention_runs import KERNELS, RULE, SEED, assert_close, assert_same_bits, random_queries, run
from tests.kernels.paged_cache import PagedCache, empty_pages, geometry_of, random_cache, random_rows
from tests.oracles.attention import read_kv


@pytest.fixture(scope="module")
def team() -> Iterator[ThreadTeam]:
    with ThreadTeam(2) as two_threads:
        yield two_threads


@pytest.fixture(scope="module")
def lone_team() -> Iterator[ThreadTeam]:
    with ThreadTeam(1) as one_thread:
        yield one_thread


# ---------------------------------------------------------------------------------------------------------
# Right values


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("type_k", KvType)
@pytest.mark.parametrize("type_v", KvType)
def test_every_pair_of_types(kernel: str, type_k: KvType, type_v: KvType, team: ThreadTeam) -> None:
    rng = np.random.default_rng(SEED)
    cache = random_cache(rng, geometry_of(type_k=type_k.value, type_v=type_v.value), 101)
    q = random_queries(rng, cache, 5, 3)

    out = run(kernel, cache, q, team, first_pos=96)

    assert_close(out, cache, q, first_pos=96)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kv_type", KvType)
def test_rows_are_unpacked_to_the_very_bits(kernel: str, kv_type: KvType, team: ThreadTeam) -> None:
    """A query that sees one key returns that key's values: those that ``gguf.quants`` reads from the same bytes."""
    rng = np.random.default_rng(SEED)
    geometry = geometry_of(head_dim_k=128, type_k="f16", type_v=kv_type.value)
    arena, offsets = empty_pages(rng, geometry, 3)
    k, v = random_rows(rng, geometry, 75)
    v *= 10.0 ** rng.uniform(-3.0, 3.0, (75, 2, 1)).astype(np.float32)
    store_kv(arena, geometry, offsets, 0, k, v)
    cache = PagedCache(geometry=geometry, arena=arena, page_offsets=offsets, n_kv=75)
    n_tokens = 75 if kernel == "prefill" else DECODE_TOKENS_MAX
    first_pos = 75 - n_tokens

    out = run(
        kernel, cache, random_queries(rng, cache, n_tokens, 1), team, first_pos=first_pos, rule=replace(RULE, n_swa=1)
    )

    _, expected = read_kv(arena, geometry, offsets, 75)
    if kv_type.is_turbo:  # levels are rounded to float32, then their product with the scale
        np.testing.assert_allclose(out, expected[first_pos:], rtol=2.0**-23, atol=0.0)
    else:
        np.testing.assert_array_equal(out, expected[first_pos:].astype(np.float32))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("head_dim_k", "head_dim_v", "group"),
    [(64, 64, 1), (80, 80, 2), (96, 96, 3), (128, 128, 4), (192, 128, 8), (256, 256, 6), (16, 48, 5), (64, 64, 7)],
)
def test_every_head_size_and_group(kernel: str, head_dim_k: int, head_dim_v: int, group: int, team: ThreadTeam) -> None:
    rng = np.random.default_rng(SEED)
    cache = random_cache(rng, geometry_of(head_dim_k=head_dim_k, head_dim_v=head_dim_v), 77)
    q = random_queries(rng, cache, 3, group)

    out = run(kernel, cache, q, team, first_pos=74)

    assert_close(out, cache, q, first_pos=74)


@pytest.mark.parametrize("page_tokens", [16, 32, 256])
@pytest.mark.parametrize("n_kv", ["1", "page - 1", "page", "page + 1", "3 pages + 5"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_length(kernel: str, n_kv: str, page_tokens: int, team: ThreadTeam) -> None:
    lengths = {
        "1": 1,
        "page - 1": page_tokens - 1,
        "page": page_tokens,
        "page + 1": page_tokens + 1,
        "3 pages + 5": 3 * page_tokens + 5,
    }
    rng = np.random.default_rng(SEED)
    cache = random_cache(rng, geometry_of(page_tokens=page_tokens, n_head_kv=1), lengths[n_kv])
    n_tokens = min(4, cache.n_kv)
    q = random_queries(rng, cache, n_tokens, 2)

    out = run(kernel, cache, q, team, first_pos=cache.n_kv - n_tokens)

    assert_close(out, cache, q, first_pos=cache.n_kv - n_tokens)


@pytest.mark.parametrize(("n_tokens", "first_pos"), [(1, 0), (70, 0), (141, 60), (33, 500)])
def test_prefill_of_many_query_tiles(n_tokens: int, first_pos: int, team: ThreadTeam) -> None:
    rng = np.random.default_rng(SEED)
    cache = random_cache(rng, geometry_of(page_tokens=64), first_pos + n_tokens)
    q = random_queries(rng, cache, n_tokens, 3)

    out = run("prefill", cache, q, team, first_pos=first_pos)

    assert_close(out, cache, q, first_pos=first_pos)


@pytest.mark.parametrize("kernel", KERNELS)
def test_scores_far_beyond_the_range_of_exp(kernel: str, team: ThreadTeam) -> None:
    rng = np.random.default_rng(SEED)
    cache = random_cache(rng, geometry_of(type_k="f32"), 101)
    q = random_queries(rng, cache, 5, 3) * np.float32(1e4)

    out = run(kernel, cache, q, team, first_pos=96)

    assert_close(out, cache, q, first_pos=96)


@pytest.mark.parametrize("kernel", KERNELS)
def test_keys_from_n_kv_on_are_not_seen(kernel: str, team: ThreadTeam) -> None:
    rng = np.random.default_rng(SEED)
    cache = random_cache(rng, geometry_of(), 90)
    q = random_queries(rng, cache, 5, 3)

    out = run(kernel, cache, q, team, first_pos=85, n_kv=40)

    assert_close(out, replace(cache, n_kv=40), q, first_pos=85)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_that_sees_no_key_is_zero(kernel: str, team: ThreadTeam) -> None:
    rng = np.random.default_rng(SEED)
    cache = random_cache(rng, geometry_of(), 40)
    q = random_queries(rng, cache, 5, 3)

    out = run(kernel, cache, q, team, first_pos=40, n_kv=0)

    assert_same_bits(out, np.zeros_like(out))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("side", ["k", "v"])
def test_a_visible_nan_reaches_the_output(kernel: str, side: str, team: ThreadTeam) -> None:
    rng = np.random.default_rng(SEED)
    cache = random_cache(rng, geometry_of(), 60)
    k, v = random_rows(rng, cache.geometry, 1)
    {"k": k, "v": v}[side][0, 1, 3] = np.nan
    store_kv(cache.arena, cache.geometry, cache.page_offsets, 20, k, v)
    q = random_queries(rng, cache, 1, 3)

    out = run(kernel, cache, q, team, first_pos=59)

    assert np.isfinite(out[:, :3]).all()
    assert np.isnan(out[:, 3:]).any(axis=-1).all()


@pytest.mark.big
def test_pages_beyond_two_gigabytes(team: ThreadTeam) -> None:
    rng = np.random.default_rng(SEED)
    cache = random_cache(rng, geometry_of(type_k="q8_0", type_v="f16"), 70)
    shift = 2**31 + 4096
    far_arena = np.empty(shift + cache.arena.size, dtype=np.uint8)
    far_arena[shift:] = cache.arena
    far_offsets = np.where(cache.page_offsets >= 0, cache.page_offsets + shift, -1)
    far = replace(cache, arena=far_arena, page_offsets=far_offsets)
    store_kv(far.arena, far.geometry, far.page_offsets, 69, *random_rows(rng, far.geometry, 1))
    cache.arena[:] = far_arena[shift:]
    q = random_queries(rng, cache, 2, 3)

    for kernel in KERNELS:
        assert_same_bits(run(kernel, far, q, team, first_pos=68), run(kernel, cache, q, team, first_pos=68))


# ---------------------------------------------------------------------------------------------------------
# Same bits


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("page_tokens", [16, 64])
def test_spans_do_not_change_a_bit(kernel: str, page_tokens: int, team: ThreadTeam) -> None:
    rng = np.random.default_rng(SEED)
    cache = random_cache(rng, geometry_of(page_tokens=page_tokens, type_v="q8_0"), 20 * page_tokens + 7)
    q = random_queries(rng, cache, 6, 3)
    first_pos = cache.n_kv - 6
    whole = run(kernel, cache, q, team, first_pos=first_pos)

    for _ in range(8):
        n_cuts = int(rng.integers(1, 12))
        cuts = sorted(int(cut) for cut in rng.integers(0, cache.n_pages + 1, n_cuts))
        spans = [0, *cuts, cache.n_pages]
        assert_same_bits(run(kernel, cache, q, team, first_pos=first_pos, spans=spans), whole)


@pytest.mark.parametrize(("kernel", "n_tokens"), [("decode", 1), ("decode", 8), ("prefill", 150)])
def test_threads_do_not_change_a_bit(kernel: str, n_tokens: int, team: ThreadTeam, lone_team: ThreadTeam) -> None:
    rng = np.random.default_rng(SEED)
    cache = random_cache(rng, geometry_of(n_head_kv=3), 700)
    q = random_queries(rng, cache, n_tokens, 3)
    alone = run(kernel, cache, q, lone_team, first_pos=700 - n_tokens)

    for _ in range(5):
        assert_same_bits(run(kernel, cache, q, team, first_pos=700 - n_tokens), alone)


@pytest.mark.parametrize("n_tokens", [2, 4, DECODE_TOKENS_MAX])
@pytest.mark.parametrize("group", [1, 3, 7])
def test_a_decode_step_of_several_tokens_is_that_many_steps_of_one(n_tokens: int, group: int, team: ThreadTeam) -> None:
    rng = np.random.default_rng(SEED)
    cache = random_cache(rng, geometry_of(), 65 + n_tokens // 2)
    q = random_queries(rng, cache, n_tokens, group)
    first_pos = cache.n_kv - n_tokens
    together = run("decode", cache, q, team, first_pos=first_pos)

    for token in range(n_tokens):
        pos = first_pos + token
        one = run("decode", cache, q[token : token + 1], team, first_pos=pos, n_kv=pos + 1)
        assert_same_bits(one[0], together[token])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16", "q8_0", "q5_1", "q4_0", "iq4_nl"])
def test_bytes_that_are_no_row_do_not_change_a_bit(kernel: str, kv_type: str, team: ThreadTeam) -> None:
    outputs = []
    for filler in (0xFF, 0x00, 0x7C):
        rng = np.random.default_rng(SEED)
        cache = random_cache(rng, geometry_of(type_k=kv_type), 75, filler)
        q = random_queries(rng, cache, 4, 3)
        outputs.append(run(kernel, cache, q, team, first_pos=71))

    assert np.isfinite(outputs[0]).all()
    assert_same_bits(outputs[1], outputs[0])
    assert_same_bits(outputs[2], outputs[0])


# ---------------------------------------------------------------------------------------------------------
# Sizes


def test_scratch_never_shrinks_when_tokens_are_added() -> None:
    geometry = geometry_of(n_head_kv=3)
    for group in (1, 3, 8):
        tiles = [prefill_tile_tokens(n_tokens, group) for n_tokens in range(1, 1025)]
        assert tiles == sorted(tiles)
    for _, scratch_bytes in KERNELS.values():
        sizes = [scratch_bytes(geometry, n_head=9, n_tokens=n_tokens, n_threads=2) for n_tokens in range(1, 1025)]
        assert sizes == sorted(sizes)


def test_state_parts_lie_on_lines_of_their_own() -> None:
    n_bytes = attention_state_bytes(n_head=9, head_dim_v=80, n_tokens=5)
    workspace = np.zeros(n_bytes, dtype=np.uint8)
    state = carve_attention_state(workspace, n_tokens=5, n_head=9, head_dim_v=80)
    begin_attention(state)

    offsets = [part.ctypes.data - workspace.ctypes.data for part in (state.acc, state.max, state.sum)]

    assert n_bytes == 5 * 9 * 80 * 4 + 192 + 192 + (-(5 * 9 * 80 * 4) % LINE_BYTES)
    assert all(offset % LINE_BYTES == 0 for offset in offsets)
    assert np.isneginf(state.max).all()
    assert not state.sum.any()
    assert not state.acc.any()


# ---------------------------------------------------------------------------------------------------------
# Refusals: one valid call with one thing changed


def valid_call(kernel: str, team: ThreadTeam) -> dict[str, object]:
    rng = np.random.default_rng(SEED)
    cache = random_cache(rng, geometry_of(), 70)
    state = carve_attention_state(np.zeros(10_000, dtype=np.uint8), n_tokens=2, n_head=6, head_dim_v=64)
    begin_attention(state)
    n_bytes = KERNELS[kernel][1](cache.geometry, n_head=6, n_tokens=2, n_threads=2)
    return {
        "arena": cache.arena,
        "geometry": cache.geometry,
        "page_offsets": cache.page_offsets,
        "page_begin": 0,
        "page_end": 3,
        "n_kv": 70,
        "q": random_queries(rng, cache, 2, 3),
        "first_pos": 68,
        "rule": AttentionRule(scale=0.125),
        "state": state,
        "scratch": np.zeros(n_bytes, dtype=np.uint8),
        "team": team,
    }


REFUSALS: list[tuple[Callable[..., dict[str, object]], str]] = [
    (lambda call: {"q": call["q"].astype(np.float16)}, "q is float16"),
    (lambda call: {"q": call["q"][:, :, :48].copy()}, "q is float32"),
    (lambda call: {"q": call["q"][:, :5].copy()}, "5 heads"),
    (lambda call: {"q": call["q"][:1]}, "state.acc is float32"),
    (lambda call: {"q": call["q"][:, ::2]}, "not contiguous"),
    (lambda call: {"state": replace(call["state"], max=call["state"].max.T)}, "state.max is"),
    (lambda call: {"state": replace(call["state"], sum=call["state"].sum.astype(np.float64))}, "state.sum is"),
    (lambda call: {"arena": call["arena"].view(np.int8)}, "arena is int8"),
    (lambda call: {"arena": call["arena"][:-1].copy()[:9000]}, "outside the arena"),
    (lambda call: {"page_offsets": call["page_offsets"][::-1]}, "not contiguous"),
    (lambda call: {"page_offsets": np.full(4, -1)}, "page 0 at byte -1"),
    (lambda call: {"page_end": 5}, "pages 0..5"),
    (lambda call: {"page_begin": 4}, "pages 4..3"),
    (lambda call: {"n_kv": -1}, "n_kv -1"),
    (lambda call: {"first_pos": -1}, "first_pos -1"),
    (lambda call: {"scratch": call["scratch"][:-1]}, "this step needs"),
    (lambda call: {"scratch": call["scratch"].view(np.int8)}, "scratch is int8"),
    (lambda call: {"geometry": replace(call["geometry"], page_tokens=8)}, "8 tokens"),
    (lambda call: {"geometry": replace(call["geometry"], head_dim_k=72)}, "head size 72"),
    (lambda call: {"geometry": replace(call["geometry"], n_head_kv=0)}, "0 K/V heads"),
]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("change", "message"), REFUSALS)
def test_what_does_not_fit_is_refused_and_the_state_stays(kernel: str, change, message: str, team: ThreadTeam) -> None:
    KERNELS[kernel][0](**valid_call(kernel, team))
    call = valid_call(kernel, team)
    state = call["state"]
    call |= change(call)

    with pytest.raises(KernelArgumentError, match=message):
        KERNELS[kernel][0](**call)

    assert not state.acc.any()
    assert np.isneginf(state.max).all()


@pytest.mark.parametrize("n_tokens", [0, DECODE_TOKENS_MAX + 1])
def test_a_decode_step_has_one_to_eight_tokens(n_tokens: int, team: ThreadTeam) -> None:
    call = valid_call("decode", team)
    call["q"] = np.zeros((n_tokens, 6, 64), dtype=np.float32)

    with pytest.raises(KernelArgumentError, match=f"got {n_tokens}"):
        attend_decode(**call)


def test_an_empty_micro_batch_is_a_no_op(team: ThreadTeam) -> None:
    rng = np.random.default_rng(SEED)
    cache = random_cache(rng, geometry_of(), 40)

    out = run("prefill", cache, np.zeros((0, 6, 64), dtype=np.float32), team, first_pos=40)

    assert out.shape == (0, 6, 64)


def test_finish_checks_the_output(team: ThreadTeam) -> None:
    state = valid_call("decode", team)["state"]

    with pytest.raises(KernelArgumentError, match="out is float32"):
        finish_attention(state, np.zeros((2, 6, 63), dtype=np.float32))
