"""Small element-wise steps: sums, and number sequences that a step needs on the device without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import int64, types

from cuda_kernels.launch import Kernel, check_array, kernel_builder
from kvs_core.units import ceil_div

N_THREADS = 256
_VECTOR = types.Array(types.float32, 1, "C")


@kernel_builder
def build_add_kernel() -> Kernel:
    """``x += y``; ``y`` repeats every ``y.size`` elements."""

    def add_kernel(x, y):
        i = cuda.grid(1)
        if i < x.size:
            x[i] += y[i % y.size]

    return Kernel(add_kernel, (_VECTOR, _VECTOR), n_threads=N_THREADS)


@kernel_builder
def build_count_kernel(element: Any) -> Kernel:
    """``out[begin + i] = first + i * step``."""

    def count_kernel(out, begin, count, first, step):
        i = int64(cuda.grid(1))
        if i < count:
            out[begin + i] = first + i * step

    signature = (types.Array(element, 1, "C"), *[types.int64] * 4)
    return Kernel(count_kernel, signature, n_threads=N_THREADS)


def add_in_place(x: Any, y: Any, *, stream: Any) -> None:
    """``x = x + y`` for vectors; a shorter ``y`` is repeated: a bias for each of several rows.

    x        float32 [n]
    y        float32 [m]     n a multiple of m
    Raises   KernelArgumentError if shapes or dtypes disagree.
    """
    check_array("x", x, np.float32, (None,))
    check_array("y", y, np.float32, (None,))
    build_add_kernel().launch((ceil_div(x.shape[0], N_THREADS),), stream, x, y)


def write_sequence(out: Any, *, begin: int, count: int, first: int, step: int, stream: Any) -> None:
    """``out[begin + i] = first + i * step`` for ``count`` elements.

    out      int32 or int64 [n]
    Raises   KernelArgumentError if the dtype is another.
    """
    element = types.int32 if out.dtype == np.int32 else types.int64
    check_array("out", out, np.int32 if element is types.int32 else np.int64, (None,))
    build_count_kernel(element).launch((ceil_div(count, N_THREADS),), stream, out, begin, count, first, step)
