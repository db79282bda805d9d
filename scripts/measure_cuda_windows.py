"""Measure attention of layers with and without a window at growing depths, with the caps and sinks of their models.

    python -m scripts.measure_cuda_windows [--commit HASH]

One layer, f16, microseconds: a token (attention and fold, as in recorded steps), and the last 2048 tokens of a prompt.
Launches are captured in a graph; those of a token rotate over several caches. Results are compared with the oracle.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numba import cuda

from cuda_kernels.attention_decode import attention_decode
from cuda_kernels.attention_prefill import attention_prefill, count_state_floats
from cuda_kernels.merge import merge_partials, state_floats
from cuda_kernels.partitions import count_partitions, most_window_partitions
from kvs_core.cuda_scratch import LARGE_BEGIN
from kvs_core.kv_types import KvType
from scripts.cuda_checks.attention import TIMES, make_rule, poisoned, sinks_on_device
from scripts.cuda_checks.paged import ScoreRule, attend, attend_plain
from scripts.cuda_checks.report import close
from scripts.cuda_checks.sessions import verdict
from scripts.cuda_checks.timing import graph_microseconds
from scripts.measure_cuda import LongCache, geometry

DEPTHS = (2048, 16 * 1024, 64 * 1024, 128 * 1024)
PROMPT_TOKENS = 2048
COMPARED = (0, 777, PROMPT_TOKENS - 1)
N_SETS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """``ratio``: query heads of a K/V head."""

    model: str
    head_dim: int
    n_head_kv: int
    ratio: int
    window: int
    softcap: float = 0.0
    has_sinks: bool = False


SHAPES = (
    LayerShape(model="gpt-oss", head_dim=64, n_head_kv=8, ratio=8, window=128, has_sinks=True),
    LayerShape(model="Gemma 3 12B", head_dim=256, n_head_kv=8, ratio=2, window=1024),
    LayerShape(model="Gemma 2 9B", head_dim=256, n_head_kv=8, ratio=2, window=4096, softcap=50.0),
)


class Layer:
    """One layer's caches, and what is measured over them: whether the result is right, and microseconds."""

    def __init__(self, shape: LayerShape, stream: Any) -> None:
        self.rng = np.random.default_rng(1)
        self.shape, self.stream, self.n_head = shape, stream, shape.n_head_kv * shape.ratio
        self.page = geometry(KvType.F16, shape.head_dim, shape.n_head_kv)
        self.cache = LongCache(self.page, DEPTHS[-1], N_SETS, self.rng)

    def rule(self, window: int | None) -> ScoreRule:
        return make_rule(self.page, self.shape.ratio, self.rng, window, self.shape.softcap, self.shape.has_sinks)

    def measure_token(self, depth: int, window: int | None) -> tuple[bool, float]:
        head_dim, rule = self.shape.head_dim, self.rule(window)
        q = self.rng.standard_normal((1, self.n_head, head_dim), dtype=np.float32)
        positions = np.array([depth - 1], np.int32)
        d_q, d_positions, d_sinks = cuda.to_device(q), cuda.to_device(positions), sinks_on_device(rule)
        n_partitions = count_partitions(depth, LARGE_BEGIN) if window is None else most_window_partitions(window, 1)
        d_partials = poisoned((n_partitions, 1, self.n_head, head_dim))
        d_max_sum = poisoned((n_partitions, 1, self.n_head, 2))
        d_state, d_out = poisoned((state_floats(self.n_head, head_dim),)), poisoned(q.shape)

        def launch(pages: Any, on: Any) -> None:
            attention_decode(
                d_q,
                pages,
                d_positions,
                d_partials,
                d_max_sum,
                page=self.page,
                first_partition=0,
                scale=rule.scale,
                window=window,
                softcap=rule.softcap,
                stream=on,
            )
            merge_partials(
                d_partials,
                d_max_sum,
                d_positions,
                d_state,
                d_out,
                n_head=self.n_head,
                head_dim=head_dim,
                first_partition=0,
                large_begin=LARGE_BEGIN,
                is_first=True,
                is_last=True,
                window=window,
                sinks=d_sinks,
                stream=on,
            )

        launches = [partial(launch, self.cache.pages[i % N_SETS]) for i in range(12)]
        microseconds = graph_microseconds(launches, self.stream, overlapped=True)
        return self.is_right(d_out.copy_to_host(), q, positions, rule), microseconds

    def measure_prompt(self, depth: int, window: int | None) -> tuple[bool, float]:
        head_dim, page_tokens, rule = self.shape.head_dim, self.page.page_tokens, self.rule(window)
        q = self.rng.standard_normal((PROMPT_TOKENS, self.n_head, head_dim), dtype=np.float32)
        d_q, d_sinks, d_out = cuda.to_device(q), sinks_on_device(rule), poisoned(q.shape)
        d_state = poisoned((count_state_floats(self.page, PROMPT_TOKENS, self.shape.ratio),))
        first_position = depth - PROMPT_TOKENS

        def launch(on: Any) -> None:
            attention_prefill(
                d_q,
                self.cache.pages[0],
                d_state,
                d_out,
                page=self.page,
                first_position=first_position,
                key_begin=rule.first_page(first_position, page_tokens) * page_tokens,
                key_end=depth,
                is_first=True,
                is_last=True,
                scale=rule.scale,
                window=window,
                softcap=rule.softcap,
                sinks=d_sinks,
                stream=on,
            )

        microseconds = graph_microseconds([launch] * 3, self.stream)
        some = np.array(COMPARED)
        positions = (first_position + some).astype(np.int32)
        return self.is_right(d_out.copy_to_host()[some], q[some], positions, rule), microseconds

    def is_right(self, got: np.ndarray, q: np.ndarray, positions: np.ndarray, rule: ScoreRule) -> bool:
        """The heads of the first K/V head against the oracle."""
        one, ratio = self.cache.first_head(), self.shape.ratio
        exact = attend(q[:, :ratio], one, positions, rule)
        plain = attend_plain(q[:, :ratio], one, positions, rule, half=True)
        return close("", got[:, :ratio], exact, plain, times=TIMES).passed


def report(what: str, measure: Callable[[int, int | None], tuple[bool, float]], window: int | None) -> bool:
    """One line over all depths."""
    found = [measure(depth, window) for depth in DEPTHS]
    passed = all(is_right for is_right, _ in found)
    times = ", ".join(f"{us:.1f} at {depth}" for depth, (_, us) in zip(DEPTHS, found, strict=True))
    print(f"{verdict(passed)} {what}, window {window or 'none'}: {times}", flush=True)
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", default="unknown", help="printed with the results")
    arguments = parser.parse_args()
    device, stream = cuda.get_current_device(), cuda.stream()
    name = device.name.decode() if isinstance(device.name, bytes) else device.name
    print(f"{name}, commit {arguments.commit}", flush=True)
    all_passed = True
    for shape in SHAPES:
        layer = Layer(shape, stream)
        for window in (shape.window, None):
            all_passed &= report(f"{shape.model}, a token", layer.measure_token, window)
            all_passed &= report(f"{shape.model}, {PROMPT_TOKENS} tokens", layer.measure_prompt, window)
    return 0 if all_passed else 1


if __name__ == "__main__":
    sys.exit(main())
