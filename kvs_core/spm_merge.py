"""SentencePiece-style merging driven by token scores, for vocabularies of the GGUF model ``llama``.

Splitting off special tokens and the space prefix happen before, in ``kvs_core.tokenizer``.

Why this is not a BPE model of the ``tokenizers`` library: such a model needs a merge list with one rank per pair,
which these files do not have. It can be derived from the scores, but not where scores are equal: then the *leftmost*
pair goes first, and a rank would put one token before another. Files converted without real scores consist of one such
group. Deriving the list also costs seconds at every start on a vocabulary of 262144 tokens. Figures: docs/tokenizer.md.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

# Words repeat, so their tokens are remembered: pieces up to this length, and this many of them.
_CACHED_CHARACTERS = 32
_CACHED_PIECES = 1 << 16


class SpmMerger:
    """Merges the characters of a text by score, exactly: highest score first, leftmost among equals.

    A text is first cut between neighbouring characters that no token holds side by side. No merge can cross such a
    place, so every piece is merged alone and equal pieces give equal tokens.
    """

    def __init__(
        self, ids: Mapping[str, int], scores: Sequence[float], byte_ids: Sequence[int | None], unknown_id: int
    ) -> None:
        """``byte_ids`` [256] maps a byte to its token; a byte without one becomes ``unknown_id``."""
        self._ids = ids
        self._scores = scores
        self._byte_ids = byte_ids
        self._unknown_id = unknown_id
        self._joined = _neighbours(ids)
        self._cache: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids of a text in which spaces are already written as U+2581."""
        tokens: list[int] = []
        begin = 0
        for end in self._cuts(text):
            tokens.extend(self._encode_piece(text[begin:end]))
            begin = end
        return tokens

    def _cuts(self, text: str) -> list[int]:
        if len(text) < 2:
            return [len(text)] if text else []
        pairs = _pair_codes(text)
        at = np.searchsorted(self._joined, pairs)
        at[at == len(self._joined)] = 0
        cuts: list[int] = (np.flatnonzero(self._joined[at] != pairs) + 1).tolist() if len(self._joined) else []
        if not len(self._joined):
            cuts = list(range(1, len(text)))
        cuts.append(len(text))
        return cuts

    def _encode_piece(self, piece: str) -> tuple[int, ...]:
        found = self._cache.get(piece)
        if found is not None:
            return found
        tokens: list[int] = []
        for symbol in self._merge(piece) if len(piece) > 1 else [piece]:
            token = self._ids.get(symbol)
            if token is None:
                tokens.extend(self._bytes_of(symbol))
            else:
                tokens.append(token)
        result = tuple(tokens)
        if len(piece) <= _CACHED_CHARACTERS:
            if len(self._cache) >= _CACHED_PIECES:
                self._cache.clear()
            self._cache[piece] = result
        return result

    def _merge(self, piece: str) -> list[str]:
        """The symbols left when no neighbouring pair is a token any more."""
        symbols = list(piece)
        after = [*range(1, len(symbols)), -1]
        before = list(range(-1, len(symbols) - 1))
        ids, scores = self._ids, self._scores
        queue: list[tuple[float, int, str]] = []

        def offer(left: int, right: int) -> None:
            if left < 0 or right < 0:
                return
            joined = symbols[left] + symbols[right]
            token = ids.get(joined)
            if token is not None:
                heapq.heappush(queue, (-scores[token], left, joined))

        for left in range(len(symbols) - 1):
            offer(left, left + 1)
        while queue:
            _, left, joined = heapq.heappop(queue)
            right = after[left]
            # An entry is stale once either half has been merged elsewhere; lengths tell, as symbols only ever grow.
            if not symbols[left] or right < 0 or len(symbols[left]) + len(symbols[right]) != len(joined):
                continue
            symbols[left] = joined
            symbols[right] = ""
            after[left] = after[right]
            if after[right] >= 0:
                before[after[right]] = left
            offer(before[left], left)
            offer(left, after[left])
        return [symbol for symbol in symbols if symbol]

    def _bytes_of(self, symbol: str) -> Iterator[int]:
        for byte in symbol.encode("utf-8"):
            token = self._byte_ids[byte]
            yield self._unknown_id if token is None else token


def _pair_codes(text: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """int64 [len(text) - 1]: one number per pair of neighbouring characters."""
    # "surrogatepass" because a token of a damaged file may hold a lone surrogate; it then simply never matches a text.
    code_points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.int64)
    return (code_points[:-1] << 21) | code_points[1:]


def _neighbours(ids: Mapping[str, int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Sorted codes of all pairs of characters that stand side by side inside some token.

    All tokens are joined into one string; the pairs across a seam are left out again.
    """
    texts = [text for text in ids if len(text) > 1]
    if not texts:
        return np.zeros(0, np.int64)
    seams = np.cumsum([len(text) for text in texts])[:-1] - 1
    return np.unique(np.delete(_pair_codes("".join(texts)), seams))
