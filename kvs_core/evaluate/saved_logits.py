"""What every file of saved logits offers, whatever its format: the two protocols and the checks against a run.

The formats themselves are ``logits_file`` (llama.cpp's) and ``compact_file`` (ours).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvs_core.errors import ConfigError, Problem
from kvs_core.evaluate.choices import LogitsFormat
from kvs_core.evaluate.row_math import RowWorkers


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsIdentity:
    """Who made a file, and how its cache was kept; in our own format only.

    model, tokenizer   hashes
    type_k, type_v     names of cache types
    layer_types        types of single layers as a SPEC, see ``kv_layer_types``; "" is none
    kv_rotate          whether quantised rows were rotated; None if there were none but turbo rows, which always are,
                       and in files from before this was kept
    """

    model: str
    tokenizer: str
    type_k: str
    type_v: str
    layer_types: str = ""
    kv_rotate: bool | None = None

    def describe_cache(self) -> str:
        """The cache in a few words."""
        words = [f"{self.type_k} keys", f"{self.type_v} values"]
        if self.layer_types:
            words.append(f"layers {self.layer_types}")
        if self.kv_rotate is not None:
            words.append("quantised rows rotated" if self.kv_rotate else "quantised rows not rotated")
        return ", ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRows:
    """Rows read back: what the file says about each, without any model.

    log_probs  float64 [n, n_vocab]
    nll        float64 [n]   -ln p of the row's target
    top        int32 [n]     most probable token
    clamped    uint8 [n]     1 where ``nll`` sits on the format's floor
    hashes     uint64 [n]    of the exact float32 logits; None when the format has none
    """

    log_probs: NDArray[np.float64]
    nll: NDArray[np.float64]
    top: NDArray[np.int32]
    clamped: NDArray[np.uint8]
    hashes: NDArray[np.uint64] | None


class StoredChunk(Protocol):
    """The rows of one chunk, read in order."""

    @property
    def kld_floor(self) -> float:
        """Largest error, in nats, that the format alone may put on the KL divergence of a row read so far."""
        ...

    def take(self, targets: NDArray[np.int32], workers: RowWorkers) -> StoredRows:
        """The next ``len(targets)`` rows."""
        ...

    def compare(
        self,
        logits: NDArray[np.float32],
        targets: NDArray[np.int32],
        out: NDArray[Any],
        finite: NDArray[np.uint8],
        workers: RowWorkers,
    ) -> None:
        """Compare the next ``len(logits)`` rows with measured logits; fills ``out`` (KLD_ROW) and ``finite``."""
        ...


class SavedLogits(Protocol):
    """An opened file whose length and header have been checked. Use as a context manager."""

    path: Path
    format: LogitsFormat
    n_ctx: int
    n_vocab: int
    n_chunk: int
    tokens: NDArray[np.int32]
    identity: LogitsIdentity | None
    """Who made the file; None in a format that does not say."""
    log_prob_floor: float

    @property
    def has_exact_targets(self) -> bool:
        """Whether the target's log-probability was kept exactly, so that PPL(base) is the base run's own."""
        ...

    def open_chunk(self, chunk_idx: int) -> StoredChunk: ...

    def close(self) -> None: ...

    def __enter__(self) -> SavedLogits: ...

    def __exit__(self, *_: object) -> None: ...


class LogitsWriter(Protocol):
    """A file of saved logits being made, chunk after chunk, under a temporary name."""

    path: Path

    @property
    def n_complete_chunks(self) -> int:
        """Whole chunks that an earlier, interrupted run of the same command left in the temporary file."""
        ...

    def begin_at(self, chunk_idx: int) -> None:
        """Drop what lies behind chunk ``chunk_idx - 1`` and continue there."""
        ...

    def write_rows(
        self, logits: NDArray[np.float32], targets: NDArray[np.int32], workers: RowWorkers
    ) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
        """Append rows of the current chunk; returns ``(nll, finite)``. Rows after a non-finite one must not follow."""
        ...

    def finish_chunk(self) -> None:
        """The chunk is complete: make it durable."""
        ...

    def publish(self) -> None:
        """All chunks are there: give the file its final name."""
        ...

    def close(self) -> None: ...


def check_base(
    saved: SavedLogits,
    *,
    n_vocab: int,
    tokenizer: str | None,
    n_ctx: int | None = None,
    tokens: NDArray[np.int32] | None = None,
) -> None:
    """Refuse a base file that belongs to another vocabulary, context or text than the run; None is not compared.

    Raises  ConfigError listing every field that disagrees, with both values.
    """
    problems = []
    if saved.n_vocab != n_vocab:
        problems.append(_mismatch("vocabulary", f"{saved.n_vocab} tokens", f"the model has {n_vocab}"))
    elif tokenizer is not None and saved.identity is not None and saved.identity.tokenizer != tokenizer:
        problems.append(_mismatch("tokenizer", saved.identity.tokenizer, f"the model has {tokenizer}"))
    if n_ctx is not None and saved.n_ctx != n_ctx:
        problems.append(_mismatch("context", str(saved.n_ctx), f"-c asks for {n_ctx}"))
    elif tokens is not None:
        shared = min(len(tokens), len(saved.tokens))
        different = np.flatnonzero(tokens[:shared] != saved.tokens[:shared])
        if len(different):
            at = int(different[0])
            problems.append(_mismatch("tokens", f"{saved.tokens[at]} at {at}", f"the text has {tokens[at]} there"))
        elif shared < len(saved.tokens):
            problems.append(_mismatch("tokens", f"{len(saved.tokens)} tokens", f"the text has {len(tokens)}"))
    if problems:
        raise ConfigError(problems, hint=f"{saved.path} was made from another model, text or context: make it again")


def check_pair(base: SavedLogits, other: SavedLogits) -> None:
    """Refuse two files that do not describe the same rows. Chunk counts may differ.

    Raises  ConfigError listing every field that disagrees, with both values.
    """
    problems = []
    if base.n_vocab != other.n_vocab:
        problems.append(_mismatch("vocabulary", f"{base.n_vocab} tokens", f"{other.path} has {other.n_vocab}"))
    elif base.identity and other.identity and base.identity.tokenizer != other.identity.tokenizer:
        problems.append(_mismatch("tokenizer", base.identity.tokenizer, f"{other.path} has {other.identity.tokenizer}"))
    if base.n_ctx != other.n_ctx:
        problems.append(_mismatch("context", str(base.n_ctx), f"{other.path} has {other.n_ctx}"))
    else:
        shared = min(len(base.tokens), len(other.tokens))
        different = np.flatnonzero(base.tokens[:shared] != other.tokens[:shared])
        if len(different):
            at = int(different[0])
            problems.append(
                _mismatch("tokens", f"{base.tokens[at]} at {at}", f"{other.path} has {other.tokens[at]} there")
            )
    if problems:
        raise ConfigError(problems, hint="compare files made from the same text with the same context")


def _mismatch(field: str, value: str, reason: str) -> Problem:
    return Problem(field=f"base file {field}", value=value, reason=reason)
