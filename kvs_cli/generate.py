"""The loop from a prompt's tokens to generated text, and why it ended. Works on any session; prints nothing."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from enum import Enum
from time import perf_counter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvs_core.detokenizer import Detokenizer
from kvs_core.sampling import Sampler
from kvs_core.stop_text import StopMatcher


class StopReason(Enum):
    """Why generation ended; the values are those of the JSON document."""

    END_TOKEN = "end"
    LENGTH = "length"
    STOP_TEXT = "stop_text"
    CONTEXT_FULL = "context_full"


class TokenSource(Protocol):
    """What the loop needs of a session."""

    @property
    def n_past(self) -> int: ...

    @property
    def n_ctx(self) -> int: ...

    def prefill(self, tokens: Sequence[int]) -> NDArray[np.float32]: ...

    def decode(self, tokens: Sequence[int]) -> NDArray[np.float32]: ...


class Generation:
    """One answer: iterate ``pieces`` once, then read the other attributes.

    Prompt and generated tokens together never exceed ``n_ctx``: a prompt of ``n_ctx - 1`` tokens gets exactly one.
    The last generated token is not run through the model, since nothing follows it.
    """

    def __init__(
        self,
        session: TokenSource,
        sampler: Sampler,
        detokenizer: Detokenizer,
        *,
        stop_texts: Sequence[str] = (),
        end_ids: Collection[int] = (),
        n_predict: int = -1,
    ) -> None:
        self._session = session
        self._sampler = sampler
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stop_texts)
        self._end_ids = end_ids
        self._n_predict = n_predict
        self.token_ids: list[int] = []
        self.decoded_ids: list[int] = []  # those that the session has cached
        self.stop_reason: StopReason | None = None
        self.stop_text: str | None = None
        self.prompt_seconds = 0.0
        self.decode_seconds = 0.0
        self.text = ""  # all pieces so far

    def pieces(self, tokens: Sequence[int]) -> Generator[str, None, None]:
        """Run the prompt's tokens and yield text as it becomes certain; a piece may be empty."""
        started = perf_counter()
        logits = self._session.prefill(tokens)
        self._sampler.accept(tokens)
        self.prompt_seconds = perf_counter() - started
        started = perf_counter()
        try:
            while (reason := self._reason_to_stop()) is None:
                if self.token_ids:
                    logits = self._session.decode(self.token_ids[-1:])[0]
                    self.decoded_ids.append(self.token_ids[-1])
                yield self._keep(self._next_piece(logits))
            self.stop_reason = reason
        finally:
            self.decode_seconds = perf_counter() - started
        yield self.flush()

    def flush(self) -> str:
        """Text that was held back for a stop text or an incomplete character; nothing after a stop text."""
        if self.stop_reason is StopReason.STOP_TEXT:
            return ""
        return self._keep(self._stops.push(self._detokenizer.flush()).text + self._stops.flush())

    def _keep(self, piece: str) -> str:
        self.text += piece
        return piece

    def _reason_to_stop(self) -> StopReason | None:
        if self.stop_reason is not None:
            return self.stop_reason
        n_waiting = len(self.token_ids) - len(self.decoded_ids)
        if len(self.token_ids) == self._n_predict:
            return StopReason.LENGTH
        if self._session.n_past + n_waiting >= self._session.n_ctx:
            return StopReason.CONTEXT_FULL
        return None

    def _next_piece(self, logits: NDArray[np.float32]) -> str:
        token = self._sampler.sample(logits, pos=self._session.n_past - 1)
        if token in self._end_ids:
            self.stop_reason = StopReason.END_TOKEN
            return ""
        self._sampler.accept([token])
        self.token_ids.append(token)
        found = self._stops.push(self._detokenizer.push(token))
        if found.stop is not None:
            self.stop_reason = StopReason.STOP_TEXT
            self.stop_text = found.stop
        return found.text
