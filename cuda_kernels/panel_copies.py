"""How key and value tiles reach the panels of ``wgmma_tiles``: f16 by asynchronous copies, q8_0 through registers.

The consecutive keys of a tile are consecutive bytes of the page. Keys beyond the last one become zeros: whatever a
page holds there (NaN too) must not meet a probability of 0.
"""

from __future__ import annotations

from numba.cuda import types

from cuda_kernels.emit import Emitter, Value, emitted, words
from cuda_kernels.prefill_tiles import PIECE_BYTES, PIECE_ELEMENTS
from cuda_kernels.warpgroup import PANEL_BYTES
from cuda_kernels.wgmma_tiles import PANEL_ELEMENTS, PanelRows
from kvs_core.kv_types import KvType, RegionGeometry

RUN_ELEMENTS = 16  # elements that a thread converts at a time


class PanelCopies:
    """Copies of one tile of one region by ``n_threads`` threads, a multiple of 32.

    Attributes that are intrinsics:
    start_all(tile, region, key, thread)             f16: every row to its place
    start_some(tile, region, key, n_valid, thread)   f16: the first ``n_valid`` rows, zeros beyond
    load(region, key, thread)                        q8_0: this thread's quants and scales, as they are
    convert(tile, loaded, n_valid, thread)           q8_0: to float16 rows

    ``tile`` is a shared address, ``region`` the global address of the head's region, ``key`` the first position of the
    tile in its page.
    """

    def __init__(self, region: RegionGeometry, tile_keys: int, n_threads: int) -> None:
        self.region, self.tile_keys, self.n_threads = region, tile_keys, n_threads
        self.rows = PanelRows(n_rows=tile_keys, head_dim=region.head_dim)
        self.n_runs = tile_keys * region.head_dim // (RUN_ELEMENTS * n_threads)
        loaded = words(5 * self.n_runs)
        u32, i32, i64 = types.uint32, types.int32, types.int64
        self.start_all = emitted(types.void, u32, i64, i32, u32)(self._start_all)
        self.start_some = emitted(types.void, u32, i64, i32, i32, u32)(self._start_some)
        self.load = emitted(loaded, i64, i32, u32)(self._load)
        self.convert = emitted(types.void, u32, loaded, i32, u32)(self._convert)

    @property
    def is_direct(self) -> bool:
        return self.region.kv_type is KvType.F16

    # -- f16

    def _start_all(self, emit: Emitter, tile: Value, region: Value, key: Value, thread: Value) -> None:
        source = self._row_source(emit, region, key, thread)
        for i, (place, offset) in enumerate(self._places(emit, tile, thread)):
            emit.copy_16_async(place, source, (offset, i * self.n_threads * PIECE_BYTES), emit.word(PIECE_BYTES))

    def _start_some(self, emit: Emitter, tile: Value, region: Value, key: Value, n_valid: Value, thread: Value) -> None:
        source = self._row_source(emit, region, key, thread)
        skipped = emit.multiply(thread, PIECE_BYTES)
        n_bytes = emit.subtract(emit.multiply(n_valid, self.region.row_bytes), skipped)
        for i, (place, offset) in enumerate(self._places(emit, tile, thread)):
            pass_bytes = i * self.n_threads * PIECE_BYTES
            left = emit.clamp(emit.add(n_bytes, -pass_bytes), 0, PIECE_BYTES)
            emit.copy_16_async(place, source, (offset, pass_bytes), left)

    def _row_source(self, emit: Emitter, region: Value, key: Value, thread: Value) -> Value:
        offset = emit.add(emit.multiply(key, self.region.row_bytes), emit.multiply(thread, PIECE_BYTES))
        return emit.add(region, emit.widen(offset))

    def _places(self, emit: Emitter, tile: Value, thread: Value) -> list[tuple[Value, int]]:
        """Address and constant offset of every piece of this thread: the swap of pieces repeats every eight rows."""
        row_pieces = self.region.head_dim // PIECE_ELEMENTS
        n_passes = self.tile_keys * row_pieces // self.n_threads
        rows_per_pass, rest = divmod(self.n_threads, row_pieces)
        period = n_passes
        if rest == 0:
            period = 1 if rows_per_pass % 8 == 0 else 8 // rows_per_pass if 8 % rows_per_pass == 0 else n_passes
        places: list[tuple[Value, int]] = []
        for i in range(n_passes):
            if i >= period:
                place, offset = places[i - period]
                places.append((place, offset + period * rows_per_pass * PANEL_BYTES))
                continue
            index = emit.add(thread, i * self.n_threads)
            row, piece = emit.divide(index, row_pieces), emit.remainder(index, row_pieces)
            places.append((self.rows.place(emit, tile, row, piece), 0))
        return places

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
        """Rows from one run of a thread to its next: a multiple of eight, after which the swap of pieces repeats."""
        return self.n_threads * RUN_ELEMENTS // self.region.head_dim

    def _load(self, emit: Emitter, region: Value, key: Value, thread: Value) -> list[Value]:
        row, run = self._run(emit, thread)
        at = emit.add(key, row)
        quants_at = emit.add(emit.multiply(at, self.region.row_bytes), emit.multiply(run, RUN_ELEMENTS))
        scale_at = emit.add(
            emit.multiply(at, self.region.scale_row_bytes), emit.shift_left(emit.shift_right(run, 1), 1)
        )
        quants, scales = emit.add(region, emit.widen(quants_at)), emit.add(region, emit.widen(scale_at))
        loaded: list[Value] = []
        for i in range(self.n_runs):
            rows = i * self._run_rows
            loaded += emit.load_stream(quants, rows * self.region.row_bytes, 4)
            loaded.append(emit.load_half(scales, self.region.scale_offset + rows * self.region.scale_row_bytes))
        return loaded

    def _convert(self, emit: Emitter, tile: Value, loaded: list[Value], n_valid: Value, thread: Value) -> None:
        row, run = self._run(emit, thread)
        even = self.rows.place(emit, tile, row, emit.shift_left(run, 1))
        odd = emit.bit_xor(even, PIECE_BYTES)
        for i in range(self.n_runs):
            *quants, scale = loaded[5 * i : 5 * i + 5]
            exists = emit.less(emit.add(row, i * self._run_rows), n_valid)
            both = emit.select(exists, emit.permute(scale, emit.word(0), 0x1010), emit.word(0))
            halves = [half2 for quant in quants for half2 in emit.dequantise_bytes(quant, both)]
            emit.store_shared_words(even, i * self._run_rows * PANEL_BYTES, halves[:4])
            emit.store_shared_words(odd, i * self._run_rows * PANEL_BYTES, halves[4:])
