"""Perplexity against the plain formula, and runs that end early."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvs_core.errors import CheckFailedError, IntegrityError
from kvs_core.evaluate.chunk_run import Progress, require_finite
from kvs_core.evaluate.chunks import plan_chunks
from kvs_core.evaluate.perplexity import measure_perplexity
from kvs_core.evaluate.row_math import RowWorkers
from kvs_core.evaluate.source import StreamTotals
from tests.evaluate.fake_source import FakeSource, make_text, reference_log_probs

WORKERS = RowWorkers(1)


@pytest.mark.parametrize("tile_rows", [1, 5, 32])
@pytest.mark.parametrize("bos", [None, 0])
def test_perplexity_is_the_exponential_of_the_mean_over_scored_rows(tile_rows: int, bos: int | None) -> None:
    text = make_text(200)
    plan = plan_chunks(n_tokens=200, n_ctx=64)
    result = measure_perplexity(FakeSource(tile_rows=tile_rows), text, plan=plan, bos=bos, workers=WORKERS)

    expected = []
    for begin in (0, 64, 128):
        chunk = text[begin : begin + 64].copy()
        targets = chunk[33:]
        if bos is not None:
            chunk[0] = bos
        log_probs = reference_log_probs(FakeSource(), chunk, begin=32)
        expected += [-log_probs[row, target] for row, target in enumerate(targets)]

    assert result.ppl is not None
    # The logits are float32 with values near 10, whose exponentials carry a relative error of 1e-6 at most.
    assert result.ppl.value == pytest.approx(math.exp(np.mean(expected)), rel=2e-6)
    assert len(result.nll) == 3 * 31
    assert result.ppl.uncertainty == pytest.approx(
        result.ppl.value * np.std(expected) / math.sqrt(len(expected) - 1), rel=1e-5
    )
    assert result.chunk_ppl[-1] == pytest.approx(result.ppl.value, rel=1e-12)
    assert result.chunk_ppl[0] == pytest.approx(math.exp(np.mean(expected[:31])), rel=2e-6)


def test_the_result_does_not_depend_on_the_number_of_threads() -> None:
    text = make_text(300)
    plan = plan_chunks(n_tokens=300, n_ctx=100)
    one = measure_perplexity(FakeSource(tile_rows=32), text, plan=plan, bos=None, workers=WORKERS)
    with RowWorkers(3) as workers:
        three = measure_perplexity(FakeSource(tile_rows=32), text, plan=plan, bos=None, workers=workers)
    assert np.array_equal(one.nll, three.nll)


def test_the_cache_is_cleared_before_every_chunk_and_whole_chunks_are_fed() -> None:
    source = FakeSource()
    plan = plan_chunks(n_tokens=192, n_ctx=64)
    measure_perplexity(source, make_text(192), plan=plan, bos=None, workers=WORKERS)
    assert source.n_clears == 3
    assert [len(tokens) for tokens in source.inputs] == [64, 64, 64]


def test_stride_mode_scores_every_token_behind_the_first_window_once() -> None:
    text = make_text(600)
    plan = plan_chunks(n_tokens=600, n_ctx=150, stride=100)
    result = measure_perplexity(FakeSource(), text, plan=plan, bos=0, workers=WORKERS)

    window = text[100 : 100 + 256]
    log_probs = reference_log_probs(FakeSource(), window, begin=155)
    expected = [-log_probs[row, target] for row, target in enumerate(window[156:])]
    assert result.nll[100:200] == pytest.approx(expected, rel=2e-6)
    assert len(result.nll) == 4 * 100


def test_the_smallest_text_gives_finite_figures() -> None:
    plan = plan_chunks(n_tokens=6, n_ctx=3)
    result = measure_perplexity(FakeSource(), make_text(6), plan=plan, bos=None, workers=WORKERS)
    assert result.ppl is not None
    assert math.isfinite(result.ppl.value)
    assert math.isfinite(result.ppl.uncertainty)


def test_nan_logits_stop_the_run_and_keep_earlier_chunks() -> None:
    text = make_text(64 * 4)
    text[64 * 2 + 40] = 0
    source = FakeSource()
    source.poison_token = 0
    plan = plan_chunks(n_tokens=len(text), n_ctx=64)
    result = measure_perplexity(source, text, plan=plan, bos=None, workers=WORKERS)

    assert result.ppl is None
    assert len(result.chunk_ppl) == 2
    assert all(math.isfinite(value) for value in result.chunk_ppl)
    assert source.n_clears == 3, "no chunk after the bad one is computed"
    with pytest.raises(CheckFailedError, match=r"chunk 3 of 4: logits of token 40 .* 2 chunks before it are kept"):
        require_finite(result.non_finite, plan.n_chunk)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_single_bad_logit_anywhere_in_a_row_is_found(value: float) -> None:
    class OneBadLogit(FakeSource):
        def prefill_rows(self, tokens, *, output_begin):  # type: ignore[no-untyped-def]
            for first, rows in super().prefill_rows(tokens, output_begin=output_begin):
                if first <= 50 < first + len(rows):
                    rows[50 - first, 17] = value
                yield first, rows

    plan = plan_chunks(n_tokens=128, n_ctx=64)
    result = measure_perplexity(OneBadLogit(), make_text(128), plan=plan, bos=None, workers=WORKERS)
    assert result.non_finite is not None
    assert (result.non_finite.chunk_idx, result.non_finite.token_idx) == (0, 50)


def test_streaming_counters_are_those_of_this_run() -> None:
    source = FakeSource(bytes_per_token=10)
    text = make_text(128)
    plan = plan_chunks(n_tokens=128, n_ctx=64)
    measure_perplexity(source, text, plan=plan, bos=None, workers=WORKERS)
    result = measure_perplexity(source, text, plan=plan, bos=None, workers=WORKERS)
    assert result.streaming == StreamTotals(
        pages_resident=3, pages_streamed=128, bytes_streamed=1280, predicted_bytes_streamed=1280
    )


def test_progress_counts_rows_and_chunks() -> None:
    seen: list[tuple[int, int]] = []

    def note(progress: Progress) -> None:
        seen.append((progress.n_chunks_done, progress.chunk_rows_done))

    plan = plan_chunks(n_tokens=40, n_ctx=20)
    measure_perplexity(FakeSource(tile_rows=6), make_text(40), plan=plan, bos=None, workers=WORKERS, progress=note)
    assert seen == [(0, 0), (0, 6), (0, 9), (1, 0), (1, 6), (1, 9), (2, 0)]


def test_a_source_that_skips_rows_is_caught() -> None:
    class Skipping(FakeSource):
        def prefill_rows(self, tokens, *, output_begin):  # type: ignore[no-untyped-def]
            tiles = list(super().prefill_rows(tokens, output_begin=output_begin))
            yield from tiles[:1] + tiles[2:]

    plan = plan_chunks(n_tokens=128, n_ctx=64)
    with pytest.raises(IntegrityError, match="needs token 40"):
        measure_perplexity(Skipping(), make_text(128), plan=plan, bos=None, workers=WORKERS)
