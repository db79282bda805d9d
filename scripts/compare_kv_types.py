"""What each KV type costs here and in llama.cpp: mean KL-divergence from the f16 cache, as a Markdown table.

    python -m scripts.compare_kv_types -m F16.gguf -f TEXT --folder DIR [--llama-bin DIR] [-c 2048] [--chunks 4]

Each program is compared with its own f16 cache, so nothing but the cache's type differs; use F16 or F32 weights, as
llama.cpp rounds activations for quantised ones. Types that llama.cpp does not have are measured here alone, and the
line of f16 shows what a base file's own rounding costs. DIR keeps the two base files and every figure as soon as it is
there: the same command goes on after an interruption, one without --llama-bin measures here only, and --table prints
what there is.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
GGML_TYPES = ["f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
TURBO_TYPES = ["turbo4", "turbo3", "turbo2", "q8_0/turbo4", "q8_0/turbo3", "q8_0/turbo2"]
NEVER_ROTATED = ["f16", "bf16"]
MEAN_KLD = re.compile(r"Mean\s+KLD:\s*(-?[\d.]+)\s*±\s*([\d.]+)")
SAME_TOP = re.compile(r"Same top p:\s*([\d.]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the table; ``kv_type`` is the type of keys and values, or two with a slash."""

    kv_type: str
    rotates: bool

    @property
    def key(self) -> str:
        return f"{self.kv_type} {'rotated' if self.rotates else 'not rotated'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Mean KLD in nats, its standard error, and the share of equal top tokens in percent."""

    kld: float
    error: float
    same_top: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("-f", "--file", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--llama-bin", type=Path)
    parser.add_argument("-c", "--ctx-size", type=int, default=2048)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--types", nargs="+", default=GGML_TYPES + TURBO_TYPES, choices=GGML_TYPES + TURBO_TYPES)
    parser.add_argument("--table", action="store_true", help="measure nothing, print what is known")
    args = parser.parse_args()
    cases = [
        Case(kv_type=kv_type, rotates=rotates)
        for kv_type in args.types
        for rotates in ([False] if kv_type in NEVER_ROTATED else [True] if kv_type in TURBO_TYPES else [True, False])
    ]

    results = Results(args.folder, {"model": str(args.model), "text": str(args.file), "n_ctx": args.ctx_size})
    if not args.table:
        common = ["-m", str(args.model), "-f", str(args.file), "-c", str(args.ctx_size), "--chunks", str(args.chunks)]
        common += ["-t", str(args.threads)]
        measure(cases, common, args.folder, args.llama_bin, results, base_name=f"{args.chunks}-chunks")
    print_table(cases, results, f"{args.chunks} chunks")
    return 0


class Results:
    """Figures by program, chunks and case, in a file that grows with each of them."""

    def __init__(self, folder: Path, setting: dict[str, object]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "results.jsonl"
        if not self._path.exists():
            self._path.write_text(json.dumps(setting) + "\n", encoding="utf-8")
        first, *rest = self._path.read_text(encoding="utf-8").splitlines()
        if json.loads(first) != setting:
            raise SystemExit(f"{self._path} is of {first}, not of {json.dumps(setting)}")
        self._known: dict[str, Loss] = {}
        for line in rest:
            record = json.loads(line)
            key = record.pop("key")
            self._known[key] = Loss(**record)

    def get(self, key: str) -> Loss | None:
        return self._known.get(key)

    def add(self, key: str, loss: Loss) -> None:
        self._known[key] = loss
        with self._path.open("a", encoding="utf-8") as file:
            values = {"kld": loss.kld, "error": loss.error, "same_top": loss.same_top}
            file.write(json.dumps({"key": key, **values}) + "\n")


def measure(
    cases: list[Case], common: list[str], folder: Path, llama_bin: Path | None, results: Results, *, base_name: str
) -> None:
    """Run what is not known yet, one case after the other, here first."""
    n_chunks = base_name.replace("-", " ")
    here = [sys.executable, "-m", "kvs_cli", "perplexity", *common]
    there = [] if llama_bin is None else [str(llama_bin / "llama-perplexity"), *common, "-fa", "on"]
    if there:
        there += ["-b", common[common.index("-c") + 1]]
    for name, command, more in (("here", here, ["--kld-format", "kvs"]), ("llama.cpp", there, [])):
        wanted = [case for case in cases if name == "here" or case.kv_type in GGML_TYPES]
        wanted = [case for case in wanted if results.get(f"{name}, {n_chunks}, {case.key}") is None]
        if not command or not wanted:
            continue
        base = folder / f"{name}-{base_name}.kld"
        if not base.exists():
            unfinished = base.with_suffix(".unfinished")
            execute([*command, *more, "--save-all-logits", str(unfinished)])
            unfinished.rename(base)
        for case in wanted:
            type_k, _, type_v = case.kv_type.partition("/")
            words = ["--kl-divergence", "--kl-divergence-base", str(base), "-ctk", type_k, "-ctv", type_v or type_k]
            if name == "here" and not case.rotates and case.kv_type not in NEVER_ROTATED:
                words.append("--no-kv-rotate")
            loss = find_loss(execute([*command, *words], rotates=case.rotates))
            results.add(f"{name}, {n_chunks}, {case.key}", loss)
            print(f"{name}, {case.key}: {loss.kld:.6f} ± {loss.error:.6f}", file=sys.stderr, flush=True)


def execute(command: list[str], *, rotates: bool = True) -> str:
    """What the program printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LLAMA_ATTN_ROT_DISABLE": "0" if rotates else "1"}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    shown = finished.stdout + finished.stderr
    if finished.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {finished.returncode}:\n{shown[-2000:]}")
    return shown


def find_loss(shown: str) -> Loss:
    kld, top = MEAN_KLD.search(shown), SAME_TOP.search(shown)
    if kld is None or top is None:
        raise SystemExit(f"no figures in what was printed:\n{shown[-2000:]}")
    return Loss(kld=float(kld[1]), error=float(kld[2]), same_top=float(top[1]))


def print_table(cases: list[Case], results: Results, n_chunks: str) -> None:
    print("| type | rotated | here | same top | llama.cpp | same top | ratio |")
    print("|---|---|---|---|---|---|---|")
    for case in cases:
        ours, theirs = (results.get(f"{name}, {n_chunks}, {case.key}") for name in ("here", "llama.cpp"))
        cells = [case.kv_type, "yes" if case.rotates else "no"]
        for loss in (ours, theirs):
            cells += [f"{loss.kld:.6f} ± {loss.error:.6f}", f"{loss.same_top:.2f} %"] if loss else ["", ""]
        cells.append(f"{ours.kld / theirs.kld:.3f}" if ours and theirs and theirs.kld > 0 else "")
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    sys.exit(main())
