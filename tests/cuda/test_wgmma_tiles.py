"""Tiles of prefill attention as its products address them, filled by numpy lanes; no device."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")

from cuda_kernels.panel_copies import PanelCopies
from cuda_kernels.prefill_copies import TileCopies
from cuda_kernels.prefill_tiles import PIECE_BYTES, PIECE_ELEMENTS
from cuda_kernels.prefill_units import RegionUnits
from cuda_kernels.wgmma_tiles import PanelRows
from kvs_core.kv_types import KvType, RegionGeometry
from scripts.cuda_checks.paged import fill_regions, make_rows
from tests.cuda.numpy_emitter import LANES, NumpyEmitter

PAGE_TOKENS = 256
FIRST_KEY = 64
N_THREADS = 128


def element_address(rows: PanelRows, row: np.ndarray, element: np.ndarray) -> np.ndarray:
    """Where a 128-byte swizzled descriptor looks: address bits 4 to 6 are swapped by bits 7 to 9."""
    linear = element // 64 * rows.panel_bytes + row * 128 + element % 64 * 2
    return linear ^ (linear >> 7 & 7) << 4


def region_bytes(region: RegionGeometry, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A region of random rows, and what they stand for."""
    rows = make_rows(region, PAGE_TOKENS, 1, rng)
    data = np.full((1, region.n_bytes), 0xFF, np.uint8)
    fill_regions(data, rows, region, 0)
    return data[0], rows.exact[:, 0]


def check_tile(tile: np.ndarray, exact: np.ndarray, kv_type: KvType, n_valid: int) -> None:
    """Each element rounded once; levels of turbo types before they are multiplied, too. Zeros beyond the last key."""
    expected = exact[FIRST_KEY : FIRST_KEY + len(tile)].astype(np.float16)
    expected[n_valid:] = 0
    n_ulps = 2.0 if kv_type.is_turbo else 1.0 if kv_type in (KvType.Q5_1, KvType.Q4_1) else 0.0
    largest = (
        np.abs(exact[FIRST_KEY:][: len(tile)]).max() if kv_type in (KvType.Q5_1, KvType.Q4_1) else np.abs(expected)
    )
    difference = np.abs(tile.astype(np.float64) - expected.astype(np.float64))
    assert np.all(difference <= n_ulps * np.spacing(np.float16(largest)).astype(np.float64))
    np.testing.assert_array_equal(tile[n_valid:], 0)


@pytest.mark.parametrize(
    ("head_dim", "tile_keys", "n_valid", "n_threads"),
    [(64, 64, 64, 128), (64, 128, 1, 64), (128, 128, 200, 128), (256, 64, 37, 64)],
)
@pytest.mark.parametrize("kv_type", [kv_type for kv_type in KvType if kv_type is not KvType.F32])
def test_every_element_lies_where_the_descriptor_looks(
    kv_type: KvType, head_dim: int, tile_keys: int, n_valid: int, n_threads: int
) -> None:
    region = RegionGeometry(kv_type=kv_type, head_dim=head_dim, page_tokens=PAGE_TOKENS)
    copies = PanelCopies(region, tile_keys, n_threads)
    data, exact = region_bytes(region, np.random.default_rng(n_valid))
    emit = NumpyEmitter(data, np.full(copies.rows.n_bytes + 1024, 0xAA, np.uint8))
    base, key, valid = emit.word(1024), emit.word(FIRST_KEY), emit.word(n_valid)
    address = np.zeros(32, np.int64)
    for warp in range(n_threads // 32):
        thread = (LANES + 32 * warp).astype(np.uint32)
        if not copies.is_direct:
            for part in copies.parts:
                loaded = copies.part_load(part)(emit, address, key, thread)
                copies.part_convert(part)(emit, base, loaded, valid, thread)
            continue
        if n_valid >= tile_keys:
            copies._start_all(emit, base, address, key, thread)
        else:
            copies._start_some(emit, base, address, key, valid, thread)
        if not copies.is_finished:
            copies._finish(emit, base, thread)

    places = 1024 + element_address(copies.rows, np.arange(tile_keys)[:, None], np.arange(head_dim))
    tile = emit.shared.view(np.float16)[places // 2]
    check_tile(tile, exact, kv_type, min(n_valid, tile_keys))


@pytest.mark.parametrize(
    ("kv_type", "head_dim"),
    [(t, d) for t in KvType for d in (64, 80, 96, 128, 192, 256) if d % t.block_elements == 0],
)
def test_raw_tiles_become_rows_of_float16(kv_type: KvType, head_dim: int) -> None:
    tile_keys, n_valid = 32, 19
    region = RegionGeometry(kv_type=kv_type, head_dim=head_dim, page_tokens=PAGE_TOKENS)
    copies = TileCopies(region, tile_keys, N_THREADS)
    data, exact = region_bytes(region, np.random.default_rng(head_dim))
    emit = NumpyEmitter(data, np.full(copies.tile_bytes + copies.raw_bytes, 0xAA, np.uint8))
    tile_at, raw_at = emit.word(0), emit.word(copies.tile_bytes)
    threads = [(LANES + 32 * warp).astype(np.uint32) for warp in range(N_THREADS // 32)]
    for thread in threads:
        copies._start_raw(emit, raw_at, np.zeros(32, np.int64), emit.word(FIRST_KEY), emit.word(n_valid), thread)
    for thread in threads:
        copies._convert(emit, raw_at, tile_at, thread)

    pieces = np.arange(head_dim // PIECE_ELEMENTS, dtype=np.uint32)
    tile = np.zeros((tile_keys, head_dim), np.float16)
    for row in range(tile_keys):
        at = copies.rows.place(emit, np.uint32(0), np.full(len(pieces), row, np.uint32), pieces).astype(np.int64)
        tile[row] = emit.shared[at[:, None] + np.arange(PIECE_BYTES)].reshape(-1).view(np.float16)
    check_tile(tile, exact, kv_type, n_valid)


@pytest.mark.parametrize("kv_type", [KvType.F32, KvType.BF16])
def test_what_float16_cannot_hold_becomes_its_largest_number(kv_type: KvType) -> None:
    values = np.array([65504.0, 65536.0, -1e6, 3e38, -np.inf, np.nan, 2.0**-17, -0.0], np.float32)
    bits = values.view(np.uint32)
    words = bits if kv_type is KvType.F32 else (bits[0::2] >> 16 | bits[1::2] & np.uint32(0xFFFF0000))
    emit = NumpyEmitter(np.zeros(0, np.uint8))
    units = RegionUnits(RegionGeometry(kv_type=kv_type, head_dim=64, page_tokens=64))
    halves = units.halves(emit, [np.full(32, word, np.uint32) for word in words])
    got = np.stack([half2[:1] for half2 in halves]).view(np.float16).reshape(-1)
    largest = np.finfo(np.float16).max
    first = 65504.0 if kv_type is KvType.F32 else 65280.0  # cut to bf16 by the test
    expected = np.array([first, largest, -largest, largest, -largest, np.nan, 2.0**-17, -0.0], np.float16)
    np.testing.assert_array_equal(got, expected)


def test_a_step_is_sixteen_elements_further() -> None:
    rows = PanelRows(n_rows=128, head_dim=256)
    assert [rows.step_offset(step) for step in range(6)] == [0, 32, 64, 96, 16384, 16416]
