"""What a device has to offer a plan: a value that is measured or assumed beforehand. Nothing is measured here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class DeviceKind(Enum):
    """Which backend a plan is for."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBudget:
    """What a device has to offer, measured or assumed beforehand; all sizes in bytes."""

    kind: DeviceKind
    name: str
    total_bytes: int
    free_bytes: int
    host_free_bytes: int
    n_threads: int = 1
    compute_capability: tuple[int, int] | None = None
    """Of a CUDA device; None where it is not known."""

    @property
    def shares_host_memory(self) -> bool:
        """Weights, arena and host store all come out of the same memory."""
        return self.kind is DeviceKind.CPU
