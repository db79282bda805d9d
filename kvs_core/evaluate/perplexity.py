"""Perplexity of a text under a model, by llama-perplexity's rules; optionally writing the logits as a base file.

Memory: one tile of logits, and one number a scored token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
from kvs_core.evaluate.row_math import RowWorkers, reduce_rows
from kvs_core.evaluate.saved_logits import LogitsWriter
from kvs_core.evaluate.source import LogitsSource, StreamTotals, scored_tiles
from kvs_core.evaluate.statistics import Estimate, RowBlocks, estimate_perplexity, running_perplexities

NLL_ROW = np.dtype("<f8")
"""What a perplexity run keeps of each scored row: -ln p of the true next token."""


@dataclass(frozen=True, kw_only=True)
class PerplexityResult:
    """Everything a finished (or, with ``non_finite``, stopped) run knows.

    nll  float64 [finished chunks * plan.rows_per_chunk]
    """

    plan: ChunkPlan
    nll: NDArray[np.float64]
    non_finite: NonFinite | None
    streaming: StreamTotals | None

    @cached_property
    def ppl(self) -> Estimate | None:
        """None when the run stopped at a non-finite row: the figures before it are in ``chunk_ppl``."""
        if self.non_finite is not None:
            return None
        blocks = RowBlocks(n_rows=len(self.nll), rows_per_chunk=self.plan.rows_per_chunk)
        return estimate_perplexity(self.nll, blocks)

    @cached_property
    def chunk_ppl(self) -> list[float]:
        """Perplexity over the first 1, 2, … chunks."""
        return [float(value) for value in running_perplexities(self.nll, self.plan.rows_per_chunk)]


def evaluation_configuration(
    *, kind: str, plan: ChunkPlan, tokens: NDArray[np.int32], bos: int | None, run: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that decides the rows of a run, as JSON values: the key under which finished chunks are kept.

    ``run`` is the caller's part: model, types, micro-batch, device, arena, written file and format.
    """
    return {
        "kind": kind,
        "plan": asdict(plan),
        "tokens": hashlib.sha256(tokens.astype("<i4").tobytes()).hexdigest(),
        "bos": bos,
        "run": dict(run),
    }


def measure_perplexity(
    source: LogitsSource,
    tokens: NDArray[np.int32],
    *,
    plan: ChunkPlan,
    bos: int | None,
    workers: RowWorkers,
    writer: LogitsWriter | None = None,
    journal: Journal | None = None,
    progress: ProgressSink | None = None,
) -> PerplexityResult:
    """Run every chunk of ``tokens`` int32 [n_tokens] through ``source``.

    bos      put in place of each chunk's first token when the vocabulary adds BOS, else None
    writer   gets every scored row; with one, ``nll`` follows llama-perplexity's float32 arithmetic for saved files
    journal  finished chunks are taken from it and added to it; the caller discards it when the result is out

    A non-finite row ends the run early: see ``PerplexityResult.non_finite``. A complete ``writer`` is published.
    """
    watch = CounterWatch(source)
    n_usable = plan.n_chunk
    if writer is not None:
        n_usable = min(writer.n_complete_chunks, len(journal.records) if journal is not None else 0)
        writer.begin_at(n_usable)

    def compute(chunk_idx: int) -> Iterator[RowPart]:
        targets = plan.targets(tokens, chunk_idx)
        inputs = plan.input_tokens(tokens, chunk_idx, bos)
        for first, rows in scored_tiles(source, inputs, begin=plan.first, end=plan.n_ctx - 1):
            wanted = targets[first - plan.first : first - plan.first + len(rows)]
            yield writer.write_rows(rows, wanted, workers) if writer is not None else _reduce(rows, wanted, workers)

    def finish(_: int) -> Mapping[str, Any]:
        if writer is not None:
            writer.finish_chunk()
        return {"streaming": watch.take()}

    run = run_chunks(
        plan,
        dtype=NLL_ROW,
        compute=compute,
        finish=finish,
        n_usable=n_usable,
        journal=journal,
        progress=progress,
    )
    if writer is not None and run.non_finite is None:
        writer.publish()
    return PerplexityResult(
        plan=plan, nll=run.rows, non_finite=run.non_finite, streaming=add_counters(run.notes, "streaming")
    )


def _reduce(
    rows: NDArray[np.float32], targets: NDArray[np.int32], workers: RowWorkers
) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    n = len(rows)
    nll, log_sum = np.empty(n, np.float64), np.empty(n, np.float64)
    top, finite = np.empty(n, np.int32), np.empty(n, np.uint8)
    workers.run(lambda begin, end: reduce_rows(rows, targets, nll, log_sum, top, finite, begin, end), n)
    return nll, finite
