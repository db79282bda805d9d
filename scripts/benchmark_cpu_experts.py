"""Time a mixture-of-experts feed-forward on the CPU: `benchmark_cpu_experts.py [--experts 8,32,128]`.

Random weights, checked against float64 first. Per row: time of a layer's expert products, bytes of the experts taken
per second, and the time of a dense product with as many bytes. The cost should follow the experts taken, not those
there are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import numpy as np
from gguf import GGMLQuantizationType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvs_core.cpu.elementwise import silu_mul
from kvs_core.cpu.experts import Routing, expert_matmul, from_experts, route, to_experts
from kvs_core.cpu.matmul import CpuScratch, matmul
from kvs_core.cpu.scratch import matmul_scratch_bytes
from kvs_core.cpu.threads import ThreadTeam
from kvs_core.cpu.weights import CpuWeight, load_weight
from kvs_core.expert_shape import ExpertShape
from kvs_core.processors import processor_name
from tests.kernels.weight_samples import random_weight_bytes
from tests.oracles.rows import unpack


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--type", default="Q4_K", help="as the gguf package spells it")
    parser.add_argument("--experts", default="8,32,128", help="comma-separated numbers of experts")
    parser.add_argument("--used", type=int, default=8)
    parser.add_argument("--tokens", default="1,64")
    parser.add_argument("--n-embd", type=int, default=2048)
    parser.add_argument("--n-ff", type=int, default=768)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="per case")
    options = parser.parse_args()

    weight_type = GGMLQuantizationType[options.type]
    print(f"{processor_name()}, {options.threads} threads, {options.type}, {options.used} used")
    print(f"{'experts':>7} {'tokens':>6} {'taken':>5} {'us':>10} {'GB/s':>7} {'dense us':>10}")
    with ThreadTeam(options.threads) as team:
        for n_expert in (int(number) for number in options.experts.split(",")):
            layer = ExpertLayer(weight_type, n_expert, options.used, options.n_embd, options.n_ff, team)
            for n_tokens in (int(number) for number in options.tokens.split(",")):
                layer.report(n_tokens, options.seconds)


class ExpertLayer:
    """The three expert weights of one layer, and its scratch."""

    def __init__(
        self, weight_type: GGMLQuantizationType, n_expert: int, n_used: int, n_embd: int, n_ff: int, team: ThreadTeam
    ) -> None:
        self._type, self._team = weight_type, team
        self._n_expert, self._n_used, self._n_embd, self._n_ff = n_expert, n_used, n_embd, n_ff
        self._rng = np.random.default_rng(1)
        self._gate, self._up = (self._weight(n_expert * n_ff, n_embd) for _ in range(2))
        self._down = self._weight(n_expert * n_embd, n_ff)
        n_floats = max(matmul_scratch_bytes(n_in, team.n_threads) for n_in in (n_embd, n_ff)) // 4
        self._scratch = CpuScratch(buffer=np.empty(n_floats, dtype=np.float32), team=team)

    def report(self, n_tokens: int, seconds: float) -> None:
        x = self._rng.standard_normal((n_tokens, self._n_embd)).astype(np.float32)
        out = np.empty_like(x)
        routing = self._route(n_tokens)
        n_taken = len(routing.taken)
        pairs = np.empty((routing.rows.size, self._n_embd), dtype=np.float32)
        gate, up = (np.empty((routing.rows.size, self._n_ff), dtype=np.float32) for _ in range(2))

        def run() -> None:
            to_experts(x, routing, pairs, self._team)
            expert_matmul([self._gate, self._up], routing, pairs, [gate, up], self._scratch)
            silu_mul(gate, up, gate, self._team)
            expert_matmul([self._down], routing, gate, [pairs], self._scratch)
            from_experts(pairs, routing, out, self._team)

        run()
        self._check(x, routing, out)
        # As many rows as the experts taken have, each multiplied with as many tokens as an expert has on average.
        n_each = -(-routing.rows.size // n_taken)
        dense_x = self._rng.standard_normal((n_each, self._n_embd)).astype(np.float32)
        dense = self._weight(3 * n_taken * self._n_ff, self._n_embd)
        dense_out = np.empty((n_each, dense.n_out), dtype=np.float32)
        took = median_seconds(run, seconds)
        dense_took = median_seconds(lambda: matmul(dense, dense_x, dense_out, self._scratch), seconds)
        rate = dense.n_bytes / took / 1e9
        counts = f"{self._n_expert:>7} {n_tokens:>6} {n_taken:>5}"
        print(f"{counts} {took * 1e6:>10.1f} {rate:>7.1f} {dense_took * 1e6:>10.1f}", flush=True)

    def _weight(self, n_out: int, n_in: int) -> CpuWeight:
        packed = random_weight_bytes(self._rng, self._type, n_out, n_in)
        return load_weight(self._type, n_out=n_out, n_in=n_in, data=packed)

    def _route(self, n_tokens: int) -> Routing:
        logits = self._rng.standard_normal((n_tokens, self._n_expert)).astype(np.float32)
        ids, rows = (np.empty((n_tokens, self._n_used), dtype=np.int32) for _ in range(2))
        return route(
            logits,
            ExpertShape(n_expert=self._n_expert, n_used=self._n_used, n_ff=self._n_ff, normalises=True),
            ids=ids,
            weights=np.empty((n_tokens, self._n_used), dtype=np.float32),
            rows=rows,
            begins=np.empty(self._n_expert + 1, dtype=np.int32),
            taken=np.empty(self._n_expert, dtype=np.int32),
            team=self._team,
        )

    def _check(self, x: np.ndarray, routing: Routing, out: np.ndarray) -> None:
        """The first token against float64."""
        exact = np.zeros(self._n_embd)
        for expert, weight in zip(routing.ids[0], routing.weights[0], strict=True):
            gate, up, down = (
                unpack(part.data, self._type, part.n_out).astype(np.float64)
                for part in (
                    self._gate.rows(expert * self._n_ff, (expert + 1) * self._n_ff),
                    self._up.rows(expert * self._n_ff, (expert + 1) * self._n_ff),
                    self._down.rows(expert * self._n_embd, (expert + 1) * self._n_embd),
                )
            )
            gated = gate @ x[0]
            with np.errstate(over="ignore"):
                exact += weight * (down @ (gated / (1.0 + np.exp(-gated)) * (up @ x[0])))
        error = float(np.abs(out[0] - exact).max())
        if not error <= 1e-5 * np.abs(exact).max():
            raise SystemExit(f"wrong result: off by {error:g} of {np.abs(exact).max():g}")


def median_seconds(call: Callable[[], None], seconds: float) -> float:
    call()
    times: list[float] = []
    while sum(times) < seconds or len(times) < 5:
        started = perf_counter()
        call()
        times.append(perf_counter() - started)
    return float(np.median(times))


if __name__ == "__main__":
    main()
