"""Mixture-of-experts steps: routing and the products of each expert with the tokens that take it.

Checks and launches only; the kernels are in ``expert_kernels``. Arrays are C-contiguous, tokens or pairs first.
Raises (all)  KernelArgumentError if shapes or types disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvs_core.cpu import expert_kernels as kernels
from kvs_core.cpu.arguments import FLOAT32, INT32, check_array
from kvs_core.cpu.matmul import CpuScratch, check_scratch
from kvs_core.cpu.threads import ALONE, ThreadTeam
from kvs_core.cpu.weights import CpuWeight
from kvs_core.errors import KernelArgumentError
from kvs_core.expert_shape import ExpertShape, Gating

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]

NO_BIAS = np.empty(0, dtype=np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Which experts the tokens of a step take.

    ids       [n_tokens, n_used], the most likely expert first; weights [n_tokens, n_used]
    rows      [n_tokens, n_used], the row of each pair when pairs are ordered by expert
    begins    [n_expert + 1], where the rows of each expert begin
    taken     [n_taken], the experts with rows, ascending
    """

    ids: Ints
    weights: Floats
    rows: Ints
    begins: Ints
    taken: Ints

    @property
    def n_expert(self) -> int:
        return self.begins.size - 1


def route(
    logits: Floats,
    experts: ExpertShape,
    *,
    bias: Floats = NO_BIAS,
    ids: Ints,
    weights: Floats,
    rows: Ints,
    begins: Ints,
    taken: Ints,
    team: ThreadTeam = ALONE,
) -> Routing:
    """Give every token the experts of its highest logits, the lower index first among equals.

    logits    [n_tokens, n_expert]; may hold anything afterwards
    experts   what becomes of the logits
    bias      [n_expert], added to the experts' weights for the choice alone; or [0]
    taken     [n_expert]; the other arrays as in ``Routing``, which is made of them
    """
    if logits.ndim != 2 or ids.ndim != 2 or not 1 <= ids.shape[1] <= logits.shape[1]:
        raise KernelArgumentError(f"logits {logits.shape} for experts {ids.shape}: at least as many logits needed")
    n_tokens, n_expert = logits.shape
    check_array("logits", logits, FLOAT32, logits.shape)
    check_array("weights", weights, FLOAT32, (n_tokens, ids.shape[1]))
    check_array("ids", ids, INT32, weights.shape)
    check_array("rows", rows, INT32, weights.shape)
    check_array("begins", begins, INT32, (n_expert + 1,))
    check_array("taken", taken, INT32, (n_expert,))
    if bias.size:
        check_array("bias", bias, FLOAT32, (n_expert,))
    if n_expert % experts.n_groups or experts.n_groups_used * (n_expert // experts.n_groups) < ids.shape[1]:
        raise KernelArgumentError(
            f"{experts.n_groups_used} of {experts.n_groups} groups of {n_expert} experts for {ids.shape[1]} a token"
        )
    rule = (
        experts.gating is Gating.SIGMOID,
        experts.normalises,
        np.float64(experts.weight_scale),
        experts.n_groups,
        experts.n_groups_used,
    )
    n_taken = kernels.route_kernel(team.control, logits, rule, bias, ids, weights, rows, begins, taken)
    return Routing(ids=ids, weights=weights, rows=rows, begins=begins, taken=taken[:n_taken])


def scale_routing(scales: Floats, routing: Routing) -> None:
    """Multiply the weight of every pair by its expert's entry of ``scales`` [n_expert]."""
    check_array("scales", scales, FLOAT32, (routing.n_expert,))
    np.multiply(routing.weights, scales[routing.ids], out=routing.weights)


def to_experts(x: Floats, routing: Routing, pairs: Floats, team: ThreadTeam = ALONE) -> None:
    """Copy each token's row to its pairs: x [n_tokens, n], pairs [n_pairs, n]."""
    check_array("x", x, FLOAT32, (len(routing.rows), *x.shape[1:]))
    check_array("pairs", pairs, FLOAT32, (routing.rows.size, *x.shape[1:]))
    kernels.to_experts_kernel(team.control, x, routing.rows, pairs)


def expert_matmul(
    weights: Sequence[CpuWeight], routing: Routing, pairs: Floats, outs: Sequence[Floats], scratch: CpuScratch
) -> None:
    """Multiply each pair with its expert's part of each weight.

    weights   of one shape, [n_expert * n_out, n_in], expert after expert; two of one type share a launch. Or a single
              one for two outputs, [n_expert * 2 n_out, n_in]: the rows of an expert for the first, then for the second
    pairs     [n_pairs, n_in]; outs [n_pairs, n_out] each, not overlapping ``pairs``
    """
    if len(outs) != len(weights) and (len(weights), len(outs)) != (1, 2):
        raise KernelArgumentError(f"{len(weights)} weights with {len(outs)} outputs")
    n_parts = len(outs) // len(weights) * routing.n_expert
    for weight in weights:
        if weight.n_out % n_parts or (weight.n_out, weight.n_in) != (weights[0].n_out, weights[0].n_in):
            raise KernelArgumentError(
                f"expert weights of {weight.n_out} rows, {weight.n_in} columns for {routing.n_expert} experts"
            )
        check_array("pairs", pairs, FLOAT32, (routing.rows.size, weight.n_in))
        check_scratch(weight.n_in, scratch)
    n_out = weights[0].n_out // n_parts
    for out in outs:
        check_array("out", out, FLOAT32, (routing.rows.size, n_out))
    parts = [(weight.kind, weight.data) for weight in weights]
    if len(weights) < len(outs):
        parts.append((weights[0].kind, weights[0].data[n_out:]))
    begin = 0
    while begin < len(parts):
        last = begin
        if begin + 1 < len(parts) and parts[begin + 1][0] is parts[begin][0]:
            last = begin + 1
        kernels.expert_matmul_kernel(
            *parts[begin],
            parts[last][1],
            last - begin + 1,
            routing.n_expert,
            routing.taken,
            routing.begins,
            pairs,
            outs[begin],
            outs[last],
            scratch.buffer,
            scratch.team.control,
            scratch.team.n_threads,
        )
        begin = last + 1


def add_expert_bias(bias: Floats, routing: Routing, pairs: Floats, team: ThreadTeam = ALONE) -> None:
    """Add to each pair [n_pairs, n] the row of its expert in ``bias`` [n_expert, n]."""
    check_array("bias", bias, FLOAT32, (routing.n_expert, *pairs.shape[1:]))
    check_array("pairs", pairs, FLOAT32, (routing.rows.size, *bias.shape[1:]))
    kernels.add_expert_bias_kernel(team.control, bias, routing.ids, routing.rows, pairs)


def from_experts(pairs: Floats, routing: Routing, out: Floats, team: ThreadTeam = ALONE) -> None:
    """``out`` [n_tokens, n] = sum of each token's pairs [n_pairs, n] times their weights."""
    check_array("out", out, FLOAT32, (len(routing.rows), *out.shape[1:]))
    check_array("pairs", pairs, FLOAT32, (routing.rows.size, *out.shape[1:]))
    kernels.from_experts_kernel(team.control, pairs, routing.rows, routing.weights, out)


def sigmoid_gate(x: Floats, weight: Floats, y: Floats, team: ThreadTeam = ALONE) -> None:
    """``y *= 1 / (1 + exp(-x . weight))`` for each row: x [n_rows, n_in], weight [n_in], y [n_rows, n_out]."""
    check_array("x", x, FLOAT32, (len(y), weight.size))
    check_array("weight", weight, FLOAT32, (weight.size,))
    check_array("y", y, FLOAT32, y.shape)
    kernels.sigmoid_gate_kernel(team.control, x, weight, y)
