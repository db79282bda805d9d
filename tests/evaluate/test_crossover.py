"""One array of logits, two tools: files and printed statistics of llama-perplexity (scripts/make_golden_kld.py).

The golden logits are, bit for bit, those llama-perplexity scored when it wrote the golden file and the statistics.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvs_core.evaluate.chunks import plan_chunks, plan_saved_chunks
from kvs_core.evaluate.kl_divergence import KldResult, compare_with_saved
from kvs_core.evaluate.logits_file import LlamaLogitsFile, LlamaLogitsWriter, LogitsFileLayout
from kvs_core.evaluate.perplexity import measure_perplexity
from kvs_core.evaluate.row_math import RowWorkers
from kvs_core.evaluate.statistics import KldStatistics, running_comparisons
from tests.evaluate.replay_source import ReplaySource

DATA = Path(__file__).parents[1] / "data"
BASE_FILE = DATA / "kld_tiny_base.kld"
WORKERS = RowWorkers(1)


@pytest.fixture(scope="module")
def golden_logits() -> dict[str, NDArray[np.float32]]:
    with np.load(DATA / "kld_tiny_logits.npz") as arrays:
        return {name: arrays[name].astype(np.float32) for name in ("base", "other")}


@pytest.fixture(scope="module")
def printed() -> str:
    return (DATA / "kld_tiny_other.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def compared(golden_logits: dict[str, NDArray[np.float32]]) -> KldResult:
    with LlamaLogitsFile(BASE_FILE) as saved:
        plan = plan_saved_chunks(n_ctx=saved.n_ctx, n_present=saved.n_chunk)
        return compare_with_saved(ReplaySource(golden_logits["other"]), saved, plan=plan, bos=1, workers=WORKERS)


def printed_numbers(text: str, label: str) -> list[float]:
    """The numbers of the line that begins with ``label``."""
    (line,) = [line for line in text.splitlines() if line.startswith(label)]
    return [float(number) for number in re.findall(r"-?\d+\.\d+", line[len(label) :])]


def expected_lines(statistics: KldStatistics) -> list[tuple[str, list[float]]]:
    """Each closing line of llama-perplexity with the figures it should show; percentages as it prints them."""
    kld, p_diff = statistics.kld, statistics.p_diff
    assert statistics.correlation is not None
    pairs = [
        ("Mean PPL(Q)                   :", statistics.ppl, 1.0),
        ("Mean PPL(base)                :", statistics.ppl_base, 1.0),
        ("Mean ln(PPL(Q)/PPL(base))     :", statistics.ln_ratio, 1.0),
        ("Mean PPL(Q)/PPL(base)         :", statistics.ratio, 1.0),
        ("Mean PPL(Q)-PPL(base)         :", statistics.difference, 1.0),
        ("Mean    KLD:", kld.mean, 1.0),
        ("Mean    Δp:", p_diff.mean, 100.0),
        ("RMS Δp    :", statistics.p_diff_rms, 100.0),
        ("Same top p:", statistics.same_top, 100.0),
    ]
    lines = [(label, [scale * figure.value, scale * figure.uncertainty]) for label, figure, scale in pairs]
    lines += [
        ("Cor(ln(PPL(Q)), ln(PPL(base))):", [100 * statistics.correlation]),
        ("Maximum KLD:", [kld.maximum]),
        ("Minimum KLD:", [kld.minimum]),
        ("Median  KLD:", [kld.median]),
        ("Maximum Δp:", [100 * p_diff.maximum]),
        ("Minimum Δp:", [100 * p_diff.minimum]),
        ("Median  Δp:", [100 * p_diff.median]),
    ]
    for fraction, value in kld.quantiles.items():
        if fraction != 0.5:
            lines.append((f"{100 * fraction:4.1f}%   KLD:", [value]))
    for fraction, value in p_diff.quantiles.items():
        if fraction != 0.5:
            lines.append((f"{100 * fraction:4.1f}%   Δp:", [100 * value]))
    return lines


def test_every_statistic_equals_what_llama_perplexity_printed(compared: KldResult, printed: str) -> None:
    statistics = compared.statistics
    assert statistics is not None
    lines = expected_lines(statistics)
    assert len(lines) == len([line for line in printed.splitlines() if ":" in line and not line.startswith("#")])
    for label, values in lines:
        shown = printed_numbers(printed, label)
        decimals = 6 if "PPL" in label or "KLD" in label else 3
        decimals = 2 if "Cor" in label else decimals
        # One unit of the last printed digit: the sums are added in another order.
        assert values == pytest.approx(shown, abs=1.01 * 10.0**-decimals, rel=0), label


def test_the_line_of_every_chunk_equals_what_llama_perplexity_printed(compared: KldResult, printed: str) -> None:
    per_chunk = compared.plan.rows_per_chunk
    running = running_comparisons(compared.rows, rows_per_chunk=per_chunk, products=compared.products)
    assert len(running) == compared.plan.n_chunk
    for chunk, line in enumerate(running, 1):
        figures = [
            (line.ppl, 1.0, 1e-4),
            (line.ln_ratio, 1.0, 1e-5),
            (line.kld, 1.0, 1e-5),
            (line.p_diff_rms, 100.0, 1e-3),
            (line.same_top, 100.0, 1e-3),
        ]
        shown = printed_numbers(printed, f"{chunk:4d} ")
        assert len(shown) == 2 * len(figures)
        for (figure, scale, unit), pair in zip(figures, zip(shown[::2], shown[1::2], strict=True), strict=True):
            assert [scale * number for number in figure] == pytest.approx(list(pair), abs=1.01 * unit, rel=0)


def test_our_writer_makes_the_same_file_from_the_same_logits(
    golden_logits: dict[str, NDArray[np.float32]], tmp_path: Path
) -> None:
    with LlamaLogitsFile(BASE_FILE) as saved:
        tokens, layout = saved.tokens, saved.layout
    plan = plan_chunks(n_tokens=len(tokens), n_ctx=layout.n_ctx)
    path = tmp_path / "ours.kld"
    writer = LlamaLogitsWriter(path, layout=layout, tokens=tokens)
    measure_perplexity(ReplaySource(golden_logits["base"]), tokens, plan=plan, bos=1, workers=WORKERS, writer=writer)

    ours, theirs = path.read_bytes(), BASE_FILE.read_bytes()
    assert len(ours) == len(theirs) == layout.n_bytes
    ours_codes = np.frombuffer(ours, np.uint16, offset=layout.data_offset).reshape(-1, layout.row_codes)
    their_codes = np.frombuffer(theirs, np.uint16, offset=layout.data_offset).reshape(-1, layout.row_codes)
    assert ours[: layout.data_offset] == theirs[: layout.data_offset]
    # The odd vocabulary leaves one padding entry a row, which llama.cpp never sets.
    ours_codes, their_codes = ours_codes[:, : 4 + layout.n_vocab], their_codes[:, : 4 + layout.n_vocab]
    different = np.argwhere(ours_codes != their_codes)
    # Fused multiply-adds in the C++ build can move the scale by its last bit and a code by one: allow a handful.
    assert len(different) <= len(their_codes), f"{len(different)} of {their_codes.size} entries differ: {different[:5]}"
    codes_apart = np.abs(ours_codes[:, 4:].astype(int) - their_codes[:, 4:].astype(int))
    assert codes_apart.max() <= 1
    scales = [codes[:, :4].copy().view(np.float32) for codes in (ours_codes, their_codes)]
    assert scales[0] == pytest.approx(scales[1], rel=3e-7)


def test_perplexity_of_the_golden_logits_equals_the_printed_one(golden_logits: dict[str, NDArray[np.float32]]) -> None:
    with LlamaLogitsFile(BASE_FILE) as saved:
        tokens = saved.tokens
    plan = plan_chunks(n_tokens=len(tokens), n_ctx=64)
    result = measure_perplexity(ReplaySource(golden_logits["base"]), tokens, plan=plan, bos=1, workers=WORKERS)
    assert result.ppl is not None
    assert result.chunk_ppl == pytest.approx([511.2717, 527.9221, 524.463, 525.8325], abs=1.01e-4, rel=0)


def test_clamping_is_counted_and_ppl_of_the_base_is_not_called_exact(compared: KldResult) -> None:
    assert not compared.is_base_exact
    assert compared.statistics is not None
    assert compared.statistics.n_identical is None
    assert 0 < compared.kld_floor <= 0.5 * 16 / 65535


def test_layout_of_the_golden_file_is_the_computed_one() -> None:
    with LlamaLogitsFile(BASE_FILE) as saved:
        assert (
            BASE_FILE.stat().st_size
            == LogitsFileLayout(n_ctx=saved.n_ctx, n_vocab=saved.n_vocab, n_chunk=saved.n_chunk).n_bytes
        )
