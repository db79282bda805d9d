"""Tiles of a product of experts with many pairs: quantised weights to float16 in shared memory, then tensor cores.

    weights  64 rows x 128 columns      inputs  tile_pairs rows x 128 columns      both float16, rows of 256 bytes

Pieces of 16 bytes trade places within a row, by the row's number, so that eight rows are read without bank conflicts.
Gate and up take turns every eight rows: the lane that has a gate has the up that it is multiplied with.
The kernel is in ``expert_prefill``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gguf import GGMLQuantizationType
from numba.cuda import types

from cuda_kernels.activation import HALF_GROWTH, HALF_SHRINK, Activation, emit_gated_value
from cuda_kernels.emit import Emitter, Value, emitted, floats, words
from cuda_kernels.row_units import takes_float_activations, unit_elements
from cuda_kernels.unit_formats import Unit
from cuda_kernels.weight_units import UNIT_FORMATS, decode_floats
from cuda_kernels.weights import MAX_PLANES

N_THREADS = 256
TILE_ROWS = 64
STEP_COLUMNS = 128
ROW_BYTES = 2 * STEP_COLUMNS
_N_WARPS = N_THREADS // 32
_PIECES = ROW_BYTES // 16
_WARP_PAIRS = 32


class ExpertTile:
    """The steps of a block that multiplies ``tile_pairs`` (64 or 128) rows of inputs with 64 rows of weights.

    Attributes that are intrinsics:
    load(planes, strides, expert_row, row, n_rows, tid, step, n_cols)     this thread's share of a step's weights
    store(words, base, tid, step, n_cols)                                 as float16 to shared memory
    start(base, inputs, ids_at, n_valid, tid, step, n_cols)               copies of a step's inputs begin
    multiply(sums, inputs_at, weights_at, warp, lane)                     sums plus the product of a step
    zeros()                                                               cleared sums
    store_products(sums, out, bias, n_valid, n_left, n_rows, warp, lane)  float32, of inputs that are times HALF_SHRINK
    store_gated(sums, out, gate_bias, up_bias, n_valid, n_left, n_rows, warp, lane)     float16, times HALF_SHRINK
    """

    def __init__(
        self,
        weight_type: GGMLQuantizationType,
        tile_pairs: int,
        activation: Activation | None,
        *,
        has_bias: bool,
    ) -> None:
        self.weight_type, self.activation, self.has_bias = weight_type, activation, has_bias
        self.is_float = takes_float_activations(weight_type)
        self.elements = unit_elements(weight_type)
        self.step_units = STEP_COLUMNS // self.elements
        self.n_own = max(1, TILE_ROWS * self.step_units // N_THREADS)
        self.n_words = 4 if self.is_float else UNIT_FORMATS[weight_type].n_words
        self.tile_pairs = tile_pairs
        self.warps_down = tile_pairs // _WARP_PAIRS
        self.warp_tiles = TILE_ROWS // (_N_WARPS // self.warps_down) // 8
        self.n_sums = 2 * self.warp_tiles * 4
        u32, i32, i64 = types.uint32, types.int32, types.int64
        loaded, sums = words(self.n_own * self.n_words), floats(self.n_sums)
        planes, strides = types.UniTuple(i64, 2 * MAX_PLANES), types.UniTuple(i64, MAX_PLANES)
        self.load = emitted(loaded, planes, strides, i64, i32, i32, i32, i32, i32)(self._load)
        self.store = emitted(types.void, loaded, u32, i32, i32, i32)(self._store)
        self.start = emitted(types.void, u32, i64, u32, i32, i32, i32, i32)(self._start)
        self.multiply = emitted(sums, sums, u32, u32, i32, i32)(self._multiply)
        self.zeros = emitted(sums)(lambda emit: [emit.float(0.0)] * self.n_sums)
        ends = (i32, i32, i32, i32, i32)
        self.store_products = emitted(types.void, sums, i64, i64, *ends)(self._store_products)
        self.store_gated = emitted(types.void, sums, i64, i64, i64, *ends)(self._store_gated)

    @property
    def block_rows(self) -> int:
        """Rows of results that a block makes."""
        return TILE_ROWS if self.activation is None else TILE_ROWS // 2

    @property
    def inputs_bytes(self) -> int:
        return self.tile_pairs * ROW_BYTES

    @property
    def weights_bytes(self) -> int:
        return TILE_ROWS * ROW_BYTES

    def _place_unit(self, emit: Emitter, tid: Value, i: int, step: Value) -> tuple[Value, Value]:
        """Row of the tile and number in its row of this thread's unit ``i``; few units are taken by two threads."""
        own = emit.bit_and(emit.add(tid, N_THREADS * i), TILE_ROWS * self.step_units - 1)
        bits = self.step_units.bit_length() - 1
        within = emit.bit_and(own, self.step_units - 1)
        return emit.shift_right(own, bits), emit.add(emit.shift_left(step, bits), within)

    def _load(self, emit: Emitter, planes: list[Value], strides: list[Value], *rest: Value) -> list[Value]:
        loaded = []
        for rows, unit in self._own_units(emit, planes, strides, *rest):
            if self.is_float:
                loaded += emit.load_stream(emit.add(rows[0], emit.widen(emit.multiply(unit.number, 16))), 0, 4)
            else:
                loaded += UNIT_FORMATS[self.weight_type].load(emit, rows, unit)
        return loaded

    def _own_units(
        self, emit: Emitter, planes: list[Value], strides: list[Value], *rest: Value
    ) -> Iterator[tuple[list[Value], Unit]]:
        """Addresses of the row of each unit that this thread takes in a step, and the unit."""
        expert_row, first_row, n_rows, tid, step, n_cols = rest
        last_unit = emit.add(emit.shift_right(n_cols, self.elements.bit_length() - 1), -1)
        for i in range(self.n_own):
            tile_row, number = self._place_unit(emit, tid, i, step)
            number = emit.select(emit.less(last_unit, number), last_unit, number)
            gate, up = planes[:MAX_PLANES], planes[MAX_PLANES:]
            within = tile_row
            if self.activation is not None:
                is_up = emit.less(emit.word(0), emit.bit_and(tile_row, 8))
                gate = [emit.select(is_up, b, a) for a, b in zip(gate, up, strict=True)]
                eights = emit.shift_left(emit.shift_right(tile_row, 4), 3)
                within = emit.add(eights, emit.bit_and(tile_row, 7))
            row, last_row = emit.add(first_row, within), emit.add(n_rows, -1)
            row = emit.select(emit.less(last_row, row), last_row, row)
            source = emit.add(expert_row, emit.widen(row))
            rows = [emit.add(p, emit.multiply(source, stride)) for p, stride in zip(gate, strides, strict=True)]
            yield rows, Unit.of(emit, emit.shift_right(number, 5), emit.bit_and(number, 31))

    def _store(self, emit: Emitter, loaded: list[Value], base: Value, tid: Value, step: Value, n_cols: Value) -> None:
        """Zeros beyond the last column."""
        n_units = emit.shift_right(n_cols, self.elements.bit_length() - 1)
        for i in range(self.n_own):
            tile_row, number = self._place_unit(emit, tid, i, step)
            is_there = emit.less(number, n_units)
            own = loaded[i * self.n_words : (i + 1) * self.n_words]
            row_at = emit.add(base, emit.multiply(tile_row, ROW_BYTES))
            swap = emit.bit_and(tile_row, 7)
            for first, values in self._decode(emit, own, number):
                column = emit.bit_and(first, STEP_COLUMNS - 1)
                halves = [emit.pack_half2(values[j], values[j + 1]) for j in range(0, len(values), 2)]
                kept = [emit.select(is_there, half2, emit.word(0)) for half2 in halves]
                for j in range(0, len(kept), 4):
                    piece = emit.bit_xor(emit.add(emit.shift_right(column, 3), j // 4), swap)
                    at = emit.add(row_at, emit.shift_left(piece, 4))
                    part = kept[j : j + 4]
                    if len(part) < 4:  # half a piece
                        at = emit.add(at, emit.shift_left(emit.bit_and(column, 7), 1))
                    emit.store_shared_words(at, 0, part)

    def _decode(self, emit: Emitter, loaded: list[Value], number: Value) -> list[tuple[Value, list[Value]]]:
        """Runs of weights, each with its first column."""
        unit = Unit.of(emit, emit.shift_right(number, 5), emit.bit_and(number, 31))
        if self.is_float:
            return [(emit.multiply(number, self.elements), decode_floats(emit, self.weight_type, loaded))]
        runs = []
        for group in UNIT_FORMATS[self.weight_type].decode(emit, loaded, unit):
            quants = [emit.int_to_float(emit.signed_byte(word, i)) for word in group.quants for i in range(4)]
            shift = group.shift
            if shift is None:
                values = [emit.float_multiply(group.scale, quant) for quant in quants]
            else:
                values = [emit.fma(group.scale, quant, shift) for quant in quants]
            runs.append((emit.add(group.first, group.further), values))
        return runs

    def _start(self, emit: Emitter, base: Value, inputs: Value, ids_at: Value, *rest: Value) -> None:
        n_valid, tid, step, n_cols = rest
        piece = emit.bit_and(tid, _PIECES - 1)
        column = emit.add(emit.shift_left(step, 7), emit.shift_left(piece, 3))
        row_bytes = emit.widen(emit.shift_left(n_cols, 1))
        column_at = emit.add(inputs, emit.widen(emit.shift_left(column, 1)))
        length = emit.select(emit.less(column, n_cols), emit.word(16), emit.word(0))
        for i in range(self.tile_pairs * _PIECES // N_THREADS):
            pair = emit.add(emit.shift_right(tid, 4), i * (N_THREADS // _PIECES))
            (row,) = emit.load_shared_words(emit.add(ids_at, emit.shift_left(pair, 2)), 0, 1)
            source = emit.add(column_at, emit.multiply(emit.widen(row), row_bytes))
            place = emit.bit_xor(piece, emit.bit_and(pair, 7))
            at = emit.add(emit.add(base, emit.multiply(pair, ROW_BYTES)), emit.shift_left(place, 4))
            n_bytes = emit.select(emit.less(pair, n_valid), length, emit.word(0))
            emit.copy_16_async(at, source, (0, 0), n_bytes)

    def _warp_place(self, emit: Emitter, warp: Value) -> tuple[Value, Value]:
        """First pair and first row of a warp's part of the tile."""
        bits = self.warps_down.bit_length() - 1
        pair = emit.multiply(emit.bit_and(warp, self.warps_down - 1), _WARP_PAIRS)
        return pair, emit.multiply(emit.shift_right(warp, bits), 8 * self.warp_tiles)

    def _multiply(
        self, emit: Emitter, sums: list[Value], inputs_at: Value, weights_at: Value, warp: Value, lane: Value
    ) -> list[Value]:
        first_pair, first_row = self._warp_place(emit, warp)
        swap = emit.bit_and(lane, 7)
        pair = emit.add(first_pair, emit.bit_and(lane, 15))
        a_at = emit.add(inputs_at, emit.multiply(pair, ROW_BYTES))
        a_piece = emit.shift_left(emit.bit_xor(emit.shift_right(lane, 4), swap), 4)
        row = emit.add(emit.add(first_row, swap), emit.shift_left(emit.shift_right(lane, 4), 3))
        b_at = emit.add(weights_at, emit.multiply(row, ROW_BYTES))
        b_piece = emit.shift_left(emit.bit_xor(emit.bit_and(emit.shift_right(lane, 3), 1), swap), 4)
        result = list(sums)
        for k in range(STEP_COLUMNS // 16):
            a_from, b_from = (
                emit.add(at, emit.bit_xor(piece, 32 * k)) for at, piece in ((a_at, a_piece), (b_at, b_piece))
            )
            a = [emit.load_matrices(a_from, i * 16 * ROW_BYTES) for i in range(2)]
            b = [emit.load_matrices(b_from, j * 16 * ROW_BYTES) for j in range(self.warp_tiles // 2)]
            for i in range(2):
                for j in range(self.warp_tiles):
                    at = 4 * (i * self.warp_tiles + j)
                    half = 2 * (j % 2)
                    result[at : at + 4] = emit.mma(a[i], b[j // 2][half : half + 2], result[at : at + 4])
        return result

    def _results(self, emit: Emitter, warp: Value, lane: Value) -> list[tuple[int, Value, int]]:
        """Index of a pair of sums, its pair's number in the tile, and the tile of eight rows of the warp."""
        first_pair, _ = self._warp_place(emit, warp)
        g = emit.add(first_pair, emit.shift_right(lane, 2))
        return [
            (4 * (i * self.warp_tiles + j) + 2 * h, emit.add(g, 16 * i + 8 * h), j)
            for i in range(2)
            for j in range(self.warp_tiles)
            for h in range(2)
        ]

    def _store_products(self, emit: Emitter, sums: list[Value], out: Value, bias: Value, *rest: Value) -> None:
        """``out``: the first result of the tile; ``bias``: that of its first row; ``n_left``: rows from there on."""
        n_valid, n_left, n_rows, warp, lane = rest
        _, first_row = self._warp_place(emit, warp)
        first = emit.add(first_row, emit.shift_left(emit.bit_and(lane, 3), 1))
        for at, pair, j in self._results(emit, warp, lane):
            row = emit.add(first, 8 * j)
            is_there = _both(emit, emit.less(pair, n_valid), emit.less(row, n_left))
            a, b = (emit.float_multiply(sums[at + i], emit.float(HALF_GROWTH)) for i in range(2))
            if self.has_bias:
                a, b = _add_bias(emit, bias, row, n_left, a, b)
            index = emit.add(emit.multiply(emit.widen(pair), emit.widen(n_rows)), emit.widen(row))
            text = "{.reg .pred p; setp.ne.s32 p,$3,0; @p st.global.v2.f32 [$0],{$1,$2};}"
            address = emit.add(out, emit.shift_left(index, 2))
            emit.asm(text, "", "lffr", [address, a, b, is_there], ordered=True)

    def _store_gated(
        self, emit: Emitter, sums: list[Value], out: Value, gate_bias: Value, up_bias: Value, *rest: Value
    ) -> None:
        n_valid, n_left, n_rows, warp, lane = rest
        assert self.activation is not None
        _, first_row = self._warp_place(emit, warp)
        first = emit.add(emit.shift_right(first_row, 1), emit.shift_left(emit.bit_and(lane, 3), 1))
        for at, pair, j in self._results(emit, warp, lane):
            if j % 2:
                continue
            row = emit.add(first, 4 * j)
            is_there = _both(emit, emit.less(pair, n_valid), emit.less(row, n_left))
            gates, ups = sums[at : at + 2], sums[at + 4 : at + 6]
            if self.has_bias:
                gates = _add_bias(emit, gate_bias, row, n_left, *gates)
                ups = _add_bias(emit, up_bias, row, n_left, *ups)
            values = (emit_gated_value(emit, self.activation, g, u) for g, u in zip(gates, ups, strict=True))
            a, b = (emit.float_multiply(value, emit.float(HALF_SHRINK)) for value in values)
            index = emit.add(emit.multiply(emit.widen(pair), emit.widen(n_rows)), emit.widen(row))
            text = "{.reg .pred p; setp.ne.s32 p,$2,0; @p st.global.u32 [$0],$1;}"
            address = emit.add(out, emit.shift_left(index, 1))
            emit.asm(text, "", "lrr", [address, emit.pack_half2(a, b), is_there], ordered=True)


def _both(emit: Emitter, a: Value, b: Value) -> Value:
    """Both conditions, as a word."""
    return emit.bit_and(emit.flag(a), emit.flag(b))


def _add_bias(emit: Emitter, bias: Value, row: Value, n_left: Value, a: Value, b: Value) -> list[Value]:
    """The biases of two neighbouring rows added; rows beyond the last get that of the first."""
    held = emit.select(emit.less(row, n_left), row, emit.word(0))
    loaded = emit.load_floats(emit.add(bias, emit.widen(emit.shift_left(held, 2))), 0, 2)
    return [emit.float_add(value, own) for value, own in zip((a, b), loaded, strict=True)]


def intrinsics_of(tile: ExpertTile) -> tuple[Any, ...]:
    """What a kernel closes over."""
    return (
        tile.load,
        tile.store,
        tile.start,
        tile.multiply,
        tile.zeros,
        tile.store_products,
        tile.store_gated,
    )
