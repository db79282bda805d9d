"""Architecture ``laguna``: Poolside's Laguna XS, S and M.

Pre-norm blocks; every query and key head is normalised before RoPE, which turns a part of a head, under YaRN without a
window and plainly within one. What attention gives is multiplied by the softplus of a gate, one for each head or
each element, before its output matrix. Leading dense layers, then experts chosen by sigmoid and a bias, with a shared
one. Layers with a window cache the window, the others full K and V.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from kvs_core.model_shape import ModelShape
from kvs_core.models import blocks
from kvs_core.models.blocks import Attend, feed_forward, logits, matmul_inputs, mix_with_shared_expert, project_heads
from kvs_core.operations import Operations
from kvs_core.workspace import ArraySpec, Workspace

__all__ = ["forward", "logits", "matmul_inputs", "plan_workspace"]


def plan_workspace(
    shape: ModelShape, n_tokens: int, n_outputs: int, scratch_bytes: int, attention_arrays: Sequence[ArraySpec]
) -> Workspace:
    """Arrays of a step of up to ``n_tokens`` tokens and ``n_outputs`` rows of logits at a time."""
    widest = max(layer.n_head * layer.head_dim_v for layer in shape.layers)
    gate = [ArraySpec(name="attended_gate", shape=(n_tokens, widest))]
    return blocks.plan_workspace(shape, n_tokens, n_outputs, scratch_bytes, attention_arrays, more_attention=gate)


def forward(shape: ModelShape, ops: Operations, attend: Attend) -> None:
    """Run every layer for the tokens of the step; the last hidden states are left in ``residual``."""
    x = ops.buffer("residual", shape.n_embd)
    normed = ops.buffer("normed", shape.n_embd)

    ops.embed("token_embd", x)
    for layer in shape.layers:
        block = f"blk.{layer.layer_idx}."
        attended = ops.buffer("attended", layer.n_head * layer.head_dim_v)
        gate = ops.buffer("attended_gate", ops.weight_rows(block + "attn_gate"))
        ops.rms_norm(x, block + "attn_norm", normed)
        q, k, v = project_heads(ops, layer, normed)
        ops.matmul((block + "attn_gate",), normed, (gate,))
        ops.norm_heads(q, block + "attn_q_norm", layer.n_head)
        ops.norm_heads(k, block + "attn_k_norm", layer.n_head_kv)
        attend(layer.layer_idx, q, k, v, attended, scale=1.0 / sqrt(layer.head_dim_k), rotates=True)
        ops.softplus_gate(gate, attended)
        ops.matmul_add(block + "attn_output", attended, x, normed)

        ops.rms_norm(x, block + "ffn_norm", normed)
        if layer.experts is None:
            feed_forward(ops, layer, normed, x)
        else:
            bias = block + "exp_probs_b.bias"
            mix_with_shared_expert(ops, layer, layer.experts, shape.n_embd, normed, x, bias=bias)
