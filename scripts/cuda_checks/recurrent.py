"""Recurrent layers: the convolution and the delta net against float64, and steps against steps of one token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numba import cuda

from cuda_kernels.convolution import short_convolution
from cuda_kernels.delta_gates import delta_gates, norm_gate
from cuda_kernels.delta_net import delta_net_prompt, delta_net_step
from cuda_kernels.delta_tiles import tile_elements
from cuda_kernels.elementwise import sigmoid_mul, split_groups
from kvs_core.recurrent_shape import RecurrentShape
from scripts.cuda_checks.attention import poisoned
from scripts.cuda_checks.report import Check, Outcome, close, same_bits
from tests.kernels.recurrent_inputs import EPS, Inputs, by_formula, random_inputs
from tests.oracles import delta_net as oracle

TIMES = 4.0
SHAPES = {
    "3 of 1 x 128": RecurrentShape(n_head_k=1, n_head_v=3, head_dim=128, n_taps=4, groups_values=False),
    "4 of 2 x 64, grouped": RecurrentShape(n_head_k=2, n_head_v=4, head_dim=64, n_taps=4, groups_values=True),
    "2 of 2 x 32, 2 taps": RecurrentShape(n_head_k=2, n_head_v=2, head_dim=32, n_taps=2, groups_values=False),
    "2 of 1 x 96, 5 taps": RecurrentShape(n_head_k=1, n_head_v=2, head_dim=96, n_taps=5, groups_values=True),
}


@dataclass
class Layer:
    """One layer's arrays on the device; the state is full of NaN: nothing of it may be seen at position 0."""

    sizes: RecurrentShape
    inputs: Inputs
    norm: np.ndarray
    gates: np.ndarray

    def __post_init__(self) -> None:
        sizes, inputs = self.sizes, self.inputs
        self.d_taps, self.d_norm = cuda.to_device(inputs.taps), cuda.to_device(self.norm)
        self.d_bias, self.d_rate = cuda.to_device(inputs.bias), cuda.to_device(inputs.rate)
        self.d_earlier = cuda.to_device(np.full(sizes.conv_shape, np.nan, np.float32))
        self.d_state = cuda.to_device(np.full(sizes.n_inner * sizes.head_dim, np.nan, np.float32))

    def convolve(self, begin: int, end: int) -> tuple[Any, ...]:
        """Heads, beta, decay and positions of some tokens, the convolution's memory moved on."""
        d_positions = cuda.to_device(np.arange(begin, end, dtype=np.int32))
        d_heads = poisoned((end - begin, self.sizes.n_channels))
        arrays = (cuda.to_device(self.inputs.x[begin:end]), self.d_taps, self.d_earlier, d_positions, d_heads)
        short_convolution(*arrays, sizes=self.sizes, eps=EPS, stream=0)
        rows = (cuda.to_device(array[begin:end]) for array in (self.inputs.beta, self.inputs.decay))
        return d_heads, *rows, d_positions

    def prompt(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Heads, outputs of the net, and their norm and gate as float16, for tokens [begin, end)."""
        d_heads, d_beta, d_decay, d_positions = self.convolve(begin, end)
        delta_gates(d_beta, d_decay, bias=self.d_bias, rate=self.d_rate, stream=0)
        d_out = poisoned((end - begin, self.sizes.n_inner))
        delta_net_prompt(d_heads, d_beta, d_decay, self.d_state, d_positions, d_out, sizes=self.sizes, stream=0)
        d_half = poisoned((end - begin, self.sizes.n_inner), np.float16)
        norm_gate(d_out, self.d_norm, cuda.to_device(self.gates[begin:end]), d_half, eps=EPS, stream=0)
        return d_heads.copy_to_host(), d_out.copy_to_host(), d_half.copy_to_host()

    def step(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Gated outputs, their quants and scales, for tokens [begin, end) of a decode step."""
        d_heads, d_beta, d_decay, d_positions = self.convolve(begin, end)
        d_gate = cuda.to_device(self.gates[begin:end])
        d_quants = poisoned((end - begin, self.sizes.n_inner), np.int8)
        d_scales = poisoned((end - begin, self.sizes.n_inner // 16, 2))
        delta_net_step(
            d_heads,
            d_beta,
            d_decay,
            self.d_state,
            d_positions,
            gates=(self.d_bias, self.d_rate),
            weight=self.d_norm,
            gate=d_gate,
            quants=d_quants,
            scales=d_scales,
            sizes=self.sizes,
            eps=EPS,
            stream=0,
        )
        return d_gate.copy_to_host(), d_quants.copy_to_host(), d_scales.copy_to_host()

    def matrices(self) -> np.ndarray:
        """The state as [n_head_v, keys, values]."""
        sizes = self.sizes
        matrices = np.empty((sizes.n_head_v, sizes.head_dim, sizes.head_dim), np.float32)
        rows, columns = tile_elements(sizes.head_dim)
        matrices[:, rows, columns] = self.d_state.copy_to_host().reshape(sizes.n_head_v, -1)
        return matrices

    def memory(self) -> list[np.ndarray]:
        return [self.d_earlier.copy_to_host(), self.d_state.copy_to_host()]


def random_layer(sizes: RecurrentShape, n_tokens: int) -> Layer:
    rng = np.random.default_rng(n_tokens)
    gates = 2.0 * rng.standard_normal((n_tokens, sizes.n_inner))
    norm = rng.standard_normal(sizes.head_dim)
    return Layer(sizes, random_inputs(sizes, n_tokens), norm.astype(np.float32), gates.astype(np.float32))


def normed_and_gated(layer: Layer, out: np.ndarray) -> np.ndarray:
    """By the formula, in the type of ``out``."""
    dtype = out.dtype.type
    heads = out.reshape(-1, layer.sizes.head_dim)
    mean = (heads * heads).mean(axis=-1, keepdims=True)
    normed = heads / np.sqrt(mean + dtype(EPS)) * layer.norm.astype(dtype)
    gates = layer.gates[: len(out)].astype(dtype)
    return np.asarray(gates / (dtype(1.0) + np.exp(-gates)) * normed.reshape(out.shape))


def unit_heads_of(layer: Layer, dtype: type[np.floating]) -> np.ndarray:
    """What the convolution leaves, [n_tokens, n_channels]."""
    sizes = layer.sizes
    mixed = oracle.short_convolution(layer.inputs.x, layer.inputs.taps, dtype=dtype).astype(dtype)
    heads = mixed.reshape(len(mixed), sizes.n_head, sizes.head_dim).copy()
    heads[:, : 2 * sizes.n_head_k] = oracle.unit_heads(heads[:, : 2 * sizes.n_head_k], EPS)
    heads[:, : sizes.n_head_k] /= np.sqrt(dtype(sizes.head_dim))
    return heads.reshape(len(mixed), -1)


def check_prompt(sizes: RecurrentShape, n_tokens: int, cuts: Sequence[int]) -> Iterator[Outcome]:
    """A prompt at once and in pieces that end at ``cuts``."""
    layer = random_layer(sizes, n_tokens)
    heads, out, half = layer.prompt(0, n_tokens)
    yield close("convolution", heads, unit_heads_of(layer, np.float64), unit_heads_of(layer, np.float32), times=TIMES)
    exact, exact_matrices = by_formula(layer.inputs, sizes, np.float64)
    plain, plain_matrices = by_formula(layer.inputs, sizes, np.float32)
    yield close("delta net", out, exact, plain, times=TIMES)
    yield close("matrices", layer.matrices(), exact_matrices, plain_matrices, times=TIMES)
    rounded = normed_and_gated(layer, plain.astype(np.float32)).astype(np.float16)
    yield close("norm and gate", half, normed_and_gated(layer, exact), rounded, times=TIMES)
    earlier = np.concatenate([np.zeros(sizes.conv_shape, np.float32), layer.inputs.x])
    yield same_bits("inputs that are kept", layer.memory()[0], earlier[-(sizes.n_taps - 1) :])

    whole = layer.memory()
    bounds = [0, *cuts, n_tokens]
    again = [layer.prompt(begin, end) for begin, end in pairwise(bounds)]
    for what, parts, expected in zip(("heads", "outputs"), zip(*again, strict=True), (heads, out), strict=False):
        yield same_bits(f"{what} of micro-batches", np.concatenate(parts), expected)
    for what, got, expected in zip(("inputs", "state"), layer.memory(), whole, strict=True):
        yield same_bits(f"{what} after micro-batches", got, expected)


def check_steps(sizes: RecurrentShape, n_prompt: int, steps: Sequence[int]) -> Iterator[Outcome]:
    """Decode steps after a prompt, or from position 0: by float64, and the bits of single tokens."""
    n_tokens = n_prompt + sum(steps)
    layer = random_layer(sizes, n_tokens)

    def run(lengths: Sequence[int]) -> list[np.ndarray]:
        if n_prompt:
            layer.prompt(0, n_prompt)
        bounds = np.cumsum([n_prompt, *lengths]).tolist()
        done = [layer.step(begin, end) for begin, end in pairwise(bounds)]
        return [np.concatenate(parts) for parts in zip(*done, strict=True)] + layer.memory()

    grouped, single = run(steps), run([1] * sum(steps))
    names = ("gated outputs", "quants", "scales", "inputs", "state")
    for what, got, expected in zip(names, grouped, single, strict=True):
        yield same_bits(f"{what} of steps {steps}", got, expected)
    exact, exact_matrices = by_formula(layer.inputs, sizes, np.float64)
    plain, plain_matrices = by_formula(layer.inputs, sizes, np.float32)
    gated = [normed_and_gated(layer, outs)[n_prompt:] for outs in (exact, plain.astype(np.float32))]
    yield close("gated outputs", single[0], *gated, times=TIMES)
    yield close("matrices", layer.matrices(), exact_matrices, plain_matrices, times=TIMES)
    quants = single[1].astype(np.float64).reshape(sum(steps), -1, 16) * single[2][..., :1]
    largest = np.abs(single[0].reshape(sum(steps), -1, 32)).max(axis=-1).repeat(2, axis=-1)[..., None]
    off = np.abs(quants - single[0].reshape(quants.shape)) / np.maximum(largest, 1e-30)
    yield Outcome(what="8-bit form", error=float(off.max()), bound=0.501 / 127)


def check_gates(width: int) -> Iterator[Outcome]:
    rng = np.random.default_rng(width)
    both = rng.standard_normal((5, 6 * width), dtype=np.float32)
    d_first, d_second = poisoned((15 * width,)), poisoned((15 * width,))
    split_groups(cuda.to_device(both.reshape(-1)), d_first, d_second, width=width, stream=0)
    groups = both.reshape(-1, 2, width)
    for what, got, expected in (("first", d_first, groups[:, 0]), ("second", d_second, groups[:, 1])):
        yield same_bits(f"{what} halves of {width}", got.copy_to_host(), np.ascontiguousarray(expected).reshape(-1))
    x, gate = groups[:, 0].reshape(5, -1).copy(), 9.0 * groups[:, 1].reshape(5, -1)
    gate[0, :2] = (-200.0, 200.0)
    d_x = cuda.to_device(x.reshape(-1))
    sigmoid_mul(d_x, cuda.to_device(gate.reshape(-1)), stream=0)

    def reference(dtype: type[np.floating]) -> np.ndarray:
        with np.errstate(over="ignore"):
            return np.asarray(x.astype(dtype) / (dtype(1.0) + np.exp(-gate.astype(dtype))))

    got = d_x.copy_to_host().reshape(x.shape)
    yield close(f"sigmoid times {width}", got, reference(np.float64), reference(np.float32), times=TIMES)


def checks() -> Iterator[Check]:
    for name, sizes in SHAPES.items():
        for n_tokens, cuts in ((1, ()), (2, (1,)), (33, (1, 32)), (150, (16, 17, 50, 114))):
            yield Check(
                family="recurrent",
                case=f"prompt {name}",
                run=lambda s=sizes, n=n_tokens, c=cuts: check_prompt(s, n, c),
            )
        for n_prompt, steps in ((40, (8, 5, 1, 2)), (0, (1, 3)), (0, (8,))):
            yield Check(
                family="recurrent", case=f"steps {name}", run=lambda s=sizes, n=n_prompt, t=steps: check_steps(s, n, t)
            )
    for width in (2, 3, 64, 256):
        yield Check(family="recurrent", case="gates", run=lambda w=width: check_gates(w))
