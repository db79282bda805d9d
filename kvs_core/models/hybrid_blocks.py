"""What the hybrid families have in common: attention with an output gate, and recurrent layers in between.

A recurrent layer is a short convolution over queries, keys and values, then a gated delta net. The families' own files
say how its gates are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from kvs_core.model_shape import LayerShape, ModelShape
from kvs_core.models import blocks
from kvs_core.models.blocks import Attend, add_experts_and_shared, feed_forward
from kvs_core.operations import DeviceArray, Operations
from kvs_core.recurrent_shape import RecurrentShape
from kvs_core.workspace import ArraySpec, Workspace


def plan_workspace(
    shape: ModelShape, n_tokens: int, n_outputs: int, scratch_bytes: int, attention_arrays: Sequence[ArraySpec]
) -> Workspace:
    """Arrays of a step of up to ``n_tokens`` tokens and ``n_outputs`` rows of logits at a time."""
    q_dim = max(layer.n_head * layer.head_dim_k for layer in shape.layers)
    recurrent = [layer.recurrent for layer in shape.layers if layer.recurrent is not None]
    n_channels = max((sizes.n_channels for sizes in recurrent), default=0)
    n_inner = max((sizes.n_inner for sizes in recurrent), default=0)
    n_head = max((sizes.n_head_v for sizes in recurrent), default=0)
    return blocks.plan_workspace(
        shape,
        n_tokens,
        n_outputs,
        scratch_bytes,
        [
            *attention_arrays,
            ArraySpec(name="q_and_gate", shape=(n_tokens, 2 * q_dim)),
            ArraySpec(name="attention_gate", shape=(n_tokens, q_dim)),
        ],
        another_mixer=[
            ArraySpec(name="channels", shape=(n_tokens, n_channels)),
            ArraySpec(name="delta_heads", shape=(n_tokens, n_channels)),
            ArraySpec(name="delta_gate", shape=(n_tokens, n_inner)),
            ArraySpec(name="delta_out", shape=(n_tokens, n_inner)),
            ArraySpec(name="beta_and_decay", shape=(n_tokens, 2 * n_head)),
            ArraySpec(name="beta", shape=(n_tokens, n_head)),
            ArraySpec(name="decay", shape=(n_tokens, n_head)),
        ],
    )


def run_layers(shape: ModelShape, ops: Operations, attend: Attend, *, joint_gates: bool) -> None:
    """Embedding and every layer; the last hidden states are left in ``residual``.

    ``joint_gates``: how the gates of recurrent layers are stored (``run_delta_net``).
    """
    x = ops.buffer("residual", shape.n_embd)
    normed = ops.buffer("normed", shape.n_embd)

    ops.embed("token_embd", x)
    for layer in shape.layers:
        block = f"blk.{layer.layer_idx}."
        ops.rms_norm(x, block + "attn_norm", normed)
        if layer.recurrent is None:
            attend_gated(ops, attend, layer, normed, x)
        else:
            run_delta_net(ops, layer, layer.recurrent, normed, x, joint_gates=joint_gates)

        ops.rms_norm(x, block + "post_attention_norm", normed)
        if layer.experts is None:
            feed_forward(ops, layer, normed, x)
        else:
            add_experts_and_shared(ops, layer, layer.experts, shape.n_embd, normed, x)


def attend_gated(
    ops: Operations, attend: Attend, layer: LayerShape, normed: DeviceArray, residual: DeviceArray
) -> None:
    """``residual`` += attention over normalised heads, times the sigmoid of a gate, through its output matrix.

    The matrix of the queries gives each head's query and then its gate. ``normed`` may be used.
    """
    block = f"blk.{layer.layer_idx}."
    q_dim = layer.n_head * layer.head_dim_k
    both = ops.buffer("q_and_gate", 2 * q_dim)
    q, gate = ops.buffer("q", q_dim), ops.buffer("attention_gate", q_dim)
    k = ops.buffer("k", layer.n_head_kv * layer.head_dim_k)
    v = ops.buffer("v", layer.n_head_kv * layer.head_dim_v)
    attended = ops.buffer("attended", layer.n_head * layer.head_dim_v)
    ops.matmul((block + "attn_q", block + "attn_k", block + "attn_v"), normed, (both, k, v))
    ops.split_groups(both, q, gate, layer.head_dim_k)
    ops.norm_heads(q, block + "attn_q_norm", layer.n_head)
    ops.norm_heads(k, block + "attn_k_norm", layer.n_head_kv)
    attend(layer.layer_idx, q, k, v, attended, scale=1.0 / sqrt(layer.head_dim_k), rotates=True)
    ops.sigmoid_mul(attended, gate)
    ops.matmul_add(block + "attn_output", attended, residual, normed)


def run_delta_net(
    ops: Operations,
    layer: LayerShape,
    recurrent: RecurrentShape,
    normed: DeviceArray,
    residual: DeviceArray,
    *,
    joint_gates: bool,
) -> None:
    """``residual`` += the layer's delta net, normalised and gated, through its output matrix; ``normed`` may be used.

    ``joint_gates``: one matrix gives, for each key head, the betas of its value heads and then their decays.
    """
    block = f"blk.{layer.layer_idx}."
    channels = ops.buffer("channels", recurrent.n_channels)
    heads = ops.buffer("delta_heads", recurrent.n_channels)
    gate, out = ops.buffer("delta_gate", recurrent.n_inner), ops.buffer("delta_out", recurrent.n_inner)
    beta, decay = ops.buffer("beta", recurrent.n_head_v), ops.buffer("decay", recurrent.n_head_v)
    ops.matmul((block + "attn_qkv", block + "attn_gate"), normed, (channels, gate))
    if joint_gates:
        both = ops.buffer("beta_and_decay", 2 * recurrent.n_head_v)
        ops.matmul((block + "ssm_ba",), normed, (both,))
        ops.split_groups(both, beta, decay, recurrent.n_head_v // recurrent.n_head_k)
    else:
        ops.matmul((block + "ssm_beta", block + "ssm_alpha"), normed, (beta, decay))
    ops.short_convolution(layer.layer_idx, block + "ssm_conv1d", channels, heads)
    vectors = (block + "ssm_dt.bias", block + "ssm_a", block + "ssm_norm")
    ops.delta_net(layer.layer_idx, vectors, heads, beta, decay, out, gate)
    ops.matmul_add(block + "ssm_out", gate, residual, normed)
