"""Architectures ``qwen3`` and ``qwen3moe``: Qwen 3, dense and with experts, such as 30B-A3B and 235B-A22B.

Pre-norm blocks as in ``llama``; every query and key head is normalised before RoPE, which turns the pairs
(i, i + n_rot / 2). In ``qwen3moe`` every layer has experts instead of a feed-forward. Every layer caches full K and V,
K after norm and rotation.
"""

from __future__ import annotations

from kvs_core.model_shape import ModelShape
from kvs_core.models.blocks import (
    Attend,
    attend_heads,
    feed_forward_or_experts,
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
        ops.norm_heads(q, block + "attn_q_norm", layer.n_head)
        ops.norm_heads(k, block + "attn_k_norm", layer.n_head_kv)
        attend_heads(ops, attend, layer, q, k, v, x, normed)

        ops.rms_norm(x, block + "ffn_norm", normed)
        feed_forward_or_experts(ops, layer, shape.n_embd, normed, x)
