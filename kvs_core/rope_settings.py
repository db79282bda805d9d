"""The RoPE of a run: what the model file says, changed by the command line. Pure values; angles are in ``rope``."""

from __future__ import annotations

import math
from dataclasses import replace

from kvs_core.config import RopeOverrides
from kvs_core.model_shape import RopeScaling, RopeShape


def resolve_rope(rope: RopeShape, overrides: RopeOverrides) -> RopeShape:
    """The model's RoPE with every override applied.

    ``--rope-scale N`` stretches by N and ``--rope-freq-scale F`` by 1/F; a scaling type of ``none`` ignores both.
    """
    factor = rope.factor
    if overrides.scale is not None:
        factor = overrides.scale
    if overrides.freq_scale is not None:
        factor = 1.0 / overrides.freq_scale
    return replace(
        rope,
        scaling=rope.scaling if overrides.scaling_type is None else overrides.scaling_type,
        factor=factor,
        freq_base=_first(overrides.freq_base, rope.freq_base),
        n_ctx_orig=int(_first(overrides.yarn_orig_ctx, rope.n_ctx_orig)),
        attn_factor=rope.attn_factor * _first(overrides.yarn_attn_factor, 1.0),
        yarn_ext_factor=_first(overrides.yarn_ext_factor, rope.yarn_ext_factor),
        yarn_beta_fast=_first(overrides.yarn_beta_fast, rope.yarn_beta_fast),
        yarn_beta_slow=_first(overrides.yarn_beta_slow, rope.yarn_beta_slow),
    )


def yarn_growth(settings: RopeShape) -> float:
    """By how much YaRN's stretch makes cosine and sine grow before anything is taken back; 0 without YaRN."""
    grows = settings.scaling is RopeScaling.YARN and settings.yarn_ext_factor != 0.0 and settings.factor > 1.0
    return 0.1 * math.log(settings.factor) if grows else 0.0


def score_growth(settings: RopeShape) -> float:
    """What every score is multiplied by, plain and rotated part alike; 1 for models whose cosine and sine grow."""
    if not settings.scores_grow:
        return 1.0
    growth = yarn_growth(settings) * (settings.yarn_log_multiplier or 1.0)
    return (settings.attn_factor * (1.0 + growth)) ** 2


def _first(override: float | None, value: float) -> float:
    return value if override is None else override
