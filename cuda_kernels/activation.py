"""Gated activations of the feed-forward layer, and float16 copies for matrix products."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import float32, types

from cuda_kernels.launch import Kernel, check_array, kernel_builder
from kvs_core.units import ceil_div

N_THREADS = 256
_MATRIX = types.Array(types.float32, 2, "C")


class Activation(Enum):
    """Function applied to the gate."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@kernel_builder
def build_gated_activation_kernel(activation: Activation) -> Kernel:
    """``out = activation(gate) * up``, an element a thread."""
    is_silu = activation is Activation.SILU
    root_2_over_pi = math.sqrt(2.0 / math.pi)

    def gated_activation_kernel(gate, up, out):
        i = cuda.grid(1)
        n_cols = gate.shape[1]
        if i >= gate.shape[0] * n_cols:
            return
        row = i // n_cols
        column = i % n_cols

        x = gate[row, column]
        if is_silu:
            value = x / (float32(1.0) + math.exp(-x))
        else:
            inner = float32(root_2_over_pi) * x * (float32(1.0) + float32(0.044715) * x * x)
            value = float32(0.5) * x * (float32(1.0) + math.tanh(inner))

        out[row, column] = value * up[row, column]

    return Kernel(gated_activation_kernel, (_MATRIX, _MATRIX, _MATRIX), n_threads=N_THREADS)


@kernel_builder
def build_to_half_kernel() -> Kernel:
    """float32 to float16, an element a thread."""

    def to_half_kernel(x, out):
        i = cuda.grid(1)
        if i < x.size:
            out[i] = types.float16(x[i])

    vector, half = types.Array(types.float32, 1, "C"), types.Array(types.float16, 1, "C")
    return Kernel(to_half_kernel, (vector, half), n_threads=N_THREADS)


def gated_activation(gate: Any, up: Any, out: Any, *, activation: Activation, stream: Any) -> None:
    """``out = activation(gate) * up``.

    gate, up, out   float32 [n_tokens, n_ff]     ``out`` may be ``gate`` or ``up``
    Raises          KernelArgumentError if shapes or dtypes disagree.
    """
    check_array("gate", gate, np.float32, (None, None))
    check_array("up", up, np.float32, gate.shape)
    check_array("out", out, np.float32, gate.shape)
    grid = (ceil_div(gate.shape[0] * gate.shape[1], N_THREADS),)
    build_gated_activation_kernel(activation).launch(grid, stream, gate, up, out)


def to_half(x: Any, out: Any, *, stream: Any) -> None:
    """Activations as float16, for a matrix product of many tokens; values beyond its range become infinite.

    x        float32 [n_tokens, n_cols]
    out      float16 [n_tokens, n_cols]
    Raises   KernelArgumentError if shapes or dtypes disagree.
    """
    check_array("x", x, np.float32, (None, None))
    check_array("out", out, np.float16, x.shape)
    grid = (ceil_div(x.shape[0] * x.shape[1], N_THREADS),)
    build_to_half_kernel().launch(grid, stream, x, out)
