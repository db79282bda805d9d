"""Architecture ``gemma3``: Gemma 3, text only.

As ``gemma2``, but every query and key head is normalised before RoPE, scores have no cap, and five layers of six attend
to a sliding window, with a RoPE base of their own. A file without a window has full attention everywhere.
"""

from __future__ import annotations

from kvs_core.model_shape import LayerCache, ModelShape
from kvs_core.models.blocks import Attend, matmul_inputs, plan_workspace, project_heads
from kvs_core.models.gemma_blocks import attention_scale, embed, feed_forward, finish_attention, logits
from kvs_core.operations import Operations

__all__ = ["forward", "logits", "matmul_inputs", "plan_workspace"]

_N_LAYER_27B = 62


def forward(shape: ModelShape, ops: Operations, attend: Attend) -> None:
    """Run every layer for the tokens of the step; the last hidden states are left in ``residual``."""
    x = ops.buffer("residual", shape.n_embd)
    normed = ops.buffer("normed", shape.n_embd)

    embed(shape, ops, x)
    for layer in shape.layers:
        block = f"blk.{layer.layer_idx}."
        attended = ops.buffer("attended", layer.n_head * layer.head_dim_v)
        in_window = layer.cache is LayerCache.WINDOW_KV
        scale = attention_scale(shape, layer, n_layer_largest=_N_LAYER_27B)
        ops.rms_norm(x, block + "attn_norm", normed)
        q, k, v = project_heads(ops, layer, normed)
        ops.norm_heads(q, block + "attn_q_norm", layer.n_head)
        ops.norm_heads(k, block + "attn_k_norm", layer.n_head_kv)
        ops.rope(q, layer.n_head, in_window=in_window)
        ops.rope(k, layer.n_head_kv, in_window=in_window)
        attend(layer.layer_idx, q, k, v, attended, scale=scale)
        finish_attention(ops, layer, attended, x, normed)
        feed_forward(ops, layer, x, normed)
