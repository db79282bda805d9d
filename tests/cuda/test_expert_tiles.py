"""Tiles of expert products carried out by numpy, thread by thread: what is in shared memory multiplies as it should."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")

from gguf import GGMLQuantizationType as Q

from cuda_kernels.activation import Activation
from cuda_kernels.expert_tiles import N_THREADS, TILE_ROWS, ExpertTile
from cuda_kernels.weights import MAX_PLANES, WeightGeometry
from scripts.cuda_checks.weights import exact_weights, random_blocks
from tests.cuda.host_layout import laid_out_on_host
from tests.cuda.numpy_emitter import LANES, NumpyEmitter

N_EXPERT, N_VALID = 2, 50
LANE_WORDS = LANES.astype(np.uint32)


def threads() -> list[np.ndarray]:
    return [LANE_WORDS + np.uint32(32 * warp) for warp in range(N_THREADS // 32)]


class Block:
    """One block's memory: weights of two experts, inputs in another order, rings of one step."""

    def __init__(
        self, weight_type: Q, tile_pairs: int, activation: Activation | None, n_rows: int, n_cols: int
    ) -> None:
        rng = np.random.default_rng(n_cols)
        self.tile = ExpertTile(weight_type, tile_pairs, activation, has_bias=False)
        self.n_rows, self.n_cols = n_rows, n_cols
        self.geometry = WeightGeometry(weight_type=weight_type, n_rows=N_EXPERT * n_rows, n_cols=n_cols)
        blocks = [random_blocks(self.geometry, rng) for _ in range(2)]
        self.rows = [exact_weights(self.geometry, part).reshape(N_EXPERT, n_rows, n_cols) for part in blocks]
        self.inputs = rng.standard_normal((tile_pairs, n_cols)).astype(np.float16)
        self.ids = rng.permutation(tile_pairs).astype(np.uint32)
        parts = [*(laid_out_on_host(self.geometry, part) for part in blocks), self.inputs.view(np.uint8).reshape(-1)]
        memory, self.starts = np.zeros(0, np.uint8), []
        for part in parts:
            memory = np.concatenate([memory, np.zeros(-memory.size % 256, np.uint8)])
            self.starts.append(memory.size)
            memory = np.concatenate([memory, part])
        self.ids_at = self.tile.inputs_bytes + self.tile.weights_bytes
        shared = np.full(self.ids_at + 4 * tile_pairs, 0xFF, np.uint8)
        shared[self.ids_at :] = self.ids.view(np.uint8)
        self.emit = NumpyEmitter(memory, shared)

    def planes(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        unused = MAX_PLANES - len(self.geometry.plane_offsets)
        offsets, strides = [*self.geometry.plane_offsets, *[0] * unused], [*self.geometry.row_strides, *[0] * unused]
        planes = [np.full(32, start + offset, np.int64) for start in self.starts[:2] for offset in offsets]
        return planes, [np.full(32, stride, np.int64) for stride in strides]

    def run(self, expert: int, first_row: int) -> list[list[np.ndarray]]:
        """Sums of every warp."""
        emit, tile = self.emit, self.tile
        planes, strides = self.planes()
        word, expert_row = emit.word, np.full(32, expert * self.n_rows, np.int64)
        sums = [[emit.float(0.0)] * tile.n_sums for _ in threads()]
        inputs_at, weights_at, n_cols = word(0), word(tile.inputs_bytes), word(self.n_cols)
        for step in range(-(-self.n_cols // 128)):
            for tid in threads():
                rest = (expert_row, word(first_row), word(self.n_rows), tid, word(step), n_cols)
                loaded = tile._load(emit, planes, strides, *rest)
                assert len(loaded) == tile.n_own * tile.n_words
                tile._store(emit, loaded, weights_at, tid, word(step), n_cols)
                inputs = np.full(32, self.starts[2], np.int64)
                tile._start(emit, inputs_at, inputs, word(self.ids_at), word(N_VALID), tid, word(step), n_cols)
            for warp in range(len(sums)):
                sums[warp] = tile._multiply(emit, sums[warp], inputs_at, weights_at, word(warp), LANE_WORDS)
        return sums

    def expected(self, matrix: int, expert: int) -> np.ndarray:
        """float64 [tile_pairs, n_rows]: operands rounded to float16, rows that are no pairs 0."""
        x = self.inputs[self.ids].astype(np.float64)
        x[N_VALID:] = 0.0
        return np.asarray(x @ self.rows[matrix][expert].astype(np.float16).astype(np.float64).T)


def collect(block: Block, sums: list[list[np.ndarray]]) -> np.ndarray:
    """float32 [tile_pairs, TILE_ROWS] from the registers of all warps."""
    tile, emit = block.tile, block.emit
    out = np.full((tile.tile_pairs, TILE_ROWS), np.nan, np.float32)
    for warp, own in enumerate(sums):
        _, first_row = tile._warp_place(emit, emit.word(warp))
        for at, pair, j in tile._results(emit, emit.word(warp), LANE_WORDS):
            row = first_row + 8 * j + 2 * (LANE_WORDS & 3)
            out[pair, row], out[pair, row + 1] = own[at], own[at + 1]
    return out


CASES = [(kind, 64) for kind in (Q.Q4_K, Q.Q6_K, Q.Q2_K, Q.Q8_0, Q.MXFP4, Q.F16, Q.F32)] + [
    (Q.Q3_K, 128),
    (Q.Q5_1, 128),
]


@pytest.mark.parametrize(("weight_type", "tile_pairs"), CASES, ids=lambda case: getattr(case, "name", str(case)))
def test_a_tile_is_the_product_of_its_rows(weight_type: Q, tile_pairs: int) -> None:
    n_cols = 512 if weight_type.name.endswith("K") else 160  # the last step is not full
    block = Block(weight_type, tile_pairs, None, 80, n_cols)
    got = collect(block, block.run(expert=1, first_row=64))
    expected = block.expected(0, 1)[:, 64:]
    np.testing.assert_allclose(got[:, :16], expected, atol=1e-5 * float(np.abs(expected).max()))


def test_gate_and_up_take_turns() -> None:
    block = Block(Q.Q4_0, 64, Activation.SILU, 40, 160)
    got = collect(block, block.run(expert=1, first_row=32))
    for matrix in range(2):
        rows = got.reshape(64, 4, 2, 8)[:, 0, matrix]  # eight rows are left from row 32 on
        expected = block.expected(matrix, 1)[:, 32:]
        np.testing.assert_allclose(rows, expected, atol=1e-5 * float(np.abs(expected).max()))
