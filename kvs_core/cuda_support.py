"""What a GPU can run so far: models, and weight types as they are. Asked by validate and plan; imports no CUDA."""

from __future__ import annotations

from kvs_core.model_shape import ModelShape
from kvs_core.models import model_of

CUDA_FAST_WEIGHT_TYPES = frozenset(
    {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
    | {"IQ4_NL", "IQ4_XS", "MXFP4"}
)
"""Types whose blocks the CUDA kernels read; any other type is expanded to F16 when it is loaded."""

CUDA_ARCHITECTURES = frozenset(
    {"gemma2", "gemma3", "gemma4", "gpt-oss", "laguna", "llama", "mistral3", "qwen2", "qwen2moe", "qwen3", "qwen3moe"}
    | {"deepseek2", "qwen3next", "qwen35", "qwen35moe"}
)
"""Architectures whose operations all have CUDA kernels."""

MAX_EXPERTS, MAX_EXPERTS_USED = 512, 32
"""Experts of a layer, and of a token, that the kernels take; repeated here because planning must not import CUDA."""

CPU_HINT = "use --device cpu"

RECURRENT_HEAD_STEP = 32
LARGEST_TAPS = 32
WEIGHT_ROW_STEP = 32
"""Rows of every weight matrix are multiples of this."""


def missing_on_cuda(shape: ModelShape) -> str | None:
    """What this model needs that has no CUDA kernels yet; None for a model that a GPU can run."""
    for layer in shape.layers:
        experts = layer.experts
        if experts is not None and (experts.n_expert > MAX_EXPERTS or experts.n_used > MAX_EXPERTS_USED):
            return (
                f"layer {layer.layer_idx} takes {experts.n_used} of {experts.n_expert} experts; a GPU takes up to "
                f"{MAX_EXPERTS_USED} of {MAX_EXPERTS}"
            )
    for recurrent in {layer.recurrent for layer in shape.layers if layer.recurrent is not None}:
        if recurrent.head_dim % RECURRENT_HEAD_STEP:
            return f"recurrent heads of {recurrent.head_dim} elements: CUDA has multiples of {RECURRENT_HEAD_STEP}"
        if recurrent.n_taps > LARGEST_TAPS:
            return f"convolutions of {recurrent.n_taps} taps: CUDA has up to {LARGEST_TAPS}"
    if shape.architecture not in CUDA_ARCHITECTURES:
        return f"architecture {shape.architecture} has operations that run on the CPU only so far"
    uneven = next((n_in for n_in in model_of(shape).matmul_inputs(shape) if n_in % WEIGHT_ROW_STEP), None)
    if uneven is not None:
        return f"weight matrices with rows of {uneven} weights: CUDA has multiples of {WEIGHT_ROW_STEP}"
    return None
