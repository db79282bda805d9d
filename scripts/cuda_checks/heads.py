"""Products with a matrix for each head: of few tokens by kernels, of many by the library; what is left of a head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from numba import cuda

from cuda_kernels.dequant import dequantise_rows
from cuda_kernels.head_matvec import HeadInput, head_matvec, take_heads
from cuda_kernels.launch import address_of
from cuda_kernels.matvec import MAX_VECTORS
from cuda_kernels.products import LtProducts
from cuda_kernels.weights import FAST_TYPES, WeightGeometry
from kvs_core.cuda_scratch import LT_WORKSPACE_BYTES
from scripts.cuda_checks.attention import poisoned
from scripts.cuda_checks.report import Check, Outcome, close, same_bits
from scripts.cuda_checks.weights import exact_weights, random_blocks, upload

SHAPES = ((16, 128, 512, 64), (5, 512, 128, 0), (3, 96, 42, 7))
"""Heads, inputs and results of one, and elements that follow the inputs."""


class _Case:
    """A matrix of all heads, and rows of heads that are longer than it takes."""

    def __init__(self, weight_type: GGMLQuantizationType, shape: tuple[int, int, int, int], n_tokens: int) -> None:
        self.n_head, self.n_in, self.n_out, self.n_rest = shape
        rng = np.random.default_rng(self.n_in)
        self.geometry = WeightGeometry(weight_type=weight_type, n_rows=self.n_head * self.n_out, n_cols=self.n_in)
        blocks = random_blocks(self.geometry, rng)
        self.weights = exact_weights(self.geometry, blocks).reshape(self.n_head, self.n_out, self.n_in)
        self.d_matrix = upload(self.geometry, blocks)
        self.x = rng.standard_normal((n_tokens, self.n_head, self.n_in + self.n_rest), dtype=np.float32)

    def take(self, n_tokens: int, kind: HeadInput) -> tuple[Any, Any, Any]:
        """Inputs, scales and the results' place of the first tokens."""
        shape = (self.n_head, n_tokens, self.n_in)
        dtype = {HeadInput.QUANTS: np.int8, HeadInput.FLOATS: np.float32, HeadInput.HALVES: np.float16}[kind]
        d_inputs, d_scales = poisoned(shape, dtype), None
        if kind is HeadInput.QUANTS:
            d_scales = poisoned((self.n_head, n_tokens, self.n_in // 16, 2))
        d_out = poisoned((n_tokens, self.n_head, self.n_out + self.n_rest))
        d_x = cuda.to_device(self.x[:n_tokens])
        take_heads(d_x, d_inputs, d_scales, d_out, n_in=self.n_in, n_out=self.n_out, stream=0)
        return d_inputs, d_scales, d_out

    def used(self, d_inputs: Any, d_scales: Any) -> np.ndarray:
        """What the inputs stand for, float64 [n_head, n_tokens, n_in]."""
        inputs = np.asarray(d_inputs.copy_to_host().astype(np.float64))
        if d_scales is None:
            return inputs
        by_group = inputs.reshape(*inputs.shape[:2], -1, 16) * d_scales.copy_to_host()[..., :1].astype(np.float64)
        return np.asarray(by_group.reshape(inputs.shape))

    def product(self, used: np.ndarray, dtype: type) -> np.ndarray:
        """[n_tokens, n_head, n_out]"""
        return np.einsum("hti,hoi->tho", used.astype(dtype), self.weights.astype(dtype))

    def split(self, d_out: Any) -> tuple[np.ndarray, np.ndarray]:
        """Products, and what followed the inputs."""
        out = d_out.copy_to_host()
        return out[..., : self.n_out], out[..., self.n_out :]


def check_few_tokens(weight_type: GGMLQuantizationType, shape: tuple[int, int, int, int]) -> Iterator[Outcome]:
    case = _Case(weight_type, shape, MAX_VECTORS)
    label = f"{case.n_head} heads {case.n_in} to {case.n_out}"
    outputs = {}
    for n_tokens in (MAX_VECTORS, 1, 3):
        d_inputs, d_scales, d_out = case.take(n_tokens, HeadInput.of(weight_type))
        head_matvec(case.d_matrix, d_inputs, d_scales, d_out, geometry=case.geometry, stream=0)
        outputs[n_tokens], rest = case.split(d_out)
        yield same_bits(f"{label} x {n_tokens}: the rest", rest, case.x[:n_tokens, :, case.n_in :])
        if n_tokens == MAX_VECTORS:
            used = case.used(d_inputs, d_scales)
            step = np.abs(case.x).max() / 127.0 if d_scales is not None else 0.0
            off = np.abs(used - case.x[..., : case.n_in].transpose(1, 0, 2)).max()
            yield Outcome(what=f"{label}: inputs", error=float(off), bound=0.5001 * float(step) + 1e-6)
            exact, plain = case.product(used, np.float64), case.product(used, np.float32)
            yield close(f"{label} x {n_tokens}", outputs[n_tokens], exact, plain, times=8.0)
        else:
            yield same_bits(f"{label} x {n_tokens}: bits of 8", outputs[n_tokens], outputs[MAX_VECTORS][:n_tokens])


def check_many_tokens(weight_type: GGMLQuantizationType, shape: tuple[int, int, int, int]) -> Iterator[Outcome]:
    """The library's products of all heads at once, and of the second half alone."""
    n_tokens = 37
    case = _Case(weight_type, shape, n_tokens)
    d_inputs, _, d_out = case.take(n_tokens, HeadInput.HALVES)
    d_tile = poisoned((case.geometry.n_rows, case.n_in), np.float16)
    dequantise_rows(case.d_matrix, d_tile, geometry=case.geometry, first_row=0, stream=0)
    d_workspace = poisoned((LT_WORKSPACE_BYTES,), np.uint8)
    products, width = LtProducts(LT_WORKSPACE_BYTES), case.n_out + case.n_rest

    def multiply(first: int, n_heads: int, d_results: Any) -> None:
        products.multiply(
            weights=address_of(d_tile) + 2 * first * case.n_out * case.n_in,
            inputs=address_of(d_inputs) + 2 * first * n_tokens * case.n_in,
            out=address_of(d_results) + 4 * first * width,
            n_rows=case.n_out,
            n_tokens=n_tokens,
            n_in=case.n_in,
            out_stride=case.n_head * width,
            workspace=address_of(d_workspace),
            stream=0,
            n_heads=n_heads,
            head_stride=width,
        )

    multiply(0, case.n_head, d_out)
    cuda.synchronize()
    got, rest = case.split(d_out)
    label = f"{case.n_head} heads {case.n_in} to {case.n_out} x {n_tokens}"
    yield same_bits(f"{label}: the rest", rest, case.x[..., case.n_in :])
    used = case.used(d_inputs, None)
    rounded = _Case(weight_type, shape, 1)
    rounded.weights = case.weights.astype(np.float16).astype(np.float32)
    yield close(label, got, case.product(used, np.float64), rounded.product(used, np.float32), times=8.0)
    products.close()


def checks() -> Iterator[Check]:
    for weight_type in FAST_TYPES:
        is_whole = weight_type.name in ("F32", "F16", "BF16")
        shapes = [shape for shape in SHAPES if is_whole or shape[1] % 256 == 0 or "_K" not in weight_type.name]
        shapes = [shape for shape in shapes if weight_type.name != "IQ4_XS" or shape[1] % 256 == 0]
        for shape in shapes:

            def run(weight_type: GGMLQuantizationType = weight_type, shape: Any = shape) -> Iterator[Outcome]:
                yield from check_few_tokens(weight_type, shape)
                if shape[1] % 8 == shape[2] % 8 == shape[3] % 4 == 0:
                    yield from check_many_tokens(weight_type, shape)

            yield Check(family="heads", case=weight_type.name, run=run)
