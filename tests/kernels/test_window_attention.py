"""Sliding windows, soft caps and sinks of CPU attention: right by the oracle, the same bits however it is cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvs_core.attention_rule import AttentionRule
from kvs_core.cpu.attention_scratch import DECODE_TOKENS_MAX
from kvs_core.cpu.threads import ThreadTeam
from kvs_core.errors import KernelArgumentError
from tests.kernels.attention_runs import KERNELS, SEED, assert_close, assert_same_bits, random_queries, run
from tests.kernels.paged_cache import geometry_of, random_cache


@pytest.fixture(scope="module")
def team() -> Iterator[ThreadTeam]:
    with ThreadTeam(2) as two_threads:
        yield two_threads


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("n_swa", [1, 5, 16, 31, 32, 33, 64, 100, 101, 5000])
def test_a_row_sees_its_window_only(kernel: str, n_swa: int, team: ThreadTeam) -> None:
    rng = np.random.default_rng(SEED)
    cache = random_cache(rng, geometry_of(type_k="f32", type_v="f16"), 101)
    q = random_queries(rng, cache, 6, 3)
    rule = AttentionRule(scale=0.125, n_swa=n_swa)

    out = run(kernel, cache, q, team, first_pos=95, rule=rule)

    assert_close(out, cache, q, first_pos=95, rule=rule)


@pytest.mark.parametrize("group", [1, 4, 9])
@pytest.mark.parametrize(("n_tokens", "first_pos", "n_swa"), [(141, 0, 40), (150, 60, 64), (33, 300, 100)])
def test_windows_of_many_query_tiles(n_tokens: int, first_pos: int, n_swa: int, group: int, team: ThreadTeam) -> None:
    rng = np.random.default_rng(SEED)
    cache = random_cache(rng, geometry_of(page_tokens=64), first_pos + n_tokens)
    q = random_queries(rng, cache, n_tokens, group)
    rule = AttentionRule(scale=0.125, n_swa=n_swa)

    out = run("prefill", cache, q, team, first_pos=first_pos, rule=rule)

    assert_close(out, cache, q, first_pos=first_pos, rule=rule)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_scores_are_capped(kernel: str, softcap: float, team: ThreadTeam) -> None:
    rng = np.random.default_rng(SEED)
    cache = random_cache(rng, geometry_of(type_k="f32", type_v="f32"), 101)
    q = random_queries(rng, cache, 6, 3) * np.float32(4.0)
    rule = AttentionRule(scale=0.5, n_swa=60, softcap=softcap)

    out = run(kernel, cache, q, team, first_pos=95, rule=rule)

    assert_close(out, cache, q, first_pos=95, rule=rule)
    assert not np.allclose(out, run(kernel, cache, q, team, first_pos=95, rule=replace(rule, softcap=0.0)), atol=1e-3)


@pytest.mark.parametrize("kernel", KERNELS)
def test_pages_before_the_window_need_not_be_read(kernel: str, team: ThreadTeam) -> None:
    """Their offsets may name nothing, and their bytes may be anything."""
    rng = np.random.default_rng(SEED)
    cache = random_cache(rng, geometry_of(), 200)
    q = random_queries(rng, cache, 4, 3)
    rule = AttentionRule(scale=0.125, n_swa=50)
    whole = run(kernel, cache, q, team, first_pos=196, rule=rule)
    first_page = (196 - 50 + 1) // cache.geometry.page_tokens
    offsets = cache.page_offsets.copy()
    offsets[:first_page] = -1

    part = run(kernel, replace(cache, page_offsets=offsets), q, team, first_pos=196, rule=rule, first_page=first_page)

    assert first_page > 1
    assert_same_bits(part, whole)


@pytest.mark.parametrize("n_tokens", [2, DECODE_TOKENS_MAX])
@pytest.mark.parametrize("n_swa", [3, 32, 40])
def test_a_windowed_decode_step_of_several_tokens_is_that_many_steps_of_one(
    n_tokens: int, n_swa: int, team: ThreadTeam
) -> None:
    rng = np.random.default_rng(SEED)
    cache = random_cache(rng, geometry_of(), 65 + n_tokens // 2)
    q = random_queries(rng, cache, n_tokens, 3)
    rule = AttentionRule(scale=0.125, n_swa=n_swa, softcap=20.0)
    first_pos = cache.n_kv - n_tokens
    together = run("decode", cache, q, team, first_pos=first_pos, rule=rule)

    for token in range(n_tokens):
        pos = first_pos + token
        page = max(0, pos + 1 - n_swa) // cache.geometry.page_tokens
        row = q[token : token + 1]
        one = run("decode", cache, row, team, first_pos=pos, n_kv=pos + 1, rule=rule, first_page=page)
        assert_same_bits(one[0], together[token])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sink", [-50.0, 0.0, 3.0, 200.0])
def test_sinks_take_their_share(kernel: str, sink: float, team: ThreadTeam) -> None:
    """Far below the scores, among them, and far above, where nearly nothing is left for the values."""
    rng = np.random.default_rng(SEED)
    cache = random_cache(rng, geometry_of(type_k="f32", type_v="f32"), 101)
    q = random_queries(rng, cache, 6, 3)
    sinks = (sink + rng.standard_normal(q.shape[1])).astype(np.float32)
    rule = AttentionRule(scale=0.125, n_swa=60)

    out = run(kernel, cache, q, team, first_pos=95, rule=rule, sinks=sinks)

    assert_close(out, cache, q, first_pos=95, rule=rule, sinks=sinks)


def test_a_row_that_sees_only_a_sink_is_zero(team: ThreadTeam) -> None:
    rng = np.random.default_rng(SEED)
    cache = random_cache(rng, geometry_of(), 40)
    q = random_queries(rng, cache, 5, 3)

    out = run("prefill", cache, q, team, first_pos=40, n_kv=0, sinks=np.ones(q.shape[1], dtype=np.float32))

    assert_same_bits(out, np.zeros_like(out))


def test_one_sink_for_every_head_is_needed(team: ThreadTeam) -> None:
    rng = np.random.default_rng(SEED)
    cache = random_cache(rng, geometry_of(), 40)
    q = random_queries(rng, cache, 1, 3)

    with pytest.raises(KernelArgumentError, match="sinks is float32"):
        run("decode", cache, q, team, first_pos=39, sinks=np.ones(q.shape[1] - 1, dtype=np.float32))
