"""How key and value tiles reach the panels of ``wgmma_tiles``: by asynchronous copies, or through registers.

Two or four warps bring the keys, and as many the values, each a tile at a time into alternating places:

    free place -> copy or convert -> fence -> full        barriers in shared memory, ``FULL`` and ``FREE`` of a place

f16 is copied; bf16 is copied and becomes float16 where it lies; quantised types are read half a tile or a tile ahead
into registers. The consecutive keys of a tile are consecutive bytes of each plane. Keys beyond the last one become
zeros: whatever a page holds there (NaN too) must not meet a probability of 0.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from numba.cuda import int32, int64, types, uint32

from cuda_kernels.emit import Emitter, Value, emitted, words
from cuda_kernels.intrinsics import load_address, wait_all_copies
from cuda_kernels.launch import device_function
from cuda_kernels.prefill_tiles import PIECE_BYTES, PIECE_ELEMENTS
from cuda_kernels.prefill_units import RegionUnits
from cuda_kernels.warpgroup import PANEL_BYTES, arrive_if, fence_tensor_reads, wait_barrier
from cuda_kernels.wgmma_tiles import PanelRows
from kvs_core.kv_types import KvType, RegionGeometry

TILE_AHEAD_BYTES = 8192
"""Tiles that take this many bytes of registers or fewer are read ahead as a whole, others by half.

One H200, 2048 x 32768, TFLOP/s of half and whole, head sizes 128 and 256: turbo3 (8 KiB) 463 and 497, 458 and 500; q4_0
(10 KiB) 581 and 587, 583 and 552; turbo4 (10 KiB) 524 and 496, 505 and 494.
"""
N_PARTS = 4  # of a tile that is converted: two or four are on their way while one is converted
PIECES_AT_ONCE = 4  # that are read before the first is written, where a tile is converted in its place

BARRIER_BYTES = 8
FULL, FREE = 0, 2 * BARRIER_BYTES  # of keys; those of values are one barrier further
STAGE_BARRIER_BYTES = 4 * BARRIER_BYTES


class PanelCopies:
    """Copies of one tile of one region by ``n_threads`` threads.

    Attributes that are intrinsics:
    start_all(tile, region, key, thread)             16 bits: every row to its place
    start_some(tile, region, key, n_valid, thread)   16 bits: the first ``n_valid`` rows, zeros beyond
    finish(tile, thread)                             bf16: what this thread has copied, and has arrived, to float16
    loads, converts                                  quantised: N_PARTS intrinsics each, for one part of the tile
    loads[i](region, key, thread)                    this thread's part of each plane, as it is
    converts[i](tile, loaded, n_valid, thread)       to float16 rows

    ``tile`` is a shared address, ``region`` the global address of the head's region, ``key`` the first position of the
    tile in its page.
    """

    def __init__(self, region: RegionGeometry, tile_keys: int, n_threads: int) -> None:
        self.region, self.tile_keys, self.n_threads = region, tile_keys, n_threads
        self.rows = PanelRows(n_rows=tile_keys, head_dim=region.head_dim)
        self.units = RegionUnits(region)
        u32, i32, i64 = types.uint32, types.int32, types.int64
        self.start_all = emitted(types.void, u32, i64, i32, u32)(self._start_all)
        self.start_some = emitted(types.void, u32, i64, i32, i32, u32)(self._start_some)
        self.finish = emitted(types.void, u32, u32)(self._finish)
        n_units = tile_keys * self.units.row_units // self.n_threads
        ends = [i * n_units // N_PARTS for i in range(N_PARTS + 1)]
        self.parts = [range(begin, end) for begin, end in pairwise(ends)]
        loaded = [words(max(1, len(part) * self.units.n_words)) for part in self.parts]
        self.loads = [
            emitted(ty, i64, i32, u32)(self.part_load(part)) for ty, part in zip(loaded, self.parts, strict=True)
        ]
        self.converts = [
            emitted(types.void, u32, ty, i32, u32)(self.part_convert(part))
            for ty, part in zip(loaded, self.parts, strict=True)
        ]

    @property
    def is_direct(self) -> bool:
        """Copied to its place as it is."""
        return not self.region.kv_type.is_quantised

    @property
    def is_finished(self) -> bool:
        """Whether what was copied is float16 already."""
        return self.region.kv_type is KvType.F16

    @property
    def is_tile_ahead(self) -> bool:
        """Whether a whole tile is on its way while the one before is converted."""
        return 4 * self.tile_keys * self.units.row_units * self.units.n_words <= TILE_AHEAD_BYTES

    # -- 16 bits

    def _start_all(self, emit: Emitter, tile: Value, region: Value, key: Value, thread: Value) -> None:
        source = self._row_source(emit, region, key, thread)
        for i, (place, offset) in enumerate(self._piece_places(emit, tile, thread)):
            emit.copy_16_async(place, source, (offset, i * self.n_threads * PIECE_BYTES), emit.word(PIECE_BYTES))

    def _start_some(self, emit: Emitter, tile: Value, region: Value, key: Value, n_valid: Value, thread: Value) -> None:
        source = self._row_source(emit, region, key, thread)
        skipped = emit.multiply(thread, PIECE_BYTES)
        n_bytes = emit.subtract(emit.multiply(n_valid, self.region.row_bytes), skipped)
        for i, (place, offset) in enumerate(self._piece_places(emit, tile, thread)):
            pass_bytes = i * self.n_threads * PIECE_BYTES
            left = emit.clamp(emit.add(n_bytes, -pass_bytes), 0, PIECE_BYTES)
            emit.copy_16_async(place, source, (offset, pass_bytes), left)

    def _row_source(self, emit: Emitter, region: Value, key: Value, thread: Value) -> Value:
        offset = emit.add(emit.multiply(key, self.region.row_bytes), emit.multiply(thread, PIECE_BYTES))
        return emit.add(region, emit.widen(offset))

    def _piece_places(self, emit: Emitter, tile: Value, thread: Value) -> list[tuple[Value, int]]:
        row_pieces = self.region.head_dim // PIECE_ELEMENTS
        row, piece = emit.divide(thread, row_pieces), emit.remainder(thread, row_pieces)
        return self._places(emit, tile, row, piece, self.n_threads // row_pieces)

    def _finish(self, emit: Emitter, tile: Value, thread: Value) -> None:
        places = self._piece_places(emit, tile, thread)
        for begin in range(0, len(places), PIECES_AT_ONCE):
            together = places[begin : begin + PIECES_AT_ONCE]
            loaded = [emit.load_shared_words(place, offset, 4) for place, offset in together]
            for (place, offset), piece in zip(together, loaded, strict=True):
                emit.store_shared_words(place, offset, self.units.halves(emit, piece))

    def _places(self, emit: Emitter, tile: Value, row: Value, piece: Value, step: int) -> list[tuple[Value, int]]:
        """Address and constant offset of a piece of every ``step``-th row: its swap repeats every eight rows."""
        period = max(1, 8 // step)
        firsts = [self.rows.place(emit, tile, emit.add(row, i * step), piece) for i in range(period)]
        n_rows = self.tile_keys // step
        return [(firsts[i % period], (i - i % period) * step * PANEL_BYTES) for i in range(n_rows)]

    # -- quantised

    @property
    def _step_rows(self) -> int:
        """Rows from one unit of a thread to its next."""
        return self.n_threads // self.units.row_units

    def part_load(self, part: range) -> Callable[..., list[Value]]:
        def load(emit: Emitter, region: Value, key: Value, thread: Value) -> list[Value]:
            row, unit = self.units.find(emit, thread)
            at = emit.add(key, row)
            planes = self.units.planes
            bases = [emit.add(region, emit.widen(plane.row_offset(emit, at, unit))) for plane in planes]
            loaded: list[Value] = []
            for i in part:
                for plane, base in zip(planes, bases, strict=True):
                    offset = plane.offset + i * self._step_rows * plane.row_bytes
                    if plane.n_bytes < 4:
                        loaded.append(emit.load_half(base, offset))
                    else:
                        loaded += emit.load_stream(base, offset, plane.n_words)
            return loaded or [emit.word(0)]

        return load

    def part_convert(self, part: range) -> Callable[..., None]:
        def convert(emit: Emitter, tile: Value, loaded: list[Value], n_valid: Value, thread: Value) -> None:
            row, unit = self.units.find(emit, thread)
            n_pieces, n_words = self.units.n_elements // PIECE_ELEMENTS, self.units.n_words
            places = self._places(emit, tile, row, emit.multiply(unit, n_pieces), self._step_rows)
            for at, i in enumerate(part):
                *quants, scale = loaded[n_words * at : n_words * (at + 1)]
                exists = emit.less(emit.add(row, i * self._step_rows), n_valid)
                kept = emit.select(exists, scale, emit.word(0))  # a minimum too; whatever the quants are, 0 of it is 0
                halves = self.units.halves(emit, [*quants, kept])
                place, offset = places[i]
                for j in range(n_pieces):
                    piece_place = emit.bit_xor(place, j * PIECE_BYTES) if j else place
                    emit.store_shared_words(piece_place, offset, halves[4 * j : 4 * j + 4])

        return convert


def build_bring_tiles(
    copies: PanelCopies, *, first_region: int, page_tokens: int, stage_bytes: int, n_stages: int
) -> Any:
    """Device function ``bring_tiles(places, barriers, pages, head_kv, first_key, key_end, n_tiles, thread)``.

    first_region   where head 0's region starts in a page
    stage_bytes    from one place of a tile to the next; ``places`` is the shared address of the first
    barriers       shared address of the first place's barrier FULL
    """
    tile_keys, region_bytes = copies.tile_keys, copies.region.n_bytes
    is_direct, is_finished, is_tile_ahead = copies.is_direct, copies.is_finished, copies.is_tile_ahead
    start_all, start_some, finish = copies.start_all, copies.start_some, copies.finish
    load_0, load_1, load_2, load_3 = copies.loads
    convert_0, convert_1, convert_2, convert_3 = copies.converts

    @device_function
    def region_of(pages, head_kv, key):
        """Address of a head's region in the page that holds a position."""
        return load_address(pages + int64(key // int32(page_tokens)) * 8) + (
            first_region + int64(head_kv) * region_bytes
        )

    @device_function
    def bring_tiles(places, barriers, pages, head_kv, first_key, key_end, n_tiles, thread):
        if not is_direct and n_tiles > 0:
            region, slot = region_of(pages, head_kv, first_key), first_key % int32(page_tokens)
            part_0, part_1 = load_0(region, slot, thread), load_1(region, slot, thread)
            if is_tile_ahead:
                part_2, part_3 = load_2(region, slot, thread), load_3(region, slot, thread)
        for tile in range(n_tiles):
            stage, was_free = int32(tile) % int32(n_stages), (int32(tile) // int32(n_stages) & int32(1)) ^ int32(1)
            barrier = uint32(barriers + uint32(stage) * uint32(STAGE_BARRIER_BYTES))
            place = uint32(places + uint32(stage) * uint32(stage_bytes))
            key = first_key + int32(tile) * int32(tile_keys)
            region, slot = region_of(pages, head_kv, key), key % int32(page_tokens)
            n_valid = key_end - key
            # behind the last tile its own keys are read once more
            next_key = first_key + min(int32(tile) + int32(1), n_tiles - int32(1)) * int32(tile_keys)
            next_region, next_slot = region_of(pages, head_kv, next_key), next_key % int32(page_tokens)

            wait_barrier(uint32(barrier + uint32(FREE)), uint32(was_free))
            if is_direct:
                if n_valid >= int32(tile_keys):
                    start_all(place, region, slot, thread)
                else:
                    start_some(place, region, slot, n_valid, thread)
                wait_all_copies()
                if not is_finished:
                    finish(place, thread)
            elif is_tile_ahead:
                convert_0(place, part_0, n_valid, thread)
                part_0 = load_0(next_region, next_slot, thread)
                convert_1(place, part_1, n_valid, thread)
                part_1 = load_1(next_region, next_slot, thread)
                convert_2(place, part_2, n_valid, thread)
                part_2 = load_2(next_region, next_slot, thread)
                convert_3(place, part_3, n_valid, thread)
                part_3 = load_3(next_region, next_slot, thread)
            else:
                part_2 = load_2(region, slot, thread)
                convert_0(place, part_0, n_valid, thread)
                part_3 = load_3(region, slot, thread)
                convert_1(place, part_1, n_valid, thread)
                part_0 = load_0(next_region, next_slot, thread)
                convert_2(place, part_2, n_valid, thread)
                part_1 = load_1(next_region, next_slot, thread)
                convert_3(place, part_3, n_valid, thread)
            fence_tensor_reads()
            arrive_if(uint32(barrier + uint32(FULL)), int32(1))

    return bring_tiles
