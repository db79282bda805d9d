"""Norms, gates, factors and caps on a CUDA device: the small steps of ``operations.CudaOperations``. No kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cuda_kernels.activation import Activation, gated_activation
from cuda_kernels.add_normed import add_normed, add_normed_pair
from cuda_kernels.elementwise import add_in_place
from cuda_kernels.head_norms import MAX_ARRAYS, Heads, norm_heads
from cuda_kernels.norm import norm_first, rms_norm
from cuda_kernels.scaling import scale_in_place, softcap, softplus_gate, take_columns
from cuda_kernels.step_arrays import Rows, StepArrays
from kvs_core.phase import Phase


class RowOperations(StepArrays):
    """Operations on the arrays of a step that no product and no attention is part of."""

    _vectors: Mapping[str, Any]

    def add_normed(self, x: Rows, weight: str, residual: Rows, *, scale: str | None = None) -> None:
        arrays = (self._matrix(x), self._vectors[weight], self._matrix(residual))
        factor = None if scale is None else self._vectors[scale]
        add_normed(*arrays, scale=factor, eps=self._eps, stream=self._stream)

    def add_normed_pair(
        self, x: Rows, y: Rows, weights: tuple[str, str, str], residual: Rows, *, scale: str | None = None
    ) -> None:
        factors = [self._vectors[weight] for weight in weights]
        arrays = (self._matrix(x), self._matrix(y), factors, self._matrix(residual))
        factor = None if scale is None else self._vectors[scale]
        add_normed_pair(*arrays, scale=factor, eps=self._eps, stream=self._stream)

    def norm_first(self, x: Rows, weight: str) -> None:
        norm_first(self._matrix(x), self._vectors[weight], eps=self._eps, stream=self._stream)

    def norm_heads(self, x: Rows, weight: str | None, n_head: int) -> None:
        """In decode it waits for the norms of other heads that follow: one launch does up to three."""
        factors = None if weight is None else self._vectors[weight]
        rows = Rows(x.offset, x.n_rows * n_head, x.width // n_head)
        if self._phase is Phase.PREFILL or rows.width % 4:
            heads = self._matrix(rows)
            rms_norm(heads, factors, heads, eps=self._eps, stream=self._stream)
            return
        waiting = self._waiting_heads
        if self._waiting is not None or len(waiting) == MAX_ARRAYS or (waiting and waiting[0].x.shape[1] != rows.width):
            self._finish_waiting()
        self._held = None
        view = self._arena.view(rows.offset, (rows.n_rows, rows.width), np.float32)
        self._waiting_heads.append(Heads(x=view, weight=factors))

    def _norm_waiting_heads(self, heads: Sequence[Heads]) -> None:
        norm_heads(heads, eps=self._eps, stream=self._stream)

    def take_columns(self, x: Rows, begin: int, out: Rows) -> None:
        take_columns(self._matrix(x), begin, self._matrix(out), stream=self._stream)

    def silu_mul(self, gate: Rows, up: Rows) -> None:
        self._activate(gate, up, Activation.SILU)

    def gelu_mul(self, gate: Rows, up: Rows) -> None:
        self._activate(gate, up, Activation.GELU_TANH)

    def softplus_gate(self, gate: Rows, x: Rows) -> None:
        softplus_gate(self._matrix(gate), self._matrix(x), stream=self._stream)

    def scale(self, x: Rows, factor: float) -> None:
        scale_in_place(self._vector(x), factor, stream=self._stream)

    def softcap(self, x: Rows, cap: float) -> None:
        softcap(self._vector(x), cap, stream=self._stream)

    def add(self, x: Rows, y: Rows) -> None:
        add_in_place(self._vector(x), self._vector(y), stream=self._stream)

    def _activate(self, gate: Rows, up: Rows, activation: Activation) -> None:
        array = self._matrix(gate)
        gated_activation(array, self._matrix(up), array, activation=activation, stream=self._stream)
