"""Logits of a whole run in prompt and single tokens, and how far they are from others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvs_core.config import RunConfig
from tests.session.harness import open_session, plan_for


def all_logits(config: RunConfig, tokens: Sequence[int], n_prompt: int) -> NDArray[np.float32]:
    """The first ``n_prompt`` tokens in micro-batches, the rest one by one; float32 [n_tokens, n_vocab]."""
    with open_session(plan_for(Path(config.model_path), config)) as session:
        rows = [rows.copy() for _, rows in session.prefill_rows(tokens[:n_prompt], output_begin=0)]
        rows += [session.decode([token]) for token in tokens[n_prompt:]]
    return np.concatenate(rows)


def assert_near(seen: NDArray[np.float32], wanted: NDArray[np.floating], tolerance: float) -> None:
    error = np.abs(seen - wanted)
    worst = np.unravel_index(error.argmax(), error.shape)
    assert error.max() < tolerance, f"{int((error >= tolerance).sum())} differ, {worst}: {seen[worst]} {wanted[worst]}"


def kl_divergence(base: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float64]:
    """KL(base || other) of each row."""
    p, q = (_log_softmax(rows.astype(np.float64)) for rows in (base, other))
    return np.asarray((np.exp(p) * (p - q)).sum(axis=1))


def together_and_singly(
    config: RunConfig, prompt: Sequence[int], tokens: Sequence[int]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Logits of ``tokens`` after ``prompt`` as one decode step, and as that many steps of one."""
    with open_session(plan_for(Path(config.model_path), config)) as session:
        session.prefill(prompt)
        singly = np.concatenate([session.decode([token]) for token in tokens])
        session.clear()
        session.prefill(prompt)
        return session.decode(tokens), singly


def _log_softmax(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = rows - rows.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
