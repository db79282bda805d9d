"""Weight types that the CPU kernels read as they are. Names only: the planner imports this file."""

from __future__ import annotations

# fmt: off
FAST_WEIGHT_TYPES = frozenset({
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ4_NL", "IQ4_XS", "MXFP4",
})
# fmt: on
"""As the gguf package spells them; any other type is expanded to F16 when it is loaded."""
