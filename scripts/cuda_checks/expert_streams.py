"""Products of experts that stream their rows and choose the experts themselves: the bits of ``route`` and of the
kernels that every device has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from numba import cuda

from cuda_kernels import expert_decode
from cuda_kernels.activation import Activation
from cuda_kernels.expert_decode import Router, expert_gated, expert_sum, gated_ring, sum_ring, sum_takes_floats
from cuda_kernels.expert_matvec import ExpertMatrix, GatedPair
from cuda_kernels.expert_ring import can_be_ringed
from cuda_kernels.matvec_stream import can_stream
from cuda_kernels.quantise import quantise
from cuda_kernels.routing import RoutingRule, route
from cuda_kernels.weights import FAST_TYPES, WeightGeometry
from scripts.cuda_checks.attention import poisoned
from scripts.cuda_checks.report import Check, Outcome, same_bits
from scripts.cuda_checks.weights import random_blocks, upload

RULE = RoutingRule(weight_scale=2.5)
SIZES = (
    *((40, 8, 512, 768, 8), (6, 3, 1280, 256, 3)),
    *((100, 10, 256, 512, 1), (33, 4, 512, 1280, 1), (9, 8, 256, 2304, 1)),
)
"""Experts, experts a token takes, inputs and width of an expert, tokens."""


class Step:
    """Experts, tokens and the router's logits for both; what is left of a choice is in ``ids`` and ``mixture``."""

    def __init__(self, weight_type: GGMLQuantizationType, sizes: tuple[int, int, int, int, int]) -> None:
        n_expert, n_used, n_in, n_ff, n_tokens = sizes
        rng = np.random.default_rng(n_expert + n_ff)
        biases = (rng.standard_normal((n_expert, n), dtype=np.float32) for n in (n_ff, n_ff, n_in))

        def matrix(n_rows: int, n_cols: int) -> ExpertMatrix:
            geometry = WeightGeometry(weight_type=weight_type, n_rows=n_expert * n_rows, n_cols=n_cols)
            data, bias = upload(geometry, random_blocks(geometry, rng)), cuda.to_device(next(biases))
            return ExpertMatrix(matrix=data, geometry=geometry, n_expert=n_expert, bias=bias)

        self.pair, self.down = GatedPair(gate=matrix(n_ff, n_in), up=matrix(n_ff, n_in)), matrix(n_in, n_ff)
        x = cuda.to_device(rng.standard_normal((n_tokens, n_in), dtype=np.float32) * np.float32(0.01))
        self.x = poisoned((n_tokens, n_in), np.int8), poisoned((n_tokens, n_in // 16, 2))
        quantise(x, *self.x, stream=0)
        logits = np.round(rng.standard_normal((n_tokens, n_expert)) * 4).astype(np.float32) / np.float32(4)  # many ties
        logits[0, :3] = (-np.inf, -0.0, 0.0)
        if n_tokens > 1:
            logits[1] = rng.standard_normal(n_expert) * 30
        self.router = Router(
            logits=cuda.to_device(logits),
            weight_scale=RULE.weight_scale,
            scales=cuda.to_device(rng.random(n_expert, dtype=np.float32)),
        )
        self.n_tokens, self.n_used, self.n_in, self.n_ff = n_tokens, n_used, n_in, n_ff
        self.ids, self.mixture = poisoned((n_tokens, n_used), np.int32), poisoned((n_tokens, n_used))

    def route(self) -> None:
        route(self.router.logits, self.ids, self.mixture, rule=RULE, scales=self.router.scales, stream=0)

    def forget_choice(self) -> None:
        self.ids = cuda.to_device(np.full(self.ids.shape, 2**30, np.int32))  # an address that no expert has
        self.mixture = poisoned(self.mixture.shape)

    def run(self, router: Router | None, *, floats: bool) -> tuple[np.ndarray, np.ndarray]:
        """The gated rows of all pairs and the sums of all tokens."""
        hidden, out = poisoned((self.n_tokens * self.n_used, self.n_ff)), poisoned((self.n_tokens, self.n_in))
        expert_gated(self.pair, self.ids, *self.x, hidden, activation=Activation.SILU, stream=0, router=router)
        inputs: tuple[Any, Any] = (hidden, None)
        if not floats:
            inputs = poisoned(hidden.shape, np.int8), poisoned((hidden.shape[0], self.n_ff // 16, 2))
            quantise(hidden, *inputs, stream=0)
        expert_sum(self.down, self.ids, self.mixture, *inputs, out, stream=0, router=router)
        return hidden.copy_to_host(), out.copy_to_host()

    def run_portably(self) -> tuple[np.ndarray, np.ndarray]:
        try:
            expert_decode.can_stream = lambda: False  # type: ignore[attr-defined]
            return self.run(None, floats=False)
        finally:
            expert_decode.can_stream = can_stream  # type: ignore[attr-defined]


def check_streams(weight_type: GGMLQuantizationType, sizes: tuple[int, int, int, int, int]) -> Iterator[Outcome]:
    step = Step(weight_type, sizes)
    label = f"{step.n_used} of {sizes[0]} experts {step.n_in}x{step.n_ff} x {step.n_tokens}"
    if gated_ring(step.pair.gate.geometry, step.n_ff, step.n_tokens, step.n_used) is None:
        return  # a device that streams nothing: only the portable kernels are there
    step.route()
    portable = step.run_portably()
    takes_floats = sum_takes_floats(step.down.geometry, step.n_in, step.n_tokens, step.n_used)
    takes_quants = sum_ring(step.down.geometry, step.n_in, step.n_used, takes_floats=False) is not None
    runs = {"routed": (None, False), **({"routed, floats": (None, True)} if takes_floats else {})}
    runs |= {"chosen": (step.router, False)} if takes_quants else {}
    runs |= {"chosen, floats": (step.router, True)} if takes_floats else {}
    for name, (router, floats) in runs.items():
        if router is not None:
            step.forget_choice()
        for what, got, wanted in zip(("gated", "sum"), step.run(router, floats=floats), portable, strict=True):
            yield same_bits(f"{label} {name}: {what}", got, wanted)


def checks() -> Iterator[Check]:
    for weight_type in filter(can_be_ringed, FAST_TYPES):

        def run(weight_type: GGMLQuantizationType = weight_type) -> Iterator[Outcome]:
            for sizes in SIZES:
                yield from check_streams(weight_type, sizes)

        yield Check(family="experts", case=f"streamed {weight_type.name}", run=run)
