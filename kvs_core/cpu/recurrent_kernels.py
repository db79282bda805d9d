"""Kernels of ``recurrent``; the launchers with their checks are there.

A channel of the convolution and a value element of a head depend on no other, so tasks share out channels and heads,
and every result is made in one order of additions whatever the number of tokens of a step.
"""

# mypy: ignore-errors
# Bodies are compiled by Numba and work on vector values.

from __future__ import annotations

import math

import numpy as np
from numba import njit

from kvs_core.cpu.kernel_cache import cached_njit
from kvs_core.cpu.simd import (
    fma,
    load_f32,
    load_f32x16,
    splat_f32x16,
    store_f32x16,
    sum_lanes,
    zero_f32x16,
)
from kvs_core.cpu.tasks import kernel_task, run_tasks
from kvs_core.cpu.vector_math import exp_f32x16
from kvs_core.units import ceil_div

ceil_div = njit(ceil_div)

_TASK_CHANNELS = 256
_PREPARE_TASK_TOKENS = 4

# Tokens that pass through one part of a head's matrix before the next part does: part, queries and keys, 24 KiB at a
# head size of 128, share the first-level cache. Decides no bit. One Zen 5 thread: 8, 16 and 32 alike within 5 %.
_BLOCK_TOKENS = 16


@cached_njit()
def convolve_kernel(team, x, taps, inputs, is_first, heads):
    """Causal convolution of every channel, then silu; ``inputs`` becomes the last rows of itself and ``x``."""
    task_heads = max(1, _TASK_CHANNELS // heads.shape[2])
    arguments = (x, taps, inputs, is_first, heads, task_heads)
    run_tasks(team, ceil_div(heads.shape[0], task_heads), _convolve_heads, arguments)


@kernel_task
def _convolve_heads(task, thread_idx, x, taps, inputs, is_first, heads, task_heads):
    n_tokens, n_channels = x.shape
    n_head, _, head_dim = heads.shape
    n_earlier = inputs.shape[0]
    begin = task * task_heads * head_dim
    end = min(n_head, (task + 1) * task_heads) * head_dim
    if is_first:
        for row in range(n_earlier):
            for channel in range(begin, end, 16):
                store_f32x16(inputs, row * n_channels + channel, zero_f32x16())

    one = splat_f32x16(np.float32(1.0))
    for token in range(n_tokens):
        for channel in range(begin, end, 16):
            total = zero_f32x16()
            for tap in range(n_earlier + 1):
                source = token - n_earlier + tap
                factor = load_f32x16(taps, tap * n_channels + channel)
                if source < 0:
                    total = fma(load_f32x16(inputs, (source + n_earlier) * n_channels + channel), factor, total)
                else:
                    total = fma(load_f32x16(x, source * n_channels + channel), factor, total)
            out = (channel // head_dim * n_tokens + token) * head_dim + channel % head_dim
            store_f32x16(heads, out, total / (one + exp_f32x16(zero_f32x16() - total)))

    for row in range(n_earlier):  # ascending: what a row takes from a later one has not been overwritten yet
        source = n_tokens - n_earlier + row
        for channel in range(begin, end, 16):
            if source < 0:
                value = load_f32x16(inputs, (source + n_earlier) * n_channels + channel)
            else:
                value = load_f32x16(x, source * n_channels + channel)
            store_f32x16(inputs, row * n_channels + channel, value)


@cached_njit()
def prepare_delta_kernel(team, heads, beta, decay, bias, rate, eps, n_head_k):
    """In place: queries and keys of length 1, queries also / sqrt(head_dim); beta and decay as factors of a step."""
    arguments = (heads, beta, decay, bias, rate, eps, n_head_k)
    run_tasks(team, ceil_div(beta.shape[0], _PREPARE_TASK_TOKENS), _prepare_tokens, arguments)


@kernel_task
def _prepare_tokens(task, thread_idx, heads, beta, decay, bias, rate, eps, n_head_k):
    n_tokens, n_head_v = beta.shape
    head_dim = heads.shape[2]
    for token in range(task * _PREPARE_TASK_TOKENS, min(n_tokens, (task + 1) * _PREPARE_TASK_TOKENS)):
        for head in range(2 * n_head_k):
            begin = (head * n_tokens + token) * head_dim
            total = zero_f32x16()
            for idx in range(begin, begin + head_dim, 16):
                values = load_f32x16(heads, idx)
                total = fma(values, values, total)
            factor = 1.0 / max(math.sqrt(np.float64(sum_lanes(total))), eps)
            if head < n_head_k:
                factor /= math.sqrt(np.float64(head_dim))
            factors = splat_f32x16(np.float32(factor))
            for idx in range(begin, begin + head_dim, 16):
                store_f32x16(heads, idx, load_f32x16(heads, idx) * factors)
        for head in range(n_head_v):
            beta[token, head] = 1.0 / (1.0 + math.exp(-np.float64(beta[token, head])))
            step = np.float64(decay[token, head]) + np.float64(bias[head])
            if step <= 20.0:  # beyond, softplus is its argument to the last bit of float32
                step = math.log1p(math.exp(step))
            decay[token, head] = math.exp(np.float64(rate[head]) * step)


@cached_njit()
def delta_net_kernel(team, heads, beta, decay, n_head_k, groups_values, matrices, is_first, out):
    """The delta rule over all tokens of the step, a value head a task; ``heads``, ``beta``, ``decay`` as prepared."""
    arguments = (heads, beta, decay, n_head_k, groups_values, matrices, is_first, out)
    run_tasks(team, matrices.shape[0], _run_head, arguments)


@kernel_task
def _run_head(head, thread_idx, heads, beta, decay, n_head_k, groups_values, matrices, is_first, out):
    n_tokens, n_head_v = beta.shape
    head_dim = matrices.shape[2]
    matrix = head * head_dim * head_dim
    key_head = head // (n_head_v // n_head_k) if groups_values else head % n_head_k
    if is_first:
        for idx in range(matrix, matrix + head_dim * head_dim, 16):
            store_f32x16(matrices, idx, zero_f32x16())

    for begin in range(0, n_tokens, _BLOCK_TOKENS):
        end = min(n_tokens, begin + _BLOCK_TOKENS)
        for column in range(0, head_dim, 16):
            corner = matrix + column * head_dim
            for token in range(begin, end):
                q = (key_head * n_tokens + token) * head_dim
                k = ((n_head_k + key_head) * n_tokens + token) * head_dim
                v = ((2 * n_head_k + head) * n_tokens + token) * head_dim + column
                kept, share = splat_f32x16(decay[token, head]), splat_f32x16(beta[token, head])
                result = _step_columns(heads, q, k, load_f32x16(heads, v), kept, share, matrices, corner)
                store_f32x16(out, (token * n_head_v + head) * head_dim + column, result)


@njit(nogil=True)
def _step_columns(heads, q, k, value, kept, share, matrices, corner):
    """One token's step of the 16 columns of a head's matrix that begin at ``corner``.

    What the matrix holds for the key, and what it then gives to the query, are sums over its rows in four chains.
    """
    head_dim = matrices.shape[2]
    sum_0, sum_1, sum_2, sum_3 = zero_f32x16(), zero_f32x16(), zero_f32x16(), zero_f32x16()
    for idx in range(0, head_dim, 4):
        at = corner + 16 * idx
        sum_0 = fma(load_f32x16(matrices, at), splat_f32x16(load_f32(heads, k + idx)), sum_0)
        sum_1 = fma(load_f32x16(matrices, at + 16), splat_f32x16(load_f32(heads, k + idx + 1)), sum_1)
        sum_2 = fma(load_f32x16(matrices, at + 32), splat_f32x16(load_f32(heads, k + idx + 2)), sum_2)
        sum_3 = fma(load_f32x16(matrices, at + 48), splat_f32x16(load_f32(heads, k + idx + 3)), sum_3)
    change = share * (value - kept * ((sum_0 + sum_1) + (sum_2 + sum_3)))

    sum_0, sum_1, sum_2, sum_3 = zero_f32x16(), zero_f32x16(), zero_f32x16(), zero_f32x16()
    for idx in range(0, head_dim, 4):
        at = corner + 16 * idx
        row_0 = fma(splat_f32x16(load_f32(heads, k + idx)), change, kept * load_f32x16(matrices, at))
        row_1 = fma(splat_f32x16(load_f32(heads, k + idx + 1)), change, kept * load_f32x16(matrices, at + 16))
        row_2 = fma(splat_f32x16(load_f32(heads, k + idx + 2)), change, kept * load_f32x16(matrices, at + 32))
        row_3 = fma(splat_f32x16(load_f32(heads, k + idx + 3)), change, kept * load_f32x16(matrices, at + 48))
        store_f32x16(matrices, at, row_0)
        store_f32x16(matrices, at + 16, row_1)
        store_f32x16(matrices, at + 32, row_2)
        store_f32x16(matrices, at + 48, row_3)
        sum_0 = fma(splat_f32x16(load_f32(heads, q + idx)), row_0, sum_0)
        sum_1 = fma(splat_f32x16(load_f32(heads, q + idx + 1)), row_1, sum_1)
        sum_2 = fma(splat_f32x16(load_f32(heads, q + idx + 2)), row_2, sum_2)
        sum_3 = fma(splat_f32x16(load_f32(heads, q + idx + 3)), row_3, sum_3)
    return (sum_0 + sum_1) + (sum_2 + sum_3)
