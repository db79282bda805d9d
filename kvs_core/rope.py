"""Rotary embedding as numbers: one angle per position for every pair of a head. Rotating is the backends' work."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvs_core.config import RopeOverrides
from kvs_core.errors import UnsupportedError
from kvs_core.model_shape import RopeScaling, RopeShape
from kvs_core.rope_settings import resolve_rope, yarn_growth


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeTable:
    """Pair ``i`` at position ``p`` turns by ``p * freqs[i]`` radians; cosine and sine are times ``magnitude``.

    freqs       float32 [n_rot / 2]
    """

    freqs: NDArray[np.float32]
    magnitude: float


def rope_table_of(
    rope: RopeShape, overrides: RopeOverrides | None = None, *, factors: NDArray[np.float32] | None = None
) -> RopeTable:
    """Angles per position for the model's RoPE and the run's overrides.

    factors   float32 [n_rot / 2] of ``rope_freqs.weight``: every frequency is divided by its factor; None for none
    Raises    UnsupportedError for a scaling without a formula here, or factors of another length.
    Source    YaRN, Peng et al. 2023 (arXiv 2309.00071), with the rounding of llama.cpp.
    """
    settings = rope if overrides is None else resolve_rope(rope, overrides)
    n_pairs = settings.n_rot // 2
    pairs = np.arange(n_pairs)
    trained = settings.freq_base ** (-2.0 * pairs / settings.n_rot)
    if factors is not None:
        if factors.shape != (n_pairs,):
            raise UnsupportedError(
                f"rope_freqs has shape {factors.shape}, needs ({n_pairs},) for {settings.n_rot} dimensions"
            )
        trained = trained / factors.astype(np.float64)

    stretch = settings.factor if settings.factor > 0 else 1.0
    if settings.scaling is RopeScaling.NONE:
        freqs, magnitude = trained, 1.0
    elif settings.scaling is RopeScaling.LINEAR:
        freqs, magnitude = trained / stretch, 1.0
    else:  # YARN
        keep = _share_kept(settings, pairs) * settings.yarn_ext_factor
        freqs = trained / stretch * (1.0 - keep) + trained * keep
        growth = yarn_growth(settings)
        magnitude = (1.0 + growth) / (1.0 + growth * settings.yarn_log_multiplier)
        if settings.scores_grow and settings.yarn_log_multiplier:
            magnitude = 1.0
    return RopeTable(freqs=freqs.astype(np.float32), magnitude=magnitude * settings.attn_factor)


def _share_kept(settings: RopeShape, pairs: NDArray[np.int64]) -> NDArray[np.float64]:
    """How much of each pair's trained frequency YaRN keeps: 1 for fast pairs, 0 for slow ones, a ramp between."""
    low = max(0.0, math.floor(_pair_that_turns(settings, settings.yarn_beta_fast)))
    high = min(settings.n_rot - 1.0, math.ceil(_pair_that_turns(settings, settings.yarn_beta_slow)))
    return np.asarray(1.0 - np.clip((pairs - low) / max(0.001, high - low), 0.0, 1.0))


def _pair_that_turns(settings: RopeShape, n_turns: float) -> float:
    """The pair, as a fraction, that turns ``n_turns`` times within the original context."""
    turns_of_pair_0 = settings.n_ctx_orig / (2.0 * math.pi)
    return settings.n_rot * math.log(turns_of_pair_0 / n_turns) / (2.0 * math.log(settings.freq_base))
