"""A LogitsSource that plays back rows of logits made elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray


class ReplaySource:
    """``chunks`` float32 [n_chunk, rows_per_chunk, n_vocab]: the scored rows of each chunk, in order.

    The row of the last token, which nothing scores, is zeros.
    """

    streaming_counters = None

    def __init__(self, chunks: NDArray[np.float32], *, tile_rows: int = 8) -> None:
        self._chunks = chunks
        self._next = -1
        self._tile_rows = tile_rows
        self.n_vocab = chunks.shape[2]
        self.n_ctx = 1 << 20

    def clear(self) -> None:
        self._next += 1

    def prefill_rows(self, tokens: Sequence[int], *, output_begin: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
        rows = np.concatenate([self._chunks[self._next], np.zeros((1, self.n_vocab), np.float32)])
        for begin in range(0, len(rows), self._tile_rows):
            yield output_begin + begin, rows[begin : begin + self._tile_rows]
