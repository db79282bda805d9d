"""Mixture of experts: which experts each token takes, with which weights, and pairs ordered by expert for prefill.

A pair is a token and an expert that it takes. In decode pairs stay in the order of the tokens; the products are in
``expert_matvec`` (decode) and ``expert_tiles`` (prefill).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import float32, float64, int32, int64, types

from cuda_kernels.intrinsics import fma, load_float, load_int
from cuda_kernels.launch import Kernel, address_of, check_array, device_function, kernel_builder
from cuda_kernels.overlap import wait_for_previous
from cuda_kernels.quantise import load_four, store_four
from kvs_core.errors import KernelArgumentError
from kvs_core.units import ceil_div

MAX_EXPERTS = 512
MAX_USED = 32
MAX_GROUPS = 64
ROUTE_THREADS = 256
ORDER_THREADS = 256
N_THREADS = 256
_N_PARTIALS = 16

# What weights are divided by at least when they are normalised: the smallest normal number of half precision.
LEAST_SUM = 6.103515625e-5
LOWEST = -3.4028234663852886e38

_FLOATS, _MATRIX = types.Array(types.float32, 1, "C"), types.Array(types.float32, 2, "C")
_INTS, _INT_MATRIX = types.Array(types.int32, 1, "C"), types.Array(types.int32, 2, "C")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """What becomes of the router's logits.

    by_sigmoid       each on its own; else by softmax over all experts
    normalises       weights of the experts taken are divided by their sum
    weight_scale     and then multiplied by this
    n_groups         groups of equally many experts of which a token takes from ``n_groups_used``: those whose two best
                     experts have the highest sum
    """

    by_sigmoid: bool = False
    normalises: bool = True
    weight_scale: float = 1.0
    n_groups: int = 1
    n_groups_used: int = 1


@device_function
def _orderable(score):
    """A number above minus infinity, which is left for experts that may not be taken; NaN becomes the lowest."""
    if score >= float32(LOWEST):
        return score
    return float32(LOWEST)


@kernel_builder
def build_route_kernel() -> Kernel:
    """A block chooses for one token: an expert's place is the number of experts before it, so ties have one order.

    Weights are computed in float64 and rounded once.
    """

    def route_kernel(
        logits,
        bias,
        scales,
        ids,
        weights,
        by_sigmoid,
        has_bias,
        has_scales,
        normalises,
        weight_scale,
        n_groups,
        n_groups_used,
    ):
        scores = cuda.shared.array(MAX_EXPERTS, float32)
        likely = cuda.shared.array(MAX_EXPERTS, float64)
        group_scores = cuda.shared.array(MAX_GROUPS, float32)
        maxima = cuda.shared.array(_N_PARTIALS, float32)
        partials = cuda.shared.array(_N_PARTIALS, float64)
        chosen = cuda.shared.array(MAX_USED, int32)
        token = cuda.blockIdx.x
        tid = int32(cuda.threadIdx.x)
        n_expert, n_used = int32(logits.shape[1]), int32(ids.shape[1])
        by_score = by_sigmoid != 0 or has_bias != 0 or n_groups > 1
        wait_for_previous()

        for expert in range(tid, n_expert, ROUTE_THREADS):
            scores[expert] = _orderable(logits[token, expert])
        cuda.syncthreads()
        if tid < _N_PARTIALS:
            largest = float32(LOWEST)
            for expert in range(tid, n_expert, _N_PARTIALS):
                largest = max(largest, scores[expert])
            maxima[tid] = largest
        cuda.syncthreads()
        highest = maxima[0]
        for i in range(1, _N_PARTIALS):
            highest = max(highest, maxima[i])
        for expert in range(tid, n_expert, ROUTE_THREADS):
            if by_sigmoid != 0:
                likely[expert] = 1.0 / (1.0 + math.exp(-float64(logits[token, expert])))
            else:
                likely[expert] = math.exp(float64(logits[token, expert]) - float64(highest))
        cuda.syncthreads()
        if tid < _N_PARTIALS:
            part = float64(0.0)
            for expert in range(tid, n_expert, _N_PARTIALS):
                part += likely[expert]
            partials[tid] = part
        cuda.syncthreads()
        total = partials[0]
        for i in range(1, _N_PARTIALS):
            total += partials[i]

        if by_score:
            for expert in range(tid, n_expert, ROUTE_THREADS):
                weight = float32(likely[expert]) if by_sigmoid != 0 else float32(likely[expert] / total)
                likely[expert] = float64(weight)
                scores[expert] = _orderable(weight + bias[expert] if has_bias != 0 else weight)
            cuda.syncthreads()
            if n_groups > 1:
                group_size = n_expert // n_groups
                if tid < n_groups:
                    best, second = float32(LOWEST), float32(LOWEST)
                    for expert in range(tid * group_size, (tid + 1) * group_size):
                        score = scores[expert]
                        if score > best:
                            second = best
                            best = score
                        elif score > second:
                            second = score
                    group_scores[tid] = best + second
                cuda.syncthreads()
                for expert in range(tid, n_expert, ROUTE_THREADS):
                    group = expert // group_size
                    n_before = int32(0)
                    for other in range(n_groups):
                        score = group_scores[other]
                        if score > group_scores[group] or (score == group_scores[group] and other < group):
                            n_before += int32(1)
                    if n_before >= n_groups_used:
                        scores[expert] = float32(-math.inf)
                cuda.syncthreads()

        for expert in range(tid, n_expert, ROUTE_THREADS):
            own = scores[expert]
            place = int32(0)
            for other in range(n_expert):
                score = scores[other]
                if score > own or (score == own and other < expert):
                    place += int32(1)
            if place < n_used:
                chosen[place] = expert
                ids[token, place] = expert
        cuda.syncthreads()
        if tid < n_used:
            divisor = float64(1.0) if by_score else total
            if normalises != 0:
                taken = float64(0.0)
                for slot in range(n_used):
                    taken += likely[chosen[slot]]
                divisor = max(taken, LEAST_SUM if by_score else LEAST_SUM * total)
            weight = float32(likely[chosen[tid]] / divisor * float64(weight_scale))
            weights[token, tid] = weight * scales[chosen[tid]] if has_scales != 0 else weight

    signature = (
        *(_MATRIX, _FLOATS, _FLOATS, _INT_MATRIX, _MATRIX),
        *(types.int32, types.int32, types.int32, types.int32, types.float32, types.int32, types.int32),
    )
    return Kernel(route_kernel, signature, n_threads=ROUTE_THREADS, overlaps=True)


@device_function
def _sum_of(part, sums, tid):
    """Sum over the block, the same in every thread; ``sums``: shared int32 [ORDER_THREADS]."""
    sums[tid] = part
    cuda.syncthreads()
    step = ORDER_THREADS // 2
    while step > 0:
        if tid < step:
            sums[tid] += sums[tid + step]
        cuda.syncthreads()
        step //= 2
    total = sums[0]
    cuda.syncthreads()
    return total


@kernel_builder
def build_count_experts_kernel() -> Kernel:
    """A block counts the pairs of one expert."""

    def count_experts_kernel(ids, counts):
        sums = cuda.shared.array(ORDER_THREADS, int32)
        tid, expert = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        n_own = int32(0)
        for pair in range(tid, int32(ids.size), ORDER_THREADS):
            if ids[pair] == expert:
                n_own += int32(1)
        total = _sum_of(n_own, sums, tid)
        if tid == 0:
            counts[expert] = total

    return Kernel(count_experts_kernel, (_INTS, _INTS), n_threads=ORDER_THREADS)


@kernel_builder
def build_order_pairs_kernel(tile_pairs: int) -> Kernel:
    """A block places the pairs of one expert, those of earlier tokens first, and lists its tiles.

    A thread takes neighbouring pairs: it counts its own, learns how many the threads before it have, and places them.
    """

    def order_pairs_kernel(ids, counts, rows, tokens, begins, tiles, n_used):
        sums = cuda.shared.array(ORDER_THREADS, int32)
        tid, expert = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        n_expert, n_pairs = int32(cuda.gridDim.x), int32(ids.size)
        part, tile_part = int32(0), int32(0)
        for other in range(tid, expert, ORDER_THREADS):
            part += counts[other]
            tile_part += (counts[other] + int32(tile_pairs - 1)) // int32(tile_pairs)
        begin = _sum_of(part, sums, tid)
        first_tile = _sum_of(tile_part, sums, tid)
        n_own = counts[expert]
        n_tiles = (n_own + int32(tile_pairs - 1)) // int32(tile_pairs)

        own_pairs = (n_pairs + int32(ORDER_THREADS - 1)) // int32(ORDER_THREADS)
        first = tid * own_pairs
        last = min(first + own_pairs, n_pairs)
        held = int32(0)
        for pair in range(first, last):
            if ids[pair] == expert:
                held += int32(1)
        sums[tid] = held
        cuda.syncthreads()
        step = int32(1)
        while step < ORDER_THREADS:
            before = sums[tid - step] if tid >= step else int32(0)
            cuda.syncthreads()
            sums[tid] += before
            cuda.syncthreads()
            step *= int32(2)
        row = begin + sums[tid] - held
        for pair in range(first, last):
            if ids[pair] == expert:
                rows[pair] = row
                tokens[row] = pair // n_used
                row += int32(1)

        for tile in range(tid, n_tiles, ORDER_THREADS):
            at = 2 * (first_tile + tile)
            tiles[at + 2] = expert
            tiles[at + 3] = begin + tile * int32(tile_pairs)
        if tid == 0:
            begins[expert] = begin
            if expert == n_expert - 1:
                begins[n_expert] = n_pairs
                tiles[0] = first_tile + n_tiles

    signature = (*[_INTS] * 6, types.int32)
    return Kernel(order_pairs_kernel, signature, n_threads=ORDER_THREADS)


@kernel_builder
def build_combine_kernel() -> Kernel:
    """``out[token] = sum over slots of weights[token, slot] * pairs[rows[token, slot]]``, slots ascending.

    A thread takes four neighbouring columns.
    """

    def combine_kernel(pairs, rows, weights, out, n_used, n_quads):
        token = int64(cuda.blockIdx.y)
        quad = int32(cuda.blockIdx.x) * int32(N_THREADS) + int32(cuda.threadIdx.x)
        if quad >= n_quads:
            return
        column_at = int64(quad) * 16
        total_a, total_b, total_c, total_d = float32(0.0), float32(0.0), float32(0.0), float32(0.0)
        for slot in range(n_used):
            at = (token * n_used + slot) * 4
            weight, row = load_float(weights + at), int64(load_int(rows + at))
            a, b, c, d = load_four(pairs + row * n_quads * 16 + column_at)
            total_a, total_b = fma(weight, a, total_a), fma(weight, b, total_b)
            total_c, total_d = fma(weight, c, total_c), fma(weight, d, total_d)
        store_four(out + token * n_quads * 16 + column_at, total_a, total_b, total_c, total_d)

    return Kernel(combine_kernel, [types.int64] * 4 + [types.int32] * 2, n_threads=N_THREADS)


def route(
    logits: Any,
    ids: Any,
    weights: Any,
    *,
    rule: RoutingRule,
    bias: Any = None,
    scales: Any = None,
    stream: Any,
) -> None:
    """Give every token the experts of its highest logits, or of its highest weights plus ``bias``.

    The lower index comes first among equals.

    logits    float32 [n_tokens, n_expert]
    ids       int32 [n_tokens, n_used], the most likely expert first
    weights   float32 [n_tokens, n_used]
    bias      float32 [n_expert] or None     takes part in the choice alone
    scales    float32 [n_expert] or None     of an expert's weight, when all else is done
    Raises    KernelArgumentError if shapes or dtypes disagree.
    """
    n_tokens, n_expert = logits.shape
    check_array("logits", logits, np.float32, (None, None))
    check_array("ids", ids, np.int32, (n_tokens, None))
    check_array("weights", weights, np.float32, ids.shape)
    n_used, n_groups = ids.shape[1], rule.n_groups
    if not 1 <= n_used <= min(n_expert, MAX_USED) or n_expert > MAX_EXPERTS:
        raise KernelArgumentError(
            f"route: {n_used} of {n_expert} experts, the kernel takes up to {MAX_USED} of {MAX_EXPERTS}"
        )
    if n_expert % n_groups or n_groups > MAX_GROUPS or rule.n_groups_used * (n_expert // n_groups) < n_used:
        raise KernelArgumentError(
            f"route: {rule.n_groups_used} of {n_groups} groups of {n_expert} experts for {n_used}"
        )
    for name, vector in (("bias", bias), ("scales", scales)):
        if vector is not None:
            check_array(name, vector, np.float32, (n_expert,))
    build_route_kernel().launch(
        (n_tokens,),
        stream,
        logits,
        weights if bias is None else bias,  # what is None is never read
        weights if scales is None else scales,
        ids,
        weights,
        int(rule.by_sigmoid),
        int(bias is not None),
        int(scales is not None),
        int(rule.normalises),
        rule.weight_scale,
        n_groups,
        rule.n_groups_used,
    )


def count_tiles(n_pairs: int, n_expert: int, tile_pairs: int) -> int:
    """Tiles of pairs of one expert that there are at most."""
    return min(n_pairs, n_pairs // tile_pairs + n_expert)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOrder:
    """Pairs ordered by expert, on the device.

    counts   int32 [n_expert]                pairs of each expert
    rows     int32 [n_tokens, n_used]        the row of each pair
    tokens   int32 [n_pairs]                 the token of each row
    begins   int32 [n_expert + 1]            where the rows of each expert begin
    tiles    int32 [2 + 2 count_tiles()]     how many, unused, then expert and first row of each
    """

    counts: Any
    rows: Any
    tokens: Any
    begins: Any
    tiles: Any
    tile_pairs: int


def order_pairs(ids: Any, order: PairOrder, *, stream: Any) -> None:
    """Fill ``order`` for ids int32 [n_tokens, n_used]; raises KernelArgumentError if shapes or dtypes disagree."""
    check_array("ids", ids, np.int32, (None, None))
    n_pairs = ids.shape[0] * ids.shape[1]
    check_array("counts", order.counts, np.int32, (None,))
    n_expert = order.counts.shape[0]
    check_array("rows", order.rows, np.int32, ids.shape)
    check_array("tokens", order.tokens, np.int32, (n_pairs,))
    check_array("begins", order.begins, np.int32, (n_expert + 1,))
    check_array("tiles", order.tiles, np.int32, (2 + 2 * count_tiles(n_pairs, n_expert, order.tile_pairs),))
    build_count_experts_kernel().launch((n_expert,), stream, ids, order.counts)
    build_order_pairs_kernel(order.tile_pairs).launch(
        (n_expert,), stream, ids, order.counts, order.rows, order.tokens, order.begins, order.tiles, ids.shape[1]
    )


def combine(pairs: Any, order: PairOrder, weights: Any, out: Any, *, stream: Any) -> None:
    """``out`` = weighted sum of each token's rows of ``pairs``, the most likely expert first.

    pairs     float32 [n_pairs, n_cols]
    weights   float32 [n_tokens, n_used]
    out       float32 [n_tokens, n_cols]
    Raises    KernelArgumentError if shapes or dtypes disagree.
    """
    check_array("out", out, np.float32, (None, None))
    check_array("rows", order.rows, np.int32, (out.shape[0], None))
    check_array("weights", weights, np.float32, order.rows.shape)
    check_array("pairs", pairs, np.float32, (out.shape[0] * weights.shape[1], out.shape[1]))
    n_quads, rest = divmod(out.shape[1], 4)
    if rest:
        raise KernelArgumentError(f"combine: {out.shape[1]} columns, needs a multiple of 4")
    grid = (ceil_div(n_quads, N_THREADS), out.shape[0])
    addresses = [address_of(array) for array in (pairs, order.rows, weights, out)]
    build_combine_kernel().launch(grid, stream, *addresses, weights.shape[1], n_quads)
