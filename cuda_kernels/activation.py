"""Gated activations of the feed-forward layer, and float16 copies for matrix products."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import float32, int64, types

from cuda_kernels.dequant import OutputType
from cuda_kernels.emit import Emitter, Value, emitted
from cuda_kernels.intrinsics import multiply
from cuda_kernels.launch import Kernel, check_array, device_function, kernel_builder
from kvs_core.units import ceil_div

N_THREADS = 256
PER_THREAD = 4

HALF_SHRINK = 2.0**-4
"""Activations that no norm bounds are this much smaller in float16, which ends at 65504; products undo it, exactly.

Gated rows, and residuals where they are an input, reach some 1e5 in models people use (Gemma, Qwen). What is below 1e-3
then loses bits in float16: by 2^-21 at most, which is what its own rounding takes of 1e-3.
"""
HALF_GROWTH = 1.0 / HALF_SHRINK

_VECTOR, _HALVES = types.Array(types.float32, 1, "C"), types.Array(types.float16, 1, "C")


class Activation(Enum):
    """Function applied to the gate."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    CLAMPED_SWIGLU = "clamped_swiglu"


_LOG2_E = 1.4426950408889634
_ROOT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_CLAMP, _CLAMPED_SLOPE = 7.0, 1.702


def emit_gated_value(emit: Emitter, activation: Activation, gate: Value, up: Value) -> Value:
    """``activation(gate) * up`` of float32 numbers; clamped: ``g sigmoid(1.702 g) (u + 1)``, g up to 7, u within 7."""

    def over_one_plus_exp(numerator: Value, x: Value) -> Value:
        """numerator / (1 + exp(-x))"""
        power = emit.exp2(emit.float_multiply(x, emit.float(-_LOG2_E)))
        return emit.float_divide(numerator, emit.float_add(emit.float(1.0), power))

    if activation is Activation.SILU:
        return emit.float_multiply(over_one_plus_exp(gate, gate), up)
    if activation is Activation.GELU_TANH:  # x (1 + tanh y) / 2 = x / (1 + exp(-2 y))
        square = emit.float_multiply(gate, gate)
        inner = emit.fma(emit.float_multiply(emit.float(0.044715), square), gate, gate)
        twice = emit.float_multiply(emit.float(2.0 * _ROOT_2_OVER_PI), inner)
        return emit.float_multiply(over_one_plus_exp(gate, twice), up)
    g = emit.float_minimum(gate, emit.float(_CLAMP))
    u = emit.float_maximum(emit.float_minimum(up, emit.float(_CLAMP)), emit.float(-_CLAMP))
    part = over_one_plus_exp(g, emit.float_multiply(emit.float(_CLAMPED_SLOPE), g))
    return emit.float_multiply(part, emit.float_add(u, emit.float(1.0)))


def build_gated_value(activation: Activation) -> Any:
    """Intrinsic ``value(gate, up)``."""
    f32 = types.float32
    return emitted(f32, f32, f32)(lambda emit, gate, up: emit_gated_value(emit, activation, gate, up))


@device_function
def _silu_times(gate, up):
    return multiply(gate / (float32(1.0) + math.exp(-gate)), up)


def build_gated_end(activation: Activation) -> Any:
    """Device function ``value(gate, up)`` for products that end in it; SILU takes the math library's exponential."""
    return _silu_times if activation is Activation.SILU else build_gated_value(activation)


@kernel_builder
def build_gated_activation_kernel(activation: Activation, output: OutputType) -> Kernel:
    """``out = activation(gate) * up``, in float16 times HALF_SHRINK. Arrays are flat: no row is looked up.

    A thread takes PER_THREAD elements a block apart and reads all before it writes, so that its loads overlap.
    """
    is_silu, is_clamped = activation is Activation.SILU, activation is Activation.CLAMPED_SWIGLU
    is_half = output is OutputType.F16
    result = types.float16 if is_half else types.float32

    @device_function
    def activate(x):
        if is_silu:
            return x / (float32(1.0) + math.exp(-x))
        if is_clamped:
            x = min(x, float32(_CLAMP))
            return x / (float32(1.0) + math.exp(float32(-_CLAMPED_SLOPE) * x))
        inner = float32(_ROOT_2_OVER_PI) * x * (float32(1.0) + float32(0.044715) * x * x)
        return float32(0.5) * x * (float32(1.0) + math.tanh(inner))

    @device_function
    def factor(x):
        if is_clamped:
            return max(min(x, float32(_CLAMP)), float32(-_CLAMP)) + float32(1.0)
        return x

    @device_function
    def value(gate, up):
        product = activate(gate) * factor(up)
        return result(product * float32(HALF_SHRINK)) if is_half else product

    def gated_activation_kernel(gate, up, out):
        i = int64(cuda.blockIdx.x) * (N_THREADS * PER_THREAD) + cuda.threadIdx.x
        if i + 3 * N_THREADS < gate.size:
            j, k, m = i + N_THREADS, i + 2 * N_THREADS, i + 3 * N_THREADS
            gate_i, gate_j, gate_k, gate_m = gate[i], gate[j], gate[k], gate[m]
            up_i, up_j, up_k, up_m = up[i], up[j], up[k], up[m]
            out[i], out[j] = value(gate_i, up_i), value(gate_j, up_j)
            out[k], out[m] = value(gate_k, up_k), value(gate_m, up_m)
        else:
            for j in range(i, gate.size, N_THREADS):
                out[j] = value(gate[j], up[j])

    return Kernel(gated_activation_kernel, (_VECTOR, _VECTOR, _HALVES if is_half else _VECTOR), n_threads=N_THREADS)


@kernel_builder
def build_to_half_kernel() -> Kernel:
    """float32 times ``factor`` to float16; elements of a thread as in the gated activation."""

    def to_half_kernel(x, out, factor):
        i = int64(cuda.blockIdx.x) * (N_THREADS * PER_THREAD) + cuda.threadIdx.x
        if i + 3 * N_THREADS < x.size:
            j, k, m = i + N_THREADS, i + 2 * N_THREADS, i + 3 * N_THREADS
            x_i, x_j, x_k, x_m = x[i], x[j], x[k], x[m]
            out[i] = types.float16(x_i * factor)
            out[j] = types.float16(x_j * factor)
            out[k] = types.float16(x_k * factor)
            out[m] = types.float16(x_m * factor)
        else:
            for j in range(i, x.size, N_THREADS):
                out[j] = types.float16(x[j] * factor)

    return Kernel(to_half_kernel, (_VECTOR, _HALVES, types.float32), n_threads=N_THREADS)


def gated_activation(gate: Any, up: Any, out: Any, *, activation: Activation, stream: Any) -> None:
    """``out = activation(gate) * up``.

    gate, up        float32 [n_tokens, n_ff]
    out             the same, and then it may be ``gate`` or ``up``; or float16 of that shape, times HALF_SHRINK
    Raises          KernelArgumentError if shapes or dtypes disagree.
    """
    check_array("gate", gate, np.float32, (None, None))
    check_array("up", up, np.float32, gate.shape)
    output = OutputType.F16 if out.dtype == np.float16 else OutputType.F32
    check_array("out", out, output.value, gate.shape)
    grid = (ceil_div(gate.shape[0] * gate.shape[1], N_THREADS * PER_THREAD),)
    build_gated_activation_kernel(activation, output).launch(grid, stream, gate, up, out)


def to_half(x: Any, out: Any, *, factor: float, stream: Any) -> None:
    """``x * factor`` as float16, for a matrix product of many tokens; values beyond its range become infinite.

    x        float32 [n_tokens, n_cols]
    out      float16 [n_tokens, n_cols]
    Raises   KernelArgumentError if shapes or dtypes disagree.
    """
    check_array("x", x, np.float32, (None, None))
    check_array("out", out, np.float16, x.shape)
    grid = (ceil_div(x.shape[0] * x.shape[1], N_THREADS * PER_THREAD),)
    build_to_half_kernel().launch(grid, stream, x, out, factor)
