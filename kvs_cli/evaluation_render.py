"""Perplexity and KL divergence as text: llama-perplexity's lines, then what it does not have. Nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from kvs_core.evaluate.chunk_run import Progress
from kvs_core.evaluate.kl_divergence import KldResult
from kvs_core.evaluate.perplexity import PerplexityResult
from kvs_core.evaluate.source import StreamTotals
from kvs_core.evaluate.statistics import (
    MIN_ROWS_FOR_STATISTICS,
    Distribution,
    Dtype,
    Estimate,
    KldStatistics,
    RunningComparison,
    running_comparisons,
    running_perplexities,
)
from kvs_core.units import show_size

_CHUNK_HEADING = (
    "chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence              Δp RMS"
    "            Same top p"
)


def render_running_perplexities(progress: Progress, n_before: int) -> str:
    """The perplexity over the first 1, 2, … chunks for those after ``n_before``, as llama-perplexity writes it.

    The line ends with the last chunk.
    """
    values = running_perplexities(progress.rows, progress.rows_per_chunk)
    text = "".join(f"[{number}]{ppl:.4f}," for number, ppl in enumerate(values[n_before:], n_before + 1))
    return text + "\n" if progress.n_chunks_done == progress.n_chunk else text


def render_perplexity(result: PerplexityResult) -> str:
    """What follows the running values: the closing line and the block-wise uncertainty.

    Of a run that a NaN ended only the end of the line that the running values were to fill.
    """
    lines = [""] if result.non_finite is not None and len(result.nll) else []
    if result.ppl is not None:
        lines.append(f"Final estimate: PPL = {result.ppl.value:.4f} +/- {result.ppl.uncertainty:.5f}")
        if result.ppl.block_uncertainty is not None:
            lines.append(f"Block-wise uncertainty: +/- {result.ppl.block_uncertainty:.5f}")
    return "\n".join(lines) + "\n" if lines else ""


def chunk_lines(products: Dtype = np.float64) -> Callable[[Progress, int], str]:
    """Makes llama-perplexity's line for each chunk after a number of them, below a heading; see ``KldResult``."""

    def render(progress: Progress, n_before: int) -> str:
        running = running_comparisons(progress.rows, rows_per_chunk=progress.rows_per_chunk, products=products)
        lines = [_chunk_line(number, line) for number, line in enumerate(running[n_before:], n_before + 1)]
        return "\n".join(lines if n_before else [_CHUNK_HEADING, *lines]) + "\n"

    return render


def render_divergence(result: KldResult) -> str:
    """What follows the lines of the chunks: from 100 rows on every closing statistic, and what they rest on."""
    statistics = result.statistics
    if statistics is None:
        return ""
    lines = []
    if statistics.n_rows < MIN_ROWS_FOR_STATISTICS:
        lines += ["", f"{statistics.n_rows} rows are too few for statistics; they begin at {MIN_ROWS_FOR_STATISTICS}"]
    elif result.non_finite is None:
        lines += ["", *_statistics_lines(statistics)]
    lines += ["", *_proof_lines(result, statistics)]
    return "\n".join(lines) + "\n"


def describe_perplexity(progress: Progress) -> str:
    """A few words for the progress line."""
    return f"PPL {np.exp(progress.rows.mean()):.4f}"


def describe_divergence(progress: Progress) -> str:
    """A few words for the progress line."""
    return f"mean KLD {progress.rows['kld'].mean():.6f}"


def _chunk_line(number: int, line: RunningComparison) -> str:
    (ppl, ppl_unc), (ratio, ratio_unc), (kld, kld_unc) = line.ppl, line.ln_ratio, line.kld
    (rms, rms_unc), (top, top_unc) = line.p_diff_rms, line.same_top
    return (
        f"{number:4d}    {ppl:9.4f} ± {ppl_unc:9.4f}    {ratio:10.5f} ± {ratio_unc:10.5f}"
        f"    {kld:10.5f} ± {kld_unc:10.5f}    {100 * rms:6.3f} ± {100 * rms_unc:6.3f} %"
        f"    {100 * top:6.3f} ± {100 * top_unc:6.3f} %"
    )


def _statistics_lines(statistics: KldStatistics) -> Iterator[str]:
    yield "====== Perplexity statistics ======"
    yield f"Mean PPL(Q)                   : {_pair(statistics.ppl)}"
    yield f"Mean PPL(base)                : {_pair(statistics.ppl_base)}"
    correlation = "  none" if statistics.correlation is None else f"{100 * statistics.correlation:6.2f}%"
    yield f"Cor(ln(PPL(Q)), ln(PPL(base))): {correlation}"
    yield f"Mean ln(PPL(Q)/PPL(base))     : {_pair(statistics.ln_ratio)}"
    yield f"Mean PPL(Q)/PPL(base)         : {_pair(statistics.ratio)}"
    yield f"Mean PPL(Q)-PPL(base)         : {_pair(statistics.difference)}"
    yield ""
    yield "====== KL divergence statistics ======"
    yield f"Mean    KLD: {_pair(statistics.kld.mean)}"
    yield from _order_lines(statistics.kld, "KLD", lambda value: f" {value:10.6f}")
    yield ""
    yield "====== Token probability statistics ======"
    mean, rms, top = statistics.p_diff.mean, statistics.p_diff_rms, statistics.same_top
    yield f"Mean    Δp: {100 * mean.value:6.3f} ± {100 * mean.uncertainty:5.3f} %"
    yield from _order_lines(statistics.p_diff, "Δp", lambda value: f" {100 * value:6.3f}%")
    yield f"RMS Δp    : {100 * rms.value:6.3f} ± {100 * rms.uncertainty:5.3f} %"
    yield f"Same top p: {100 * top.value:6.3f} ± {100 * top.uncertainty:5.3f} %"
    if statistics.kld.mean.block_uncertainty is not None:
        yield ""
        yield "====== Block-wise uncertainties (tokens of a chunk depend on each other) ======"
        for name, estimate, scale, digits in (
            ("Mean PPL(Q)", statistics.ppl, 1, 6),
            ("Mean PPL(base)", statistics.ppl_base, 1, 6),
            ("Mean ln(PPL(Q)/PPL(base))", statistics.ln_ratio, 1, 6),
            ("Mean PPL(Q)/PPL(base)", statistics.ratio, 1, 6),
            ("Mean PPL(Q)-PPL(base)", statistics.difference, 1, 6),
            ("Mean KLD", statistics.kld.mean, 1, 6),
            ("Mean Δp (%)", mean, 100, 3),
            ("RMS Δp (%)", rms, 100, 3),
            ("Same top p (%)", top, 100, 3),
        ):
            block = estimate.block_uncertainty
            yield f"{name:<25}: ± " + ("none" if block is None else f"{scale * block:.{digits}f}")


def _order_lines(distribution: Distribution, name: str, show: object) -> Iterator[str]:
    assert callable(show)
    yield f"Maximum {name}:{show(distribution.maximum)}"
    for fraction, value in distribution.quantiles.items():
        label = "Median " if fraction == 0.5 else f"{100 * fraction:4.1f}%  "
        yield f"{label} {name}:{show(value)}"
    yield f"Minimum {name}:{show(distribution.minimum)}"


def _pair(estimate: Estimate) -> str:
    return f"{estimate.value:10.6f} ± {estimate.uncertainty:10.6f}"


def _proof_lines(result: KldResult, statistics: KldStatistics) -> Iterator[str]:
    """What the figures rest on: identity of rows, the base file's precision, what was streamed."""
    if statistics.n_identical is None:
        yield "Rows identical: unknown, the base file holds no hashes"
    else:
        yield f"Rows identical: {statistics.n_identical} of {statistics.n_rows}"
    if result.kld_floor:
        yield f"Floor of the base file's format: KLD of a row {result.kld_floor:.2g}"
    if not result.is_base_exact:
        yield (
            "PPL(base) comes from the base file's rounded log-probabilities: "
            f"{statistics.n_clamped} of {statistics.n_rows} targets are clamped there"
        )
    for side, totals in (("base", result.base_streaming), ("measured", result.streaming)):
        if totals is not None:
            yield f"streaming, {side} side: {show_totals(totals)}"


def show_totals(totals: StreamTotals) -> str:
    """One line about what a run streamed; a run that was asked to and did not says so."""
    if not totals.bytes_streamed:
        return f"nothing was streamed, {totals.pages_resident} pages are resident"
    agrees = "as predicted" if totals.bytes_streamed == totals.predicted_bytes_streamed else "NOT as predicted"
    return (
        f"{totals.pages_resident} pages resident, {totals.pages_streamed} pages "
        f"({show_size(totals.bytes_streamed)}) streamed, {agrees}"
    )
