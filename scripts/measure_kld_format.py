"""Size and precision of the two base-file formats on the logits of a real model.

    python -m scripts.measure_kld_format MODEL TEXT [TEXT ...] [--ctx 512] [--chunks 1]

Each text runs through the model once. Its rows are written in both formats; then rows with known noise (normal, of
three strengths) are compared with the exact ones, with our file and with llama.cpp's. A row of the table for each text
and noise: bits per token of the vocabulary, share of llama.cpp's size, the stated floor, the exact mean KLD, and the
error that each format makes on a row (root mean square).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvs_core.backend import open_backend
from kvs_core.config import RunConfig
from kvs_core.evaluate.chunks import ChunkPlan, plan_chunks
from kvs_core.evaluate.compact_file import CompactLogitsFile
from kvs_core.evaluate.compact_layout import make_compact_header
from kvs_core.evaluate.compact_writer import CompactLogitsWriter
from kvs_core.evaluate.kl_divergence import KldResult, compare_sources, compare_with_saved
from kvs_core.evaluate.logits_file import LlamaLogitsFile, LlamaLogitsWriter, LogitsFileLayout
from kvs_core.evaluate.perplexity import measure_perplexity
from kvs_core.evaluate.row_math import RowWorkers
from kvs_core.evaluate.saved_logits import LogitsIdentity, LogitsWriter, SavedLogits
from kvs_core.model_file import open_model
from kvs_core.model_reader import read_model_shape
from kvs_core.plan import plan_run
from kvs_core.session import Session
from kvs_core.tokenizer import Tokenizer

NOISES = (1e-3, 1e-2, 5e-2)


class StoredLogits:
    """A LogitsSource over rows kept in memory; ``noise`` is added to each row, the same at every call."""

    streaming_counters = None

    def __init__(self, chunks: list[NDArray[np.float32]], noise: float = 0.0) -> None:
        self._chunks, self._noise = chunks, noise
        self._next = -1
        self.n_vocab = chunks[0].shape[1]
        self.n_ctx = 1 << 30

    def clear(self) -> None:
        self._next = (self._next + 1) % len(self._chunks)

    def prefill_rows(self, tokens: Sequence[int], *, output_begin: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
        rng = np.random.default_rng(self._next)
        for begin in range(0, len(tokens) - output_begin, 8):
            rows = self._chunks[self._next][begin : begin + 8]
            yield output_begin + begin, rows + (self._noise * rng.standard_normal(rows.shape)).astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=1)
    arguments = parser.parse_args()
    columns = ("text", "bits/token", "share", "floor mean / max", "exact mean KLD", "error kvs", "error llama.cpp")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for path in arguments.texts:
        tokens, plan, chunks = run_model(arguments.model, path, arguments.ctx, arguments.chunks)
        with tempfile.TemporaryDirectory() as folder, RowWorkers() as workers:
            measure(path.name, Path(folder), tokens, plan, chunks, workers)


def run_model(
    model: Path, text: Path, n_ctx: int, n_chunks: int
) -> tuple[NDArray[np.int32], ChunkPlan, list[NDArray[np.float32]]]:
    """Tokens, plan, and the scored rows of each chunk with the last token's row behind them."""
    config = RunConfig(model_path=model, n_ctx=n_ctx)
    backend = open_backend("cpu", n_threads=None)
    with open_model(model) as file:
        plan = plan_run(config, read_model_shape(file), backend.budget())
        tokenizer = Tokenizer.from_metadata(file.metadata, path=str(model))
        tokens = np.array(
            tokenizer.encode(text.read_text(encoding="utf-8"), add_special=True, parse_special=False), np.int32
        )
        chunk_plan = plan_chunks(n_tokens=len(tokens), n_ctx=n_ctx, n_chunks=n_chunks)
        backend.load_weights(file)
        chunks = []
        with Session(plan, backend) as session:
            for chunk_idx in range(n_chunks):
                session.clear()
                inputs = chunk_plan.input_tokens(tokens, chunk_idx, tokenizer.bos_id if tokenizer.add_bos else None)
                tiles = session.prefill_rows(inputs.tolist(), output_begin=chunk_plan.first)
                chunks.append(np.concatenate([rows.copy() for _, rows in tiles]))
        backend.close()
    return tokens, chunk_plan, chunks


def measure(
    name: str,
    folder: Path,
    tokens: NDArray[np.int32],
    plan: ChunkPlan,
    chunks: list[NDArray[np.float32]],
    workers: RowWorkers,
) -> None:
    source = StoredLogits(chunks)
    used = tokens[: plan.n_chunk * plan.n_ctx]
    layout = LogitsFileLayout(n_ctx=plan.n_ctx, n_vocab=source.n_vocab, n_chunk=plan.n_chunk)
    identity = LogitsIdentity(model=name, tokenizer="", type_k="f16", type_v="f16")
    header = make_compact_header(
        n_ctx=plan.n_ctx, n_chunk=plan.n_chunk, n_vocab=source.n_vocab, tokens=used, identity=identity
    )
    writers: list[LogitsWriter] = [
        LlamaLogitsWriter(folder / "llama", layout=layout, tokens=used),
        CompactLogitsWriter(folder / "kvs", header=header, tokens=used),
    ]
    for writer in writers:
        with closing(writer):
            measure_perplexity(source, tokens, plan=plan, bos=None, workers=workers, writer=writer)
    size = (folder / "kvs").stat().st_size
    share = size / (folder / "llama").stat().st_size
    bits = 8 * size / (plan.n_rows * source.n_vocab)
    biases = read_biases(folder / "kvs", plan)
    for noise in NOISES:
        exact = compare_sources(
            StoredLogits(chunks), StoredLogits(chunks, noise), tokens, plan=plan, bos=None, workers=workers
        )
        errors = []
        for saved in (CompactLogitsFile(folder / "kvs"), LlamaLogitsFile(folder / "llama")):
            errors.append(error_of(saved, StoredLogits(chunks, noise), plan, exact, workers))
        print(
            f"| {name} | {bits:.2f} | {share:.1%} | {biases.mean():.2g} / {biases.max():.2g} "
            f"| {exact.rows['kld'].mean():.3g} | {errors[0]:.2g} | {errors[1]:.2g} |",
            flush=True,
        )


def read_biases(path: Path, plan: ChunkPlan) -> NDArray[np.float64]:
    """The divergence between stored and exact row that the file states for each row."""
    biases = []
    with CompactLogitsFile(path) as saved:
        for chunk_idx in range(plan.n_chunk):
            offset, row_idx = saved.chunk_offsets[chunk_idx], 0
            while row_idx < plan.rows_per_chunk:
                table, _, offset = saved.read_segment(offset, chunk_idx, row_idx)
                row_idx += len(table)
                biases.append(table["bias"].astype(np.float64))
    return np.concatenate(biases)


def error_of(saved: SavedLogits, other: StoredLogits, plan: ChunkPlan, exact: KldResult, workers: RowWorkers) -> float:
    with saved:
        compared = compare_with_saved(other, saved, plan=replace(plan), bos=None, workers=workers)
    return float(np.sqrt(np.mean((compared.rows["kld"] - exact.rows["kld"]) ** 2)))


if __name__ == "__main__":
    main()
