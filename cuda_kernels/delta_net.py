"""The gated delta net of recurrent layers; in a decode step the norm and the gate behind it are part of it.

A column of a head's matrix (what one value element is made of) depends on no other column, so warps share out columns
and take the tokens one after the other, with their columns in registers from the first token to the last.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import float32, int32, int64, types, uint32

from cuda_kernels.delta_gates import check_gates, kept_of, lanes_sum, norm_and_gate, share_of
from cuda_kernels.delta_tiles import HEAD_DIM_STEP, LANE_COLUMNS, TILE_COLUMNS, DeltaTile
from cuda_kernels.elementwise import MAX_STEP_TOKENS
from cuda_kernels.emit import Emitter, Value, emitted, floats
from cuda_kernels.intrinsics import (
    commit_copies,
    copy_16_async,
    fma,
    load_float,
    load_int,
    load_shared_four_floats,
    shared_address,
    store_float,
    wait_all_copies,
)
from cuda_kernels.launch import Kernel, address_of, check_array, device_function, kernel_builder
from cuda_kernels.overlap import let_next_start, wait_for_all_before
from cuda_kernels.quantise import store_four, store_quant
from cuda_kernels.unit_formats import GROUP_ELEMENTS
from kvs_core.errors import KernelArgumentError
from kvs_core.recurrent_shape import RecurrentShape

PREFILL_COLUMNS = 64
"""Columns of a head that a block of a prompt's launch takes at most."""
PREFILL_TOKENS = 32
"""Tokens whose queries, keys and values are in shared memory at a time, twice: one lot is used while one arrives."""


@emitted(floats(2), types.uint32)
def load_shared_two_floats(emit: Emitter, address: Value) -> list[Value]:
    return emit.load_shared_floats(address, 0, 2)


def build_copy_rows(n_floats: int, row_bytes: int, n_threads: int) -> Any:
    """Device function ``(at, source, begin, end, tid)``: start copying rows [begin, end) of ``n_floats`` elements.

    To shared memory, one after another; ``at`` and ``source`` are the places of row 0. Each thread keeps to a column.
    """
    n_fours = n_floats // 4
    pass_rows = n_threads // n_fours

    @device_function
    def copy_rows(at, source, begin, end, tid):
        row, four = begin + tid // int32(n_fours), tid % int32(n_fours)
        source += int64(row) * row_bytes + int64(four) * 16
        at = uint32(at + uint32(row * int32(4 * n_floats) + four * int32(16)))
        if tid >= int32(pass_rows * n_fours):
            row = end
        while row < end:
            copy_16_async(at, source, int32(16))
            row += int32(pass_rows)
            source += pass_rows * row_bytes
            at = uint32(at + uint32(pass_rows * 4 * n_floats))

    return copy_rows


class Lots:
    """Where the inputs of some tokens lie in shared memory, in bytes: two lots in a prompt, one in a step.

    keys | queries, from the token before the first on | values | kept, share | gates, in a step
    """

    def __init__(self, head_dim: int, block_columns: int, n_tokens: int, *, is_step: bool) -> None:
        self.queries = 4 * n_tokens * head_dim
        self.values = self.queries + 4 * (n_tokens + 1) * head_dim
        self.factors = self.values + 4 * n_tokens * block_columns
        self.gates = self.factors + 8 * n_tokens
        self.n_bytes = self.gates + (4 * n_tokens * head_dim if is_step else 0)
        self.total_bytes = self.n_bytes * (1 if is_step else 2)


@kernel_builder
def build_delta_net_kernel(sizes: RecurrentShape, block_columns: int, n_tokens_held: int, is_step: bool) -> Kernel:
    """A warp takes sixteen columns of a head through all tokens, a block ``block_columns``.

    ``n_tokens_held``: tokens whose inputs lie in shared memory at a time. ``is_step``: of a decode step, where a block
    has whole heads: ``beta`` and ``decay`` are raw, and norm, gate and the 8-bit form of the result follow here.
    The bits of a token do not depend on any of the three.

    The tile is read before the kernels before this one have ended: of a step's kernels only this one touches it.
    """
    head_dim, n_head_k, n_head_v, n_inner = sizes.head_dim, sizes.n_head_k, sizes.n_head_v, sizes.n_inner
    n_channels, ratio, groups_values = sizes.n_channels, sizes.n_head_v // sizes.n_head_k, sizes.groups_values
    n_warps = block_columns // TILE_COLUMNS
    n_threads = 32 * n_warps
    tile = DeltaTile(head_dim)
    load, store, zeros, step, times, rows = tile.load, tile.store, tile.zeros, tile.step, tile.multiply, tile.rows
    n_elements, tile_bytes, n_tiles = tile.n_elements, tile.n_bytes, head_dim // TILE_COLUMNS
    first_out = n_elements + tile.n_rows
    n_own = head_dim // 32
    lots_of = Lots(head_dim, block_columns, n_tokens_held, is_step=is_step)
    queries_at, values_at, factors_at, gates_at = lots_of.queries, lots_of.values, lots_of.factors, lots_of.gates
    lot_bytes = lots_of.n_bytes
    row_bytes = 4 * n_channels
    result_floats = n_tokens_held * head_dim if is_step else 1
    weight_floats = head_dim if is_step else 1
    copy_heads = build_copy_rows(head_dim, row_bytes, n_threads)
    copy_values = build_copy_rows(block_columns, row_bytes, n_threads)
    copy_gates = build_copy_rows(head_dim, 4 * n_inner, n_threads)

    @device_function
    def fetch(lots, lot_at, lot, heads, beta, decay, own_bias, own_rate, key_head, head, column, begin, count, tid):
        """Start copying the inputs of tokens [begin, begin + count) to a lot, and write their factors."""
        base = heads + int64(begin) * row_bytes
        keys = base + int64(n_head_k + key_head) * (4 * head_dim)
        copy_heads(lot_at, keys, int32(0), count, tid)
        queries = base + int64(key_head) * (4 * head_dim) - row_bytes  # the first has none before it
        first = int32(1) if begin == 0 else int32(0)
        copy_heads(uint32(lot_at + uint32(queries_at)), queries, first, count + int32(1), tid)
        values = base + int64(2 * n_head_k + head) * (4 * head_dim) + int64(column) * 4
        copy_values(uint32(lot_at + uint32(values_at)), values, int32(0), count, tid)
        commit_copies()
        for i in range(tid, count, n_threads):
            at = (int64(begin + int32(i)) * n_head_v + head) * 4
            kept, share = load_float(decay + at), load_float(beta + at)
            if is_step:
                kept, share = kept_of(kept, own_bias, own_rate), share_of(share)
            factor = (lot * int32(lot_bytes) + int32(factors_at)) // int32(4) + int32(2) * int32(i)
            lots[factor], lots[factor + 1] = kept, share

    def delta_net_kernel(
        heads, beta, decay, bias, rate, state, positions, out, weight, gate, quants, scales, n_tokens, eps
    ):
        lots = cuda.shared.array(0, float32, alignment=16)
        results = cuda.shared.array(result_floats, float32, alignment=16)
        weights = cuda.shared.array(weight_floats, float32, alignment=16)
        tid = int32(cuda.threadIdx.x)
        warp, lane = tid >> int32(5), tid & int32(31)
        head, first_column = int32(cuda.blockIdx.x), int32(cuda.blockIdx.y) * int32(block_columns)
        key_head = head // int32(ratio) if groups_values else head % int32(n_head_k)
        column = warp * int32(TILE_COLUMNS) + (lane & int32(3)) * int32(LANE_COLUMNS)
        tile_idx = int64(head) * n_tiles + first_column // int32(TILE_COLUMNS) + warp
        tile_at = state + tile_idx * tile_bytes + int64(lane) * 16
        elements = load(tile_at)
        own_bias, own_rate = float32(0.0), float32(0.0)
        if is_step:
            own_bias, own_rate = load_float(bias + int64(head) * 4), load_float(rate + int64(head) * 4)
            if tid < int32(head_dim):
                weights[tid] = load_float(weight + int64(tid) * 4)
        if load_int(positions) == 0:  # nothing was before position 0, whatever the state holds
            elements = zeros()
        wait_for_all_before()
        let_next_start()  # any earlier, and blocks of the next kernels are in the way of this one's

        lots_at = uint32(shared_address(lots))
        row_lane = uint32(lane >> int32(2)) * uint32(16)
        begin, lot = int32(0), int32(0)
        count = min(n_tokens, int32(n_tokens_held))
        if is_step:
            gates_of_head = gate + int64(head) * (4 * head_dim)
            copy_gates(uint32(lots_at + uint32(gates_at)), gates_of_head, int32(0), count, tid)
        fetch(
            lots, lots_at, lot, heads, beta, decay, own_bias, own_rate, key_head, head, first_column, begin, count, tid
        )
        out_at = out + (int64(head) * head_dim + first_column + column) * 4 - 4 * n_inner  # of the token before
        last_query = lots_at
        while begin < n_tokens:
            lot_at = uint32(lots_at + uint32(lot * int32(lot_bytes)))
            wait_all_copies()
            cuda.syncthreads()
            next_begin = begin + count
            next_count = min(n_tokens - next_begin, int32(n_tokens_held))
            if next_count > 0:  # into the other lot, which every warp has left behind
                lot = int32(1) - lot
                next_at = uint32(lots_at + uint32(lot * int32(lot_bytes)))
                fetch(
                    lots,
                    next_at,
                    lot,
                    heads,
                    beta,
                    decay,
                    own_bias,
                    own_rate,
                    key_head,
                    head,
                    first_column,
                    next_begin,
                    next_count,
                    tid,
                )

            key_at = uint32(lot_at + row_lane)
            values = uint32(lot_at + uint32(values_at) + uint32(column) * uint32(4))
            factors = uint32(lot_at + uint32(factors_at))
            key = rows(key_at)
            for i in range(count):
                v0, v1, v2, v3 = load_shared_four_floats(values)
                kept, share = load_shared_two_floats(factors)
                query_at = uint32(key_at + uint32(queries_at))
                key_at = uint32(key_at + uint32(4 * head_dim))  # past the last one there are queries
                stepped = step(elements, key, key_at, query_at, v0, v1, v2, v3, kept, share)
                elements = stepped[:n_elements]
                key = stepped[n_elements:first_out]
                values = uint32(values + uint32(4 * block_columns))
                factors = uint32(factors + uint32(8))
                if lane < int32(4) and begin + int32(i) > 0:
                    o0, o1, o2, o3 = stepped[first_out:]
                    if is_step:
                        at = (begin + int32(i) - int32(1)) * int32(head_dim) + column
                        results[at], results[at + 1], results[at + 2], results[at + 3] = o0, o1, o2, o3
                    else:
                        store_four(out_at, o0, o1, o2, o3)
                out_at += 4 * n_inner
            last_query = uint32(key_at + uint32(queries_at))
            begin, count = next_begin, next_count

        o0, o1, o2, o3 = times(elements, last_query)
        store(tile_at, elements)
        if not is_step:
            if lane < int32(4):
                store_four(out_at, o0, o1, o2, o3)
            return
        if lane < int32(4):
            at = (n_tokens - int32(1)) * int32(head_dim) + column
            results[at], results[at + 1], results[at + 2], results[at + 3] = o0, o1, o2, o3
        cuda.syncthreads()

        for task in range(warp, n_tokens * int32(n_own), n_warps):
            token, part = int32(task) // int32(n_own), int32(task) % int32(n_own)
            total = float32(0.0)
            for i in range(n_own):
                value = results[token * head_dim + lane + 32 * i]
                total = fma(value, value, total)
            total = lanes_sum(total)
            element = lane + int32(32) * part
            own_gate = lots[int32(gates_at // 4) + token * int32(head_dim) + element]
            value = results[token * int32(head_dim) + element]
            value = norm_and_gate(value, total, head_dim, weights[element], own_gate, eps)
            at = int64(token) * n_inner + head * int32(head_dim) + element
            store_float(gate + at * 4, value)
            store_quant(value, lane, quants + at, scales + at // GROUP_ELEMENTS * 8)

    signature = [types.int64] * 12 + [types.int32, types.float32]
    return Kernel(delta_net_kernel, signature, n_threads=n_threads, dynamic_bytes=lots_of.total_bytes, overlaps=is_step)


def step_kernel(sizes: RecurrentShape) -> Kernel:
    """The kernel of decode steps."""
    return build_delta_net_kernel(sizes, sizes.head_dim, MAX_STEP_TOKENS, True)


def prompt_columns(head_dim: int) -> int:
    """Columns of a block of a prompt's launch: as many tiles as divide a head, up to ``PREFILL_COLUMNS``."""
    return max(n for n in range(TILE_COLUMNS, PREFILL_COLUMNS + 1, TILE_COLUMNS) if head_dim % n == 0)


def prompt_kernel(sizes: RecurrentShape) -> Kernel:
    """The kernel of prompts."""
    return build_delta_net_kernel(sizes, prompt_columns(sizes.head_dim), PREFILL_TOKENS, False)


def delta_net_prompt(
    heads: Any,
    beta: Any,
    decay: Any,
    state: Any,
    positions: Any,
    out: Any,
    *,
    sizes: RecurrentShape,
    stream: Any,
) -> None:
    """The gated delta rule over any number of tokens; see ``kvs_core.cpu.recurrent.delta_net``.

    heads         float32 [n_tokens, n_channels]      as ``short_convolution`` leaves them
    beta, decay   float32 [n_tokens, n_head_v]        as ``delta_gates`` leaves them
    state         float32 [n_head_v * head_dim ** 2]  tiles (``delta_tiles``); taken for zeros if the first token's
                                                      position is 0, replaced by what the last token leaves
    positions     int32   [n_tokens]
    out           float32 [n_tokens, n_inner]
    Raises        KernelArgumentError if shapes or dtypes disagree, or the head size has no kernel.
    """
    n_tokens = _check_net(heads, beta, decay, state, positions, sizes)
    check_array("out", out, np.float32, (n_tokens, sizes.n_inner))
    kernel = prompt_kernel(sizes)
    grid = (sizes.n_head_v, sizes.head_dim // prompt_columns(sizes.head_dim))
    arrays = [address_of(array) for array in (heads, beta, decay)]
    more = [address_of(array) for array in (state, positions, out)]
    kernel.launch(grid, stream, *arrays, 0, 0, *more, 0, 0, 0, 0, n_tokens, 0.0)


def delta_net_step(
    heads: Any,
    beta: Any,
    decay: Any,
    state: Any,
    positions: Any,
    *,
    gates: tuple[Any, Any],
    weight: Any,
    gate: Any,
    quants: Any,
    scales: Any,
    sizes: RecurrentShape,
    eps: float,
    stream: Any,
) -> None:
    """The gated delta rule for one to eight tokens, and ``gate`` = norm of its heads times silu(gate), in one launch.

    heads, state, positions    as for ``delta_net_prompt``
    beta, decay   float32 [n_tokens, n_head_v]              as the products gave them
    gates         (bias, rate), float32 [n_head_v]
    weight        float32 [head_dim]
    gate          float32 [n_tokens, n_inner]               in place
    quants        int8    [n_tokens, n_inner]               the 8-bit form of what is in ``gate`` then
    scales        float32 [n_tokens, n_inner / 16, 2]
    Raises        KernelArgumentError if shapes or dtypes disagree, or the head size has no kernel.
    """
    n_tokens = _check_net(heads, beta, decay, state, positions, sizes)
    check_gates(beta, decay, *gates, n_tokens=n_tokens, n_head=sizes.n_head_v)
    check_array("weight", weight, np.float32, (sizes.head_dim,))
    check_array("gate", gate, np.float32, (n_tokens, sizes.n_inner))
    check_array("quants", quants, np.int8, (n_tokens, sizes.n_inner))
    check_array("scales", scales, np.float32, (n_tokens, sizes.n_inner // GROUP_ELEMENTS, 2))
    if not 1 <= n_tokens <= MAX_STEP_TOKENS:
        raise KernelArgumentError(f"delta_net_step: {n_tokens} tokens, needs 1 to {MAX_STEP_TOKENS}")
    arrays = [address_of(array) for array in (heads, beta, decay, *gates, state, positions)]
    more = [address_of(array) for array in (weight, gate, quants, scales)]
    step_kernel(sizes).launch((sizes.n_head_v, 1), stream, *arrays, 0, *more, n_tokens, eps)


def _check_net(heads: Any, beta: Any, decay: Any, state: Any, positions: Any, sizes: RecurrentShape) -> int:
    """The number of tokens, once everything fits."""
    if sizes.head_dim % HEAD_DIM_STEP:
        raise KernelArgumentError(f"heads of {sizes.head_dim} elements; a multiple of {HEAD_DIM_STEP} needed")
    n_tokens = int(heads.shape[0])
    check_array("heads", heads, np.float32, (None, sizes.n_channels))
    check_array("beta", beta, np.float32, (n_tokens, sizes.n_head_v))
    check_array("decay", decay, np.float32, (n_tokens, sizes.n_head_v))
    check_array("state", state, np.float32, (sizes.n_inner * sizes.head_dim,))
    check_array("positions", positions, np.int32, (n_tokens,))
    return n_tokens
