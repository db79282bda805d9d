"""Products with a matrix for each head: what ``operations.CudaOperations`` does for ``matmul_heads``. No kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuda_kernels.dequant import dequantise_rows
from cuda_kernels.head_matvec import HeadInput, head_matvec, take_heads
from cuda_kernels.product_operations import ProductOperations
from cuda_kernels.step_arrays import Rows
from cuda_kernels.unit_formats import GROUP_ELEMENTS
from kvs_core.cuda_scratch import tile_rows
from kvs_core.phase import Phase

_INPUTS = "head_inputs"


class HeadOperations(ProductOperations):
    """``matmul_heads``. The place of the heads' inputs holds them head after head, as the products read them."""

    _offsets: dict[str, int]

    def matmul_heads(self, weight: str, x: Rows, out: Rows, n_head: int) -> None:
        geometry = self._matrices[weight].geometry
        n_in, n_out = geometry.n_cols, geometry.n_rows // n_head
        heads = self._heads(x, n_head, x.width // n_head)
        results = self._heads(out, n_head, out.width // n_head)
        kind = HeadInput.HALVES if self._phase is Phase.PREFILL else HeadInput.of(geometry.weight_type)
        inputs, scales = self._head_inputs(kind, (n_head, x.n_rows, n_in))
        take_heads(heads, inputs, scales, results, n_in=n_in, n_out=n_out, stream=self._stream)
        if kind is HeadInput.HALVES:
            self._multiply_head_tiles(weight, out, n_head)
        else:
            data = self._matrices[weight].data
            head_matvec(data, inputs, scales, results, geometry=geometry, stream=self._stream)

    def _head_inputs(self, kind: HeadInput, shape: tuple[int, int, int]) -> tuple[Any, Any]:
        """The inputs and, if they are quantised, their scales behind them."""
        at = self._offsets[_INPUTS]
        if kind is not HeadInput.QUANTS:
            dtype = np.float16 if kind is HeadInput.HALVES else np.float32
            return self._arena.view(at, shape, dtype), None
        n_head, n_tokens, n_in = shape
        scales = self._arena.view(
            at + n_head * n_tokens * n_in, (n_head, n_tokens, n_in // GROUP_ELEMENTS, 2), np.float32
        )
        return self._arena.view(at, shape, np.int8), scales

    def _multiply_head_tiles(self, weight: str, out: Rows, n_head: int) -> None:
        """As many heads at a time as have room for their weights in float16."""
        matrix = self._matrices[weight]
        geometry, base = matrix.geometry, self._arena.address
        scratch = base + self._scratch_at
        n_in, n_out, out_width = geometry.n_cols, geometry.n_rows // n_head, out.width // n_head
        step = max(1, tile_rows(n_in) // n_out)
        for first in range(0, n_head, step):
            n_here = min(step, n_head - first)
            tile = self._region(self._regions.tile, (n_here * n_out, n_in), np.float16)
            dequantise_rows(matrix.data, tile, geometry=geometry, first_row=first * n_out, stream=self._stream)
            self._products.multiply(
                weights=scratch + self._regions.tile,
                inputs=base + self._offsets[_INPUTS] + 2 * first * out.n_rows * n_in,
                out=base + out.offset + 4 * first * out_width,
                n_rows=n_out,
                n_tokens=out.n_rows,
                n_in=n_in,
                out_stride=out.width,
                workspace=scratch + self._regions.lt_workspace,
                stream=int(self._raw_stream),
                n_heads=n_here,
                head_stride=out_width,
            )
