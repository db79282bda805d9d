"""Architecture ``llama``: Llama 2 and 3, Mistral, TinyLlama, SmolLM2 and their kin (dense).

Pre-norm blocks, ``x += Attention(rms(x))`` and ``x += FFN(rms(x))``, RoPE on neighbouring pairs, grouped-query
attention, SiLU-gated feed-forward, optional biases, output tied to the embedding when the file has no
``output.weight``. Every layer caches full K and V.
"""

from __future__ import annotations

from math import sqrt
from typing import Protocol

from kvs_core import workspace
from kvs_core.model_shape import ModelShape
from kvs_core.operations import DeviceArray, Operations
from kvs_core.workspace import ArraySpec, Workspace


class Attend(Protocol):
    """Stores this step's K and V rows of a layer and attends over everything cached so far.

    ``rotates``: RoPE of ``q`` and ``k`` first.
    """

    def __call__(
        self,
        layer_idx: int,
        q: DeviceArray,
        k: DeviceArray,
        v: DeviceArray,
        out: DeviceArray,
        *,
        scale: float,
        rotates: bool = False,
    ) -> None: ...


def plan_workspace(shape: ModelShape, n_tokens: int, n_outputs: int, scratch_bytes: int) -> Workspace:
    """Arrays of a step of up to ``n_tokens`` tokens and ``n_outputs`` rows of logits at a time."""
    q_dim = max(layer.n_head * layer.head_dim_k for layer in shape.layers)
    k_dim = max(layer.n_head_kv * layer.head_dim_k for layer in shape.layers)
    v_dim = max(layer.n_head_kv * layer.head_dim_v for layer in shape.layers)
    out_dim = max(layer.n_head * layer.head_dim_v for layer in shape.layers)
    n_head = max(layer.n_head for layer in shape.layers)
    n_ff = max(layer.n_ff for layer in shape.layers)
    lasting = [
        ArraySpec(name="residual", shape=(n_tokens, shape.n_embd)),
        ArraySpec(name="normed", shape=(n_tokens, shape.n_embd)),
        ArraySpec(name="scratch", shape=(scratch_bytes,), dtype="uint8"),
    ]
    attention = [
        ArraySpec(name="q", shape=(n_tokens, q_dim)),
        ArraySpec(name="k", shape=(n_tokens, k_dim)),
        ArraySpec(name="v", shape=(n_tokens, v_dim)),
        ArraySpec(name="attended", shape=(n_tokens, out_dim)),
        ArraySpec(name="attention_acc", shape=(n_tokens, out_dim)),
        ArraySpec(name="attention_max", shape=(n_tokens, n_head)),
        ArraySpec(name="attention_sum", shape=(n_tokens, n_head)),
    ]
    feed_forward = [
        ArraySpec(name="gate", shape=(n_tokens, n_ff)),
        ArraySpec(name="up", shape=(n_tokens, n_ff)),
    ]
    output = [
        ArraySpec(name="output_normed", shape=(n_outputs, shape.n_embd)),
        ArraySpec(name="logits", shape=(n_outputs, shape.n_vocab)),
    ]
    return workspace.plan_workspace(lasting, [attention, feed_forward, output])


def matmul_inputs(shape: ModelShape) -> tuple[int, ...]:
    """Row lengths of every weight matrix."""
    inner = {layer.n_head * layer.head_dim_v for layer in shape.layers} | {layer.n_ff for layer in shape.layers}
    return (shape.n_embd, *sorted(inner))


def forward(shape: ModelShape, ops: Operations, attend: Attend) -> None:
    """Run every layer for the tokens of the step; the last hidden states are left in ``residual``."""
    x = ops.buffer("residual", shape.n_embd)
    normed = ops.buffer("normed", shape.n_embd)

    ops.embed("token_embd", x)
    for layer in shape.layers:
        block = f"blk.{layer.layer_idx}."
        q = ops.buffer("q", layer.n_head * layer.head_dim_k)
        k = ops.buffer("k", layer.n_head_kv * layer.head_dim_k)
        v = ops.buffer("v", layer.n_head_kv * layer.head_dim_v)
        attended = ops.buffer("attended", layer.n_head * layer.head_dim_v)
        gate, up = ops.buffer("gate", layer.n_ff), ops.buffer("up", layer.n_ff)
        ops.rms_norm(x, block + "attn_norm", normed)
        ops.matmul((block + "attn_q", block + "attn_k", block + "attn_v"), normed, (q, k, v))
        attend(layer.layer_idx, q, k, v, attended, scale=1.0 / sqrt(layer.head_dim_k), rotates=True)
        ops.matmul_add(block + "attn_output", attended, x, normed)

        ops.rms_norm(x, block + "ffn_norm", normed)
        ops.gated_matmul((block + "ffn_gate", block + "ffn_up"), normed, gate, up)
        ops.matmul_add(block + "ffn_down", gate, x, normed)


def logits(shape: ModelShape, ops: Operations, row_begin: int, row_end: int) -> DeviceArray:
    """Logits of some of the step's tokens, float32 [row_end - row_begin, n_vocab]."""
    n_rows = row_end - row_begin
    normed = ops.rows("output_normed", 0, n_rows, shape.n_embd)
    out = ops.rows("logits", 0, n_rows, shape.n_vocab)
    ops.rms_norm(ops.rows("residual", row_begin, row_end, shape.n_embd), "output_norm", normed)
    ops.matmul(("token_embd" if shape.tied_output else "output",), normed, (out,))
    return out
