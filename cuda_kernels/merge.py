"""The fold of decode partials: strictly left to right in logical order, with state that can be carried on.

    out = out * 2**(max_before - max) + partial * 2**(max_partial - max),   max = running maximum, in log2 units

One fused multiply-add per partial and element, in order. A left fold gives the same bits however the partials are
grouped into launches, so spans may arrive in any grouping. The partials come from ``attention_decode``. A sink, a score
of each head that brings no value, joins the sum behind the last partial.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import float32, int32, int64, types, uint32

from cuda_kernels.attention_common import LOG2_E, LOWEST, NO_WINDOW, divide, first_window_partition_on_device
from cuda_kernels.emit import Emitter, Value, emitted, floats
from cuda_kernels.intrinsics import (
    FULL_WARP,
    commit_copies,
    copy_16_async,
    exp2_approx,
    load_float,
    load_int,
    multiply,
    shared_address,
    store_float,
    wait_copies_but_one,
)
from cuda_kernels.launch import Kernel, address_of, check_array, device_function, kernel_builder
from cuda_kernels.overlap import wait_for_all_before
from cuda_kernels.partitions import WINDOW_KEYS, count_partitions
from cuda_kernels.quantise import QUANT_BLOCK, store_quant
from cuda_kernels.unit_formats import GROUP_ELEMENTS
from kvs_core.errors import KernelArgumentError
from kvs_core.units import ceil_div

TILE_PARTIALS = 128
_TILE_SHIFT = TILE_PARTIALS.bit_length() - 1
SLAB_DIMS = 32
_GROUP = 16
_STATE_FLOATS = 2 + SLAB_DIMS  # of one block: maximum, sum, elements
_WEIGHT_FLOATS = 2 * TILE_PARTIALS
_TILE_FLOATS = 2 * TILE_PARTIALS * SLAB_DIMS


@emitted(floats(2), types.float32, types.float32, types.uint32, types.uint32, types.uint32)
def fold_group(emit: Emitter, out: Value, total: Value, elements: Value, weights: Value, sums: Value) -> list[Value]:
    """Fold 16 partials into one element and into the sum: everything is loaded before the chain begins.

    elements  shared address of this lane's element of the first partial, 128 bytes apart
    weights   shared address of (factor of the state, factor of the partial) pairs
    sums      shared address of the partials' sums, already rescaled
    """
    n_loads = _GROUP // 4
    pairs = [value for i in range(2 * n_loads) for value in emit.load_shared_floats(weights, 16 * i, 4)]
    rescaled = [value for i in range(n_loads) for value in emit.load_shared_floats(sums, 16 * i, 4)]
    values = [emit.load_shared_float(elements, 4 * SLAB_DIMS * i) for i in range(_GROUP)]
    terms = [emit.float_multiply(values[i], pairs[2 * i + 1]) for i in range(_GROUP)]
    for i in range(_GROUP):
        out = emit.fma(out, pairs[2 * i], terms[i])
        total = emit.fma(total, pairs[2 * i], rescaled[i])
    return [out, total]


count_partitions_on_device = device_function(count_partitions)


def partition_count(*, in_window: bool) -> Any:
    """Device function ``count(positions, token, window, large_begin)``: partitions that the token's keys reach into."""

    def count(positions, token, window, large_begin):
        return count_partitions_on_device(load_int(positions + token * 4) + int32(1), large_begin)

    def count_in_window(positions, token, window, large_begin):
        last = int64(load_int(positions + token * 4)) // WINDOW_KEYS
        return last + 1 - first_window_partition_on_device(int64(load_int(positions)), int64(window))

    return device_function(count_in_window if in_window else count)


@device_function
def with_sink(running, value, total, sink):
    """An element over its sum into which a sink went; ``running``: the largest score, in units of log2."""
    sink_log2 = multiply(sink, float32(LOG2_E))
    largest = max(running, sink_log2)
    factor = exp2_approx(running - largest)
    return multiply(value, factor) / (multiply(total, factor) + exp2_approx(sink_log2 - largest))


@device_function
def start_tile(elements_at, source, partial_bytes, tid, tile, count, n_dims):
    """Start the copies of one tile of partials: 128 rows of 32 elements, zeros where there is none.

    A thread copies four elements of every 16th partial. What numbers fit in 32 bits is kept from widening: the few
    threads of a fold wait for every instruction.
    """
    first = int32(tile * int32(TILE_PARTIALS))
    if first < count:
        stage = uint32(elements_at + uint32((tile & int32(1)) * int32(TILE_PARTIALS * SLAB_DIMS * 4) + tid * int32(16)))
        partial = int32(first + (tid >> int32(3)))
        quarter = int32(tid & int32(7))
        address = source + int64(partial) * partial_bytes + int64(quarter * int32(16))
        last = count if int32(quarter * int32(4)) < n_dims else int32(0)
        for i in range(8):
            is_present = partial < last
            copy_16_async(
                uint32(stage + uint32(i * TILE_PARTIALS * 16)),
                address if is_present else source,
                int32(16) if is_present else int32(0),
            )
            partial = int32(partial + int32(TILE_PARTIALS // 8))
            address += (TILE_PARTIALS // 8) * partial_bytes
    commit_copies()


def state_floats(n_head: int, head_dim: int) -> int:
    """float32 numbers of carried state for one token."""
    return n_head * ceil_div(head_dim, SLAB_DIMS) * _STATE_FLOATS


@kernel_builder
def build_merge_partials_kernel(n_head: int, head_dim: int, in_window: bool, has_sinks: bool) -> Kernel:
    """The fold for one number of heads and one head size; a block folds 32 dimensions of one row.

    in_window   partitions are those of a window layer
    has_sinks   every head has a sink
    """
    n_slabs = ceil_div(head_dim, SLAB_DIMS)
    count_of = partition_count(in_window=in_window)

    def merge_partials_kernel(
        partials,
        max_sum,
        positions,
        state,
        out,
        quants,
        scales,
        n_tokens,
        first_partition,
        n_partitions,
        is_first,
        is_last,
        window,
        large_begin,
        sinks,
    ):
        elements = cuda.shared.array(_TILE_FLOATS, float32, alignment=16)
        weights = cuda.shared.array(_WEIGHT_FLOATS, float32, alignment=16)
        sums = cuda.shared.array(TILE_PARTIALS, float32, alignment=16)
        warp_max = cuda.shared.array(4, float32)

        tid = int32(cuda.threadIdx.x)
        lane = tid & int32(31)
        warp = tid >> int32(5)
        row, slab = divide(cuda.blockIdx.x, n_slabs)
        first_dim = int32(slab * int32(SLAB_DIMS))
        n_dims = int32(min(int32(int32(head_dim) - first_dim), int32(SLAB_DIMS)))
        n_rows = int64(n_tokens) * n_head
        token, head = divide(row, n_head)
        n_visible = int32(count_of(positions, int64(token), window, large_begin))
        count = int32(min(max(int32(n_visible - first_partition), int32(0)), n_partitions))
        elements_at = shared_address(elements)
        weights_at = shared_address(weights)
        sums_at = shared_address(sums)

        # behind blocks of decode attention that are at their ends; what follows may not start beside them
        wait_for_all_before()

        # every block keeps its own copy of both scalars
        state_at = state + int64(cuda.blockIdx.x) * (4 * _STATE_FLOATS)
        running = float32(LOWEST)
        value = float32(0.0)
        total = float32(0.0)
        is_used = lane < n_dims
        if is_first == 0:
            running = load_float(state_at)
            total = load_float(state_at + 4)
            if is_used:
                value = load_float(state_at + 8 + int64(lane) * 4)

        source = partials + (int64(row) * head_dim + first_dim) * 4
        partial_max = float32(LOWEST)
        partial_sum = float32(0.0)
        max_sum_at = max_sum + (int64(tid) * n_rows + row) * 8
        if tid < count:
            partial_max, partial_sum = load_float(max_sum_at), load_float(max_sum_at + 4)
        for i in range(2):
            start_tile(elements_at, source, n_rows * (head_dim * 4), tid, int32(i), count, n_dims)
        for i in range(int32(count + int32(TILE_PARTIALS - 1)) >> int32(_TILE_SHIFT)):
            tile = int32(i)
            # the running maximum before and after this thread's partial: a prefix maximum is exact in any order
            prefix = partial_max
            for step in (1, 2, 4, 8, 16):
                other = cuda.shfl_up_sync(FULL_WARP, prefix, step)
                if lane >= step:
                    prefix = max(prefix, other)
            if lane == 31:
                warp_max[warp] = prefix
            before = cuda.shfl_up_sync(FULL_WARP, prefix, 1)
            cuda.syncthreads()
            earlier = running
            for w in range(4):
                if w < warp:
                    earlier = max(earlier, warp_max[w])
                running = max(running, warp_max[w])
            before = max(before, earlier) if lane > 0 else earlier
            after = max(before, partial_max)
            own = int32(tile * int32(TILE_PARTIALS) + tid)
            is_present = own < count
            # an absent partial changes no bit of the state, not even the sign of a zero
            factor = exp2_approx(partial_max - after) if is_present else float32(-0.0)
            weights[2 * tid] = exp2_approx(before - after) if is_present else float32(1.0)
            weights[2 * tid + 1] = factor
            sums[tid] = multiply(partial_sum, factor)

            partial_max = float32(LOWEST)
            partial_sum = float32(0.0)
            max_sum_at += TILE_PARTIALS * n_rows * 8
            if int32(own + int32(TILE_PARTIALS)) < count:
                partial_max, partial_sum = load_float(max_sum_at), load_float(max_sum_at + 4)
            wait_copies_but_one()
            cuda.syncthreads()

            if warp == 0:
                half = int32((tile & int32(1)) * int32(TILE_PARTIALS * SLAB_DIMS * 4))
                stage = uint32(elements_at + uint32(half + lane * int32(4)))
                n_here = int32(min(int32(count - tile * int32(TILE_PARTIALS)), int32(TILE_PARTIALS)))
                for group in range(divide(n_here + int32(_GROUP - 1), _GROUP)[0]):
                    value, total = fold_group(
                        value,
                        total,
                        uint32(stage + uint32(group * (_GROUP * SLAB_DIMS * 4))),
                        uint32(weights_at + uint32(group * (_GROUP * 8))),
                        uint32(sums_at + uint32(group * (_GROUP * 4))),
                    )
            cuda.syncthreads()
            start_tile(elements_at, source, n_rows * (head_dim * 4), tid, int32(tile + int32(2)), count, n_dims)

        if warp == 0 and is_used:
            if is_last != 0:
                if has_sinks:
                    result = with_sink(running, value, total, load_float(sinks + int64(head) * 4))
                else:
                    result = value / total if total > float32(0.0) else float32(0.0)
                element = int64(row) * head_dim + first_dim + lane
                store_float(out + element * 4, result)
                if quants != 0:  # then every slab is a whole block of 32
                    store_quant(result, lane, quants + element, scales + (element >> 4) * 8)
            else:
                store_float(state_at + 8 + int64(lane) * 4, value)
                if lane == 0:
                    store_float(state_at, running)
                    store_float(state_at + 4, total)

    signature = [types.int64] * 7 + [types.int32] * 7 + [types.int64]
    return Kernel(merge_partials_kernel, signature, n_threads=TILE_PARTIALS, overlaps=True)


def merge_partials(
    partials: Any,
    max_sum: Any,
    positions: Any,
    state: Any,
    out: Any,
    *,
    n_head: int,
    head_dim: int,
    first_partition: int,
    large_begin: int,
    is_first: bool,
    is_last: bool,
    quants: Any = None,
    scales: Any = None,
    window: int | None = None,
    sinks: Any = None,
    stream: Any,
) -> None:
    """Fold the partials of partitions ``first_partition`` and following, as far as each token sees keys.

    partials   float32 [n_partitions, n_tokens, n_head, head_dim]  un-normalised weighted values
    max_sum    float32 [n_partitions, n_tokens, n_head, 2]         maximum (log2 units) and sum of 2**(score - maximum)
    positions  int32   [n_tokens]                                  a token sees keys 0 to its position
    large_begin                                                    of the cache (``partitions``); not with a window
    state      float32 [n_tokens * state_floats(n_head, head_dim)] read unless ``is_first``, written unless ``is_last``
    out        float32 [n_tokens, n_head, head_dim]                written if ``is_last``; 0 where nothing is visible
    quants     int8    [n_tokens, n_head * head_dim]               ``out`` as ``quantise`` gives it, written with it;
    scales     float32 [n_tokens, n_head * head_dim / 16, 2]       None: not wanted. Needs heads of whole blocks of 32
    window     as for ``attention_decode``
    sinks      float32 [n_head]                                    None: there are none
    Raises     KernelArgumentError if shapes or dtypes disagree.
    """
    n_partitions, n_tokens = partials.shape[:2]
    check_array("partials", partials, np.float32, (None, None, n_head, head_dim))
    check_array("max_sum", max_sum, np.float32, (n_partitions, n_tokens, n_head, 2))
    check_array("positions", positions, np.int32, (n_tokens,))
    check_array("state", state, np.float32, (n_tokens * state_floats(n_head, head_dim),))
    check_array("out", out, np.float32, (n_tokens, n_head, head_dim))
    if head_dim % 16:
        raise KernelArgumentError(f"head_dim {head_dim}: merge_partials needs a multiple of 16")
    if quants is not None:
        check_array("quants", quants, np.int8, (n_tokens, n_head * head_dim))
        check_array("scales", scales, np.float32, (n_tokens, n_head * head_dim // GROUP_ELEMENTS, 2))
        if head_dim % QUANT_BLOCK:
            raise KernelArgumentError(f"head_dim {head_dim}: quantised results need a multiple of {QUANT_BLOCK}")
    if sinks is not None:
        check_array("sinks", sinks, np.float32, (n_head,))
    kernel = build_merge_partials_kernel(n_head, head_dim, window is not None, sinks is not None)
    grid = (n_tokens * n_head * ceil_div(head_dim, SLAB_DIMS),)
    arrays = (partials, max_sum, positions, state, out)
    kernel.launch(
        grid,
        stream,
        *(address_of(array) for array in arrays),
        0 if quants is None else address_of(quants),
        0 if quants is None else address_of(scales),
        n_tokens,
        first_partition,
        n_partitions,
        int(is_first),
        int(is_last),
        NO_WINDOW if window is None else window,
        large_begin,
        0 if sinks is None else address_of(sinks),
    )
