"""Sixteen rows times several vectors by tensor cores, carried out by numpy: the bits of products lane by lane."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")

from gguf import GGMLQuantizationType

from cuda_kernels.team_tiles import STAGE_BYTES, TEAM_TYPES, TEAM_WARPS, TILE_ROWS, TeamTile
from cuda_kernels.weights import MAX_PLANES
from tests.cuda.numpy_emitter import LANES, NumpyEmitter
from tests.cuda.test_product_lanes import LANE_WORDS, Products, by_lanes

N_COLS = 1792  # seven blocks: one warp has one fewer, and the d of odd rows begin in the middle of a word


def in_shared_memory(products: Products, tile: TeamTile) -> np.ndarray:
    """Quants of every unit: [vector, quad, group, byte], then the scale and both sums of its blocks: [pair, vector]."""
    n_vectors = tile.n_vectors
    places = np.minimum(np.arange(tile.n_places), n_vectors - 1)
    blocks = products.quants[places].reshape(tile.n_places, -1, 2, 4, 2, 4, 4)  # block, pair, unit, half, quad, byte
    pieces = blocks.transpose(1, 3, 0, 5, 2, 4, 6)
    scales = products.scales[places, ::2, 0].reshape(tile.n_places, -1, 2, 4).transpose(1, 3, 2, 0)
    sums = products.scales[places, :, 1].astype(np.int16).reshape(tile.n_places, -1, 2, 4, 2)
    packed = np.ascontiguousarray(sums.transpose(1, 3, 2, 0, 4)).view(np.uint32)[..., 0]
    both = np.stack([np.ascontiguousarray(scales).view(np.uint32), packed], axis=-1)
    return np.concatenate([np.ascontiguousarray(pieces).view(np.uint8).reshape(-1), both.view(np.uint8).reshape(-1)])


class CopyingEmitter(NumpyEmitter):
    """Copies arrive at once."""

    def copy_4_async(self, shared: np.ndarray, address: np.ndarray) -> None:
        self.store_shared_words(shared, 0, self.load_cached(address, 0, 1))

    def copy_16_async(self, shared: np.ndarray, address: np.ndarray, *_: Any) -> None:
        self.store_shared_words(shared, 0, self.load_cached(address, 0, 4))


def by_team(products: Products, n_vectors: int) -> np.ndarray:
    """The rows of a tile, float32 [TILE_ROWS, n_vectors]."""
    n_blocks = N_COLS // 256
    tile = TeamTile(products.geometry.weight_type, n_vectors, n_blocks)
    vectors = in_shared_memory(products, tile)
    stage = vectors.size + -vectors.size % 16
    shared = np.zeros(stage + STAGE_BYTES[tile.weight_type], np.uint8)
    shared[: vectors.size] = vectors
    emit = CopyingEmitter(products.emit.memory, shared)
    planes = products.row(np.zeros(32, np.int64))
    strides = [np.full(32, stride, np.int64) for stride in products.geometry.row_strides]
    planes, strides = (some + some[:1] * (MAX_PLANES - len(some)) for some in (planes, strides))
    of_warps = []
    for warp in range(TEAM_WARPS):
        sums = [emit.float(0.0)] * tile.n_sums
        addresses = tile._begin(emit, planes, strides, emit.word(warp), LANE_WORDS)
        for block in range(warp, n_blocks, TEAM_WARPS):
            addresses = tile._bring(emit, emit.word(stage), addresses, LANE_WORDS)
            x_at, scales_at = block * tile.block_bytes, n_blocks * tile.block_bytes + block * tile.scale_bytes
            at = (emit.word(number) for number in (stage, block, x_at, scales_at))
            sums = tile._add(emit, sums, *at, LANE_WORDS)
        of_warps.append(tile._total(emit, sums))
    found = np.full((TILE_ROWS, tile.n_places), np.nan, np.float32)
    for i, (a, b, c, d) in enumerate(zip(*of_warps, strict=True)):
        found[LANES // 4 + 8 * (i // tile.n_own), tile.n_own * (LANES % 4) + i % tile.n_own] = (a + b) + (c + d)
    return found[:, :n_vectors]


@pytest.mark.parametrize("weight_type", TEAM_TYPES, ids=lambda weight_type: weight_type.name)
@pytest.mark.parametrize("n_vectors", [3, 8])
def test_a_team_finds_the_bits_of_lanes(weight_type: GGMLQuantizationType, n_vectors: int) -> None:
    products = Products(weight_type, N_COLS, n_vectors)
    found = by_team(products, n_vectors)
    for row, vectors in ((0, 2), (9, 1), (14, 2)):
        np.testing.assert_array_equal(by_lanes(products, row, 2, vectors), found[row : row + 2, :vectors])
    np.testing.assert_allclose(found, products.exact, atol=1e-5 * float(np.abs(products.exact).max()))
