"""Products of a few vectors carried out by numpy, lane by lane: right, and the same bits for any number of vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")

from gguf import GGMLQuantizationType

from cuda_kernels.matvec_mma import MmaUnits
from cuda_kernels.row_units import RowUnits
from cuda_kernels.weight_units import UNIT_FORMATS, Unit
from cuda_kernels.weights import WeightGeometry
from scripts.cuda_checks.weights import exact_weights, random_blocks
from tests.cuda.numpy_emitter import LANES, NumpyEmitter
from tests.cuda.test_fragments import split_on_host

N_ROWS = 16
LANE_WORDS = LANES.astype(np.uint32)


class Products:
    """A matrix, vectors and their scales in one memory."""

    def __init__(self, weight_type: GGMLQuantizationType, n_cols: int, n_vectors: int) -> None:
        rng = np.random.default_rng(n_cols)
        self.geometry = WeightGeometry(weight_type=weight_type, n_rows=N_ROWS, n_cols=n_cols)
        blocks = random_blocks(self.geometry, rng)
        quants = rng.integers(-127, 128, (n_vectors, n_cols)).astype(np.int8)
        scales = np.empty((n_vectors, n_cols // 16, 2), np.float32)
        scales[..., 0] = np.repeat(rng.random((n_vectors, n_cols // 32)) + 0.5, 2, axis=1)
        scales[..., 1] = quants.reshape(n_vectors, -1, 16).sum(axis=-1)
        self.exact = (
            exact_weights(self.geometry, blocks).astype(np.float64)
            @ (quants.reshape(n_vectors, -1, 16) * scales[..., :1].astype(np.float64)).reshape(n_vectors, -1).T
        )
        parts = [split_on_host(self.geometry, blocks), quants.view(np.uint8), scales.view(np.uint8)]
        memory, starts = np.zeros(0, np.uint8), []
        for part in parts:
            memory = np.concatenate([memory, np.zeros(-memory.size % 256, np.uint8)])
            starts.append(memory.size)
            memory = np.concatenate([memory, part.reshape(-1)])
        self.emit = NumpyEmitter(memory, np.zeros(2 * 8 * n_vectors * 4 * 4, np.uint8))
        self.places = [np.full(32, start, np.int64) for start in starts[1:]]
        self.n_units = n_cols // UNIT_FORMATS[weight_type].elements

    def row(self, rows: np.ndarray) -> list[np.ndarray]:
        """Address of a row, per lane, in each plane."""
        geometry = self.geometry
        places = zip(geometry.plane_offsets, geometry.row_strides, strict=True)
        return [(offset + rows * stride).astype(np.int64) for offset, stride in places]

    def load(self, rows: np.ndarray, units: np.ndarray) -> list[np.ndarray]:
        unit_format = UNIT_FORMATS[self.geometry.weight_type]
        step, lane = (units // 32).astype(np.uint32), (units % 32).astype(np.uint32)
        return unit_format.load(self.emit, self.row(rows), Unit.of(self.emit, step, lane))


def by_lanes(products: Products, row: int, v: int) -> np.float32:
    """One row and vector as ``matvec`` reduces them."""
    emit, units = products.emit, RowUnits(products.geometry.weight_type, 1, 1)
    n_cols = emit.word(products.geometry.n_cols)
    vectors, scales = (place + v * step for place, step in zip(products.places, strides(products), strict=True))
    sums = [emit.float(0.0)]
    for step in range(-(-products.n_units // 32)):
        number = np.minimum(32 * step + LANES, products.n_units - 1)
        words = products.load(np.full(32, row), number)
        at, lane = (number // 32).astype(np.uint32), (number % 32).astype(np.uint32)
        added = units._add_quants(emit, sums, words, at, lane, vectors, scales, n_cols)
        sums = [np.where(32 * step + LANES < products.n_units, added[0], sums[0])]
    return units._total(emit, sums, LANE_WORDS)[0]


def strides(products: Products) -> tuple[int, int]:
    return products.geometry.n_cols, products.geometry.n_cols // 16 * 8


def by_warps(products: Products, n_vectors: int) -> np.ndarray:
    """16 rows as ``matvec_mma`` reduces them, float32 [n_rows, n_vectors]."""
    emit, units = products.emit, MmaUnits(products.geometry.weight_type, n_vectors)
    n_cols = emit.word(products.geometry.n_cols)
    g, t = LANES // 4, LANES % 4
    partial = np.zeros((8, N_ROWS, n_vectors, 4), np.float32)
    for warp in range(8):
        sums: Any = [emit.float(0.0)] * (2 * n_vectors)
        for step in range(-(-products.n_units // 32)):
            wanted = 32 * step + 4 * warp + t
            number = np.minimum(wanted, products.n_units - 1)
            near, far = (products.load(g + first, number) for first in (0, 8))
            at, lane = (number // 32).astype(np.uint32), (number % 32).astype(np.uint32)
            added = units._add(emit, sums, near, far, at, lane, LANE_WORDS, *products.places, n_cols)
            sums = units._keep(emit, (wanted < products.n_units).astype(np.uint32), added, sums)
        units._store(emit, (4 * (g * 4 * n_vectors + t)).astype(np.uint32), sums)
        partial[warp] = emit.shared.view(np.float32)[: partial[warp].size].reshape(partial[warp].shape)
    even = (partial[0] + partial[4]) + (partial[2] + partial[6])
    odd = (partial[1] + partial[5]) + (partial[3] + partial[7])
    lanes = even + odd
    return (lanes[..., 0] + lanes[..., 2]) + (lanes[..., 1] + lanes[..., 3])


@pytest.mark.parametrize("weight_type", UNIT_FORMATS, ids=lambda weight_type: weight_type.name)
@pytest.mark.parametrize("n_vectors", [1, 3, 4])
def test_tensor_cores_give_the_bits_of_one_vector(weight_type: GGMLQuantizationType, n_vectors: int) -> None:
    n_cols = 1536 if weight_type.name.endswith("K") else 1184  # the last step is not full
    products = Products(weight_type, n_cols, n_vectors)
    together = by_warps(products, n_vectors)
    alone = np.array([[by_lanes(products, row, v) for v in range(n_vectors)] for row in (0, 9)])
    np.testing.assert_array_equal(together[[0, 9]], alone)
    np.testing.assert_allclose(together, products.exact, atol=1e-5 * float(np.abs(products.exact).max()))


@pytest.mark.parametrize("n_sums", [1, 2, 3, 12, 16, 32])
def test_totals_are_those_of_a_butterfly_whatever_their_number(n_sums: int) -> None:
    rng = np.random.default_rng(n_sums)
    sums = [rng.standard_normal(32).astype(np.float32) for _ in range(n_sums)]
    units = RowUnits(GGMLQuantizationType.Q4_K, n_sums, 1)
    got = units._total(NumpyEmitter(np.zeros(4, np.uint8)), sums, LANE_WORDS)
    for i, value in enumerate(sums):
        for mask in (16, 8, 4, 2, 1):
            value = value + value[LANES ^ mask]
        lanes = slice(i * units.lanes_per_total, (i + 1) * units.lanes_per_total)
        np.testing.assert_array_equal(got[lanes], value[lanes])
