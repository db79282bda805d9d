"""Weight types that the CPU kernels read as they are. Names only: the planner imports this file."""

from __future__ import annotations

FAST_WEIGHT_TYPES = frozenset({"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"})
"""As the gguf package spells them; any other type is expanded to F16 when it is loaded."""
