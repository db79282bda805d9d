"""Factors and caps of activations, element by element, and columns copied out of rows. Gated activations elsewhere."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import float32, int64, types

from cuda_kernels.launch import Kernel, check_array, kernel_builder
from cuda_kernels.overlap import wait_for_previous
from kvs_core.errors import KernelArgumentError
from kvs_core.units import ceil_div

N_THREADS = 256
SOFTPLUS_IS_LINEAR = 20.0
"""Beyond, softplus is its argument to the last bit of float32."""

_VECTOR, _MATRIX = types.Array(types.float32, 1, "C"), types.Array(types.float32, 2, "C")


@kernel_builder
def build_scale_kernel() -> Kernel:
    """``x *= factor``."""

    def scale_kernel(x, factor):
        i = int64(cuda.grid(1))
        wait_for_previous()
        if i < x.size:
            x[i] *= factor

    return Kernel(scale_kernel, (_VECTOR, types.float32), n_threads=N_THREADS, overlaps=True)


@kernel_builder
def build_softcap_kernel() -> Kernel:
    """``x = cap * tanh(x / cap)``."""

    def softcap_kernel(x, cap):
        i = int64(cuda.grid(1))
        wait_for_previous()
        if i < x.size:
            x[i] = cap * math.tanh(x[i] / cap)

    return Kernel(softcap_kernel, (_VECTOR, types.float32), n_threads=N_THREADS, overlaps=True)


@kernel_builder
def build_softplus_gate_kernel() -> Kernel:
    """``x[i] *= ln(1 + exp(gate[i // n_each]))``."""

    def softplus_gate_kernel(gate, x, n_each):
        i = int64(cuda.grid(1))
        wait_for_previous()
        if i < x.size:
            value = gate[i // n_each]
            if value <= float32(SOFTPLUS_IS_LINEAR):
                value = math.log1p(math.exp(value))
            x[i] *= value

    return Kernel(softplus_gate_kernel, (_VECTOR, _VECTOR, types.int64), n_threads=N_THREADS, overlaps=True)


@kernel_builder
def build_take_columns_kernel() -> Kernel:
    """``out[row, i] = x[row, begin + i]``."""

    def take_columns_kernel(x, begin, out):
        i = int64(cuda.grid(1))
        n_cols = out.shape[1]
        wait_for_previous()
        if i < out.size:
            out[i // n_cols, i % n_cols] = x[i // n_cols, begin + i % n_cols]

    return Kernel(take_columns_kernel, (_MATRIX, types.int64, _MATRIX), n_threads=N_THREADS, overlaps=True)


def scale_in_place(x: Any, factor: float, *, stream: Any) -> None:
    """``x = x * factor``, the factor rounded to float32: x float32 [n].

    Raises   KernelArgumentError if shape or dtype is another.
    """
    check_array("x", x, np.float32, (None,))
    build_scale_kernel().launch((ceil_div(x.shape[0], N_THREADS),), stream, x, factor)


def softcap(x: Any, cap: float, *, stream: Any) -> None:
    """``x = cap * tanh(x / cap)``, in place: x float32 [n], cap above 0.

    Raises   KernelArgumentError if shape or dtype is another.
    """
    check_array("x", x, np.float32, (None,))
    if not cap > 0.0:
        raise KernelArgumentError(f"softcap {cap}: needs a number above 0")
    build_softcap_kernel().launch((ceil_div(x.shape[0], N_THREADS),), stream, x, cap)


def softplus_gate(gate: Any, x: Any, *, stream: Any) -> None:
    """``x = x * ln(1 + exp(gate))``, in place.

    gate     float32 [n_rows, n_gates]
    x        float32 [n_rows, n]         each gate for n / n_gates elements, one after another
    Raises   KernelArgumentError if shapes or dtypes disagree.
    """
    check_array("x", x, np.float32, (None, None))
    check_array("gate", gate, np.float32, (x.shape[0], None))
    if not gate.shape[1] or x.shape[1] % gate.shape[1]:
        raise KernelArgumentError(f"softplus_gate: {gate.shape[1]} gates for rows of {x.shape[1]}")
    grid = (ceil_div(x.shape[0] * x.shape[1], N_THREADS),)
    build_softplus_gate_kernel().launch(grid, stream, gate, x, x.shape[1] // gate.shape[1])


def take_columns(x: Any, begin: int, out: Any, *, stream: Any) -> None:
    """``out`` = as many columns of ``x`` as it is wide, from ``begin`` on.

    x, out   float32 [n_rows, n], [n_rows, m]     not in the same memory
    Raises   KernelArgumentError if shapes or dtypes disagree.
    """
    check_array("x", x, np.float32, (None, None))
    check_array("out", out, np.float32, (x.shape[0], None))
    if not 0 <= begin <= begin + out.shape[1] <= x.shape[1]:
        raise KernelArgumentError(f"take_columns: {out.shape[1]} columns from {begin} on of rows of {x.shape[1]}")
    grid = (ceil_div(out.shape[0] * out.shape[1], N_THREADS),)
    build_take_columns_kernel().launch(grid, stream, x, begin, out)
