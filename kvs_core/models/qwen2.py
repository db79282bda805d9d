"""Architecture ``qwen2``: Qwen 2 and 2.5 (dense).

Pre-norm blocks as in ``llama``; queries, keys and values have a bias, RoPE turns the pairs (i, i + n_rot / 2).
Every layer caches full K and V.
"""

from __future__ import annotations

from kvs_core.model_shape import ModelShape
from kvs_core.models.blocks import (
    Attend,
    attend_heads,
    feed_forward,
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
        ops.rope(q, layer.n_head)
        ops.rope(k, layer.n_head_kv)
        attend_heads(ops, attend, layer, q, k, v, normed)
        ops.add(x, normed)

        ops.rms_norm(x, block + "ffn_norm", normed)
        feed_forward(ops, layer, normed, normed)
        ops.add(x, normed)
