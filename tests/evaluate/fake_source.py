"""A tiny causal language model in numpy that implements LogitsSource, and texts for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

N_VOCAB = 321  # odd, so that llama.cpp's padding entry is in play


@dataclass
class FakeCounters:
    pages_resident: int = 0
    pages_streamed: int = 0
    bytes_streamed: int = 0
    predicted_bytes_streamed: int = 0


class FakeSource:
    """Hidden state h = 0.8 h + embedding(token); logits = W h. Rows do not depend on how tokens are cut into tiles."""

    def __init__(
        self,
        *,
        n_vocab: int = N_VOCAB,
        n_ctx: int = 1 << 20,
        seed: int = 7,
        sharpness: float = 3.0,
        noise: float = 0.0,
        tile_rows: int = 8,
        bytes_per_token: int | None = None,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.n_vocab = n_vocab
        self.n_ctx = n_ctx
        self._embedding = rng.standard_normal((n_vocab, 16)).astype(np.float32)
        self._output = (rng.standard_normal((16, n_vocab)) * sharpness / 4).astype(np.float32)
        self._output += (np.random.default_rng(seed + 1).standard_normal((16, n_vocab)) * noise).astype(np.float32)
        self._hidden = np.zeros(16, np.float32)
        self._tile_rows = tile_rows
        self._bytes_per_token = bytes_per_token
        self._counters = FakeCounters()
        self.n_clears = 0
        self.n_tokens_seen = 0
        self.inputs: list[list[int]] = []
        self.poison_token: int | None = None  # every row after this token is NaN until clear
        self.stop_after_tiles: int | None = None  # raise KeyboardInterrupt then
        self._is_poisoned = False

    @property
    def streaming_counters(self) -> FakeCounters | None:
        return None if self._bytes_per_token is None else self._counters

    def clear(self) -> None:
        self._hidden = np.zeros(16, np.float32)
        self._is_poisoned = False
        self.n_clears += 1

    def prefill_rows(self, tokens: Sequence[int], *, output_begin: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
        self.inputs.append(list(tokens))
        tile: list[NDArray[np.float32]] = []
        first = output_begin
        for idx, token in enumerate(tokens):
            self._hidden = np.float32(0.8) * self._hidden + self._embedding[token]
            self.n_tokens_seen += 1
            self._is_poisoned |= token == self.poison_token
            if self._bytes_per_token is not None:
                self._counters.pages_resident = 3
                self._counters.pages_streamed += 1 if self._bytes_per_token else 0
                self._counters.bytes_streamed += self._bytes_per_token
                self._counters.predicted_bytes_streamed += self._bytes_per_token
            if idx >= output_begin:
                row = self._hidden @ self._output
                tile.append(np.full_like(row, np.nan) if self._is_poisoned else row)
                if len(tile) == self._tile_rows or idx == len(tokens) - 1:
                    if self.stop_after_tiles is not None:
                        if self.stop_after_tiles == 0:
                            raise KeyboardInterrupt
                        self.stop_after_tiles -= 1
                    yield first, np.stack(tile)
                    first, tile = idx + 1, []


def make_text(n_tokens: int, *, n_vocab: int = N_VOCAB, seed: int = 3) -> NDArray[np.int32]:
    """Random tokens; token 0 is left out so that a test can use it as BOS or as a rare token."""
    return np.random.default_rng(seed).integers(1, n_vocab, n_tokens).astype(np.int32)


def reference_log_probs(source: FakeSource, tokens: NDArray[np.int32], *, begin: int) -> NDArray[np.float64]:
    """float64 [len(tokens) - begin, n_vocab] by the plain formula."""
    source.clear()
    rows = [rows for _, rows in source.prefill_rows(tokens.tolist(), output_begin=begin)]
    logits = np.concatenate(rows).astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
