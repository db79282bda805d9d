"""Architectures ``qwen35`` and ``qwen35moe``: Qwen 3.5, dense and with experts, such as 35B-A3B, text only.

Pre-norm blocks. In most layers a gated delta net behind a short convolution takes the place of attention; such a layer
remembers the last inputs of the convolution and one matrix a value head, whatever the context. The others, each fourth
unless the file says otherwise, attend with normalised heads, RoPE on the leading pairs (i, i + n_rot / 2) of each head
and a gate on the output; they cache full K and V, K after norm and rotation. Then comes a feed-forward, in
``qwen35moe`` experts and one that all tokens share, the latter times a gate of its own.
"""

from __future__ import annotations

from kvs_core.model_shape import ModelShape
from kvs_core.models.blocks import Attend, logits, matmul_inputs
from kvs_core.models.hybrid_blocks import plan_workspace, run_layers
from kvs_core.operations import Operations

__all__ = ["forward", "logits", "matmul_inputs", "plan_workspace"]


def forward(shape: ModelShape, ops: Operations, attend: Attend) -> None:
    """Run every layer for the tokens of the step; the last hidden states are left in ``residual``."""
    run_layers(shape, ops, attend, joint_gates=False)
