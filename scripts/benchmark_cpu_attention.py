"""Speed of CPU attention at one model shape: prefill of one micro-batch and decode of one token, deep in a context.

    python -m scripts.benchmark_cpu_attention [--threads 2] [--depth 4096] [--types f16 q8_0]

The result of every kernel is checked against the float64 oracle of the tests first. Each layer has its own pages, as
in a run, so decode reads memory and not the cache. Types take turns, round by round, so that other programs disturb all
alike. Times are medians over rounds of all layers; the processor column counts all threads' processor time, and "speed"
is the first type's time over this one's. "copied" is a memcpy of the same bytes in the same process: the decode kernel
reads what a copy reads and writes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # the oracle's products would leave threads polling beside ours

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parent.parent))

from kvs_core.attention_rule import AttentionRule
from kvs_core.cpu import attention
from kvs_core.cpu.attention_scratch import attention_state_bytes, decode_scratch_bytes, prefill_scratch_bytes
from kvs_core.cpu.store import store_kv
from kvs_core.cpu.threads import ThreadTeam
from kvs_core.kv_types import KvType, PageGeometry
from kvs_core.units import ceil_div
from tests.oracles.attention import attend, read_kv

PAGE_TOKENS = 256
SEED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is measured; the defaults of the command line are SmolLM2-135M."""

    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    depth: int
    n_ubatch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds for all layers: wall clock and processor time of all threads, medians over rounds."""

    wall_s: float
    processor_s: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--types", nargs="+", default=["f16", "q8_0"], choices=[kv_type.value for kv_type in KvType])
    parser.add_argument("--depth", type=int, default=4096)
    parser.add_argument("--ubatch", type=int, default=512)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    shape = Shape(
        n_layer=args.layers,
        n_head=args.heads,
        n_head_kv=args.kv_heads,
        head_dim=args.head_dim,
        depth=args.depth,
        n_ubatch=args.ubatch,
    )

    print(f"{shape}, {args.threads} threads, pages of {PAGE_TOKENS}")
    print(f"{'':16}{'ms/token':>10}{'processor':>11}{'speed':>7}{'GFLOP/s':>9}{'GB/s':>7}{'copied GB/s':>13}")
    with ThreadTeam(args.threads) as team:
        benches = [Bench(shape, KvType(name), team) for name in args.types]
        report_prefill(benches, max(args.rounds // 5, 2))
        report_decode(benches, args.rounds)
    return 0


def report_prefill(benches: list[Bench], n_rounds: int) -> None:
    runs = [bench.prepare(attention.attend_prefill, prefill_scratch_bytes, bench.shape.n_ubatch) for bench in benches]
    timings = time_in_turns(runs, n_rounds)
    for bench, timing in zip(benches, timings, strict=True):
        shape = bench.shape
        n_keys = sum(shape.depth + token + 1 for token in range(shape.n_ubatch))
        print(
            f"{bench.name + ' prefill':16}{1e3 * timing.wall_s / shape.n_ubatch:10.3f}"
            f"{1e3 * timing.processor_s / shape.n_ubatch:11.3f}{timings[0].wall_s / timing.wall_s:7.2f}"
            f"{n_keys * bench.flops_per_key / timing.wall_s / 1e9:9.0f}",
            flush=True,
        )


def report_decode(benches: list[Bench], n_rounds: int) -> None:
    timings = time_in_turns(
        [bench.prepare(attention.attend_decode, decode_scratch_bytes, 1) for bench in benches], n_rounds
    )
    for bench, timing in zip(benches, timings, strict=True):
        n_keys = bench.shape.depth + 1
        n_bytes = bench.shape.n_layer * n_keys * bench.geometry.payload_bytes // PAGE_TOKENS
        copied = bench.copy_seconds(n_rounds)
        print(
            f"{bench.name + ' decode':16}{1e3 * timing.wall_s:10.3f}{1e3 * timing.processor_s:11.3f}"
            f"{timings[0].wall_s / timing.wall_s:7.2f}{n_keys * bench.flops_per_key / timing.wall_s / 1e9:9.0f}"
            f"{n_bytes / timing.wall_s / 1e9:7.1f}{bench.arena.nbytes / copied / 1e9:13.1f}",
            flush=True,
        )


def time_in_turns(runs: list[Callable[[], None]], n_rounds: int) -> list[Timing]:
    """Medians of each run over rounds in which all take their turn."""
    seconds = np.empty((n_rounds, len(runs), 2))
    for round_seconds in seconds:
        for run_seconds, run in zip(round_seconds, runs, strict=True):
            wall_s, processor_s = time.perf_counter(), time.process_time()
            run()
            run_seconds[:] = time.perf_counter() - wall_s, time.process_time() - processor_s
    return [Timing(wall_s=float(wall), processor_s=float(processor)) for wall, processor in np.median(seconds, axis=0)]


class Bench:
    """Caches of all layers in one arena, filled with the same random rows."""

    def __init__(self, shape: Shape, kv_type: KvType, team: ThreadTeam) -> None:
        self.shape = shape
        self.team = team
        self.geometry = PageGeometry(
            page_tokens=PAGE_TOKENS,
            n_head_kv=shape.n_head_kv,
            head_dim_k=shape.head_dim,
            head_dim_v=shape.head_dim,
            type_k=kv_type,
            type_v=kv_type,
        )
        self.rng = np.random.default_rng(SEED)
        n_kv = shape.depth + shape.n_ubatch
        n_pages = ceil_div(n_kv, PAGE_TOKENS)
        self.arena = np.zeros(shape.n_layer * n_pages * self.geometry.page_bytes, dtype=np.uint8)
        slots = self.rng.permutation(shape.n_layer * n_pages).reshape(shape.n_layer, n_pages)
        self.page_offsets = [np.ascontiguousarray(layer) * self.geometry.page_bytes for layer in slots]
        rows = [self.rng.standard_normal((n_kv, shape.n_head_kv, shape.head_dim), dtype=np.float32) for _ in "kv"]
        for offsets in self.page_offsets:
            store_kv(self.arena, self.geometry, offsets, 0, *rows)

    @property
    def name(self) -> str:
        return self.geometry.type_k.value

    @property
    def flops_per_key(self) -> int:
        return 4 * self.shape.n_head * self.shape.head_dim * self.shape.n_layer

    def prepare(
        self, attend_span: Callable[..., None], scratch_bytes: Callable[..., int], n_tokens: int
    ) -> Callable[[], None]:
        """A call that attends in every layer once; its result is checked here."""
        shape = self.shape
        q = self.rng.standard_normal((n_tokens, shape.n_head, shape.head_dim), dtype=np.float32)
        n_state = attention_state_bytes(n_head=shape.n_head, head_dim_v=shape.head_dim, n_tokens=n_tokens)
        state = attention.carve_attention_state(
            np.zeros(n_state, dtype=np.uint8), n_tokens=n_tokens, n_head=shape.n_head, head_dim_v=shape.head_dim
        )
        n_scratch = scratch_bytes(self.geometry, n_head=shape.n_head, n_tokens=n_tokens, n_threads=self.team.n_threads)
        scratch = np.zeros(n_scratch, dtype=np.uint8)
        out = np.empty_like(q)
        n_kv = shape.depth + n_tokens
        rule = AttentionRule(scale=shape.head_dim**-0.5)

        def run_layer(offsets: npt.NDArray[np.int64]) -> None:
            attention.begin_attention(state)
            attend_span(
                self.arena,
                self.geometry,
                offsets,
                0,
                ceil_div(n_kv, PAGE_TOKENS),
                n_kv,
                q,
                shape.depth,
                rule,
                state,
                scratch,
                self.team,
            )
            attention.finish_attention(state, out)

        run_layer(self.page_offsets[0])
        self.check(q[-1:], out[-1:], n_kv, rule.scale)

        def run_layers() -> None:
            for offsets in self.page_offsets:
                run_layer(offsets)

        return run_layers

    def check(self, q: npt.NDArray[np.float32], out: npt.NDArray[np.float32], n_kv: int, scale: float) -> None:
        """Compare the last token with the oracle; stop when it is further off than four times numpy in float32."""
        k, v = read_kv(self.arena, self.geometry, self.page_offsets[0], n_kv)
        expected = attend(q, k, v, first_pos=n_kv - 1, scale=scale)
        plain = attend(q, k, v, first_pos=n_kv - 1, scale=scale, dtype=np.float32)
        error, allowed = np.abs(out - expected).max(), 4.0 * np.abs(plain - expected).max()
        if not error <= allowed:
            raise SystemExit(f"wrong result: off by {error}, allowed {allowed}")

    def copy_seconds(self, n_rounds: int) -> float:
        target = np.ones_like(self.arena)
        seconds = []
        for _ in range(n_rounds):
            begin = time.perf_counter()
            np.copyto(target, self.arena)
            seconds.append(time.perf_counter() - begin)
        return float(np.median(seconds))


if __name__ == "__main__":
    raise SystemExit(main())
