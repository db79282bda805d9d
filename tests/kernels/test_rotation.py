"""Rotation of heads: the matrix it stands for, its inverse, and what must not change a bit."""

from __future__ import annotations

import numpy as np
import pytest

from kvs_core.cpu.rotation import rotate_heads
from kvs_core.cpu.threads import ThreadTeam
from kvs_core.errors import KernelArgumentError
from kvs_core.kv_rotation import HeadRotations, Rotation, choose_rotations
from tests.kernels.paged_cache import geometry_of
from tests.oracles.kv_formats import hadamard

SEED = 20262


@pytest.mark.parametrize("size", [64, 128, 256, 512])
def test_rows_are_multiplied_by_the_matrix(size: int) -> None:
    x = np.random.default_rng(SEED).standard_normal((5, 3 * size), dtype=np.float32)
    rotated = x.copy()
    rotate_heads(rotated, Rotation(size=size))

    expected = x.reshape(5, 3, size).astype(np.float64) @ hadamard(size)

    # log2(size) additions and one product, each rounded once; sums are of the size of a row's largest values
    allowed = 12 * np.finfo(np.float32).eps * np.abs(x).max()
    assert np.abs(rotated.reshape(expected.shape) - expected).max() <= allowed


@pytest.mark.parametrize("rotation", [Rotation(size=64), Rotation(size=128, is_signed=True)])
def test_the_inverse_gives_back_the_rows(rotation: Rotation) -> None:
    x = np.random.default_rng(SEED).standard_normal((4, 256), dtype=np.float32)
    twice = x.copy()
    rotate_heads(twice, rotation)
    rotate_heads(twice, rotation, inverse=True)

    np.testing.assert_allclose(twice, x, rtol=0, atol=16 * np.finfo(np.float32).eps * np.abs(x).max())


def test_threads_and_neighbours_do_not_change_a_bit() -> None:
    x = np.random.default_rng(SEED).standard_normal((300, 576), dtype=np.float32)
    together, alone = x.copy(), x.copy()
    with ThreadTeam(2) as team:
        rotate_heads(together, Rotation(size=64), team)
    for row in range(300):
        rotate_heads(alone[row : row + 1], Rotation(size=64))

    np.testing.assert_array_equal(together, alone)


def test_a_row_of_broken_runs_is_refused() -> None:
    with pytest.raises(KernelArgumentError, match="rows of 96 elements are not whole runs of 64"):
        rotate_heads(np.zeros((2, 96), dtype=np.float32), Rotation(size=64))


@pytest.mark.parametrize(
    ("head_dim", "type_k", "type_v", "expected"),
    [
        (64, "q8_0", "q4_0", (64, 64)),
        (128, "q4_1", "q5_0", (128, 64)),
        (192, "q5_1", "f16", (64, None)),
        (256, "bf16", "iq4_nl", (None, 64)),
        (96, "q8_0", "q8_0", None),
        (128, "f16", "f32", None),
    ],
)
def test_sizes_are_those_of_llama_cpp(
    head_dim: int, type_k: str, type_v: str, expected: tuple[int | None, int | None] | None
) -> None:
    chosen = choose_rotations(geometry_of(head_dim_k=head_dim, type_k=type_k, type_v=type_v), plain_types=True)

    if expected is None:
        assert chosen is None
    else:
        keys, values = (None if size is None else Rotation(size=size) for size in expected)
        assert chosen == HeadRotations(keys=keys, values=values)
