"""The sampler chain: greedy and ties (U37), filters that switch off (U38), seeds (U39), bad logits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvs_core.config import SamplingConfig
from kvs_core.errors import CheckFailedError, ConfigError
from kvs_core.sampling import SEED_MAX, Sampler, draw_seed

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "sampling.json").read_text(encoding="utf-8"))
N_VOCAB = 1000
ALL_OFF = SamplingConfig(seed=1, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def make_logits(seed: int = 3, n_vocab: int = N_VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, 3.0, n_vocab).astype(np.float32)


def make_sampler(config: SamplingConfig, **arguments: object) -> Sampler:
    return Sampler(config, **{"n_vocab": N_VOCAB, "n_ctx": 64, **arguments})


def draw(config: SamplingConfig, logits: np.ndarray, n_draws: int) -> list[int]:
    sampler = Sampler(config, n_vocab=len(logits), n_ctx=64)
    return [sampler.sample(logits, pos=0) for _ in range(n_draws)]


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.0},
        {"temperature": -0.0},
        {"temperature": 1e-9},
        {"temperature": 0.0, "top_p": 0.1, "min_p": 0.9, "top_k": 40},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.5, "top_p": 0.0},
        {"temperature": 1.5, "min_p": 1.0},
    ],
)
def test_settings_that_leave_one_token_give_the_argmax(seed: int, changes: dict[str, float]) -> None:
    logits = make_logits(seed + 10)
    config = replace(ALL_OFF, seed=seed, **changes)
    assert draw(config, logits, 5) == [int(np.argmax(logits))] * 5


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {"temperature": 1e-9}, {"top_k": 1}, {"top_p": 0.0}])
def test_a_tie_for_first_place_goes_to_the_lowest_id(changes: dict[str, float]) -> None:
    logits = make_logits()
    logits[[700, 31, 502]] = 50.0
    assert draw(replace(ALL_OFF, **changes), logits, 3) == [31, 31, 31]


def test_a_tie_at_the_top_k_boundary_keeps_the_lowest_ids() -> None:
    logits = np.full(N_VOCAB, -5.0, dtype=np.float32)
    logits[[900, 17, 400, 3]] = [9.0, 1.0, 1.0, 1.0]
    drawn = set(draw(replace(ALL_OFF, top_k=3, temperature=100.0), logits, 300))
    assert drawn == {900, 3, 17}


@pytest.mark.parametrize("top_k", [0, -1, N_VOCAB, 10**9])
def test_top_k_off_leaves_every_token_in_play(top_k: int) -> None:
    logits = make_logits()
    config = replace(ALL_OFF, temperature=1.5, top_k=top_k)
    texts = {tuple(draw(replace(config, seed=seed), logits, 4)) for seed in range(20)}
    assert len(texts) == 20


@pytest.mark.parametrize("config", [ALL_OFF, replace(ALL_OFF, top_k=5), replace(ALL_OFF, samplers=("temperature",))])
def test_draws_follow_the_softmax(config: SamplingConfig) -> None:
    logits = np.full(50, -60.0, dtype=np.float32)
    logits[[4, 11, 23, 30, 49]] = [1.0, 0.5, 0.0, -0.5, -1.0]
    n_draws = 10_000
    counts = np.bincount(draw(replace(config, seed=7), logits, n_draws), minlength=50)
    weights = np.exp(logits.astype(np.float64))
    expected = n_draws * weights / weights.sum()
    likely = expected > 1.0
    assert counts[~likely].sum() == 0
    chi_square = ((counts[likely] - expected[likely]) ** 2 / expected[likely]).sum()
    assert chi_square < 18.47  # 0.1 % point of chi-square with 4 degrees of freedom; the seed is fixed


def test_top_p_keeps_the_shortest_prefix_that_reaches_p() -> None:
    probabilities = np.array([0.05, 0.4, 0.25, 0.2, 0.1])
    logits = np.log(probabilities).astype(np.float32)
    assert set(draw(replace(ALL_OFF, top_p=0.6), logits, 400)) == {1, 2}
    assert set(draw(replace(ALL_OFF, top_p=0.7), logits, 400)) == {1, 2, 3}
    assert set(draw(replace(ALL_OFF, top_p=1.0), logits, 2000)) == {0, 1, 2, 3, 4}


def test_top_p_over_a_flat_large_vocabulary_sorts_beyond_its_first_guess() -> None:
    logits = np.zeros(4000, dtype=np.float32)
    drawn = draw(replace(ALL_OFF, top_p=0.5), logits, 3000)
    assert max(drawn) == 1999
    assert len(set(drawn)) > 1400


def test_min_p_is_relative_to_the_best_token() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05])).astype(np.float32)
    assert set(draw(replace(ALL_OFF, min_p=0.25), logits, 600)) == {0, 1, 2}


def test_repeat_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    logits = np.array([2.0, 1.5, -1.0, -1.2], dtype=np.float32)
    config = replace(ALL_OFF, temperature=0.0, repeat_penalty=2.0)
    sampler = Sampler(config, n_vocab=4, n_ctx=64)
    sampler.accept([0])
    assert sampler.sample(logits, pos=1) == 1
    sampler.accept([1])
    assert sampler.sample(logits, pos=2) == 0
    sampler = Sampler(config, n_vocab=4, n_ctx=64)
    sampler.accept([2])
    assert sampler.sample(np.array([-9.0, -9.0, -1.0, -1.2], dtype=np.float32), pos=1) == 3


@pytest.mark.parametrize(("last_n", "expected"), [(0, 0), (1, 0), (2, 1), (-1, 1)])
def test_repeat_last_n_limits_the_window(last_n: int, expected: int) -> None:
    logits = np.array([2.0, 1.5, 0.1], dtype=np.float32)
    config = replace(ALL_OFF, temperature=0.0, repeat_penalty=4.0, repeat_last_n=last_n)
    sampler = Sampler(config, n_vocab=3, n_ctx=64)
    sampler.accept([0, 2])
    assert sampler.sample(logits, pos=2) == expected


def test_a_left_out_sampler_is_off_and_the_order_counts() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1])).astype(np.float32)
    without_top_k = replace(ALL_OFF, top_k=1, samplers=("top_p", "temperature"))
    assert len(set(draw(without_top_k, logits, 400))) == 4
    hot = replace(ALL_OFF, temperature=50.0, min_p=0.6)
    filter_first = replace(hot, samplers=("min_p", "temperature"))
    heat_first = replace(hot, samplers=("temperature", "min_p"))
    assert set(draw(filter_first, logits, 400)) == {0, 1}
    assert set(draw(heat_first, logits, 400)) == {0, 1, 2, 3}


def test_a_penalty_behind_top_k_puts_the_candidates_in_order_again() -> None:
    logits = np.array([0.0, 4.0, 3.9, 3.0, 1.0], dtype=np.float32)
    config = replace(ALL_OFF, top_k=3, top_p=0.4, repeat_penalty=2.0, samplers=("top_k", "penalties", "top_p"))
    sampler = Sampler(config, n_vocab=5, n_ctx=64)
    assert sampler.sample(logits, pos=0) == 1
    sampler.accept([1])  # 4.0 becomes 2.0: the next one leads
    assert {sampler.sample(logits, pos=1) for _ in range(20)} == {2}


def test_an_unknown_sampler_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"samplers mirostat: not a sampler; known: penalties, top_k"):
        make_sampler(replace(ALL_OFF, samplers=("top_k", "mirostat")))


def test_ignored_end_tokens_are_never_chosen() -> None:
    logits = make_logits()
    first, second, third = (int(token) for token in np.argsort(-logits)[:3])
    greedy = replace(ALL_OFF, temperature=0.0)
    assert make_sampler(greedy, eog_ids=[first]).sample(logits, pos=0) == first
    ignoring = replace(greedy, ignore_eos=True)
    assert make_sampler(ignoring, eog_ids=[first]).sample(logits, pos=0) == second
    assert make_sampler(ignoring, eog_ids=[first, second]).sample(logits, pos=0) == third
    assert logits[first] == logits.max(), "the caller's array must not change"


def test_ignoring_every_token_is_an_error() -> None:
    sampler = Sampler(replace(ALL_OFF, ignore_eos=True), n_vocab=4, n_ctx=8, eog_ids=range(4))
    with pytest.raises(CheckFailedError, match="position 5: every one is an ignored end token"):
        sampler.sample(np.zeros(4, dtype=np.float32), pos=5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_logit_that_is_not_finite_is_an_error_with_its_position(bad: float, temperature: float) -> None:
    logits = make_logits()
    logits[77] = bad
    with pytest.raises(CheckFailedError, match=f"position 12 cannot be sampled: token 77 has {bad}"):
        make_sampler(replace(ALL_OFF, temperature=temperature)).sample(logits, pos=12)


def test_minus_infinity_is_an_ordinary_logit() -> None:
    logits = np.full(N_VOCAB, -np.inf, dtype=np.float32)
    logits[[5, 9]] = [1.0, 0.9]
    assert set(draw(ALL_OFF, logits, 100)) == {5, 9}
    assert set(draw(replace(ALL_OFF, top_k=40, top_p=0.95, min_p=0.05), logits, 100)) == {5, 9}
    logits[[5, 9]] = -np.inf
    with pytest.raises(CheckFailedError, match="cannot be sampled"):
        draw(ALL_OFF, logits, 1)


def test_logits_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        make_sampler(ALL_OFF).sample(make_logits(n_vocab=N_VOCAB + 1), pos=0)


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    logits = make_logits()
    config = replace(ALL_OFF, temperature=1.5, seed=7)
    assert draw(config, logits, 40) == draw(config, logits, 40)
    assert draw(config, logits, 40) != draw(replace(config, seed=8), logits, 40)


def test_an_unset_seed_is_drawn_and_can_be_used_again() -> None:
    logits = make_logits()
    config = replace(ALL_OFF, temperature=1.5, seed=None)
    samplers = [make_sampler(config) for _ in range(5)]
    texts = [tuple(sampler.sample(logits, pos=0) for _ in range(20)) for sampler in samplers]
    assert len(set(texts)) == 5
    again = draw(replace(config, seed=samplers[2].seed), logits, 20)
    assert tuple(again) == texts[2]
    assert all(0 <= draw_seed() <= SEED_MAX for _ in range(100))


def test_the_random_stream_is_the_mersenne_twister_of_the_cxx_standard_library() -> None:
    # mt19937 seeded with 5489 starts 3499211612, 581869302; a double is (first + second * 2**32) / 2**64.
    share = (3499211612 + 581869302 * 2**32) / 2**64
    logits = np.zeros(10_000, dtype=np.float32)
    assert draw(replace(ALL_OFF, seed=5489), logits, 1) == [int(np.ceil(share * 10_000)) - 1]


def test_greedy_steps_use_up_the_stream_like_sampled_ones() -> None:
    logits = make_logits()
    peaked = np.where(np.arange(N_VOCAB) == 5, 0.0, -np.inf).astype(np.float32)
    one, two = make_sampler(replace(ALL_OFF, seed=4)), make_sampler(replace(ALL_OFF, seed=4))
    one.sample(peaked, pos=0)
    two.sample(logits, pos=0)
    assert [one.sample(logits, pos=1) for _ in range(8)] == [two.sample(logits, pos=1) for _ in range(8)]


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"seed {case['config']['seed']}")
def test_tokens_are_those_that_llama_cpp_draws(case: dict[str, Any]) -> None:
    config = SamplingConfig(**{**case["config"], "samplers": tuple(case["config"]["samplers"])})
    sampler = Sampler(config, n_vocab=GOLDEN["n_vocab"], n_ctx=64)
    tokens = []
    for draw_idx in range(len(case["tokens"])):
        logits = np.random.default_rng(1000 + draw_idx).normal(0.0, 3.0, GOLDEN["n_vocab"]).astype(np.float32)
        tokens.append(sampler.sample(logits, pos=draw_idx))
        sampler.accept(tokens[-1:])
    assert tokens == case["tokens"]
