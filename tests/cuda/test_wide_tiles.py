"""Tiles and fragments of wide attention carried out by numpy: four warps, one tile, every cache type."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")

from cuda_kernels.launch import SHARED_LIMIT
from cuda_kernels.wide_tiles import N_THREADS, N_WARPS, PART_KEYS, WideFragments, WideShape
from kvs_core.kv_types import KvType, PageGeometry
from scripts.cuda_checks.attention import latent_page
from scripts.cuda_checks.paged import PagedCache, make_cache
from tests.cuda.numpy_emitter import LANES, NumpyEmitter

PAGE_TOKENS, FIRST_KEY = 64, 32


def page_of(type_k: KvType, type_v: KvType) -> PageGeometry:
    return PageGeometry(
        page_tokens=PAGE_TOKENS, n_head_kv=1, head_dim_k=512, head_dim_v=512, type_k=type_k, type_v=type_v
    )


TYPES = list(KvType)
PAGES = [page_of(kv_type, TYPES[(i + 4) % len(TYPES)]) for i, kv_type in enumerate(TYPES)]
PAGES += [latent_page(kv_type, 576, 512, page_tokens=PAGE_TOKENS) for kv_type in TYPES]
PAGES.append(latent_page(KvType.F16, 128, 64, page_tokens=PAGE_TOKENS))


def name_of(page: PageGeometry) -> str:
    return f"{page.type_k.value}-{page.type_v.value}-{page.head_dim_k}"


class Block:
    """One block of wide attention whose warps take turns: each does a part of the tile before the next one does."""

    def __init__(self, page: PageGeometry, n_row_tiles: int, cache: PagedCache) -> None:
        self.page, self.shape = page, WideShape(page=page, n_row_tiles=n_row_tiles)
        self.fragments = WideFragments(page, n_row_tiles)
        self.emit = NumpyEmitter(cache.data[0], np.full(self.shape.shared_bytes, 0xFF, np.uint8))

    def word(self, value: int) -> np.ndarray:
        return self.emit.word(value)

    def threads(self) -> list[np.ndarray]:
        return [np.arange(first, first + 32, dtype=np.uint32) for first in range(0, N_THREADS, 32)]

    def place_queries(self, queries: np.ndarray) -> list[list[np.ndarray]]:
        """The fragment of each warp."""
        rows = self.fragments.k_rows
        halves = queries.astype(np.float16).view("<u4").reshape(len(queries), -1, 4)
        for row in range(0, len(queries), 32):
            for piece in range(halves.shape[1]):
                own_rows = (row + LANES).astype(np.uint32) % len(queries)
                at = rows.place(self.emit, self.word(0), own_rows, self.word(piece))
                own = halves[own_rows, piece]
                self.emit.store_shared_words(at, 0, [np.ascontiguousarray(own[:, i]) for i in range(4)])
        lane = LANES.astype(np.uint32)
        return [self.fragments._load_query(self.emit, self.word(0), self.word(w), lane) for w in range(N_WARPS)]

    def bring(self, region_at: int, *, is_keys: bool, n_valid: int) -> None:
        """A tile of keys (or rows), or of values, to its place."""
        copies = self.shape.copies(self.shape.tile_keys)[0 if is_keys else 1]
        is_raw = self.shape.has_raw_keys if is_keys else self.shape.has_raw_values
        place = self.word(0 if is_keys else self.shape.values_at)
        region, key = np.full(32, region_at, np.int64), self.word(FIRST_KEY)
        start = copies._start_raw if is_raw else copies._start_direct
        for thread in self.threads():
            start(self.emit, self.word(self.shape.raw_at) if is_raw else place, region, key, self.word(n_valid), thread)
        for thread in self.threads() if is_raw else []:
            copies._convert(self.emit, self.word(self.shape.raw_at), place, thread)

    def scores(self, query: list[list[np.ndarray]], part: int) -> list[np.ndarray]:
        lane, fragments = LANES.astype(np.uint32), self.fragments
        keys = self.word(part * PART_KEYS * fragments.k_rows.row_bytes)
        at = self.shape.scores_at + part * N_WARPS * fragments.share_bytes
        for warp in range(N_WARPS):
            place = self.word(at + warp * fragments.share_bytes) + lane * np.uint32(16)
            fragments._share(self.emit, query[warp], keys, place, self.word(warp), lane)
        return fragments._add_shares(self.emit, self.word(at) + lane * np.uint32(16))

    def accumulate(self, sums: list[list[np.ndarray]], weights: list[np.ndarray], part: int) -> None:
        lane, fragments = LANES.astype(np.uint32), self.fragments
        base = 0 if self.page.v_in_k else self.shape.values_at
        values = self.word(base + part * PART_KEYS * fragments.v_rows.row_bytes)
        for warp in range(N_WARPS):
            arguments = (weights, values, self.word(warp), lane)
            sums[warp] = fragments._accumulate_columns(self.emit, sums[warp], *arguments)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_tile_is_multiplied_as_attention_does(page: PageGeometry) -> None:
    rng = np.random.default_rng(page.head_dim_k)
    n_row_tiles = 1 + TYPES.index(page.type_k) % 2
    n_valid = 29  # of the keys; those behind hold NaN and count as zeros
    cache = make_cache(page, FIRST_KEY + n_valid, rng)
    block = Block(page, n_row_tiles, cache)
    n_rows, tile_keys = 16 * n_row_tiles, block.shape.tile_keys
    n_keys = min(n_valid, tile_keys)
    queries = rng.standard_normal((n_rows, page.head_dim_k)).astype(np.float32)
    query = block.place_queries(queries)
    block.bring(0, is_keys=True, n_valid=n_valid)
    if not page.v_in_k:
        block.bring(page.v_offset, is_keys=False, n_valid=n_valid)

    g, t = LANES // 4, LANES % 4
    got = np.full((n_rows, tile_keys), np.nan)
    weights = np.zeros((n_rows, tile_keys), np.float16)
    weights[:, :n_keys] = rng.random((n_rows, n_keys))
    sums = [[np.zeros(32, np.float32)] * block.fragments.n_sums for _ in range(N_WARPS)]
    for part in range(tile_keys // PART_KEYS):
        held = []
        for i, score in enumerate(block.scores(query, part)):
            row, key = 16 * (i // 8) + 8 * (i // 2 % 2) + g, PART_KEYS * part + 8 * (i // 4 % 2) + 2 * t + i % 2
            got[row, key] = score
            held.append(weights[row, key].astype(np.float32))
        block.accumulate(sums, held, part)

    shown = slice(FIRST_KEY, FIRST_KEY + n_keys)
    expected = queries.astype(np.float16).astype(np.float64) @ cache.k[shown, 0].T
    np.testing.assert_allclose(got[:, :n_keys], expected, atol=2e-3 * float(np.abs(expected).max()))
    assert not got[:, n_keys:].any()

    out = np.full((n_rows, page.head_dim_v), np.nan)
    for warp in range(N_WARPS):
        for i, value in enumerate(sums[warp]):
            n_columns = block.fragments.n_value_columns
            row, tile = 16 * (i // 4 // n_columns) + 8 * (i // 2 % 2) + g, i // 4 % n_columns
            out[row, 64 * (tile // 2) + 16 * warp + 8 * (tile % 2) + 2 * t + i % 2] = value
    exact = weights[:, :n_keys].astype(np.float64) @ cache.v[shown, 0]
    size = float(np.abs(weights[:, :n_keys].astype(np.float64) @ np.abs(cache.v[shown, 0])).max())
    np.testing.assert_allclose(out, exact, atol=2e-3 * size)


@pytest.mark.parametrize("n_row_tiles", [1, 2])
def test_every_block_fits_shared_memory(n_row_tiles: int) -> None:
    pairs = [page_of(type_k, type_v) for type_k in TYPES for type_v in TYPES]
    for page in pairs + PAGES:
        assert WideShape(page=page, n_row_tiles=n_row_tiles).shared_bytes <= SHARED_LIMIT
