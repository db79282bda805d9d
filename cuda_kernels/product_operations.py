"""Products with weight matrices on a CUDA device: what ``operations.CudaOperations`` does for ``matmul`` and its kin.

Prefill multiplies float16 tiles on tensor cores, decode reads quantised weights. No kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from cuda_kernels.activation import HALF_SHRINK, Activation, gated_activation, to_half
from cuda_kernels.dequant import dequantise_rows
from cuda_kernels.device_weights import DeviceMatrix
from cuda_kernels.elementwise import add_in_place
from cuda_kernels.gated_matvec import gated_matvec, gated_takes_floats
from cuda_kernels.launch import address_of
from cuda_kernels.matvec import MAX_MATRICES, Product, matvec, takes_floats
from cuda_kernels.products import LtProducts
from cuda_kernels.quantise import QUANT_BLOCK, norm_quantise, quantise
from cuda_kernels.row_operations import RowOperations
from cuda_kernels.row_units import takes_float_activations
from cuda_kernels.step_arrays import Rows, WaitingNorm
from cuda_kernels.unit_formats import GROUP_ELEMENTS
from cuda_kernels.vector_input import Norm, VectorInput
from kvs_core.activation_rule import GatedActivation
from kvs_core.cuda_scratch import tile_rows
from kvs_core.phase import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class _Input:
    """Arguments of a product; see ``matvec``."""

    vectors: Any
    scales: Any | None = None
    kind: VectorInput = VectorInput.QUANTS
    norm: Norm | None = None


ROUTER = ".ffn_gate_inp"


class ProductOperations(RowOperations):
    """``matmul``, ``gated_matmul`` and ``matmul_add`` over the arrays of a step."""

    _matrices: Mapping[str, DeviceMatrix]
    _products: LtProducts

    def has_weight(self, name: str) -> bool:
        return name in self._matrices or name in self._vectors

    def weight_rows(self, name: str) -> int:
        return self._matrices[name].geometry.n_rows

    def matmul(self, weights: Sequence[str], x: Rows, outs: Sequence[Rows]) -> None:
        if self._phase is Phase.DECODE:
            self._multiply_few(weights, x, outs, is_added=False)
            return
        if len(weights) == 1 and self._is_router(weights[0]):
            self._multiply_singles(weights[0], x, outs[0])
        else:
            self._multiply_tiles([self._matrices[name] for name in weights], x, outs)
        for name, out in zip(weights, outs, strict=True):
            bias = self._vectors.get(name + ".bias")
            if bias is not None:
                add_in_place(self._vector(out), bias, stream=self._stream)

    def _is_router(self, name: str) -> bool:
        """Whether a product decides on experts: rounded operands would choose others where two are close."""
        return name.endswith(ROUTER) and self._matrices[name].geometry.weight_type is GGMLQuantizationType.F32

    def gated_matmul(
        self,
        weights: tuple[str, str],
        x: Rows,
        gate: Rows,
        up: Rows,
        activation: GatedActivation = GatedActivation.SILU,
    ) -> None:
        kind = Activation(activation.value)
        gate_matrix, up_matrix = (self._matrices[name] for name in weights)
        geometry = gate_matrix.geometry
        has_bias = any(name + ".bias" in self._vectors for name in weights)
        if self._phase is Phase.PREFILL:
            self.matmul(weights, x, (gate, up))
            half = self._halves(gate)
            arrays = (self._matrix(gate), self._matrix(up), half)
            gated_activation(*arrays, activation=kind, stream=self._stream)
            self._held, self._is_shrunk = gate, True
            return
        if has_bias or geometry != up_matrix.geometry:
            self.matmul(weights, x, (gate, up))
            self._activate(gate, up, kind)
            return
        matrices = (gate_matrix.data, up_matrix.data)
        takes_floats = gated_takes_floats(geometry.weight_type, x.n_rows, geometry.n_rows, geometry.n_cols)
        inputs = self._input_of(geometry.weight_type, x, takes_floats=takes_floats)
        gated_matvec(
            *matrices,
            inputs.vectors,
            inputs.scales,
            self._matrix(gate),
            geometry=geometry,
            activation=kind,
            stream=self._stream,
            kind=inputs.kind,
            norm=inputs.norm,
        )

    def matmul_add(self, weight: str, x: Rows, residual: Rows, product: Rows) -> None:
        if self._phase is Phase.DECODE:
            self._multiply_few((weight,), x, (residual,), is_added=True)
            return
        self._multiply_tiles([self._matrices[weight]], x, (residual,), is_added=True)
        bias = self._vectors.get(weight + ".bias")
        if bias is not None:
            add_in_place(self._vector(residual), bias, stream=self._stream)

    def _multiply_singles(self, name: str, x: Rows, out: Rows) -> None:
        """A float32 matrix times float32 activations."""
        matrix = self._matrices[name]
        base, held = self._arena.address, self._held
        self._products.multiply(
            weights=address_of(matrix.data),
            inputs=base + x.offset,
            out=base + out.offset,
            n_rows=matrix.geometry.n_rows,
            n_tokens=x.n_rows,
            n_in=x.width,
            out_stride=matrix.geometry.n_rows,
            workspace=base + self._scratch_at + self._regions.lt_workspace,
            stream=int(self._raw_stream),
            is_single=True,
        )
        self._held = held if held != out else None

    def _multiply_few(self, weights: Sequence[str], x: Rows, outs: Sequence[Rows], *, is_added: bool) -> None:
        """Products of a few tokens; neighbours of one type are one launch."""
        of_type: dict[Any, list[tuple[str, Rows]]] = {}
        for name, out in zip(weights, outs, strict=True):
            of_type.setdefault(self._matrices[name].geometry.weight_type, []).append((name, out))
        is_one = len(of_type) == 1 and len(weights) <= MAX_MATRICES
        rows = [self._matrices[name].geometry.n_rows for name in weights]
        inputs = {
            weight_type: self._input_of(
                weight_type, x, takes_floats=is_one and takes_floats(weight_type, x.n_rows, rows, x.width)
            )
            for weight_type in of_type
        }
        held = self._held
        for weight_type, together in of_type.items():
            found = inputs[weight_type]
            for begin in range(0, len(together), MAX_MATRICES):
                products = [self._product(name, out) for name, out in together[begin : begin + MAX_MATRICES]]
                matvec(
                    products,
                    found.vectors,
                    found.scales,
                    is_added=is_added,
                    stream=self._stream,
                    kind=found.kind,
                    norm=found.norm,
                )
        if held == x and x not in outs:
            self._held = x  # another product may read it, too

    def _product(self, name: str, out: Rows) -> Product:
        matrix = self._matrices[name]
        return Product(
            matrix=matrix.data,
            geometry=matrix.geometry,
            bias=self._vectors.get(name + ".bias"),
            out=self._matrix(out),
        )

    def _input_of(self, weight_type: Any, x: Rows, *, takes_floats: bool) -> _Input:
        """What products with this weight type read; ``takes_floats``: they can normalise and quantise it themselves."""
        waiting = self._waiting
        if takes_floats and waiting is not None and waiting.out == x:
            self._waiting = None
            norm = Norm(weight=self._vectors[waiting.weight], out=self._matrix(x), eps=self._eps)
            return _Input(vectors=self._matrix(waiting.x), kind=VectorInput.NORMED, norm=norm)
        self._finish_waiting()
        if takes_float_activations(weight_type):
            held = self._held
            vectors = self._matrix(x)
            self._held = held  # it is read only
            return _Input(vectors=vectors)
        if takes_floats and self._held != x:
            return _Input(vectors=self._matrix(x), kind=VectorInput.FLOATS)
        quants, scales = self._quantised(x)
        if self._held != x:
            quantise(self._matrix(x), quants, scales, stream=self._stream)
            self._held = x
        return _Input(vectors=quants, scales=scales)

    def _normalise(self, norm: WaitingNorm) -> None:
        arrays = (self._matrix(norm.x), self._vectors[norm.weight], self._matrix(norm.out))
        norm_quantise(*arrays, *self._quantised(norm.out), eps=self._eps, stream=self._stream)
        self._held = norm.out

    def _is_input(self, x: Rows) -> bool:
        """Whether a product may read ``x`` as 8-bit blocks: then there is room for these."""
        return x.width in self._input_widths and x.width % QUANT_BLOCK == 0

    @cached_property
    def _input_widths(self) -> frozenset[int]:
        return frozenset(matrix.geometry.n_cols for matrix in self._matrices.values())

    def _quantised(self, x: Rows) -> tuple[Any, Any]:
        """Where the quantised form of ``x`` goes: one place for all."""
        quants = self._region(self._regions.activations, (x.n_rows, x.width), np.int8)
        return quants, self._region(self._regions.scales, (x.n_rows, x.width // GROUP_ELEMENTS, 2), np.float32)

    def _halves(self, x: Rows) -> Any:
        """Where the float16 form of ``x`` goes: one place for all."""
        return self._region(self._regions.activations, (x.n_rows, x.width), np.float16)

    def _multiply_tiles(
        self, matrices: Sequence[DeviceMatrix], x: Rows, outs: Sequence[Rows], *, is_added: bool = False
    ) -> None:
        if self._held != x:
            to_half(self._matrix(x), self._halves(x), factor=HALF_SHRINK, stream=self._stream)
            self._is_shrunk = True
        base = self._arena.address
        scratch = base + self._scratch_at
        for matrix, out in zip(matrices, outs, strict=True):
            geometry = matrix.geometry
            step = tile_rows(x.width)
            for first_row in range(0, geometry.n_rows, step):
                n_rows = min(step, geometry.n_rows - first_row)
                tile = self._region(self._regions.tile, (n_rows, x.width), np.float16)
                dequantise_rows(matrix.data, tile, geometry=geometry, first_row=first_row, stream=self._stream)
                self._products.multiply(
                    weights=scratch + self._regions.tile,
                    inputs=scratch + self._regions.activations,
                    out=base + out.offset + 4 * first_row,
                    n_rows=n_rows,
                    n_tokens=x.n_rows,
                    n_in=x.width,
                    out_stride=geometry.n_rows,
                    workspace=scratch + self._regions.lt_workspace,
                    stream=int(self._raw_stream),
                    is_added=is_added,
                    is_shrunk=self._is_shrunk,
                )
        self._held = x  # what the products wrote is something else
