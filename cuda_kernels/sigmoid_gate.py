"""A row's own gate: the output of a shared expert times the sigmoid of one number a token."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import float32, types

from cuda_kernels.launch import Kernel, check_array, kernel_builder
from cuda_kernels.overlap import wait_for_previous
from cuda_kernels.reduce import BLOCK_THREADS, block_sum

_MATRIX, _VECTOR = types.Array(types.float32, 2, "C"), types.Array(types.float32, 1, "C")


@kernel_builder
def build_sigmoid_gate_kernel() -> Kernel:
    """A block takes one row."""

    def sigmoid_gate_kernel(x, weight, y):
        scratch = cuda.shared.array(BLOCK_THREADS, float32)
        row = cuda.blockIdx.x
        wait_for_previous()
        part = float32(0.0)
        for i in range(cuda.threadIdx.x, x.shape[1], BLOCK_THREADS):
            part += x[row, i] * weight[i]
        dot = block_sum(part, scratch)
        factor = float32(1.0) / (float32(1.0) + math.exp(-dot))
        for i in range(cuda.threadIdx.x, y.shape[1], BLOCK_THREADS):
            y[row, i] *= factor

    return Kernel(sigmoid_gate_kernel, (_MATRIX, _VECTOR, _MATRIX), n_threads=BLOCK_THREADS, overlaps=True)


def sigmoid_gate(x: Any, weight: Any, y: Any, *, stream: Any) -> None:
    """``y *= 1 / (1 + exp(-x . weight))`` for each row.

    x        float32 [n_rows, n_in]
    weight   float32 [n_in]
    y        float32 [n_rows, n_out]
    Raises   KernelArgumentError if shapes or dtypes disagree.
    """
    check_array("x", x, np.float32, (None, None))
    check_array("weight", weight, np.float32, (x.shape[1],))
    check_array("y", y, np.float32, (x.shape[0], None))
    build_sigmoid_gate_kernel().launch((x.shape[0],), stream, x, weight, y)
