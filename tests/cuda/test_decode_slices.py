"""Fragments of decode attention with heads of 512 carried out by numpy: every warp's slice, every cache type."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")

from cuda_kernels.attention_decode_slices import count_subs
from cuda_kernels.decode_codes import table_of
from cuda_kernels.decode_slices import N_SLICES, SLICE_DIM, KeySlice, ValueSlice
from cuda_kernels.decode_tiles import TILE_KEYS
from kvs_core.kv_types import KvType, PageGeometry
from scripts.cuda_checks.paged import make_cache
from tests.cuda.numpy_emitter import LANES, NumpyEmitter

HEAD_DIM, PAGE_TOKENS = N_SLICES * SLICE_DIM, 64
TYPES = [kv_type for kv_type in KvType if kv_type is not KvType.F32]
LANE_WORDS = LANES.astype(np.uint32)


@pytest.mark.parametrize("kv_type", TYPES, ids=lambda kv_type: kv_type.value)
def test_slices_multiply_as_attention_does(kv_type: KvType) -> None:
    rng = np.random.default_rng(HEAD_DIM)
    page = PageGeometry(
        page_tokens=PAGE_TOKENS, n_head_kv=1, head_dim_k=HEAD_DIM, head_dim_v=HEAD_DIM, type_k=kv_type, type_v=kv_type
    )
    n_subs = count_subs(page)
    n_keys = TILE_KEYS * n_subs
    cache = make_cache(page, PAGE_TOKENS, rng)
    queries = rng.standard_normal((8, HEAD_DIM)).astype(np.float32)
    at_queries = -(-page.page_bytes // 16) * 16
    memory = np.zeros(at_queries + queries.nbytes, np.uint8)
    memory[: page.page_bytes] = cache.data[0]
    memory[at_queries:] = queries.view(np.uint8).reshape(-1)
    k_slice, v_slice = KeySlice(page.k_region, n_subs), ValueSlice(page.v_region, n_subs)
    table = table_of(kv_type, 32)
    at_table = k_slice.query_bytes
    emit = NumpyEmitter(memory, np.zeros(at_table + (table.n_bytes if table else 0), np.uint8))
    if table:
        table._fill(emit, emit.word(at_table), LANE_WORDS)
    column = LANE_WORDS * np.uint32(4) + np.uint32(at_table)
    g, t = LANES // 4, (LANES % 4).astype(np.uint32)
    slot, shown = np.full(32, PAGE_TOKENS - n_keys, np.uint32), slice(PAGE_TOKENS - n_keys, PAGE_TOKENS)
    weights = rng.random((8, n_keys)).astype(np.float16)
    pairs = [emit.pack_half2(weights[g, j + 2 * t], weights[g, j + 2 * t + 1]) for j in range(0, n_keys, 8)]

    got, out = np.zeros((8, n_keys)), np.full((8, HEAD_DIM), np.nan)
    for warp in range(N_SLICES):
        own = emit.word(warp)
        query_at = (at_queries + 4 * (g * HEAD_DIM + warp * SLICE_DIM)).astype(np.int64)
        k_slice._store_query(emit, LANE_WORDS * 16, k_slice._load_query(emit, query_at, t, emit.word(1)))
        keys = k_slice._load_slice(emit, np.zeros(32, np.int64), slot, LANE_WORDS, own)
        for i, share in enumerate(k_slice._scores(emit, LANE_WORDS * 16, keys, LANE_WORDS, column)):
            got[2 * t + i % 2, TILE_KEYS * (i // 4) + g + 8 * (i % 4 // 2)] += share

        values = v_slice._load_slice(emit, np.full(32, page.v_offset, np.int64), slot, LANE_WORDS, own)
        sums = v_slice._accumulate(emit, v_slice._zeros(emit), pairs, values, LANE_WORDS, column)
        for row, store in enumerate((v_slice._row_store(0), v_slice._row_store(1))):
            place = (4 * (2 * t.astype(np.int64) + row) * HEAD_DIM + 4 * warp * SLICE_DIM).astype(np.int64)
            recorder = _Stores(memory)
            store(recorder, place, sums, g.astype(np.uint32))
            for address, pair in recorder.stored:
                for i in range(2):
                    at = address // 4 + i
                    out[at // HEAD_DIM, at % HEAD_DIM] = pair[i]

    expected = queries.astype(np.float16).astype(np.float64) @ cache.k[shown, 0].T
    np.testing.assert_allclose(got, expected, atol=2e-3 * float(np.abs(expected).max()))
    exact = weights.astype(np.float64) @ cache.v[shown, 0]
    size = float(np.abs(weights.astype(np.float64) @ np.abs(cache.v[shown, 0])).max())
    np.testing.assert_allclose(out, exact, atol=2e-3 * size)


class _Stores(NumpyEmitter):
    """Remembers what is stored where."""

    def __init__(self, memory: np.ndarray) -> None:
        super().__init__(memory)
        self.stored: list[tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]] = []

    def store_two_floats(self, address: np.ndarray, offset: int, first: np.ndarray, second: np.ndarray) -> None:
        self.stored.append((address + offset, (first, second)))
