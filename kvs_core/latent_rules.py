"""What `validate` asks about models with a latent cache, whose values are the first part of their keys."""

from __future__ import annotations

from collections.abc import Iterator

from kvs_core.config import RunConfig
from kvs_core.kv_layer_types import types_by_layer
from kvs_core.kv_types import KvType, RegionGeometry
from kvs_core.model_shape import LayerCache, LayerShape, ModelShape
from kvs_core.validation_rule import Finding


def latent_types(*, single: bool = False) -> Finding:
    """A rule: keys and values have one type, because the values lie inside the keys.

    ``single`` asks about the layers whose types come from ``--kv-layer-types``, otherwise about all others.
    """

    def find(config: RunConfig, shape: ModelShape | None) -> str | None:
        for layer, type_k, type_v in _latent_layers(config, shape, single=single):
            if type_k is not type_v:
                return (
                    f"the latent cache of layer {layer.layer_idx} has its values inside its keys, so both have one "
                    f"type; keys are {type_k.value}, values {type_v.value}"
                )
        return None

    return find


def latent_rows(*, single: bool = False) -> Finding:
    """A rule: values end where a block ends, for types that are not turbo; rows of keys are not padded either.

    ``single`` as in ``latent_types``.
    """

    def find(config: RunConfig, shape: ModelShape | None) -> str | None:
        for layer, kv_type, _ in _latent_layers(config, shape, single=single):
            for head_dim in () if kv_type.is_turbo else (layer.head_dim_k, layer.head_dim_v):
                if head_dim % kv_type.row_step:
                    return (
                        f"the head size {head_dim} of the latent cache of layer {layer.layer_idx} is not a multiple of "
                        f"{kv_type.row_step}, which {kv_type.value} needs"
                    )
        return None

    return find


def latent_groups(*, single: bool = False) -> Finding:
    """A rule: groups of turbo types end where the values end, or these could not be rotated back alone.

    ``single`` as in ``latent_types``.
    """

    def find(config: RunConfig, shape: ModelShape | None) -> str | None:
        for layer, kv_type, _ in _latent_layers(config, shape, single=single):
            if not kv_type.is_turbo:
                continue
            region = RegionGeometry(kv_type=kv_type, head_dim=kv_type.cached_head_dim(layer.head_dim_k), page_tokens=1)
            if layer.head_dim_v % region.group_elements:
                return (
                    f"the {layer.head_dim_v} values of layer {layer.layer_idx} are no whole groups of "
                    f"{region.group_elements} elements of the keys they are part of"
                )
        return None

    return find


def _latent_layers(
    config: RunConfig, shape: ModelShape | None, *, single: bool
) -> Iterator[tuple[LayerShape, KvType, KvType]]:
    """Layers with a latent cache whose pair of types has the origin that ``single`` says."""
    if shape is None:
        return
    common = (config.type_k, config.type_v)
    for layer_idx, pair in types_by_layer(shape, *common, config.layer_types).items():
        layer = shape.layers[layer_idx]
        if layer.cache is LayerCache.LATENT_KV and (pair != common) is single:
            yield layer, *pair
