"""Rules about rotary embedding: settings that contradict each other, change nothing or lead beyond the training."""

from __future__ import annotations

import math

from kvs_core.config import RunConfig
from kvs_core.model_shape import ModelShape, RopeScaling
from kvs_core.validation_rule import Finding


def _stretch(config: RunConfig) -> float:
    """By how much the command line stretches positions; 1.0 when it does not say, or nothing usable."""
    if config.rope.scale is not None:
        return config.rope.scale if 0.0 < config.rope.scale < math.inf else 1.0
    if config.rope.freq_scale is not None and 0.0 < config.rope.freq_scale < math.inf:
        return 1.0 / config.rope.freq_scale
    return 1.0


def two_scales(config: RunConfig, shape: ModelShape | None) -> str | None:
    """The two flags for a stretch of positions are given both."""
    if config.rope.scale is None or config.rope.freq_scale is None:
        return None
    return f"says the same as --rope-freq-scale {config.rope.freq_scale}, which is its inverse"


def scale_without_scaling(config: RunConfig, shape: ModelShape | None) -> str | None:
    """A stretch is asked for and switched off."""
    if config.rope.scaling_type is not RopeScaling.NONE or _stretch(config) == 1.0:
        return None
    return f"contradicts a scale of {_stretch(config):g}"


def number_above(name: str, low: int = 0) -> Finding:
    """A rule: the rope setting ``name`` has to be above ``low`` when it is given."""

    def find(config: RunConfig, shape: ModelShape | None) -> str | None:
        value = getattr(config.rope, name)
        return f"has to be above {low} and finite" if value is not None and not low < value < math.inf else None

    return find


def beyond_training(config: RunConfig, shape: ModelShape | None) -> str | None:
    """The context is longer than what the model was trained for."""
    if shape is None or not config.n_ctx or config.rope.freq_base is not None:
        return None
    reach = int(shape.n_ctx_train * max(_stretch(config), 1.0))
    if config.n_ctx <= reach:
        return None
    stretched = f" ({reach} with the scale given)" if reach != shape.n_ctx_train else ""
    return (
        f"beyond the training length of {shape.n_ctx_train} tokens{stretched}; the text will probably get worse there"
    )


def scaling_without_scale(config: RunConfig, shape: ModelShape | None) -> str | None:
    """A kind of scaling is named that nothing is scaled by."""
    if config.rope.scaling_type not in (RopeScaling.LINEAR, RopeScaling.YARN) or shape is None:
        return None
    if _stretch(config) != 1.0 or shape.rope.factor not in (0.0, 1.0):
        return None
    return "changes nothing without a scale"


def yarn_settings_without_yarn(config: RunConfig, shape: ModelShape | None) -> str | None:
    """YaRN's own settings are given without YaRN."""
    rope = config.rope
    given = (rope.yarn_orig_ctx, rope.yarn_ext_factor, rope.yarn_attn_factor, rope.yarn_beta_fast, rope.yarn_beta_slow)
    if all(value is None for value in given):
        return None
    if rope.scaling_type is not None:
        is_yarn = rope.scaling_type is RopeScaling.YARN
    else:
        is_yarn = shape is None or shape.rope.scaling is RopeScaling.YARN
    return None if is_yarn else "the YaRN settings change nothing without YaRN scaling"
