"""The operation set that model files are written in and every backend implements."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvs_core.activation_rule import GatedActivation
from kvs_core.attention_rule import AttentionRule
from kvs_core.expert_shape import ExpertShape
from kvs_core.kv_rotation import HeadRotations, Rotation
from kvs_core.kv_types import PageGeometry
from kvs_core.policy import Layout
from kvs_core.workspace import Workspace

DeviceArray = Any
"""A float32 array of the backend's own kind, tokens first; model files only pass it on."""


class Operations(Protocol):
    """One step at a time: ``begin_step``, then what the model's forward pass calls, then ``to_host``.

    Results always go to arrays of the workspace, so nothing is allocated. Weights are named without ``.weight``; a
    ``.bias`` of the same name is added by ``matmul``.
    """

    def bind(self, layout: Layout, workspace: Workspace) -> None:
        """Make the arrays of a phase's workspace the ones that ``buffer`` returns."""
        ...

    def begin_step(self, tokens: Sequence[int], first_pos: int) -> None:
        """A step of ``len(tokens)`` tokens begins whose first position is ``first_pos``."""
        ...

    @property
    def replays_steps(self) -> bool:
        """Whether decode steps may be replayed; what belongs to one, its logits too, is asked for in ``forward``."""
        ...

    def run_step(self, forward: Callable[[], None]) -> bool:
        """Call ``forward`` for the step that began; False if an earlier one of its kind is to be replayed instead."""
        ...

    def end_part(self) -> None:
        """Within ``forward``: the caller goes on to ask the cache for something before the next operation."""
        ...

    def replay_part(self) -> None:
        """What ``forward`` asked for between two calls of ``end_part`` is asked for again, in a replayed step.

        The caller replays every part, in order, and asks the cache in between for what it asked then. Where nothing
        streams there is nothing to ask for: ``run_step`` replays the whole step.
        """
        ...

    def buffer(self, name: str, width: int) -> DeviceArray:
        """A workspace array as float32 [n_tokens, width]; ``width`` may be below what the plan set aside."""
        ...

    def rows(self, name: str, begin: int, end: int, width: int) -> DeviceArray:
        """Rows ``[begin, end)`` of a workspace array of that width."""
        ...

    def has_weight(self, name: str) -> bool:
        """Whether the file has this weight, for those that only some files of a family have."""
        ...

    def weight_rows(self, name: str) -> int:
        """How many outputs a weight matrix has, for those that files of a family have in several widths."""
        ...

    def embed(self, weight: str, out: DeviceArray) -> None:
        """Embedding rows of the step's tokens."""
        ...

    def rms_norm(self, x: DeviceArray, weight: str, out: DeviceArray, *, factor: float = 1.0) -> None:
        """``out = x / sqrt(mean(x^2) + eps) * weight * factor`` for each row."""
        ...

    def add_normed(self, x: DeviceArray, weight: str, residual: DeviceArray, *, scale: str | None = None) -> None:
        """``residual += rms_norm(x)``, all times the single number ``scale`` where one is named; ``x`` may be used."""
        ...

    def add_normed_pair(
        self,
        x: DeviceArray,
        y: DeviceArray,
        weights: tuple[str, str, str],
        residual: DeviceArray,
        *,
        scale: str | None = None,
    ) -> None:
        """``add_normed`` by the last weight of what ``rms_norm`` of ``x`` and of ``y`` by the others add up to.

        Both may be used.
        """
        ...

    def norm_first(self, x: DeviceArray, weight: str) -> None:
        """``rms_norm`` of as many first elements of each row as the weight has, in place; the others stay."""
        ...

    def norm_heads(self, x: DeviceArray, weight: str | None, n_head: int) -> None:
        """``rms_norm`` of each of ``n_head`` heads of each row, in place; without a weight all elements count alike."""
        ...

    def matmul(self, weights: Sequence[str], x: DeviceArray, outs: Sequence[DeviceArray]) -> None:
        """``out = x @ weight^T + bias`` for each of several weights that share the input."""
        ...

    def gated_matmul(
        self,
        weights: tuple[str, str],
        x: DeviceArray,
        gate: DeviceArray,
        up: DeviceArray,
        activation: GatedActivation = GatedActivation.SILU,
    ) -> None:
        """``matmul`` of both weights, then ``gate = activation(gate) * up``.

        ``gate`` is for the product that follows and nothing else; what ``up`` holds is the backend's business.
        """
        ...

    def matmul_add(self, weight: str, x: DeviceArray, residual: DeviceArray, product: DeviceArray) -> None:
        """``residual = residual + (x @ weight^T + bias)``; ``product`` may be used, as wide as ``residual``."""
        ...

    def matmul_heads(self, weight: str, x: DeviceArray, out: DeviceArray, n_head: int) -> None:
        """``out = weight of the head @ first elements``, then the rest of the head as it is, for each of ``n_head``.

        ``weight`` holds a matrix for each head, one after another. A head of ``x`` may be longer than its matrix takes;
        what is left over follows the product in ``out``.
        """
        ...

    def rope(self, x: DeviceArray, n_head: int, *, in_window: bool = False, begin: int = 0) -> None:
        """Rotate ``n_head`` heads of each row by the row's position, in place; ``in_window`` as window layers do.

        A head's elements before ``begin``, and those behind the elements that RoPE turns, stay.
        """
        ...

    def scale_by_log_position(self, x: DeviceArray, scale: float, n_step: int) -> None:
        """``x *= 1 + scale * ln(floor(pos / n_step) + 1)`` for each row, by the row's position."""
        ...

    def resize_heads(self, x: DeviceArray, n_head: int, out: DeviceArray) -> None:
        """Each of ``n_head`` heads of each row at the head size of ``out``: zeros are added, or its end left out."""
        ...

    def rotate_heads(self, x: DeviceArray, rotation: Rotation, *, inverse: bool = False) -> None:
        """Multiply each ``rotation.size`` elements of each row by the rotation's matrix or its inverse, in place."""
        ...

    def take_columns(self, x: DeviceArray, begin: int, out: DeviceArray) -> None:
        """``out`` = as many columns of ``x`` as it is wide, from column ``begin`` on."""
        ...

    def silu_mul(self, gate: DeviceArray, up: DeviceArray) -> None:
        """``gate = silu(gate) * up`` in place."""
        ...

    def gelu_mul(self, gate: DeviceArray, up: DeviceArray) -> None:
        """``gate = gelu(gate) * up`` in place, with the tanh form of GELU."""
        ...

    def softplus_gate(self, gate: DeviceArray, x: DeviceArray) -> None:
        """``x = x * ln(1 + e^gate)`` in place; each gate of a row is for as many elements, one after another."""
        ...

    def scale(self, x: DeviceArray, factor: float) -> None:
        """``x = x * factor`` in place."""
        ...

    def softcap(self, x: DeviceArray, cap: float) -> None:
        """``x = cap * tanh(x / cap)`` in place."""
        ...

    def add(self, x: DeviceArray, y: DeviceArray) -> None:
        """``x = x + y`` in place."""
        ...

    def route(
        self, router: DeviceArray, experts: ExpertShape, bias: str | None = None, scales: str | None = None
    ) -> None:
        """Choose experts for each token by the logits in ``router``, the lower index first among equals.

        ``bias`` names a vector that is added to the weights for the choice alone, ``scales`` one whose entry of an
        expert its weight is multiplied by at the end. What ``router`` holds afterwards is the backend's business.

        Holds for the expert operations until the next call. They work on *pairs* of a token and an expert it takes,
        one row for each; how these are ordered is the backend's business.
        """
        ...

    def gated_experts(
        self,
        weights: Sequence[str],
        x: DeviceArray,
        pairs: DeviceArray,
        gate: DeviceArray,
        up: DeviceArray,
        activation: GatedActivation,
    ) -> None:
        """For each pair what the activation makes of its expert's gate and up matrices times the token's row of ``x``.

        ``weights`` names both matrices, or one in which the gate's rows of every expert come before those of up. With
        two, a ``.bias`` of the same name, one row an expert, is added to a product.

        The result is in ``gate``, [n_tokens, n_used * width], for ``from_experts`` and nothing else; ``pairs``, as wide
        as ``n_used`` rows of ``x``, and ``up`` may be used.

        Costs reading the experts that some token takes, whatever their number.
        """
        ...

    def from_experts(self, weight: str, gate: DeviceArray, pairs: DeviceArray, out: DeviceArray) -> None:
        """``out`` = sum of the products of each token's pairs times their routing weights, the most likely first.

        The product is that of the expert's matrix, and its bias, with the row that ``gated_experts`` left in ``gate``;
        ``pairs``, as wide as ``n_used`` rows of ``out``, may be used.
        """
        ...

    def sigmoid_gate(self, x: DeviceArray, weight: str, y: DeviceArray) -> None:
        """``y *= sigmoid(x . weight)`` for each row; ``weight`` is a vector."""
        ...

    def split_groups(self, both: DeviceArray, first: DeviceArray, second: DeviceArray, width: int) -> None:
        """Rows of ``both`` are groups of ``2 * width``: the first half of each goes to ``first``, the other on."""
        ...

    def sigmoid_mul(self, x: DeviceArray, gate: DeviceArray) -> None:
        """``x = x * sigmoid(gate)`` in place."""
        ...

    def short_convolution(self, layer_idx: int, weight: str, x: DeviceArray, out: DeviceArray) -> None:
        """``out`` = silu of each channel's last inputs, its own included, times ``weight``.

        Inputs of earlier steps come from what the layer remembers, and this step's go there; position 0 has none.
        ``out`` is for ``delta_net`` and nothing else: how the heads lie there is the backend's business.
        """
        ...

    def delta_net(
        self,
        layer_idx: int,
        vectors: tuple[str, str, str],
        heads: DeviceArray,
        beta: DeviceArray,
        decay: DeviceArray,
        out: DeviceArray,
        gate: DeviceArray,
    ) -> None:
        """The gated delta rule over the step's tokens in order, for each value head with a matrix M that it keeps::

            M *= exp(rate * softplus(decay + bias));  M += k outer sigmoid(beta) (v - k M);  out = q M / sqrt(head_dim)

        and then ``gate = silu(gate) * norm_heads(out)`` for the product that follows and nothing else.

        ``vectors`` names (bias, rate, norm); ``heads`` are as the convolution left them, and q and k are first divided
        by their lengths. M is 0 before position 0. All arrays may be overwritten.
        """
        ...

    def store_rows(
        self, layer: int, geometry: PageGeometry, offsets: array[int], k: DeviceArray, v: DeviceArray | None
    ) -> None:
        """Write the step's K and V rows of one KV layer into its pages, quantised to the page's types.

        There is no ``v`` where the page keeps values as a part of the keys.
        """
        ...

    def rotate_store(
        self,
        layer: int,
        geometry: PageGeometry,
        offsets: array[int],
        q: DeviceArray,
        k: DeviceArray,
        v: DeviceArray,
        *,
        in_window: bool = False,
        rotations: HeadRotations | None = None,
    ) -> None:
        """``rope`` of ``q`` and ``k``, the layer's rotations of ``q``, ``k`` and ``v``, then ``store_rows``.

        What ``k`` and ``v`` hold afterwards is the backend's business.
        """
        ...

    def begin_attention(self, n_head: int, head_dim_v: int, out: DeviceArray, sinks: str | None = None) -> None:
        """Reset the running attention of the step's tokens; its result will go to ``out``.

        ``sinks`` names a vector with one score a head that takes its share of the weights and brings no value.
        """
        ...

    def attend_span(
        self,
        layer: int,
        geometry: PageGeometry,
        offsets: array[int],
        page_begin: int,
        page_end: int,
        q: DeviceArray,
        rule: AttentionRule,
    ) -> None:
        """Fold pages ``[page_begin, page_end)`` into the running attention; causal by position.

        Ranges follow each other from page 0, or from the first that a token's window reaches, to the page of the
        step's last token, which ends the attention.
        """
        ...

    def finish_attention(self) -> None:
        """``out`` of ``begin_attention`` = sum / weight; a token that saw no key gets zeros."""
        ...

    def to_host(self, x: DeviceArray) -> NDArray[np.float32]:
        """The values of ``x`` as a host array, valid until the next operation."""
        ...

    def close(self) -> None:
        """Free what belongs to this session alone; its arena is closed afterwards."""
        ...

    def synchronise(self) -> None:
        """Return once everything asked for has been computed, so that the caller may read a clock."""
        ...
