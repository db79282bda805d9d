"""Architecture ``llama``: Llama 2 and 3, Mistral, Mixtral, TinyLlama, SmolLM2 and their kin.

Pre-norm blocks, ``x += Attention(rms(x))`` and ``x += FFN(rms(x))``, RoPE on neighbouring pairs, grouped-query
attention, SiLU-gated feed-forward or experts of that kind (Mixtral), optional biases, output tied to the embedding when
the file has no ``output.weight``. Every layer caches full K and V.
"""

from __future__ import annotations

from math import sqrt

from kvs_core.model_shape import ModelShape
from kvs_core.models.blocks import (
    Attend,
    logits,
    matmul_inputs,
    mix_experts,
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
        attended = ops.buffer("attended", layer.n_head * layer.head_dim_v)
        attend(layer.layer_idx, q, k, v, attended, scale=1.0 / sqrt(layer.head_dim_k), rotates=True)
        ops.matmul_add(block + "attn_output", attended, x, normed)

        ops.rms_norm(x, block + "ffn_norm", normed)
        if layer.experts is None:
            gate, up = ops.buffer("gate", layer.n_ff), ops.buffer("up", layer.n_ff)
            ops.gated_matmul((block + "ffn_gate", block + "ffn_up"), normed, gate, up)
            ops.matmul_add(block + "ffn_down", gate, x, normed)
        else:
            mix_experts(ops, layer, layer.experts, shape.n_embd, normed, normed)
            ops.add(x, normed)
