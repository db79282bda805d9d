"""Chunking, scored rows, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from kvs_core.errors import ConfigError
from kvs_core.evaluate.chunks import plan_chunks, plan_saved_chunks


@pytest.mark.parametrize(
    ("n_tokens", "n_ctx", "n_chunk", "first", "rows"),
    [(128, 64, 2, 32, 31), (191, 64, 2, 32, 31), (192, 64, 3, 32, 31), (14, 7, 2, 3, 3), (6, 3, 2, 1, 1)],
)
def test_plain_chunks_score_the_second_half(n_tokens: int, n_ctx: int, n_chunk: int, first: int, rows: int) -> None:
    plan = plan_chunks(n_tokens=n_tokens, n_ctx=n_ctx)
    assert (plan.n_chunk, plan.first, plan.rows_per_chunk, plan.step) == (n_chunk, first, rows, n_ctx)


def test_targets_follow_their_rows_by_one_token() -> None:
    tokens = np.arange(100, 240, dtype=np.int32)
    plan = plan_chunks(n_tokens=140, n_ctx=64)
    assert plan.targets(tokens, 1).tolist() == list(range(100 + 64 + 33, 100 + 128))


def test_bos_replaces_the_first_token_of_each_chunk_only_in_the_input() -> None:
    tokens = np.arange(100, 228, dtype=np.int32)
    plan = plan_chunks(n_tokens=128, n_ctx=64)
    assert plan.input_tokens(tokens, 1, 1)[:2].tolist() == [1, 165]
    assert plan.input_tokens(tokens, 1, None)[0] == 164
    assert tokens[64] == 164


def test_stride_windows_score_only_the_last_stride_predictions() -> None:
    # -c 200 --ppl-stride 64: 232 tokens, which llama.cpp rounds up to 256
    plan = plan_chunks(n_tokens=700, n_ctx=200, stride=64)
    assert (plan.n_ctx, plan.first, plan.rows_per_chunk, plan.step) == (256, 191, 64, 64)
    assert plan.n_chunk == 7  # ceil((700 - 256) / 64)
    assert plan.input_tokens(np.arange(700, dtype=np.int32), 1, 9)[0] == 64  # no BOS, as llama-perplexity in effect


@pytest.mark.parametrize("n_tokens", [0, 10, 127])
def test_a_short_text_is_refused_with_both_counts(n_tokens: int) -> None:
    with pytest.raises(ConfigError, match=rf"{n_tokens} tokens, needs at least 128") as caught:
        plan_chunks(n_tokens=n_tokens, n_ctx=64)
    assert caught.value.hint is not None
    assert ("lower -c to at most 63" in caught.value.hint) == (n_tokens == 127)


@pytest.mark.parametrize(("asked", "found"), [(-1, 5), (2, 2), (5, 5)])
def test_chunks_selects_the_first_ones(asked: int, found: int) -> None:
    assert plan_saved_chunks(n_ctx=64, n_present=5, n_chunks=asked).n_chunk == found
    assert plan_chunks(n_tokens=5 * 64, n_ctx=64, n_chunks=asked).n_chunk == found


@pytest.mark.parametrize("asked", [0, -2, -3])
def test_zero_and_negative_chunks_are_refused(asked: int) -> None:
    for plan in (lambda: plan_saved_chunks(n_ctx=64, n_present=5, n_chunks=asked),):
        with pytest.raises(ConfigError, match=f"--chunks {asked}"):
            plan()
    with pytest.raises(ConfigError, match=f"--chunks {asked}"):
        plan_chunks(n_tokens=320, n_ctx=64, n_chunks=asked)


def test_more_chunks_than_present_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="--chunks 6: only 5"):
        plan_saved_chunks(n_ctx=64, n_present=5, n_chunks=6)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_chunks(n_tokens=100, n_ctx=2, n_chunks=0, stride=-1)
    assert {problem.field for problem in caught.value.problems} == {"-c", "--chunks", "--ppl-stride"}


def test_a_stride_as_long_as_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="--ppl-stride 64"):
        plan_chunks(n_tokens=2000, n_ctx=64, stride=64)
