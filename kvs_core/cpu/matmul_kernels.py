"""Kernels of ``matmul``: sharing rows out to threads, and the loops over rows and tokens.

Launchers with their checks are in ``matmul``, unpacking in ``weight_blocks``, the innermost product in
``matmul_tile``.
"""

# mypy: ignore-errors
# Bodies are compiled by Numba and work on vector values.

from __future__ import annotations

import numpy as np
from numba import njit
from numba.extending import register_jitable

from kvs_core.cpu.kernel_cache import cached_njit
from kvs_core.cpu.matmul_tile import TOKEN_GROUP, build_tile_product
from kvs_core.cpu.scratch import (
    DECODE_TOKENS_MAX,
    MAX_TILE_ROWS,
    MAX_TILE_TOKENS,
    ROW_GROUP,
    decode_tile_rows,
    sum_floats,
    thread_scratch_floats,
    tile_floats,
    tile_inputs,
    tile_row_floats,
)
from kvs_core.cpu.simd import fma, load_f32x16, store_f32, sum_lanes, zero_f32x16
from kvs_core.cpu.tasks import kernel_task, run_tasks
from kvs_core.cpu.weight_blocks import load_weights_32, prefetch_rows
from kvs_core.cpu.weight_rows import unpack_row
from kvs_core.units import align_up, ceil_div

# How far ahead of the sums blocks are asked for. One thread, weights in memory: Q4_1 9.0 GB/s without, 14.1 at 2880,
# 16.9 at 8192 and 16.3 at 16384 bytes; in the cache 18.5.
_PREFETCH_BYTES = 8192

for _size_function in (
    ceil_div,
    align_up,
    tile_inputs,
    tile_row_floats,
    decode_tile_rows,
    tile_floats,
    sum_floats,
    thread_scratch_floats,
):
    register_jitable(_size_function)

# One token group of every size up to TOKEN_GROUP that the remainder is made of.
_product_whole = build_tile_product(TOKEN_GROUP)
_product_3 = build_tile_product(3)
_product_2 = build_tile_product(2)
_product_1 = build_tile_product(1)


@cached_njit()
def matmul_kernel(kind, data_a, data_b, data_c, n_weights, x, out_a, out_b, out_c, scratch, team, n_threads):
    """``out_i = x @ weight_i.T`` for the first ``n_weights`` of three weights of one kind.

    data_*      uint8 [n_out, row_bytes], read-only, C-contiguous
    x           float32 [n_tokens, n_in]
    out_*       float32 [n_tokens, n_out]
    scratch     float32, as ``scratch.matmul_scratch_bytes`` says
    team        ThreadTeam.control of ``n_threads`` threads
    """
    rows_a = data_a.shape[0]
    rows_b = data_b.shape[0] if n_weights > 1 else 0
    rows_c = data_c.shape[0] if n_weights > 2 else 0
    task_rows = rows_per_task(rows_a + rows_b + rows_c, n_threads)
    tasks_a = ceil_div(rows_a, task_rows)
    tasks_b = ceil_div(rows_b, task_rows)
    tasks_c = ceil_div(rows_c, task_rows)
    arguments = (kind, data_a, data_b, data_c, tasks_a, tasks_b, task_rows, x, out_a, out_b, out_c, scratch)
    run_tasks(team, tasks_a + tasks_b + tasks_c, _multiply_rows, arguments)


@njit(nogil=True)
def rows_per_task(n_rows, n_threads):
    """Rows claimed at once: few claims, yet several per thread, so that a thread that is held up loses little."""
    return max(2 * ROW_GROUP, align_up(ceil_div(n_rows, 4 * n_threads), ROW_GROUP))


@njit(nogil=True)
def _reads_blocks_once(n_in, n_tokens):
    """Whether weights go from their blocks straight into the sum, without a tile."""
    return n_tokens == 1 and n_in % 32 == 0


@kernel_task
def _multiply_rows(
    task, thread_idx, kind, data_a, data_b, data_c, tasks_a, tasks_b, task_rows, x, out_a, out_b, out_c, scratch
):
    """``task_rows`` rows of one weight; tasks are numbered through A, then B, then C."""
    data, out, row_begin = data_a, out_a, task * task_rows
    if task >= tasks_a + tasks_b:
        data, out, row_begin = data_c, out_c, (task - tasks_a - tasks_b) * task_rows
    elif task >= tasks_a:
        data, out, row_begin = data_b, out_b, (task - tasks_a) * task_rows
    row_end = min(row_begin + task_rows, data.shape[0])
    multiply_rows(kind, data, row_begin, row_end, x, out, scratch, thread_idx)


@njit(nogil=True)
def multiply_rows(kind, data, row_begin, row_end, x, out, scratch, thread_idx):
    """Rows ``row_begin`` to ``row_end`` of one weight times every token; results go to those columns of ``out``."""
    n_tokens, n_in = x.shape
    if _reads_blocks_once(n_in, n_tokens):
        _multiply_one_token(kind, data, row_begin, row_end, x, out)
    else:
        tile_begin = thread_idx * thread_scratch_floats(n_in)
        tile_rows = decode_tile_rows(n_in) if n_tokens <= DECODE_TOKENS_MAX else MAX_TILE_ROWS
        for begin in range(row_begin, row_end, tile_rows):
            _multiply_tile(kind, data, begin, min(begin + tile_rows, row_end), x, out, scratch, tile_begin)


@njit(nogil=True)
def _multiply_one_token(kind, data, row_begin, row_end, x, out):
    """Rows times the only token; four rows at a time share each load of the token and hide each other's latency."""
    n_blocks = x.shape[1] // 32
    row_bytes = data.shape[1]
    row = row_begin
    while row + 4 <= row_end:
        begin_0 = row * row_bytes
        begin_1 = begin_0 + row_bytes
        begin_2 = begin_1 + row_bytes
        begin_3 = begin_2 + row_bytes
        sum_0 = zero_f32x16()
        sum_1 = zero_f32x16()
        sum_2 = zero_f32x16()
        sum_3 = zero_f32x16()

        for index in range(n_blocks):
            prefetch_rows(kind, data, begin_0 + _PREFETCH_BYTES, index)
            x_first = load_f32x16(x, 32 * index)
            x_second = load_f32x16(x, 32 * index + 16)
            first, second = load_weights_32(kind, data, begin_0, index)
            sum_0 = fma(second, x_second, fma(first, x_first, sum_0))
            first, second = load_weights_32(kind, data, begin_1, index)
            sum_1 = fma(second, x_second, fma(first, x_first, sum_1))
            first, second = load_weights_32(kind, data, begin_2, index)
            sum_2 = fma(second, x_second, fma(first, x_first, sum_2))
            first, second = load_weights_32(kind, data, begin_3, index)
            sum_3 = fma(second, x_second, fma(first, x_first, sum_3))

        store_f32(out, row, sum_lanes(sum_0))
        store_f32(out, row + 1, sum_lanes(sum_1))
        store_f32(out, row + 2, sum_lanes(sum_2))
        store_f32(out, row + 3, sum_lanes(sum_3))
        row += 4

    while row < row_end:
        sum_0 = zero_f32x16()
        for index in range(n_blocks):
            first, second = load_weights_32(kind, data, row * row_bytes, index)
            sum_0 = fma(first, load_f32x16(x, 32 * index), sum_0)
            sum_0 = fma(second, load_f32x16(x, 32 * index + 16), sum_0)
        store_f32(out, row, sum_lanes(sum_0))
        row += 1


@njit(nogil=True)
def _multiply_tile(kind, data, row_begin, row_end, x, out, tile, tile_begin):
    """Some rows times every token: block by block of the inputs, unpack the rows into this thread's part of ``tile``
    and multiply them with up to MAX_TILE_TOKENS tokens, whose sums wait between blocks."""
    n_tokens, n_in = x.shape
    block_inputs = tile_inputs(n_in)
    for token_begin in range(0, n_tokens, MAX_TILE_TOKENS):
        token_end = min(token_begin + MAX_TILE_TOKENS, n_tokens)
        for begin in range(0, n_in, block_inputs):
            end = min(begin + block_inputs, n_in)
            if token_begin == 0 or block_inputs < n_in:
                _expand_rows(kind, data, row_begin, row_end, begin, end, n_in, tile, tile_begin)
            _multiply_block(row_begin, row_end, token_begin, token_end, begin, end, x, out, tile, tile_begin)


@njit(nogil=True)
def _expand_rows(kind, data, row_begin, row_end, begin, end, n_in, tile, tile_begin):
    """Inputs ``begin`` to ``end`` of some rows as float32, arranged as ``matmul_tile`` wants it.

    When they are not whole vectors, the last one is read from ``x`` so that it ends with them; the weights that the
    vector before it already covered are 0 there.
    """
    n_left = (end - begin) % 16
    for row in range(row_begin, row_end):
        tile_row = tile_begin + (row - row_begin) * tile_row_floats(n_in)
        unpack_row(kind, data, row * data.shape[1], begin, end, tile, tile_row)
        if n_left:
            last = tile_row + end - begin - n_left
            for idx in range(n_left):
                store_f32(tile, last + 15 - idx, tile[last + n_left - 1 - idx])
            for idx in range(16 - n_left):
                store_f32(tile, last + idx, np.float32(0.0))


@njit(nogil=True)
def _multiply_block(row_begin, row_end, token_begin, token_end, begin, end, x, out, tile, tile_begin):
    """The unpacked inputs ``begin`` to ``end`` of some rows times some tokens."""
    n_in = x.shape[1]
    n_out = out.shape[1]
    n_inputs = end - begin
    first = begin == 0
    last = end == n_in
    stride = tile_row_floats(n_in)
    sums_begin = tile_begin + tile_floats(n_in)
    for row in range(row_begin, row_end, ROW_GROUP):
        weights = tile_begin + (row - row_begin) * stride
        n_rows = row_end - row
        sums = sums_begin + (row - row_begin) * MAX_TILE_TOKENS * 16
        token = token_begin
        while token < token_end:
            left = sums + (token - token_begin) * ROW_GROUP * 16
            x_at = token * n_in + begin
            out_at = token * n_out + row
            if token + TOKEN_GROUP <= token_end:
                _product_whole(
                    tile, weights, stride, left, x, x_at, n_in, n_inputs, first, last, out, out_at, n_out, n_rows
                )
                token += TOKEN_GROUP
            elif token + 3 <= token_end:
                _product_3(
                    tile, weights, stride, left, x, x_at, n_in, n_inputs, first, last, out, out_at, n_out, n_rows
                )
                token += 3
            elif token + 2 <= token_end:
                _product_2(
                    tile, weights, stride, left, x, x_at, n_in, n_inputs, first, last, out, out_at, n_out, n_rows
                )
                token += 2
            else:
                _product_1(
                    tile, weights, stride, left, x, x_at, n_in, n_inputs, first, last, out, out_at, n_out, n_rows
                )
                token += 1
