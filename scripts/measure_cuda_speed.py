"""Prompt and generation speed of a model on a CUDA device at depth 0, beside figures of llama.cpp's llama-bench.

    python -m scripts.measure_cuda_speed MODEL [--baseline PP TG] [--required PP TG] [--stretch PP TG]

As llama-bench does it: a prompt of random tokens into an empty cache, and tokens generated one by one from an empty
cache; logits come to the host, nothing is sampled. Medians over rounds are judged by their ratio to the baseline, which
is SmolLM2-135M's on an H200 unless others are given. "recorded step" is what the device takes for a step when nothing
waits for the host; the rest of a token is the copy of its logits and the host. "host" is where the host's time of a
token goes; what comes before the step is asked for leaves the device idle, what comes after is hidden behind it, and
``to_host`` waits for the device. Exit code 1 when a line says FAIL.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from kvs_core.backend import open_backend
from kvs_core.config import RunConfig
from kvs_core.model_file import open_model
from kvs_core.model_reader import read_model_shape
from kvs_core.plan import plan_run
from kvs_core.session import Session
from scripts.cuda_checks import other_generation
from scripts.cuda_checks.sessions import verdict

SMOLLM2_H200 = (35000.0, 917.0)
"""llama.cpp, f16 cache, -fa 1: pp2048 and tg128 in tokens per second."""
REQUIRED, STRETCH = (0.8, 0.9), (1.2, 1.3)
WARM_UP_TOKENS = 3
REPLAYS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a rate is judged by: times the baseline."""

    baseline: float
    required: float
    stretch: float

    def judge(self, name: str, rates: Sequence[float]) -> tuple[bool, str]:
        rate = statistics.median(rates)
        ratio = rate / self.baseline
        reached = "reached" if ratio >= self.stretch else "missed"
        return ratio >= self.required, (
            f"{name}: {rate:.0f} t/s, median of {len(rates)} (best {max(rates):.0f}, worst {min(rates):.0f}); "
            f"{ratio:.2f} times {self.baseline:.0f}, {self.required:g} needed; stretch {self.stretch:g} {reached}"
        )


def time_prompt(session: Session, tokens: Sequence[int]) -> float:
    session.clear()
    begun = perf_counter()
    session.prefill(tokens)
    return perf_counter() - begun


def time_generation(session: Session, tokens: Sequence[int]) -> float:
    """Seconds of all tokens but the first ones, which switch the phase and may be recorded."""
    session.clear()
    session.prefill(tokens[:1])
    for token in tokens[1 : 1 + WARM_UP_TOKENS]:
        session.decode([token])
    begun = perf_counter()
    for token in tokens[1 + WARM_UP_TOKENS :]:
        session.decode([token])
    return perf_counter() - begun


def time_host(session: Session, tokens: Sequence[int]) -> dict[str, float]:
    """Seconds of a decode step by what the host does, in its order; the rest is Python between these calls."""
    seconds: dict[str, float] = {}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            begun = perf_counter()
            result = call(*args, **options)
            seconds[name] = seconds.get(name, 0.0) + perf_counter() - begun
            return result

        return run

    session.clear()
    session.prefill(tokens[:1])
    for token in tokens[1 : 1 + WARM_UP_TOKENS]:
        session.decode([token])
    with ExitStack() as restoring:
        for owner, prefix, names in (
            (session._ops, "", ("begin_step", "run_step", "to_host")),
            (session._cache, "cache.", ("begin_step", "replay_layers", "end_step")),
        ):
            for name in names:
                setattr(owner, name, timed(prefix + name, getattr(owner, name)))
                restoring.callback(delattr, owner, name)
        begun = perf_counter()
        for token in tokens[1 + WARM_UP_TOKENS :]:
            session.decode([token])
        total = perf_counter() - begun
    seconds["rest"] = total - sum(seconds.values())
    n_steps = len(tokens) - 1 - WARM_UP_TOKENS
    return {name: spent / n_steps for name, spent in seconds.items()}


def time_recorded_step(session: Session) -> float | None:
    """Seconds of the device for the step recorded last, replayed many times; None where nothing is recorded."""
    recordings = getattr(session._ops, "_recordings", None)
    if recordings is None or not recordings._graphs:
        return None
    key = next(reversed(recordings._graphs))
    recordings.replay(key)
    session._ops.synchronise()
    begun = perf_counter()
    for _ in range(REPLAYS):
        recordings.replay(key)
    session._ops.synchronise()
    return (perf_counter() - begun) / REPLAYS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--generate", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    pair = {"type": float, "nargs": 2, "metavar": ("PP", "TG")}
    parser.add_argument("--baseline", default=SMOLLM2_H200, **pair)
    parser.add_argument("--required", default=REQUIRED, **pair)
    parser.add_argument("--stretch", default=STRETCH, **pair)
    parser.add_argument("--device", default="cuda", help="cuda[:N], or cpu to try the script itself")
    other_generation.add_option(parser)
    arguments = parser.parse_args()
    other_generation.apply_option(arguments)
    goals = [
        Goal(baseline=baseline, required=required, stretch=stretch)
        for baseline, required, stretch in zip(arguments.baseline, arguments.required, arguments.stretch, strict=True)
    ]
    backend = open_backend(arguments.device, n_threads=None)
    try:
        with open_model(arguments.model) as model_file:
            shape = read_model_shape(model_file)
            n_generated = 1 + WARM_UP_TOKENS + arguments.generate
            config = RunConfig(model_path=arguments.model, n_ctx=max(arguments.prompt, n_generated) + 8)
            plan = plan_run(config, shape, backend.budget())
            backend.load_weights(model_file)
            tokens = np.random.default_rng(1).integers(3, shape.n_vocab, plan.n_ctx).tolist()
            with Session(plan, backend) as session:
                session.warm_up()
                time_prompt(session, tokens[: arguments.prompt])  # the sizes of this prompt
                prompt, generation = [], []
                for _ in range(arguments.rounds):
                    prompt.append(arguments.prompt / time_prompt(session, tokens[: arguments.prompt]))
                    generation.append(arguments.generate / time_generation(session, tokens[:n_generated]))
                step = time_recorded_step(session)
                host = time_host(session, tokens[:n_generated])
    finally:
        backend.close()
    print(f"{plan.budget.name}, {arguments.model.name}: {shape.n_layer} layers, -ub {plan.n_ubatch}")
    if step is not None:
        token = 1 / statistics.median(generation)
        print(f"     a token takes {1e3 * token:.3f} ms, of it the recorded step {1e3 * step:.3f} ms")
    print("     host, us a token: " + ", ".join(f"{name} {1e6 * spent:.0f}" for name, spent in host.items()))
    verdicts = [
        goals[0].judge(f"prompt of {arguments.prompt}", prompt),
        goals[1].judge(f"{arguments.generate} tokens generated", generation),
    ]
    for good, text in verdicts:
        print(f"{verdict(good)} {text}")
    return 0 if all(good for good, _ in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
