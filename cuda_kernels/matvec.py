"""Products of a matrix with one to eight vectors: 8-bit activations for quantised weights, float32 for float ones.

A warp reduces a few rows; a lane takes every 32nd unit of 16 bytes, in order, then the lanes are added in a fixed tree.
Every vector is reduced by the same instructions in the same order, however many there are, so a step of several
tokens gives each the bits of a step of its own. Longer runs of tokens: ``dequant`` and cuBLASLt.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from numba import cuda
from numba.cuda import float32, int32, int64, types

from cuda_kernels.emit import I8, Emitter, Value, emitted, floats, words
from cuda_kernels.intrinsics import FULL_WARP, add, multiply
from cuda_kernels.launch import Kernel, address_of, check_array, kernel_builder
from cuda_kernels.weight_units import GROUP_ELEMENTS, UNIT_FORMATS, Unit, decode_floats, float_elements
from cuda_kernels.weights import MAX_PLANES, WeightGeometry
from kvs_core.errors import KernelArgumentError
from kvs_core.units import ceil_div

MAX_VECTORS = 8
SCALE_BYTES = 8  # scale and sum of a group of activations
QUANT_BLOCK = 32
"""Activations that share one scale."""

N_WARPS = 4
N_THREADS = 32 * N_WARPS


_FLOAT_TYPES = (GGMLQuantizationType.F16, GGMLQuantizationType.BF16, GGMLQuantizationType.F32)


def takes_float_activations(weight_type: GGMLQuantizationType) -> bool:
    """Whether ``matvec`` reads the vectors as float32 (unquantised weights) or as 8-bit blocks."""
    return weight_type in _FLOAT_TYPES


def count_warp_rows(weight_type: GGMLQuantizationType, n_vectors: int) -> int:
    """Rows that a warp reduces together; they share the activations that it reads, which count for several vectors.

    Best of 1, 2 and 4 on an H200, 17408 x 5120. Loading two units ahead instead of one gained nothing there.
    """
    if n_vectors > 1 or weight_type is GGMLQuantizationType.Q6_K:
        return 4
    return 1 if takes_float_activations(weight_type) else 2


def unit_elements(weight_type: GGMLQuantizationType) -> int:
    """Weights of one unit, what a lane reads at a time."""
    if takes_float_activations(weight_type):
        return float_elements(weight_type)
    return UNIT_FORMATS[weight_type].elements


class RowUnits:
    """The inner step of the product for one weight type.

    Attributes that are intrinsics (``plane_0`` .. ``plane_3``: addresses of the first row in each plane):
    load(plane_0 .. plane_3, stride_0 .. stride_3, step, lane)  words of unit 32 step + lane of the rows
    add(sums, words, step, lane, vectors, scales, n_cols)       sums [rows, vectors] plus the products of this unit
    store(sums, out, lane, n_rows)                              lanes added; row r of vector v to out + 4 (v n_rows + r)
    zeros()                                                     cleared sums
    """

    def __init__(self, weight_type: GGMLQuantizationType, n_rows: int, n_vectors: int) -> None:
        self.weight_type, self.n_rows, self.n_vectors = weight_type, n_rows, n_vectors
        is_float = takes_float_activations(weight_type)
        self.n_words = 4 if is_float else UNIT_FORMATS[weight_type].n_words
        self.elements = unit_elements(weight_type)
        i32, i64 = types.int32, types.int64
        sums, loaded = floats(n_rows * n_vectors), words(n_rows * self.n_words)
        self.load = emitted(loaded, *[i64] * (2 * MAX_PLANES), i32, i32)(self._load)
        body = self._add_floats if is_float else self._add_quants
        self.add = emitted(sums, sums, loaded, i32, i32, i64, i64, i32)(body)
        self.store = emitted(types.void, sums, i64, i32, i32)(self._store)
        self.zeros = emitted(sums)(lambda emit: [emit.float(0.0)] * (n_rows * n_vectors))

    def _load(self, emit: Emitter, *arguments: Value) -> list[Value]:
        planes, strides = arguments[:MAX_PLANES], arguments[MAX_PLANES:-2]
        unit = Unit.of(emit, *arguments[-2:])
        loaded = []
        rows = list(planes)
        for _ in range(self.n_rows):
            if takes_float_activations(self.weight_type):
                loaded += emit.load_stream(emit.add(rows[0], emit.widen(emit.multiply(unit.number, 16))), 0, 4)
            else:
                loaded += UNIT_FORMATS[self.weight_type].load(emit, rows, unit)
            rows = [emit.add(row, stride) for row, stride in zip(rows, strides, strict=True)]
        return loaded

    def _add_quants(self, emit: Emitter, sums: list[Value], loaded: list[Value], *rest: Value) -> list[Value]:
        step, lane, vectors, scales, n_cols = rest
        unit_format, unit = UNIT_FORMATS[self.weight_type], Unit.of(emit, step, lane)
        words_of_rows = [loaded[r * self.n_words : (r + 1) * self.n_words] for r in range(self.n_rows)]
        rows = [unit_format.decode(emit, words_of_row, unit) for words_of_row in words_of_rows]
        result = list(sums)
        for v in range(self.n_vectors):
            column = emit.add(rows[0][0].first, emit.multiply(n_cols, v))
            vector_at = emit.add(vectors, emit.widen(column))
            scales_at = emit.add(scales, emit.widen(emit.multiply(emit.shift_right(column, 4), SCALE_BYTES)))
            for i in range(unit_format.n_groups):
                further = rows[0][i].further
                x = emit.load_cached(vector_at, further, 4)
                x_scale, x_sum = emit.load_floats(scales_at, further // GROUP_ELEMENTS * SCALE_BYTES, 2)
                for r in range(self.n_rows):
                    group = rows[r][i]
                    term = emit.float_multiply(group.scale, emit.dot_bytes(group.quants, x))
                    if group.shift is not None:
                        term = emit.fma(group.shift, x_sum, term)
                    at = r * self.n_vectors + v
                    result[at] = emit.fma(x_scale, term, result[at])
        return result

    def _add_floats(self, emit: Emitter, sums: list[Value], loaded: list[Value], *rest: Value) -> list[Value]:
        step, lane, vectors, _, n_cols = rest
        unit = Unit.of(emit, step, lane)
        rows = [decode_floats(emit, self.weight_type, loaded[4 * r : 4 * r + 4]) for r in range(self.n_rows)]
        result = list(sums)
        for v in range(self.n_vectors):
            column = emit.add(emit.multiply(unit.number, self.elements), emit.multiply(n_cols, v))
            at_x = emit.add(vectors, emit.widen(emit.multiply(column, 4)))
            x = [value for i in range(0, self.elements, 4) for value in emit.load_floats(at_x, 4 * i, 4)]
            for r in range(self.n_rows):
                at = r * self.n_vectors + v
                for weight, value in zip(rows[r], x, strict=True):
                    result[at] = emit.fma(weight, value, result[at])
        return result

    def _store(self, emit: Emitter, sums: list[Value], address: Value, lane: Value, n_rows: Value) -> None:
        is_writer = emit.flag(emit.less(lane, emit.word(1)))
        for r in range(self.n_rows):
            for v in range(self.n_vectors):
                total = sums[r * self.n_vectors + v]
                for lane_mask in (16, 8, 4, 2, 1):
                    total = emit.float_add(total, emit.exchange(total, lane_mask))
                place = emit.add(address, emit.widen(emit.multiply(emit.add(emit.multiply(n_rows, v), r), 4)))
                emit.store_float_if(is_writer, place, total)


@emitted(types.int8, types.float32)
def round_to_int(emit: Emitter, value: Value) -> Value:
    """Nearest integer, halves to even, of a value within -127 to 127."""
    wide = emit.asm("cvt.rni.s32.f32 $0,$1;", "r", "f", [value])
    return emit.builder.trunc(wide, I8)


@kernel_builder
def build_matvec_kernel(weight_type: GGMLQuantizationType, n_vectors: int, n_warp_rows: int) -> Kernel:
    """The kernel for one weight type and number of vectors; any matrix. A lane loads the next unit before it uses one.

    ``n_warp_rows``: rows that a warp reduces together; it changes no bit.
    """
    units = RowUnits(weight_type, n_warp_rows, n_vectors)
    load, accumulate, zeros, store, elements = units.load, units.add, units.zeros, units.store, units.elements

    def matvec_kernel(
        plane_0, plane_1, plane_2, plane_3, stride_0, stride_1, stride_2, stride_3, vectors, scales, out, n_rows, n_cols
    ):
        lane = int32(cuda.threadIdx.x) & int32(31)
        warp = int32(cuda.blockIdx.x) * int32(N_WARPS) + (int32(cuda.threadIdx.x) >> int32(5))
        if warp * int32(n_warp_rows) >= n_rows:
            return
        row = min(warp * int32(n_warp_rows), n_rows - int32(n_warp_rows))  # the last warp may repeat a row
        row_0 = plane_0 + int64(row) * stride_0
        row_1 = plane_1 + int64(row) * stride_1
        row_2 = plane_2 + int64(row) * stride_2
        row_3 = plane_3 + int64(row) * stride_3

        n_steps = (n_cols // int32(elements) - lane + int32(31)) // int32(32)
        sums = zeros()
        if n_steps > 0:
            loaded = load(row_0, row_1, row_2, row_3, stride_0, stride_1, stride_2, stride_3, 0, lane)
            for step in range(n_steps):
                ahead = loaded
                if step + 1 < n_steps:
                    ahead = load(row_0, row_1, row_2, row_3, stride_0, stride_1, stride_2, stride_3, step + 1, lane)
                sums = accumulate(sums, loaded, step, lane, vectors, scales, n_cols)
                loaded = ahead
        cuda.syncwarp(FULL_WARP)
        store(sums, out + int64(row) * 4, lane, n_rows)

    signature = [types.int64] * (2 * MAX_PLANES + 3) + [types.int32] * 2
    # asking for six blocks lets the compiler spend registers on loads ahead: 5 to 10 % less time for one vector
    min_blocks = 6 if n_vectors == 1 and n_warp_rows == 2 else 0
    return Kernel(matvec_kernel, signature, n_threads=N_THREADS, min_blocks=min_blocks)


def matvec(matrix: Any, vectors: Any, scales: Any | None, out: Any, *, geometry: WeightGeometry, stream: Any) -> None:
    """``out[v] = matrix @ vectors[v]``.

    matrix    uint8   [geometry.n_bytes]             device layout (``weights``)
    vectors   int8    [n_vectors, n_cols]            with quantised weights: ``quantise_activations``; n_vectors 1 to 8
              float32 [n_vectors, n_cols]            with float weights; ``scales`` is None
    scales    float32 [n_vectors, n_cols / 16, 2]    scale of the activations and the sum of 16 of their quants
    out       float32 [n_vectors, n_rows]
    Raises    KernelArgumentError if shapes or dtypes disagree, or the type has no kernel.
    """
    geometry.check()
    takes_floats = takes_float_activations(geometry.weight_type)
    n_vectors = vectors.shape[0]
    check_array("matrix", matrix, np.uint8, (geometry.n_bytes,))
    check_array("vectors", vectors, np.float32 if takes_floats else np.int8, (None, geometry.n_cols))
    check_array("out", out, np.float32, (n_vectors, geometry.n_rows))
    if not takes_floats:
        check_array("scales", scales, np.float32, (n_vectors, geometry.n_cols // GROUP_ELEMENTS, 2))
    if not 1 <= n_vectors <= MAX_VECTORS:
        raise KernelArgumentError(f"matvec: {n_vectors} vectors, needs 1 to {MAX_VECTORS}")
    n_warp_rows = min(count_warp_rows(geometry.weight_type, n_vectors), geometry.n_rows)
    kernel = build_matvec_kernel(geometry.weight_type, n_vectors, n_warp_rows)
    planes, strides = geometry.plane_arguments(address_of(matrix))
    grid = (ceil_div(geometry.n_rows, N_WARPS * n_warp_rows),)
    scales_at = 0 if takes_floats else address_of(scales)
    kernel.launch(
        grid,
        stream,
        *planes,
        *strides,
        address_of(vectors),
        scales_at,
        address_of(out),
        geometry.n_rows,
        geometry.n_cols,
    )


@kernel_builder
def build_quantise_activations_kernel() -> Kernel:
    """A warp quantises one block of 32 activations, a lane each."""

    def quantise_activations_kernel(x, quants, scales, n_blocks):
        lane = int32(cuda.threadIdx.x) & int32(31)
        block = int64(cuda.blockIdx.x) * N_WARPS + (int32(cuda.threadIdx.x) >> int32(5))
        if block >= n_blocks:
            return

        value = x[block * QUANT_BLOCK + lane]
        largest = abs(value)
        for step in (16, 8, 4, 2, 1):
            largest = max(largest, cuda.shfl_xor_sync(FULL_WARP, largest, step))
        scale = largest / float32(127.0)
        inverse = float32(127.0) / largest if largest > float32(0.0) else float32(0.0)
        quant = round_to_int(multiply(value, inverse))
        total = float32(quant)
        for step in (8, 4, 2, 1):
            total = add(total, cuda.shfl_xor_sync(FULL_WARP, total, step))

        quants[block * QUANT_BLOCK + lane] = quant
        if lane & int32(GROUP_ELEMENTS - 1) == 0:
            group = (block * QUANT_BLOCK + lane) // GROUP_ELEMENTS
            scales[2 * group] = scale
            scales[2 * group + 1] = total

    floats_1d, bytes_1d = types.Array(types.float32, 1, "C"), types.Array(types.int8, 1, "C")
    return Kernel(quantise_activations_kernel, (floats_1d, bytes_1d, floats_1d, types.int64), n_threads=N_THREADS)


def quantise_activations(x: Any, quants: Any, scales: Any, *, stream: Any) -> None:
    """Blocks of 32 activations as 8-bit quants, for ``matvec``; nearest integers of 127 x / largest.

    x        float32 [n_vectors, n_cols]             n_cols a multiple of 32
    quants   int8    [n_vectors, n_cols]
    scales   float32 [n_vectors, n_cols / 16, 2]     scale of the block, sum of these 16 quants
    Raises   KernelArgumentError if shapes or dtypes disagree.
    """
    n_vectors, n_cols = x.shape
    check_array("x", x, np.float32, (None, None))
    check_array("quants", quants, np.int8, (n_vectors, n_cols))
    check_array("scales", scales, np.float32, (n_vectors, n_cols // GROUP_ELEMENTS, 2))
    if n_cols % QUANT_BLOCK:
        raise KernelArgumentError(f"quantise_activations: {n_cols} columns, needs a multiple of {QUANT_BLOCK}")
    n_blocks = n_vectors * n_cols // QUANT_BLOCK
    grid = (ceil_div(n_blocks, N_WARPS),)
    build_quantise_activations_kernel().launch(grid, stream, x, quants, scales, n_blocks)
