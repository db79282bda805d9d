"""Architecture ``deepseek2``: DeepSeek V2, V2-Lite, V3, R1 and models built like them, such as Kimi K2.

Multi-head latent attention in its absorbed form: one row a token, a normalised latent and a rotated part that all heads
share, serves as the keys of every head, and its latent part as their values; each head's matrices turn its queries into
that space and its results back. Leading dense layers, then experts, in groups or not, with a shared expert that every
token takes. Every layer caches the latent row.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from kvs_core.latent_shape import LatentShape
from kvs_core.model_shape import LayerShape, ModelShape
from kvs_core.models import blocks
from kvs_core.models.blocks import Attend, feed_forward, logits, mix_with_shared_expert
from kvs_core.operations import DeviceArray, Operations
from kvs_core.workspace import ArraySpec, Workspace

__all__ = ["forward", "logits", "matmul_inputs", "plan_workspace"]


def plan_workspace(
    shape: ModelShape, n_tokens: int, n_outputs: int, scratch_bytes: int, attention_arrays: Sequence[ArraySpec]
) -> Workspace:
    """Arrays of a step of up to ``n_tokens`` tokens and ``n_outputs`` rows of logits at a time."""
    n_head, latent = shape.layers[0].n_head, _latent_of(shape.layers[0])
    n_widest_in = max(latent.n_plain, latent.kv_rank)
    n_widest_out = max(latent.kv_rank, latent.value_dim)
    more = [
        ArraySpec(name="q_latent", shape=(n_tokens, latent.q_rank)),
        ArraySpec(name="q_heads", shape=(n_tokens, n_head * latent.key_dim)),
        ArraySpec(name="values", shape=(n_tokens, n_head * latent.value_dim)),
        ArraySpec(name="head_inputs", shape=(n_tokens, n_head * n_widest_in)),
        ArraySpec(name="head_outputs", shape=(n_tokens, n_head * n_widest_out)),
    ]
    return blocks.plan_workspace(shape, n_tokens, n_outputs, scratch_bytes, attention_arrays, more_attention=more)


def matmul_inputs(shape: ModelShape) -> tuple[int, ...]:
    """Row lengths of every weight matrix."""
    n_head, latent = shape.layers[0].n_head, _latent_of(shape.layers[0])
    inner = {latent.q_rank, latent.n_plain, latent.kv_rank, n_head * latent.value_dim}
    inner |= {layer.n_ff for layer in shape.layers}
    inner |= {layer.experts.n_ff for layer in shape.layers if layer.experts is not None}
    return (shape.n_embd, *sorted(inner - {0}))


def forward(shape: ModelShape, ops: Operations, attend: Attend) -> None:
    """Run every layer for the tokens of the step; the last hidden states are left in ``residual``."""
    x = ops.buffer("residual", shape.n_embd)
    normed = ops.buffer("normed", shape.n_embd)

    ops.embed("token_embd", x)
    for layer in shape.layers:
        block = f"blk.{layer.layer_idx}."
        ops.rms_norm(x, block + "attn_norm", normed)
        _attend_latent(ops, attend, layer, _latent_of(layer), normed, x)

        ops.rms_norm(x, block + "ffn_norm", normed)
        if layer.experts is None:
            feed_forward(ops, layer, normed, x)
        else:
            bias = block + "exp_probs_b.bias"
            chosen_by = bias if ops.has_weight(bias) else None
            mix_with_shared_expert(ops, layer, layer.experts, shape.n_embd, normed, x, bias=chosen_by)


def _attend_latent(
    ops: Operations, attend: Attend, layer: LayerShape, latent: LatentShape, normed: DeviceArray, residual: DeviceArray
) -> None:
    """``residual`` += attention of ``normed``; ``normed`` may be used."""
    block, n_head = f"blk.{layer.layer_idx}.", layer.n_head
    q_heads = ops.buffer("q_heads", n_head * latent.key_dim)
    row = ops.buffer("k", latent.kv_rank + latent.n_rot)
    ops.matmul((block + "attn_kv_a_mqa",), normed, (row,))
    if latent.q_rank:
        q_latent = ops.buffer("q_latent", latent.q_rank)
        ops.matmul((block + "attn_q_a",), normed, (q_latent,))
        ops.rms_norm(q_latent, block + "attn_q_a_norm", q_latent)
        ops.matmul((block + "attn_q_b",), q_latent, (q_heads,))
    else:
        ops.matmul((block + "attn_q",), normed, (q_heads,))
    ops.norm_first(row, block + "attn_kv_a_norm")
    ops.rope(row, 1, begin=latent.kv_rank)
    ops.rope(q_heads, n_head, begin=latent.n_plain)

    q = ops.buffer("q", n_head * layer.head_dim_k)
    attended = ops.buffer("attended", n_head * layer.head_dim_v)
    values = ops.buffer("values", n_head * latent.value_dim)
    ops.matmul_heads(block + "attn_k_b", q_heads, q, n_head)
    attend(layer.layer_idx, q, row, None, attended, scale=1.0 / sqrt(latent.key_dim))
    ops.matmul_heads(block + "attn_v_b", attended, values, n_head)
    ops.matmul_add(block + "attn_output", values, residual, normed)


def _latent_of(layer: LayerShape) -> LatentShape:
    assert layer.latent is not None, "every layer of this architecture has a latent cache"
    return layer.latent
