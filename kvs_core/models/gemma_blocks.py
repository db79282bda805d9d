"""What the Gemma families have in common: scaled embeddings, GELU-gated feed-forward, norms after each half of a block.

Their norm weights are stored with the 1 that the original adds, so the plain RMS norm serves.
"""

from __future__ import annotations

from math import sqrt

from kvs_core.activation_rule import GatedActivation
from kvs_core.model_shape import LayerShape, ModelShape
from kvs_core.models import blocks
from kvs_core.operations import DeviceArray, Operations


def embed(shape: ModelShape, ops: Operations, out: DeviceArray) -> None:
    """Embedding rows times sqrt(n_embd)."""
    ops.embed("token_embd", out)
    ops.scale(out, sqrt(shape.n_embd))


def attention_scale(shape: ModelShape, layer: LayerShape, *, n_layer_largest: int) -> float:
    """1 / sqrt(head size); the largest model of a family, known by its layers alone, takes n_embd / n_head instead."""
    if shape.n_layer == n_layer_largest:
        return 1.0 / sqrt(shape.n_embd // layer.n_head)
    return 1.0 / sqrt(layer.head_dim_k)


def finish_attention(
    ops: Operations, layer: LayerShape, attended: DeviceArray, x: DeviceArray, out: DeviceArray
) -> None:
    """``x += rms(output matrix of attended)``; ``out`` is overwritten."""
    block = f"blk.{layer.layer_idx}."
    ops.matmul((block + "attn_output",), attended, (out,))
    ops.add_normed(out, block + "post_attention_norm", x)


def feed_forward(
    ops: Operations, layer: LayerShape, x: DeviceArray, normed: DeviceArray, *, scale: str | None = None
) -> None:
    """``x += rms(down(gelu(gate(rms(x))) * up(rms(x))))``, all times ``scale`` if any; ``normed`` is overwritten."""
    block = f"blk.{layer.layer_idx}."
    ops.rms_norm(x, block + "ffn_norm", normed)
    feed_forward_rows(ops, layer, normed, normed)
    ops.add_normed(normed, block + "post_ffw_norm", x, scale=scale)


def feed_forward_rows(ops: Operations, layer: LayerShape, x: DeviceArray, out: DeviceArray) -> None:
    """``out = down(gelu(gate(x)) * up(x))``; ``out`` may be ``x``."""
    block = f"blk.{layer.layer_idx}."
    gate, up = ops.buffer("gate", layer.n_ff), ops.buffer("up", layer.n_ff)
    ops.gated_matmul((block + "ffn_gate", block + "ffn_up"), x, gate, up, GatedActivation.GELU)
    ops.matmul((block + "ffn_down",), gate, (out,))


def logits(shape: ModelShape, ops: Operations, row_begin: int, row_end: int) -> DeviceArray:
    """Logits of some of the step's tokens, float32 [row_end - row_begin, n_vocab], capped where the model says so."""
    out = blocks.logits(shape, ops, row_begin, row_end)
    if shape.logit_softcap:
        ops.softcap(out, shape.logit_softcap)
    return out
