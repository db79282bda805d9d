"""What stands between the two matrix products of a gated feed-forward; names only, each backend has the arithmetic."""

from __future__ import annotations

from enum import Enum


class GatedActivation(Enum):
    """Function of gate and up; CLAMPED_SWIGLU: ``g sigmoid(1.702 g) (u + 1)``, g the gate up to 7, u within 7."""

    SILU = "silu"
    GELU = "gelu_tanh"
    CLAMPED_SWIGLU = "clamped_swiglu"
