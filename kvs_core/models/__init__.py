"""One file per model family: the forward pass over the operation set, and the workspace it needs."""

from __future__ import annotations

from types import ModuleType

from kvs_core.model_shape import ModelShape
from kvs_core.models import (
    deepseek2,
    gemma2,
    gemma3,
    gemma4,
    gpt_oss,
    laguna,
    llama,
    mistral3,
    qwen2moe,
    qwen3,
    qwen3next,
    qwen35,
)

__all__ = ["MODELS", "model_of"]

MODELS: dict[str, ModuleType] = {
    "deepseek2": deepseek2,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "gpt-oss": gpt_oss,
    "laguna": laguna,
    "llama": llama,
    "mistral3": mistral3,
    "qwen2": llama,
    "qwen2moe": qwen2moe,
    "qwen3": qwen3,
    "qwen35": qwen35,
    "qwen35moe": qwen35,
    "qwen3moe": qwen3,
    "qwen3next": qwen3next,
}


def model_of(shape: ModelShape) -> ModuleType:
    """The family's module: ``plan_workspace``, ``matmul_inputs``, ``forward`` and ``logits``."""
    return MODELS[shape.architecture]
