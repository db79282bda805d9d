"""Architecture ``mistral3``: Ministral 3 and later Mistral models with grouped-query attention.

``llama``, with queries that grow with the logarithm of the position where the file asks for it, and YaRN as trained.
Every layer caches full K and V.
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
        if shape.temperature_scale:
            ops.rope(q, layer.n_head)
            ops.rope(k, layer.n_head_kv)
            ops.scale_by_log_position(q, shape.temperature_scale, shape.rope.n_ctx_orig)
        attend_heads(ops, attend, layer, q, k, v, x, normed, rotates=not shape.temperature_scale)

        ops.rms_norm(x, block + "ffn_norm", normed)
        feed_forward_or_experts(ops, layer, shape.n_embd, normed, x)
