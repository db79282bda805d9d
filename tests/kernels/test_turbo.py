"""TurboQuant's KV types: their error on normal data, their signs, and that every element gets its nearest level."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvs_core.cpu.rotation import rotate_heads
from kvs_core.cpu.store import store_kv
from kvs_core.kv_rotation import TURBO_SIGNS, HeadRotations, Rotation, choose_rotations
from kvs_core.kv_types import KvType
from tests.kernels.paged_cache import empty_pages, geometry_of
from tests.oracles.attention import read_kv
from tests.oracles.kv_formats import hadamard, turbo_group, turbo_levels

SEED = 20263
TURBO = [KvType.TURBO2, KvType.TURBO3, KvType.TURBO4]
HALF_ULP = 2.0**-11


def stored(rows: npt.NDArray[np.float32], kv_type: KvType) -> npt.NDArray[np.float64]:
    """What the cache holds of float32 [n_rows, head_dim], which are rotated already or need not be."""
    n_rows, head_dim = rows.shape
    geometry = geometry_of(n_head_kv=1, head_dim_k=head_dim, page_tokens=256, type_k=kv_type.value)
    arena, offsets = empty_pages(np.random.default_rng(SEED), geometry, -(-n_rows // 256))
    store_kv(arena, geometry, offsets, 0, rows[:, None], rows[:, None])
    k, v = read_kv(arena, geometry, offsets, n_rows)
    np.testing.assert_array_equal(k, v)
    return k[:, 0]


def test_signs_are_the_published_draws() -> None:
    rng = np.random.default_rng(42)

    for signs, n_negative in zip(TURBO_SIGNS, (60, 70), strict=True):
        assert list(signs) == rng.choice([-1, 1], size=128).tolist()
        assert signs.count(-1) == n_negative


@pytest.mark.parametrize(
    ("kv_type", "published"), [(KvType.TURBO2, 0.1189), (KvType.TURBO3, 0.0338), (KvType.TURBO4, 0.00919)]
)
def test_error_on_normal_data_is_the_published_share_of_the_variance(kv_type: KvType, published: float) -> None:
    rows = np.random.default_rng(SEED).standard_normal((4096, 128), dtype=np.float32)

    error = np.mean((stored(rows, kv_type) - rows) ** 2) / np.mean(rows.astype(np.float64) ** 2)

    assert error == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("kv_type", TURBO)
def test_each_element_gets_the_nearest_level_and_a_group_keeps_its_length(kv_type: KvType, head_dim: int) -> None:
    rng = np.random.default_rng(SEED)
    group = turbo_group(head_dim)
    rows = (rng.standard_normal((50, head_dim)) * 10.0 ** rng.uniform(-2, 2, (50, 1))).astype(np.float32)
    groups = rows.reshape(-1, group).astype(np.float64)
    held = stored(rows, kv_type).reshape(-1, group)

    norms = np.linalg.norm(groups, axis=1, keepdims=True)
    np.testing.assert_allclose(np.linalg.norm(held, axis=1, keepdims=True), norms, rtol=1.01 * HALF_ULP)
    levels = turbo_levels(kv_type)
    unit = groups / norms * np.sqrt(group / 128)
    distance = np.abs(unit[:, :, None] - levels)
    chosen = np.take_along_axis(distance, _level_indices(held, levels)[:, :, None], axis=2)[:, :, 0]
    # Thresholds are given to six digits, so near the middle either level is right.
    assert (chosen - distance.min(axis=2)).max() < 2e-6


def _level_indices(held: npt.NDArray[np.float64], levels: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Which level each element of a group is a multiple of, found from the group's ratios alone."""
    indices = np.empty(held.shape, dtype=np.int64)
    for row, values in enumerate(held):
        scales = [np.abs(values).max() / level for level in levels if level > 0]
        fits = [np.abs(values[:, None] / scale - levels) for scale in scales]
        best = min(fits, key=lambda fit: fit.min(axis=1).max())
        indices[row] = best.argmin(axis=1)
    return indices


@pytest.mark.parametrize("kv_type", TURBO)
def test_a_group_that_is_not_finite_stays_visible_and_one_of_zeros_is_zero(kv_type: KvType) -> None:
    rows = np.random.default_rng(SEED).standard_normal((4, 256), dtype=np.float32)
    rows[1, 130] = np.nan
    rows[2, 5] = np.inf
    rows[3, 128:] = 0.0

    held = stored(rows, kv_type)

    assert np.isfinite(held[0]).all()
    assert np.isfinite(held[1, :128]).all()
    assert not np.isfinite(held[1, 128:]).any()
    assert not np.isfinite(held[2, :128]).any()
    assert not held[3, 128:].any()


@pytest.mark.parametrize("size", [64, 128])
def test_the_rotation_is_signs_matrix_signs(size: int) -> None:
    x = np.random.default_rng(SEED).standard_normal((5, 2 * size), dtype=np.float32)
    rotated = x.copy()
    rotate_heads(rotated, Rotation(size=size, is_signed=True))

    before, after = (np.array(signs[:size]) for signs in TURBO_SIGNS)
    expected = (x.reshape(5, 2, size).astype(np.float64) * before) @ hadamard(size) * after

    assert np.abs(rotated.reshape(expected.shape) - expected).max() <= 12 * np.finfo(np.float32).eps * np.abs(x).max()


@pytest.mark.parametrize(("head_dim", "size"), [(64, 64), (128, 128), (192, 64), (256, 128)])
def test_turbo_rows_are_rotated_even_if_other_types_are_not(head_dim: int, size: int) -> None:
    geometry = geometry_of(head_dim_k=head_dim, type_k="q8_0", type_v="turbo3")

    chosen = choose_rotations(geometry, plain_types=False)

    assert chosen == HeadRotations(keys=None, values=Rotation(size=size, is_signed=True))
