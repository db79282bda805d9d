"""Which layers of a model cache keys and values, in which pages, and which layers read them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvs_core.config import RunConfig
from kvs_core.kv_layer_types import types_by_layer
from kvs_core.kv_types import PageGeometry
from kvs_core.model_shape import LayerCache, LayerShape, ModelShape
from kvs_core.units import ceil_div
from kvs_core.window_cache import WindowLayer, place_windows


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayer:
    """A layer with pages: its index in the model and the byte layout of one of its pages."""

    layer_idx: int
    geometry: PageGeometry


def cached_layers(
    config: RunConfig, shape: ModelShape, n_ctx: int, n_ubatch: int
) -> tuple[tuple[KvLayer, ...], tuple[WindowLayer, ...]]:
    """The layers with pages and those with a window buffer."""
    kv_layers = tuple(
        KvLayer(layer_idx=layer.layer_idx, geometry=geometry_of(config, shape, layer))
        for layer in shape.layers
        if layer.cache in (LayerCache.FULL_KV, LayerCache.LATENT_KV)
    )
    window_layers = place_windows(
        [
            (layer.layer_idx, geometry_of(config, shape, layer), layer.n_swa)
            for layer in shape.layers
            if layer.cache is LayerCache.WINDOW_KV
        ],
        n_ubatch=n_ubatch,
        n_pages=ceil_div(n_ctx, config.page_tokens),
        is_full_size=config.swa_full,
    )
    return kv_layers, window_layers


def readers_of(shape: ModelShape, kv_layers: tuple[KvLayer, ...]) -> tuple[tuple[int, ...], ...]:
    """For each layer with pages, the layers that attend to them: itself, then those without keys of their own."""
    return tuple(
        (kv_layer.layer_idx, *(one.layer_idx for one in shape.layers if one.kv_from == kv_layer.layer_idx))
        for kv_layer in kv_layers
    )


def geometry_of(config: RunConfig, shape: ModelShape, layer: LayerShape) -> PageGeometry:
    """A page of a layer in its types, heads padded where a type needs it."""
    types = types_by_layer(shape, config.type_k, config.type_v, config.layer_types)
    type_k, type_v = types[layer.layer_idx]
    return PageGeometry(
        page_tokens=config.page_tokens,
        n_head_kv=layer.n_head_kv,
        head_dim_k=type_k.cached_head_dim(layer.head_dim_k),
        head_dim_v=type_v.cached_head_dim(layer.head_dim_v),
        type_k=type_k,
        type_v=type_v,
        v_in_k=layer.cache is LayerCache.LATENT_KV,
    )


def cached_geometries(config: RunConfig, shape: ModelShape) -> set[PageGeometry]:
    """Every kind of page that layers with keys and values have."""
    layers = types_by_layer(shape, config.type_k, config.type_v, config.layer_types)
    return {geometry_of(config, shape, shape.layers[layer_idx]) for layer_idx in layers}


def attention_of(config: RunConfig, shape: ModelShape, cache: LayerCache) -> list[tuple[LayerShape, PageGeometry]]:
    """Every layer that caches in this way, and the geometry of its pages."""
    return [(layer, geometry_of(config, shape, layer)) for layer in shape.layers if layer.cache is cache]


def attention_layers(
    shape: ModelShape, kv_layers: tuple[KvLayer, ...], window_layers: tuple[WindowLayer, ...]
) -> list[tuple[LayerShape, PageGeometry]]:
    """Every layer that attends, and the geometry of the pages it reads."""
    geometries = {layer.layer_idx: layer.geometry for layer in kv_layers}
    geometries |= {layer.layer_idx: layer.geometry for layer in window_layers}
    sources = [(layer, layer.layer_idx if layer.kv_from is None else layer.kv_from) for layer in shape.layers]
    return [(layer, geometries[source_idx]) for layer, source_idx in sources if source_idx in geometries]


def query_heads(attention: list[tuple[LayerShape, PageGeometry]]) -> list[tuple[PageGeometry, int]]:
    return [(geometry, layer.n_head) for layer, geometry in attention]
