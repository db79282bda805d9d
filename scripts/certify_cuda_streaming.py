"""Certify streaming on a CUDA device at a long context: `kvs kl-divergence` in lock-step, an arena against none.

    python -m scripts.certify_cuda_streaming MODEL [--ctx 131072] [--arena 2048] [--ub 4096] [--type f16]

The text is made here: words of the project's documents in random order, twice the context and a little more, which is
what the command asks for. One chunk is run on both sides, over one copy of the weights; half of its rows are compared.
Exit code 1 when the largest divergence is not exactly 0 or nothing streamed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np

from kvs_core.model_file import open_model
from kvs_core.tokenizer import Tokenizer
from scripts.cuda_checks.sessions import verdict
from scripts.streaming_runs import TEXT_FILES

SURPLUS = 1.02
SAMPLE_WORDS = 5000


def make_text(model: Path, n_tokens: int) -> str:
    """At least ``n_tokens`` tokens of random words, a line of a dozen each."""
    with open_model(model) as model_file:
        tokenizer = Tokenizer.from_metadata(model_file.metadata, path=str(model))
    words = np.array("\n".join(file.read_text(encoding="utf-8") for file in TEXT_FILES).split())
    rng = np.random.default_rng(0)

    def draw(n_words: int) -> str:
        drawn = rng.choice(words, n_words)
        return "\n".join(" ".join(drawn[begin : begin + 12]) for begin in range(0, n_words, 12))

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special=True, parse_special=False))

    tokens_per_word = count(draw(SAMPLE_WORDS)) / SAMPLE_WORDS
    return draw(int(SURPLUS * n_tokens / tokens_per_word) + SAMPLE_WORDS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--ctx", type=int, default=131072)
    parser.add_argument("--arena", type=int, default=2048, help="MiB")
    parser.add_argument("--ub", type=int, default=4096)
    parser.add_argument("--type", default="f16")
    parser.add_argument("--device", default="cuda", help="cuda[:N], or cpu to try the script itself")
    arguments = parser.parse_args()
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        started = perf_counter()
        file.write(make_text(arguments.model, 2 * arguments.ctx))
        file.flush()
        print(
            f"     text of {Path(file.name).stat().st_size} bytes made in {perf_counter() - started:.1f} s", flush=True
        )
        command = [
            *(sys.executable, "-m", "kvs_cli", "kl-divergence", "-m", str(arguments.model), "-f", file.name),
            *("-c", str(arguments.ctx), "-b", str(arguments.ub), "-ub", str(arguments.ub), "--chunks", "1"),
            *("-ctk", arguments.type, "-ctv", arguments.type, "--device", arguments.device, "--no-resume", "--json"),
            *("--kv-stream-arena-mib", str(arguments.arena), "--base-kv-stream-arena-mib", "0", "--max-kld", "0"),
        ]
        started = perf_counter()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        seconds = perf_counter() - started
    document = json.loads(done.stdout or "{}")
    if "kld" not in document:
        print(f"FAIL kl-divergence ended with {done.returncode} and no result: {done.stdout.strip()}", flush=True)
        return 1
    kld, streaming = document["kld"], document["streaming"]
    streamed, predicted = streaming["bytes_streamed"], streaming["predicted_bytes_streamed"]
    good = done.returncode == 0 and kld["max"] == 0 and kld["mean"] == 0 and streamed == predicted > 0
    print(
        f"{verdict(good)} kl-divergence -c {arguments.ctx} -ub {arguments.ub} {arguments.type}, arena "
        f"{arguments.arena} MiB against none: mean KLD {kld['mean']:g}, max {kld['max']:g}, {kld['rows_identical']} of "
        f"{kld['rows']} rows identical, {streamed / 1e9:.1f} GB streamed, as predicted {streamed == predicted}, "
        f"exit {done.returncode}, {seconds:.0f} s",
        flush=True,
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
