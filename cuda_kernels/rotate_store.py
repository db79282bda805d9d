"""RoPE of a step's queries and keys, their rotation, and its keys and values into pages: one launch.

``rope``, ``rotate_heads`` and ``store`` do the same apart. Rows that are not rotated are shared by several warps, 32
elements each; a rotation takes a warp for a whole row.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import float32, int32, int64, types, uint32

from cuda_kernels.emit import Emitter, Value, emitted, floats
from cuda_kernels.intrinsics import (
    fma,
    load_address,
    load_float,
    load_float_past_l1,
    load_int,
    multiply,
    shared_address,
    store_float,
)
from cuda_kernels.kv_encode import BLOCK_ELEMENTS, RowEncoder
from cuda_kernels.launch import Kernel, address_of, check_array, device_function, kernel_builder
from cuda_kernels.overlap import wait_for_previous
from cuda_kernels.rope import RopePairing
from cuda_kernels.rotate_heads import rotate_values
from cuda_kernels.store import build_load_elements, check_regions
from kvs_core.errors import KernelArgumentError
from kvs_core.kv_rotation import HeadRotations, Rotation
from kvs_core.kv_types import PageGeometry, RegionGeometry
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


def rotate_store_kernel(
    page: PageGeometry, n_head: int, n_pairs: int, pairing: RopePairing, rotations: HeadRotations | None
) -> Kernel:
    """The kernel for a layer."""
    if rotations is None:
        return build_rotate_store_kernel(page, n_head, n_pairs, pairing)
    return build_rotate_store_rows_kernel(page, n_head, n_pairs, pairing, rotations)


@kernel_builder
def build_rotate_store_kernel(page: PageGeometry, n_head: int, n_pairs: int, pairing: RopePairing) -> Kernel:
    """RoPE: a warp turns 32 pairs of a query head in place, or turns and stores 32 elements of a key, or a value's.

    Keys stay as they are in their array: the lane that stores an element reads its partner too.
    """
    is_adjacent = pairing is RopePairing.ADJACENT
    n_head_kv, page_tokens, v_offset = page.n_head_kv, page.page_tokens, page.v_offset
    head_dim_k, head_dim_v = page.head_dim_k, page.head_dim_v
    k_bytes, v_bytes = page.k_region.n_bytes, page.v_region.n_bytes
    q_blocks, k_blocks, v_blocks = (ceil_div(n, BLOCK_ELEMENTS) for n in (n_pairs, head_dim_k, head_dim_v))
    q_tasks, k_tasks, v_tasks = n_head * q_blocks, n_head_kv * k_blocks, n_head_kv * v_blocks
    n_tasks = q_tasks + k_tasks + v_tasks
    write_key, write_value = RowEncoder(page.k_region).encode, RowEncoder(page.v_region).encode

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
            value = float32(0.0)
            if element < int32(head_dim_k):
                value = load_float(row + int64(element) * 4)
            if is_turned:
                other = load_float(row + int64(partner) * 4)
                if is_second:
                    value = fma(other, sine, multiply(value, cosine))
                else:
                    value = fma(value, cosine, -multiply(other, sine))
            write_key(page_at + head * k_bytes, slot, block, lane, (value,))
            return

        task -= int32(k_tasks)
        block, head = task % int32(v_blocks), int64(task // int32(v_blocks))
        element = block * int32(BLOCK_ELEMENTS) + lane
        wait_for_previous()
        value = float32(0.0)
        if element < int32(head_dim_v):
            value = load_float(v + ((int64(token) * n_head_kv + head) * head_dim_v + element) * 4)
        write_value(page_at + v_offset + head * v_bytes, slot, block, lane, (value,))

    signature = [types.int64] * 6 + [types.int32, types.float32]
    return Kernel(rotate_store_kernel, signature, n_threads=N_THREADS, overlaps=True)


@kernel_builder
def build_rotate_store_rows_kernel(
    page: PageGeometry, n_head: int, n_pairs: int, pairing: RopePairing, rotations: HeadRotations
) -> Kernel:
    """RoPE and rotation: a warp takes a row of a query and replaces it, or a row of a key or value and stores it."""
    is_adjacent = pairing is RopePairing.ADJACENT
    n_head_kv, page_tokens, v_offset = page.n_head_kv, page.page_tokens, page.v_offset
    head_dim_k, head_dim_v = page.head_dim_k, page.head_dim_v
    k_bytes, v_bytes = page.k_region.n_bytes, page.v_region.n_bytes
    k_blocks, v_blocks = ceil_div(head_dim_k, BLOCK_ELEMENTS), ceil_div(head_dim_v, BLOCK_ELEMENTS)
    n_tasks = n_head + 2 * n_head_kv
    load_k, load_v = build_load_elements(k_blocks), build_load_elements(v_blocks)
    stage, take = build_staging(k_blocks)
    replace = build_replace_row(rotations.keys, head_dim_k)
    write_key = build_write_rotated(page.k_region, rotations.keys)
    write_value = build_write_rotated(page.v_region, rotations.values)
    staged_row = k_blocks * BLOCK_ELEMENTS
    staged_floats = N_WARPS * staged_row

    def rotate_store_rows_kernel(q, k, v, pages, positions, frequencies, n_tokens, factor):
        staged = cuda.shared.array(staged_floats, float32, alignment=16)

        lane = int32(cuda.threadIdx.x) & int32(31)
        warp = int32(cuda.threadIdx.x) >> int32(5)
        number = int32(cuda.blockIdx.x) * int32(N_WARPS) + warp
        token, task = number // int32(n_tasks), number % int32(n_tasks)
        if token >= n_tokens:
            return
        position = load_int(positions + int64(token) * 4)
        page_at = load_address(pages + int64(position // int32(page_tokens)) * 8)
        slot = int64(position % int32(page_tokens))
        wait_for_previous()

        if task >= int32(n_head + n_head_kv):
            head = int64(task - int32(n_head + n_head_kv))
            values = load_v(v + (int64(token) * n_head_kv + head) * (4 * head_dim_v), int32(head_dim_v), lane)
            write_value(page_at + v_offset + head * v_bytes, slot, lane, values)
            return

        is_query = task < int32(n_head)
        if is_query:
            row = q + (int64(token) * n_head + int64(task)) * (4 * head_dim_k)
        else:
            row = k + (int64(token) * n_head_kv + int64(task - int32(n_head))) * (4 * head_dim_k)
        begin = warp * int32(staged_row)
        staged_at = uint32(shared_address(staged) + uint32((begin + lane) * int32(4)))
        stage(staged_at, load_k(row, int32(head_dim_k), lane))
        cuda.syncwarp()
        for pair in range(lane, n_pairs, 32):
            cosine, sine = turn(position, load_double(frequencies + int64(pair) * 8), factor)
            first = begin + int32(2 * pair if is_adjacent else pair)
            second = first + int32(1 if is_adjacent else n_pairs)
            a, b = staged[first], staged[second]
            staged[first] = fma(a, cosine, -multiply(b, sine))
            staged[second] = fma(a, sine, multiply(b, cosine))
        cuda.syncwarp()
        turned = take(staged_at)
        if is_query:
            replace(row, lane, turned)
        else:
            write_key(page_at + int64(task - int32(n_head)) * k_bytes, slot, lane, turned)

    signature = [types.int64] * 6 + [types.int32, types.float32]
    return Kernel(rotate_store_rows_kernel, signature, n_threads=N_THREADS, overlaps=True)


def build_staging(n_blocks: int) -> tuple[Any, Any]:
    """Intrinsics ``stage(shared, values)`` and ``take(shared)``: a lane's elements, 128 bytes apart."""

    def stage(emit: Emitter, shared: Value, values: list[Value]) -> None:
        for i, value in enumerate(values):
            emit.store_shared_words(shared, 128 * i, [emit.as_word(value)])

    def take(emit: Emitter, shared: Value) -> list[Value]:
        return [emit.load_shared_float(shared, 128 * i) for i in range(n_blocks)]

    values = floats(n_blocks)
    return emitted(types.void, types.uint32, values)(stage), emitted(values, types.uint32)(take)


def build_replace_row(rotation: Rotation | None, head_dim: int) -> Any:
    """Intrinsic ``replace(row, lane, values)``: element 32 i + lane of a row becomes ``values[i]``, rotated."""

    def replace_row(emit: Emitter, row: Value, lane: Value, values: list[Value]) -> None:
        for i, value in enumerate(rotate_values(emit, rotation, lane, values)):
            is_inside = emit.flag(emit.less(emit.add(lane, 32 * i), emit.word(head_dim)))
            at = emit.add(row, emit.widen(emit.multiply(emit.add(lane, 32 * i), 4)))
            emit.store_word_if(is_inside, at, emit.as_word(value))

    n_blocks = ceil_div(head_dim, BLOCK_ELEMENTS)
    return emitted(types.void, types.int64, types.int32, floats(n_blocks))(replace_row)


def build_write_rotated(region: RegionGeometry, rotation: Rotation | None) -> Any:
    """Intrinsic ``write(region, slot, lane, values)``: a whole row, rotated, into its bytes."""
    encoder = RowEncoder(region)

    def write_rotated(emit: Emitter, region_at: Value, slot: Value, lane: Value, values: list[Value]) -> None:
        encoder.write_row(emit, region_at, slot, lane, rotate_values(emit, rotation, lane, values))

    n_blocks = ceil_div(region.head_dim, BLOCK_ELEMENTS)
    return emitted(types.void, types.int64, types.int64, types.int32, floats(n_blocks))(write_rotated)


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
    rotations: HeadRotations | None = None,
    stream: Any,
) -> None:
    """Turn ``q`` in place by each token's position; write the turned ``k`` and ``v`` into their pages, all rotated.

    q                 float32 [n_tokens, n_head, head_dim_k]
    k                 float32 [n_tokens, n_head_kv, head_dim_k]   before RoPE; stays so
    v                 float32 [n_tokens, n_head_kv, head_dim_v]
    pages             int64   [n_pages]                           device address of each page, by page index
    positions         int32   [n_tokens]                          all different
    frequencies       float64 [n_pairs]                           radians a position, scaling already applied
    attention_factor  multiplies queries and keys (YaRN)
    rotations         of ``q`` and ``k`` after RoPE, and of ``v``; None: turbo types cannot be stored
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
    n_tasks = n_head + 2 * page.n_head_kv
    if rotations is None:
        if page.type_k.is_turbo or page.type_v.is_turbo:
            raise KernelArgumentError("rotate_store: turbo types without a rotation")
        n_tasks = n_head * ceil_div(n_pairs, BLOCK_ELEMENTS)
        n_tasks += page.n_head_kv * sum(ceil_div(n, BLOCK_ELEMENTS) for n in (page.head_dim_k, page.head_dim_v))
    grid = (ceil_div(n_tokens * n_tasks, N_WARPS),)
    arrays = (address_of(array) for array in (q, k, v, pages, positions, frequencies))
    kernel = rotate_store_kernel(page, n_head, n_pairs, pairing, rotations)
    kernel.launch(grid, stream, *arrays, n_tokens, attention_factor)
