"""Decode attention of heads of 512 carried out by numpy: four warps, one tile, every cache type."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")

from cuda_kernels.attention_decode_columns import ShareExchange, columns_of, has_columns
from cuda_kernels.attention_decode_mma import N_WARPS
from cuda_kernels.decode_codes import table_of
from cuda_kernels.decode_tiles import TILE_KEYS, KeyTile, are_keys_apart
from cuda_kernels.decode_values import ValueTile
from kvs_core.kv_types import KvType, PageGeometry
from scripts.cuda_checks.paged import make_cache
from tests.cuda.numpy_emitter import LANES, NumpyEmitter
from tests.cuda.test_fragments import outputs_of, row_of_keys

HEAD_DIM = 512
LANE_WORDS = LANES.astype(np.uint32)


def page_of(kv_type: KvType) -> PageGeometry:
    return PageGeometry(
        page_tokens=64, n_head_kv=1, head_dim_k=HEAD_DIM, head_dim_v=HEAD_DIM, type_k=kv_type, type_v=kv_type
    )


@pytest.mark.parametrize("kv_type", [kv_type for kv_type in KvType if kv_type is not KvType.F32])
@pytest.mark.parametrize("n_subs", [1, 2])
def test_warps_that_share_columns_multiply_as_attention_does(kv_type: KvType, n_subs: int) -> None:
    rng = np.random.default_rng(512)
    page, n_keys = page_of(kv_type), TILE_KEYS * n_subs
    cache = make_cache(page, 64, rng)
    queries = rng.standard_normal((8, HEAD_DIM)).astype(np.float32)
    at_queries = -(-page.page_bytes // 16) * 16
    memory = np.zeros(at_queries + queries.nbytes, np.uint8)
    memory[: page.page_bytes] = cache.data[0]
    memory[at_queries:] = queries.view(np.uint8).reshape(-1)
    v_region = columns_of(page.v_region)
    k_tile = KeyTile(columns_of(page.k_region), n_subs, are_apart=are_keys_apart(v_region), row_step=N_WARPS)
    v_tile = ValueTile(v_region, n_subs, row_step=N_WARPS)
    exchange, table = ShareExchange(4 * n_subs), table_of(kv_type, 32)
    shares_at = k_tile.query_bytes
    at_table = shares_at + N_WARPS * exchange.share_bytes
    emit = NumpyEmitter(memory, np.zeros(at_table + (table.n_bytes if table else 0), np.uint8))
    if table:
        table._fill(emit, emit.word(at_table), LANE_WORDS)
    column = LANE_WORDS * np.uint32(4) + np.uint32(at_table)
    g, t = LANES // 4, (LANES % 4).astype(np.uint32)
    first_key = 64 - n_keys
    weights = rng.random((8, n_keys)).astype(np.float16)
    row_of_key = row_of_keys(k_tile, emit, n_keys)
    pairs = [emit.pack_half2(*(weights[g, row_of_key[j + 2 * t + i]] for i in range(2))) for j in range(0, n_keys, 8)]

    outputs = []
    own_dims = HEAD_DIM // N_WARPS
    for warp in range(N_WARPS):
        row = (at_queries + (g * HEAD_DIM + warp * own_dims) * queries.itemsize).astype(np.int64)
        k_tile._store_query(emit, LANE_WORDS * 16, k_tile._load_query(emit, row, t, emit.word(1)))
        slot = np.full(32, first_key * N_WARPS + warp, np.uint32)
        keys = k_tile._load(emit, np.zeros(32, np.int64), slot, LANE_WORDS)
        share = k_tile._scores(emit, LANE_WORDS * 16, keys, LANE_WORDS, column)
        exchange._store(emit, LANE_WORDS * 16 + np.uint32(shares_at + warp * exchange.share_bytes), share)
        values = v_tile._load(emit, np.full(32, page.v_offset, np.int64), slot, LANE_WORDS)
        sums = v_tile._accumulate(emit, v_tile._zeros(emit), pairs, values, LANE_WORDS, column)
        outputs.append(outputs_of(v_tile, emit, sums))
    scores = exchange._add_up(emit, LANE_WORDS * 16 + np.uint32(shares_at))

    got = np.full((8, n_keys), np.nan)
    for i, score in enumerate(scores):
        got[2 * t + i % 2, row_of_key[TILE_KEYS * (i // 4) + g + 8 * (i % 4 // 2)]] = score
    shown = slice(first_key, 64)
    expected = queries.astype(np.float16).astype(np.float64) @ cache.k[shown, 0].T
    tolerance = 2e-3 * float(np.abs(expected).max())  # elements, or levels, are rounded to float16
    np.testing.assert_allclose(got, expected, atol=tolerance)
    expected = weights.astype(np.float64) @ cache.v[shown, 0]
    tolerance = 2e-3 * float(np.abs(weights.astype(np.float64) @ np.abs(cache.v[shown, 0])).max())
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), expected, atol=tolerance)


@pytest.mark.parametrize("kv_type", list(KvType))
def test_a_quarter_of_the_columns_has_the_bytes_of_the_whole(kv_type: KvType) -> None:
    region = page_of(kv_type).k_region
    own = columns_of(region)
    assert (own.high_offset, own.scale_offset, own.n_bytes) == (region.high_offset, region.scale_offset, region.n_bytes)


def test_pages_whose_quarters_lanes_cannot_share_are_left_to_the_other_kernel() -> None:
    page = page_of(KvType.TURBO4)
    assert has_columns(page)
    assert not has_columns(replace(page, head_dim_v=256))  # quarters of 64: half a group of a scale
    assert has_columns(replace(page_of(KvType.Q8_0), head_dim_v=256))
    assert not has_columns(replace(page_of(KvType.Q4_0), head_dim_v=80))
    assert not has_columns(page_of(KvType.F32))
    assert not has_columns(replace(page_of(KvType.F16), head_dim_v=256, v_in_k=True))
    assert not has_columns(replace(page_of(KvType.F16), head_dim_k=256, head_dim_v=256))
