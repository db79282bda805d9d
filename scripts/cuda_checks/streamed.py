"""Products that stream their weights: the bits of the portable kernels, whoever normalises and quantises the input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from numba import cuda

from cuda_kernels import gated_matvec, matvec
from cuda_kernels.activation import Activation
from cuda_kernels.matvec_stream import can_stream
from cuda_kernels.quantise import norm_quantise
from cuda_kernels.vector_input import Norm, VectorInput
from cuda_kernels.weight_ring import STREAMED_TYPES
from cuda_kernels.weights import WeightGeometry
from scripts.cuda_checks.attention import poisoned
from scripts.cuda_checks.fused import quantised
from scripts.cuda_checks.report import Check, Outcome, same_bits
from scripts.cuda_checks.weights import random_blocks, upload

EPS = 1e-5
SHAPES = (
    *((130, 1280, 4), (4099, 4096, 1), (300, 14336, 2), (9, 256, 8)),
    *((40, 256, 1), (200, 14336, 1), (100, 18432, 1)),
)
"""Rows, columns, vectors; of one vector that is not quantised yet a thread takes one, two, seven or nine parts."""
ACTIVATIONS = (Activation.GELU_TANH, Activation.SILU)


class Products:
    """One pair of matrices, multiplied with the same vectors in every way."""

    def __init__(
        self, weight_type: GGMLQuantizationType, n_rows: int, n_cols: int, n_vectors: int, activation: Activation
    ) -> None:
        self.activation = activation
        rng = np.random.default_rng(n_cols)
        self.geometry = WeightGeometry(weight_type=weight_type, n_rows=n_rows, n_cols=n_cols)
        self.matrices = [upload(self.geometry, random_blocks(self.geometry, rng)) for _ in range(2)]
        x = rng.standard_normal((n_vectors, n_cols), dtype=np.float32)
        x[-1] *= np.float32(1e30)  # its squares are beyond float32
        if n_vectors > 2:
            x[1] = 0.0
        self.x, self.weight = cuda.to_device(x), cuda.to_device(rng.standard_normal(n_cols, dtype=np.float32))
        self.shape = (n_vectors, n_rows)

    def multiply(self, vectors: Any, scales: Any | None, **options: Any) -> list[np.ndarray]:
        """The product with the first matrix, and gate and up with the activation."""
        d_out, d_gated = poisoned(self.shape), poisoned(self.shape)
        product = matvec.Product(matrix=self.matrices[0], geometry=self.geometry, out=d_out)
        matvec.matvec([product], vectors, scales, is_added=False, stream=0, **options)
        arrays = (*self.matrices, vectors, scales, d_gated)
        common = {"geometry": self.geometry, "activation": self.activation, "stream": 0}
        gated_matvec.gated_matvec(*arrays, **common, **options)
        return [d_out.copy_to_host(), d_gated.copy_to_host()]

    def multiply_portably(self, vectors: Any, scales: Any) -> list[np.ndarray]:
        """The same by the kernels that every device has."""
        modules = (matvec, gated_matvec)
        try:
            for module in modules:
                module.can_stream = lambda: False  # type: ignore[attr-defined]
            return self.multiply(vectors, scales)
        finally:
            for module in modules:
                module.can_stream = can_stream  # type: ignore[attr-defined]


def check_streamed(
    weight_type: GGMLQuantizationType, n_rows: int, n_cols: int, n_vectors: int, activation: Activation
) -> Iterator[Outcome]:
    products = Products(weight_type, n_rows, n_cols, n_vectors, activation)
    name = f"{n_rows}x{n_cols} x {n_vectors} {activation.value}"
    whats = ("product", "gate and up")
    portable = products.multiply_portably(*quantised(products.x))
    for what, got, wanted in zip(whats, products.multiply(*quantised(products.x)), portable, strict=True):
        yield same_bits(f"{name} {what}: bits of the portable kernel", got, wanted)
    if not matvec.takes_floats(weight_type, n_vectors, [n_rows], n_cols):
        return
    floats = products.multiply(products.x, None, kind=VectorInput.FLOATS)
    for what, got, wanted in zip(whats, floats, portable, strict=True):
        yield same_bits(f"{name} {what} of floats", got, wanted)

    d_normed, d_own_normed = poisoned((n_vectors, n_cols)), poisoned((n_vectors, n_cols))
    quants, scales = poisoned((n_vectors, n_cols), np.int8), poisoned((n_vectors, n_cols // 16, 2))
    norm_quantise(products.x, products.weight, d_normed, quants, scales, eps=EPS, stream=0)
    norm = Norm(weight=products.weight, out=d_own_normed, eps=EPS)
    separate = products.multiply(quants, scales)
    together = products.multiply(products.x, None, kind=VectorInput.NORMED, norm=norm)
    for what, got, wanted in zip(whats, together, separate, strict=True):
        yield same_bits(f"{name} {what} of normalised floats", got, wanted)
    yield same_bits(f"{name} normalised floats", d_own_normed.copy_to_host(), d_normed.copy_to_host())


def checks() -> Iterator[Check]:
    for weight_type in STREAMED_TYPES:

        def run(weight_type: GGMLQuantizationType = weight_type) -> Iterator[Outcome]:
            for i, shape in enumerate(SHAPES):
                yield from check_streamed(weight_type, *shape, ACTIVATIONS[i % 2])

        yield Check(family="streamed", case=weight_type.name, run=run)
