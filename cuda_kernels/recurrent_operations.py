"""Recurrent layers on a CUDA device: what ``operations.CudaOperations`` does for the convolution and the delta net.

What a layer remembers lies in the arena at the same place in every phase. No kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from cuda_kernels.convolution import short_convolution
from cuda_kernels.delta_gates import delta_gates, norm_gate
from cuda_kernels.delta_net import delta_net_prompt, delta_net_step
from cuda_kernels.elementwise import sigmoid_mul, split_groups
from cuda_kernels.product_operations import ProductOperations
from cuda_kernels.step_arrays import Rows
from kvs_core.phase import Phase
from kvs_core.recurrent_state import RecurrentLayer


class RecurrentOperations(ProductOperations):
    """``short_convolution``, ``delta_net`` and the gates of hybrid models over the arrays of a step."""

    _taps: Mapping[str, Any]
    _eps: float

    def split_groups(self, both: Rows, first: Rows, second: Rows, width: int) -> None:
        arrays = (self._vector(both), self._vector(first), self._vector(second))
        split_groups(*arrays, width=width, stream=self._stream)

    def sigmoid_mul(self, x: Rows, gate: Rows) -> None:
        sigmoid_mul(self._vector(x), self._vector(gate), stream=self._stream)

    def short_convolution(self, layer_idx: int, weight: str, x: Rows, out: Rows) -> None:
        layer = self._recurrent[layer_idx]
        inputs = self._arena.view(layer.arena_offset, layer.recurrent.conv_shape, np.float32)
        arrays = (self._matrix(x), self._taps[weight], inputs, self._positions(), self._matrix(out))
        short_convolution(*arrays, sizes=layer.recurrent, eps=self._eps, stream=self._stream)

    def delta_net(
        self, layer_idx: int, vectors: tuple[str, str, str], heads: Rows, beta: Rows, decay: Rows, out: Rows, gate: Rows
    ) -> None:
        """In decode one launch that also leaves the 8-bit form of ``gate``; in prefill float16 for the product."""
        layer = self._recurrent[layer_idx]
        sizes = layer.recurrent
        bias, rate, norm = (self._vectors[name] for name in vectors)
        state = self._arena.view(layer.state_offset, (sizes.n_inner * sizes.head_dim,), np.float32)
        arrays = (self._matrix(heads), self._matrix(beta), self._matrix(decay), state, self._positions())
        if self._phase is Phase.DECODE:
            quants, scales = self._quantised(gate)
            delta_net_step(
                *arrays,
                gates=(bias, rate),
                weight=norm,
                gate=self._matrix(gate),
                quants=quants,
                scales=scales,
                sizes=sizes,
                eps=self._eps,
                stream=self._stream,
            )
        else:
            delta_gates(*arrays[1:3], bias=bias, rate=rate, stream=self._stream)
            delta_net_prompt(*arrays, self._matrix(out), sizes=sizes, stream=self._stream)
            outputs, half = (self._matrix(out), norm, self._matrix(gate)), self._halves(gate)
            norm_gate(*outputs, half, eps=self._eps, stream=self._stream)
            self._is_shrunk = False
        self._held = gate

    @cached_property
    def _recurrent(self) -> Mapping[int, RecurrentLayer]:
        return {layer.layer_idx: layer for layer in self._plan.recurrent_layers}
