"""Base files crossing over between kvs and llama-perplexity, in both directions, on real runs.

    python -m scripts.check_kld_crossover LLAMA_PERPLEXITY TEXT MODEL [MODEL ...] [--ctx 512] [--chunks 4]

For each model both tools write a base file of the same text, then both tools compare the model with both files. A row
for each pair: mean and largest KLD, same top token, PPL of both sides. Exit code 1 when a tool refuses the other's
file, when a file has another length, when the two tools disagree about PPL by more than --max-ppl-ratio, or when a
mean KLD is above --max-mean-kld. The defaults suit F16 and F32 weights: on quantised ones llama.cpp rounds activations
to 8 bits, and two correct programs differ by a mean KLD near 0.005 (pass --max-mean-kld 0.01 --max-ppl-ratio 0.005).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

N_ATTEMPTS = 20
"""llama-perplexity can exit before its log thread has written the last lines."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What one comparison printed."""

    mean_kld: float
    max_kld: float
    same_top: float
    ppl: float
    ppl_base: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("llama_perplexity")
    parser.add_argument("text")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--type", default="f16", help="of keys and values; f32 runs llama.cpp without its F16 casts")
    parser.add_argument("--max-mean-kld", type=float, default=1e-4)
    parser.add_argument("--max-ppl-ratio", type=float, default=5e-4)
    arguments = parser.parse_args()
    failed = False
    columns = ("model", "file by", "read by", "mean KLD", "max KLD", "same top", "PPL", "PPL(base)")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for model in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            failed |= check_model(arguments, model, Path(folder))
    return 1 if failed else 0


def check_model(arguments: argparse.Namespace, model: str, folder: Path) -> bool:
    """Print the four rows of a model; True when something is wrong."""
    n_ctx = str(arguments.ctx)
    common = ["-m", model, "-c", n_ctx, "-b", n_ctx, "-ctk", arguments.type, "-ctv", arguments.type]
    llama = [arguments.llama_perplexity, *common, "-t", "2", *(["-fa", "off"] if arguments.type == "f32" else [])]
    kvs = [sys.executable, "-m", "kvs_cli", "perplexity", *common]
    files = {"kvs": folder / "kvs.kld", "llama.cpp": folder / "llama.kld"}
    text = ["-f", arguments.text, "--chunks", str(arguments.chunks)]
    subprocess.run([*kvs, *text, "--kl-divergence-base", str(files["kvs"])], check=True, capture_output=True)
    subprocess.run([*llama, *text, "--kl-divergence-base", str(files["llama.cpp"])], check=True, capture_output=True)
    lengths = {name: path.stat().st_size for name, path in files.items()}
    failed = len(set(lengths.values())) != 1
    ppl: set[float] = set()
    for writer, path in files.items():
        reading = ["--kl-divergence", "--kl-divergence-base", str(path)]
        for reader, compared in (
            ("kvs", compare_kvs([*kvs, *reading])),
            ("llama.cpp", compare_llama([*llama, *reading])),
        ):
            print(
                f"| {Path(model).name} | {writer} | {reader} | {compared.mean_kld:.6f} | {compared.max_kld:.6f} "
                f"| {100 * compared.same_top:.3f} % | {compared.ppl:.4f} | {compared.ppl_base:.4f} |",
                flush=True,
            )
            ppl.add(compared.ppl)
            failed |= compared.mean_kld > arguments.max_mean_kld
    if len(set(lengths.values())) != 1:
        print(f"lengths differ: {lengths}")
    return failed or max(ppl) / min(ppl) - 1 > arguments.max_ppl_ratio


def compare_kvs(command: list[str]) -> Compared:
    done = subprocess.run([*command, "--json"], check=True, capture_output=True, text=True)
    document = json.loads(done.stdout)
    return Compared(
        mean_kld=document["kld"]["mean"],
        max_kld=document["kld"]["max"],
        same_top=document["kld"]["same_top"],
        ppl=document["perplexity"]["ppl"]["value"],
        ppl_base=document["perplexity"]["ppl_base"]["value"],
    )


def compare_llama(command: list[str]) -> Compared:
    for _ in range(N_ATTEMPTS):
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        text = done.stdout + done.stderr
        if "Same top p:" in text:
            return Compared(
                mean_kld=_number(text, "Mean    KLD:"),
                max_kld=_number(text, "Maximum KLD:"),
                same_top=_number(text, "Same top p:") / 100,
                ppl=_number(text, "Mean PPL(Q)                   :"),
                ppl_base=_number(text, "Mean PPL(base)                :"),
            )
        if "failed" in text or "inconsistent" in text:
            break
    sys.exit(f"{' '.join(command)}\n{text}")


def _number(text: str, label: str) -> float:
    found = re.search(re.escape(label) + r"\s*(-?[\d.]+)", text)
    assert found is not None, f"{label} is missing in\n{text}"
    return float(found[1])


if __name__ == "__main__":
    sys.exit(main())
