"""What the decoder families have in common: workspace, attention, feed-forward, experts and the output.

The families' own files say how these follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Protocol

from kvs_core import workspace
from kvs_core.activation_rule import GatedActivation
from kvs_core.expert_shape import ExpertShape
from kvs_core.model_shape import LayerShape, ModelShape
from kvs_core.operations import DeviceArray, Operations
from kvs_core.workspace import ArraySpec, Workspace


class Attend(Protocol):
    """Stores this step's K and V rows of a layer and attends over everything cached so far.

    ``rotates``: RoPE of ``q`` and ``k`` first, in layers with a window as those do. No ``v``: a latent cache, whose
    values are a part of its keys. No ``k`` either: the layer attends to the cache of the one its shape names.
    """

    def __call__(
        self,
        layer_idx: int,
        q: DeviceArray,
        k: DeviceArray | None,
        v: DeviceArray | None,
        out: DeviceArray,
        *,
        scale: float,
        rotates: bool = False,
        softcap: float = 0.0,
        sinks: str | None = None,
    ) -> None: ...


def plan_workspace(
    shape: ModelShape,
    n_tokens: int,
    n_outputs: int,
    scratch_bytes: int,
    attention_arrays: Sequence[ArraySpec],
    *,
    more_lasting: Sequence[ArraySpec] = (),
    more_attention: Sequence[ArraySpec] = (),
    more_feed_forward: Sequence[ArraySpec] = (),
    another_mixer: Sequence[ArraySpec] = (),
) -> Workspace:
    """Arrays of a step of up to ``n_tokens`` tokens and ``n_outputs`` rows of logits at a time.

    attention_arrays   what attention needs beside ``q``, ``k``, ``v`` and ``attended``
    another_mixer      what layers need that have something else in place of attention
    """
    q_dim = max(layer.n_head * layer.head_dim_k for layer in shape.layers)
    k_dim = max(layer.n_head_kv * layer.head_dim_k for layer in shape.layers)
    v_dim = max(layer.n_head_kv * layer.head_dim_v for layer in shape.layers)
    out_dim = max(layer.n_head * layer.head_dim_v for layer in shape.layers)
    n_ff = max(layer.n_ff for layer in shape.layers)
    lasting = [
        *more_lasting,
        ArraySpec(name="residual", shape=(n_tokens, shape.n_embd)),
        ArraySpec(name="normed", shape=(n_tokens, shape.n_embd)),
        ArraySpec(name="scratch", shape=(scratch_bytes,), dtype="uint8"),
    ]
    attention = [
        *more_attention,
        ArraySpec(name="q", shape=(n_tokens, q_dim)),
        ArraySpec(name="k", shape=(n_tokens, k_dim)),
        ArraySpec(name="v", shape=(n_tokens, v_dim)),
        ArraySpec(name="attended", shape=(n_tokens, out_dim)),
        *attention_arrays,
    ]
    feed_forward = [
        *more_feed_forward,
        ArraySpec(name="gate", shape=(n_tokens, n_ff)),
        ArraySpec(name="up", shape=(n_tokens, n_ff)),
    ]
    experts = [layer.experts for layer in shape.layers if layer.experts is not None]
    if experts:
        feed_forward += _expert_arrays(experts, n_tokens, shape.n_embd)
        if n_ff:
            feed_forward.append(ArraySpec(name="branch", shape=(n_tokens, shape.n_embd)))
    output = [
        ArraySpec(name="output_normed", shape=(n_outputs, shape.n_embd)),
        ArraySpec(name="logits", shape=(n_outputs, shape.n_vocab)),
    ]
    return workspace.plan_workspace(lasting, [attention, another_mixer, feed_forward, output])


def _expert_arrays(experts: list[ExpertShape], n_tokens: int, n_embd: int) -> list[ArraySpec]:
    """What ``route`` leaves for the other expert operations, then one row for every (token, expert taken)."""
    n_expert = max(one.n_expert for one in experts)
    n_used = max(one.n_used for one in experts)
    n_pairs = n_tokens * n_used
    n_ff = max(one.n_ff for one in experts)
    return [
        ArraySpec(name="router", shape=(n_tokens, n_expert)),
        ArraySpec(name="expert_ids", shape=(n_pairs,), dtype="int32"),
        ArraySpec(name="expert_weights", shape=(n_pairs,)),
        ArraySpec(name="expert_rows", shape=(n_pairs,), dtype="int32"),
        ArraySpec(name="expert_begins", shape=(n_expert + 1,), dtype="int32"),
        ArraySpec(name="experts_taken", shape=(n_expert,), dtype="int32"),
        ArraySpec(name="expert_io", shape=(n_pairs, n_embd)),
        ArraySpec(name="expert_gate", shape=(n_pairs, n_ff)),
        ArraySpec(name="expert_up", shape=(n_pairs, n_ff)),
    ]


def matmul_inputs(shape: ModelShape) -> tuple[int, ...]:
    """Row lengths of every weight matrix."""
    inner = {layer.n_head * layer.head_dim_v for layer in shape.layers if layer.n_head}
    inner |= {layer.recurrent.n_inner for layer in shape.layers if layer.recurrent is not None}
    inner |= {layer.n_ff for layer in shape.layers if layer.n_ff}
    inner |= {layer.experts.n_ff for layer in shape.layers if layer.experts is not None}
    return (shape.n_embd, *sorted(inner))


def project_heads(ops: Operations, layer: LayerShape, x: DeviceArray) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
    """Queries, keys and values of the layer, before norm and rotation."""
    block = f"blk.{layer.layer_idx}."
    q = ops.buffer("q", layer.n_head * layer.head_dim_k)
    k = ops.buffer("k", layer.n_head_kv * layer.head_dim_k)
    v = ops.buffer("v", layer.n_head_kv * layer.head_dim_v)
    ops.matmul((block + "attn_q", block + "attn_k", block + "attn_v"), x, (q, k, v))
    return q, k, v


def attend_heads(
    ops: Operations,
    attend: Attend,
    layer: LayerShape,
    q: DeviceArray,
    k: DeviceArray,
    v: DeviceArray,
    residual: DeviceArray,
    normed: DeviceArray,
    *,
    rotates: bool = True,
) -> None:
    """``residual`` += the layer's attention, scaled by 1 / sqrt(head size), through its output matrix.

    ``rotates``: RoPE of ``q`` and ``k`` first. ``normed`` may be used.
    """
    attended = ops.buffer("attended", layer.n_head * layer.head_dim_v)
    attend(layer.layer_idx, q, k, v, attended, scale=1.0 / sqrt(layer.head_dim_k), rotates=rotates)
    ops.matmul_add(f"blk.{layer.layer_idx}.attn_output", attended, residual, normed)


def feed_forward(ops: Operations, layer: LayerShape, normed: DeviceArray, residual: DeviceArray) -> None:
    """``residual += down(silu(gate(normed)) * up(normed))``; ``normed`` may be used."""
    block = f"blk.{layer.layer_idx}."
    gate, up = ops.buffer("gate", layer.n_ff), ops.buffer("up", layer.n_ff)
    ops.gated_matmul((block + "ffn_gate", block + "ffn_up"), normed, gate, up)
    ops.matmul_add(block + "ffn_down", gate, residual, normed)


def feed_forward_or_experts(
    ops: Operations, layer: LayerShape, n_embd: int, normed: DeviceArray, residual: DeviceArray
) -> None:
    """``residual`` += the layer's feed-forward, or the mixture of its experts; ``normed`` may be used."""
    if layer.experts is None:
        feed_forward(ops, layer, normed, residual)
    else:
        mix_experts(ops, layer, layer.experts, n_embd, normed, normed)
        ops.add(residual, normed)


def mix_experts(
    ops: Operations,
    layer: LayerShape,
    experts: ExpertShape,
    n_embd: int,
    x: DeviceArray,
    out: DeviceArray,
    *,
    activation: GatedActivation = GatedActivation.SILU,
    bias: str | None = None,
) -> None:
    """``out`` = weighted sum of what the experts that the router chose for each token make of it; may be ``x``.

    ``bias`` names a vector that takes part in the choice of experts.
    """
    block = f"blk.{layer.layer_idx}."
    router = ops.buffer("router", experts.n_expert)
    # One row for every pair of token and expert.
    pairs = ops.buffer("expert_io", experts.n_used * n_embd)
    gate = ops.buffer("expert_gate", experts.n_used * experts.n_ff)
    up = ops.buffer("expert_up", experts.n_used * experts.n_ff)
    ops.matmul((block + "ffn_gate_inp",), x, (router,))
    ops.route(router, experts, bias)
    ops.gated_experts((block + "ffn_gate_exps", block + "ffn_up_exps"), x, pairs, gate, up, activation)
    ops.from_experts(block + "ffn_down_exps", gate, pairs, out)


def mix_with_shared_expert(
    ops: Operations,
    layer: LayerShape,
    experts: ExpertShape,
    n_embd: int,
    normed: DeviceArray,
    residual: DeviceArray,
    *,
    bias: str | None = None,
) -> None:
    """``residual`` += the experts of ``normed`` and one more that every token takes; ``normed`` may be used."""
    block = f"blk.{layer.layer_idx}."
    branch = ops.buffer("branch", n_embd)
    mix_experts(ops, layer, experts, n_embd, normed, branch, bias=bias)
    ops.add(residual, branch)
    gate, up = ops.buffer("gate", layer.n_ff), ops.buffer("up", layer.n_ff)
    ops.gated_matmul((block + "ffn_gate_shexp", block + "ffn_up_shexp"), normed, gate, up)
    ops.matmul_add(block + "ffn_down_shexp", gate, residual, normed)


def add_experts_and_shared(
    ops: Operations, layer: LayerShape, experts: ExpertShape, n_embd: int, normed: DeviceArray, residual: DeviceArray
) -> None:
    """``residual`` += what each token's experts make of ``normed``, then the shared expert's times its own gate."""
    block = f"blk.{layer.layer_idx}."
    branch = ops.buffer("branch", n_embd)
    mix_experts(ops, layer, experts, n_embd, normed, branch)
    ops.add(residual, branch)
    gate, up = ops.buffer("gate", layer.n_ff), ops.buffer("up", layer.n_ff)
    ops.gated_matmul((block + "ffn_gate_shexp", block + "ffn_up_shexp"), normed, gate, up)
    ops.matmul((block + "ffn_down_shexp",), gate, (branch,))
    ops.sigmoid_gate(normed, block + "ffn_gate_inp_shexp", branch)
    ops.add(residual, branch)


def logits(shape: ModelShape, ops: Operations, row_begin: int, row_end: int) -> DeviceArray:
    """Logits of some of the step's tokens, float32 [row_end - row_begin, n_vocab]."""
    n_rows = row_end - row_begin
    normed = ops.rows("output_normed", 0, n_rows, shape.n_embd)
    out = ops.rows("logits", 0, n_rows, shape.n_vocab)
    ops.rms_norm(ops.rows("residual", row_begin, row_end, shape.n_embd), "output_norm", normed)
    ops.matmul(("token_embd" if shape.tied_output else "output",), normed, (out,))
    return out
