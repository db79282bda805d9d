"""One file per model family: the forward pass over the operation set, and the workspace it needs."""

from __future__ import annotations

from types import ModuleType

from kvs_core.model_shape import ModelShape
from kvs_core.models import llama

__all__ = ["MODELS", "model_of"]

MODELS = {"llama": llama}


def model_of(shape: ModelShape) -> ModuleType:
    """The family's module: ``plan_workspace``, ``forward`` and ``logits``."""
    return MODELS[shape.architecture]
