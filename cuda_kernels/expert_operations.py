"""Mixture of experts on a CUDA device: what ``operations.CudaOperations`` does for routing and the products after it.

Decode reads the rows of the experts taken, prefill orders pairs by expert and multiplies tiles; either way the host
never learns which experts these are. No kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cuda_kernels.activation import Activation, to_half
from cuda_kernels.expert_decode import (
    Router,
    chooses_in_place,
    expert_gated,
    expert_sum,
    gated_ring,
    sum_ring,
    sum_takes_floats,
)
from cuda_kernels.expert_matvec import ExpertMatrix, GatedPair
from cuda_kernels.expert_prefill import expert_gated_tiles, expert_products, tile_pairs_for
from cuda_kernels.product_operations import ProductOperations
from cuda_kernels.routing import (
    PairOrder,
    RoutingRule,
    combine,
    count_tiles,
    order_pairs,
    route,
)
from cuda_kernels.sigmoid_gate import sigmoid_gate
from cuda_kernels.step_arrays import Rows
from kvs_core.activation_rule import GatedActivation
from kvs_core.errors import StateError
from kvs_core.expert_shape import ExpertShape, Gating
from kvs_core.phase import Phase
from kvs_core.plan import RunPlan
from kvs_core.units import align_up


def session_tile_pairs(plan: RunPlan, experts: ExpertShape) -> int:
    """Pairs of a tile in every prefill step of a session: no bit depends on it, and there is one kernel less."""
    return tile_pairs_for(plan.n_ubatch * experts.n_used, experts.n_expert)


def routing_rule(experts: ExpertShape) -> RoutingRule:
    """How a layer's experts are chosen."""
    return RoutingRule(
        by_sigmoid=experts.gating is Gating.SIGMOID,
        normalises=experts.normalises,
        weight_scale=experts.weight_scale,
        n_groups=experts.n_groups,
        n_groups_used=experts.n_groups_used,
    )


class ExpertOperations(ProductOperations):
    """``route`` and what works on the pairs of tokens and experts until the next call of it.

    In prefill the arrays of the plan hold other things than their names say, which differ between backends: the gated
    rows are float16, and the place of ``up`` lists the pairs of each expert and their tiles. In decode ``route`` waits
    for the products, which may choose experts themselves; logits stay where they are until these have run.
    """

    _offsets: dict[str, int]
    _experts: ExpertShape | None = None
    _order: PairOrder | None = None
    _router: Router | None = None  # what waits

    def route(self, router: Rows, experts: ExpertShape, bias: str | None = None, scales: str | None = None) -> None:
        held = self._held
        rule = routing_rule(experts)
        self._experts = experts
        logits = self._matrix(router)
        self._held = held  # the router's input goes to the experts, too
        self._router = None
        by_expert = None if scales is None else self._vectors[scales]
        if self._phase is Phase.DECODE and chooses_in_place(rule, has_bias=bias is not None):
            self._router = Router(logits=logits, weight_scale=rule.weight_scale, scales=by_expert)
            return
        choice = (self._expert_ids(), self._mixture())
        added = None if bias is None else self._vectors[bias]
        route(logits, *choice, rule=rule, bias=added, scales=by_expert, stream=self._stream)
        if self._phase is Phase.PREFILL:
            self._order = self._pair_order(router.n_rows, experts)
            order_pairs(self._expert_ids(), self._order, stream=self._stream)

    def _routed(self, *, chooses: bool) -> Router | None:
        """What kernels choose by that do so themselves; for others experts are chosen now."""
        router = self._router
        if router is None or chooses:
            return router
        self._router = None
        choice, rule = (self._expert_ids(), self._mixture()), routing_rule(self._chosen())
        route(router.logits, *choice, rule=rule, scales=router.scales, stream=self._stream)
        return None

    def gated_experts(
        self, weights: Sequence[str], x: Rows, pairs: Rows, gate: Rows, up: Rows, activation: GatedActivation
    ) -> None:
        both = [self._expert_matrix(name) for name in weights]
        pair = GatedPair(gate=both[0], up=both[1] if len(both) > 1 else None)
        kind = Activation(activation.value)
        if self._phase is Phase.DECODE:
            geometry, ids = pair.gate.geometry, self._expert_ids()
            router = self._routed(chooses=gated_ring(geometry, pair.n_rows, *ids.shape) is not None)
            inputs = self._input_of(geometry.weight_type, x, takes_floats=False)
            arguments = (ids, inputs.vectors, inputs.scales, self._matrix(self._by_pair(gate)))
            expert_gated(pair, *arguments, activation=kind, stream=self._stream, router=router)
            return
        halves = self._halves(x)
        if self._held != x or self._is_shrunk:
            to_half(self._matrix(x), halves, factor=1.0, stream=self._stream)
            self._is_shrunk = False
        expert_gated_tiles(
            pair, self._pairs_in_order(), halves, self._gated_halves(gate), activation=kind, stream=self._stream
        )
        self._held = x

    def from_experts(self, weight: str, gate: Rows, pairs: Rows, out: Rows) -> None:
        matrix = self._expert_matrix(weight)
        if self._phase is Phase.DECODE:
            geometry, ids, mixture = matrix.geometry, self._expert_ids(), self._mixture()
            takes_floats = sum_takes_floats(geometry, matrix.n_rows, *ids.shape)
            ring = sum_ring(geometry, matrix.n_rows, ids.shape[1], takes_floats=takes_floats)
            router = self._routed(chooses=ring is not None)
            inputs = self._input_of(geometry.weight_type, self._by_pair(gate), takes_floats=takes_floats)
            arguments = (ids, mixture, inputs.vectors, inputs.scales, self._matrix(out))
            expert_sum(matrix, *arguments, stream=self._stream, router=router)
            return
        order, products = self._pairs_in_order(), self._matrix(self._by_pair(pairs))
        expert_products(matrix, order, self._gated_halves(gate), products, stream=self._stream)
        combine(products, order, self._mixture(), self._matrix(out), stream=self._stream)

    def sigmoid_gate(self, x: Rows, weight: str, y: Rows) -> None:
        sigmoid_gate(self._matrix(x), self._vectors[weight], self._matrix(y), stream=self._stream)

    def _chosen(self) -> ExpertShape:
        if self._experts is None:
            raise StateError("no experts were chosen")
        return self._experts

    def _pairs_in_order(self) -> PairOrder:
        if self._order is None:
            raise StateError("no experts were chosen")
        return self._order

    def _expert_matrix(self, name: str) -> ExpertMatrix:
        matrix = self._matrices[name]
        return ExpertMatrix(
            matrix=matrix.data,
            geometry=matrix.geometry,
            n_expert=self._chosen().n_expert,
            bias=self._vectors.get(name + ".bias"),
        )

    def _expert_ids(self) -> Any:
        return self._place("expert_ids", (self._n_tokens, self._chosen().n_used), np.int32)

    def _mixture(self) -> Any:
        return self._place("expert_weights", (self._n_tokens, self._chosen().n_used), np.float32)

    def _by_pair(self, x: Rows) -> Rows:
        """Rows of tokens with everything of their pairs, as rows of pairs."""
        n_used = self._chosen().n_used
        return Rows(x.offset, x.n_rows * n_used, x.width // n_used)

    def _gated_halves(self, gate: Rows) -> Any:
        rows = self._by_pair(gate)
        return self._arena.view(rows.offset, (rows.n_rows, rows.width), np.float16)

    def _pair_order(self, n_tokens: int, experts: ExpertShape) -> PairOrder:
        n_pairs, n_expert = n_tokens * experts.n_used, experts.n_expert
        tile_pairs = session_tile_pairs(self._plan, experts)
        lists = self._offsets["expert_up"]
        n_tile_words = 2 + 2 * count_tiles(n_pairs, n_expert, tile_pairs)
        return PairOrder(
            counts=self._place("experts_taken", (n_expert,), np.int32),
            rows=self._place("expert_rows", (n_tokens, experts.n_used), np.int32),
            tokens=self._arena.view(lists, (n_pairs,), np.int32),
            begins=self._place("expert_begins", (n_expert + 1,), np.int32),
            tiles=self._arena.view(lists + align_up(4 * n_pairs, 16), (n_tile_words,), np.int32),
            tile_pairs=tile_pairs,
        )

    def _place(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        return self._arena.view(self._offsets[name], shape, dtype)
