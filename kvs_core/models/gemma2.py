"""Architecture ``gemma2``: Gemma 2.

Blocks with a norm before and after attention and feed-forward, RoPE on the pairs (i, i + n_rot / 2), scores and logits
under a soft cap. Every second layer, from the first on, attends to a sliding window only: it caches the window, the
others cache full K and V.
"""

from __future__ import annotations

from kvs_core.model_shape import LayerCache, ModelShape
from kvs_core.models.blocks import Attend, matmul_inputs, plan_workspace, project_heads
from kvs_core.models.gemma_blocks import attention_scale, embed, feed_forward, finish_attention, logits
from kvs_core.operations import Operations

__all__ = ["forward", "logits", "matmul_inputs", "plan_workspace"]

_N_LAYER_27B = 46


def forward(shape: ModelShape, ops: Operations, attend: Attend) -> None:
    """Run every layer for the tokens of the step; the last hidden states are left in ``residual``."""
    x = ops.buffer("residual", shape.n_embd)
    normed = ops.buffer("normed", shape.n_embd)

    embed(shape, ops, x)
    for layer in shape.layers:
        attended = ops.buffer("attended", layer.n_head * layer.head_dim_v)
        in_window = layer.cache is LayerCache.WINDOW_KV
        scale = attention_scale(shape, layer, n_layer_largest=_N_LAYER_27B)
        ops.rms_norm(x, f"blk.{layer.layer_idx}.attn_norm", normed)
        q, k, v = project_heads(ops, layer, normed)
        ops.rope(q, layer.n_head, in_window=in_window)
        ops.rope(k, layer.n_head_kv, in_window=in_window)
        attend(layer.layer_idx, q, k, v, attended, scale=scale, softcap=shape.attention_softcap)
        finish_attention(ops, layer, attended, x, normed)
        feed_forward(ops, layer, x, normed)
