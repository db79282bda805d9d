"""What a rule about a configuration is; ``validate`` has the table of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from kvs_core.config import RunConfig
from kvs_core.model_shape import ModelShape

Finding = Callable[[RunConfig, ModelShape | None], str | None]
"""What a rule says about a configuration, or None when it has nothing to say."""


class Severity(Enum):
    """REFUSE stops the run; WARN lets it go on after one line on standard error."""

    REFUSE = "refuse"
    WARN = "warn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One condition on a configuration; ``field`` is the dotted name of the value to change."""

    name: str
    field: str
    find: Finding
    hint: str | None = None
    severity: Severity = Severity.REFUSE
