"""What products that stream their weights do with their input first: bring it to shared memory, quantised.

The input is quantised already, or float32, or float32 that is to be normalised: then every block of threads does what
``quantise`` and ``norm_quantise`` do, with the same bits, and a launch less stands between two products. Where a
lane reads 32 neighbouring bytes, the even pieces of 16 bytes of a vector come before the odd ones in shared memory:
lanes then read neighbouring pieces at a time, no two from the same banks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

from numba import cuda
from numba.cuda import float32, int32, int64, types, uint32

from cuda_kernels.emit import Emitter, Value, emitted, floats
from cuda_kernels.intrinsics import FULL_WARP, copy_16_async, wait_all_copies
from cuda_kernels.launch import device_function
from cuda_kernels.quantise import NORM_THREADS, SHRINK
from kvs_core.units import ceil_div

PARTIAL_BYTES = 4 * (NORM_THREADS // 32)
"""Shared memory for the sums of the warps of ``norm_quantise``."""

MOST_QUADS = 8
"""Four floats each, that a lane has at once: as many as lanes share a block."""


class VectorInput(Enum):
    """What a product is given."""

    QUANTS = "quants"
    FLOATS = "floats"
    NORMED = "normed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """What turns the input of a product into what it multiplies.

    weight   float32 [n_cols]
    out      float32 [n_vectors, n_cols]     the normalised input, for others that read it
    """

    weight: Any
    out: Any
    eps: float


class _Quads:
    """Four neighbouring floats a lane, from each of the warps of ``norm_quantise`` whose part this warp plays.

    Warp w of ``n_warps`` plays warps w, w + n_warps, ..; only ``n`` of them have anything to do in the first round of
    ``n_round`` quads. ``in_halves``: whether the even pieces of a vector come first in shared memory.
    """

    def __init__(self, n_threads: int, n_cols: int, *, in_halves: bool, n_round: int = NORM_THREADS) -> None:
        self.n_warps, self.n_threads, self.in_halves = n_threads // 32, n_threads, in_halves
        self.n_round, self.n_played = n_round, n_round // n_threads
        self.n_quads = n_cols // 4
        self.n = min(self.n_played, ceil_div(self.n_quads, n_threads))
        assert self.n <= MOST_QUADS
        quads, u32, i32, i64, f32 = floats(4 * self.n), types.uint32, types.int32, types.int64, types.float32
        self.load = emitted(quads, i64, i32)(self._load)
        self.zeros = emitted(floats(self.n))(lambda emit: [emit.float(0.0)] * self.n)
        self.square = emitted(floats(self.n), floats(self.n), quads, f32)(self._square)
        self.store_sums = emitted(types.void, floats(self.n), u32, i32, i32)(self._store_sums)
        self.normalise = emitted(quads, quads, quads, f32, f32)(self._normalise)
        self.store = emitted(types.void, quads, i32, u32, u32, i64, i32)(self._store)

    def _is_whole(self, j: int) -> bool:
        """Whether every thread has a quad in part ``j``, known when there is one round."""
        return self.n_quads <= self.n_round and (j + 1) * self.n_threads <= self.n_quads

    def _load(self, emit: Emitter, row: Value, first: Value) -> list[Value]:
        """Zeros beyond the row."""
        loaded = []
        whole_at = emit.add(row, emit.widen(emit.shift_left(first, 4)))
        for j in range(self.n):
            if self._is_whole(j):
                loaded += emit.load_recent_floats(whole_at, 16 * self.n_threads * j, 4)
                continue
            quad = emit.add(first, self.n_threads * j)
            is_present = emit.less(quad, emit.word(self.n_quads))
            held = emit.select(is_present, quad, emit.word(0))
            four = emit.load_recent_floats(emit.add(row, emit.widen(emit.shift_left(held, 4))), 0, 4)
            loaded += [emit.select(is_present, value, emit.float(0.0)) for value in four]
        return loaded

    def _square(self, emit: Emitter, sums: list[Value], quads: list[Value], shrink: Value) -> list[Value]:
        result = list(sums)
        for i, value in enumerate(quads):
            shrunk = emit.float_multiply(value, shrink)
            result[i // 4] = emit.fma(shrunk, shrunk, result[i // 4])
        return result

    def _store_sums(self, emit: Emitter, sums: list[Value], partials: Value, warp: Value, lane: Value) -> None:
        values = list(sums)
        for mask in (16, 8, 4, 2, 1):
            values = [emit.float_add(value, emit.exchange(value, mask)) for value in values]
        values += [emit.float(0.0)] * (self.n_played - self.n)
        at = emit.add(partials, emit.shift_left(warp, 2))
        with emit.when(emit.less(lane, emit.word(1))):
            for j, value in enumerate(values):
                emit.store_shared_words(at, 4 * self.n_warps * j, [emit.as_word(value)])

    def _normalise(
        self, emit: Emitter, quads: list[Value], weights: list[Value], shrink: Value, factor: Value
    ) -> list[Value]:
        return [
            emit.float_multiply(emit.float_multiply(emit.float_multiply(value, shrink), factor), weight)
            for value, weight in zip(quads, weights, strict=True)
        ]

    def _store(
        self,
        emit: Emitter,
        quads: list[Value],
        first: Value,
        vector_at: Value,
        scales_at: Value,
        out: Value,
        lane: Value,
    ) -> None:
        """Quantise blocks that eight lanes share; the floats go to ``out``, too, unless it is 0.

        Every stage is done for all quads before the next: each is a chain of instructions that wait for each other.
        """
        fours = [quads[4 * j : 4 * j + 4] for j in range(self.n)]
        divided = self._divide(emit, self._largest(emit, fours), lane)
        rounded = [
            [emit.round_to_int(emit.float_multiply(value, inverse)) for value in four]
            for four, (_, inverse) in zip(fours, divided, strict=True)
        ]
        totals = [emit.add(emit.add(q[0], q[1]), emit.add(q[2], q[3])) for q in rounded]
        for mask in (2, 1):
            totals = [emit.add(total, emit.exchange_word(total, mask)) for total in totals]
        first_at = emit.add(vector_at, self._place(emit, first))
        first_scales_at = emit.add(scales_at, emit.shift_left(emit.shift_right(first, 2), 3))
        part_bytes = self.n_threads * (2 if self.in_halves else 4)

        def store(j: int) -> None:
            quants = rounded[j]
            pairs = [emit.permute(quants[i], quants[i + 1], 0x0040) for i in (0, 2)]
            emit.store_shared_words(first_at, part_bytes * j, [emit.permute(*pairs, 0x5410)])
            with emit.when(emit.less(emit.bit_and(lane, 3), emit.word(1))):
                scale_and_sum = [emit.as_word(divided[j][0]), emit.as_word(emit.int_to_float(totals[j]))]
                emit.store_shared_words(first_scales_at, 2 * self.n_threads * j, scale_and_sum)
            with emit.when(emit.is_not_zero(out)):
                row_at = emit.add(out, emit.widen(emit.shift_left(first, 4)))
                emit.store_words(row_at, 16 * self.n_threads * j, [emit.as_word(value) for value in fours[j]])

        for j in range(self.n):
            if self._is_whole(j):
                store(j)
            else:
                with emit.when(emit.less(emit.add(first, self.n_threads * j), emit.word(self.n_quads))):
                    store(j)

    def _largest(self, emit: Emitter, fours: list[list[Value]]) -> list[Value]:
        """The largest magnitude of each quad's block."""
        found = []
        for four in fours:
            a, b, c, d = (emit.float_absolute(value) for value in four)
            found.append(emit.float_maximum(emit.float_maximum(a, b), emit.float_maximum(c, d)))
        for mask in (4, 2, 1):
            found = [emit.float_maximum(value, emit.exchange(value, mask)) for value in found]
        return found

    def _divide(self, emit: Emitter, largest: list[Value], lane: Value) -> list[tuple[Value, Value]]:
        """Scale of each quad's block and what its values are multiplied with: 0 where all are 0.

        A division is long and may branch, so each quad's are done by one of the lanes of its block.
        """
        of_block, own = emit.bit_and(lane, MOST_QUADS - 1), largest[0]
        for j, value in enumerate(largest[1:], 1):
            own = emit.select(emit.equal(of_block, emit.word(j)), value, own)
        scale = emit.float_divide(own, emit.float(127.0))
        is_some = emit.float_less(emit.float(0.0), own)
        inverse = emit.select(is_some, emit.float_divide(emit.float(127.0), own), emit.float(0.0))
        if self.n == 1:
            return [(scale, inverse)]
        block = emit.subtract(lane, of_block)
        givers = [emit.add(block, j) for j in range(self.n)]
        return [(emit.from_lane(scale, giver), emit.from_lane(inverse, giver)) for giver in givers]

    def _place(self, emit: Emitter, quad: Value) -> Value:
        """Where the quants of a quad lie in their vector."""
        if not self.in_halves:
            return emit.shift_left(quad, 2)
        within = emit.add(emit.shift_left(emit.shift_right(quad, 3), 4), emit.shift_left(emit.bit_and(quad, 3), 2))
        is_odd = emit.less(emit.word(0), emit.bit_and(quad, 4))
        return emit.add(within, emit.select(is_odd, emit.word(2 * self.n_quads), emit.word(0)))


@emitted(types.float32, types.uint32)
def load_shared_float(emit: Emitter, address: Value) -> Value:
    return emit.load_shared_float(address, 0)


def build_take_vector(kind: VectorInput, n_threads: int, n_cols: int, *, in_halves: bool) -> tuple[Any, Any, Any]:
    """Device functions that fill shared memory with one vector.

    begin(scales, tid)      before the kernels before this one have ended; reads nothing that a kernel writes
    ask(vector, scales, vector_at, scales_at, tid)      asks for what is needed first
    take(begun, asked, vector, scales, normed, eps, vector_at, scales_at, partials, tid)      ends with a barrier
    vector   quants or floats, ``scales`` of the quants or, to normalise, the weights
    normed   where one block leaves the normalised floats, 0 in the others
    """
    if kind is VectorInput.QUANTS:
        return _begin_nothing, *_build_copy(n_threads, n_cols, in_halves=in_halves)
    is_normed = kind is VectorInput.NORMED
    n_own = NORM_THREADS // n_threads if is_normed else min(MOST_QUADS, ceil_div(n_cols // 4, n_threads))
    quads = _Quads(n_threads, n_cols, in_halves=in_halves, n_round=n_own * n_threads)
    return _build_quantise(quads, n_cols, is_normed=is_normed)


@device_function
def _begin_nothing(scales, tid):
    return 0


def _build_copy(n_threads: int, n_cols: int, *, in_halves: bool) -> tuple[Any, Any]:
    n_pieces, n_scale_pieces, odd_at = n_cols // 16, n_cols // 32, n_cols // 2

    @device_function
    def ask(vector, scales, vector_at, scales_at, tid):
        i = tid
        while i < int32(n_pieces):
            place = int32(i << int32(4))
            if in_halves:
                place = int32(int32(int32(i >> int32(1)) << int32(4)) + int32(int32(i & int32(1)) * int32(odd_at)))
            copy_16_async(uint32(vector_at + uint32(place)), vector + int64(int32(i << int32(4))), int32(16))
            i = int32(i + int32(n_threads))
        i = tid
        while i < int32(n_scale_pieces):
            offset = int32(i << int32(4))
            copy_16_async(uint32(scales_at + uint32(offset)), scales + int64(offset), int32(16))
            i = int32(i + int32(n_threads))
        return 0

    @device_function
    def take(begun, asked, vector, scales, normed, eps, vector_at, scales_at, partials, tid):
        wait_all_copies()
        cuda.syncthreads()

    return ask, take


def _build_quantise(quads: _Quads, n_cols: int, *, is_normed: bool) -> tuple[Any, Any, Any]:
    load, zeros, square, store_sums = quads.load, quads.zeros, quads.square, quads.store_sums
    normalise, store, n_quads, n_round = quads.normalise, quads.store, quads.n_quads, quads.n_round
    has_more = n_quads > n_round

    @device_function
    def begin(scales, tid):
        return load(scales, tid)

    @device_function
    def ask(vector, scales, vector_at, scales_at, tid):
        return load(vector, tid)

    @device_function
    def sum_squares(values, vector, shrink, partials, tid):
        lane = int32(tid & int32(31))
        sums = square(zeros(), values, shrink)
        if has_more:
            quad = int32(tid + int32(n_round))
            while quad - lane < int32(n_quads):
                sums = square(sums, load(vector, quad), shrink)
                quad = int32(quad + int32(n_round))
        store_sums(sums, partials, int32(tid >> int32(5)), lane)
        cuda.syncthreads()
        total = load_shared_float(uint32(partials + uint32(int32(lane << int32(2)))))
        for step in (16, 8, 4, 2, 1):
            total += cuda.shfl_xor_sync(FULL_WARP, total, step)
        cuda.syncthreads()
        return total

    @device_function
    def take(begun, asked, vector, scales, normed, eps, vector_at, scales_at, partials, tid):
        lane = int32(tid & int32(31))
        values = asked
        out = int64(0)
        shrink, factor = float32(1.0), float32(1.0)
        if is_normed:
            out = normed
            total = float32(math.inf)
            for given in (float32(1.0), float32(SHRINK)):
                if total == float32(math.inf):
                    shrink = given
                    total = sum_squares(values, vector, shrink, partials, tid)
            factor = float32(1.0) / math.sqrt(total / float32(n_cols) + eps * shrink * shrink)
            values = normalise(values, begun, shrink, factor)
        store(values, tid, vector_at, scales_at, out, lane)
        if has_more:
            quad = int32(tid + int32(n_round))
            while quad - lane < int32(n_quads):
                values = load(vector, quad)
                if is_normed:
                    values = normalise(values, load(scales, quad), shrink, factor)
                store(values, quad, vector_at, scales_at, out, lane)
                quad = int32(quad + int32(n_round))
        cuda.syncthreads()

    return (begin if is_normed else _begin_nothing), ask, take
