"""Architectures ``llama`` (Llama 2 and 3, Mistral, Mixtral, TinyLlama, SmolLM2 and their kin) and ``qwen2`` (also 2.5).

Pre-norm blocks, ``x += Attention(rms(x))`` and ``x += FFN(rms(x))``, RoPE, of ``llama`` on neighbouring pairs and of
``qwen2`` on the pairs (i, i + n_rot / 2), grouped-query attention, SiLU-gated feed-forward or experts of that kind
(Mixtral), biases where the file has them, output tied to the embedding when it has no ``output.weight``. Every layer
caches full K and V.
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
        attend_heads(ops, attend, layer, q, k, v, x, normed)

        ops.rms_norm(x, block + "ffn_norm", normed)
        feed_forward_or_experts(ops, layer, shape.n_embd, normed, x)
