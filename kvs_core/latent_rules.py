"""What `validate` asks about models with a latent cache, whose values are the first part of their keys."""

from __future__ import annotations

from kvs_core.config import RunConfig
from kvs_core.kv_layer_types import types_by_layer
from kvs_core.kv_types import RegionGeometry
from kvs_core.model_shape import LayerCache, ModelShape


def find_latent_type_problem(config: RunConfig, shape: ModelShape | None) -> str | None:
    """Keys and values of one type each, though the values lie inside the keys."""
    if shape is None:
        return None
    for layer_idx, (type_k, type_v) in types_by_layer(shape, config.type_k, config.type_v, config.layer_types).items():
        if shape.layers[layer_idx].cache is LayerCache.LATENT_KV and type_k is not type_v:
            return (
                f"the latent cache of layer {layer_idx} has its values inside its keys, so both have one type; "
                f"keys are {type_k.value}"
            )
    return None


def find_latent_group_problem(config: RunConfig, shape: ModelShape | None) -> str | None:
    """A turbo type whose groups do not end where the values end: they could not be rotated back alone."""
    if shape is None:
        return None
    types = types_by_layer(shape, config.type_k, config.type_v, config.layer_types)
    for layer in shape.layers:
        if layer.cache is not LayerCache.LATENT_KV or not types[layer.layer_idx][0].is_turbo:
            continue
        kv_type = types[layer.layer_idx][0]
        region = RegionGeometry(kv_type=kv_type, head_dim=kv_type.cached_head_dim(layer.head_dim_k), page_tokens=1)
        if layer.head_dim_v % region.group_elements:
            return (
                f"the {layer.head_dim_v} values of layer {layer.layer_idx} are no whole groups of "
                f"{region.group_elements} elements of the keys they are part of"
            )
    return None
