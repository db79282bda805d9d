"""Time the CPU matrix products, each checked against float64 first.

    python -m scripts.benchmark_cpu_kernels --threads 2
    python -m scripts.benchmark_cpu_kernels --types Q4_K,Q6_K --shapes 4096x4096 --tokens 1,512

Weights are random. Rows of text, one per case: median time of a call, weight bytes and arithmetic per second.
One token is to be judged against the copy rate in the first line, many tokens by GFLOP/s. A matrix that fits the
last-level cache shows the arithmetic, not the memory: --cold walks through enough copies to leave it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from kvs_core.cpu.kernel_cache import kernel_cache_counts  # noqa: E402
from kvs_core.cpu.matmul import CpuScratch, matmul  # noqa: E402
from kvs_core.cpu.scratch import matmul_scratch_bytes  # noqa: E402
from kvs_core.cpu.threads import ThreadTeam  # noqa: E402
from kvs_core.cpu.weights import CpuWeight, load_weight  # noqa: E402
from kvs_core.processors import processor_name  # noqa: E402  # the path above comes first
from tests.kernels.weight_samples import random_weight_bytes  # noqa: E402
from tests.oracles.rows import unpack  # noqa: E402

SMOLLM2_SHAPES = "576x576,192x576,1536x576,576x1536,49152x576"
COLD_BYTES = 256 << 20
CHECKED_TOKENS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    weight_type: GGMLQuantizationType
    n_out: int
    n_in: int
    n_tokens: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="Q4_1,Q8_0", help="comma-separated; as the gguf package spells them")
    parser.add_argument("--shapes", default=SMOLLM2_SHAPES, help="comma-separated n_out x n_in")
    parser.add_argument("--tokens", default="1,2,8,64,512")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.3, help="per case")
    parser.add_argument("--cold", action="store_true", help="read every weight from memory, not from a cache")
    options = parser.parse_args()

    print(f"{processor_name()}, {options.threads} threads, {copy_rate():.1f} GB/s memcpy")
    print(f"{'type':6} {'shape':>12} {'tokens':>6} {'us':>10} {'GB/s':>7} {'GFLOP/s':>8}")
    with ThreadTeam(options.threads) as team:
        for name in options.types.split(","):
            for shape in options.shapes.split(","):
                n_out, n_in = (int(size) for size in shape.split("x"))
                weights = make_weights(GGMLQuantizationType[name], n_out, n_in, is_cold=options.cold)
                for n_tokens in options.tokens.split(","):
                    case = Case(weight_type=GGMLQuantizationType[name], n_out=n_out, n_in=n_in, n_tokens=int(n_tokens))
                    report(case, time_case(case, weights, team, options.seconds), weights[0].n_bytes)
    counts = kernel_cache_counts()
    print(f"kernels: {counts.n_loaded} from disk, {counts.n_compiled} compiled")


def copy_rate() -> float:
    """Bytes copied per second, in GB/s, by one thread: the best of five copies."""
    source = np.ones(128 << 20, dtype=np.uint8)
    target = np.zeros_like(source)
    seconds = []
    for _ in range(5):
        started = perf_counter()
        np.copyto(target, source)
        seconds.append(perf_counter() - started)
    return source.nbytes / min(seconds) / 1e9


def make_weights(weight_type: GGMLQuantizationType, n_out: int, n_in: int, *, is_cold: bool) -> list[CpuWeight]:
    """One matrix, or as many copies as no cache holds."""
    packed = random_weight_bytes(np.random.default_rng(1), weight_type, n_out, n_in)
    n_copies = -(-COLD_BYTES // packed.size) if is_cold else 1
    return [load_weight(weight_type, n_out=n_out, n_in=n_in, data=packed.copy()) for _ in range(n_copies)]


def time_case(case: Case, weights: list[CpuWeight], team: ThreadTeam, seconds: float) -> float:
    """Median seconds of a call, after a check of some of its results."""
    x = np.random.default_rng(2).standard_normal((case.n_tokens, case.n_in)).astype(np.float32)
    out = np.full((case.n_tokens, case.n_out), np.nan, dtype=np.float32)
    n_floats = matmul_scratch_bytes(case.n_in, team.n_threads) // 4
    scratch = CpuScratch(buffer=np.empty(n_floats, dtype=np.float32), team=team)
    matmul(weights[0], x, out, scratch)
    check(case, weights[0], x, out)

    times: list[float] = []
    while sum(times) < seconds or len(times) < 5:
        weight = weights[len(times) % len(weights)]
        started = perf_counter()
        matmul(weight, x, out, scratch)
        times.append(perf_counter() - started)
    return float(np.median(times))


def check(case: Case, weight: CpuWeight, x: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """Every row for a few tokens, against float64; float32 sums of n_in terms stay well within the bound."""
    for begin in range(0, case.n_out, 4096):
        rows = weight.rows(begin, min(begin + 4096, case.n_out))
        unpacked = unpack(rows.data, case.weight_type, rows.n_out).astype(np.float64)
        exact = x[:CHECKED_TOKENS].astype(np.float64) @ unpacked.T
        size = np.abs(x[:CHECKED_TOKENS]).astype(np.float64) @ np.abs(unpacked).T
        error = np.abs(out[:CHECKED_TOKENS, begin : begin + rows.n_out] - exact)
        if not (error <= 2e-6 * size).all():
            raise SystemExit(f"wrong result: {case}, rows from {begin}, error {error.max():g}")


def report(case: Case, seconds: float, weight_bytes: int) -> None:
    flops = 2.0 * case.n_out * case.n_in * case.n_tokens
    print(
        f"{case.weight_type.name:6} {case.n_out:>6}x{case.n_in:<5} {case.n_tokens:>6} {seconds * 1e6:>10.1f} "
        f"{weight_bytes / seconds / 1e9:>7.1f} {flops / seconds / 1e9:>8.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
