"""Model shapes and budgets written by hand, so that plans can be checked against arithmetic on paper."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvs_core.config import RunConfig
from kvs_core.device_budget import DeviceBudget, DeviceKind
from kvs_core.latent_shape import LatentShape
from kvs_core.model_shape import LayerCache, LayerShape, ModelShape, RopeKind, RopeScaling, RopeShape, WeightTotal
from kvs_core.recurrent_shape import RecurrentShape
from kvs_core.units import GIB


def make_shape(
    *, n_layer: int = 30, n_embd: int = 576, n_head: int = 9, n_head_kv: int = 3, head_dim: int = 64, n_ff: int = 1536
) -> ModelShape:
    """By default the shape of SmolLM2-135M."""
    return ModelShape(
        architecture="llama",
        name="by hand",
        n_embd=n_embd,
        n_vocab=49152,
        n_ctx_train=8192,
        rms_eps=1e-5,
        layers=tuple(
            LayerShape(
                layer_idx=index,
                cache=LayerCache.FULL_KV,
                n_head=n_head,
                n_head_kv=n_head_kv,
                head_dim_k=head_dim,
                head_dim_v=head_dim,
                n_ff=n_ff,
            )
            for index in range(n_layer)
        ),
        rope=RopeShape(
            kind=RopeKind.NORM,
            n_rot=head_dim,
            freq_base=100000.0,
            scaling=RopeScaling.LINEAR,
            factor=0.0,
            n_ctx_orig=8192,
            attn_factor=1.0,
            has_factors=False,
        ),
        tied_output=True,
        tensors_bytes=98_000_000,
        weight_types=(WeightTotal(type_name="Q4_1", n_tensors=211, n_elements=134_000_000, n_bytes=98_000_000),),
        file_path="by-hand.gguf",
    )


def make_window_shape(n_swa: int = 512) -> ModelShape:
    """The shape of SmolLM2-135M with a window in two layers of three."""
    shape = make_shape()
    layers = (
        replace(layer, cache=LayerCache.WINDOW_KV, n_swa=n_swa) if layer.layer_idx % 3 else layer
        for layer in shape.layers
    )
    return replace(shape, layers=tuple(layers))


def make_latent_shape() -> ModelShape:
    """The attention of DeepSeek V2-Lite, dense."""
    latent = LatentShape(q_rank=0, kv_rank=512, n_rot=64, key_dim=192, value_dim=128)
    shape = make_shape(n_layer=27, n_embd=2048, n_head=16, n_head_kv=1, head_dim=576)
    layers = (replace(layer, cache=LayerCache.LATENT_KV, head_dim_v=512, latent=latent) for layer in shape.layers)
    return replace(shape, architecture="deepseek2", layers=tuple(layers), rope=replace(shape.rope, n_rot=64))


# The sizes of the 27B hybrid: 48 value heads of 128 over 16 key heads
LARGE_RECURRENT = RecurrentShape(n_head_k=16, n_head_v=48, head_dim=128, n_taps=4, groups_values=False)


def make_hybrid_shape(recurrent: RecurrentShape = LARGE_RECURRENT) -> ModelShape:
    """The shape of SmolLM2-135M with recurrent layers but for each third."""
    shape = replace(make_shape(), architecture="qwen35")
    layers = (
        layer
        if layer.layer_idx % 3 == 2
        else replace(layer, cache=LayerCache.RECURRENT, recurrent=recurrent, n_head=0, n_head_kv=0)
        for layer in shape.layers
    )
    return replace(shape, layers=tuple(layers))


def make_budget(free_bytes: int = 16 * GIB, n_threads: int = 2) -> DeviceBudget:
    return DeviceBudget(
        kind=DeviceKind.CPU,
        name="test",
        total_bytes=free_bytes,
        free_bytes=free_bytes,
        host_free_bytes=free_bytes,
        n_threads=n_threads,
    )


def make_config(**fields: object) -> RunConfig:
    return RunConfig(model_path=Path("by-hand.gguf"), **fields)  # type: ignore[arg-type]
