"""How key and value tiles of prefill attention reach shared memory, per cache type.

f16 tiles are copied to their place at once. Every other type arrives as it lies in the page (plane after plane) and is
converted to float16 rows afterwards. The consecutive keys of a tile are consecutive bytes of each plane. Keys beyond
the last one arrive as zeros: whatever a page holds there (NaN too) must not meet a probability of 0.
"""

from __future__ import annotations

from numba.cuda import types

from cuda_kernels.emit import Emitter, Value, emitted
from cuda_kernels.prefill_tiles import PIECE_BYTES, PIECE_ELEMENTS, SharedRows
from cuda_kernels.prefill_units import Plane, RegionUnits
from kvs_core.kv_types import KvType, RegionGeometry
from kvs_core.units import align_up, ceil_div


class TileCopies:
    """Copies of one tile of one region by ``n_threads`` threads.

    Attributes that are intrinsics:
    start_direct(tile, region, key, n_valid, thread)  f16 rows straight to their place
    start_raw(raw, region, key, n_valid, thread)      bytes as in the page
    convert(raw, tile, thread)                        raw bytes to float16 rows; every thread's copies have arrived

    ``tile`` and ``raw`` are shared addresses, ``region`` the global address of the head's region, ``key`` the first
    position of the tile in its page, ``n_valid`` the number of keys that exist (others become zeros).
    """

    def __init__(self, region: RegionGeometry, tile_keys: int, n_threads: int) -> None:
        self.region, self.tile_keys, self.n_threads = region, tile_keys, n_threads
        self.rows = SharedRows(head_dim=region.head_dim)
        # 8 bytes of q8_0 are read by neighbouring threads from different banks, 16 are not
        self.units = RegionUnits(region, PIECE_ELEMENTS if region.kv_type is KvType.Q8_0 else None)
        u32, i32, i64 = types.uint32, types.int32, types.int64
        self.start_direct = emitted(types.void, u32, i64, i32, i32, u32)(self._start_direct)
        self.start_raw = emitted(types.void, u32, i64, i32, i32, u32)(self._start_raw)
        self.convert = emitted(types.void, u32, u32, u32)(self._convert)

    @property
    def tile_bytes(self) -> int:
        return self.tile_keys * self.rows.row_bytes

    @property
    def raw_bytes(self) -> int:
        """Bytes of a tile as it lies in the page, plane after plane."""
        return sum(self._plane_bytes(plane) for plane in self.units.planes)

    def _plane_bytes(self, plane: Plane) -> int:
        return align_up(self.tile_keys * plane.row_bytes, PIECE_BYTES)

    def _start_direct(
        self, emit: Emitter, tile: Value, region: Value, key: Value, n_valid: Value, thread: Value
    ) -> None:
        row_pieces = self.region.row_bytes // PIECE_BYTES
        rows_per_pass, is_even = divmod(self.n_threads, row_pieces)
        source, n_bytes = self._source(emit, region, self.region.row_bytes, key, n_valid, thread)
        for i in range(ceil_div(self.tile_keys * row_pieces, self.n_threads)):
            left = emit.clamp(emit.add(n_bytes, -i * self.n_threads * PIECE_BYTES), 0, PIECE_BYTES)
            if is_even == 0 and rows_per_pass % 8 == 0:  # every pass lands in the same column, whole swizzles further
                row, piece = emit.divide(thread, row_pieces), emit.remainder(thread, row_pieces)
                place, offset = self.rows.place(emit, tile, row, piece), i * rows_per_pass * self.rows.row_bytes
            else:
                index = emit.add(thread, i * self.n_threads)
                row, piece = emit.divide(index, row_pieces), emit.remainder(index, row_pieces)
                place, offset = self.rows.place(emit, tile, row, piece), 0
            emit.copy_16_async(place, source, (offset, i * self.n_threads * PIECE_BYTES), left)

    def _start_raw(self, emit: Emitter, raw: Value, region: Value, key: Value, n_valid: Value, thread: Value) -> None:
        for plane in self.units.planes:
            at = emit.add(region, plane.offset) if plane.offset else region
            source, n_bytes = self._source(emit, at, plane.row_bytes, key, n_valid, thread)
            self._copy_plane(emit, raw, source, n_bytes, self.tile_keys * plane.row_bytes, thread)
            raw = emit.add(raw, self._plane_bytes(plane))

    def _source(
        self, emit: Emitter, plane: Value, row_bytes: int, key: Value, n_valid: Value, thread: Value
    ) -> tuple[Value, Value]:
        """Where this thread starts to read, and how many valid bytes follow from there."""
        skipped = emit.multiply(thread, PIECE_BYTES)
        offset = emit.add(emit.multiply(key, row_bytes), skipped)
        n_bytes = emit.subtract(emit.multiply(n_valid, row_bytes), skipped)
        return emit.add(plane, emit.widen(offset)), n_bytes

    def _copy_plane(
        self, emit: Emitter, shared: Value, source: Value, n_bytes: Value, total_bytes: int, thread: Value
    ) -> None:
        place = emit.add(shared, emit.multiply(thread, PIECE_BYTES))
        pass_bytes = self.n_threads * PIECE_BYTES
        for i in range(ceil_div(total_bytes, pass_bytes)):
            left = emit.clamp(emit.add(n_bytes, -i * pass_bytes), 0, PIECE_BYTES)
            if (i + 1) * pass_bytes <= total_bytes:
                emit.copy_16_async(place, source, (i * pass_bytes, i * pass_bytes), left)
            else:
                n_here = ceil_div(total_bytes - i * pass_bytes, PIECE_BYTES)
                takes_part = emit.flag(emit.less(thread, emit.word(n_here)))
                emit.copy_16_async_if(
                    takes_part, emit.add(place, i * pass_bytes), emit.add(source, i * pass_bytes), left
                )

    def _convert(self, emit: Emitter, raw: Value, tile: Value, thread: Value) -> None:
        for row, unit in self._thread_units(emit, thread):
            halves = self.units.halves(emit, self._load_unit(emit, raw, row, unit))
            n_pieces = self.units.n_elements // PIECE_ELEMENTS
            for j in range(n_pieces):
                piece = emit.add(emit.multiply(unit, n_pieces), j) if n_pieces > 1 else unit
                emit.store_shared_words(self.rows.place(emit, tile, row, piece), 0, halves[4 * j : 4 * j + 4])

    def _thread_units(self, emit: Emitter, thread: Value) -> list[tuple[Value, Value]]:
        """Row and unit of all that a thread converts; surplus threads repeat others.

        A thread has the same unit of rows at a constant distance where that is possible: its addresses then differ by
        constants, and do not fill registers.
        """
        row_units = self.units.row_units
        step_rows, n_idle = divmod(self.n_threads, row_units)
        if n_idle and self.rows.is_swizzled:
            n_units = self.tile_keys * row_units
            indices = [emit.add(thread, i * self.n_threads) for i in range(ceil_div(n_units, self.n_threads))]
            return [self.units.find(emit, emit.clamp(index, 0, n_units - 1)) for index in indices]
        first, unit = self.units.find(emit, emit.clamp(thread, 0, step_rows * row_units - 1) if n_idle else thread)
        rows = [emit.add(first, begin) for begin in range(0, self.tile_keys, step_rows)]
        if self.tile_keys % step_rows:
            rows[-1] = emit.clamp(rows[-1], 0, self.tile_keys - 1)
        return [(row, unit) for row in rows]

    def _load_unit(self, emit: Emitter, raw: Value, row: Value, unit: Value) -> list[Value]:
        words = []
        for plane in self.units.planes:
            at = emit.add(raw, plane.row_offset(emit, row, unit))
            if plane.n_bytes < 4:
                words.append(emit.load_shared_half(at))
            else:
                step = min(16, plane.n_bytes)
                loads = [emit.load_shared_words(at, i, step // 4) for i in range(0, plane.n_bytes, step)]
                words += [word for load in loads for word in load]
            raw = emit.add(raw, self._plane_bytes(plane))
        return words
