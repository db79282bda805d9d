"""The operation set on the CPU: views of the arena's workspace handed to Numba kernels. Launches only, no kernels."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvs_core.activation_rule import GatedActivation
from kvs_core.attention_rule import AttentionRule
from kvs_core.cpu import attention, elementwise, store
from kvs_core.cpu import experts as expert_steps
from kvs_core.cpu import recurrent as recurrent_steps
from kvs_core.cpu.arena import CpuArena
from kvs_core.cpu.head_matmul import matmul_heads
from kvs_core.cpu.matmul import CpuScratch, matmul_together
from kvs_core.cpu.rotation import rotate_heads
from kvs_core.cpu.threads import ThreadTeam
from kvs_core.cpu.weights import CpuWeight, embed_rows
from kvs_core.errors import StateError
from kvs_core.expert_shape import ExpertShape
from kvs_core.kv_rotation import HeadRotations, Rotation
from kvs_core.kv_types import PageGeometry
from kvs_core.model_shape import RopeKind
from kvs_core.phase import Phase
from kvs_core.policy import Layout
from kvs_core.rope import RopeTable
from kvs_core.workspace import Workspace

Floats = NDArray[np.float32]

_ACTIVATIONS = {
    GatedActivation.SILU: elementwise.silu_mul,
    GatedActivation.GELU: elementwise.gelu_mul,
    GatedActivation.CLAMPED_SWIGLU: elementwise.clamped_swiglu,
}


class CpuOperations:
    """Implements ``kvs_core.operations.Operations`` over one arena."""

    def __init__(
        self,
        matrices: Mapping[str, CpuWeight],
        vectors: Mapping[str, Floats],
        expert_biases: Mapping[str, Floats],
        taps: Mapping[str, Floats],
        arena: CpuArena,
        *,
        recurrent: Mapping[int, recurrent_steps.LayerState],
        rope: RopeTable,
        rope_in_window: RopeTable,
        rope_kind: RopeKind,
        rms_eps: float,
        team: ThreadTeam,
    ) -> None:
        self._matrices = matrices
        self._vectors = vectors
        self._expert_biases = expert_biases
        self._taps = taps
        self._recurrent = recurrent
        self._arena = arena
        self._rope = rope
        self._rope_in_window = rope_in_window
        self._rope_kind = rope_kind
        self._rms_eps = rms_eps
        self._team = team
        self._phase = Phase.PREFILL
        self._flat: dict[str, NDArray[Any]] = {}
        self._views: dict[tuple[str, int, int], Floats] = {}
        self._tokens = np.empty(0, dtype=np.int32)
        self._first_pos = 0
        self._state: attention.AttentionState | None = None
        self._sinks: Floats = attention.NO_SINKS
        self._attended: Floats = np.empty((0, 0), dtype=np.float32)
        self._routing: expert_steps.Routing | None = None
        self._scratch: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        self._matmul_scratch = CpuScratch(buffer=np.empty(0, dtype=np.float32), team=team)

    def bind(self, layout: Layout, workspace: Workspace) -> None:
        self._phase = layout.phase
        self._flat = {
            placed.spec.name: self._arena.array(placed, layout.workspace_offset).reshape(-1)
            for placed in workspace.arrays
        }
        self._views.clear()
        self._scratch = self._flat["scratch"].view(np.uint8)
        self._matmul_scratch = CpuScratch(buffer=self._scratch.view(np.float32), team=self._team)

    def begin_step(self, tokens: Sequence[int], first_pos: int) -> None:
        self._tokens = np.asarray(tokens, dtype=np.int32)
        self._first_pos = first_pos

    @property
    def replays_steps(self) -> bool:
        return False

    def run_step(self, forward: Callable[[], None]) -> bool:
        forward()
        return True

    def end_part(self) -> None:
        return

    def replay_part(self) -> None:
        raise StateError("a step on the CPU is never replayed")

    def buffer(self, name: str, width: int) -> Floats:
        return self._view(name, len(self._tokens), width)

    def rows(self, name: str, begin: int, end: int, width: int) -> Floats:
        return self._view(name, end, width)[begin:]

    def has_weight(self, name: str) -> bool:
        return name in self._matrices or name in self._vectors

    def weight_rows(self, name: str) -> int:
        return self._matrices[name].n_out

    def embed(self, weight: str, out: Floats) -> None:
        embed_rows(self._matrices[weight], self._tokens, out)

    def rms_norm(self, x: Floats, weight: str, out: Floats, *, factor: float = 1.0) -> None:
        elementwise.rms_norm(x, self._vectors[weight], self._rms_eps, out, self._team)
        if factor != 1.0:
            self.scale(out, factor)

    def add_normed(self, x: Floats, weight: str, residual: Floats, *, scale: str | None = None) -> None:
        self.rms_norm(x, weight, x)
        self.add(residual, x)
        if scale is not None:
            elementwise.scale_in_place(residual, float(self._vectors[scale][0]), self._team)

    def add_normed_pair(
        self, x: Floats, y: Floats, weights: tuple[str, str, str], residual: Floats, *, scale: str | None = None
    ) -> None:
        self.rms_norm(x, weights[0], x)
        self.add_normed(y, weights[1], x)
        self.add_normed(x, weights[2], residual, scale=scale)

    def norm_first(self, x: Floats, weight: str) -> None:
        elementwise.rms_norm_first(x, self._vectors[weight], self._rms_eps, self._team)

    def norm_heads(self, x: Floats, weight: str | None, n_head: int) -> None:
        heads = x.reshape(len(x) * n_head, -1)
        factors = np.ones(heads.shape[1], dtype=np.float32) if weight is None else self._vectors[weight]
        elementwise.rms_norm(heads, factors, self._rms_eps, heads, self._team)

    def matmul(self, weights: Sequence[str], x: Floats, outs: Sequence[Floats]) -> None:
        matmul_together([self._matrices[name] for name in weights], x, outs, self._matmul_scratch)
        for name, out in zip(weights, outs, strict=True):
            bias = self._vectors.get(name + ".bias")
            if bias is not None:
                elementwise.add_bias(out, bias, self._team)

    def gated_matmul(
        self,
        weights: tuple[str, str],
        x: Floats,
        gate: Floats,
        up: Floats,
        activation: GatedActivation = GatedActivation.SILU,
    ) -> None:
        self.matmul(weights, x, (gate, up))
        _ACTIVATIONS[activation](gate, up, gate, self._team)

    def matmul_add(self, weight: str, x: Floats, residual: Floats, product: Floats) -> None:
        self.matmul((weight,), x, (product,))
        self.add(residual, product)

    def matmul_heads(self, weight: str, x: Floats, out: Floats, n_head: int) -> None:
        n = len(x)
        matmul_heads(
            self._matrices[weight],
            x.reshape(n, n_head, -1),
            out.reshape(n, n_head, -1),
            self._flat["head_inputs"],
            self._flat["head_outputs"],
            self._matmul_scratch,
        )

    def rope(self, x: Floats, n_head: int, *, in_window: bool = False, begin: int = 0) -> None:
        table = self._rope_in_window if in_window else self._rope
        heads = x.reshape(len(x), n_head, -1)
        elementwise.rope(heads, self._first_pos, table.freqs, table.magnitude, self._rope_kind, self._team, begin=begin)

    def scale_by_log_position(self, x: Floats, scale: float, n_step: int) -> None:
        positions = np.arange(self._first_pos, self._first_pos + len(x))
        factors = 1.0 + scale * np.log(positions // n_step + 1.0)
        x *= factors.astype(np.float32)[:, None]

    def resize_heads(self, x: Floats, n_head: int, out: Floats) -> None:
        elementwise.resize_heads(x, n_head, out)

    def rotate_heads(self, x: Floats, rotation: Rotation, *, inverse: bool = False) -> None:
        rotate_heads(x, rotation, self._team, inverse=inverse)

    def take_columns(self, x: Floats, begin: int, out: Floats) -> None:
        np.copyto(out, x[:, begin : begin + out.shape[1]])

    def silu_mul(self, gate: Floats, up: Floats) -> None:
        elementwise.silu_mul(gate, up, gate, self._team)

    def gelu_mul(self, gate: Floats, up: Floats) -> None:
        elementwise.gelu_mul(gate, up, gate, self._team)

    def softplus_gate(self, gate: Floats, x: Floats) -> None:
        elementwise.softplus_gate(gate, x, self._team)

    def scale(self, x: Floats, factor: float) -> None:
        elementwise.scale_in_place(x, factor, self._team)

    def softcap(self, x: Floats, cap: float) -> None:
        elementwise.softcap(x, cap, self._team)

    def add(self, x: Floats, y: Floats) -> None:
        elementwise.add_in_place(x, y, self._team)

    def route(self, router: Floats, experts: ExpertShape, bias: str | None = None, scales: str | None = None) -> None:
        n_tokens, n_used = len(router), experts.n_used
        self._routing = expert_steps.route(
            router,
            experts,
            bias=expert_steps.NO_BIAS if bias is None else self._vectors[bias],
            ids=self._flat["expert_ids"][: n_tokens * n_used].reshape(n_tokens, n_used),
            weights=self._flat["expert_weights"][: n_tokens * n_used].reshape(n_tokens, n_used),
            rows=self._flat["expert_rows"][: n_tokens * n_used].reshape(n_tokens, n_used),
            begins=self._flat["expert_begins"][: experts.n_expert + 1],
            taken=self._flat["experts_taken"][: experts.n_expert],
            team=self._team,
        )
        if scales is not None:
            expert_steps.scale_routing(self._vectors[scales], self._routing)

    def gated_experts(
        self,
        weights: Sequence[str],
        x: Floats,
        pairs: Floats,
        gate: Floats,
        up: Floats,
        activation: GatedActivation,
    ) -> None:
        expert_steps.to_experts(x, self._routed(), pairs.reshape(-1, x.shape[1]), self._team)
        self._multiply_pairs(weights, pairs, (gate, up))
        _ACTIVATIONS[activation](gate, up, gate, self._team)

    def from_experts(self, weight: str, gate: Floats, pairs: Floats, out: Floats) -> None:
        self._multiply_pairs((weight,), gate, (pairs,))
        expert_steps.from_experts(pairs.reshape(-1, out.shape[1]), self._routed(), out, self._team)

    def _multiply_pairs(self, weights: Sequence[str], pairs: Floats, outs: Sequence[Floats]) -> None:
        """Products of one or two weights with rows of pairs, and their biases; a single weight may have two outputs."""
        routing = self._routed()
        n_pairs = routing.rows.size
        matrices = [self._matrices[name] for name in weights]
        by_pair = [out.reshape(n_pairs, -1) for out in outs]
        expert_steps.expert_matmul(matrices, routing, pairs.reshape(n_pairs, -1), by_pair, self._matmul_scratch)
        for name, out in zip(weights, by_pair, strict=False):
            bias = self._expert_biases.get(name + ".bias")
            if bias is not None:
                expert_steps.add_expert_bias(bias, routing, out, self._team)

    def sigmoid_gate(self, x: Floats, weight: str, y: Floats) -> None:
        expert_steps.sigmoid_gate(x, self._vectors[weight], y, self._team)

    def split_groups(self, both: Floats, first: Floats, second: Floats, width: int) -> None:
        groups = both.reshape(-1, 2, width)
        np.copyto(first.reshape(-1, width), groups[:, 0])
        np.copyto(second.reshape(-1, width), groups[:, 1])

    def sigmoid_mul(self, x: Floats, gate: Floats) -> None:
        elementwise.sigmoid_mul(x, gate, self._team)

    def short_convolution(self, layer_idx: int, weight: str, x: Floats, out: Floats) -> None:
        state = self._recurrent[layer_idx]
        heads = out.reshape(state.recurrent.n_head, len(x), -1)
        recurrent_steps.short_convolution(x, self._taps[weight], state, self._first_pos, heads, self._team)

    def delta_net(
        self,
        layer_idx: int,
        vectors: tuple[str, str, str],
        heads: Floats,
        beta: Floats,
        decay: Floats,
        out: Floats,
        gate: Floats,
    ) -> None:
        bias, rate, norm = vectors
        state = self._recurrent[layer_idx]
        recurrent_steps.delta_net(
            heads.reshape(state.recurrent.n_head, len(beta), -1),
            beta,
            decay,
            bias=self._vectors[bias],
            rate=self._vectors[rate],
            eps=self._rms_eps,
            state=state,
            first_pos=self._first_pos,
            out=out,
            team=self._team,
        )
        self.norm_heads(out, norm, state.recurrent.n_head_v)
        self.silu_mul(gate, out)

    def store_rows(self, layer: int, geometry: PageGeometry, offsets: array[int], k: Floats, v: Floats | None) -> None:
        n = len(self._tokens)
        store.store_kv(
            self._arena.bytes,
            geometry,
            np.frombuffer(offsets, dtype=np.int64),
            self._first_pos,
            k.reshape(n, geometry.n_head_kv, geometry.head_dim_k),
            None if v is None else v.reshape(n, geometry.n_head_kv, geometry.head_dim_v),
        )

    def rotate_store(
        self,
        layer: int,
        geometry: PageGeometry,
        offsets: array[int],
        q: Floats,
        k: Floats,
        v: Floats,
        *,
        in_window: bool = False,
        rotations: HeadRotations | None = None,
    ) -> None:
        self.rope(q, q.shape[1] // geometry.head_dim_k, in_window=in_window)
        self.rope(k, geometry.n_head_kv, in_window=in_window)
        if rotations is not None:
            for x, rotation in ((q, rotations.keys), (k, rotations.keys), (v, rotations.values)):
                if rotation is not None:
                    self.rotate_heads(x, rotation)
        self.store_rows(layer, geometry, offsets, k, v)

    def begin_attention(self, n_head: int, head_dim_v: int, out: Floats, sinks: str | None = None) -> None:
        n = len(self._tokens)
        self._attended = out
        self._sinks = attention.NO_SINKS if sinks is None else self._vectors[sinks]
        self._state = attention.AttentionState(
            acc=self._view("attention_acc", n, n_head * head_dim_v).reshape(n, n_head, head_dim_v),
            max=self._view("attention_max", n, n_head),
            sum=self._view("attention_sum", n, n_head),
        )
        attention.begin_attention(self._state)

    def attend_span(
        self,
        layer: int,
        geometry: PageGeometry,
        offsets: array[int],
        page_begin: int,
        page_end: int,
        q: Floats,
        rule: AttentionRule,
    ) -> None:
        n = len(self._tokens)
        attend = attention.attend_prefill if self._phase is Phase.PREFILL else attention.attend_decode
        attend(
            self._arena.bytes,
            geometry,
            np.frombuffer(offsets, dtype=np.int64),
            page_begin,
            page_end,
            self._first_pos + n,
            q.reshape(n, -1, geometry.head_dim_k),
            self._first_pos,
            rule,
            self._running(),
            self._scratch,
            self._team,
        )

    def finish_attention(self) -> None:
        state = self._running()
        attention.finish_attention(state, self._attended.reshape(state.acc.shape), self._sinks)

    def to_host(self, x: Floats) -> Floats:
        return x

    def close(self) -> None:
        """Everything lies in the arena."""

    def synchronise(self) -> None:
        """Every operation has returned with its result already."""

    def _running(self) -> attention.AttentionState:
        if self._state is None:
            raise StateError("attention was not begun")
        return self._state

    def _routed(self) -> expert_steps.Routing:
        if self._routing is None:
            raise StateError("no experts were chosen")
        return self._routing

    def _view(self, name: str, n_rows: int, width: int) -> Floats:
        key = (name, n_rows, width)
        view = self._views.get(key)
        if view is None:
            view = self._flat[name][: n_rows * width].reshape(n_rows, width)
            self._views[key] = view
        return view
