"""Two sides compared: lock-step, against files, between files; limits and what counts as proof."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvs_core.errors import CheckFailedError, ConfigError, IntegrityError
from kvs_core.evaluate.choices import KldThresholds
from kvs_core.evaluate.chunks import plan_chunks, plan_saved_chunks
from kvs_core.evaluate.compact_file import CompactLogitsFile
from kvs_core.evaluate.compact_layout import make_compact_header
from kvs_core.evaluate.compact_writer import CompactLogitsWriter
from kvs_core.evaluate.kl_divergence import (
    KldResult,
    check_thresholds,
    compare_files,
    compare_sources,
    compare_with_saved,
)
from kvs_core.evaluate.logits_file import LlamaLogitsFile, LlamaLogitsWriter, LogitsFileLayout
from kvs_core.evaluate.perplexity import measure_perplexity
from kvs_core.evaluate.row_math import RowWorkers
from kvs_core.evaluate.saved_logits import LogitsIdentity, LogitsWriter, check_pair
from kvs_core.evaluate.source import StreamTotals, pair_tiles
from tests.evaluate.fake_source import N_VOCAB, FakeSource, make_text, reference_log_probs

WORKERS = RowWorkers(1)
N_CTX = 64
TEXT = make_text(3 * N_CTX)
PLAN = plan_chunks(n_tokens=len(TEXT), n_ctx=N_CTX)


def lock_step(base: FakeSource, other: FakeSource) -> KldResult:
    return compare_sources(base, other, TEXT, plan=PLAN, bos=0, workers=WORKERS)


def write_files(folder: Path, name: str, source: FakeSource) -> tuple[Path, Path]:
    """The same run in llama.cpp's format and in ours."""
    layout = LogitsFileLayout(n_ctx=N_CTX, n_vocab=N_VOCAB, n_chunk=PLAN.n_chunk)
    identity = LogitsIdentity(model=name, tokenizer="same", type_k="f16", type_v="f16")
    header = make_compact_header(n_ctx=N_CTX, n_chunk=PLAN.n_chunk, n_vocab=N_VOCAB, tokens=TEXT, identity=identity)
    paths = folder / f"{name}.kld", folder / f"{name}.kvs"
    writers: list[LogitsWriter] = [
        LlamaLogitsWriter(paths[0], layout=layout, tokens=TEXT),
        CompactLogitsWriter(paths[1], header=header, tokens=TEXT),
    ]
    for writer in writers:
        with closing(writer):
            measure_perplexity(source, TEXT, plan=PLAN, bos=0, workers=WORKERS, writer=writer)
    return paths


def test_divergence_is_the_plain_formula_in_float64() -> None:
    base, other = FakeSource(), FakeSource(noise=0.02)
    result = lock_step(base, other)

    chunk = TEXT[N_CTX : 2 * N_CTX].copy()
    chunk[0] = 0
    log_base = reference_log_probs(base, chunk, begin=32)[:31]
    log_other = reference_log_probs(other, chunk, begin=32)[:31]
    targets = TEXT[N_CTX + 33 : 2 * N_CTX]
    rows = result.rows[31:62]
    assert rows["kld"] == pytest.approx((np.exp(log_base) * (log_base - log_other)).sum(axis=1), rel=1e-5)
    assert rows["nll"] == pytest.approx(-log_other[np.arange(31), targets], rel=1e-6)
    assert rows["nll_base"] == pytest.approx(-log_base[np.arange(31), targets], rel=1e-6)
    assert rows["p_diff"] == pytest.approx(
        np.exp(log_other[np.arange(31), targets]) - np.exp(log_base[np.arange(31), targets]), abs=1e-6
    )
    assert np.array_equal(rows["same_top"], log_base.argmax(axis=1) == log_other.argmax(axis=1))
    assert result.kld_floor == 0.0


def test_equal_sides_diverge_by_exactly_zero_and_every_row_is_identical() -> None:
    statistics = lock_step(FakeSource(tile_rows=8), FakeSource(tile_rows=3)).statistics
    assert statistics is not None
    assert (statistics.kld.mean.value, statistics.kld.maximum, statistics.kld.minimum) == (0.0, 0.0, 0.0)
    assert statistics.same_top.value == 1.0
    assert statistics.n_identical == statistics.n_rows == 93
    assert statistics.ln_ratio.value == 0.0
    assert statistics.p_diff_rms.value == 0.0


def test_sides_take_turns_tile_by_tile() -> None:
    log: list[str] = []

    class Logged(FakeSource):
        name = ""

        def prefill_rows(self, tokens, *, output_begin):  # type: ignore[no-untyped-def]
            for first, rows in super().prefill_rows(tokens, output_begin=output_begin):
                log.append(self.name)
                yield first, rows

    base, other = Logged(), Logged()
    base.name, other.name = "b", "o"
    lock_step(base, other)
    assert "".join(log[:10]) == "bobobobobo"


def test_tiles_cut_differently_are_paired_row_by_row() -> None:
    rows = np.arange(40, dtype=np.float32).reshape(20, 2)

    def cut(*sizes: int) -> Iterator[tuple[int, np.ndarray]]:
        begin = 0
        for size in sizes:
            yield 5 + begin, rows[begin : begin + size]
            begin += size

    paired = list(pair_tiles(cut(8, 8, 4), cut(3, 7, 10)))
    assert [(first, len(a)) for first, a, _ in paired] == [(5, 3), (8, 5), (13, 2), (15, 6), (21, 4)]
    assert all(np.array_equal(a, b) for _, a, b in paired)
    with pytest.raises(IntegrityError, match="fewer rows"):
        list(pair_tiles(cut(8, 8), cut(8, 8, 4)))


def test_different_vocabularies_are_refused() -> None:
    with pytest.raises(ConfigError, match="321 tokens, the measured side 300"):
        lock_step(FakeSource(), FakeSource(n_vocab=300))


def test_nan_on_either_side_stops_at_its_chunk() -> None:
    for side in (0, 1):
        sides = [FakeSource(), FakeSource()]
        sides[side].poison_token = int(TEXT[N_CTX + 45])
        # Only the first chunk that holds the token counts.
        expected = int(np.flatnonzero(TEXT[N_CTX + 45] == TEXT)[0]) // N_CTX
        result = lock_step(*sides)
        assert result.non_finite is not None
        assert result.non_finite.chunk_idx == expected
        assert len(result.rows) == expected * PLAN.rows_per_chunk


def test_chunks_of_a_comparison_are_the_first_rows_of_the_full_one(tmp_path: Path) -> None:
    path, _ = write_files(tmp_path, "base", FakeSource())
    with LlamaLogitsFile(path) as saved:
        results = [
            compare_with_saved(
                FakeSource(noise=0.01),
                saved,
                plan=plan_saved_chunks(n_ctx=N_CTX, n_present=3, n_chunks=n_chunks),
                bos=0,
                workers=WORKERS,
            )
            for n_chunks in (-1, 2)
        ]
    assert len(results[1].rows) == 62
    assert results[0].rows[:62].tobytes() == results[1].rows.tobytes()


@pytest.mark.parametrize("kind", [0, 1])
def test_saved_files_of_one_run_agree_within_the_format(tmp_path: Path, kind: int) -> None:
    opened = (LlamaLogitsFile, CompactLogitsFile)[kind]
    paths = [write_files(tmp_path, name, FakeSource())[kind] for name in ("a", "b")]
    with opened(paths[0]) as base, opened(paths[1]) as other:
        check_pair(base, other)
        plan = plan_saved_chunks(n_ctx=N_CTX, n_present=3)
        result = compare_files(base, other, plan=plan, workers=WORKERS)
    assert result.statistics is not None
    assert result.statistics.kld.maximum <= result.kld_floor
    assert result.statistics.same_top.value == 1.0
    assert result.statistics.n_identical == (None if kind == 0 else 93)
    if kind == 1:
        assert result.statistics.kld.maximum == result.statistics.kld.minimum == 0.0


def test_saved_files_of_two_models_give_the_lock_step_figures(tmp_path: Path) -> None:
    base, other = FakeSource(), FakeSource(noise=0.03)
    base_paths, other_paths = write_files(tmp_path, "a", base), write_files(tmp_path, "b", other)
    exact = lock_step(base, other)
    plan = plan_saved_chunks(n_ctx=N_CTX, n_present=3)
    with LlamaLogitsFile(base_paths[0]) as a, CompactLogitsFile(other_paths[1]) as b:
        mixed = compare_files(a, b, plan=plan, workers=WORKERS)
    with CompactLogitsFile(base_paths[1]) as a, CompactLogitsFile(other_paths[1]) as b:
        ours = compare_files(a, b, plan=plan, workers=WORKERS)
    assert exact.statistics is not None
    assert mixed.statistics is not None
    assert ours.statistics is not None
    mean = exact.statistics.kld.mean.value
    assert ours.statistics.kld.mean.value == pytest.approx(mean, abs=ours.kld_floor)
    assert mixed.statistics.kld.mean.value == pytest.approx(mean, abs=mixed.kld_floor + 0.02 * mean)
    assert mixed.statistics.n_identical is None
    assert ours.statistics.n_identical == 0
    assert ours.rows["nll"] == pytest.approx(exact.rows["nll"], abs=1e-12)


def test_files_of_another_text_are_refused_by_field(tmp_path: Path) -> None:
    path, compact = write_files(tmp_path, "a", FakeSource())
    with LlamaLogitsFile(path) as a, CompactLogitsFile(compact) as b:
        check_pair(a, b)
        b.tokens = b.tokens.copy()
        b.tokens[70] += 1
        with pytest.raises(ConfigError, match=r"base file tokens \d+ at 70"):
            check_pair(a, b)
        b.n_ctx = 32
        with pytest.raises(ConfigError, match="base file context 64"):
            check_pair(a, b)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (KldThresholds(max_kld=1e-9), "maximum KLD"),
        (KldThresholds(max_mean_kld=1e-9), "mean KLD"),
        (KldThresholds(min_same_top=1.0), "same top token"),
        (KldThresholds(max_kld=1e-9, max_mean_kld=1e-9), r"maximum KLD .*; mean KLD"),
    ],
)
def test_a_limit_that_does_not_hold_is_a_failed_check(limits: KldThresholds, message: str) -> None:
    result = lock_step(FakeSource(), FakeSource(noise=0.3))
    with pytest.raises(CheckFailedError, match=message):
        check_thresholds(result, limits)


def test_limits_that_hold_pass() -> None:
    check_thresholds(lock_step(FakeSource(), FakeSource()), KldThresholds(max_kld=0, max_mean_kld=0, min_same_top=1))
    check_thresholds(lock_step(FakeSource(), FakeSource(noise=0.3)), KldThresholds())


def test_a_side_that_should_stream_and_did_not_fails_any_limit() -> None:
    result = lock_step(FakeSource(), FakeSource(bytes_per_token=0))
    assert result.idle_sides == ("measured",)
    with pytest.raises(CheckFailedError, match="measured side was asked to stream and streamed nothing"):
        check_thresholds(result, KldThresholds(max_kld=0.0))
    check_thresholds(result, KldThresholds())


def test_the_floor_of_a_file_is_no_excuse_for_other_limits() -> None:
    result = replace(lock_step(FakeSource(), FakeSource(noise=0.3)), kld_floor=1e-4)
    with pytest.raises(CheckFailedError, match="same top token") as caught:
        check_thresholds(result, KldThresholds(min_same_top=1.0))
    assert caught.value.hint is None
    with pytest.raises(CheckFailedError, match="maximum KLD") as caught:
        check_thresholds(result, KldThresholds(max_kld=1e-9))
    assert caught.value.hint == "the base file's format alone accounts for up to 0.0001"


def test_streaming_is_reported_for_each_side() -> None:
    result = lock_step(FakeSource(bytes_per_token=0), FakeSource(bytes_per_token=7))
    assert result.idle_sides == ("base",)
    assert result.streaming is not None
    assert result.streaming.bytes_streamed == result.streaming.predicted_bytes_streamed == 7 * len(TEXT)
    assert lock_step(FakeSource(), FakeSource()).streaming is None


def test_a_result_that_stopped_early_fails_any_limit() -> None:
    poisoned = FakeSource()
    poisoned.poison_token = int(TEXT[40])
    with pytest.raises(CheckFailedError, match="no complete result"):
        check_thresholds(lock_step(FakeSource(), poisoned), KldThresholds(max_kld=100.0))


def test_totals_add_up_over_chunks() -> None:
    first = StreamTotals(pages_resident=4, pages_streamed=2, bytes_streamed=20, predicted_bytes_streamed=20)
    second = replace(first, pages_resident=5)
    assert first.plus(second) == StreamTotals(
        pages_resident=5, pages_streamed=4, bytes_streamed=40, predicted_bytes_streamed=40
    )


def test_memory_does_not_grow_with_the_context() -> None:
    """A whole context of logits would be 128 MiB a side at the longer context; numpy reports its memory here."""
    n_vocab = 8192
    peaks = []
    for n_ctx in (512, 8192):
        text = make_text(2 * n_ctx, n_vocab=n_vocab)
        plan = plan_chunks(n_tokens=len(text), n_ctx=n_ctx, n_chunks=1)
        base, other = FakeSource(n_vocab=n_vocab), FakeSource(n_vocab=n_vocab, noise=0.01)
        tracemalloc.start()
        compare_sources(base, other, text, plan=plan, bos=None, workers=WORKERS)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 4 << 20, peaks
