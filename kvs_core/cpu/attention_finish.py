"""Compiled end of attention: outputs are divided by their sums, into which a sink may go."""

# mypy: ignore-errors
# Compiled bodies work on values that Python's type system cannot describe.

from __future__ import annotations

import math

import numpy as np

from kvs_core.cpu.attention_steps import ZERO
from kvs_core.cpu.kernel_cache import cached_njit
from kvs_core.cpu.simd import load_f32x16, splat_f32x16, store_f32x16
from kvs_core.cpu.vector_types import N_LANES


@cached_njit(error_model="numpy")
def finish_attention_kernel(acc, row_max, row_sum, sinks, out):
    """``out = acc / row_sum``, 0 where no key was seen; shapes as in ``attention.AttentionState``.

    sinks   float32 [n_head], a score that every row of a head sees and that brings no value; or [0] for none
    """
    n_tokens, n_head, head_dim_v = acc.shape
    for token in range(n_tokens):
        for head in range(n_head):
            total = row_sum[token, head]
            factor = np.float32(1.0)
            if sinks.size > 0:
                largest = max(row_max[token, head], sinks[head])
                factor = np.float32(math.exp(np.float64(row_max[token, head]) - largest))
                total = total * factor + np.float32(math.exp(np.float64(sinks[head]) - largest))
            inverse = factor / total if total != ZERO else ZERO
            at = (token * n_head + head) * head_dim_v
            for idx in range(0, head_dim_v, N_LANES):
                store_f32x16(out, at + idx, load_f32x16(acc, at + idx) * splat_f32x16(inverse))
