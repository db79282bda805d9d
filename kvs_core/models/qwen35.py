"""Architectures ``qwen35`` and ``qwen35moe``: Qwen 3.5, dense and with experts, such as 35B-A3B, text only.

Pre-norm blocks. In most layers a gated delta net behind a short convolution takes the place of attention; such a layer
remembers the last inputs of the convolution and one matrix a value head, whatever the context. The others, each fourth
unless the file says otherwise, attend with normalised heads, RoPE on the leading pairs (i, i + n_rot / 2) of each head
and a gate on the output; they cache full K and V, K after norm and rotation. Then comes a feed-forward, in
``qwen35moe`` experts and one that all tokens share, the latter times a gate of its own.
"""

from __future__ import annotations

from kvs_core.model_shape import ModelShape
from kvs_core.models.blocks import Attend, add_experts_and_shared, feed_forward, logits, matmul_inputs
from kvs_core.models.hybrid_blocks import attend_gated, plan_workspace, run_delta_net
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
        if layer.recurrent is None:
            attend_gated(ops, attend, layer, normed, x)
        else:
            run_delta_net(ops, layer, layer.recurrent, normed, x)

        ops.rms_norm(x, block + "post_attention_norm", normed)
        if layer.experts is None:
            feed_forward(ops, layer, normed, x)
        else:
            add_experts_and_shared(ops, layer, layer.experts, shape.n_embd, normed, x)
