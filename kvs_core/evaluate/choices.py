"""What a user chooses about an evaluation, as values; importing this loads no numerical library."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class LogitsFormat(Enum):
    """``--kld-format``; values are what the user types."""

    LLAMA = "llama"
    KVS = "kvs"


@dataclass(frozen=True, slots=True, kw_only=True)
class KldThresholds:
    """Limits that a pipeline gates on; None is no limit. ``min_same_top`` is a share, 0 to 1."""

    max_kld: float | None = None
    max_mean_kld: float | None = None
    min_same_top: float | None = None

    @property
    def is_empty(self) -> bool:
        return self == KldThresholds()
