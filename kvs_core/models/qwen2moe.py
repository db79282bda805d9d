"""Architecture ``qwen2moe``: Qwen 1.5 and 2 with experts, such as A2.7B and 57B-A14B.

The attention of ``qwen2``; after it every layer adds its experts and one that all tokens share, the latter times
a gate of its own. Every layer caches full K and V.
"""

from __future__ import annotations

from kvs_core.model_shape import ModelShape
from kvs_core.models.blocks import (
    Attend,
    add_experts_and_shared,
    attend_heads,
    logits,
    matmul_inputs,
    plan_workspace,
    project_heads,
)
from kvs_core.operations import Operations

__all__ = ["forward", "logits", "matmul_inputs", "plan_workspace"]


def forward(shape: ModelShape, ops: Operations, attend: Attend) -> None:
    """Run every layer for the tokens of the step; the last hidden states are left in ``residual``."""
    x = ops.buffer("residual", shape.n_embd)
    normed = ops.buffer("normed", shape.n_embd)

    ops.embed("token_embd", x)
    for layer in shape.layers:
        block = f"blk.{layer.layer_idx}."
        ops.rms_norm(x, block + "attn_norm", normed)
        q, k, v = project_heads(ops, layer, normed)
        attend_heads(ops, attend, layer, q, k, v, x, normed)

        ops.rms_norm(x, block + "ffn_norm", normed)
        if layer.experts is not None:
            add_experts_and_shared(ops, layer, layer.experts, shape.n_embd, normed, x)
