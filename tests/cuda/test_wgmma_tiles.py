"""Tiles of the warpgroup kernel as a descriptor addresses them, filled by numpy lanes; no device."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")

from cuda_kernels.panel_copies import COPY_THREADS, PanelCopies
from cuda_kernels.wgmma_tiles import PanelRows
from kvs_core.kv_types import KvType, RegionGeometry
from scripts.cuda_checks.paged import encode_rows
from tests.cuda.numpy_emitter import LANES, NumpyEmitter

PAGE_TOKENS = 256


def element_address(rows: PanelRows, row: int, element: int) -> int:
    """Where a 128-byte swizzled descriptor looks: address bits 4 to 6 are swapped by bits 7 to 9."""
    linear = element // 64 * rows.panel_bytes + row * 128 + element % 64 * 2
    return linear ^ (linear >> 7 & 7) << 4


def region_bytes(values: np.ndarray, region: RegionGeometry) -> tuple[np.ndarray, np.ndarray]:
    """A region holding ``values`` [page_tokens, head_dim], and what they are after storing."""
    quants, scales, exact = encode_rows(values, region.kv_type)
    data = np.full(region.n_bytes, 0xFF, np.uint8)
    for plane, offset in ((quants, 0), (scales, region.scale_offset)):
        data[offset : offset + plane.size] = plane.reshape(-1)
    return data, exact


@pytest.mark.parametrize("n_valid", [128, 37, 1])
@pytest.mark.parametrize("tile_keys", [64, 128])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kv_type", [KvType.F16, KvType.Q8_0])
def test_every_element_lies_where_the_descriptor_looks(
    kv_type: KvType, head_dim: int, tile_keys: int, n_valid: int
) -> None:
    region = RegionGeometry(kv_type=kv_type, head_dim=head_dim, page_tokens=PAGE_TOKENS)
    copies = PanelCopies(region, tile_keys)
    values = np.random.default_rng(n_valid).standard_normal((PAGE_TOKENS, head_dim), dtype=np.float32)
    data, exact = region_bytes(values, region)
    first_key = 64
    emit = NumpyEmitter(data, np.full(copies.rows.n_bytes + 1024, 0xAA, np.uint8))
    base, key, valid = emit.word(1024), emit.word(first_key), emit.word(n_valid)
    address = np.zeros(32, np.int64)
    for warp in range(COPY_THREADS // 32):
        thread = (LANES + 32 * warp).astype(np.uint32)
        if not copies.is_direct:
            for part in copies.parts:
                loaded = copies.part_load(part)(emit, address, key, thread)
                copies.part_convert(part)(emit, base, loaded, valid, thread)
        elif n_valid >= tile_keys:
            copies._start_all(emit, base, address, key, thread)
        else:
            copies._start_some(emit, base, address, key, valid, thread)

    places = [[1024 + element_address(copies.rows, r, c) for c in range(head_dim)] for r in range(tile_keys)]
    tile = emit.shared.view(np.float16)[np.array(places) // 2]
    expected = exact[first_key : first_key + tile_keys].astype(np.float16)
    expected[n_valid:] = 0
    np.testing.assert_array_equal(tile, expected)


def test_a_step_is_sixteen_elements_further() -> None:
    rows = PanelRows(n_rows=128, head_dim=256)
    assert [rows.step_offset(step) for step in range(6)] == [0, 32, 64, 96, 16384, 16416]
