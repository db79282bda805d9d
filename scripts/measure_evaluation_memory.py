"""Peak memory of a lock-step KL divergence at two contexts, on a tiny model with a large vocabulary.

    python -m scripts.measure_evaluation_memory [--vocab 248320] [--ctx 2048,32768] [--limit-mib 256]

A whole context of logits would be 30 GiB a side at 32768 tokens. Exit code 1 when the peak grows by the limit or more
between the smallest and the largest context. Linux only: the peak is the child's ru_maxrss.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fixtures.tiny_models import TinyModel, write_model
from tests.fixtures.tiny_vocab import spm_vocab

MIB = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=248320)
    parser.add_argument("--ctx", default="2048,32768")
    parser.add_argument("--limit-mib", type=int, default=256)
    arguments = parser.parse_args()
    contexts = [int(n_ctx) for n_ctx in arguments.ctx.split(",")]
    peaks = []
    print("| -c | rows | identical | bytes streamed | peak MiB |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        model, text = make_inputs(Path(folder), arguments.vocab, max(contexts))
        for n_ctx in contexts:
            peaks.append(run(model, text, n_ctx))
    growth = (max(peaks) - peaks[0]) / MIB
    print(f"growth {growth:.0f} MiB, limit {arguments.limit_mib} MiB")
    return int(growth >= arguments.limit_mib)


def make_inputs(folder: Path, n_vocab: int, n_ctx: int) -> tuple[Path, Path]:
    """A model of one small layer, and random lower-case text of more than two contexts."""
    filler = n_vocab - len(spm_vocab().tokens)
    model = TinyModel(
        n_layer=1, n_embd=32, n_head=1, n_head_kv=1, n_ff=64, n_ctx_train=n_ctx, vocab=spm_vocab(n_filler=filler)
    )
    assert len(model.vocab.tokens) == n_vocab
    path = write_model(folder / "model.gguf", model)
    letters = np.random.default_rng(0).integers(ord("a"), ord("z") + 1, 4 * n_ctx).astype(np.uint8)
    text = folder / "text.txt"
    text.write_bytes(letters.tobytes())
    return path, text


def run(model: Path, text: Path, n_ctx: int) -> int:
    """Peak resident bytes of one comparison: streaming with the smallest arena against none."""
    shape = ["-m", str(model), "-c", str(n_ctx), "-ub", "512", "--kv-page-tokens", "64", "--device", "cpu", "--json"]
    plan = json.loads(kvs("validate", *shape, "--kv-stream-arena-mib", "auto").decode())["plan"]
    command = [
        *(sys.executable, "-m", "kvs_cli", "kl-divergence", *shape, "-f", str(text), "--chunks", "1", "--no-resume"),
        *("--kv-stream-arena-mib", str(plan["minimum_arena_mib"]), "--base-kv-stream-arena-mib", "0"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    document = json.loads(process.stdout.read())
    _, status, usage = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    peak = usage.ru_maxrss * 1024
    kld, streaming = document["kld"], document["streaming"]
    print(
        f"| {n_ctx} | {kld['rows']} | {kld['rows_identical']} | {streaming['bytes_streamed']} | {peak / MIB:.0f} |",
        flush=True,
    )
    return peak


def kvs(*words: str) -> bytes:
    return subprocess.run([sys.executable, "-m", "kvs_cli", *words], check=True, stdout=subprocess.PIPE).stdout


if __name__ == "__main__":
    sys.exit(main())
