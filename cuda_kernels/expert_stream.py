"""Products of experts in decode whose rows stream through shared memory, for compute capability 9.0.

Arithmetic and bits are those of ``expert_matvec``. All blocks run at once; a warp brings the rows of its tiles into a
ring of its own (``expert_ring``), and both kernels of a layer find room on a multiprocessor. ``stream_sum`` brings its
first rows while ``stream_gated`` still runs: the router's logits, or the choice, are there by then, because
``stream_gated`` lets it start only after it has waited itself and has asked for its own first rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from gguf import GGMLQuantizationType
from numba import cuda
from numba.cuda import float32, int32, int64, types, uint32

from cuda_kernels.activation import Activation, build_gated_value
from cuda_kernels.emit import Emitter, Value, emitted
from cuda_kernels.expert_choice import ExpertChoice
from cuda_kernels.expert_ring import ExpertRing, can_be_ringed
from cuda_kernels.expert_walk import build_walk, load_shared_int
from cuda_kernels.intrinsics import (
    FULL_WARP,
    add,
    fma,
    load_float,
    load_float_past_l1,
    multiply,
    shared_address,
    store_float,
)
from cuda_kernels.launch import SHARED_LIMIT_90, Kernel, kernel_builder
from cuda_kernels.overlap import let_next_start, wait_for_all_before, wait_for_previous
from cuda_kernels.row_units import RowUnits
from cuda_kernels.vector_input import VectorInput, build_take_vector, load_shared_float
from cuda_kernels.warpgroup import meet, wait_barrier, warp_uniform
from cuda_kernels.weights import MAX_PLANES
from kvs_core.units import ceil_div

MAX_TOKENS = 8
MAX_WARPS, LEAST_WARPS = 16, 12
GATED_BYTES, SUM_BYTES = 114 * 1024, 111 * 1024
"""Shared memory of a block: one of each kernel fits a multiprocessor, but not two of the first, which always takes that
much: its blocks share the tiles evenly, so two of them in one place would take twice as long."""
MANY_BYTES = 200 * 1024
"""The same for several tokens, whose vectors take room; then no kernel has company, and both take that much."""

_PLANES, _STRIDES = types.UniTuple(types.int64, 2 * MAX_PLANES), types.UniTuple(types.int64, MAX_PLANES)
_I32, _I64 = types.int32, types.int64
STREAM_GATED_SIGNATURE = (
    *(_PLANES, _I32, _I32),  # planes of gate and up, rows from one expert to the next, rows of one
    *(_I64, _I64, _I64, _I64, _I64),  # out, biases of gate and up or 0, ids, logits of the experts
    *(_I64, _I64, _I32),  # vectors, scales, tokens
)
STREAM_SUM_SIGNATURE = (
    *(_STRIDES, _I32),  # planes, rows of an expert
    *(_I64, _I64, _I64, _I64, _I64),  # out, bias or 0, ids, weights, logits
    *(_I64, types.float32),  # scales of experts or 0, and what all weights are multiplied with
    *(_I64, _I64, _I32),  # vectors, scales, tokens
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Where ids and weights come from: computed from ``n_expert`` logits of a token, or from memory if that is 0."""

    n_used: int
    n_expert: int = 0


@emitted(types.int32, types.int64)
def load_early_int(emit: Emitter, address: Value) -> Value:
    return emit.load_early(address, 0)


@emitted(types.void, types.uint32, types.int32)
def store_shared_int(emit: Emitter, address: Value, value: Value) -> None:
    emit.store_shared_words(address, 0, [value])


@emitted(types.void, types.uint32, types.float32)
def store_shared_float(emit: Emitter, address: Value, value: Value) -> None:
    emit.store_shared_words(address, 0, [emit.as_word(value)])


def _stream_kernel(function: Any, signature: Sequence[Any], ring: ExpertRing, *, is_one: bool) -> Kernel:
    """``is_one``: for one token, when a block of either kernel of a layer has room beside one of the other."""
    return Kernel(
        function,
        signature,
        n_threads=32 * ring.n_warps,
        min_blocks=2 if is_one else 1,
        shares_multiprocessor=True,
        dynamic_bytes=ring.n_bytes,
        shared_limit=SHARED_LIMIT_90,
        overlaps=True,
    )


@kernel_builder
def build_stream_gated_kernel(ring: ExpertRing, activation: Activation, has_bias: bool, chosen: Chosen) -> Kernel:
    """Tiles are some rows of gate and the same of up, for one pair; pairs of a row are neighbours.

    With one token a warp stays with one expert where the warps are a multiple of them.
    """
    n_used, n_expert, n_rows_of_tile = chosen.n_used, chosen.n_expert, ring.n_rows
    n_warps, n_places, n_cols = ring.n_warps, ring.n_places, ring.n_cols
    units = RowUnits(ring.weight_type, 2 * n_rows_of_tile, 1, has_shared_vectors=True)
    zeros, lane_total, lanes_per_total = units.zeros, units.total, units.lanes_per_total
    locate, expert_planes = ring.build_locate(), ring.build_expert_planes()
    add_steps, n_steps, n_unrolled = ring.build_add(units, has_shared_vectors=True), ring.n_steps, ring.n_unrolled
    is_one = ring.vector_bytes == n_cols * 3 // 2
    stays = is_one and n_warps % n_used == 0
    walk = build_walk(ring, stays=stays, ids_apart=1)
    begin, place_at, next_place, next_tile, bring_next = walk.functions
    n_groups = n_warps // n_used
    in_halves = ring.elements == 32
    n_choosing = 32 if is_one and n_expert else 0  # threads that do nothing else meanwhile
    _, ask, take = build_take_vector(VectorInput.QUANTS, 32 * n_warps - n_choosing, n_cols, in_halves=in_halves)
    choose = ExpertChoice(n_expert, n_used).choose if n_expert else None
    gated_value = build_gated_value(activation)
    vectors_offset, ids_offset = ring.vectors_offset, ring.words_offset
    vector_bytes = n_cols * 3 // 2

    def stream_gated_kernel(
        planes, expert_rows, n_rows, out, gate_bias, up_bias, ids, logits, vectors, scales, n_tokens
    ):
        start = shared_address(cuda.shared.array(0, float32, alignment=16))
        tid = int32(cuda.threadIdx.x)
        warp, lane = warp_uniform(tid >> int32(5)), tid & int32(31)
        ids_at = uint32(start + uint32(ids_offset))
        vectors_at = uint32(start + uint32(vectors_offset))
        n_pairs = int32(n_tokens * int32(n_used))
        n_row_tiles = int32(int32(n_rows + int32(n_rows_of_tile - 1)) // int32(n_rows_of_tile))
        if stays:
            row_tile = int32(int32(warp // int32(n_used)) * int32(cuda.gridDim.x) + int32(cuda.blockIdx.x))
            tile = row_tile, int32(warp % int32(n_used))
            steps = int32(int32(n_groups) * int32(cuda.gridDim.x)), int32(0)
        else:
            first = int32(warp * int32(cuda.gridDim.x) + int32(cuda.blockIdx.x))
            tile = int32(first // n_pairs), int32(first % n_pairs)
            step_tiles = int32(int32(n_warps) * int32(cuda.gridDim.x))
            steps = int32(step_tiles // n_pairs), int32(step_tiles % n_pairs)
        rings = begin(start, warp, lane)

        wait_for_all_before()
        if tid >= int32(n_choosing):
            for token in range(n_tokens):
                at = uint32(vectors_at + uint32(token) * uint32(vector_bytes))
                vector, scale = vectors + int64(token) * n_cols, scales + int64(token) * (n_cols // 2)
                ask(vector, scale, at, uint32(at + uint32(n_cols)), int32(tid - int32(n_choosing)))
        if n_expert > 0:
            if warp < n_tokens:
                expert = choose(logits + int64(warp) * (4 * n_expert), lane)
                if lane < int32(n_used):
                    slot_at = uint32(ids_at + uint32(int32(warp * int32(n_used)) + lane) * uint32(4))
                    store_shared_int(slot_at, expert)
        elif tid < n_pairs:
            store_shared_int(uint32(ids_at + uint32(tid) * uint32(4)), load_early_int(ids + int64(tid) * 4))
        cuda.syncthreads()

        expert = load_shared_int(uint32(ids_at + uint32(tile[1]) * uint32(4)))
        own_planes = expert_planes(planes, int64(expert) * expert_rows)
        experts = planes, expert_rows, n_rows, n_row_tiles, ids_at
        coming = tile
        for place in range(n_places):
            coming = bring_next(place_at(rings, place), coming, steps, n_pairs, own_planes, experts, lane)
        let_next_start()
        take(0, 0, vectors, scales, int64(0), float32(0.0), vectors_at, vectors_at, vectors_at, tid)

        of_row = lane // int32(lanes_per_total)
        place, parity = int32(0), int32(0)
        while tile[0] < n_row_tiles:
            row_tile, pair = tile
            at = place_at(rings, place)
            if not stays:
                expert = load_shared_int(uint32(ids_at + uint32(pair) * uint32(4)))
                own_planes = expert_planes(planes, int64(expert) * expert_rows)
            own_row = int32(row_tile * int32(n_rows_of_tile))
            row = int32(min(own_row, int32(n_rows - int32(n_rows_of_tile))))
            rows_at = locate(at[0], own_planes, row)
            vector_at = uint32(vectors_at + uint32(int32(pair // int32(n_used))) * uint32(vector_bytes))
            scales_at = uint32(vector_at + uint32(n_cols))
            is_first = lane % int32(lanes_per_total) == 0 and of_row < int32(n_rows_of_tile) and row + of_row >= own_row
            gate_added, up_added = float32(0.0), float32(0.0)
            if has_bias:  # noqa: SIM102 (known when it is compiled)
                if is_first:
                    bias_at = (int64(expert) * n_rows + row + of_row) * 4
                    gate_added, up_added = load_float(gate_bias + bias_at), load_float(up_bias + bias_at)
            sums, step = zeros(), int32(0)
            wait_barrier(at[1], uint32(parity))
            while step < int32(n_steps):
                sums = add_steps(sums, rows_at, step, lane, vector_at, scales_at, int32(n_cols))
                step = int32(step + int32(n_unrolled))
            cuda.syncwarp(FULL_WARP)
            coming = bring_next(at, coming, steps, n_pairs, own_planes, experts, lane)

            x = lane_total(sums, lane)
            factor = cuda.shfl_xor_sync(FULL_WARP, x, 16)  # the upper lanes have the sums of the upper rows
            if is_first:
                if has_bias:
                    x, factor = add(x, gate_added), add(factor, up_added)
                store_float(out + (int64(pair) * n_rows + row + of_row) * 4, gated_value(x, factor))

            tile = next_tile(tile, steps, n_pairs)
            place, parity = next_place(place, parity)

    return _stream_kernel(stream_gated_kernel, STREAM_GATED_SIGNATURE, ring, is_one=is_one)


@kernel_builder
def build_stream_sum_kernel(ring: ExpertRing, chosen: Chosen) -> Kernel:
    """``n_used`` warps take the same rows of the experts of a token; then these are added in the order of the choice.

    With room for vectors in the ring there is one token, whose floats every block quantises as ``quantise`` does.
    """
    n_used, n_expert, n_rows_of_tile = chosen.n_used, chosen.n_expert, ring.n_rows
    n_warps, n_places, n_cols = ring.n_warps, ring.n_places, ring.n_cols
    is_one = ring.vector_bytes > 0
    units = RowUnits(ring.weight_type, n_rows_of_tile, 1, has_shared_vectors=is_one)
    zeros, lane_total, lanes_per_total = units.zeros, units.total, units.lanes_per_total
    locate, expert_planes = ring.build_locate(), ring.build_expert_planes()
    begin, place_at, next_place, next_tile, bring_next = build_walk(ring, stays=is_one, ids_apart=n_used).functions
    add_steps, n_steps, n_unrolled = ring.build_add(units, has_shared_vectors=is_one), ring.n_steps, ring.n_unrolled
    in_halves, all_cols = ring.elements == 32, n_cols * n_used
    _, ask, take = build_take_vector(VectorInput.FLOATS, 32 * n_warps, all_cols, in_halves=in_halves)
    choice = ExpertChoice(n_expert, n_used) if n_expert else None
    choose, weigh = (choice.choose, choice.weigh) if choice else (None, None)
    vectors_offset, ids_offset = ring.vectors_offset, ring.words_offset
    mixture_offset = ids_offset + 4 * MAX_TOKENS * n_used
    totals_offset = mixture_offset + 4 * MAX_TOKENS * n_used
    n_groups, group_words = n_warps // n_used, 2 * n_used * n_rows_of_tile
    pair_shift = 1 if in_halves else 0

    def stream_sum_kernel(
        planes, n_rows, out, bias, ids, weights, logits, expert_scales, weight_scale, vectors, scales, n_tokens
    ):
        start = shared_address(cuda.shared.array(0, float32, alignment=16))
        tid = int32(cuda.threadIdx.x)
        warp, lane = warp_uniform(tid >> int32(5)), tid & int32(31)
        group, slot = int32(warp // int32(n_used)), int32(warp % int32(n_used))
        ids_at, mixture_at = uint32(start + uint32(ids_offset)), uint32(start + uint32(mixture_offset))
        vectors_at = uint32(start + uint32(vectors_offset))
        totals_at = uint32(start + uint32(totals_offset) + uint32(group) * uint32(4 * group_words))
        n_row_tiles = int32(int32(n_rows + int32(n_rows_of_tile - 1)) // int32(n_rows_of_tile))
        first = int32(group * int32(cuda.gridDim.x) + int32(cuda.blockIdx.x))
        step_tiles = int32(int32(n_groups) * int32(cuda.gridDim.x))
        rings = begin(start, warp, lane)
        if n_expert > 0:
            if warp < n_tokens:
                expert = choose(logits + int64(warp) * (4 * n_expert), lane)
                if lane < int32(n_used):
                    slot_at = uint32(int32(warp * int32(n_used)) + lane) * uint32(4)
                    store_shared_int(uint32(ids_at + slot_at), expert)
        elif tid < int32(n_tokens * int32(n_used)):
            store_shared_int(uint32(ids_at + uint32(tid) * uint32(4)), load_early_int(ids + int64(tid) * 4))
        cuda.syncthreads()

        if is_one:
            tile, steps = (first, int32(0)), (step_tiles, int32(0))
        else:
            tile = int32(first // n_tokens), int32(first % n_tokens)
            steps = int32(step_tiles // n_tokens), int32(step_tiles % n_tokens)
        own_ids, pair = uint32(ids_at + uint32(slot) * uint32(4)), slot
        expert = load_shared_int(own_ids)
        own_planes = expert_planes(planes, int64(expert) * n_rows)
        experts = planes, int64(n_rows), n_rows, n_row_tiles, own_ids
        coming = tile
        for place in range(n_places):
            coming = bring_next(place_at(rings, place), coming, steps, n_tokens, own_planes, experts, lane)
        if n_expert > 0:  # noqa: SIM102 (known when it is compiled)
            if warp < n_tokens:
                chosen_at = int32(int32(warp * int32(n_used)) + int32(min(lane, int32(n_used - 1))))
                own = load_shared_int(uint32(ids_at + uint32(chosen_at) * uint32(4)))
                weight = weigh(logits + int64(warp) * (4 * n_expert), own, lane, weight_scale)
                if expert_scales != 0:
                    weight = multiply(weight, load_float(expert_scales + int64(own) * 4))
                if lane < int32(n_used):
                    store_shared_float(uint32(mixture_at + uint32(chosen_at) * uint32(4)), weight)
        wait_for_previous()
        if n_expert == 0 and tid < int32(n_tokens * int32(n_used)):
            weight = load_float_past_l1(weights + int64(tid) * 4)
            store_shared_float(uint32(mixture_at + uint32(tid) * uint32(4)), weight)
        if is_one:
            scales_at = uint32(vectors_at + uint32(all_cols))
            asked = ask(vectors, scales, vectors_at, scales_at, tid)
            take(0, asked, vectors, scales, int64(0), float32(0.0), vectors_at, scales_at, scales_at, tid)
        else:
            cuda.syncthreads()

        of_row = lane // int32(lanes_per_total)
        has_total = lane % int32(lanes_per_total) == 0 and of_row < int32(n_rows_of_tile)
        place, parity, turn = int32(0), int32(0), int32(0)
        while tile[0] < n_row_tiles:
            row_tile, token = tile
            at = place_at(rings, place)
            own_row = int32(row_tile * int32(n_rows_of_tile))
            row = int32(min(own_row, int32(n_rows - int32(n_rows_of_tile))))
            if is_one:
                own_vector = uint32(vectors_at + (uint32(pair) * uint32(n_cols) >> uint32(pair_shift)))
                own_scales = uint32(scales_at + uint32(pair) * uint32(n_cols // 2))
            else:
                pair = int32(int32(token * int32(n_used)) + slot)
                expert = load_shared_int(uint32(ids_at + uint32(pair) * uint32(4)))
                own_planes = expert_planes(planes, int64(expert) * n_rows)
                own_vector = vectors + int64(pair) * n_cols
                own_scales = scales + int64(pair) * (n_cols // 2)
            rows_at = locate(at[0], own_planes, row)
            added = float32(0.0)
            if bias != 0 and has_total:
                added = load_float(bias + (int64(expert) * n_rows + row + of_row) * 4)
            sums, step = zeros(), int32(0)
            wait_barrier(at[1], uint32(parity))
            while step < int32(n_steps):
                sums = add_steps(sums, rows_at, step, lane, own_vector, own_scales, int32(all_cols))
                step = int32(step + int32(n_unrolled))
            cuda.syncwarp(FULL_WARP)
            coming = bring_next(at, coming, steps, n_tokens, own_planes, experts, lane)

            total = lane_total(sums, lane)
            own_totals = uint32(totals_at + uint32(turn) * uint32(2 * group_words))
            if has_total:
                if bias != 0:
                    total = add(total, added)
                total_at = int32(int32(slot * int32(n_rows_of_tile)) + of_row)
                store_shared_float(uint32(own_totals + uint32(total_at) * uint32(4)), total)
            meet(int32(group + int32(1)), int32(32 * n_used))
            if slot == int32(0) and lane < int32(n_rows_of_tile) and row + lane >= own_row:
                result = float32(0.0)
                for i in range(n_used):
                    mixed = int32(int32(token * int32(n_used)) + int32(i))
                    weight = load_shared_float(uint32(mixture_at + uint32(mixed) * uint32(4)))
                    total_at = int32(int32(i * n_rows_of_tile) + lane)
                    result = fma(weight, load_shared_float(uint32(own_totals + uint32(total_at) * uint32(4))), result)
                store_float(out + (int64(token) * n_rows + row + lane) * 4, result)

            turn = int32(turn ^ int32(1))
            tile = next_tile(tile, steps, n_tokens)
            place, parity = next_place(place, parity)

    return _stream_kernel(stream_sum_kernel, STREAM_SUM_SIGNATURE, ring, is_one=is_one)


@cache
def gated_expert_ring(
    weight_type: GGMLQuantizationType, n_cols: int, n_rows: int, n_tokens: int, n_used: int
) -> ExpertRing | None:
    """For experts of ``n_rows`` rows; None if they do not go through shared memory.

    Several tokens: two rows of each matrix a warp. One H200, gpt-oss 20B, four tokens: 39 instead of 43 us.
    """
    is_one = n_tokens == 1
    if not can_be_ringed(weight_type):
        return None
    sizes = [(n_warps, n_places, 1) for n_warps in (16, 8) for n_places in ((2,) if is_one else (4, 3, 2))]
    if not is_one and n_rows > 1:
        sizes = [(16, 2, 2), (12, 2, 2), *sizes]
    for n_warps, n_places, warp_rows in sizes:
        ring = ExpertRing(
            weight_type=weight_type,
            n_cols=n_cols,
            n_rows=warp_rows,
            n_matrices=2,
            n_warps=n_warps,
            n_places=n_places,
            vector_bytes=(1 if is_one else MAX_TOKENS) * n_cols * 3 // 2,
            n_words=MAX_TOKENS * n_used,
            least_bytes=GATED_BYTES,
        )
        if ring.n_bytes <= (GATED_BYTES if is_one else MANY_BYTES):
            return ring
    return None


@cache
def sum_expert_ring(
    weight_type: GGMLQuantizationType, n_cols: int, n_rows: int, n_used: int, takes_floats: bool
) -> ExpertRing | None:
    """The same for the second product; ``takes_floats``: with room for the vectors of one token.

    Without, one place of more rows goes before two of fewer. One H200, gpt-oss 20B, four tokens: 20 instead of 24 us.
    """
    if not can_be_ringed(weight_type) or n_used > MAX_WARPS:
        return None
    most_groups = MAX_WARPS // n_used
    least_groups = min(most_groups, ceil_div(LEAST_WARPS, n_used))
    sizes = (
        (rows, n_places, n)
        for rows in (4, 2, 1)
        if rows <= n_rows
        for n_places in ((2,) if takes_floats else (2, 1))
        for n in range(most_groups, least_groups - 1, -1)
    )
    for warp_rows, n_places, n_groups in sizes:
        n_warps = n_groups * n_used
        ring = ExpertRing(
            weight_type=weight_type,
            n_cols=n_cols,
            n_rows=warp_rows,
            n_matrices=1,
            n_warps=n_warps,
            n_places=n_places,
            vector_bytes=n_used * n_cols * 3 // 2 if takes_floats else 0,
            n_words=2 * MAX_TOKENS * n_used + 2 * n_warps * warp_rows,
            least_bytes=0 if takes_floats else GATED_BYTES,
        )
        if ring.n_bytes <= (SUM_BYTES if takes_floats else GATED_BYTES):
            return ring
    return None
