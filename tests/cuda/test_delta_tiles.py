"""The fragments of recurrent layers carried out by numpy: the delta rule in tiles of columns, the window of taps."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")

from cuda_kernels.convolution import RUN_TOKENS, Window
from cuda_kernels.delta_tiles import HEAD_DIM_STEP, TILE_COLUMNS, DeltaTile, tile_elements
from kvs_core import cuda_support
from tests.cuda.numpy_emitter import LANES, NumpyEmitter
from tests.kernels.compare import assert_as_good_as_plain
from tests.oracles import delta_net as oracle

N_TOKENS = 5


@pytest.mark.parametrize("head_dim", [32, 96, 128])
def test_tiles_follow_the_delta_rule(head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    q, k = (oracle.unit_heads(rng.standard_normal((N_TOKENS, head_dim)), 1e-6) for _ in range(2))
    v, share = rng.standard_normal((N_TOKENS, head_dim)), rng.random(N_TOKENS)
    log_kept, begun = -rng.random(N_TOKENS), rng.standard_normal((head_dim, head_dim))
    arguments = [array.astype(np.float32) for array in (q, k, v, share, log_kept, begun)]
    exact, exact_matrix = oracle.delta_rule(*(array.astype(np.float64) for array in arguments))
    plain, plain_matrix = oracle.delta_rule(*arguments)
    queries, keys, values, shares, logs, matrix = arguments
    queries = queries / np.sqrt(np.float32(head_dim))

    rows, columns = tile_elements(head_dim)
    memory = matrix[rows, columns].view(np.uint8)
    shared = np.concatenate([keys.reshape(-1), queries.reshape(-1)]).view(np.uint8)
    emit = NumpyEmitter(memory, shared)
    tile = DeltaTile(head_dim)
    own = (LANES // 4 * 16).astype(np.uint32)
    out = np.full((N_TOKENS, head_dim), np.nan, np.float32)
    for tile_idx in range(head_dim // TILE_COLUMNS):
        columns_of_lane = [TILE_COLUMNS * tile_idx + LANES % 4 * 4 + i for i in range(4)]
        place = tile_idx * tile.n_bytes + LANES * 16
        elements, key = tile._load(emit, place), tile._rows(emit, own)
        for token in range(N_TOKENS + 1):
            query = own + np.uint32(4 * head_dim * (N_TOKENS + max(token - 1, 0)))
            if token < N_TOKENS:
                scalars = [values[token, column] for column in columns_of_lane]
                scalars += [np.full(32, x[token], np.float32) for x in (np.exp(logs), shares)]
                next_key = own + np.uint32(4 * head_dim * (token + 1))
                stepped = tile._step(emit, elements, key, next_key, query, *scalars)
                elements, outs = stepped[: tile.n_elements], stepped[tile.n_elements + tile.n_rows :]
                key = stepped[tile.n_elements : tile.n_elements + tile.n_rows]
            else:
                outs = tile._multiply(emit, elements, query)
            for column, values_of_lane in zip(columns_of_lane, outs, strict=True):
                if token:
                    out[token - 1, column] = values_of_lane
        tile._store(emit, place, elements)
    stepped = np.empty_like(matrix)
    stepped[rows, columns] = memory.view(np.float32)
    assert_as_good_as_plain(out, exact, plain, times=4.0)
    assert_as_good_as_plain(stepped, exact_matrix, plain_matrix, times=4.0)


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_every_element_of_a_head_has_one_place_in_its_tiles(head_dim: int) -> None:
    rows, columns = tile_elements(head_dim)
    assert sorted((rows * head_dim + columns).tolist()) == list(range(head_dim**2))


def test_a_head_that_lanes_cannot_share_is_refused() -> None:
    with pytest.raises(ValueError, match="heads of 48 elements; a multiple of 32 needed"):
        DeltaTile(48)


@pytest.mark.parametrize("n_taps", [2, 4, 5])
def test_a_window_moves_on_by_one_input(n_taps: int) -> None:
    rng = np.random.default_rng(n_taps)
    inputs, taps = rng.standard_normal((7, 32), dtype=np.float32), rng.standard_normal((n_taps, 32), dtype=np.float32)
    emit = NumpyEmitter(np.concatenate([inputs, taps]).reshape(-1).view(np.uint8))
    window = Window(n_taps, 32)
    held = window._load(emit, LANES * 4)
    factors = window._load_taps(emit, 4 * 32 * 7 + LANES * 4)
    for token in range(n_taps - 1, 7):
        total, *held = window._move(emit, held, factors, inputs[token])
        expected = (inputs[token - n_taps + 1 : token + 1].astype(np.float64) * taps).sum(axis=0)
        np.testing.assert_allclose(total, expected, atol=1e-6 * n_taps)
        np.testing.assert_array_equal(np.stack(held), inputs[token - n_taps + 2 : token + 1])


def test_the_planner_knows_the_limits_of_recurrent_kernels() -> None:
    assert (cuda_support.RECURRENT_HEAD_STEP, cuda_support.LARGEST_TAPS) == (HEAD_DIM_STEP, RUN_TOKENS)
