"""Running a tiny model under different arenas and comparing what comes out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvs_core.backend import open_backend
from kvs_core.config import RunConfig
from kvs_core.kv_cache import StreamCounters
from kvs_core.model_file import open_model
from kvs_core.model_reader import read_model_shape
from kvs_core.plan import RunPlan, plan_run, with_arena
from kvs_core.session import Session
from kvs_core.units import MIB

ROOMY_BYTES = 64 << 30


@dataclass(frozen=True)
class Outcome:
    """Logits of the whole run, bit for bit, and what the session counted."""

    logits: NDArray[np.float32]
    counters: StreamCounters
    plan: RunPlan


def plan_for(path: Path, config: RunConfig, arena_mib: int = 0) -> RunPlan:
    """A plan on this machine's CPU, with more free memory than any test needs."""
    config = with_arena(replace(config, model_path=path), arena_mib * MIB)
    backend = open_backend("cpu", n_threads=config.n_threads)
    with open_model(path) as model_file:
        budget = replace(backend.budget(), free_bytes=ROOMY_BYTES, host_free_bytes=ROOMY_BYTES)
        return plan_run(config, read_model_shape(model_file), budget)


@contextmanager
def open_session(plan: RunPlan) -> Iterator[Session]:
    backend = open_backend("cpu", n_threads=plan.config.n_threads)
    with open_model(plan.config.model_path) as model_file:
        backend.load_weights(model_file)
        with Session(plan, backend) as session:
            yield session
        backend.close()


def run_tokens(session: Session, prompt: Sequence[int], forced: Sequence[int]) -> NDArray[np.float32]:
    """Logits of the last eight prompt positions and of every forced decode token."""
    rows = [rows.copy() for _, rows in session.prefill_rows(prompt, output_begin=max(0, len(prompt) - 8))]
    rows += [session.decode([token]) for token in forced]
    return np.concatenate(rows)


def run(plan: RunPlan, prompt: Sequence[int], forced: Sequence[int]) -> Outcome:
    with open_session(plan) as session:
        return Outcome(run_tokens(session, prompt, forced), session.counters, plan)


def random_tokens(n: int, n_vocab: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, n_vocab, n)]
