"""Kernels of ``experts``: routing, ordering pairs by expert, products of each expert with its own tokens.

The launchers with their checks are there; the product of rows and tokens is ``matmul_kernels.multiply_rows``, so a
pair has the bits of its token alone times its expert alone.
"""

# mypy: ignore-errors
# Bodies are compiled by Numba and work on vector values.

from __future__ import annotations

import math

import numpy as np
from numba import njit

from kvs_core.cpu.kernel_cache import cached_njit
from kvs_core.cpu.matmul_kernels import multiply_rows, rows_per_task
from kvs_core.cpu.simd import (
    fma,
    load_f32,
    load_f32x16,
    splat_f32x16,
    store_f32,
    store_f32x16,
    sum_lanes,
    zero_f32x16,
)
from kvs_core.cpu.tasks import kernel_task, run_tasks
from kvs_core.units import ceil_div

ceil_div = njit(ceil_div)

_ROUTE_TASK_TOKENS = 8
_ROW_TASK_TOKENS = 4

# What llama.cpp divides by at least when weights are normalised: the smallest normal number of half precision.
_LEAST_SUM = 6.103515625e-5


@cached_njit()
def route_kernel(team, logits, rule, bias, ids, weights, rows, begins, taken):
    """Experts of every token, then pairs ordered by expert; returns how many experts any token takes.

    logits    float32 [n_tokens, n_expert]; overwritten
    rule      (by sigmoid, normalises, weight scale, groups, groups used)
    bias      float32 [n_expert] or [0]
    ids       int32 [n_tokens, n_used], weights float32 of the same shape
    rows      int32 [n_tokens, n_used], the place of each pair in the order
    begins    int32 [n_expert + 1], where the pairs of each expert begin
    taken     int32 [n_expert], the experts with pairs, ascending
    """
    n_tokens, n_expert = logits.shape
    n_used = ids.shape[1]
    arguments = (logits, rule, bias, ids, weights)
    if rule[0] or bias.size > 0 or rule[3] > 1:
        run_tasks(team, ceil_div(n_tokens, _ROUTE_TASK_TOKENS), _route_tokens_by_score, arguments)
    else:
        run_tasks(team, ceil_div(n_tokens, _ROUTE_TASK_TOKENS), _route_tokens, arguments)

    begins[:] = 0
    for token in range(n_tokens):
        for slot in range(n_used):
            begins[ids[token, slot] + 1] += 1
    n_taken = 0
    for expert in range(n_expert):
        if begins[expert + 1] > 0:
            taken[n_taken] = expert
            n_taken += 1
        begins[expert + 1] += begins[expert]
    # Each expert's begin serves as its cursor and ends where the next expert begins, so shift back afterwards.
    for token in range(n_tokens):
        for slot in range(n_used):
            expert = ids[token, slot]
            rows[token, slot] = begins[expert]
            begins[expert] += 1
    for expert in range(n_expert, 0, -1):
        begins[expert] = begins[expert - 1]
    begins[0] = 0
    return n_taken


@kernel_task
def _route_tokens(task, thread_idx, logits, rule, bias, ids, weights):
    """Plain softmax: the order of the logits is that of the weights."""
    _, normalises, weight_scale, _, _ = rule
    n_tokens, n_expert = logits.shape
    n_used = ids.shape[1]
    for token in range(task * _ROUTE_TASK_TOKENS, min(n_tokens, (task + 1) * _ROUTE_TASK_TOKENS)):
        for expert in range(n_expert):
            n_held = min(expert, n_used)
            slot = min(n_held, n_used - 1)
            if n_held == n_used and not logits[token, expert] > logits[token, ids[token, slot]]:
                continue
            while slot > 0 and logits[token, expert] > logits[token, ids[token, slot - 1]]:
                ids[token, slot] = ids[token, slot - 1]
                slot -= 1
            ids[token, slot] = expert

        highest = np.float64(logits[token, ids[token, 0]])
        total = 0.0
        for expert in range(n_expert):
            total += math.exp(np.float64(logits[token, expert]) - highest)
        divisor = total
        if normalises:
            chosen = 0.0
            for slot in range(n_used):
                chosen += math.exp(np.float64(logits[token, ids[token, slot]]) - highest)
            divisor = max(chosen, _LEAST_SUM * total)
        for slot in range(n_used):
            likely = math.exp(np.float64(logits[token, ids[token, slot]]) - highest)
            weights[token, slot] = likely / divisor * weight_scale


@kernel_task
def _route_tokens_by_score(task, thread_idx, logits, rule, bias, ids, weights):
    """Logits become weights, and weights with the bias decide: first on groups, then on their experts."""
    is_sigmoid, normalises, weight_scale, n_groups, n_groups_used = rule
    n_tokens, n_expert = logits.shape
    n_used = ids.shape[1]
    group_size = n_expert // n_groups
    for token in range(task * _ROUTE_TASK_TOKENS, min(n_tokens, (task + 1) * _ROUTE_TASK_TOKENS)):
        _weigh(logits, token, is_sigmoid)
        last_score, last_group = _last_group_used(logits, token, bias, n_groups, n_groups_used)
        n_held = 0
        for group in range(n_groups):
            if n_groups > 1:
                group_score = _score_group(logits, token, bias, group, group_size)
                if group_score < last_score or (group_score == last_score and group > last_group):
                    continue
            for expert in range(group * group_size, (group + 1) * group_size):
                score = _score(logits, token, bias, expert)
                slot = min(n_held, n_used - 1)
                if n_held == n_used and not score > _score(logits, token, bias, ids[token, slot]):
                    continue
                while slot > 0 and score > _score(logits, token, bias, ids[token, slot - 1]):
                    ids[token, slot] = ids[token, slot - 1]
                    slot -= 1
                ids[token, slot] = expert
                n_held = min(n_held + 1, n_used)

        divisor = 1.0
        if normalises:
            chosen = 0.0
            for slot in range(n_used):
                chosen += np.float64(logits[token, ids[token, slot]])
            divisor = max(chosen, _LEAST_SUM)
        for slot in range(n_used):
            weights[token, slot] = np.float64(logits[token, ids[token, slot]]) / divisor * weight_scale


@njit(nogil=True)
def _weigh(logits, token, is_sigmoid):
    """Turn a token's logits into its softmax, or each into its sigmoid."""
    n_expert = logits.shape[1]
    if is_sigmoid:
        for expert in range(n_expert):
            logits[token, expert] = 1.0 / (1.0 + math.exp(-np.float64(logits[token, expert])))
        return
    highest = np.float64(logits[token, 0])
    for expert in range(1, n_expert):
        highest = max(highest, np.float64(logits[token, expert]))
    total = 0.0
    for expert in range(n_expert):
        total += math.exp(np.float64(logits[token, expert]) - highest)
    for expert in range(n_expert):
        logits[token, expert] = math.exp(np.float64(logits[token, expert]) - highest) / total


@njit(nogil=True)
def _score(likely, token, bias, expert):
    if bias.size > 0:
        return likely[token, expert] + bias[expert]
    return likely[token, expert]


@njit(nogil=True)
def _score_group(likely, token, bias, group, group_size):
    """Sum of the two best scores of a group."""
    best = np.float32(-np.inf)
    second = np.float32(-np.inf)
    for expert in range(group * group_size, (group + 1) * group_size):
        score = _score(likely, token, bias, expert)
        if score > best:
            best, second = score, best
        elif score > second:
            second = score
    return best + second


@njit(nogil=True)
def _last_group_used(likely, token, bias, n_groups, n_groups_used):
    """Score and index of the last group that a token takes experts of, best first, the lower index among equals."""
    group_size = likely.shape[1] // n_groups
    last_score, last_group = np.float32(np.inf), -1
    if n_groups == 1:
        return last_score, last_group
    for _ in range(n_groups_used):
        best_score, best_group = np.float32(-np.inf), -1
        for group in range(n_groups):
            score = _score_group(likely, token, bias, group, group_size)
            is_behind = score < last_score or (score == last_score and group > last_group)
            if is_behind and (best_group < 0 or score > best_score):
                best_score, best_group = score, group
        if best_group < 0:
            break  # scores that are NaN are behind nothing
        last_score, last_group = best_score, best_group
    return last_score, last_group


@cached_njit()
def to_experts_kernel(team, x, rows, pairs):
    """``pairs[rows[token, slot]] = x[token]``."""
    run_tasks(team, ceil_div(x.shape[0], _ROW_TASK_TOKENS), _copy_tokens, (x, rows, pairs))


@kernel_task
def _copy_tokens(task, thread_idx, x, rows, pairs):
    n_tokens = x.shape[0]
    for token in range(task * _ROW_TASK_TOKENS, min(n_tokens, (task + 1) * _ROW_TASK_TOKENS)):
        for slot in range(rows.shape[1]):
            pair = rows[token, slot]
            for idx in range(x.shape[1]):
                pairs[pair, idx] = x[token, idx]


@cached_njit()
def add_expert_bias_kernel(team, bias, ids, rows, pairs):
    """``pairs[rows[token, slot]] += bias[ids[token, slot]]``."""
    run_tasks(team, ceil_div(ids.shape[0], _ROW_TASK_TOKENS), _add_biases_of_tokens, (bias, ids, rows, pairs))


@kernel_task
def _add_biases_of_tokens(task, thread_idx, bias, ids, rows, pairs):
    n_tokens, n_used = ids.shape
    for token in range(task * _ROW_TASK_TOKENS, min(n_tokens, (task + 1) * _ROW_TASK_TOKENS)):
        for slot in range(n_used):
            expert, pair = ids[token, slot], rows[token, slot]
            for idx in range(pairs.shape[1]):
                pairs[pair, idx] += bias[expert, idx]


@cached_njit()
def from_experts_kernel(team, pairs, rows, weights, out):
    """``out[token] = sum over slots of weights[token, slot] * pairs[rows[token, slot]]``, slots ascending."""
    run_tasks(team, ceil_div(out.shape[0], _ROW_TASK_TOKENS), _sum_tokens, (pairs, rows, weights, out))


@kernel_task
def _sum_tokens(task, thread_idx, pairs, rows, weights, out):
    n_tokens, n = out.shape
    n_used = rows.shape[1]
    n_whole = n // 16 * 16
    for token in range(task * _ROW_TASK_TOKENS, min(n_tokens, (task + 1) * _ROW_TASK_TOKENS)):
        for idx in range(0, n_whole, 16):
            total = zero_f32x16()
            for slot in range(n_used):
                pair = np.int64(rows[token, slot]) * n
                total = fma(splat_f32x16(weights[token, slot]), load_f32x16(pairs, pair + idx), total)
            store_f32x16(out, token * n + idx, total)
        for idx in range(n_whole, n):
            total_1 = np.float32(0.0)
            for slot in range(n_used):
                pair = np.int64(rows[token, slot]) * n
                total_1 = fma(weights[token, slot], load_f32(pairs, pair + idx), total_1)
            store_f32(out, token * n + idx, total_1)


@cached_njit()
def expert_matmul_kernel(
    kind, data_a, data_b, n_weights, n_expert, taken, begins, x, out_a, out_b, scratch, team, n_threads
):
    """Each expert's rows of one or two weights of one kind and shape times the pairs of that expert.

    data_*      uint8 [n_expert * n_stride, row_bytes], expert after expert; B's may begin some rows later
    taken       int32 [n_taken], begins int32 [n_expert + 1]
    x           float32 [n_pairs, n_in], ordered by expert; out_* float32 [n_pairs, n_out]
    scratch     float32, as ``scratch.matmul_scratch_bytes`` says
    """
    n_stride = data_a.shape[0] // n_expert
    n_rows = out_a.shape[1]
    task_rows = min(n_rows, rows_per_task(n_weights * n_rows * taken.size, n_threads))
    n_chunks = ceil_div(n_rows, task_rows)
    arguments = (kind, data_a, data_b, n_stride, task_rows, n_chunks, taken, begins, x, out_a, out_b, scratch)
    run_tasks(team, n_weights * taken.size * n_chunks, _multiply_expert, arguments)


@kernel_task
def _multiply_expert(
    task, thread_idx, kind, data_a, data_b, n_stride, task_rows, n_chunks, taken, begins, x, out_a, out_b, scratch
):
    """Some rows of one expert; tasks are numbered by expert, then by chunk of rows, A before B."""
    n_tasks = taken.size * n_chunks
    n_rows = out_a.shape[1]
    data, out = data_a, out_a
    if task >= n_tasks:
        data, out = data_b, out_b
        task -= n_tasks
    expert = np.int64(taken[task // n_chunks])
    row_begin = task % n_chunks * task_rows
    pair_begin, pair_end = begins[expert], begins[expert + 1]
    multiply_rows(
        kind,
        data[expert * n_stride : expert * n_stride + n_rows],
        row_begin,
        min(n_rows, row_begin + task_rows),
        x[pair_begin:pair_end],
        out[pair_begin:pair_end],
        scratch,
        thread_idx,
    )


@cached_njit()
def sigmoid_gate_kernel(team, x, weight, y):
    """``y[row] *= 1 / (1 + exp(-x[row] . weight))``."""
    run_tasks(team, ceil_div(x.shape[0], _ROW_TASK_TOKENS), _gate_rows, (x, weight, y))


@kernel_task
def _gate_rows(task, thread_idx, x, weight, y):
    n_rows, n_in = x.shape
    n_out = y.shape[1]
    n_whole = n_in // 16 * 16
    for row in range(task * _ROW_TASK_TOKENS, min(n_rows, (task + 1) * _ROW_TASK_TOKENS)):
        total = zero_f32x16()
        for idx in range(0, n_whole, 16):
            total = fma(load_f32x16(x, row * n_in + idx), load_f32x16(weight, idx), total)
        dot = sum_lanes(total)
        for idx in range(n_whole, n_in):
            dot = fma(load_f32(x, row * n_in + idx), load_f32(weight, idx), dot)
        factor = np.float32(1.0 / (1.0 + math.exp(-np.float64(dot))))
        for idx in range(n_out):
            y[row, idx] *= factor
