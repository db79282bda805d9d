"""Fragments of decode attention for heads of 512: a slice of every row for each of the four warps of a block.

A slice is to a warp what a head of 128 is to it elsewhere (``decode_tiles``): the same loads, the same codes, the same
registers. Only where its parts lie in a row's planes depends on the slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numba.cuda import types

from cuda_kernels.decode_tiles import KeyTile, ValueTile
from cuda_kernels.emit import Emitter, Value, emitted, floats, words
from kvs_core.kv_types import RegionGeometry

N_SLICES = 4
SLICE_DIM = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceGeometry(RegionGeometry):
    """``head_dim`` elements of rows of ``N_SLICES`` times as many: distances and planes are those of whole rows."""

    @classmethod
    def of(cls, region: RegionGeometry) -> SliceGeometry:
        return cls(kv_type=region.kv_type, head_dim=region.head_dim // N_SLICES, page_tokens=region.page_tokens)

    @property
    def whole(self) -> RegionGeometry:
        return RegionGeometry(kv_type=self.kv_type, head_dim=N_SLICES * self.head_dim, page_tokens=self.page_tokens)

    @property
    def group_elements(self) -> int:
        return self.whole.group_elements

    @property
    def row_bytes(self) -> int:
        return self.whole.row_bytes

    @property
    def high_row_bytes(self) -> int:
        return self.whole.high_row_bytes

    @property
    def scale_row_bytes(self) -> int:
        return self.whole.scale_row_bytes

    @property
    def n_bytes(self) -> int:
        return self.whole.n_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceAt:
    """Addresses of a region, moved so that each plane's first byte of the slice is where a row's would be."""

    quants: Value
    highs: Value
    scales: Value

    @classmethod
    def of(cls, emit: Emitter, region: SliceGeometry, region_at: Value, slice_idx: Value) -> SliceAt:
        rows = (region.row_bytes, region.high_row_bytes, region.scale_row_bytes)
        moved = (emit.widen(emit.multiply(slice_idx, row_bytes // N_SLICES)) for row_bytes in rows)
        quants, highs, scales = (emit.add(region_at, offset) for offset in moved)
        return cls(quants=quants, highs=highs, scales=scales)


class KeySlice(KeyTile):
    """``KeyTile`` of a slice. ``load(region, slot, lane, slice)`` is an intrinsic; the other ones are inherited."""

    region: SliceGeometry

    def __init__(self, region: RegionGeometry, n_subs: int) -> None:
        super().__init__(SliceGeometry.of(region), n_subs)
        i32, i64 = types.int32, types.int64
        self.load = emitted(words(n_subs * self._sub_words), i64, i32, i32, i32)(self._load_slice)

    def _load_slice(self, emit: Emitter, region_at: Value, slot: Value, lane: Value, slice_idx: Value) -> list[Value]:
        return self._load(emit, SliceAt.of(emit, self.region, region_at, slice_idx), slot, lane)

    def load_quants(self, emit: Emitter, at: Any, slot: Value, key: int, part: Value) -> list[Value]:
        return super().load_quants(emit, at.quants, slot, key, part)

    def load_highs(self, emit: Emitter, at: Any, slot: Value, key: int, part: Value) -> list[Value]:
        return super().load_highs(emit, at.highs, slot, key, part)

    def load_block_scales(self, emit: Emitter, at: Any, slot: Value, key: int, part: Value) -> list[Value]:
        return super().load_block_scales(emit, at.scales, slot, key, part)

    def _load_wide_scales(self, emit: Emitter, at: Any, slot: Value, key: int) -> list[Value]:
        """The slice's scales of one row: two words."""
        row = emit.add(at.scales, emit.multiply(slot, self.region.scale_row_bytes))
        return emit.load_stream(row, self.region.scale_offset + key * self.region.scale_row_bytes, 2, recent=True)

    def _load_group_scales(self, emit: Emitter, at: Any, slot: Value, key: int) -> list[Value]:
        return super()._load_group_scales(emit, at.scales, slot, key)


class ValueSlice(ValueTile):
    """``ValueTile`` of a slice.

    load(region, slot, lane, slice)       intrinsic
    store_row_0(address, sums, g), store_row_1(address, sums, g)
                                          intrinsics: query row 2t, or 2t + 1; ``address``: of the slice's first element
    """

    region: SliceGeometry

    def __init__(self, region: RegionGeometry, n_subs: int) -> None:
        super().__init__(SliceGeometry.of(region), n_subs)
        i32, i64 = types.int32, types.int64
        self.load = emitted(words(n_subs * self._sub_words), i64, i32, i32, i32)(self._load_slice)
        self.store_row_0, self.store_row_1 = (
            emitted(types.void, i64, floats(self.n_sums), i32)(self._row_store(row)) for row in range(2)
        )

    def _load_slice(self, emit: Emitter, region_at: Value, slot: Value, lane: Value, slice_idx: Value) -> list[Value]:
        return self._load(emit, SliceAt.of(emit, self.region, region_at, slice_idx), slot, lane)

    def load_quants(self, emit: Emitter, at: Any, slot: Value, key: int, part: Value) -> list[Value]:
        return super().load_quants(emit, at.quants, slot, key, part)

    def load_highs(self, emit: Emitter, at: Any, slot: Value, key: int, part: Value) -> list[Value]:
        return super().load_highs(emit, at.highs, slot, key, part)

    def load_block_scales(self, emit: Emitter, at: Any, slot: Value, key: int, part: Value) -> list[Value]:
        return super().load_block_scales(emit, at.scales, slot, key, part)

    def load_group_scales(self, emit: Emitter, at: Any, slot: Value, key: int) -> list[Value]:
        """Of two rows, side by side in a word: they are not neighbours in the plane."""
        row_bytes = self.region.scale_row_bytes
        row = emit.add(at.scales, emit.multiply(slot, row_bytes))
        offset = self.region.scale_offset + key * row_bytes
        both = [emit.load_half(row, offset + i * row_bytes, recent=True) for i in range(2)]
        return [emit.permute(*both, 0x5410)]

    def _row_store(self, row: int) -> Any:
        def store_row(emit: Emitter, address: Value, sums: list[Value], g: Value) -> None:
            for group in range(self.n_groups):
                dim = self._first_dim(emit, emit.word(group), g)
                at = emit.add(address, emit.widen(emit.multiply(dim, 4)))
                emit.store_two_floats(at, 0, sums[4 * group + row], sums[4 * group + row + 2])

        return store_row
