"""RoPE of a step's queries and keys, and its keys and values into pages: one launch.

``rope`` and ``store`` do the same apart.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import float32, int32, int64, types

from cuda_kernels.emit import Emitter, Value, emitted
from cuda_kernels.intrinsics import fma, load_address, load_float, load_float_past_l1, load_int, multiply, store_float
from cuda_kernels.launch import Kernel, address_of, check_array, device_function, kernel_builder
from cuda_kernels.overlap import let_next_start, wait_for_previous
from cuda_kernels.rope import RopePairing
from cuda_kernels.store import BLOCK_ELEMENTS, build_write_element, check_regions
from kvs_core.errors import KernelArgumentError
from kvs_core.kv_types import PageGeometry
from kvs_core.units import ceil_div

N_WARPS = 4
N_THREADS = 32 * N_WARPS
_TURNS_OF_RADIAN = 0.5 / math.pi
_RADIANS_OF_TURN = 2.0 * math.pi


@emitted(types.float64, types.int64)
def load_double(emit: Emitter, address: Value) -> Value:
    """A float64 that no kernel of the step writes."""
    return emit.load_double(address)


@device_function
def turn(position, frequency, factor):
    """Cosine and sine of an angle, times ``factor``; whole turns are taken off in float64."""
    turns = float(position) * frequency * _TURNS_OF_RADIAN
    angle = float32((turns - math.floor(turns + 0.5)) * _RADIANS_OF_TURN)
    return multiply(math.cos(angle), factor), multiply(math.sin(angle), factor)


@kernel_builder
def build_rotate_store_kernel(page: PageGeometry, n_head: int, n_pairs: int, pairing: RopePairing) -> Kernel:
    """A warp turns 32 pairs of a query head in place, or turns and stores 32 elements of a key, or stores a value's.

    Keys stay as they are in their array: the lane that stores an element reads its partner too.
    """
    is_adjacent = pairing is RopePairing.ADJACENT
    n_head_kv, page_tokens, v_offset = page.n_head_kv, page.page_tokens, page.v_offset
    head_dim_k, head_dim_v = page.head_dim_k, page.head_dim_v
    k_bytes, v_bytes = page.k_region.n_bytes, page.v_region.n_bytes
    q_blocks, k_blocks, v_blocks = (ceil_div(n, BLOCK_ELEMENTS) for n in (n_pairs, head_dim_k, head_dim_v))
    q_tasks, k_tasks, v_tasks = n_head * q_blocks, n_head_kv * k_blocks, n_head_kv * v_blocks
    n_tasks = q_tasks + k_tasks + v_tasks
    write_key, write_value = build_write_element(page.k_region), build_write_element(page.v_region)

    def rotate_store_kernel(q, k, v, pages, positions, frequencies, n_tokens, factor):
        lane = int32(cuda.threadIdx.x) & int32(31)
        number = int32(cuda.blockIdx.x) * int32(N_WARPS) + (int32(cuda.threadIdx.x) >> int32(5))
        token = number // int32(n_tasks)
        task = number % int32(n_tasks)
        if token >= n_tokens:
            return
        position = load_int(positions + int64(token) * 4)

        if task < int32(q_tasks):
            pair = task % int32(q_blocks) * int32(BLOCK_ELEMENTS) + lane
            is_used = pair < int32(n_pairs)
            cosine, sine = turn(position, load_double(frequencies + int64(pair if is_used else int32(0)) * 8), factor)
            first = int32(2) * pair if is_adjacent else pair
            second = first + int32(1 if is_adjacent else n_pairs)
            row = q + (int64(token) * n_head + task // int32(q_blocks)) * (4 * head_dim_k)
            wait_for_previous()
            let_next_start()
            if is_used:
                a, b = load_float_past_l1(row + int64(first) * 4), load_float_past_l1(row + int64(second) * 4)
                store_float(row + int64(first) * 4, fma(a, cosine, -multiply(b, sine)))
                store_float(row + int64(second) * 4, fma(a, sine, multiply(b, cosine)))
            return

        page_at = load_address(pages + int64(position // int32(page_tokens)) * 8)
        slot = int64(position % int32(page_tokens))
        task -= int32(q_tasks)
        if task < int32(k_tasks):
            block, head = task % int32(k_blocks), int64(task // int32(k_blocks))
            element = block * int32(BLOCK_ELEMENTS) + lane
            is_turned = element < int32(2 * n_pairs)
            if is_adjacent:
                pair, partner = element >> int32(1), element ^ int32(1)
                is_second = element & int32(1) != 0
            else:
                is_second = element >= int32(n_pairs)
                pair = element - int32(n_pairs) if is_second else element
                partner = pair if is_second else element + int32(n_pairs)
            cosine, sine = turn(position, load_double(frequencies + int64(pair if is_turned else int32(0)) * 8), factor)
            row = k + (int64(token) * n_head_kv + head) * (4 * head_dim_k)
            wait_for_previous()
            let_next_start()
            value = float32(0.0)
            if element < int32(head_dim_k):
                value = load_float(row + int64(element) * 4)
            if is_turned:
                other = load_float(row + int64(partner) * 4)
                if is_second:
                    value = fma(other, sine, multiply(value, cosine))
                else:
                    value = fma(value, cosine, -multiply(other, sine))
            write_key(page_at + head * k_bytes, slot, block, lane, value)
            return

        task -= int32(k_tasks)
        block, head = task % int32(v_blocks), int64(task // int32(v_blocks))
        element = block * int32(BLOCK_ELEMENTS) + lane
        wait_for_previous()
        let_next_start()
        value = float32(0.0)
        if element < int32(head_dim_v):
            value = load_float(v + ((int64(token) * n_head_kv + head) * head_dim_v + element) * 4)
        write_value(page_at + v_offset + head * v_bytes, slot, block, lane, value)

    signature = [types.int64] * 6 + [types.int32, types.float32]
    return Kernel(rotate_store_kernel, signature, n_threads=N_THREADS, overlaps=True)


def rotate_store(
    q: Any,
    k: Any,
    v: Any,
    pages: Any,
    positions: Any,
    frequencies: Any,
    *,
    page: PageGeometry,
    pairing: RopePairing,
    attention_factor: float,
    stream: Any,
) -> None:
    """Turn ``q`` in place by each token's position; write the turned ``k`` and ``v`` into their pages.

    q                 float32 [n_tokens, n_head, head_dim_k]
    k                 float32 [n_tokens, n_head_kv, head_dim_k]   before RoPE; stays so
    v                 float32 [n_tokens, n_head_kv, head_dim_v]
    pages             int64   [n_pages]                           device address of each page, by page index
    positions         int32   [n_tokens]                          all different
    frequencies       float64 [n_pairs]                           radians a position, scaling already applied
    attention_factor  multiplies queries and keys (YaRN)
    Raises            KernelArgumentError if shapes or dtypes disagree, or a head size does not fit its type.
    """
    n_tokens, n_head, _ = q.shape
    check_array("q", q, np.float32, (None, None, page.head_dim_k))
    check_array("k", k, np.float32, (n_tokens, page.n_head_kv, page.head_dim_k))
    check_array("v", v, np.float32, (n_tokens, page.n_head_kv, page.head_dim_v))
    check_array("pages", pages, np.int64, (None,))
    check_array("positions", positions, np.int32, (n_tokens,))
    check_array("frequencies", frequencies, np.float64, (None,))
    check_regions(page)
    n_pairs = frequencies.shape[0]
    if 2 * n_pairs > page.head_dim_k:
        raise KernelArgumentError(f"rotate_store: {n_pairs} pairs, a head has {page.head_dim_k} dimensions")
    blocks = (
        n_head * ceil_div(n_pairs, BLOCK_ELEMENTS),
        page.n_head_kv * ceil_div(page.head_dim_k, BLOCK_ELEMENTS),
        page.n_head_kv * ceil_div(page.head_dim_v, BLOCK_ELEMENTS),
    )
    grid = (ceil_div(n_tokens * sum(blocks), N_WARPS),)
    arrays = (address_of(array) for array in (q, k, v, pages, positions, frequencies))
    kernel = build_rotate_store_kernel(page, n_head, n_pairs, pairing)
    kernel.launch(grid, stream, *arrays, n_tokens, attention_factor)
