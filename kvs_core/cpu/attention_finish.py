"""Compiled end of attention: outputs are divided by their sums."""

# mypy: ignore-errors
# Compiled bodies work on values that Python's type system cannot describe.

from __future__ import annotations

import numpy as np

from kvs_core.cpu.attention_steps import ZERO
from kvs_core.cpu.kernel_cache import cached_njit
from kvs_core.cpu.simd import load_f32x16, splat_f32x16, store_f32x16
from kvs_core.cpu.vector_types import N_LANES


@cached_njit(error_model="numpy")
def finish_attention_kernel(acc, row_sum, out):
    """``out = acc / row_sum``, 0 where no key was seen; shapes as in ``attention.AttentionState``."""
    n_tokens, n_head, head_dim_v = acc.shape
    for token in range(n_tokens):
        for head in range(n_head):
            total = row_sum[token, head]
            inverse = np.float32(1.0) / total if total != ZERO else ZERO
            at = (token * n_head + head) * head_dim_v
            for idx in range(0, head_dim_v, N_LANES):
                store_f32x16(out, at + idx, load_f32x16(acc, at + idx) * splat_f32x16(inverse))
