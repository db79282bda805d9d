"""Rules about the types that keys and values are cached in, on any device."""

from __future__ import annotations

from collections.abc import Iterator

from kvs_core.cached_layers import cached_geometries
from kvs_core.config import RunConfig
from kvs_core.kv_layer_types import count_needed_layers, types_by_layer
from kvs_core.kv_rotation import choose_rotations
from kvs_core.kv_types import KvType, PageGeometry
from kvs_core.latent_rules import latent_groups, latent_rows, latent_types
from kvs_core.model_shape import ModelShape
from kvs_core.validation_rule import Finding

TURBO_KEY_RATIO = 6
"""Query heads per K head from which turbo keys are warned about, as the fork with these types replaces them there."""


def layer_types_beyond_the_model(config: RunConfig, shape: ModelShape | None) -> str | None:
    """A rule for single layers names more of them than there are."""
    if shape is None or not config.layer_types:
        return None
    n_layers = len(types_by_layer(shape, config.type_k, config.type_v, ()))
    needed = max(map(count_needed_layers, config.layer_types))
    if needed <= n_layers:
        return None
    return f"needs {needed} layers that cache keys and values; this model has {n_layers}"


def _heads(
    config: RunConfig, shape: ModelShape | None, part: str, *, single: bool
) -> Iterator[tuple[int, int, KvType]]:
    """Index, head size and type of every layer whose type of ``part`` has the origin that ``single`` says."""
    if shape is None:
        return
    index = "kv".index(part)
    common = (config.type_k, config.type_v)[index]
    for layer_idx, pair in types_by_layer(shape, config.type_k, config.type_v, config.layer_types).items():
        if (pair[index] is not common) is single:
            yield layer_idx, getattr(shape.layers[layer_idx], f"head_dim_{part}"), pair[index]


_SINGLE_LAYER_RULES = (
    latent_types(single=True),
    latent_rows(single=True),
    latent_groups(single=True),
)


def types_of_single_layers(config: RunConfig, shape: ModelShape | None) -> str | None:
    """A layer that cannot cache in the types which ``--kv-layer-types`` gives it."""
    return next((reason for find in _SINGLE_LAYER_RULES if (reason := find(config, shape)) is not None), None)


def rotation_of_nothing(config: RunConfig, shape: ModelShape | None) -> str | None:
    """Rotation is switched off where nothing would be rotated, or everything has to be."""
    types = {config.type_k, config.type_v}
    types |= {kv_type for rule in config.layer_types for kv_type in (rule.type_k, rule.type_v) if kv_type is not None}
    if config.kv_rotate:
        return None
    if not any(kv_type.is_quantised for kv_type in types):
        return "changes nothing: only quantised keys and values are rotated"
    if shape is None or any(map(_obeys_rotation, cached_geometries(config, shape))):
        return None
    return "changes nothing: turbo types are always rotated, other types never where 64 does not divide the head size"


def _obeys_rotation(geometry: PageGeometry) -> bool:
    return choose_rotations(geometry, plain_types=True) != choose_rotations(geometry, plain_types=False)


def turbo_keys_of_many_heads(*, single: bool = False) -> Finding:
    """A rule: turbo keys where many query heads share one K head.

    ``single`` asks about the layers whose type comes from ``--kv-layer-types``, otherwise about all others.
    """

    def find(config: RunConfig, shape: ModelShape | None) -> str | None:
        if shape is None:
            return None
        turbo = [idx for idx, _, kv_type in _heads(config, shape, "k", single=single) if kv_type.is_turbo]
        layers = [shape.layers[layer_idx] for layer_idx in turbo]
        ratio = max((layer.n_head // layer.n_head_kv for layer in layers if layer.n_head_kv), default=0)
        if ratio < TURBO_KEY_RATIO:
            return None
        return (
            f"{ratio} query heads share each K head where keys are turbo: errors of such keys were seen to break "
            "models (perplexity 3556 instead of 6.6 at 7 heads)"
        )

    return find
