"""The two phases of a run. Always passed, never guessed from the number of tokens."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """PREFILL reads a prompt in micro-batches; DECODE generates (and later verifies) a few tokens a step."""

    PREFILL = "prefill"
    DECODE = "decode"
