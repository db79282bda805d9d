"""Time the recurrent half of a hybrid model's layers on a CUDA device, beside what their bytes cost.

    python -m scripts.measure_cuda_recurrent [--heads 16 48] [--tokens 4096] [--layers 48]

Decode: convolution and delta net (norm, gate and 8-bit form included) of steps of 1, 2, 4 and 8 tokens, all layers in
one graph, early starts as in recorded steps. Prefill: every kernel of a layer apart, the delta net with other shapes of
a block beside the one that is used.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numba import cuda

from cuda_kernels.convolution import short_convolution
from cuda_kernels.delta_gates import delta_gates, norm_gate
from cuda_kernels.delta_net import PREFILL_COLUMNS, PREFILL_TOKENS, build_delta_net_kernel, delta_net_step
from cuda_kernels.launch import address_of
from kvs_core.recurrent_shape import RecurrentShape
from scripts.cuda_checks.timing import copy_gigabytes_per_second, graph_microseconds

EPS = 1e-6
BLOCKS = ((32, 32), (64, 8), (64, 16), (64, 32), (128, 16))


class Arrays:
    """Arrays of steps of ``n_tokens`` tokens, and a state for each layer, so that none stays in the cache."""

    def __init__(self, sizes: RecurrentShape, n_tokens: int, n_layers: int) -> None:
        rng = np.random.default_rng(n_tokens)

        def normal(*shape: int) -> Any:
            return cuda.to_device(rng.standard_normal(shape, dtype=np.float32))

        self.sizes = sizes
        self.x, self.heads = normal(n_tokens, sizes.n_channels), normal(n_tokens, sizes.n_channels)
        self.taps, self.norm = normal(sizes.n_taps, sizes.n_channels), normal(sizes.head_dim)
        self.beta, self.decay = normal(n_tokens, sizes.n_head_v), normal(n_tokens, sizes.n_head_v)
        self.bias, self.rate = normal(sizes.n_head_v), cuda.to_device(-np.ones(sizes.n_head_v, np.float32))
        self.gate, self.out = normal(n_tokens, sizes.n_inner), normal(n_tokens, sizes.n_inner)
        self.half = cuda.device_array((n_tokens, sizes.n_inner), np.float16)
        self.quants = cuda.device_array((n_tokens, sizes.n_inner), np.int8)
        self.scales = cuda.device_array((n_tokens, sizes.n_inner // 16, 2), np.float32)
        self.positions = cuda.to_device(np.arange(7, 7 + n_tokens, dtype=np.int32))
        self.earlier = [normal(*sizes.conv_shape) for _ in range(n_layers)]
        self.states = [normal(sizes.n_inner * sizes.head_dim) for _ in range(n_layers)]

    def convolve(self, layer: int, stream: Any) -> None:
        arrays = (self.x, self.taps, self.earlier[layer], self.positions, self.heads)
        short_convolution(*arrays, sizes=self.sizes, eps=EPS, stream=stream)

    def step(self, layer: int, stream: Any) -> None:
        delta_net_step(
            self.heads,
            self.beta,
            self.decay,
            self.states[layer],
            self.positions,
            gates=(self.bias, self.rate),
            weight=self.norm,
            gate=self.gate,
            quants=self.quants,
            scales=self.scales,
            sizes=self.sizes,
            eps=EPS,
            stream=stream,
        )

    def factors(self, stream: Any) -> None:
        delta_gates(self.beta, self.decay, bias=self.bias, rate=self.rate, stream=stream)

    def net(self, columns: int, n_held: int, stream: Any) -> None:
        kernel = build_delta_net_kernel(self.sizes, columns, n_held, False)
        inputs = [address_of(array) for array in (self.heads, self.beta, self.decay)]
        others = [address_of(array) for array in (self.states[0], self.positions, self.out)]
        grid = (self.sizes.n_head_v, self.sizes.head_dim // columns)
        kernel.launch(grid, stream, *inputs, 0, 0, *others, 0, 0, 0, 0, self.x.shape[0], 0.0)

    def finish(self, stream: Any) -> None:
        norm_gate(self.out, self.norm, self.gate, self.half, eps=EPS, stream=stream)


def prefill_kernels(arrays: Arrays) -> Iterator[tuple[str, Callable[[Any], None], float]]:
    """What it is called, the launch, and the bytes it reads and writes at least."""
    channels, inner = 4.0 * arrays.x.size, 4.0 * arrays.out.size
    yield "convolution", partial(arrays.convolve, 0), 2 * channels
    arrays_of_gates = 4.0 * arrays.beta.size
    yield "gates", arrays.factors, 4 * arrays_of_gates
    for columns, n_held in BLOCKS:
        used = ", used" if (columns, n_held) == (PREFILL_COLUMNS, PREFILL_TOKENS) else ""
        name = f"delta net, blocks of {columns} columns, {n_held} tokens held{used}"
        yield name, partial(arrays.net, columns, n_held), channels + inner
    yield "norm and gate", arrays.finish, 2.5 * inner


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, nargs=2, default=(16, 48), metavar=("KEY", "VALUE"))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=48)
    arguments = parser.parse_args()
    n_head_k, n_head_v = arguments.heads
    sizes = RecurrentShape(n_head_k=n_head_k, n_head_v=n_head_v, head_dim=128, n_taps=4, groups_values=False)
    stream = cuda.stream()
    rate = copy_gigabytes_per_second(stream)
    print(f"copy {rate:.0f} GB/s; {n_head_k} key and {n_head_v} value heads of 128, {arguments.layers} layers")
    state_bytes = 8.0 * sizes.n_inner * sizes.head_dim
    for n_tokens in (1, 2, 4, 8):
        arrays = Arrays(sizes, n_tokens, arguments.layers)
        convolutions, nets = ([partial(f, i) for i in range(arguments.layers)] for f in (arrays.convolve, arrays.step))
        both = [launch for pair in zip(convolutions, nets, strict=True) for launch in pair]
        figures = [graph_microseconds(launches, stream, overlapped=True) for launches in (convolutions, nets, both)]
        apart = graph_microseconds(both, stream)
        print(
            f"step of {n_tokens}: a layer {2 * figures[2]:.2f} us (without early starts {2 * apart:.2f}); convolutions "
            f"alone {figures[0]:.2f}, nets alone {figures[1]:.2f}; the state's bytes {state_bytes / rate / 1e3:.2f} us"
        )
    arrays = Arrays(sizes, arguments.tokens, 1)
    for name, launch, n_bytes in prefill_kernels(arrays):
        us = graph_microseconds([launch] * 3, stream)
        print(f"{arguments.tokens} tokens: {us:8.1f} us  {name}; its bytes {n_bytes / rate / 1e3:.0f} us")


if __name__ == "__main__":
    main()
