"""Rows of every cache type decoded by the kernels' intrinsics, carried out by numpy, against the bytes' meaning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")

from cuda_kernels.emit import Emitter, Value
from cuda_kernels.kv_units import LEVELS, WITH_MINIMUM, RowAt, expand, load_four
from kvs_core.kv_types import KvType, PageGeometry, RegionGeometry
from scripts.cuda_checks.paged import make_cache
from tests.cuda.numpy_emitter import LANES, NumpyEmitter
from tests.oracles.kv_formats import read_row

LANE_WORDS = LANES.astype(np.uint32)
N_ROWS = 64
HEAD_DIMS = (64, 80, 128, 192)
CASES = [(kv_type, head_dim) for kv_type in KvType for head_dim in HEAD_DIMS if head_dim % kv_type.block_elements == 0]
ROUNDING = 2.0**-11


def address_of(emit: Emitter, base: Value, index: Value, n_bytes: int) -> Value:
    return emit.add(base, emit.widen(emit.multiply(index, n_bytes)))


class KvUnits:
    """Units of one region's rows. ``elements`` of a unit; ``n_words`` that ``load`` gives for it."""

    def __init__(self, region: RegionGeometry) -> None:
        self.region = region
        kv_type = region.kv_type
        self.elements = 32 if kv_type.is_quantised else 16
        n_units = region.head_dim // self.elements
        self._quant_words = region.row_bytes // n_units // 4
        self._high_words = region.high_row_bytes // n_units // 4
        self.n_words = self._quant_words + self._high_words + (1 if kv_type.is_quantised else 0)

    def load(self, emit: Emitter, row: RowAt, unit: Value) -> list[Value]:
        """The words of unit ``unit`` (a word): quants, high bits, scale (and minimum), as they lie there."""
        step = min(4, self._quant_words)
        at = address_of(emit, row.quants, unit, 4 * self._quant_words)
        loaded = [word for i in range(0, self._quant_words, step) for word in emit.load_stream(at, 4 * i, step)]
        if self._high_words:
            loaded += emit.load_stream(address_of(emit, row.high, unit, 4), 0, 1)
        if self.region.kv_type in WITH_MINIMUM:
            loaded += emit.load_stream(address_of(emit, row.scales, unit, 4), 0, 1)
        elif self.region.kv_type.is_quantised:
            scale_idx = emit.shift_right(unit, (self.region.group_elements // 32).bit_length() - 1)
            loaded.append(emit.load_half(address_of(emit, row.scales, scale_idx, 2), 0))
        return loaded

    def halves(self, emit: Emitter, words: Sequence[Value]) -> list[Value]:
        """``elements / 2`` words: element 2 i in the low half of word i, element 2 i + 1 in the high one."""
        quants = list(words[: self._quant_words])
        high = words[self._quant_words] if self._high_words else None
        scale = words[-1] if self.region.kv_type.is_quantised else None
        return expand(emit, self.region.kv_type, quants, high, scale)


def some_rows(kv_type: KvType, head_dim: int) -> tuple[NumpyEmitter, RegionGeometry, np.ndarray]:
    """Random rows as bytes and, float64 [N_ROWS, head_dim], as numbers."""
    page = PageGeometry(
        page_tokens=N_ROWS, n_head_kv=1, head_dim_k=head_dim, head_dim_v=head_dim, type_k=kv_type, type_v=kv_type
    )
    cache = make_cache(page, N_ROWS, np.random.default_rng(head_dim))
    return NumpyEmitter(cache.data[0]), page.k_region, cache.k[:, 0]


def row_of_lane(emit: NumpyEmitter, region: RegionGeometry, slot: int) -> RowAt:
    return RowAt.of(emit, region, np.zeros(32, np.int64), np.full(32, slot, np.int64))


@pytest.mark.parametrize(("kv_type", "head_dim"), CASES)
def test_units_are_the_rows_elements_in_order(kv_type: KvType, head_dim: int) -> None:
    emit, region, exact = some_rows(kv_type, head_dim)
    units = KvUnits(region)
    n_units = head_dim // units.elements
    got = np.empty((N_ROWS, head_dim))
    for slot in range(N_ROWS):
        loaded = units.load(emit, row_of_lane(emit, region, slot), LANE_WORDS % np.uint32(n_units))
        assert len(loaded) == units.n_words
        halves = units.halves(emit, loaded)
        pairs = np.stack(halves, axis=-1)[:n_units].astype("<u4").view(np.float16)
        got[slot] = pairs.reshape(head_dim)
    # a level of a turbo type is rounded before its product is, and products with a minimum lose what it cancels
    floor = 2.0**-24 if kv_type not in (KvType.Q4_1, KvType.Q5_1) else ROUNDING * 2.0**-6
    assert np.all(np.abs(got - exact) <= (1 + kv_type.is_turbo) * ROUNDING * np.abs(exact) + floor)


@pytest.mark.parametrize(("kv_type", "head_dim"), CASES)
def test_four_elements_are_those_of_the_cpu(kv_type: KvType, head_dim: int) -> None:
    emit, region, exact = some_rows(kv_type, head_dim)
    n_fours = head_dim // 4
    for slot in (0, 1, N_ROWS - 1):
        for begin in range(0, n_fours, 32):
            four = np.minimum(LANE_WORDS + np.uint32(begin), np.uint32(n_fours - 1))
            values = np.stack(load_four(emit, region, row_of_lane(emit, region, slot), four), axis=-1)
            expected = exact[slot].reshape(n_fours, 4)[four]
            np.testing.assert_allclose(values, expected, rtol=2.0**-23, atol=2.0**-22 * np.abs(expected).max())


def test_levels_are_those_of_the_oracle() -> None:
    """A row of one block whose quants run through every level, with scale 1."""
    for kv_type, levels in LEVELS.items():
        region = RegionGeometry(kv_type=kv_type, head_dim=64, page_tokens=64)
        data = np.zeros(region.n_bytes, np.uint8)
        data[: region.row_bytes] = np.arange(region.row_bytes) * 37
        data[region.scale_offset : region.scale_offset + region.scale_row_bytes] = np.tile([0x00, 0x3C], 8)[
            : region.scale_row_bytes
        ]
        data[region.high_offset : region.high_offset + region.high_row_bytes] = np.arange(region.high_row_bytes) * 91
        read = read_row(data, region, 0)
        emit = NumpyEmitter(data)
        values = np.stack(load_four(emit, region, row_of_lane(emit, region, 0), LANE_WORDS % np.uint32(16)), axis=-1)
        np.testing.assert_array_equal(values[:16].reshape(64), read.astype(np.float32))
        assert set(np.float32(levels)) >= set(values[:16].reshape(64))
