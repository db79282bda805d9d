"""Products of experts in a decode step: which form of the kernels runs, and its launch.

On compute capability 9.0 rows of most types stream (``expert_stream``), and where the router's logits decide in the
plain way (``chooses_in_place``) the kernels choose the experts themselves: two launches a layer. Elsewhere, and for the
other types and rules: ``routing.route`` and the kernels of ``expert_matvec``. The bits are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cuda_kernels import expert_matvec, expert_stream
from cuda_kernels.activation import Activation
from cuda_kernels.expert_matvec import MAX_USED, N_WARPS, ExpertMatrix, GatedPair, count_parts
from cuda_kernels.expert_ring import ExpertRing
from cuda_kernels.expert_stream import MAX_TOKENS, Chosen, gated_expert_ring, sum_expert_ring
from cuda_kernels.launch import Kernel, address_of, check_array, device_multiprocessors
from cuda_kernels.matvec_stream import can_stream
from cuda_kernels.routing import MAX_EXPERTS, RoutingRule
from cuda_kernels.row_units import takes_float_activations
from cuda_kernels.unit_formats import GROUP_ELEMENTS
from cuda_kernels.weights import WeightGeometry
from kvs_core.errors import KernelArgumentError
from kvs_core.units import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """What the experts of a token are chosen by, where kernels do it themselves.

    logits        float32 [n_tokens, n_expert]
    weight_scale  weights are multiplied with it
    scales        float32 [n_expert] or None      and with what their expert has here
    """

    logits: Any
    weight_scale: float = 1.0
    scales: Any = None

    def check(self, n_tokens: int, n_expert: int) -> None:
        check_array("logits", self.logits, np.float32, (n_tokens, n_expert))
        if self.scales is not None:
            check_array("scales of experts", self.scales, np.float32, (n_expert,))


def chooses_in_place(rule: RoutingRule, *, has_bias: bool) -> bool:
    """Whether kernels of products can follow this rule: softmax over all experts, weights divided by their sum."""
    return rule.normalises and not rule.by_sigmoid and not has_bias and rule.n_groups == 1


def gated_ring(geometry: WeightGeometry, n_rows: int, n_tokens: int, n_used: int) -> ExpertRing | None:
    """For gate and up of experts of ``n_rows`` rows each; None if they do not stream, and do not choose."""
    if not can_stream() or n_tokens > MAX_TOKENS:
        return None
    return gated_expert_ring(geometry.weight_type, geometry.n_cols, n_rows, n_tokens, n_used)


def sum_ring(geometry: WeightGeometry, n_rows: int, n_used: int, *, takes_floats: bool) -> ExpertRing | None:
    """The same for the second product. ``takes_floats``: one token, whose vectors are quantised on the way."""
    if not can_stream():
        return None
    return sum_expert_ring(geometry.weight_type, geometry.n_cols, n_rows, n_used, takes_floats)


def sum_takes_floats(geometry: WeightGeometry, n_rows: int, n_tokens: int, n_used: int) -> bool:
    """Whether ``expert_sum`` with quantised weights also takes an input that is not quantised yet."""
    return n_tokens == 1 and sum_ring(geometry, n_rows, n_used, takes_floats=True) is not None


def expert_gated(
    weights: GatedPair,
    ids: Any,
    vectors: Any,
    scales: Any | None,
    out: Any,
    *,
    activation: Activation,
    stream: Any,
    router: Router | None = None,
) -> None:
    """``out[pair] = activation(gate @ vectors[token]) * (up @ vectors[token])`` with the matrices of its expert.

    ids       int32   [n_tokens, n_used]               below ``n_expert``; read on the device, not read with ``router``
    vectors   int8    [n_tokens, n_cols]               with quantised weights: ``quantise``
              float32 [n_tokens, n_cols]               with float weights; ``scales`` is None
    scales    float32 [n_tokens, n_cols / 16, 2]
    out       float32 [n_tokens * n_used, n_rows]
    router    chooses the experts; only where ``gated_ring`` finds one
    Raises    KernelArgumentError if shapes or dtypes disagree, or the type has no kernel.
    """
    weights.check()
    geometry, n_rows = weights.gate.geometry, weights.n_rows
    n_tokens, n_used = _check_ids(ids)
    _check_vectors(geometry, n_tokens, vectors, scales)
    check_array("out", out, np.float32, (n_tokens * n_used, n_rows))
    ring = gated_ring(geometry, n_rows, n_tokens, n_used)
    chosen = _chosen(router, ring, weights.gate.n_expert, n_tokens, n_used)
    planes, strides = weights.planes()
    addresses = [address_of(vectors), 0 if scales is None else address_of(scales)]
    if ring is not None:
        kernel = expert_stream.build_stream_gated_kernel(ring, activation, weights.has_bias, chosen)
        kernel.launch(
            (min(device_multiprocessors(), ceil_div(n_tokens * n_used * n_rows, ring.n_warps * ring.n_rows)),),
            stream,
            planes,
            weights.gate.n_rows,
            n_rows,
            address_of(out),
            *weights.biases(),
            address_of(ids),
            0 if router is None else address_of(router.logits),
            *addresses,
            n_tokens,
        )
        return
    kernel, block_rows = expert_matvec.gated_kernel(geometry.weight_type, n_rows, activation, has_bias=weights.has_bias)
    n_parts = count_parts(n_tokens * n_used * ceil_div(n_rows * N_WARPS, block_rows))
    kernel.launch(
        (n_tokens * n_used, ceil_div(n_rows, block_rows * n_parts)),
        stream,
        planes,
        strides,
        weights.gate.n_rows,
        n_rows,
        address_of(out),
        *weights.biases(),
        address_of(ids),
        *addresses,
        geometry.n_cols,
        n_used,
        n_parts,
    )


def expert_sum(
    weights: ExpertMatrix,
    ids: Any,
    mixture: Any,
    vectors: Any,
    scales: Any | None,
    out: Any,
    *,
    stream: Any,
    router: Router | None = None,
) -> None:
    """``out[token]`` = sum of its experts' products times the token's weights, in the order of ``ids``.

    In a recorded step ids, or logits, must have been written before the last launch of ``expert_gated`` began to
    compute.

    ids       int32   [n_tokens, n_used]               not read with ``router``
    mixture   float32 [n_tokens, n_used]               weight of each; not read with ``router``
    vectors   of each pair, [n_tokens * n_used, n_cols], as ``expert_gated`` takes them; scales likewise;
              float32 without scales where ``sum_takes_floats``
    out       float32 [n_tokens, n_rows]
    router    chooses and weighs the experts; only where ``sum_ring`` finds one
    Raises    KernelArgumentError if shapes or dtypes disagree, or the type has no kernel.
    """
    weights.check("down")
    geometry, n_rows = weights.geometry, weights.n_rows
    n_tokens, n_used = _check_ids(ids)
    is_quantised = not takes_float_activations(geometry.weight_type)
    takes_floats = is_quantised and scales is None and sum_takes_floats(geometry, n_rows, n_tokens, n_used)
    _check_vectors(geometry, n_tokens * n_used, vectors, scales, takes_floats=takes_floats)
    check_array("mixture", mixture, np.float32, (n_tokens, n_used))
    check_array("out", out, np.float32, (n_tokens, n_rows))
    ring = sum_ring(geometry, n_rows, n_used, takes_floats=takes_floats) if n_tokens <= MAX_TOKENS else None
    chosen = _chosen(router, ring, weights.n_expert, n_tokens, n_used)
    planes, strides = geometry.plane_arguments(address_of(weights.matrix))
    bias = 0 if weights.bias is None else address_of(weights.bias)
    addresses = [address_of(vectors), 0 if scales is None else address_of(scales)]
    if ring is not None:
        n_tiles = n_tokens * ceil_div(n_rows, ring.n_rows)
        expert_stream.build_stream_sum_kernel(ring, chosen).launch(
            (min(device_multiprocessors(), ceil_div(n_tiles, ring.n_warps // n_used)),),
            stream,
            planes,
            n_rows,
            address_of(out),
            bias,
            address_of(ids),
            address_of(mixture),
            0 if router is None else address_of(router.logits),
            0 if router is None or router.scales is None else address_of(router.scales),
            1.0 if router is None else router.weight_scale,
            *addresses,
            n_tokens,
        )
        return
    kernel, block_rows = expert_matvec.sum_kernel(geometry.weight_type, n_used, n_rows)
    kernel.launch(
        (ceil_div(n_rows, block_rows), n_tokens),
        stream,
        planes,
        strides,
        n_rows,
        address_of(out),
        bias,
        address_of(ids),
        address_of(mixture),
        *addresses,
        geometry.n_cols,
    )


def one_token_gated_kernel(
    geometry: WeightGeometry, n_rows: int, activation: Activation, *, has_bias: bool, chosen: Chosen
) -> Kernel:
    """What ``expert_gated`` launches in a step of one token."""
    ring = gated_ring(geometry, n_rows, 1, chosen.n_used)
    if ring is not None:
        return expert_stream.build_stream_gated_kernel(ring, activation, has_bias, chosen)
    return expert_matvec.gated_kernel(geometry.weight_type, n_rows, activation, has_bias=has_bias)[0]


def one_token_sum_kernel(geometry: WeightGeometry, n_rows: int, chosen: Chosen) -> Kernel:
    """The same for ``expert_sum``."""
    ring = sum_ring(geometry, n_rows, chosen.n_used, takes_floats=True)
    if ring is not None:
        return expert_stream.build_stream_sum_kernel(ring, chosen)
    return expert_matvec.sum_kernel(geometry.weight_type, chosen.n_used, n_rows)[0]


def _chosen(router: Router | None, ring: ExpertRing | None, n_expert: int, n_tokens: int, n_used: int) -> Chosen:
    """What a kernel with this ring does about the choice; raises KernelArgumentError if it cannot choose."""
    if router is None:
        return Chosen(n_used=n_used)
    if ring is None:
        raise KernelArgumentError("experts of this type and size do not choose in place: route first")
    router.check(n_tokens, n_expert)
    if n_expert > MAX_EXPERTS:
        raise KernelArgumentError(f"{n_expert} experts to choose from, the kernels take up to {MAX_EXPERTS}")
    return Chosen(n_used=n_used, n_expert=n_expert)


def _check_ids(ids: Any) -> tuple[int, int]:
    """Tokens and experts a token takes."""
    check_array("ids", ids, np.int32, (None, None))
    n_tokens, n_used = ids.shape
    if not 1 <= n_used <= MAX_USED:
        raise KernelArgumentError(f"{n_used} experts a token, needs 1 to {MAX_USED}")
    return n_tokens, n_used


def _check_vectors(
    geometry: WeightGeometry, n_vectors: int, vectors: Any, scales: Any | None, *, takes_floats: bool = False
) -> None:
    """Raise KernelArgumentError unless there is a vector of the right kind for each."""
    is_float = takes_floats or takes_float_activations(geometry.weight_type)
    if is_float != (scales is None):
        raise KernelArgumentError(f"scales go with quantised weights, not {geometry.weight_type.name}")
    check_array("vectors", vectors, np.float32 if is_float else np.int8, (n_vectors, geometry.n_cols))
    if scales is not None:
        check_array("scales", scales, np.float32, (n_vectors, geometry.n_cols // GROUP_ELEMENTS, 2))
