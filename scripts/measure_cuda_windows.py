"""Measure decode attention of layers with and without a window, as in recorded steps, at growing depths.

    python -m scripts.measure_cuda_windows [--commit HASH]

Attention and fold of one layer, one token, f16, in microseconds; launches are captured in a graph and rotate over
several caches. Results of every depth are compared with the oracle before they are timed.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

import numpy as np
from numba import cuda

from cuda_kernels.attention_decode import attention_decode
from cuda_kernels.merge import merge_partials, state_floats
from cuda_kernels.partitions import count_partitions, most_window_partitions
from kvs_core.kv_types import KvType
from scripts.cuda_checks.attention import TIMES, poisoned
from scripts.cuda_checks.paged import ScoreRule, attend, attend_plain
from scripts.cuda_checks.report import close
from scripts.cuda_checks.sessions import verdict
from scripts.cuda_checks.timing import graph_microseconds
from scripts.measure_cuda import LongCache, geometry

SHAPES = ((64, 8, 8, 128), (256, 8, 2, 1024), (256, 8, 2, 4096))
"""Head size, K/V heads, query heads of each, window: gpt-oss, gemma3 12B, gemma2 9B."""
DEPTHS = (2048, 16 * 1024, 64 * 1024, 128 * 1024)
N_SETS = 3


class Layer:
    """One layer's caches, its query and where the results go."""

    def __init__(self, head_dim: int, n_head_kv: int, ratio: int) -> None:
        rng = np.random.default_rng(1)
        self.page, self.ratio, self.n_head = geometry(KvType.F16, head_dim, n_head_kv), ratio, n_head_kv * ratio
        self.cache = LongCache(self.page, DEPTHS[-1], N_SETS, rng)
        self.q = rng.standard_normal((1, self.n_head, head_dim), dtype=np.float32)
        self.d_q = cuda.to_device(self.q)
        self.d_state = poisoned((state_floats(self.n_head, head_dim),))
        self.d_out = poisoned((1, self.n_head, head_dim))

    def measure(self, depth: int, window: int | None, stream: Any) -> tuple[bool, float]:
        """Whether the result is right, and microseconds."""
        head_dim = self.page.head_dim_k
        rule = ScoreRule(scale=head_dim**-0.5, window=window)
        positions = np.array([depth - 1], np.int32)
        d_positions = cuda.to_device(positions)
        n_partitions = count_partitions(depth) if window is None else most_window_partitions(window, 1)
        d_partials = poisoned((n_partitions, 1, self.n_head, head_dim))
        d_max_sum = poisoned((n_partitions, 1, self.n_head, 2))

        def launch(pages: Any, on: Any) -> None:
            rules = {"scale": rule.scale, "window": window, "stream": on}
            attention_decode(
                self.d_q, pages, d_positions, d_partials, d_max_sum, page=self.page, first_partition=0, **rules
            )
            merge_partials(
                d_partials,
                d_max_sum,
                d_positions,
                self.d_state,
                self.d_out,
                n_head=self.n_head,
                head_dim=head_dim,
                first_partition=0,
                is_first=True,
                is_last=True,
                window=window,
                stream=on,
            )

        launches = [partial(launch, self.cache.pages[i % N_SETS]) for i in range(12)]
        microseconds = graph_microseconds(launches, stream, overlapped=True)
        first, own = self.cache.first_head(), self.q[:, : self.ratio]
        exact = attend(own, first, positions, rule)
        plain = attend_plain(own, first, positions, rule, half=True)
        got = self.d_out.copy_to_host()[:, : self.ratio]
        return close("", got, exact, plain, times=TIMES).passed, microseconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", default="unknown", help="printed with the results")
    arguments = parser.parse_args()
    device, stream = cuda.get_current_device(), cuda.stream()
    name = device.name.decode() if isinstance(device.name, bytes) else device.name
    print(f"{name}, commit {arguments.commit}", flush=True)
    all_passed = True
    for head_dim, n_head_kv, ratio, n_swa in SHAPES:
        layer = Layer(head_dim, n_head_kv, ratio)
        for window in (n_swa, None):
            found = [layer.measure(depth, window, stream) for depth in DEPTHS]
            passed = all(is_right for is_right, _ in found)
            all_passed &= passed
            what = f"head {head_dim}, {n_head_kv} x {ratio} heads, window {window or 'none'}"
            times = ", ".join(f"{us:.1f} us at {depth}" for depth, (_, us) in zip(DEPTHS, found, strict=True))
            print(f"{verdict(passed)} {what:42} {times}", flush=True)
    return 0 if all_passed else 1


if __name__ == "__main__":
    sys.exit(main())
