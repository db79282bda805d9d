"""Products of experts with the many pairs of a prompt: each block takes one expert, some of its rows and of its pairs.

Weights of experts that no token takes are not read, those of others once for every tile of pairs. Which expert a block
works for is read from device memory (``routing.order_pairs``), so the host never learns it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from numba import cuda
from numba.cuda import float32, int32, int64, types, uint32

from cuda_kernels.activation import Activation
from cuda_kernels.emit import Emitter, Value, emitted
from cuda_kernels.expert_matvec import ExpertMatrix, GatedPair
from cuda_kernels.expert_tiles import N_THREADS, STEP_COLUMNS, TILE_ROWS, ExpertTile, intrinsics_of
from cuda_kernels.intrinsics import load_int, shared_address, wait_all_copies
from cuda_kernels.launch import Kernel, address_of, check_array, kernel_builder
from cuda_kernels.routing import PairOrder, count_tiles
from cuda_kernels.weights import MAX_PLANES
from kvs_core.errors import KernelArgumentError
from kvs_core.units import ceil_div

FEW_PAIRS, MANY_PAIRS = 64, 128
_I32, _I64 = types.int32, types.int64
SIGNATURE = (
    *(types.UniTuple(_I64, 2 * MAX_PLANES), types.UniTuple(_I64, MAX_PLANES)),  # planes of gate and up, row strides
    *(_I32, _I32),  # rows from one expert to the next, rows of one
    *(_I64, _I64),  # biases or 0
    *(_I64, _I64, _I64),  # tiles, begins, row of the inputs of each pair or 0
    *(_I64, _I64, _I32),  # inputs, out, columns
)


@emitted(types.void, types.uint32, types.int32)
def store_shared_int(emit: Emitter, address: Value, value: Value) -> None:
    emit.store_shared_words(address, 0, [value])


def tile_pairs_for(n_pairs: int, n_expert: int) -> int:
    """Pairs of a tile: large tiles decode weights less often, small ones leave less of themselves empty."""
    return MANY_PAIRS if n_pairs >= MANY_PAIRS * n_expert else FEW_PAIRS


@kernel_builder
def build_expert_tiles_kernel(
    weight_type: GGMLQuantizationType, tile_pairs: int, activation: Activation | None, has_bias: bool
) -> Kernel:
    """With an activation: gate, up and their product as float16; without: one matrix, float32.

    While tensor cores work on a step, the next one's inputs are copied and its weights loaded.
    """
    tile = ExpertTile(weight_type, tile_pairs, activation, has_bias=has_bias)
    load, store, start, multiply, zeros, store_products, store_gated = intrinsics_of(tile)
    inputs_bytes, weights_bytes, block_rows = tile.inputs_bytes, tile.weights_bytes, tile.block_rows
    weights_at, ids_at = 2 * inputs_bytes, 2 * (inputs_bytes + weights_bytes)
    is_gated = activation is not None
    out_bytes = 2 if is_gated else 4

    def expert_tiles_kernel(
        planes, strides, expert_rows, n_rows, gate_bias, up_bias, tiles, begins, row_ids, inputs, out, n_cols
    ):
        shared = shared_address(cuda.shared.array(0, float32, alignment=16))
        tid = int32(cuda.threadIdx.x)
        warp, lane = tid >> int32(5), tid & int32(31)
        number = int64(cuda.blockIdx.y)
        if number >= load_int(tiles):
            return
        expert = load_int(tiles + 8 * number + 8)
        first_pair = load_int(tiles + 8 * number + 12)
        n_valid = min(load_int(begins + int64(expert + int32(1)) * 4) - first_pair, int32(tile_pairs))
        first_row = int32(cuda.blockIdx.x) * int32(block_rows)
        expert_row = int64(expert) * expert_rows
        ids = uint32(shared + uint32(ids_at))
        if tid < int32(tile_pairs):
            source = int32(0)
            if tid < n_valid:
                source = first_pair + tid
                if row_ids != 0:
                    source = load_int(row_ids + int64(source) * 4)
            store_shared_int(uint32(ids + uint32(tid << int32(2))), source)
        cuda.syncthreads()

        n_steps = (n_cols + int32(STEP_COLUMNS - 1)) // int32(STEP_COLUMNS)
        sums = zeros()
        loaded = load(planes, strides, expert_row, first_row, n_rows, tid, int32(0), n_cols)
        start(shared, inputs, ids, n_valid, tid, int32(0), n_cols)
        store(loaded, uint32(shared + uint32(weights_at)), tid, int32(0), n_cols)
        wait_all_copies()
        cuda.syncthreads()
        for i in range(n_steps):
            step = int32(i)
            following = int32(step + int32(1))
            here, there = uint32(step & int32(1)), uint32(following & int32(1))
            if following < n_steps:
                loaded = load(planes, strides, expert_row, first_row, n_rows, tid, following, n_cols)
                inputs_at = uint32(shared + there * uint32(inputs_bytes))
                start(inputs_at, inputs, ids, n_valid, tid, following, n_cols)
            own_inputs = uint32(shared + here * uint32(inputs_bytes))
            own_weights = uint32(shared + uint32(weights_at) + here * uint32(weights_bytes))
            sums = multiply(sums, own_inputs, own_weights, warp, lane)
            if following < n_steps:
                target = uint32(shared + uint32(weights_at) + there * uint32(weights_bytes))
                store(loaded, target, tid, following, n_cols)
            wait_all_copies()
            cuda.syncthreads()

        n_left = n_rows - first_row
        at = out + (int64(first_pair) * n_rows + first_row) * out_bytes
        bias_at = (int64(expert) * n_rows + first_row) * 4
        if is_gated:
            store_gated(sums, at, gate_bias + bias_at, up_bias + bias_at, n_valid, n_left, n_rows, warp, lane)
        else:
            store_products(sums, at, gate_bias + bias_at, n_valid, n_left, n_rows, warp, lane)

    return Kernel(
        expert_tiles_kernel,
        SIGNATURE,
        n_threads=N_THREADS,
        min_blocks=2,
        dynamic_bytes=ids_at + 4 * tile_pairs,
    )


def expert_gated_tiles(
    weights: GatedPair, order: PairOrder, inputs: Any, out: Any, *, activation: Activation, stream: Any
) -> None:
    """``out[row] = activation(gate @ inputs[token]) * (up @ inputs[token])`` for each row of pairs ordered by expert.

    inputs    float16 [n_tokens, n_cols]
    out       float16 [n_pairs, n_rows]     times HALF_SHRINK (``activation``)
    Raises    KernelArgumentError if shapes or dtypes disagree, or the type has no kernel.
    """
    weights.check()
    geometry = weights.gate.geometry
    n_pairs = order.tokens.shape[0]
    _check_even(weights.n_rows)
    check_array("inputs", inputs, np.float16, (order.rows.shape[0], geometry.n_cols))
    check_array("out", out, np.float16, (n_pairs, weights.n_rows))
    kernel = build_expert_tiles_kernel(geometry.weight_type, order.tile_pairs, activation, weights.has_bias)
    planes, strides = weights.planes()
    rows = (weights.gate.n_rows, weights.n_rows, weights.gate.n_expert)
    arguments = (planes, strides, weights.biases(), address_of(order.tokens))
    _launch(kernel, rows, arguments, order, inputs, out, geometry.n_cols, stream)


def expert_products(weights: ExpertMatrix, order: PairOrder, inputs: Any, out: Any, *, stream: Any) -> None:
    """``out[row] = matrix of the expert @ inputs[row] + bias`` for each row of pairs ordered by expert.

    inputs    float16 [n_pairs, n_cols]     times HALF_SHRINK
    out       float32 [n_pairs, n_rows]
    Raises    KernelArgumentError if shapes or dtypes disagree, or the type has no kernel.
    """
    weights.check("matrix")
    geometry = weights.geometry
    _check_even(weights.n_rows)
    n_pairs = order.tokens.shape[0]
    check_array("inputs", inputs, np.float16, (n_pairs, geometry.n_cols))
    check_array("out", out, np.float32, (n_pairs, weights.n_rows))
    kernel = build_expert_tiles_kernel(geometry.weight_type, order.tile_pairs, None, weights.bias is not None)
    planes, strides = geometry.plane_arguments(address_of(weights.matrix))
    biases = [0 if weights.bias is None else address_of(weights.bias), 0]
    rows = (weights.n_rows, weights.n_rows, weights.n_expert)
    _launch(kernel, rows, ([*planes, *planes], strides, biases, 0), order, inputs, out, geometry.n_cols, stream)


def _check_even(n_rows: int) -> None:
    """Results are stored two at a time."""
    if n_rows % 2:
        raise KernelArgumentError(f"experts of {n_rows} rows: needs an even number")


def _launch(
    kernel: Kernel,
    rows: tuple[int, int, int],
    arguments: tuple[list[int], list[int], list[int], int],
    order: PairOrder,
    inputs: Any,
    out: Any,
    n_cols: int,
    stream: Any,
) -> None:
    expert_rows, n_rows, n_expert = rows
    planes, strides, biases, row_ids = arguments
    check_array("counts", order.counts, np.int32, (n_expert,))
    block_rows = TILE_ROWS // 2 if out.dtype == np.float16 else TILE_ROWS
    kernel.launch(
        (ceil_div(n_rows, block_rows), count_tiles(order.tokens.shape[0], n_expert, order.tile_pairs)),
        stream,
        planes,
        strides,
        expert_rows,
        n_rows,
        *biases,
        address_of(order.tiles),
        address_of(order.begins),
        row_ids,
        address_of(inputs),
        address_of(out),
        n_cols,
    )
