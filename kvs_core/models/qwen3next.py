"""Architecture ``qwen3next``: Qwen 3 Next, such as 80B-A3B.

As ``qwen35moe``, with both gates of a recurrent layer in one matrix, and value heads that share a key head side by
side. Recurrent layers remember the last inputs of the convolution and one matrix a value head; the others cache full
K and V.
"""

from __future__ import annotations

from kvs_core.model_shape import ModelShape
from kvs_core.models.blocks import Attend, logits, matmul_inputs
from kvs_core.models.hybrid_blocks import plan_workspace, run_layers
from kvs_core.operations import Operations

__all__ = ["forward", "logits", "matmul_inputs", "plan_workspace"]


def forward(shape: ModelShape, ops: Operations, attend: Attend) -> None:
    """Run every layer for the tokens of the step; the last hidden states are left in ``residual``."""
    run_layers(shape, ops, attend, joint_gates=True)
