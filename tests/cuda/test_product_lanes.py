"""Products of a few vectors carried out by numpy, lane by lane: right, and the same bits for any number of them."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from cuda_kernels.row_units import RowUnits, count_row_lanes
from cuda_kernels.weight_units import UNIT_FORMATS
from cuda_kernels.weights import MAX_PLANES, WeightGeometry
from scripts.cuda_checks.weights import exact_weights, random_blocks
from tests.cuda.host_layout import laid_out_on_host
from tests.cuda.numpy_emitter import LANES, NumpyEmitter

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
        self.quants, self.scales = quants, scales
        parts = [laid_out_on_host(self.geometry, blocks), quants.view(np.uint8), scales.view(np.uint8)]
        memory, starts = np.zeros(0, np.uint8), []
        for part in parts:
            memory = np.concatenate([memory, np.zeros(-memory.size % 256, np.uint8)])
            starts.append(memory.size)
            memory = np.concatenate([memory, part.reshape(-1)])
        self.emit = NumpyEmitter(memory, np.zeros(0, np.uint8))
        self.places = [np.full(32, start, np.int64) for start in starts[1:]]

    def row(self, rows: np.ndarray) -> list[np.ndarray]:
        """Address of a row, per lane, in each plane."""
        geometry = self.geometry
        places = zip(geometry.plane_offsets, geometry.row_strides, strict=True)
        return [(offset + rows * stride).astype(np.int64) for offset, stride in places]

    def load(self, units: RowUnits, first_row: int, step: np.ndarray, lane: np.ndarray) -> list[np.ndarray]:
        """Of the rows from ``first_row`` on that a warp reduces together."""
        planes = self.row(np.full(32, first_row))
        strides = [np.full(32, stride, np.int64) for stride in self.geometry.row_strides]
        n_unused = MAX_PLANES - len(planes)
        return units._load(self.emit, *planes, *planes[:1] * n_unused, *strides, *strides[:1] * n_unused, step, lane)


def by_lanes(products: Products, first_row: int, n_rows: int, n_vectors: int) -> np.ndarray:
    """Some rows as one warp reduces them together, float32 [n_rows, n_vectors]."""
    emit, weight_type = products.emit, products.geometry.weight_type
    n_lanes = count_row_lanes(weight_type)
    units = RowUnits(weight_type, n_rows, n_vectors, n_lanes=n_lanes)
    n_units, own = products.geometry.n_cols // units.elements, LANES % n_lanes
    sums = [emit.float(0.0)] * units.n_sums
    for step in range(-(-n_units // n_lanes)):
        number = np.minimum(n_lanes * step + own, n_units - 1)
        at, lane = (number // n_lanes).astype(np.uint32), (number % n_lanes + LANES - own).astype(np.uint32)
        loaded = products.load(units, first_row, at, lane)
        added = units.emit_add(emit, sums, loaded, at, lane, *products.places, emit.word(products.geometry.n_cols))
        is_used = n_lanes * step + own < n_units
        sums = [np.where(is_used, new, old) for new, old in zip(added, sums, strict=True)]
    totals = units._total(emit, sums, LANE_WORDS)
    number = LANES // units.lanes_per_total if n_lanes == 32 else units._number(emit, LANE_WORDS).astype(int)
    given = {int(i): totals[lane] for lane, i in enumerate(number)}
    return np.array([given[i] for i in range(n_rows * n_vectors)], np.float32).reshape(n_rows, n_vectors)


@pytest.mark.parametrize("weight_type", UNIT_FORMATS, ids=lambda weight_type: weight_type.name)
def test_rows_and_vectors_together_have_the_bits_of_each_alone(weight_type: GGMLQuantizationType) -> None:
    n_cols = 1536 if GGML_QUANT_SIZES[weight_type][0] == 256 else 1184  # the last step is not full
    products = Products(weight_type, n_cols, 4)
    together = by_lanes(products, 8, 4, 4)
    np.testing.assert_array_equal(by_lanes(products, 8, 2, 3), together[:2, :3])
    np.testing.assert_array_equal(by_lanes(products, 11, 1, 1), together[3:, :1])
    np.testing.assert_allclose(together, products.exact[8:12], atol=1e-5 * float(np.abs(products.exact).max()))


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
