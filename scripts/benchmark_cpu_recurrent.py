"""Time the recurrent part of a hybrid layer on the CPU: `benchmark_cpu_recurrent.py [--heads 16:32]`.

Random inputs, checked against float64 first. Per row, in processor time of one thread: the convolution and the delta
net of a token, the net's rate counted as 4 operations an element of every matrix, and beside it the same rule in chunks
of 64 tokens as matrix products (numpy, one BLAS thread if OPENBLAS_NUM_THREADS=1 is set).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from time import thread_time

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvs_core.cpu.recurrent import LayerState, delta_net, short_convolution
from kvs_core.processors import processor_name
from kvs_core.recurrent_shape import RecurrentShape
from tests.oracles.delta_net import chunked_delta_rule, delta_rule, gates, unit_heads

CHUNK = 64
EPS = 1e-6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", default="16:32", help="key heads and value heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--tokens", default="1,8,64,512")
    parser.add_argument("--seconds", type=float, default=1.0, help="per measurement")
    options = parser.parse_args()
    n_head_k, n_head_v = (int(number) for number in options.heads.split(":"))
    sizes = RecurrentShape(
        n_head_k=n_head_k, n_head_v=n_head_v, head_dim=options.head_dim, n_taps=4, groups_values=True
    )
    print(f"{processor_name()}, {n_head_k} key and {n_head_v} value heads of {options.head_dim}")
    print(f"{'tokens':>6} {'convolution us':>15} {'delta net us':>13} {'G/s':>6} {'in chunks us':>13}")
    for n_tokens in (int(number) for number in options.tokens.split(",")):
        report(sizes, n_tokens, options.seconds)


def report(sizes: RecurrentShape, n_tokens: int, seconds: float) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((n_tokens, sizes.n_channels)).astype(np.float32)
    taps = rng.standard_normal((4, sizes.n_channels)).astype(np.float32)
    beta, decay = (rng.standard_normal((n_tokens, sizes.n_head_v)).astype(np.float32) for _ in range(2))
    bias, rate = np.zeros(sizes.n_head_v, np.float32), np.full(sizes.n_head_v, -0.05, np.float32)
    state = LayerState(
        recurrent=sizes,
        inputs=np.zeros(sizes.conv_shape, np.float32),
        matrices=np.zeros(sizes.state_shape, np.float32),
    )
    heads = np.empty((sizes.n_head, n_tokens, sizes.head_dim), np.float32)
    out = np.empty((n_tokens, sizes.n_inner), np.float32)

    def run(first_pos: int = 1) -> None:
        arguments = {"bias": bias, "rate": rate, "eps": EPS, "state": state, "first_pos": first_pos, "out": out}
        delta_net(heads, beta.copy(), decay.copy(), **arguments)  # type: ignore[arg-type]

    short_convolution(x, taps, state, 0, heads)
    q, k, v = (heads[part].astype(np.float64) for part in (0, sizes.n_head_k, 2 * sizes.n_head_k))
    q, k = unit_heads(q, EPS), unit_heads(k, EPS)
    share, log_kept = (each[:, 0] for each in gates(beta, decay, bias, rate))
    run(first_pos=0)
    check(out[:, : sizes.head_dim], delta_rule(q, k, v, share, log_kept)[0])

    convolved = least_seconds(lambda: short_convolution(x, taps, state, 1, heads), seconds) / n_tokens
    took = least_seconds(run, seconds) / n_tokens
    single = [array.astype(np.float32) for array in (q, k, v, share, log_kept)]
    chunked = least_seconds(lambda: chunked_delta_rule(*single, chunk=CHUNK), seconds) / n_tokens * sizes.n_head_v
    in_chunks = f"{chunked * 1e6:>13.1f}" if n_tokens >= CHUNK else f"{'-':>13}"
    rate_g = 4 * sizes.n_inner * sizes.head_dim / took / 1e9
    print(f"{n_tokens:>6} {convolved * 1e6:>15.1f} {took * 1e6:>13.1f} {rate_g:>6.1f} {in_chunks}", flush=True)


def check(result: np.ndarray, exact: np.ndarray) -> None:
    error = float(np.abs(result - exact).max())
    if not error <= 1e-5 * np.abs(exact).max():
        raise SystemExit(f"wrong result: off by {error:g} of {np.abs(exact).max():g}")


def least_seconds(call: Callable[[], object], seconds: float) -> float:
    """Processor time of this thread: other work on the machine does not count."""
    call()
    times: list[float] = []
    while sum(times) < seconds or len(times) < 5:
        started = thread_time()
        call()
        times.append(thread_time() - started)
    return min(times)


if __name__ == "__main__":
    main()
