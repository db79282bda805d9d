"""One evaluation of a fake model that can be killed and started again; prints its result as JSON.

Usage  python -m tests.evaluate.resumable_run KIND FOLDER DELAY_MS
KIND   ppl | llama | kvs (perplexity alone, or writing a base file) | kld (lock-step)
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvs_core.evaluate.chunks import plan_chunks
from kvs_core.evaluate.compact_layout import make_compact_header
from kvs_core.evaluate.compact_writer import CompactLogitsWriter
from kvs_core.evaluate.journal import Journal, configuration_key
from kvs_core.evaluate.kl_divergence import compare_sources
from kvs_core.evaluate.logits_file import LlamaLogitsWriter, LogitsFileLayout
from kvs_core.evaluate.perplexity import NLL_ROW, evaluation_configuration, measure_perplexity
from kvs_core.evaluate.report import kld_to_json, perplexity_to_json
from kvs_core.evaluate.row_math import KLD_ROW, RowWorkers
from kvs_core.evaluate.saved_logits import LogitsIdentity
from tests.evaluate.fake_source import N_VOCAB, FakeSource, make_text

N_CTX = 64
N_CHUNK = 12
ONE_IS_DONE = "a chunk of this process is done"


class SlowSource(FakeSource):
    """Sleeps before each tile, so that a kill can fall anywhere; says so when its second chunk begins."""

    delay_seconds = 0.0
    n_begun = 0

    def prefill_rows(self, tokens, *, output_begin):  # type: ignore[no-untyped-def]
        self.n_begun += 1
        if self.n_begun == 2 and self.delay_seconds:
            print(ONE_IS_DONE, flush=True)
        for first, rows in super().prefill_rows(tokens, output_begin=output_begin):
            time.sleep(self.delay_seconds)
            yield first, rows


def evaluate(
    kind: str, folder: Path, *, sources: tuple[FakeSource, FakeSource], with_journal: bool = True
) -> dict[str, Any]:
    """Run (or go on with) the evaluation; returns what would be printed."""
    text = make_text(N_CHUNK * N_CTX)
    plan = plan_chunks(n_tokens=len(text), n_ctx=N_CTX)
    key = configuration_key(evaluation_configuration(kind=kind, plan=plan, tokens=text, bos=0, run={}))
    path = folder / f"base.{kind}"
    identity = LogitsIdentity(model="m", tokenizer="t", type_k="f16", type_v="f16")
    with ExitStack() as closing:
        workers = closing.enter_context(RowWorkers(1))
        journal = None
        if with_journal:
            dtype = KLD_ROW if kind == "kld" else NLL_ROW
            journal = closing.enter_context(Journal(folder / f"{kind}.journal", key=key, dtype=dtype))
        if kind == "kld":
            result = compare_sources(*sources, text, plan=plan, bos=0, workers=workers, journal=journal)
            report = kld_to_json(result)
        else:
            writer: LlamaLogitsWriter | CompactLogitsWriter | None = None
            if kind == "llama":
                layout = LogitsFileLayout(n_ctx=N_CTX, n_vocab=N_VOCAB, n_chunk=N_CHUNK)
                writer = LlamaLogitsWriter(path, layout=layout, tokens=text)
            elif kind == "kvs":
                header = make_compact_header(
                    n_ctx=N_CTX, n_chunk=N_CHUNK, n_vocab=N_VOCAB, tokens=text, identity=identity
                )
                writer = CompactLogitsWriter(path, header=header, tokens=text)
            if writer is not None:
                closing.callback(writer.close)
            perplexity = measure_perplexity(
                sources[0], text, plan=plan, bos=0, workers=workers, writer=writer, journal=journal
            )
            report = perplexity_to_json(perplexity)
            if writer is not None:
                report["file"] = hashlib.sha256(path.read_bytes()).hexdigest()
        if journal is not None:
            journal.discard()
    return report


def main() -> None:
    kind, folder, delay_ms = sys.argv[1:]
    sources = SlowSource(bytes_per_token=7), SlowSource(bytes_per_token=9, noise=0.01)
    for source in sources:
        source.delay_seconds = float(delay_ms) / 1000
    print(json.dumps(evaluate(kind, Path(folder), sources=sources), sort_keys=True))


if __name__ == "__main__":
    main()
