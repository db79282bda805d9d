"""What products do with an input that is not quantised yet, carried out by numpy for one vector, warp by warp."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")

from cuda_kernels.quantise import NORM_THREADS
from cuda_kernels.vector_input import MOST_QUADS, PARTIAL_BYTES, _Quads
from tests.cuda.numpy_emitter import LANES, NumpyEmitter

LANE_WORDS = LANES.astype(np.uint32)


def quantised(
    x: np.ndarray, weight: np.ndarray, n_threads: int, factor: float, *, in_halves: bool, n_round: int
) -> tuple[NumpyEmitter, int]:
    """The emitter after every warp has done its part; the floats of the result begin at the address returned."""
    n_cols = x.size
    memory = np.concatenate([x, weight, np.full(n_cols, np.nan, np.float32)]).view(np.uint8)
    emit = NumpyEmitter(memory, np.full(2 * n_cols, 0xEE, np.uint8))
    quads, out = _Quads(n_threads, n_cols, in_halves=in_halves, n_round=n_round), 8 * n_cols
    address = lambda value: np.full(32, value, np.int64)  # noqa: E731
    for warp in range(n_threads // 32):
        for begin in range(0, n_cols // 4, n_round):
            first = emit.word(begin + warp * 32) + LANE_WORDS
            values, weights = (quads._load(emit, address(at), first) for at in (0, 4 * n_cols))
            values = quads._normalise(emit, values, weights, emit.float(1.0), emit.float(factor))
            quads._store(emit, values, first, emit.word(0), emit.word(n_cols), address(out), LANE_WORDS)
    return emit, out


@pytest.mark.parametrize(
    ("n_threads", "n_round", "in_halves"),
    [
        (128, NORM_THREADS, False),
        (256, NORM_THREADS, True),
        (512, NORM_THREADS, True),
        (384, MOST_QUADS * 384, True),
        (160, 3 * 160, False),
        (512, 512, True),
    ],
)
@pytest.mark.parametrize("n_cols", [256, 4096, 5376, 11520, 13312])
def test_blocks_are_quantised_where_products_look_for_them(
    n_cols: int, n_threads: int, n_round: int, in_halves: bool
) -> None:
    rng = np.random.default_rng(n_cols)
    x, weight = rng.standard_normal(n_cols, dtype=np.float32), rng.standard_normal(n_cols, dtype=np.float32)
    x[32:64] = 0.0
    emit, out = quantised(x, weight, n_threads, 0.75, in_halves=in_halves, n_round=n_round)
    wanted = x.astype(np.float64) * np.float64(np.float32(0.75)) * weight

    stored = emit.shared[:n_cols]
    if in_halves:  # even pieces of 16 bytes, then odd ones
        stored = np.ascontiguousarray(stored.reshape(2, -1, 16).transpose(1, 0, 2))
    quants = stored.reshape(-1, 32).view(np.int8).astype(np.float64)
    scales = emit.shared[n_cols : n_cols + n_cols // 2].view(np.float32).reshape(-1, 2, 2)
    np.testing.assert_array_equal(scales[:, :, 1], quants.reshape(-1, 2, 16).sum(axis=-1))
    np.testing.assert_array_equal(scales[:, 0, 0], scales[:, 1, 0])
    blocks = wanted.reshape(-1, 32)
    np.testing.assert_allclose(scales[:, 0, 0], np.abs(blocks).max(axis=-1) / 127.0, rtol=1e-6)
    assert (np.abs(quants * scales[:, :1, 0] - blocks) <= 0.5001 * scales[:, :1, 0]).all()
    np.testing.assert_allclose(emit.memory[out:].view(np.float32), wanted, rtol=1e-6)
    assert (emit.shared[n_cols + n_cols // 2 :] == 0xEE).all()


@pytest.mark.parametrize("n_threads", [128, 512])
def test_squares_are_added_by_the_warps_of_a_norm(n_threads: int) -> None:
    n_cols = 4 * NORM_THREADS + 128
    x = np.random.default_rng(3).standard_normal(n_cols, dtype=np.float32)
    emit = NumpyEmitter(x.view(np.uint8).copy(), np.zeros(PARTIAL_BYTES, np.uint8))
    quads = _Quads(n_threads, n_cols, in_halves=True)
    for warp in range(n_threads // 32):
        sums = [emit.float(0.0)] * quads.n
        for begin in range(0, n_cols // 4, NORM_THREADS):
            first = emit.word(begin + warp * 32) + LANE_WORDS
            values = quads._load(emit, np.zeros(32, np.int64), first)
            sums = quads._square(emit, sums, values, emit.float(1.0))
        quads._store_sums(emit, sums, emit.word(0), emit.word(warp), LANE_WORDS)
    by_warp = np.zeros((2, 32, 32, 4))
    by_warp.reshape(-1)[:n_cols] = x.astype(np.float64) ** 2
    np.testing.assert_allclose(emit.shared.view(np.float32), by_warp.sum(axis=(0, 2, 3)), rtol=1e-6)
