"""Architecture ``qwen3next``: Qwen 3 Next, such as 80B-A3B.

As ``qwen35moe``, with both gates of a recurrent layer in one matrix, and value heads that share a key head side by
side. Recurrent layers remember the last inputs of the convolution and one matrix a value head; the others cache full
K and V.
"""

from __future__ import annotations

from kvs_core.model_shape import ModelShape
from kvs_core.models.blocks import Attend, add_experts_and_shared, logits, matmul_inputs
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
            run_delta_net(ops, layer, layer.recurrent, normed, x, joint_gates=True)

        ops.rms_norm(x, block + "post_attention_norm", normed)
        if layer.experts is not None:
            add_experts_and_shared(ops, layer, layer.experts, shape.n_embd, normed, x)
