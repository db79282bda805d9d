"""Angles per position: plain, linear and YaRN scaling, frequency factors and overrides."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvs_core.config import RopeOverrides
from kvs_core.errors import UnsupportedError
from kvs_core.model_shape import RopeKind, RopeScaling, RopeShape
from kvs_core.rope import rope_table_of

PLAIN = RopeShape(
    kind=RopeKind.NORM,
    n_rot=64,
    freq_base=10000.0,
    scaling=RopeScaling.LINEAR,
    factor=0.0,
    n_ctx_orig=4096,
    attn_factor=1.0,
    has_factors=False,
)
YARN = replace(PLAIN, scaling=RopeScaling.YARN, factor=4.0)
TRAINED = 10000.0 ** (-2.0 * np.arange(32) / 64)


def test_plain_frequencies_are_powers_of_the_base() -> None:
    table = rope_table_of(PLAIN)
    assert table.freqs.dtype == np.float32
    np.testing.assert_allclose(table.freqs, TRAINED, rtol=1e-7)
    assert table.magnitude == 1.0


def test_linear_scaling_divides_and_none_ignores_the_factor() -> None:
    stretched = replace(PLAIN, factor=8.0)
    np.testing.assert_allclose(rope_table_of(stretched).freqs, TRAINED / 8, rtol=1e-7)
    unscaled = replace(stretched, scaling=RopeScaling.NONE)
    np.testing.assert_allclose(rope_table_of(unscaled).freqs, TRAINED, rtol=1e-7)


def test_factors_divide_each_frequency_and_huge_ones_stop_it() -> None:
    factors = np.linspace(1.0, 8.0, 32, dtype=np.float32)
    factors[-1] = 1e30
    table = rope_table_of(PLAIN, factors=factors)
    np.testing.assert_allclose(table.freqs, TRAINED / factors, rtol=2e-7)
    with pytest.raises(UnsupportedError, match="needs \\(32,\\)"):
        rope_table_of(PLAIN, factors=factors[:16])


def test_yarn_keeps_fast_pairs_slows_slow_ones_and_ramps_between() -> None:
    table = rope_table_of(YARN)
    share = (table.freqs / TRAINED - 0.25) / 0.75  # 1: kept, 0: divided by 4
    # By hand for 64 dimensions, base 10000, 4096 tokens: corr(32) = 10.45, corr(1) = 22.51.
    low, high = 10, 23
    expected = np.clip((high - np.arange(32)) / (high - low), 0.0, 1.0)
    np.testing.assert_allclose(share, expected, atol=1e-6)
    assert table.magnitude == pytest.approx(1.0 + 0.1 * np.log(4.0))
    assert rope_table_of(replace(YARN, attn_factor=1.25)).magnitude == pytest.approx(1.25 * table.magnitude)


def test_yarn_without_a_stretch_is_plain() -> None:
    table = rope_table_of(replace(YARN, factor=1.0))
    np.testing.assert_allclose(table.freqs, TRAINED, rtol=1e-7)
    assert table.magnitude == 1.0


def test_yarn_with_no_extrapolation_is_linear() -> None:
    table = rope_table_of(replace(YARN, yarn_ext_factor=0.0))
    np.testing.assert_allclose(table.freqs, TRAINED / 4, rtol=1e-7)
    assert table.magnitude == 1.0


def test_yarn_ramp_of_no_width_is_a_step() -> None:
    table = rope_table_of(replace(YARN, n_ctx_orig=8, yarn_beta_slow=32.0))
    assert np.isfinite(table.freqs).all()
    np.testing.assert_allclose(table.freqs[1:], TRAINED[1:] / 4, rtol=1e-6)


def test_overrides_of_the_command_line_count() -> None:
    by_scale = rope_table_of(PLAIN, RopeOverrides(scale=8.0))
    np.testing.assert_allclose(by_scale.freqs, TRAINED / 8, rtol=1e-7)
    as_yarn = rope_table_of(PLAIN, RopeOverrides(scaling_type=RopeScaling.YARN, freq_scale=0.25))
    np.testing.assert_array_equal(as_yarn.freqs, rope_table_of(YARN).freqs)
    other_base = rope_table_of(PLAIN, RopeOverrides(freq_base=500.0))
    np.testing.assert_allclose(other_base.freqs[1], 500.0 ** (-2 / 64), rtol=1e-7)
