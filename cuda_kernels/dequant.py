"""Weights back to floats: tiles of a matrix as float16 for cuBLASLt, rows of an embedding table as float32.

The decoding per type is in ``weight_units``, products that read quantised weights directly in ``matvec``.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from numba import cuda
from numba.cuda import int32, int64, types

from cuda_kernels.emit import Emitter, Value, emitted, words
from cuda_kernels.intrinsics import load_int
from cuda_kernels.launch import Kernel, address_of, check_array, kernel_builder
from cuda_kernels.row_units import RowUnits, takes_float_activations, unit_elements
from cuda_kernels.unit_formats import Unit
from cuda_kernels.weight_units import UNIT_FORMATS, decode_floats
from cuda_kernels.weights import MAX_PLANES, WeightGeometry
from kvs_core.errors import KernelArgumentError
from kvs_core.units import ceil_div

N_THREADS = 256


class OutputType(Enum):
    """What a dequantised row is written as."""

    F16 = np.float16
    F32 = np.float32

    @property
    def element_bytes(self) -> int:
        return int(np.dtype(self.value).itemsize)


def build_write_unit(weight_type: GGMLQuantizationType, output: OutputType) -> Any:
    """Intrinsic ``write(words, step, lane, row)``: one unit's weights to their columns of the output row at ``row``."""

    def write_run(emit: Emitter, row: Value, first: Value, further: int, values: list[Value]) -> None:
        address = emit.add(row, emit.widen(emit.multiply(first, output.element_bytes)))
        if output is OutputType.F16:
            registers = [emit.pack_half2(values[i], values[i + 1]) for i in range(0, len(values), 2)]
        else:
            registers = [emit.as_word(value) for value in values]
        for i in range(0, len(registers), 4):
            emit.store_words(address, further * output.element_bytes + 4 * i, registers[i : i + 4])

    def write_unit(emit: Emitter, loaded: list[Value], step: Value, lane: Value, row: Value) -> None:
        unit = Unit.of(emit, step, lane)
        if takes_float_activations(weight_type):
            values = decode_floats(emit, weight_type, loaded)
            write_run(emit, row, emit.multiply(unit.number, len(values)), 0, values)
            return
        for group in UNIT_FORMATS[weight_type].decode(emit, loaded, unit):
            shift = emit.float(-0.0) if group.shift is None else group.shift  # -0 leaves the sign of a zero
            quants = [emit.signed_byte(word, i) for word in group.quants for i in range(4)]
            values = [emit.fma(group.scale, emit.int_to_float(quant), shift) for quant in quants]
            write_run(emit, row, group.first, group.further, values)

    n_words = 4 if takes_float_activations(weight_type) else UNIT_FORMATS[weight_type].n_words
    return emitted(types.void, words(n_words), types.int32, types.int32, types.int64)(write_unit)


@kernel_builder
def build_dequantise_rows_kernel(weight_type: GGMLQuantizationType, output: OutputType) -> Kernel:
    """A thread converts one unit. Output row i is matrix row ``first_row + i``, or ``row_ids[i]`` if there are ids."""
    units = RowUnits(weight_type, 1, 1)
    load, elements, write = units.load, units.elements, build_write_unit(weight_type, output)
    element_bytes = output.element_bytes

    def dequantise_rows_kernel(
        plane_0,
        plane_1,
        plane_2,
        plane_3,
        stride_0,
        stride_1,
        stride_2,
        stride_3,
        row_ids,
        out,
        first_row,
        n_rows,
        n_cols,
    ):
        n_units = n_cols // int32(elements)
        i = int64(cuda.blockIdx.x) * N_THREADS + cuda.threadIdx.x
        if i >= int64(n_rows) * n_units:
            return
        row = i // n_units
        unit = int32(i % n_units)

        source = row + first_row
        if row_ids != 0:
            source = int64(load_int(row_ids + row * 4))
        loaded = load(
            plane_0 + source * stride_0,
            plane_1 + source * stride_1,
            plane_2 + source * stride_2,
            plane_3 + source * stride_3,
            stride_0,
            stride_1,
            stride_2,
            stride_3,
            unit >> int32(5),
            unit & int32(31),
        )

        write(loaded, unit >> int32(5), unit & int32(31), out + row * n_cols * element_bytes)

    signature = [types.int64] * (2 * MAX_PLANES + 2) + [types.int32] * 3
    return Kernel(dequantise_rows_kernel, signature, n_threads=N_THREADS)


def dequantise_rows(matrix: Any, out: Any, *, geometry: WeightGeometry, first_row: int, stream: Any) -> None:
    """Rows ``first_row`` and following of a weight matrix as float16, for a matrix product of many tokens.

    matrix   uint8   [geometry.n_bytes]     device layout (``weights``)
    out      float16 [n_rows, n_cols]       its length says how many rows
    Raises   KernelArgumentError if shapes or dtypes disagree, or the type has no kernel.
    """
    check_array("out", out, np.float16, (None, geometry.n_cols))
    n_rows = out.shape[0]
    if not 0 <= first_row <= first_row + n_rows <= geometry.n_rows:
        raise KernelArgumentError(
            f"dequantise_rows: rows {first_row} to {first_row + n_rows}, the matrix has {geometry.n_rows}"
        )
    _launch(matrix, 0, out, geometry, OutputType.F16, first_row, stream)


def embed_rows(matrix: Any, row_ids: Any, out: Any, *, geometry: WeightGeometry, stream: Any) -> None:
    """Rows of an embedding table, by token id, as float32.

    matrix    uint8   [geometry.n_bytes]    device layout (``weights``)
    row_ids   int32   [n_tokens]            below ``geometry.n_rows``: the caller checked the tokens
    out       float32 [n_tokens, n_cols]
    Raises    KernelArgumentError if shapes or dtypes disagree, or the type has no kernel.
    """
    check_array("out", out, np.float32, (None, geometry.n_cols))
    check_array("row_ids", row_ids, np.int32, (out.shape[0],))
    _launch(matrix, address_of(row_ids), out, geometry, OutputType.F32, 0, stream)


def _launch(
    matrix: Any, row_ids_at: int, out: Any, geometry: WeightGeometry, output: OutputType, first_row: int, stream: Any
) -> None:
    geometry.check()
    check_array("matrix", matrix, np.uint8, (geometry.n_bytes,))
    kernel = build_dequantise_rows_kernel(geometry.weight_type, output)
    n_rows = out.shape[0]
    n_units = geometry.n_cols // unit_elements(geometry.weight_type)
    grid = (ceil_div(n_rows * n_units, N_THREADS),)
    planes, strides = geometry.plane_arguments(address_of(matrix))
    kernel.launch(grid, stream, *planes, *strides, row_ids_at, address_of(out), first_row, n_rows, geometry.n_cols)
