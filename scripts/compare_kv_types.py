"""What each KV type costs here and in llama.cpp: mean KL-divergence from the f16 cache, as a Markdown table.

    python scripts/compare_kv_types.py -m F16.gguf -f TEXT --llama-bin DIR [-c 2048] [--chunks 4] [--types q8_0 ...]

Each program is compared with its own f16 cache, so nothing but the cache's type differs; use F16 or F32 weights, as
llama.cpp rounds activations for quantised ones. Types that llama.cpp does not have are measured here alone. Base files,
2 bytes for each pair of scored token and vocabulary item, go to a temporary folder.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
DEFAULT_TYPES = ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl", "turbo4", "turbo3", "turbo2"]
MEAN_KLD = re.compile(r"Mean\s+KLD:\s*(-?[\d.]+)\s*±\s*([\d.]+)")
SAME_TOP = re.compile(r"Same top p:\s*([\d.]+)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("-f", "--file", type=Path, required=True)
    parser.add_argument("--llama-bin", type=Path, required=True)
    parser.add_argument("-c", "--ctx-size", type=int, default=2048)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--types", nargs="+", default=DEFAULT_TYPES)
    args = parser.parse_args()
    common = ["-m", str(args.model), "-f", str(args.file), "-c", str(args.ctx_size), "--chunks", str(args.chunks)]
    common += ["-t", str(args.threads)]
    here = [sys.executable, "-m", "kvs_cli", "perplexity", *common]
    there = [str(args.llama_bin / "llama-perplexity"), *common, "-b", str(args.ctx_size)]

    print("| type | rotated | here | same top | llama.cpp | same top | ratio |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder, "ours"), Path(folder, "theirs")
        execute([*here, "--save-all-logits", str(ours)])
        execute([*there, "--save-all-logits", str(theirs)])
        for kv_type in args.types:
            is_turbo = kv_type.startswith("turbo")
            types = ["--kl-divergence", "-ctk", kv_type, "-ctv", kv_type, "--kl-divergence-base"]
            for rotates in (True,) if is_turbo else (True, False):
                kld, top = execute([*here, *types, str(ours), *([] if rotates else ["--no-kv-rotate"])])
                cells = [kv_type, "yes" if rotates else "no", f"{kld:.6f}", f"{top:.2f} %", "", "", ""]
                if not is_turbo:
                    other_kld, other_top = execute([*there, *types, str(theirs), "-fa", "on"], rotates=rotates)
                    cells[4:] = [f"{other_kld:.6f}", f"{other_top:.2f} %", f"{kld / other_kld:.2f}"]
                print(f"| {' | '.join(cells)} |", flush=True)
    return 0


def execute(command: list[str], *, rotates: bool = True) -> tuple[float, float]:
    """Mean KLD and share of equal top tokens in percent; zeros for a run that makes a base file."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LLAMA_ATTN_ROT_DISABLE": "0" if rotates else "1"}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    shown = finished.stdout + finished.stderr
    if finished.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {finished.returncode}:\n{shown[-2000:]}")
    kld, top = MEAN_KLD.search(shown), SAME_TOP.search(shown)
    return (float(kld[1]), float(top[1])) if kld and top else (0.0, 0.0)


if __name__ == "__main__":
    sys.exit(main())
