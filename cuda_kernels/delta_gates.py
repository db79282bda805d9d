"""What a delta net does element by element: its factors before it, norm and gate behind it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import float32, int32, int64, types

from cuda_kernels.delta_tiles import HEAD_DIM_STEP
from cuda_kernels.intrinsics import FULL_WARP, fma, load_float, multiply, store_half
from cuda_kernels.launch import Kernel, address_of, check_array, device_function, kernel_builder
from kvs_core.errors import KernelArgumentError
from kvs_core.units import ceil_div

GATE_THREADS = 256
_SOFTPLUS_IS_LINEAR = 20.0
"""Beyond, softplus is its argument to the last bit of float32."""


@device_function
def share_of(beta):
    """The share of a change that is made."""
    return float32(1.0) / (float32(1.0) + math.exp(-beta))


@device_function
def kept_of(decay, bias, rate):
    """What the matrix is multiplied by before a token."""
    step = decay + bias
    if step <= float32(_SOFTPLUS_IS_LINEAR):
        step = math.log1p(math.exp(step))
    return math.exp(rate * step)


@device_function
def silu(x):
    return x / (float32(1.0) + math.exp(-x))


@kernel_builder
def build_delta_gates_kernel() -> Kernel:
    """``beta`` and ``decay`` in place as the factors that ``kept_of`` and ``share_of`` give; a thread each."""

    def delta_gates_kernel(beta, decay, bias, rate, n_head):
        i = int64(cuda.grid(1))
        if i < beta.size:
            head = i % n_head
            beta[i] = share_of(beta[i])
            decay[i] = kept_of(decay[i], bias[head], rate[head])

    vector = types.Array(types.float32, 1, "C")
    return Kernel(delta_gates_kernel, (vector, vector, vector, vector, types.int64), n_threads=GATE_THREADS)


@device_function
def norm_and_gate(value, total, n, weight, gate, eps):
    """An element of a head of ``n`` whose squares sum to ``total``, normalised, times its weight and silu(gate)."""
    factor = float32(1.0) / math.sqrt(total / float32(n) + eps)
    return multiply(silu(gate), multiply(multiply(value, factor), weight))


@device_function
def lanes_sum(value):
    for step in (16, 8, 4, 2, 1):
        value += cuda.shfl_xor_sync(FULL_WARP, value, step)
    return value


@kernel_builder
def build_norm_gate_kernel(head_dim: int) -> Kernel:
    """A warp takes a head of a token: RMS norm, times weight and SiLU of the gate, as float16."""
    n_own = head_dim // 32

    def norm_gate_kernel(x, weight, gate, half, n_rows, eps):
        lane = int32(cuda.threadIdx.x) & int32(31)
        row = int64(cuda.blockIdx.x) * (GATE_THREADS // 32) + (int32(cuda.threadIdx.x) >> int32(5))
        if row >= n_rows:
            return
        total = float32(0.0)
        for i in range(n_own):
            value = load_float(x + (row * head_dim + lane + 32 * i) * 4)
            total = fma(value, value, total)
        total = lanes_sum(total)
        for i in range(n_own):
            at = row * head_dim + lane + 32 * i
            own_weight, own_gate = load_float(weight + (int64(lane) + 32 * i) * 4), load_float(gate + at * 4)
            gated = norm_and_gate(load_float(x + at * 4), total, head_dim, own_weight, own_gate, eps)
            store_half(half + at * 2, gated)

    return Kernel(norm_gate_kernel, [types.int64] * 5 + [types.float32], n_threads=GATE_THREADS)


def delta_gates(beta: Any, decay: Any, *, bias: Any, rate: Any, stream: Any) -> None:
    """``beta = sigmoid(beta)`` and ``decay = exp(rate * softplus(decay + bias))``, in place.

    beta, decay   float32 [n_tokens, n_head_v]
    bias, rate    float32 [n_head_v]
    Raises        KernelArgumentError if shapes or dtypes disagree.
    """
    check_gates(beta, decay, bias, rate, n_tokens=beta.shape[0], n_head=beta.shape[1])
    n_head = beta.shape[1]
    grid = (ceil_div(beta.shape[0] * n_head, GATE_THREADS),)
    build_delta_gates_kernel().launch(grid, stream, beta, decay, bias, rate, n_head)


def norm_gate(x: Any, weight: Any, gate: Any, half: Any, *, eps: float, stream: Any) -> None:
    """``half`` = RMS norm of each head of ``x``, times ``weight``, times silu(gate).

    x, gate   float32 [n_tokens, n_head * head_dim]
    weight    float32 [head_dim]
    half      float16 as ``x``
    Raises    KernelArgumentError if shapes or dtypes disagree.
    """
    check_array("x", x, np.float32, (None, None))
    check_array("weight", weight, np.float32, (None,))
    check_array("gate", gate, np.float32, x.shape)
    check_array("half", half, np.float16, x.shape)
    head_dim = weight.shape[0]
    if head_dim % HEAD_DIM_STEP or x.shape[1] % head_dim:
        raise KernelArgumentError(f"norm_gate: heads of {head_dim} elements in rows of {x.shape[1]}")
    n_rows = x.shape[0] * (x.shape[1] // head_dim)
    arrays = (address_of(array) for array in (x, weight, gate, half))
    build_norm_gate_kernel(head_dim).launch((ceil_div(n_rows, GATE_THREADS // 32),), stream, *arrays, n_rows, eps)


def check_gates(beta: Any, decay: Any, bias: Any, rate: Any, *, n_tokens: int, n_head: int) -> None:
    """Raise KernelArgumentError unless betas and decays fit their vectors."""
    check_array("beta", beta, np.float32, (n_tokens, n_head))
    check_array("decay", decay, np.float32, (n_tokens, n_head))
    check_array("bias", bias, np.float32, (n_head,))
    check_array("rate", rate, np.float32, (n_head,))
