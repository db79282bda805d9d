"""Norm, rotary embedding, gate and additions: right, thread-independent, and refused when shapes disagree."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from kvs_core.cpu import elementwise
from kvs_core.cpu.threads import ThreadTeam
from kvs_core.errors import KernelArgumentError
from kvs_core.model_shape import RopeKind
from tests.kernels.compare import assert_as_good_as_plain
from tests.oracles import rows

SEED = 31


@pytest.fixture(scope="module")
def team() -> Iterator[ThreadTeam]:
    with ThreadTeam(3) as team:
        yield team


def normal(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng([SEED, *shape]).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("n_rows", "n"), [(1, 1), (1, 15), (2, 16), (3, 100), (1, 576), (600, 576), (9, 8192), (40, 64)]
)
def test_rms_norm(n_rows: int, n: int, team: ThreadTeam) -> None:
    x, weight = normal(n_rows, n), normal(n)
    out = np.full_like(x, np.nan)
    elementwise.rms_norm(x, weight, 1e-5, out, team)
    # Plain: one sum in float32 from left to right; ours is much shorter chains, then three products.
    mean = np.cumsum(x * x, axis=1, dtype=np.float32)[:, -1:] / np.float32(n)
    plain = x / np.sqrt(mean + np.float32(1e-5)) * weight
    assert_as_good_as_plain(out, rows.rms_norm(x, weight, 1e-5), plain, times=2.0)

    alone = np.full_like(x, np.nan)
    elementwise.rms_norm(x, weight, 1e-5, alone)
    np.testing.assert_array_equal(alone, out)
    elementwise.rms_norm(x, weight, 1e-5, x, team)
    np.testing.assert_array_equal(x, out)


def test_rms_norm_of_zeros_and_of_large_values(team: ThreadTeam) -> None:
    x = np.zeros((3, 64), dtype=np.float32)
    x[1] = 1e15
    x[2] = 3e38
    out = np.full_like(x, np.nan)
    elementwise.rms_norm(x, np.ones(64, dtype=np.float32), 1e-6, out, team)
    np.testing.assert_array_equal(out[0], 0.0)
    np.testing.assert_allclose(out[1:], 1.0, rtol=1e-6)
    x[2, 5] = np.inf
    elementwise.rms_norm(x, np.ones(64, dtype=np.float32), 1e-6, out, team)
    assert np.isnan(out[2, 5]), "what is not finite has to stay so"


@pytest.mark.parametrize("kind", RopeKind)
@pytest.mark.parametrize(("n_pairs", "head_dim"), [(32, 64), (40, 80), (16, 80), (3, 6), (128, 256), (20, 64)])
@pytest.mark.parametrize("first_pos", [0, 8191, 999_000])
def test_rope(kind: RopeKind, n_pairs: int, head_dim: int, first_pos: int, team: ThreadTeam) -> None:
    freqs = (10000.0 ** (-np.arange(n_pairs) / n_pairs)).astype(np.float32)
    x = normal(70, 3, head_dim)
    result = x.copy()
    elementwise.rope(result, first_pos, freqs, 1.25, kind, team)

    neox = kind is RopeKind.NEOX
    exact = rows.rotate(x, first_pos, freqs, 1.25, neox=neox, dtype=np.float64)
    plain = rows.rotate(x, first_pos, freqs, 1.25, neox=neox, dtype=np.float32)
    assert_as_good_as_plain(result, exact, plain, times=2.0)
    np.testing.assert_array_equal(result[..., 2 * n_pairs :], x[..., 2 * n_pairs :])

    one = x[69:].copy()
    elementwise.rope(one, first_pos + 69, freqs, 1.25, kind)
    np.testing.assert_array_equal(one, result[69:])


def test_rope_at_angle_zero_changes_nothing() -> None:
    x = normal(2, 1, 64)
    result = x.copy()
    elementwise.rope(result, 0, np.full(32, 1e-30, dtype=np.float32), 1.0, RopeKind.NORM)
    np.testing.assert_array_equal(result, x)


@pytest.mark.parametrize("shape", [(1, 1), (1, 1536), (7, 33), (100, 1000)])
def test_silu_mul(shape: tuple[int, int], team: ThreadTeam) -> None:
    gate, up = 8 * normal(*shape), normal(*shape)[::-1].copy()
    out = np.full_like(gate, np.nan)
    elementwise.silu_mul(gate, up, out, team)
    assert_as_good_as_plain(out, rows.silu_mul(gate, up), rows.silu_mul(gate, up, dtype=np.float32), times=2.0)
    elementwise.silu_mul(gate, up, gate)
    np.testing.assert_array_equal(gate, out)


def test_silu_of_extremes() -> None:
    gate = np.array([[-np.inf, -1000.0, -80.0, 0.0, 80.0, 1000.0, np.inf, np.nan]], dtype=np.float32)
    out = np.empty_like(gate)
    elementwise.silu_mul(gate, np.ones_like(gate), out)
    np.testing.assert_array_equal(out[0, 3:], [0.0, 80.0, 1000.0, np.inf, np.nan])
    np.testing.assert_array_equal(out[0, 1], 0.0)
    np.testing.assert_allclose(out[0, 2], -80.0 * np.exp(-80.0), rtol=1e-6)
    assert np.isnan(out[0, 0])  # -inf / inf; the exact limit 0 is not worth a select per element


@pytest.mark.parametrize("shape", [(1, 1), (1, 1536), (7, 33), (100, 1000)])
def test_gelu_mul(shape: tuple[int, int], team: ThreadTeam) -> None:
    gate, up = 4 * normal(*shape), normal(*shape)[::-1].copy()
    out = np.full_like(gate, np.nan)
    elementwise.gelu_mul(gate, up, out, team)
    assert_as_good_as_plain(out, rows.gelu_mul(gate, up), rows.gelu_mul(gate, up, dtype=np.float32), times=2.0)
    elementwise.gelu_mul(gate, up, gate)
    np.testing.assert_array_equal(gate, out)


@pytest.mark.parametrize("shape", [(1, 1), (1, 1536), (7, 33), (100, 1000)])
def test_clamped_swiglu(shape: tuple[int, int], team: ThreadTeam) -> None:
    gate, up = 6 * normal(*shape), 6 * normal(*shape)[::-1].copy()
    out = np.full_like(gate, np.nan)
    elementwise.clamped_swiglu(gate, up, out, team)
    plain = rows.clamped_swiglu(gate, up, dtype=np.float32)
    assert_as_good_as_plain(out, rows.clamped_swiglu(gate, up), plain, times=2.0)


def test_clamped_swiglu_of_extremes() -> None:
    gate = np.array([[-1000.0, 0.0, 1000.0, np.inf, np.nan, 1.0]], dtype=np.float32)
    up = np.array([[1.0, 1.0, -1000.0, np.inf, 1.0, np.nan]], dtype=np.float32)
    elementwise.clamped_swiglu(gate, up, gate)
    share = 7.0 / (1.0 + np.exp(-1.702 * 7.0))
    np.testing.assert_allclose(gate[0], [0.0, 0.0, -6.0 * share, 8.0 * share, np.nan, np.nan], rtol=1e-6)


def test_gelu_of_extremes() -> None:
    gate = np.array([[-1000.0, -9.0, -4.0, 0.0, 80.0, 1e30, np.inf, np.nan]], dtype=np.float32)
    out = np.empty_like(gate)
    elementwise.gelu_mul(gate, np.ones_like(gate), out)
    np.testing.assert_array_equal(out[0, [0, 3, 4, 5, 6, 7]], [0.0, 0.0, 80.0, gate[0, 5], np.inf, np.nan])
    # Plain float32 gives 0 at -9 and 3 digits at -4, because 1 + tanh cancels there.
    tail = gate[0, 1:3].astype(np.float64)
    exact = tail / (1.0 + np.exp(-2.0 * np.sqrt(2.0 / np.pi) * (tail + 0.044715 * tail**3)))
    np.testing.assert_allclose(out[0, 1:3], exact, rtol=2e-5)


@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (100, 1000)])
@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_softcap(cap: float, shape: tuple[int, int], team: ThreadTeam) -> None:
    x = 20 * normal(*shape)
    out = x.copy()
    elementwise.softcap(out, cap, team)
    assert_as_good_as_plain(out, rows.softcap(x, cap), rows.softcap(x, cap, dtype=np.float32), times=2.0)


@pytest.mark.parametrize("shape", [(1, 1), (1, 1536), (7, 33), (100, 1000)])
def test_sigmoid_mul(shape: tuple[int, int], team: ThreadTeam) -> None:
    x, gate = normal(*shape), 6 * normal(*shape)[::-1].copy()
    out = x.copy()
    elementwise.sigmoid_mul(out, gate, team)
    exact = x / (1.0 + np.exp(-gate.astype(np.float64)))
    assert_as_good_as_plain(out, exact, x / (np.float32(1.0) + np.exp(-gate)), times=2.0)


def test_sigmoid_mul_of_extremes() -> None:
    x = np.full((1, 5), 3.0, np.float32)
    elementwise.sigmoid_mul(x, np.array([[-np.inf, -1000.0, 1000.0, np.inf, np.nan]], dtype=np.float32))
    np.testing.assert_array_equal(x, [[0.0, 0.0, 3.0, 3.0, np.nan]])


@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (100, 1000)])
def test_scaling_is_that_of_numpy(shape: tuple[int, int], team: ThreadTeam) -> None:
    x = normal(*shape)
    out = x.copy()
    elementwise.scale_in_place(out, 640.0**0.5, team)
    np.testing.assert_array_equal(out, x * np.float32(640.0**0.5))


@pytest.mark.parametrize("shape", [(1, 1), (1, 576), (33, 17), (300, 576)])
def test_additions_are_those_of_numpy(shape: tuple[int, int], team: ThreadTeam) -> None:
    x, y, bias = normal(*shape), normal(*shape)[:, ::-1].copy(), normal(shape[1])
    total = x.copy()
    elementwise.add_in_place(total, y, team)
    np.testing.assert_array_equal(total, x + y)
    elementwise.add_bias(total, bias, team)
    np.testing.assert_array_equal(total, (x + y) + bias)


def test_what_does_not_fit_together_is_refused() -> None:
    x, weight = normal(4, 32), normal(32)
    heads = normal(4, 2, 16)
    freqs = normal(8)
    calls = {
        "x must be": [
            lambda: elementwise.rms_norm(x[0], weight, 1e-5, x[0]),
            lambda: elementwise.rms_norm(x.astype(np.float64), weight, 1e-5, x),
            lambda: elementwise.rope(x, 0, freqs, 1.0, RopeKind.NORM),
            lambda: elementwise.rope(heads[..., :14].copy(), 0, freqs, 1.0, RopeKind.NORM),
            lambda: elementwise.rope(heads[..., ::2], 0, freqs[:2], 1.0, RopeKind.NORM),
            lambda: elementwise.add_in_place(x[:, ::2], x[:, ::2]),
            lambda: elementwise.add_bias(weight, weight),
        ],
        "weight must be": [lambda: elementwise.rms_norm(x, weight[1:], 1e-5, x)],
        "out must be": [
            lambda: elementwise.rms_norm(x, weight, 1e-5, x[:2]),
            lambda: elementwise.silu_mul(x, x, x.astype(np.float64)),
        ],
        "freqs must be": [lambda: elementwise.rope(heads, 0, freqs.astype(np.float64), 1.0, RopeKind.NORM)],
        "gate must be": [
            lambda: elementwise.silu_mul(x[::2], x[::2].copy(), x[::2].copy()),
            lambda: elementwise.sigmoid_mul(x, x[:2]),
        ],
        "up must be": [lambda: elementwise.silu_mul(x, x[:2], x)],
        "y must be": [lambda: elementwise.add_in_place(x, x[:2])],
        "bias must be": [lambda: elementwise.add_bias(x, weight[1:])],
    }
    for message, refused in calls.items():
        for call in refused:
            with pytest.raises(KernelArgumentError, match=message):
                call()


def test_heads_are_padded_with_zeros_and_cut_back() -> None:
    x = normal(5, 3 * 40)
    padded = np.full((5, 3 * 64), np.nan, dtype=np.float32)
    elementwise.resize_heads(x, 3, padded)
    heads = padded.reshape(5, 3, 64)
    np.testing.assert_array_equal(heads[:, :, :40], x.reshape(5, 3, 40))
    assert not heads[:, :, 40:].any()

    back = np.full_like(x, np.nan)
    elementwise.resize_heads(padded, 3, back)
    np.testing.assert_array_equal(back, x)
    with pytest.raises(KernelArgumentError, match="not rows of 7 heads"):
        elementwise.resize_heads(x, 7, padded)
    with pytest.raises(KernelArgumentError, match="out"):
        elementwise.resize_heads(x, 3, padded[:4])
