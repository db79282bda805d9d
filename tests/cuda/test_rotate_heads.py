"""The rotation of heads as the kernels' intrinsics make it, carried out by numpy: the bits of the CPU backend."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")

from cuda_kernels.rotate_heads import rotate_values
from kvs_core.cpu.rotation import rotate_heads
from kvs_core.kv_rotation import Rotation
from tests.cuda.numpy_emitter import LANES, NumpyEmitter

LANE_WORDS = LANES.astype(np.uint32)


@pytest.mark.parametrize(
    ("size", "n_runs", "is_signed"), [(64, 3, False), (64, 3, True), (128, 2, False), (128, 2, True), (256, 1, False)]
)
def test_rotations_have_the_bits_of_the_cpu(size: int, n_runs: int, is_signed: bool) -> None:
    rotation = Rotation(size=size, is_signed=is_signed)
    row = np.random.default_rng(size).standard_normal((1, size * n_runs), dtype=np.float32)
    emit = NumpyEmitter(np.zeros(4, np.uint8))
    for inverse in (False, True):
        expected = row.copy()
        rotate_heads(expected, rotation, inverse=inverse)
        values = rotate_values(emit, rotation, LANE_WORDS, list(row.reshape(-1, 32)), inverse=inverse)
        np.testing.assert_array_equal(np.stack(values).reshape(row.shape).view(np.uint32), expected.view(np.uint32))


def test_without_a_rotation_nothing_changes_and_cut_runs_are_refused() -> None:
    emit = NumpyEmitter(np.zeros(4, np.uint8))
    values = [np.ones(32, np.float32)] * 3
    assert rotate_values(emit, None, LANE_WORDS, values) is values
    with pytest.raises(ValueError, match="not whole runs of 64"):
        rotate_values(emit, Rotation(size=64), LANE_WORDS, values)
