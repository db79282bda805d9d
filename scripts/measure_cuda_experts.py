"""Time mixture-of-experts layers on a CUDA device against the bytes of the experts used.

    python -m scripts.measure_cuda_experts [--only SHAPE ...] [--portable]

Each shape is one layer whose experts stay in device memory; every launch finds other experts chosen. Kernels are
captured in a graph and may start early, as in a recorded decode step. ``layer``: route, gate and up, quantise, down
with the weighted sum, or those of them that the device needs. ``bytes``: the time that the experts' bytes take at the
rate of a copy. ``--portable``: with the kernels that every device has.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from numba import cuda

from cuda_kernels import expert_decode
from cuda_kernels.activation import Activation
from cuda_kernels.expert_decode import Router, expert_gated, expert_sum, gated_ring, sum_ring, sum_takes_floats
from cuda_kernels.expert_matvec import ExpertMatrix, GatedPair
from cuda_kernels.expert_prefill import expert_gated_tiles, expert_products, tile_pairs_for
from cuda_kernels.quantise import quantise
from cuda_kernels.routing import RoutingRule, combine, order_pairs, route
from cuda_kernels.weights import WeightGeometry
from scripts.cuda_checks.attention import poisoned
from scripts.cuda_checks.experts import make_order
from scripts.cuda_checks.timing import copy_gigabytes_per_second, graph_microseconds
from scripts.cuda_checks.weights import random_blocks, upload

_T = GGMLQuantizationType
N_SETS = 24
"""Choices of experts that take turns: together more bytes than the cache of the device holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A layer: experts, experts a token takes, its inputs, the width of an expert, weight types of gate and down, and
    whether experts have biases."""

    name: str
    n_expert: int
    n_used: int
    n_embd: int
    n_ff: int
    gate_type: GGMLQuantizationType
    down_type: GGMLQuantizationType
    activation: Activation = Activation.SILU
    has_bias: bool = False

    def row_bytes(self, kind: GGMLQuantizationType, n_cols: int) -> int:
        geometry = WeightGeometry(weight_type=kind, n_rows=1, n_cols=n_cols)
        return geometry.row_blocks * geometry.block_bytes

    @property
    def expert_bytes(self) -> int:
        gate = 2 * self.n_ff * self.row_bytes(self.gate_type, self.n_embd)
        return gate + self.n_embd * self.row_bytes(self.down_type, self.n_ff)


SHAPES = (
    Shape(
        name="26B-A4B", n_expert=128, n_used=8, n_embd=2816, n_ff=704, gate_type=_T.Q4_K, down_type=_T.Q8_0,
        activation=Activation.GELU_TANH,
    ),
    Shape(name="30B-A3B", n_expert=128, n_used=8, n_embd=2048, n_ff=768, gate_type=_T.Q4_K, down_type=_T.Q6_K),
    Shape(
        name="gpt-oss-20b", n_expert=32, n_used=4, n_embd=2880, n_ff=2880, gate_type=_T.MXFP4, down_type=_T.MXFP4,
        activation=Activation.CLAMPED_SWIGLU, has_bias=True,
    ),
)  # fmt: skip


def make_matrix(rng: np.random.Generator, shape: Shape, kind: GGMLQuantizationType, rows: int, cols: int) -> Any:
    """Random experts; their rows repeat every eight experts, which no cache can see."""
    geometry = WeightGeometry(weight_type=kind, n_rows=shape.n_expert * rows, n_cols=cols)
    part = WeightGeometry(weight_type=kind, n_rows=8 * rows, n_cols=cols)
    blocks = np.tile(random_blocks(part, rng), (shape.n_expert // 8, 1))
    bias = None
    if shape.has_bias:
        bias = cuda.to_device(rng.standard_normal((shape.n_expert, rows), dtype=np.float32))
    return ExpertMatrix(matrix=upload(geometry, blocks), geometry=geometry, n_expert=shape.n_expert, bias=bias)


class Layer:
    """One layer with ``N_SETS`` sets of logits, for steps of ``n_tokens``."""

    def __init__(self, shape: Shape) -> None:
        rng = np.random.default_rng(1)
        self.shape, self.rng = shape, rng
        gate, up = (make_matrix(rng, shape, shape.gate_type, shape.n_ff, shape.n_embd) for _ in range(2))
        self.pair = GatedPair(gate=gate, up=up)
        self.down = make_matrix(rng, shape, shape.down_type, shape.n_embd, shape.n_ff)

    def decode(self, n_tokens: int) -> tuple[dict[str, list[Callable[[Any], None]]], float]:
        """Launches of every kernel for each set, and the experts that a step takes on average."""
        shape = self.shape
        n_pairs = n_tokens * shape.n_used
        x, hidden = cuda.to_device(self.rng.standard_normal((n_tokens, shape.n_embd), dtype=np.float32)), None
        quants, scales = poisoned((n_tokens, shape.n_embd), np.int8), poisoned((n_tokens, shape.n_embd // 16, 2))
        quantise(x, quants, scales, stream=0)
        hidden = poisoned((n_pairs, shape.n_ff))
        inner, inner_scales = poisoned((n_pairs, shape.n_ff), np.int8), poisoned((n_pairs, shape.n_ff // 16, 2))
        out = poisoned((n_tokens, shape.n_embd))
        down = self.down.geometry
        chooses = gated_ring(self.pair.gate.geometry, shape.n_ff, n_tokens, shape.n_used) is not None
        takes_floats = sum_takes_floats(down, shape.n_embd, n_tokens, shape.n_used)
        chooses &= sum_ring(down, shape.n_embd, shape.n_used, takes_floats=takes_floats) is not None
        inputs = (hidden, None) if takes_floats else (inner, inner_scales)
        found: dict[str, list[Callable[[Any], None]]] = defaultdict(list)
        n_taken = []
        for _ in range(N_SETS):
            logits = cuda.to_device(self.rng.standard_normal((n_tokens, shape.n_expert), dtype=np.float32))
            ids, weights = poisoned((n_tokens, shape.n_used), np.int32), poisoned((n_tokens, shape.n_used))
            route(logits, ids, weights, rule=RoutingRule(), stream=0)
            n_taken.append(np.unique(ids.copy_to_host()).size)

            def add(name: str, function: Any, *args: Any, **more: Any) -> None:
                found[name].append(lambda on: function(*args, **more, stream=on))

            router = Router(logits=logits) if chooses else None
            if not chooses:
                add("route", route, logits, ids, weights, rule=RoutingRule())
            gated = (self.pair, ids, quants, scales, hidden)
            add("gate and up", expert_gated, *gated, activation=shape.activation, router=router)
            if not takes_floats:
                add("quantise", quantise, hidden, inner, inner_scales)
            add("down", expert_sum, self.down, ids, weights, *inputs, out, router=router)
        return found, float(np.mean(n_taken))

    def prefill(self, n_tokens: int) -> dict[str, list[Callable[[Any], None]]]:
        """Launches of every kernel of a long step, twice."""
        shape = self.shape
        n_pairs = n_tokens * shape.n_used
        x = cuda.to_device(self.rng.standard_normal((n_tokens, shape.n_embd), dtype=np.float32).astype(np.float16))
        logits = cuda.to_device(self.rng.standard_normal((n_tokens, shape.n_expert), dtype=np.float32))
        ids, weights = poisoned((n_tokens, shape.n_used), np.int32), poisoned((n_tokens, shape.n_used))
        route(logits, ids, weights, rule=RoutingRule(), stream=0)
        order = make_order(n_tokens, shape.n_used, shape.n_expert, tile_pairs_for(n_pairs, shape.n_expert))
        order_pairs(ids, order, stream=0)
        hidden, pairs = poisoned((n_pairs, shape.n_ff), np.float16), poisoned((n_pairs, shape.n_embd))
        out = poisoned((n_tokens, shape.n_embd))
        launches: dict[str, Callable[[Any], None]] = {
            "route": lambda on: route(logits, ids, weights, rule=RoutingRule(), stream=on),
            "order": lambda on: order_pairs(ids, order, stream=on),
            "gate and up": lambda on: expert_gated_tiles(
                self.pair, order, x, hidden, activation=shape.activation, stream=on
            ),
            "down": lambda on: expert_products(self.down, order, hidden, pairs, stream=on),
            "combine": lambda on: combine(pairs, order, weights, out, stream=on),
        }
        return {name: [launch] * 2 for name, launch in launches.items()}


def measure_prefill(shape: Shape, layer: Layer, stream: Any) -> None:
    for n_tokens in (128, 512, 2048, 4096):
        parts = {name: graph_microseconds(steps, stream) for name, steps in layer.prefill(n_tokens).items()}
        operations = 2.0 * n_tokens * shape.n_used * shape.n_embd * shape.n_ff
        rates = {"gate and up": 2 * operations, "down": operations}
        apart = ", ".join(
            f"{name} {time:.0f}" + (f" ({rates[name] / time / 1e6:.0f} TFLOP/s)" if name in rates else "")
            for name, time in parts.items()
        )
        rate = 3 * operations / sum(parts.values()) / 1e6
        print(
            f"{shape.name:12} {n_tokens} tokens: layer {sum(parts.values()):7.0f} us, {rate:4.0f} TFLOP/s | {apart}",
            flush=True,
        )


def measure(shape: Shape, layer: Layer, copy_rate: float, stream: Any) -> None:
    for n_tokens in (1, 4, 8):
        launches, n_taken = layer.decode(n_tokens)
        parts = {name: graph_microseconds(steps, stream, overlapped=True) for name, steps in launches.items()}
        together = [one for step in zip(*launches.values(), strict=True) for one in step]
        whole = len(launches) * graph_microseconds(together, stream, overlapped=True)
        need = n_taken * shape.expert_bytes / copy_rate / 1e3
        apart = ", ".join(f"{name} {time:.1f}" for name, time in parts.items())
        print(
            f"{shape.name:12} x {n_tokens}: layer {whole:6.1f} us, {n_taken:5.1f} experts' bytes {need:6.1f} us, "
            f"1.3 x + 6: {1.3 * need + 6:6.1f} us | {apart}",
            flush=True,
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [shape.name for shape in SHAPES]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--portable", action="store_true", help="no kernels that only this device has")
    arguments = parser.parse_args(argv)
    if arguments.portable:
        expert_decode.can_stream = lambda: False  # type: ignore[attr-defined]
    stream = cuda.stream()
    copy_rate = copy_gigabytes_per_second(stream)
    device = cuda.get_current_device()
    print(f"{device.name.decode() if isinstance(device.name, bytes) else device.name}, copy {copy_rate:.0f} GB/s")
    for shape in SHAPES:
        if shape.name in arguments.only:
            layer = Layer(shape)
            measure(shape, layer, copy_rate, stream)
            measure_prefill(shape, layer, stream)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
