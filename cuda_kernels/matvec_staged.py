"""Products of Q4_K and Q5_K matrices with one vector: weights on their way through shared memory, copied ahead.

``matvec`` loads a unit ahead into registers, which keeps too few bytes under way. Here a warp copies whole steps (four
blocks of its rows, as they lie in the file) asynchronously, several steps ahead, and starts before the kernels before
this one have ended. The arithmetic is that of ``matvec``, in its order.
"""

from __future__ import annotations

import math
from typing import Any

from gguf import GGMLQuantizationType
from numba import cuda
from numba.cuda import float32, int32, int64, types, uint32

from cuda_kernels.emit import I32, I64, Emitter, Value, emitted, words
from cuda_kernels.intrinsics import (
    FULL_WARP,
    add,
    commit_copies,
    load_float,
    load_float_past_l1,
    multiply,
    shared_address,
    store_float,
)
from cuda_kernels.launch import Kernel, kernel_builder
from cuda_kernels.matvec_mma import SIGNATURE
from cuda_kernels.overlap import let_next_start, wait_for_previous
from cuda_kernels.row_units import RowUnits
from cuda_kernels.weight_units import UNIT_FORMATS, Unit

_T = GGMLQuantizationType
BLOCK_BYTES = {_T.Q4_K: 144, _T.Q5_K: 176}
"""Types whose rows are one plane of blocks of 256 weights, a multiple of 16 bytes each."""

N_WARPS = 4
N_THREADS = 32 * N_WARPS
N_WARP_ROWS = 2
N_STAGES = 4
_STEP_BLOCKS = 4


class SharedEmitter(Emitter):
    """Reads what a format loads from shared memory; addresses are 64 bits wide as those of global memory."""

    def load_stream(self, address: Value, offset: int, n_words: int) -> list[Value]:
        return self.load_shared_words(self.builder.trunc(address, I32), offset, n_words)


class StagedRows:
    """Copies of steps of ``n_rows`` rows into shared memory, and their units from there.

    Attributes that are intrinsics; ``stage``: shared address of a step of all rows:
    start(rows, stage, step, lane, n_chunks)   copy a step of the rows at these addresses, ``n_chunks`` of 16 bytes each
    fetch(stage, lane)                         words of the rows' units of this lane
    wait()                                     until all but the last ``n_stages - 1`` groups of copies have arrived
    """

    def __init__(self, weight_type: GGMLQuantizationType, n_rows: int, n_stages: int) -> None:
        self.n_rows, self.n_stages = n_rows, n_stages
        self.unit_format = UNIT_FORMATS[weight_type]
        self.step_chunks = _STEP_BLOCKS * BLOCK_BYTES[weight_type] // 16
        self.stage_bytes = n_rows * self.step_chunks * 16
        rows = types.UniTuple(types.int64, n_rows)
        i32, u32 = types.int32, types.uint32
        self.start = emitted(types.void, rows, u32, i32, i32, i32)(self._start)
        self.fetch = emitted(words(n_rows * self.unit_format.n_words), u32, i32)(self._fetch)
        self.wait = emitted(types.void)(self._wait)

    def _start(self, emit: Emitter, rows: list[Value], stage: Value, step: Value, lane: Value, n_chunks: Value) -> None:
        for first in range(0, self.step_chunks, 32):
            within = emit.add(lane, first)
            chunk = emit.add(emit.multiply(step, self.step_chunks), within)
            is_there = emit.flag(emit.less(chunk, n_chunks))
            if first + 32 > self.step_chunks:
                is_there = emit.bit_and(is_there, emit.flag(emit.less(within, emit.word(self.step_chunks))))
            for r, row in enumerate(rows):
                target = emit.add(stage, emit.multiply(emit.add(within, r * self.step_chunks), 16))
                source = emit.add(row, emit.widen(emit.multiply(chunk, 16)))
                emit.copy_16_async_if(is_there, target, source, emit.word(16))

    def _fetch(self, emit: Emitter, stage: Value, lane: Value) -> list[Value]:
        shared = SharedEmitter(emit.builder)
        unit = Unit.of(emit, emit.word(0), lane)
        loaded = []
        for r in range(self.n_rows):
            row = emit.builder.zext(emit.add(stage, r * self.step_chunks * 16), I64)
            loaded += self.unit_format.load(shared, [row], unit)
        return loaded

    def _wait(self, emit: Emitter) -> None:
        emit.asm(f"cp.async.wait_group {self.n_stages - 1};", "", "", [], ordered=True)


@kernel_builder
def build_matvec_staged_kernel(weight_type: GGMLQuantizationType, is_added: bool, is_gated: bool) -> Kernel:
    """The kernel for one weight type, up to three matrices.

    ``is_added``: to what ``out`` holds. ``is_gated``: the first two matrices are gate and up, of equal shape, a warp
    takes the same rows of both, and ``silu(gate) * up`` goes to the first ``out``.
    """
    units = RowUnits(weight_type, N_WARP_ROWS, 1)
    staged = StagedRows(weight_type, N_WARP_ROWS, N_STAGES)
    accumulate, zeros, lane_total, elements = units.add, units.zeros, units.total, units.elements
    lanes_per_total = units.lanes_per_total
    start, fetch, wait = staged.start, staged.fetch, staged.wait
    stage_bytes = staged.stage_bytes
    warp_bytes = N_STAGES * stage_bytes
    n_shared = N_WARPS * warp_bytes // 4
    warp_rows = N_WARP_ROWS // 2 if is_gated else N_WARP_ROWS  # of one matrix
    block_rows = count_block_rows(is_gated=is_gated)
    rows_of = _build_rows_of(warp_rows, is_gated)

    def matvec_staged_kernel(planes, strides, outs, biases, rows, vectors, scales, n_cols):
        ring = cuda.shared.array(n_shared, float32, alignment=16)
        warp, lane = int32(cuda.threadIdx.x) >> int32(5), int32(cuda.threadIdx.x) & int32(31)
        matrix, second, stride = planes[0], planes[4], strides[0]
        out, bias, n_rows = outs[0], biases[0], rows[0]
        block = int32(cuda.blockIdx.x)
        if not is_gated:
            n_blocks = (n_rows + int32(block_rows - 1)) // int32(block_rows)
            if block >= n_blocks:
                block -= n_blocks
                matrix, out, bias, n_rows = planes[4], outs[1], biases[1], rows[1]
                n_blocks = (n_rows + int32(block_rows - 1)) // int32(block_rows)
                if block >= n_blocks:
                    block -= n_blocks
                    matrix, out, bias, n_rows = planes[8], outs[2], biases[2], rows[2]
        own_row = (block * int32(N_WARPS) + warp) * int32(warp_rows)
        if own_row >= n_rows:
            return
        row = min(own_row, n_rows - int32(warp_rows))  # the last warp may repeat rows of the one before
        addresses = rows_of(matrix, second, int64(row), stride)

        stage = uint32(shared_address(ring) + uint32(warp * int32(warp_bytes)))
        ring_begin, ring_end = stage, uint32(stage + uint32(warp_bytes))
        n_chunks = int32(stride >> 4)
        n_units = n_cols // int32(elements)
        n_steps = (n_units + int32(31)) // int32(32)
        for step in range(N_STAGES):
            if step < n_steps:
                start(addresses, uint32(stage + uint32(step * stage_bytes)), int32(step), lane, n_chunks)
            commit_copies()
        wait_for_previous()
        let_next_start()
        sums = zeros()
        for step in range(n_steps):
            wait()
            cuda.syncwarp(FULL_WARP)
            if step * int32(32) + lane < n_units:
                sums = accumulate(sums, fetch(stage, lane), step, lane, vectors, scales, n_cols)
            cuda.syncwarp(FULL_WARP)
            if step + int32(N_STAGES) < n_steps:
                start(addresses, stage, step + int32(N_STAGES), lane, n_chunks)
            commit_copies()
            stage = uint32(stage + uint32(stage_bytes))
            if stage == ring_end:
                stage = ring_begin

        total = lane_total(sums, lane)
        of_row = lane // int32(lanes_per_total)
        if is_gated:
            factor = cuda.shfl_sync(FULL_WARP, total, (lane + int32(warp_rows * lanes_per_total)) & int32(31))
            total = multiply(total / (float32(1.0) + math.exp(-total)), factor)
        if lane % int32(lanes_per_total) == 0 and of_row < int32(warp_rows) and row + of_row >= own_row:
            if bias != 0:
                total = add(total, load_float(bias + int64(row + of_row) * 4))
            at = out + int64(row + of_row) * 4
            if is_added:
                total = add(load_float_past_l1(at), total)
            store_float(at, total)

    return Kernel(matvec_staged_kernel, SIGNATURE, n_threads=N_THREADS, overlaps=True)


def _build_rows_of(warp_rows: int, is_gated: bool) -> Any:
    """Intrinsic ``rows_of(matrix, second, row, stride)``: addresses of a warp's rows, in both matrices if gated."""

    def rows_of(emit: Emitter, matrix: Value, second: Value, row: Value, stride: Value) -> list[Value]:
        first = emit.multiply(row, stride)
        bases = (matrix, second) if is_gated else (matrix,)
        addresses = []
        for base in bases:
            address = emit.add(base, first)
            for _ in range(warp_rows):
                addresses.append(address)
                address = emit.add(address, stride)
        return addresses

    n_rows = warp_rows * (2 if is_gated else 1)
    i64 = types.int64
    return emitted(types.UniTuple(i64, n_rows), i64, i64, i64, i64)(rows_of)


def count_block_rows(*, is_gated: bool) -> int:
    """Rows of each matrix that a block takes."""
    return N_WARPS * N_WARP_ROWS // (2 if is_gated else 1)
