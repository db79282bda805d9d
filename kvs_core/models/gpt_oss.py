"""Architecture ``gpt-oss``: gpt-oss 20B and 120B.

Pre-norm blocks with biases everywhere, RoPE on the pairs (i, i + n_rot / 2) with YaRN, and a learned score for each
head (a sink) that takes part in every softmax without bringing a value. The feed-forward is a mixture of experts with
a clamped gate. Every second layer, from the first on, attends to a sliding window only: it caches the window, the
others cache full K and V.
"""

from __future__ import annotations

from math import sqrt

from kvs_core.activation_rule import GatedActivation
from kvs_core.model_shape import ModelShape
from kvs_core.models.blocks import Attend, logits, matmul_inputs, mix_experts, plan_workspace, project_heads
from kvs_core.operations import Operations

__all__ = ["forward", "logits", "matmul_inputs", "plan_workspace"]


def forward(shape: ModelShape, ops: Operations, attend: Attend) -> None:
    """Run every layer for the tokens of the step; the last hidden states are left in ``residual``."""
    x = ops.buffer("residual", shape.n_embd)
    normed = ops.buffer("normed", shape.n_embd)

    ops.embed("token_embd", x)
    for layer in shape.layers:
        block = f"blk.{layer.layer_idx}."
        attended = ops.buffer("attended", layer.n_head * layer.head_dim_v)
        ops.rms_norm(x, block + "attn_norm", normed)
        q, k, v = project_heads(ops, layer, normed)
        attend(
            layer.layer_idx,
            q,
            k,
            v,
            attended,
            scale=1.0 / sqrt(layer.head_dim_k),
            rotates=True,
            sinks=block + "attn_sinks",
        )
        ops.matmul_add(block + "attn_output", attended, x, normed)

        # The softmax over the logits of the chosen experts is the one over all, divided by its sum over the chosen.
        ops.rms_norm(x, block + "post_attention_norm", normed)
        if layer.experts is not None:
            clamped = GatedActivation.CLAMPED_SWIGLU
            mix_experts(ops, layer, layer.experts, shape.n_embd, normed, normed, activation=clamped)
        ops.add(x, normed)
