"""Architecture ``gemma4``: Gemma 4, dense (31B, E2B, E4B) and mixture of experts (26B-A4B), text only.

As ``gemma3``, with heads of another size in the layers with a window, values that are normalised too and may be the
keys before their norm and rotation, scores without a scale, and a factor at the end of each layer. In a mixture of
experts the dense feed-forward stays and both are added. Layers without a window rotate only the pairs that
``rope_freqs`` leaves alone, and cache full K and V; the others cache the window. In E2B and E4B the last layers have
no keys and values and attend to those of the last layer of their kind before them, and every layer adds an embedding
of its own, which depends on the token and on the embedding that all layers share.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from kvs_core.activation_rule import GatedActivation
from kvs_core.expert_shape import ExpertShape
from kvs_core.model_shape import LayerShape, ModelShape
from kvs_core.models import blocks
from kvs_core.models.blocks import Attend
from kvs_core.models.gemma_blocks import embed, feed_forward, feed_forward_rows, finish_attention, logits
from kvs_core.operations import DeviceArray, Operations
from kvs_core.workspace import ArraySpec, Workspace

__all__ = ["forward", "logits", "matmul_inputs", "plan_workspace"]


def plan_workspace(
    shape: ModelShape, n_tokens: int, n_outputs: int, scratch_bytes: int, attention_arrays: Sequence[ArraySpec]
) -> Workspace:
    """Arrays of a step of up to ``n_tokens`` tokens and ``n_outputs`` rows of logits at a time."""
    more, lasting = [], []
    n_own = shape.layers[0].n_own_embd
    if n_own:
        lasting.append(ArraySpec(name="own_embd", shape=(n_tokens, shape.n_layer * n_own)))
        more.append(ArraySpec(name="own_embd_of_token", shape=(n_tokens, shape.n_layer * n_own)))
        more += [ArraySpec(name=name, shape=(n_tokens, n_own)) for name in ("own_gate", "own_embd_of_layer")]
    return blocks.plan_workspace(
        shape, n_tokens, n_outputs, scratch_bytes, attention_arrays, more_lasting=lasting, more_feed_forward=more
    )


def matmul_inputs(shape: ModelShape) -> tuple[int, ...]:
    """Row lengths of every weight matrix."""
    n_own = shape.layers[0].n_own_embd
    return (*blocks.matmul_inputs(shape), *([n_own] if n_own else []))


def forward(shape: ModelShape, ops: Operations, attend: Attend) -> None:
    """Run every layer for the tokens of the step; the last hidden states are left in ``residual``."""
    x = ops.buffer("residual", shape.n_embd)
    normed = ops.buffer("normed", shape.n_embd)

    embed(shape, ops, x)
    if shape.layers[0].n_own_embd:
        _embed_for_layers(shape, ops, shape.layers[0].n_own_embd, x)
    for layer in shape.layers:
        block = f"blk.{layer.layer_idx}."
        attended = ops.buffer("attended", layer.n_head * layer.head_dim_v)
        ops.rms_norm(x, block + "attn_norm", normed)
        if layer.kv_from is None:
            q, k, v = _project_heads(ops, layer, normed)
            ops.norm_heads(k, block + "attn_k_norm", layer.n_head_kv)
            ops.norm_heads(v, None, layer.n_head_kv)
        else:
            q, k, v = ops.buffer("q", layer.n_head * layer.head_dim_k), None, None
            ops.matmul((block + "attn_q",), normed, (q,))
        ops.norm_heads(q, block + "attn_q_norm", layer.n_head)
        attend(layer.layer_idx, q, k, v, attended, scale=1.0, rotates=True)
        finish_attention(ops, layer, attended, x, normed)

        scale = block + "layer_output_scale" if ops.has_weight(block + "layer_output_scale") else None
        scale_before = None if layer.n_own_embd else scale
        if layer.experts is None:
            feed_forward(ops, layer, x, normed, scale=scale_before)
        else:
            _mix(shape, ops, layer, layer.experts, x, normed, scale=scale_before)
        if layer.n_own_embd:
            _add_own_embedding(shape, ops, layer, x, normed, scale=scale)


def _embed_for_layers(shape: ModelShape, ops: Operations, n_own: int, x: DeviceArray) -> None:
    """``own_embd`` = for every layer, what its token's row says and what the shared embedding ``x`` says, averaged."""
    own = ops.buffer("own_embd", shape.n_layer * n_own)
    of_token = ops.buffer("own_embd_of_token", shape.n_layer * n_own)
    ops.matmul(("per_layer_model_proj",), x, (own,))
    ops.scale(own, 1.0 / sqrt(shape.n_embd))
    ops.norm_heads(own, "per_layer_proj_norm", shape.n_layer)
    ops.embed("per_layer_token_embd", of_token)
    ops.scale(of_token, sqrt(n_own))
    ops.add(own, of_token)
    ops.scale(own, 1.0 / sqrt(2.0))


def _add_own_embedding(
    shape: ModelShape,
    ops: Operations,
    layer: LayerShape,
    x: DeviceArray,
    normed: DeviceArray,
    *,
    scale: str | None,
) -> None:
    """``x += rms(proj(gelu(gate(x)) * the layer's own embedding))``, times ``scale``; ``normed`` is overwritten."""
    block, n_own = f"blk.{layer.layer_idx}.", layer.n_own_embd
    gate, own = ops.buffer("own_gate", n_own), ops.buffer("own_embd_of_layer", n_own)
    ops.matmul((block + "inp_gate",), x, (gate,))
    ops.take_columns(ops.buffer("own_embd", shape.n_layer * n_own), layer.layer_idx * n_own, own)
    ops.gelu_mul(gate, own)
    ops.matmul((block + "proj",), gate, (normed,))
    ops.add_normed(normed, block + "post_norm", x, scale=scale)


def _project_heads(ops: Operations, layer: LayerShape, x: DeviceArray) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
    """Queries, keys and values; a layer without a matrix for values takes its keys."""
    block = f"blk.{layer.layer_idx}."
    if ops.has_weight(block + "attn_v"):
        return blocks.project_heads(ops, layer, x)
    q = ops.buffer("q", layer.n_head * layer.head_dim_k)
    k = ops.buffer("k", layer.n_head_kv * layer.head_dim_k)
    v = ops.buffer("v", layer.n_head_kv * layer.head_dim_v)
    ops.matmul((block + "attn_q", block + "attn_k", block + "attn_k"), x, (q, k, v))
    return q, k, v


def _mix(
    shape: ModelShape,
    ops: Operations,
    layer: LayerShape,
    experts: ExpertShape,
    x: DeviceArray,
    normed: DeviceArray,
    *,
    scale: str | None,
) -> None:
    """``x += rms(rms(dense feed-forward) + rms(experts))``, times ``scale``; the router has a norm of its own."""
    block = f"blk.{layer.layer_idx}."
    dense = ops.buffer("branch", shape.n_embd)
    router = ops.buffer("router", experts.n_expert)
    ops.rms_norm(x, block + "ffn_norm", normed)
    feed_forward_rows(ops, layer, normed, dense)

    ops.rms_norm(x, block + "ffn_gate_inp.scale", normed, factor=1.0 / sqrt(shape.n_embd))
    ops.matmul((block + "ffn_gate_inp",), normed, (router,))
    scales = block + "ffn_down_exps.scale"
    ops.route(router, experts, scales=scales if ops.has_weight(scales) else None)
    ops.rms_norm(x, block + "pre_ffw_norm_2", normed)
    _run_experts(ops, layer, experts, shape.n_embd, normed)
    norms = (block + "post_ffw_norm_1", block + "post_ffw_norm_2", block + "post_ffw_norm")
    ops.add_normed_pair(dense, normed, norms, x, scale=scale)


def _run_experts(ops: Operations, layer: LayerShape, experts: ExpertShape, n_embd: int, x: DeviceArray) -> None:
    """``x`` = weighted sum of the chosen experts' ``down(gelu(gate(x)) * up(x))``; gate and up may be one matrix."""
    block = f"blk.{layer.layer_idx}."
    pairs = ops.buffer("expert_io", experts.n_used * n_embd)
    gate = ops.buffer("expert_gate", experts.n_used * experts.n_ff)
    up = ops.buffer("expert_up", experts.n_used * experts.n_ff)
    if ops.has_weight(block + "ffn_gate_up_exps"):
        weights: tuple[str, ...] = (block + "ffn_gate_up_exps",)
    else:
        weights = (block + "ffn_gate_exps", block + "ffn_up_exps")
    ops.gated_experts(weights, x, pairs, gate, up, GatedActivation.GELU)
    ops.from_experts(block + "ffn_down_exps", gate, pairs, x)
