"""Models that run on the CPU only, until their operations exist on a GPU. Asked by validate and plan."""

from __future__ import annotations

from kvs_core.model_shape import ModelShape

CPU_HINT = "use --device cpu"


def missing_on_cuda(shape: ModelShape) -> str | None:
    """What this model needs that has no CUDA kernels yet; None for a model that a GPU can run."""
    if any(layer.experts is not None for layer in shape.layers):
        return f"architecture {shape.architecture} has mixture-of-experts layers, which run on the CPU only so far"
    return None
