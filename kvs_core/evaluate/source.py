"""Where rows of logits come from, as the evaluations see it: one protocol, and how its tiles are cut and paired.

No model, no session and no files here: ``Session`` implements the protocol, tests implement it with numpy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvs_core.errors import IntegrityError


class LiveCounters(Protocol):
    """The counters of a session that matter here (``kv_cache.StreamCounters`` has them), updated in place."""

    pages_resident: int
    pages_streamed: int
    bytes_streamed: int
    predicted_bytes_streamed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTotals:
    """What KV streaming did during a stretch of a run; bytes and pages, JSON names as elsewhere."""

    pages_resident: int = 0  # at the end of the stretch
    pages_streamed: int = 0
    bytes_streamed: int = 0
    predicted_bytes_streamed: int = 0

    @classmethod
    def of(cls, counters: LiveCounters) -> StreamTotals:
        """A snapshot of live counters."""
        return cls(
            pages_resident=counters.pages_resident,
            pages_streamed=counters.pages_streamed,
            bytes_streamed=counters.bytes_streamed,
            predicted_bytes_streamed=counters.predicted_bytes_streamed,
        )

    def since(self, earlier: StreamTotals) -> StreamTotals:
        """The part added after ``earlier``."""
        return StreamTotals(
            pages_resident=self.pages_resident,
            pages_streamed=self.pages_streamed - earlier.pages_streamed,
            bytes_streamed=self.bytes_streamed - earlier.bytes_streamed,
            predicted_bytes_streamed=self.predicted_bytes_streamed - earlier.predicted_bytes_streamed,
        )

    def plus(self, later: StreamTotals) -> StreamTotals:
        """Sum of two stretches of one run, ``later`` being the second."""
        return StreamTotals(
            pages_resident=later.pages_resident,
            pages_streamed=self.pages_streamed + later.pages_streamed,
            bytes_streamed=self.bytes_streamed + later.bytes_streamed,
            predicted_bytes_streamed=self.predicted_bytes_streamed + later.predicted_bytes_streamed,
        )

    def to_json(self) -> dict[str, int]:
        return asdict(self)


class LogitsSource(Protocol):
    """A model with one sequence: tokens in, rows of logits out, tile by tile."""

    @property
    def n_vocab(self) -> int: ...

    @property
    def n_ctx(self) -> int: ...

    @property
    def streaming_counters(self) -> LiveCounters | None:
        """Totals since the source was made; None when streaming was not asked for."""
        ...

    def clear(self) -> None:
        """Forget every token of the sequence; the counters stay."""
        ...

    def prefill_rows(self, tokens: Sequence[int], *, output_begin: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Append ``tokens`` and yield their logits as ``(index of the tile's first token, rows)``.

        Indices count from the first of ``tokens``; tiles are float32 [n, n_vocab], consecutive, start at
        ``output_begin`` and end with the last token. A tile is valid only until the next one is asked for.
        """
        ...


def scored_tiles(
    source: LogitsSource, tokens: NDArray[np.int32], *, begin: int, end: int
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Run ``tokens`` from an empty cache and yield the logits of token indices ``begin..end``, in order.

    Tokens at or past ``end`` are computed like any other (the micro-batches keep the shape they have in every other
    run), but their rows are not handed on.

    Raises  IntegrityError if the source skips or repeats a row, or yields another shape or dtype.
    """
    source.clear()
    expected = begin
    for first, rows in source.prefill_rows(tokens.tolist(), output_begin=begin):
        if first != expected or rows.ndim != 2 or rows.shape[1] != source.n_vocab or rows.dtype != np.float32:
            raise IntegrityError(
                f"logits tile starts at token {first} as {rows.dtype} {list(rows.shape)}, "
                f"needs token {expected} as float32 [n, {source.n_vocab}]"
            )
        expected += len(rows)
        wanted = rows[: max(0, end - first)]
        if len(wanted):
            yield first, np.ascontiguousarray(wanted)
    if expected != len(tokens):
        raise IntegrityError(f"logits end at token {expected}, needs {len(tokens)}")


Tiles = Iterator[tuple[int, NDArray[np.float32]]]


def pair_tiles(base: Tiles, other: Tiles) -> Iterator[tuple[int, NDArray[np.float32], NDArray[np.float32]]]:
    """Walk two runs over the same tokens in lock-step, yielding the rows that both have ready.

    A side is only advanced when all rows of its last tile have been handed out, so each holds one tile at most, and the
    two forward passes take turns instead of one running to its end first. Tiles may be cut differently.

    Raises  IntegrityError if one side ends before the other.
    """
    base_first, base_rows = next(base, (0, None))
    other_first, other_rows = next(other, (0, None))
    while base_rows is not None and other_rows is not None:
        if base_first != other_first:
            raise IntegrityError(f"lock-step sides are at tokens {base_first} and {other_first}")
        n = min(len(base_rows), len(other_rows))
        yield base_first, base_rows[:n], other_rows[:n]
        if n < len(base_rows):
            base_first, base_rows = base_first + n, base_rows[n:]
        else:
            base_first, base_rows = next(base, (0, None))
        if other_rows is not None and n < len(other_rows):
            other_first, other_rows = other_first + n, other_rows[n:]
        else:
            other_first, other_rows = next(other, (0, None))
    if base_rows is not None or other_rows is not None:
        raise IntegrityError("one side of a lock-step run has fewer rows than the other")
