"""How key and value tiles reach the panels of ``wgmma_tiles``: f16 by asynchronous copies, q8_0 through registers.

Two warps bring the keys and two the values, each a tile at a time into alternating places:

    free place -> copy or convert -> fence -> full        barriers in shared memory, ``FULL`` and ``FREE`` of a place

The consecutive keys of a tile are consecutive bytes of the page. Keys beyond the last one become zeros: whatever a
page holds there (NaN too) must not meet a probability of 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.cuda import int32, int64, types, uint32

from cuda_kernels.emit import Emitter, Value, emitted, words
from cuda_kernels.intrinsics import load_address, wait_all_copies
from cuda_kernels.launch import device_function
from cuda_kernels.prefill_tiles import PIECE_BYTES, PIECE_ELEMENTS
from cuda_kernels.warpgroup import PANEL_BYTES, arrive_if, fence_tensor_reads, wait_barrier
from cuda_kernels.wgmma_tiles import PANEL_ELEMENTS, PanelRows
from kvs_core.kv_types import KvType, RegionGeometry

COPY_THREADS = 64  # that bring the tiles of one region
RUN_ELEMENTS = 16  # elements that a thread converts at a time
N_PARTS = 4  # of a tile that is converted: two are on their way while one is converted

BARRIER_BYTES = 8
FULL, FREE = 0, 2 * BARRIER_BYTES  # of keys; those of values are one barrier further
STAGE_BARRIER_BYTES = 4 * BARRIER_BYTES


class PanelCopies:
    """Copies of one tile of one region by COPY_THREADS threads.

    Attributes that are intrinsics:
    start_all(tile, region, key, thread)             f16: every row to its place
    start_some(tile, region, key, n_valid, thread)   f16: the first ``n_valid`` rows, zeros beyond
    loads, converts                                  q8_0: N_PARTS intrinsics each, for one part of the tile
    loads[i](region, key, thread)                    this thread's quants and scales, as they are
    converts[i](tile, loaded, n_valid, thread)       to float16 rows

    ``tile`` is a shared address, ``region`` the global address of the head's region, ``key`` the first position of the
    tile in its page.
    """

    def __init__(self, region: RegionGeometry, tile_keys: int) -> None:
        self.region, self.tile_keys = region, tile_keys
        self.rows = PanelRows(n_rows=tile_keys, head_dim=region.head_dim)
        u32, i32, i64 = types.uint32, types.int32, types.int64
        self.start_all = emitted(types.void, u32, i64, i32, u32)(self._start_all)
        self.start_some = emitted(types.void, u32, i64, i32, i32, u32)(self._start_some)
        n_runs = tile_keys * region.head_dim // (RUN_ELEMENTS * COPY_THREADS) // N_PARTS
        self.parts = [range(i * n_runs, (i + 1) * n_runs) for i in range(N_PARTS)]
        loaded = words(5 * n_runs)
        self.loads = [emitted(loaded, i64, i32, u32)(self.part_load(part)) for part in self.parts]
        self.converts = [emitted(types.void, u32, loaded, i32, u32)(self.part_convert(part)) for part in self.parts]

    @property
    def is_direct(self) -> bool:
        return self.region.kv_type is KvType.F16

    # -- f16

    def _start_all(self, emit: Emitter, tile: Value, region: Value, key: Value, thread: Value) -> None:
        source = self._row_source(emit, region, key, thread)
        for i, (place, offset) in enumerate(self._piece_places(emit, tile, thread)):
            emit.copy_16_async(place, source, (offset, i * COPY_THREADS * PIECE_BYTES), emit.word(PIECE_BYTES))

    def _start_some(self, emit: Emitter, tile: Value, region: Value, key: Value, n_valid: Value, thread: Value) -> None:
        source = self._row_source(emit, region, key, thread)
        skipped = emit.multiply(thread, PIECE_BYTES)
        n_bytes = emit.subtract(emit.multiply(n_valid, self.region.row_bytes), skipped)
        for i, (place, offset) in enumerate(self._piece_places(emit, tile, thread)):
            pass_bytes = i * COPY_THREADS * PIECE_BYTES
            left = emit.clamp(emit.add(n_bytes, -pass_bytes), 0, PIECE_BYTES)
            emit.copy_16_async(place, source, (offset, pass_bytes), left)

    def _row_source(self, emit: Emitter, region: Value, key: Value, thread: Value) -> Value:
        offset = emit.add(emit.multiply(key, self.region.row_bytes), emit.multiply(thread, PIECE_BYTES))
        return emit.add(region, emit.widen(offset))

    def _piece_places(self, emit: Emitter, tile: Value, thread: Value) -> list[tuple[Value, int]]:
        row_pieces = self.region.head_dim // PIECE_ELEMENTS
        row, piece = emit.divide(thread, row_pieces), emit.remainder(thread, row_pieces)
        return self._places(emit, tile, row, piece, COPY_THREADS // row_pieces)

    def _places(self, emit: Emitter, tile: Value, row: Value, piece: Value, step: int) -> list[tuple[Value, int]]:
        """Address and constant offset of a piece of every ``step``-th row: its swap repeats every eight rows."""
        period = max(1, 8 // step)
        firsts = [self.rows.place(emit, tile, emit.add(row, i * step), piece) for i in range(period)]
        n_rows = self.tile_keys // step
        return [(firsts[i % period], (i - i % period) * step * PANEL_BYTES) for i in range(n_rows)]

    # -- q8_0

    def _run(self, emit: Emitter, thread: Value) -> tuple[Value, Value]:
        """Row and run of this thread's first run: eight neighbouring threads fill 128 bytes of different banks."""
        n_panels = self.region.head_dim // PANEL_ELEMENTS
        rest, low_row = emit.shift_right(thread, 3), emit.bit_and(emit.shift_right(thread, 2), 1)
        row = emit.add(emit.shift_left(emit.divide(rest, n_panels), 1), low_row)
        run = emit.add(emit.shift_left(emit.remainder(rest, n_panels), 2), emit.bit_and(thread, 3))
        return row, run

    @property
    def _run_rows(self) -> int:
        """Rows from one run of a thread to its next."""
        return COPY_THREADS * RUN_ELEMENTS // self.region.head_dim

    def part_load(self, part: range) -> Callable[..., list[Value]]:
        def load(emit: Emitter, region: Value, key: Value, thread: Value) -> list[Value]:
            row, run = self._run(emit, thread)
            at = emit.add(key, row)
            quants_at = emit.add(emit.multiply(at, self.region.row_bytes), emit.multiply(run, RUN_ELEMENTS))
            scale_at = emit.add(
                emit.multiply(at, self.region.scale_row_bytes), emit.shift_left(emit.shift_right(run, 1), 1)
            )
            quants, scales = emit.add(region, emit.widen(quants_at)), emit.add(region, emit.widen(scale_at))
            loaded: list[Value] = []
            for i in part:
                rows = i * self._run_rows
                loaded += emit.load_stream(quants, rows * self.region.row_bytes, 4)
                loaded.append(emit.load_half(scales, self.region.scale_offset + rows * self.region.scale_row_bytes))
            return loaded

        return load

    def part_convert(self, part: range) -> Callable[..., None]:
        def convert(emit: Emitter, tile: Value, loaded: list[Value], n_valid: Value, thread: Value) -> None:
            row, run = self._run(emit, thread)
            places = self._places(emit, tile, row, emit.shift_left(run, 1), self._run_rows)
            for at, i in enumerate(part):
                *quants, scale = loaded[5 * at : 5 * at + 5]
                exists = emit.less(emit.add(row, i * self._run_rows), n_valid)
                both = emit.select(exists, emit.permute(scale, emit.word(0), 0x1010), emit.word(0))
                halves = [half2 for quant in quants for half2 in emit.dequantise_bytes(quant, both)]
                place, offset = places[i]
                emit.store_shared_words(place, offset, halves[:4])
                emit.store_shared_words(emit.bit_xor(place, PIECE_BYTES), offset, halves[4:])

        return convert


def build_bring_tiles(
    copies: PanelCopies, *, first_region: int, page_tokens: int, stage_bytes: int, n_stages: int
) -> Any:
    """Device function ``bring_tiles(places, barriers, pages, head_kv, first_key, key_end, n_tiles, thread)``.

    first_region   where head 0's region starts in a page
    stage_bytes    from one place of a tile to the next; ``places`` is the shared address of the first
    barriers       shared address of the first place's barrier FULL
    """
    tile_keys, region_bytes, is_direct = copies.tile_keys, copies.region.n_bytes, copies.is_direct
    start_all, start_some = copies.start_all, copies.start_some
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
        for tile in range(n_tiles):
            stage, was_free = int32(tile) % int32(n_stages), (int32(tile) // int32(n_stages) & int32(1)) ^ int32(1)
            barrier = uint32(barriers + uint32(stage) * uint32(STAGE_BARRIER_BYTES))
            place = uint32(places + uint32(stage) * uint32(stage_bytes))
            key = first_key + int32(tile) * int32(tile_keys)
            region, slot = region_of(pages, head_kv, key), key % int32(page_tokens)
            n_valid = key_end - key

            wait_barrier(uint32(barrier + uint32(FREE)), uint32(was_free))
            if is_direct:
                if n_valid >= int32(tile_keys):
                    start_all(place, region, slot, thread)
                else:
                    start_some(place, region, slot, n_valid, thread)
                wait_all_copies()
            else:
                part_2 = load_2(region, slot, thread)
                convert_0(place, part_0, n_valid, thread)
                part_3 = load_3(region, slot, thread)
                convert_1(place, part_1, n_valid, thread)
                # behind the last tile its own keys are read once more
                key = first_key + min(int32(tile) + int32(1), n_tiles - int32(1)) * int32(tile_keys)
                region, slot = region_of(pages, head_kv, key), key % int32(page_tokens)
                part_0 = load_0(region, slot, thread)
                convert_2(place, part_2, n_valid, thread)
                part_1 = load_1(region, slot, thread)
                convert_3(place, part_3, n_valid, thread)
            fence_tensor_reads()
            arrive_if(uint32(barrier + uint32(FULL)), int32(1))

    return bring_tiles
