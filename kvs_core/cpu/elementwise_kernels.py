"""Kernels of ``elementwise``; the launchers with their checks are there.

Every result depends on its own row or element only, in a fixed order, so sharing rows out changes no bit.
"""

# mypy: ignore-errors
# Bodies are compiled by Numba and work on vector values.

from __future__ import annotations

import math

import numpy as np
from numba import njit

from kvs_core.cpu.kernel_cache import cached_njit
from kvs_core.cpu.simd import (
    even_lanes,
    first_lane,
    fma,
    interleave_high,
    interleave_low,
    load_f32,
    load_f32x16,
    maximum,
    minimum,
    odd_lanes,
    splat_f32x16,
    store_f32,
    store_f32x16,
    sum_lanes,
    zero_f32x16,
)
from kvs_core.cpu.tasks import kernel_task, run_tasks
from kvs_core.cpu.vector_math import cos_sin_f32x16, exp_f32x16, tanh_f32x16
from kvs_core.units import ceil_div

ceil_div = njit(ceil_div)

# Elements per task: about 2 us of work, ten times what handing out a task to another thread costs.
_TASK_ELEMENTS = 8192

# gelu(x) = x / (1 + exp(_GELU_FACTOR * x * (1 + _GELU_CUBIC * x^2)))
_GELU_FACTOR = np.float32(-2.0 * math.sqrt(2.0 / math.pi))
_GELU_CUBIC = np.float32(0.044715)

# The clamped gate of gpt-oss: g / (1 + exp(_SWIGLU_SLOPE * g)) * (u + 1), g up to the limit, u within it
_SWIGLU_SLOPE = np.float32(-1.702)
_SWIGLU_LIMIT = np.float32(7.0)


@cached_njit()
def rms_norm_kernel(team, x, weight, eps, out):
    """The first n elements of rows of x [n_rows, n or more] over their root mean square, times weight [n]."""
    n_rows, n = x.shape[0], weight.size
    task_rows = max(1, _TASK_ELEMENTS // n)
    run_tasks(team, ceil_div(n_rows, task_rows), _normalise_rows, (x, weight, eps, out, task_rows))


@kernel_task
def _normalise_rows(task, thread_idx, x, weight, eps, out, task_rows):
    n_rows, width = x.shape
    n = weight.size
    for row in range(task * task_rows, min(n_rows, (task + 1) * task_rows)):
        total = np.float64(_sum_of_squares(x, row * width, n))
        if total == np.inf:
            total = _wide_sum_of_squares(x, row * width, n)
        mean = total / n
        scale = np.float32(1.0 / math.sqrt(mean + np.float64(eps)))
        _scale_row(x, row * width, n, scale, weight, out)


@njit(nogil=True)
def _sum_of_squares(x, begin, n):
    """In four chains of 16 lanes, which keeps the error of a row of 8192 below that of 128 additions."""
    sum_0 = zero_f32x16()
    sum_1 = zero_f32x16()
    sum_2 = zero_f32x16()
    sum_3 = zero_f32x16()
    n_fours = n // 64 * 64
    for idx in range(begin, begin + n_fours, 64):
        x_0 = load_f32x16(x, idx)
        x_1 = load_f32x16(x, idx + 16)
        x_2 = load_f32x16(x, idx + 32)
        x_3 = load_f32x16(x, idx + 48)
        sum_0 = fma(x_0, x_0, sum_0)
        sum_1 = fma(x_1, x_1, sum_1)
        sum_2 = fma(x_2, x_2, sum_2)
        sum_3 = fma(x_3, x_3, sum_3)
    n_whole = n // 16 * 16
    for idx in range(begin + n_fours, begin + n_whole, 16):
        x_0 = load_f32x16(x, idx)
        sum_0 = fma(x_0, x_0, sum_0)
    total = sum_lanes((sum_0 + sum_1) + (sum_2 + sum_3))
    for idx in range(begin + n_whole, begin + n):
        value = load_f32(x, idx)
        total = fma(value, value, total)
    return total


@njit(nogil=True)
def _wide_sum_of_squares(x, begin, n):
    """For values beyond 1e19, whose squares float32 cannot hold: a mean of infinity would turn the row to zeros."""
    total = 0.0
    for idx in range(begin, begin + n):
        value = np.float64(load_f32(x, idx))
        total += value * value
    return total


@njit(nogil=True)
def _scale_row(x, begin, n, scale, weight, out):
    scales = splat_f32x16(scale)
    n_whole = n // 16 * 16
    for idx in range(0, n_whole, 16):
        store_f32x16(out, begin + idx, load_f32x16(x, begin + idx) * scales * load_f32x16(weight, idx))
    for idx in range(n_whole, n):
        store_f32(out, begin + idx, load_f32(x, begin + idx) * scale * load_f32(weight, idx))


@cached_njit()
def rope_kernel(team, x, begin, first_pos, freqs, magnitude, is_neox):
    """Rotate 2 * len(freqs) elements from ``begin`` on of every head of x [n_tokens, n_head, head_dim] in place."""
    n_tokens, n_head, head_dim = x.shape
    task_tokens = max(1, _TASK_ELEMENTS // (n_head * head_dim))
    n_tasks = ceil_div(n_tokens, task_tokens)
    run_tasks(team, n_tasks, _rotate_tokens, (x, begin, first_pos, freqs, magnitude, is_neox, task_tokens))


@kernel_task
def _rotate_tokens(task, thread_idx, x, begin, first_pos, freqs, magnitude, is_neox, task_tokens):
    n_tokens, n_head, head_dim = x.shape
    n_pairs = freqs.size
    n_whole = n_pairs // 16 * 16
    scale = splat_f32x16(magnitude)
    for token_idx in range(task * task_tokens, min(n_tokens, (task + 1) * task_tokens)):
        pos = np.float32(first_pos + token_idx)
        row = token_idx * n_head * head_dim + begin
        for pair in range(0, n_whole, 16):
            cosine, sine = cos_sin_f32x16(splat_f32x16(pos) * load_f32x16(freqs, pair))
            for head in range(row, row + n_head * head_dim, head_dim):
                _rotate_16_pairs(x, head, pair, n_pairs, cosine * scale, sine * scale, is_neox)
        for pair in range(n_whole, n_pairs):
            cosine, sine = cos_sin_f32x16(splat_f32x16(pos * load_f32(freqs, pair)))
            for head in range(row, row + n_head * head_dim, head_dim):
                _rotate_pair(x, head, pair, n_pairs, first_lane(cosine * scale), first_lane(sine * scale), is_neox)


@njit(nogil=True)
def _rotate_16_pairs(x, head, pair, n_pairs, cosine, sine, is_neox):
    if is_neox:
        begin_0 = head + pair
        begin_1 = begin_0 + n_pairs
        x_0 = load_f32x16(x, begin_0)
        x_1 = load_f32x16(x, begin_1)
        store_f32x16(x, begin_0, x_0 * cosine - x_1 * sine)
        store_f32x16(x, begin_1, x_0 * sine + x_1 * cosine)
    else:
        begin = head + 2 * pair
        low = load_f32x16(x, begin)
        high = load_f32x16(x, begin + 16)
        x_0 = even_lanes(low, high)
        x_1 = odd_lanes(low, high)
        y_0 = x_0 * cosine - x_1 * sine
        y_1 = x_0 * sine + x_1 * cosine
        store_f32x16(x, begin, interleave_low(y_0, y_1))
        store_f32x16(x, begin + 16, interleave_high(y_0, y_1))


@njit(nogil=True)
def _rotate_pair(x, head, pair, n_pairs, cosine, sine, is_neox):
    idx_0 = head + pair if is_neox else head + 2 * pair
    idx_1 = idx_0 + n_pairs if is_neox else idx_0 + 1
    x_0 = load_f32(x, idx_0)
    x_1 = load_f32(x, idx_1)
    store_f32(x, idx_0, x_0 * cosine - x_1 * sine)
    store_f32(x, idx_1, x_0 * sine + x_1 * cosine)


@cached_njit()
def silu_mul_kernel(team, gate, up, out):
    """``out = gate / (1 + exp(-gate)) * up``; out may be gate or up."""
    run_tasks(team, ceil_div(gate.size, _TASK_ELEMENTS), _silu_mul_elements, (gate, up, out))


@kernel_task
def _silu_mul_elements(task, thread_idx, gate, up, out):
    begin = task * _TASK_ELEMENTS
    end = min(gate.size, begin + _TASK_ELEMENTS)
    whole_end = begin + (end - begin) // 16 * 16
    for idx in range(begin, whole_end, 16):
        store_f32x16(out, idx, _silu(load_f32x16(gate, idx)) * load_f32x16(up, idx))
    for idx in range(whole_end, end):
        silu = first_lane(_silu(splat_f32x16(load_f32(gate, idx))))
        store_f32(out, idx, silu * load_f32(up, idx))


@njit(nogil=True)
def _silu(x):
    one = splat_f32x16(np.float32(1.0))
    return x / (one + exp_f32x16(zero_f32x16() - x))


@cached_njit()
def gelu_mul_kernel(team, gate, up, out):
    """``out = gelu(gate) * up`` with the tanh form of GELU; out may be gate or up."""
    run_tasks(team, ceil_div(gate.size, _TASK_ELEMENTS), _gelu_mul_elements, (gate, up, out))


@kernel_task
def _gelu_mul_elements(task, thread_idx, gate, up, out):
    begin = task * _TASK_ELEMENTS
    end = min(gate.size, begin + _TASK_ELEMENTS)
    whole_end = begin + (end - begin) // 16 * 16
    for idx in range(begin, whole_end, 16):
        store_f32x16(out, idx, _gelu(load_f32x16(gate, idx)) * load_f32x16(up, idx))
    for idx in range(whole_end, end):
        gelu = first_lane(_gelu(splat_f32x16(load_f32(gate, idx))))
        store_f32(out, idx, gelu * load_f32(up, idx))


@njit(nogil=True)
def _gelu(x):
    """x (1 + tanh(u)) / 2 as x / (1 + e^-2u), which loses no digits where the two halves nearly cancel."""
    one = splat_f32x16(np.float32(1.0))
    cube = fma(x * x, splat_f32x16(_GELU_CUBIC), one)
    return x / (one + exp_f32x16(splat_f32x16(_GELU_FACTOR) * (x * cube)))


@cached_njit()
def clamped_swiglu_kernel(team, gate, up, out):
    """``out = g / (1 + exp(-1.702 g)) * (u + 1)``, g the gate up to 7 and u ``up`` between -7 and 7."""
    run_tasks(team, ceil_div(gate.size, _TASK_ELEMENTS), _clamped_swiglu_elements, (gate, up, out))


@kernel_task
def _clamped_swiglu_elements(task, thread_idx, gate, up, out):
    begin = task * _TASK_ELEMENTS
    end = min(gate.size, begin + _TASK_ELEMENTS)
    whole_end = begin + (end - begin) // 16 * 16
    for idx in range(begin, whole_end, 16):
        store_f32x16(out, idx, _clamped_swiglu(load_f32x16(gate, idx), load_f32x16(up, idx)))
    for idx in range(whole_end, end):
        gated = _clamped_swiglu(splat_f32x16(load_f32(gate, idx)), splat_f32x16(load_f32(up, idx)))
        store_f32(out, idx, first_lane(gated))


@njit(nogil=True)
def _clamped_swiglu(gate, up):
    one = splat_f32x16(np.float32(1.0))
    limit = splat_f32x16(_SWIGLU_LIMIT)
    gate = minimum(limit, gate)  # in this order a NaN stays one
    up = maximum(zero_f32x16() - limit, minimum(limit, up))
    return gate / (one + exp_f32x16(splat_f32x16(_SWIGLU_SLOPE) * gate)) * (up + one)


@cached_njit()
def softplus_gate_kernel(team, gate, x):
    """``x = x * ln(1 + exp(gate))``, each gate for x.shape[1] / gate.shape[1] elements."""
    task_rows = max(1, _TASK_ELEMENTS // x.shape[1])
    run_tasks(team, ceil_div(x.shape[0], task_rows), _softplus_gate_rows, (gate, x, task_rows))


@kernel_task
def _softplus_gate_rows(task, thread_idx, gate, x, task_rows):
    n_rows, n = x.shape
    n_gates = gate.shape[1]
    n_gated = n // n_gates
    for row in range(task * task_rows, min(n_rows, (task + 1) * task_rows)):
        for idx in range(n_gates):
            value = np.float64(gate[row, idx])
            if value <= 20.0:  # beyond, ln(1 + e^x) is x in float32
                value = math.log1p(math.exp(value))
            factor = np.float32(value)
            for element in range(idx * n_gated, (idx + 1) * n_gated):
                x[row, element] *= factor


@cached_njit()
def scale_kernel(team, x, factor):
    """``x *= factor``."""
    run_tasks(team, ceil_div(x.size, _TASK_ELEMENTS), _scale_elements, (x, factor))


@kernel_task
def _scale_elements(task, thread_idx, x, factor):
    begin = task * _TASK_ELEMENTS
    end = min(x.size, begin + _TASK_ELEMENTS)
    whole_end = begin + (end - begin) // 16 * 16
    for idx in range(begin, whole_end, 16):
        store_f32x16(x, idx, load_f32x16(x, idx) * splat_f32x16(factor))
    for idx in range(whole_end, end):
        store_f32(x, idx, load_f32(x, idx) * factor)


@cached_njit()
def sigmoid_mul_kernel(team, x, gate):
    """``x = x / (1 + exp(-gate))``."""
    run_tasks(team, ceil_div(x.size, _TASK_ELEMENTS), _sigmoid_mul_elements, (x, gate))


@kernel_task
def _sigmoid_mul_elements(task, thread_idx, x, gate):
    begin = task * _TASK_ELEMENTS
    end = min(x.size, begin + _TASK_ELEMENTS)
    whole_end = begin + (end - begin) // 16 * 16
    one = splat_f32x16(np.float32(1.0))
    for idx in range(begin, whole_end, 16):
        store_f32x16(x, idx, load_f32x16(x, idx) / (one + exp_f32x16(zero_f32x16() - load_f32x16(gate, idx))))
    for idx in range(whole_end, end):
        divisor = one + exp_f32x16(splat_f32x16(-load_f32(gate, idx)))
        store_f32(x, idx, load_f32(x, idx) / first_lane(divisor))


@cached_njit()
def softcap_kernel(team, x, cap):
    """``x = cap * tanh(x / cap)``."""
    run_tasks(team, ceil_div(x.size, _TASK_ELEMENTS), _softcap_elements, (x, cap))


@kernel_task
def _softcap_elements(task, thread_idx, x, cap):
    begin = task * _TASK_ELEMENTS
    end = min(x.size, begin + _TASK_ELEMENTS)
    whole_end = begin + (end - begin) // 16 * 16
    caps = splat_f32x16(cap)
    for idx in range(begin, whole_end, 16):
        store_f32x16(x, idx, caps * tanh_f32x16(load_f32x16(x, idx) / caps))
    for idx in range(whole_end, end):
        store_f32(x, idx, first_lane(caps * tanh_f32x16(splat_f32x16(load_f32(x, idx)) / caps)))


@cached_njit()
def add_kernel(team, x, y):
    """``x += y`` for arrays of one shape."""
    run_tasks(team, ceil_div(x.size, _TASK_ELEMENTS), _add_elements, (x, y))


@kernel_task
def _add_elements(task, thread_idx, x, y):
    begin = task * _TASK_ELEMENTS
    end = min(x.size, begin + _TASK_ELEMENTS)
    _add_range(x, begin, y, begin, end - begin)


@cached_njit()
def add_bias_kernel(team, x, bias):
    """``x += bias`` for every row of x [n_rows, n]."""
    n_rows, n = x.shape
    task_rows = max(1, _TASK_ELEMENTS // n)
    run_tasks(team, ceil_div(n_rows, task_rows), _add_bias_rows, (x, bias, task_rows))


@kernel_task
def _add_bias_rows(task, thread_idx, x, bias, task_rows):
    n_rows, n = x.shape
    for row in range(task * task_rows, min(n_rows, (task + 1) * task_rows)):
        _add_range(x, row * n, bias, 0, n)


@njit(nogil=True)
def _add_range(x, x_begin, y, y_begin, n):
    n_whole = n // 16 * 16
    for idx in range(0, n_whole, 16):
        store_f32x16(x, x_begin + idx, load_f32x16(x, x_begin + idx) + load_f32x16(y, y_begin + idx))
    for idx in range(n_whole, n):
        store_f32(x, x_begin + idx, load_f32(x, x_begin + idx) + load_f32(y, y_begin + idx))
