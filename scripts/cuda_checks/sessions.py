"""What the checks of whole sessions share: logits of a prompt and of forced tokens, and plans on a backend."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvs_core.backend import Backend
from kvs_core.config import RunConfig
from kvs_core.model_file import open_model
from kvs_core.model_reader import read_model_shape
from kvs_core.plan import RunPlan, plan_run, with_arena
from kvs_core.session import Session

PROMPT_ROWS = 8
"""Last prompt positions whose logits are compared."""


def rows_of(session: Session, prompt: Sequence[int], forced: Sequence[int], step: int = 1) -> np.ndarray:
    """Logits of the last ``PROMPT_ROWS`` prompt positions and of every forced token, ``step`` tokens at a time."""
    rows = [rows.copy() for _, rows in session.prefill_rows(prompt, output_begin=len(prompt) - PROMPT_ROWS)]
    rows += [session.decode(forced[i : i + step]) for i in range(0, len(forced), step)]
    return np.concatenate(rows)


def plan_on(backend: Backend, config: RunConfig, arena_bytes: int = 0) -> RunPlan:
    with open_model(config.model_path) as model_file:
        return plan_run(with_arena(config, arena_bytes), read_model_shape(model_file), backend.budget())


def verdict(passed: bool) -> str:
    """The first word of a line, in four columns."""
    return "ok  " if passed else "FAIL"
