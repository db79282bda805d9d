"""Measure whole sessions on a CUDA device: prefill, decode, share of the link, for several arenas beside each other.

    python -m scripts.measure_cuda_session MODEL [--ctx N ...] [--ub N] [--arena MIB ...] [--decode N] [--repeat N]
                                           [--type TYPE[/VALUES]]

All sessions of a context are open at once and warmed up; then they take turns, ``--repeat`` times, so that a slow spell
of the machine meets them all. One line a run; arena 0 means off. The prompt fills the context up to the tokens that
are decoded. Logits of the last prompt token and of every decoded one are compared bit for bit with those of the
first run of the same context. At the end the best and the median of each arena, and the verdicts. Exit code 1 when a
line says FAIL. Memory is measured by ``measure_cuda_memory``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import numpy as np

from kvs_cli.environment import cache_root
from kvs_core.backend import Backend, open_backend
from kvs_core.config import DEFAULT_BATCH_TOKENS, RunConfig
from kvs_core.kernel_files import KernelFiles
from kvs_core.kv_types import KvType
from kvs_core.model_file import open_model
from kvs_core.model_reader import read_model_shape
from kvs_core.model_shape import ModelShape
from kvs_core.phase import Phase
from kvs_core.plan import plan_run, with_arena
from kvs_core.session import Session
from kvs_core.units import GIB, MIB
from scripts.cuda_checks import other_generation
from scripts.cuda_checks.sessions import verdict

LARGER_ARENA_TIMES = 1.03
ARENA_OFF_TIMES = 1.08
LINK_SHARE = 0.95
COPIES_DOMINATE = 0.25
"""Decode is held against the link when at most this share of the cache is resident: else compute counts, too."""
WARM_UP_STEPS = 3
QUARTERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One prompt and its decoded tokens.

    quarters   seconds of each quarter of the prompt, in whole batches
    decode     seconds of the decoded tokens but the first, which switches the phase
    rate       bytes per second that these streamed
    """

    quarters: tuple[float, ...]
    decode: float
    n_decoded: int
    rate: float
    prompt_bytes: int
    decode_waits: float
    logits: np.ndarray
    as_predicted: bool

    @property
    def prefill(self) -> float:
        return sum(self.quarters)


def pair_of(types: str) -> tuple[KvType, KvType]:
    """Types of keys and of values as in ``q8_0/turbo4``; one name stands for both."""
    type_k, _, type_v = types.partition("/")
    return KvType(type_k), KvType(type_v or type_k)


def split_prompt(n_prompt: int, n_batch: int) -> list[tuple[int, int]]:
    """Quarters of a prompt that begin with a batch, so that the micro-batches are those of the whole."""
    ends = [n_prompt * quarter // QUARTERS // n_batch * n_batch for quarter in range(1, QUARTERS)]
    ends = [0, *ends, n_prompt]
    return [(begin, end) for begin, end in pairwise(ends) if begin < end]


def warm_up(session: Session, prompt: Sequence[int], forced: Sequence[int]) -> None:
    """Two micro-batches of the prompt's sizes and a few steps: compiles, loads, asks cuBLASLt; then forget them."""
    sizes = session.plan.ubatches(len(prompt))
    session.prefill(prompt[: sizes[0]])
    if len(sizes) > 1:
        session.prefill(prompt[: sizes[-1]])
    for token in forced[:WARM_UP_STEPS]:
        if session.n_past < session.n_ctx:
            session.decode([token])
    session.clear()


def run_once(session: Session, prompt: Sequence[int], forced: Sequence[int]) -> Run:
    counters, engine = session.counters, session.engine
    begun = counters.bytes_streamed
    quarters, last = [], None
    for begin, end in split_prompt(len(prompt), session.plan.n_batch):
        started = perf_counter()
        output_begin = end - begin - (1 if end == len(prompt) else 0)
        for _, tile in session.prefill_rows(prompt[begin:end], output_begin=output_begin):
            last = tile[-1].copy()
        quarters.append(perf_counter() - started)
    assert last is not None
    prompt_bytes = counters.bytes_streamed - begun
    rows = [last, session.decode(forced[:1])[0]]
    decode_begun, waited = counters.bytes_streamed, engine.wait_seconds if engine else 0.0
    started = perf_counter()
    rows += [session.decode([token])[0] for token in forced[1:]]
    decode = perf_counter() - started
    logits = np.stack(rows)
    predicted = session.plan.streamed_bytes_of_run(len(prompt), len(forced))
    run = Run(
        quarters=tuple(quarters),
        decode=decode,
        n_decoded=len(forced) - 1,
        rate=(counters.bytes_streamed - decode_begun) / decode,
        prompt_bytes=prompt_bytes,
        decode_waits=(engine.wait_seconds if engine else 0.0) - waited,
        logits=logits,
        as_predicted=counters.bytes_streamed - begun == predicted and bool(np.isfinite(logits).all()),
    )
    session.clear()
    return run


def describe(run: Run, session: Session) -> str:
    n_prompt = session.n_ctx - run.n_decoded - 1
    quarters = " + ".join(f"{seconds:.2f}" for seconds in run.quarters)
    link = session.copy_rate
    share = f", {run.rate / 1e9:.1f} GB/s of {link / 1e9:.1f} ({run.rate / link:.1%})" if link and run.rate else ""
    waits = f", waits {run.decode_waits / run.decode:.0%}" if link else ""
    return (
        f"prefill {run.prefill:.2f} s = {quarters} ({n_prompt / run.prefill:.0f} t/s, "
        f"{run.prompt_bytes / 1e9:.1f} GB streamed); "
        f"decode {1e3 * run.decode / run.n_decoded:.2f} ms a token ({run.n_decoded / run.decode:.2f} t/s{share}{waits})"
    )


def resident_share(session: Session) -> float:
    plan = session.plan
    return plan.layout(Phase.DECODE).resident_bytes / plan.kv_bytes


class Context:
    """The sessions of one context by arena in MiB, smallest first and off last, and their runs."""

    def __init__(self, sessions: dict[int, Session]) -> None:
        self.sessions = sessions
        self.runs: dict[int, list[Run]] = {arena: [] for arena in sessions}
        self.passed = True

    def name(self, arena: int) -> str:
        plan = self.sessions[arena].plan
        return f"c {plan.n_ctx} ub {plan.n_ubatch} arena {arena or 'off'}"

    def measure(self, prompt: Sequence[int], forced: Sequence[int], repeat: int) -> None:
        reference: bytes | None = None
        for _ in range(repeat):
            for arena, session in self.sessions.items():
                run = run_once(session, prompt, forced)
                reference = run.logits.tobytes() if reference is None else reference
                same = run.logits.tobytes() == reference
                good = same and run.as_predicted
                self.passed &= good
                print(
                    f"{verdict(good)} {self.name(arena)}: {describe(run, session)}; identical {same}, "
                    f"as predicted {run.as_predicted}",
                    flush=True,
                )
                self.runs[arena].append(run)

    def conclude(self) -> None:
        for arena, runs in self.runs.items():
            prefill, decode = [run.prefill for run in runs], [1e3 * run.decode / run.n_decoded for run in runs]
            print(
                f"     {self.name(arena)}, {len(runs)} runs: prefill best {min(prefill):.2f} s, median "
                f"{statistics.median(prefill):.2f}; decode best {min(decode):.2f} ms, median "
                f"{statistics.median(decode):.2f}"
            )
        arenas = [arena for arena in self.sessions if arena]
        for smaller, larger in pairwise(arenas):
            self._hold(larger, smaller, "prefill", LARGER_ARENA_TIMES)
            self._hold(larger, smaller, "decode", LARGER_ARENA_TIMES)
        for arena in arenas:
            if 0 in self.sessions:
                self._hold(arena, 0, "prefill", ARENA_OFF_TIMES)
            session = self.sessions[arena]
            if session.copy_rate and resident_share(session) <= COPIES_DOMINATE:
                share = max(run.rate for run in self.runs[arena]) / session.copy_rate
                self._judge(
                    share >= LINK_SHARE,
                    f"{self.name(arena)}: decode at {share:.1%} of the link, {LINK_SHARE:.0%} needed",
                )

    def _hold(self, arena: int, other: int, part: str, times: float) -> None:
        """The best run of an arena may take ``times`` as long as the other's."""
        own, others = (min(getattr(run, part) for run in self.runs[key]) for key in (arena, other))
        self._judge(
            own <= times * others,
            f"{self.name(arena)}: {part} {own / others:.3f} of the time with arena {other or 'off'}, {times} allowed",
        )

    def _judge(self, good: bool, text: str) -> None:
        self.passed &= good
        print(f"{verdict(good)} {text}", flush=True)


def measure_context(arguments: argparse.Namespace, shape: ModelShape, backend: Backend, n_ctx: int) -> bool:
    rng = np.random.default_rng(n_ctx)
    prompt = [int(t) for t in rng.integers(3, shape.n_vocab, n_ctx - arguments.decode)]
    forced = [int(t) for t in rng.integers(3, shape.n_vocab, arguments.decode)]
    type_k, type_v = pair_of(arguments.type)
    config = RunConfig(
        model_path=arguments.model,
        n_ctx=n_ctx,
        n_batch=arguments.ub and max(DEFAULT_BATCH_TOKENS, arguments.ub),
        n_ubatch=arguments.ub,
        type_k=type_k,
        type_v=type_v,
    )
    arenas = sorted(arguments.arena, key=lambda arena: (arena == 0, arena))
    with ExitStack() as closing:
        sessions: dict[int, Session] = {}
        for arena in arenas:
            plan = plan_run(with_arena(config, arena * MIB), shape, backend.budget())
            started = perf_counter()
            sessions[arena] = closing.enter_context(Session(plan, backend))
            opened = perf_counter() - started
            warm_up(sessions[arena], prompt, forced)
            print(
                f"     c {n_ctx} ub {plan.n_ubatch} {arguments.type} arena {arena or 'off'}: "
                f"{plan.arena_bytes / GIB:.2f} GiB, {resident_share(sessions[arena]):.0%} of the cache resident, "
                f"opened in {opened:.1f} s, warmed up in {perf_counter() - started - opened:.1f} s",
                flush=True,
            )
        context = Context(sessions)
        context.measure(prompt, forced, arguments.repeat)
        context.conclude()
    return context.passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--ctx", type=int, nargs="+", default=[131072])
    parser.add_argument("--ub", type=int, help="default: what the plan chooses")
    parser.add_argument("--arena", type=int, nargs="+", default=[0, 2048], help="MiB; 0 is off")
    parser.add_argument("--decode", type=int, default=16, help="tokens, at least 2")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--type", default="f16", help="of keys and values, or K/V")
    parser.add_argument("--device", default="cuda", help="cuda[:N], or cpu to try the script itself")
    other_generation.add_option(parser)
    arguments = parser.parse_args()
    other_generation.apply_option(arguments)
    if arguments.decode < 2 or arguments.repeat < 1 or len(set(arguments.arena)) < len(arguments.arena):
        parser.error("needs --decode 2 or more, --repeat 1 or more, and every --arena once")
    try:
        pair_of(arguments.type)
    except ValueError as error:
        parser.error(f"--type: {error}")
    passed = True
    kernel_files = KernelFiles(cache_root(os.environ), report=print)
    backend = open_backend(arguments.device, n_threads=None, kernel_files=kernel_files)
    try:
        with open_model(arguments.model) as model_file:
            shape = read_model_shape(model_file)
            started = perf_counter()
            backend.load_weights(model_file)
            print(
                f"{backend.budget().name}: weights {shape.tensors_bytes / GIB:.2f} GiB loaded in "
                f"{perf_counter() - started:.1f} s; link {backend.measure_copy_rate() / 1e9:.1f} GB/s",
                flush=True,
            )
            for n_ctx in arguments.ctx:
                passed &= measure_context(arguments, shape, backend, n_ctx)
            for line in backend.notes:
                print(f"     {line}")
    finally:
        backend.close()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
