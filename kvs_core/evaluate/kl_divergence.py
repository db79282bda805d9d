"""KL divergence between two models or two configurations of one, over the same text.

Three ways to get the two sides, one result: a model against a saved file, two models in lock-step, two saved files.
Memory: a tile of logits a side, and one KLD_ROW a scored token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvs_core.errors import CheckFailedError, ConfigError
from kvs_core.evaluate.choices import KldThresholds, LogitsFormat
from kvs_core.evaluate.chunk_run import (
    CounterWatch,
    NonFinite,
    ProgressSink,
    RowPart,
    add_counters,
    run_chunks,
)
from kvs_core.evaluate.chunks import ChunkPlan
from kvs_core.evaluate.journal import Journal
from kvs_core.evaluate.row_math import (
    IDENTICAL_NO,
    IDENTICAL_UNKNOWN,
    IDENTICAL_YES,
    KLD_ROW,
    RowWorkers,
    compare_logit_rows,
    kl_of_log_probs,
)
from kvs_core.evaluate.saved_logits import SavedLogits, StoredRows
from kvs_core.evaluate.source import LogitsSource, StreamTotals, pair_tiles, scored_tiles
from kvs_core.evaluate.statistics import (
    Dtype,
    KldStatistics,
    summarise_comparison,
)

STORED_TILE_ROWS = 16
"""Rows of a saved file decoded at once: 8 bytes a token of the vocabulary and row, 32 MB for 248320 tokens."""


@dataclass(frozen=True, kw_only=True)
class KldResult:
    """Rows of every finished chunk, and what the two sides were.

    rows            KLD_ROW [finished chunks * plan.rows_per_chunk]
    kld_floor       error in nats that the base format alone may put on one row's divergence; 0 for exact logits
    is_base_exact   whether ``nll_base`` is the base run's own, not a rounded or clamped value of a file
    products        float32 for rows measured against llama.cpp's file, in its own arithmetic
    base_streaming, streaming   None when that side was not asked to stream, or is a file
    """

    plan: ChunkPlan
    rows: NDArray[Any]
    non_finite: NonFinite | None
    kld_floor: float
    is_base_exact: bool
    products: Dtype
    base_streaming: StreamTotals | None
    streaming: StreamTotals | None

    @cached_property
    def statistics(self) -> KldStatistics | None:
        """None before the first finished chunk."""
        if not len(self.rows):
            return None
        return summarise_comparison(self.rows, rows_per_chunk=self.plan.rows_per_chunk, products=self.products)

    @property
    def idle_sides(self) -> tuple[str, ...]:
        """Sides that were asked to stream and streamed nothing: a figure about streaming would prove nothing."""
        sides = (("base", self.base_streaming), ("measured", self.streaming))
        return tuple(name for name, counters in sides if counters is not None and counters.bytes_streamed == 0)


def check_thresholds(result: KldResult, thresholds: KldThresholds) -> None:
    """Raise CheckFailedError naming every limit that does not hold; also when a side that should stream did not.

    A result without statistics fails any limit.
    """
    if thresholds.is_empty:
        return
    failures = [f"the {side} side was asked to stream and streamed nothing" for side in result.idle_sides]
    statistics = result.statistics
    if statistics is None or result.non_finite is not None:
        failures.append("there is no complete result to compare with the limits")
    else:
        mean, largest = statistics.kld.mean.value, statistics.kld.maximum
        share = statistics.same_top.value
        if thresholds.max_kld is not None and not largest <= thresholds.max_kld:
            failures.append(f"maximum KLD {largest:.6g} is above --max-kld {thresholds.max_kld:g}")
        if thresholds.max_mean_kld is not None and not mean <= thresholds.max_mean_kld:
            failures.append(f"mean KLD {mean:.6g} is above --max-mean-kld {thresholds.max_mean_kld:g}")
        if thresholds.min_same_top is not None and not share >= thresholds.min_same_top:
            failures.append(
                f"same top token {100 * share:.4f} % is below --min-same-top {100 * thresholds.min_same_top:g}"
            )
    if failures:
        explains = result.kld_floor and any("KLD" in failure for failure in failures)
        hint = f"the base file's format alone accounts for up to {result.kld_floor:.1g}" if explains else None
        raise CheckFailedError("; ".join(failures), hint=hint)


def products_of(saved: SavedLogits) -> Dtype:
    """How rows measured against a file are multiplied: as llama-perplexity does against its own format."""
    return np.float32 if saved.format is LogitsFormat.LLAMA else np.float64


def compare_with_saved(
    source: LogitsSource,
    saved: SavedLogits,
    *,
    plan: ChunkPlan,
    bos: int | None,
    workers: RowWorkers,
    journal: Journal | None = None,
    progress: ProgressSink | None = None,
) -> KldResult:
    """Run the file's own text through ``source`` and compare row by row.

    ``plan`` is ``plan_saved_chunks`` of the file; the caller has checked the file against the model (``check_base``).
    """
    watch = CounterWatch(source)
    floor = 0.0

    def compute(chunk_idx: int) -> Iterator[RowPart]:
        nonlocal floor
        stored = saved.open_chunk(chunk_idx)
        targets = plan.targets(saved.tokens, chunk_idx)
        inputs = plan.input_tokens(saved.tokens, chunk_idx, bos)
        for first, tile in scored_tiles(source, inputs, begin=plan.first, end=plan.n_ctx - 1):
            for begin in range(0, len(tile), STORED_TILE_ROWS):
                rows = tile[begin : begin + STORED_TILE_ROWS]
                row_idx = first - plan.first + begin
                out, finite = np.zeros(len(rows), KLD_ROW), np.empty(len(rows), np.uint8)
                stored.compare(rows, targets[row_idx : row_idx + len(rows)], out, finite, workers)
                yield out, finite
        floor = stored.kld_floor

    def finish(_: int) -> Mapping[str, Any]:
        return {"streaming": watch.take(), "base_streaming": None, "kld_floor": floor}

    return _run(
        plan,
        compute,
        finish,
        is_base_exact=saved.has_exact_targets,
        products=products_of(saved),
        journal=journal,
        progress=progress,
    )


def compare_sources(
    base: LogitsSource,
    other: LogitsSource,
    tokens: NDArray[np.int32],
    *,
    plan: ChunkPlan,
    bos: int | None,
    workers: RowWorkers,
    journal: Journal | None = None,
    progress: ProgressSink | None = None,
) -> KldResult:
    """Run ``tokens`` through both sides in lock-step and compare exact logits, tile by tile.

    Raises  ConfigError when the vocabularies differ.
    """
    if base.n_vocab != other.n_vocab:
        raise ConfigError(f"the base side has {base.n_vocab} tokens, the measured side {other.n_vocab}")
    base_watch, watch = CounterWatch(base), CounterWatch(other)

    def compute(chunk_idx: int) -> Iterator[RowPart]:
        targets = plan.targets(tokens, chunk_idx)
        inputs = plan.input_tokens(tokens, chunk_idx, bos)
        sides = [scored_tiles(side, inputs, begin=plan.first, end=plan.n_ctx - 1) for side in (base, other)]
        for first, base_rows, rows in pair_tiles(*sides):
            wanted = targets[first - plan.first : first - plan.first + len(rows)]
            yield _compare_logits(base_rows, rows, wanted, workers)

    def finish(_: int) -> Mapping[str, Any]:
        return {"streaming": watch.take(), "base_streaming": base_watch.take(), "kld_floor": 0.0}

    return _run(plan, compute, finish, is_base_exact=True, journal=journal, progress=progress)


def compare_files(
    base: SavedLogits,
    other: SavedLogits,
    *,
    plan: ChunkPlan,
    workers: RowWorkers,
    progress: ProgressSink | None = None,
) -> KldResult:
    """Compare two saved files over the first ``plan.n_chunk`` chunks; the caller has run ``check_pair``.

    Both sides are rounded, so the floor is the sum of theirs, and nothing is subtracted. Rows whose hashes agree are
    identical and their divergence is 0.
    """
    floor = 0.0

    def compute(chunk_idx: int) -> Iterator[RowPart]:
        nonlocal floor
        base_chunk, chunk = base.open_chunk(chunk_idx), other.open_chunk(chunk_idx)
        targets = plan.targets(base.tokens, chunk_idx)
        for begin in range(0, plan.rows_per_chunk, STORED_TILE_ROWS):
            wanted = targets[begin : begin + STORED_TILE_ROWS]
            base_rows, rows = base_chunk.take(wanted, workers), chunk.take(wanted, workers)
            yield _compare_stored(base_rows, rows, base.log_prob_floor, workers), np.ones(len(wanted), np.uint8)
        floor = base_chunk.kld_floor + chunk.kld_floor

    def finish(_: int) -> Mapping[str, Any]:
        return {"streaming": None, "base_streaming": None, "kld_floor": floor}

    return _run(plan, compute, finish, is_base_exact=base.has_exact_targets, journal=None, progress=progress)


def _run(
    plan: ChunkPlan,
    compute: Callable[[int], Iterator[RowPart]],
    finish: Callable[[int], Mapping[str, Any]],
    *,
    is_base_exact: bool,
    products: Dtype = np.float64,
    journal: Journal | None,
    progress: ProgressSink | None,
) -> KldResult:
    run = run_chunks(
        plan,
        dtype=KLD_ROW,
        compute=compute,
        finish=finish,
        n_usable=plan.n_chunk,
        journal=journal,
        progress=progress,
    )
    return KldResult(
        plan=plan,
        rows=run.rows,
        non_finite=run.non_finite,
        kld_floor=max((float(note["kld_floor"]) for note in run.notes), default=0.0),
        is_base_exact=is_base_exact,
        products=products,
        base_streaming=add_counters(run.notes, "base_streaming"),
        streaming=add_counters(run.notes, "streaming"),
    )


def _compare_logits(
    base: NDArray[np.float32], other: NDArray[np.float32], targets: NDArray[np.int32], workers: RowWorkers
) -> RowPart:
    n = len(other)
    out, finite = np.zeros(n, KLD_ROW), np.empty(n, np.uint8)
    workers.run(lambda begin, end: compare_logit_rows(base, other, targets, out, finite, begin, end), n)
    return out, finite


def _compare_stored(base: StoredRows, other: StoredRows, floor: float, workers: RowWorkers) -> NDArray[Any]:
    n = len(base.nll)
    kld, no_offset = np.empty(n, np.float64), np.zeros(n, np.float64)
    workers.run(
        lambda begin, end: kl_of_log_probs(base.log_probs, other.log_probs, no_offset, floor, kld, begin, end), n
    )
    out = np.zeros(n, KLD_ROW)
    out["identical"] = IDENTICAL_UNKNOWN
    if base.hashes is not None and other.hashes is not None:
        out["identical"] = np.where(base.hashes == other.hashes, IDENTICAL_YES, IDENTICAL_NO)
    out["nll"], out["nll_base"], out["clamped"] = other.nll, base.nll, base.clamped
    out["kld"] = np.where(out["identical"] == IDENTICAL_YES, 0.0, kld)
    out["p_diff"] = np.exp(-other.nll) - np.exp(-base.nll)
    out["same_top"] = base.top == other.top
    return out
