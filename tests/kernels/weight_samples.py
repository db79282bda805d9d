"""Random weights of every type, as the bytes a file would hold."""

from __future__ import annotations

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

# Where a block keeps its half-precision scales; all other bytes may take any value.
HALF_OFFSETS = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_S": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "MXFP4": (),
}


def random_weight_bytes(
    rng: np.random.Generator, weight_type: GGMLQuantizationType, n_out: int, n_in: int
) -> NDArray[np.uint8]:
    """Bytes of a matrix whose quants take all values and whose weights are of order 1, some scales subnormal."""
    name = weight_type.name
    if name in ("F32", "F16", "BF16"):
        values = rng.standard_normal((n_out, n_in)).astype(np.float32)
        if name == "F16":
            return values.astype(np.float16).view(np.uint8)
        halves = values.view(np.uint16)[:, 1::2].copy()
        return values.view(np.uint8) if name == "F32" else halves.view(np.uint8)

    block_weights, block_bytes = GGML_QUANT_SIZES[weight_type]
    blocks = rng.integers(0, 256, (n_out, n_in // block_weights, block_bytes), dtype=np.uint8)
    for offset in HALF_OFFSETS[name]:
        scales = rng.uniform(-0.03, 0.03, (*blocks.shape[:2], 1)).astype(np.float16)
        scales[rng.random(scales.shape) < 0.05] = np.float16(3e-7)
        blocks[:, :, offset : offset + 2] = scales.view(np.uint8)
    if name == "MXFP4":  # a byte of exponent; 0 and 1 make subnormal weights, 127 is 1
        blocks[:, :, 0] = rng.choice(np.array([0, 1, 2, 100, *range(120, 128)], dtype=np.uint8), blocks.shape[:2])
    return blocks.reshape(n_out, -1)
