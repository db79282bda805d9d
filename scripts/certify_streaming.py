"""Certify KV streaming on a real model: the same logits, bit for bit, with a tenth of the KV cache resident.

    python -m scripts.certify_streaming MODEL TEXT [--ctx 512,2048,8192] [--types f16,q8_0] [--chunks 2] [--files]

For each context the largest arena is taken that keeps at most a tenth of the KV bytes resident. Then
`kvs kl-divergence` runs both sides in lock-step with `--max-kld 0 --min-same-top 100`, and with --files the same is
shown by saved files. One text row a run: context, micro-batch, arena, resident share, pages and bytes streamed, rows
identical, largest KLD. Exit code 1 when a run fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SHARE = 0.10


def run_kvs(*words: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "kvs_cli", *words, "--json"], capture_output=True, text=True, check=False
    )
    if not done.stdout:
        sys.exit(f"kvs {' '.join(words)}\n{done.stderr}")
    return done.returncode, json.loads(done.stdout)


def shape_flags(model: str, n_ctx: int, kv_type: str) -> list[str]:
    """A micro-batch of at most a quarter of the context, and pages small enough that a tenth is several of them."""
    n_ubatch = min(512, n_ctx // 4)
    page_tokens = max(16, min(256, n_ctx // 32))
    return [
        *("-m", model, "-c", str(n_ctx), "-b", str(n_ctx), "-ub", str(n_ubatch), "--kv-page-tokens", str(page_tokens)),
        *("-ctk", kv_type, "-ctv", kv_type, "--device", "cpu"),
    ]


def find_arena(flags: list[str]) -> tuple[int, float]:
    """The largest whole MiB with at most a tenth of the KV bytes resident, and that share."""

    def share_of(arena_mib: int) -> float:
        _, document = run_kvs("validate", *flags, "--kv-stream-arena-mib", str(arena_mib))
        plan = document["plan"]
        return float(plan["arena"]["prefill"]["resident_bytes"]) / float(plan["kv_bytes"])

    _, document = run_kvs("validate", *flags, "--kv-stream-arena-mib", "auto")
    low, high = document["plan"]["minimum_arena_mib"], document["plan"]["useful_arena_mib"]
    if share_of(low) > SHARE:
        return low, share_of(low)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if share_of(middle) <= SHARE else (low, middle - 1)
    return low, share_of(low)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--ctx", default="512,2048,8192")
    parser.add_argument("--types", default="f16,q8_0")
    parser.add_argument("--chunks", default="2")
    parser.add_argument("--files", action="store_true", help="also by saved files, in both formats")
    arguments = parser.parse_args()
    failed = False
    columns = (
        "how",
        "-c",
        "-ub",
        "types",
        "arena MiB",
        "resident",
        "pages streamed",
        "MiB streamed",
        "identical",
        "max KLD",
    )
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for n_ctx in map(int, arguments.ctx.split(",")):
        for kv_type in arguments.types.split(","):
            flags = shape_flags(arguments.model, n_ctx, kv_type)
            arena, share = find_arena(flags)
            text = ("-f", arguments.text, "--chunks", arguments.chunks)
            code, document = run_kvs(
                *("kl-divergence", *flags, *text, "--kv-stream-arena-mib", str(arena)),
                *("--base-kv-stream-arena-mib", "0", "--max-kld", "0", "--min-same-top", "100"),
            )
            failed |= report("lock-step", flags, kv_type, arena, share, code, document, must_be_zero=True)
            for kind in ("llama", "kvs") if arguments.files else ():
                with tempfile.TemporaryDirectory() as folder:
                    base = str(Path(folder) / "base")
                    run_kvs("perplexity", *flags, *text, "--save-all-logits", base, "--kld-format", kind)
                    code, document = run_kvs(
                        *("perplexity", *flags, "--kl-divergence", "--kl-divergence-base", base),
                        *("--kv-stream-arena-mib", str(arena)),
                    )
                    failed |= report(f"{kind} file", flags, kv_type, arena, share, code, document, must_be_zero=False)
    sys.exit(1 if failed else 0)


def report(
    how: str,
    flags: list[str],
    kv_type: str,
    arena: int,
    share: float,
    code: int,
    document: dict[str, Any],
    *,
    must_be_zero: bool,
) -> bool:
    """Print one row; True when the run does not certify anything."""
    kld, streaming = document["kld"], document["streaming"]
    n_ctx, n_ubatch = flags[flags.index("-c") + 1], flags[flags.index("-ub") + 1]
    print(
        f"| {how} | {n_ctx} | {n_ubatch} | {kv_type} | {arena} | {share:.1%} | {streaming['pages_streamed']} "
        f"| {streaming['bytes_streamed'] / 2**20:.1f} | {kld['rows_identical']} of {kld['rows']} | {kld['max']:.3g} |",
        flush=True,
    )
    as_predicted = streaming["bytes_streamed"] == streaming["predicted_bytes_streamed"] > 0
    within = kld["max"] == 0 if must_be_zero else abs(kld["max"]) <= kld["floor"]
    proved = kld["rows_identical"] in (None, kld["rows"]) and kld["same_top"] == 1
    return not (code == 0 and as_predicted and within and proved)


if __name__ == "__main__":
    main()
