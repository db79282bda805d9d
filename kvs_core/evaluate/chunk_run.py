"""Walking a chunk plan with interruptions in mind: finished chunks come from the journal, the rest is computed.

What a chunk computes is given as a function; perplexity and KL divergence share everything around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvs_core.errors import CheckFailedError
from kvs_core.evaluate.chunks import ChunkPlan
from kvs_core.evaluate.journal import ChunkRecord, Journal
from kvs_core.evaluate.source import LogitsSource, StreamTotals

RowPart = tuple[NDArray[Any], NDArray[np.uint8]]
"""``(rows, finite)`` of the next scored tokens of a chunk; rows after a non-finite one mean nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run is. ``rows`` holds the finished chunks' rows; ``n_resumed`` of them come from an earlier run."""

    n_chunk: int
    n_chunks_done: int
    n_resumed: int
    chunk_rows_done: int
    rows_per_chunk: int
    rows: NDArray[Any]


ProgressSink = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """The first scored token whose logits hold an infinity or a NaN; the run ended there."""

    chunk_idx: int
    token_idx: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRun:
    """Rows of the chunks that were finished, what their makers noted, and why there are not more (None: all done)."""

    rows: NDArray[Any]
    notes: tuple[Mapping[str, Any], ...]
    non_finite: NonFinite | None


def run_chunks(
    plan: ChunkPlan,
    *,
    dtype: np.dtype[Any],
    compute: Callable[[int], Iterator[RowPart]],
    finish: Callable[[int], Mapping[str, Any]],
    n_usable: int,
    journal: Journal | None,
    progress: ProgressSink | None,
) -> ChunkRun:
    """Compute every chunk that the journal does not hold yet.

    compute   yields the rows of a chunk, ``plan.rows_per_chunk`` in all
    finish    called after the last row of a chunk; its JSON notes are kept with the rows
    n_usable  journal records that may be used (a base file being written may have lost some)
    """
    rows = np.empty(plan.n_rows, dtype)
    notes: list[Mapping[str, Any]] = []
    per_chunk = plan.rows_per_chunk
    n_resumed = 0
    if journal is not None:
        n_resumed = min(len(journal.records), n_usable, plan.n_chunk)
        for chunk_idx, record in enumerate(journal.records[:n_resumed]):
            rows[chunk_idx * per_chunk : (chunk_idx + 1) * per_chunk] = record.rows
            notes.append(record.notes)
        journal.keep_first(n_resumed)

    def report(n_chunks_done: int, chunk_rows_done: int) -> None:
        if progress is not None:
            progress(
                Progress(
                    n_chunk=plan.n_chunk,
                    n_chunks_done=n_chunks_done,
                    n_resumed=n_resumed,
                    chunk_rows_done=chunk_rows_done,
                    rows_per_chunk=per_chunk,
                    rows=rows[: n_chunks_done * per_chunk],
                )
            )

    report(n_resumed, 0)
    for chunk_idx in range(n_resumed, plan.n_chunk):
        begin = chunk_idx * per_chunk
        done = 0
        for part, finite in compute(chunk_idx):
            if not finite.all():
                token_idx = plan.first + done + int(np.flatnonzero(finite == 0)[0])
                return ChunkRun(
                    rows=rows[:begin],
                    notes=tuple(notes),
                    non_finite=NonFinite(chunk_idx=chunk_idx, token_idx=token_idx),
                )
            rows[begin + done : begin + done + len(part)] = part
            done += len(part)
            report(chunk_idx, done)
        notes.append(finish(chunk_idx))
        if journal is not None:
            journal.append(ChunkRecord(rows=rows[begin : begin + per_chunk], notes=notes[-1]))
        report(chunk_idx + 1, 0)
    return ChunkRun(rows=rows, notes=tuple(notes), non_finite=None)


def require_finite(non_finite: NonFinite | None, n_chunk: int) -> None:
    """Raise CheckFailedError for a run that ended at a non-finite row."""
    if non_finite is not None:
        raise CheckFailedError(
            f"chunk {non_finite.chunk_idx + 1} of {n_chunk}: logits of token {non_finite.token_idx} hold NaN or "
            f"infinity; stopped there, {non_finite.chunk_idx} chunks before it are kept",
            hint="the model file may be damaged, or its values overflow the chosen types",
        )


class CounterWatch:
    """Streaming counters of one source, split by chunk so that they survive a resume."""

    def __init__(self, source: LogitsSource) -> None:
        self._source = source
        self._before = self._read()

    def take(self) -> dict[str, int] | None:
        """What was streamed since the last call, as JSON; None when streaming was not asked for."""
        now = self._read()
        if now is None:
            return None
        part = now.since(self._before or StreamTotals())
        self._before = now
        return part.to_json()

    def _read(self) -> StreamTotals | None:
        counters = self._source.streaming_counters
        return None if counters is None else StreamTotals.of(counters)


def add_counters(notes: tuple[Mapping[str, Any], ...], key: str) -> StreamTotals | None:
    """Total of the counters that chunks noted under ``key``; None when that side does not stream."""
    total: StreamTotals | None = None
    for note in notes:
        if note[key] is not None:
            part = StreamTotals(**note[key])
            total = part if total is None else total.plus(part)
    return total
