"""From rows to the figures people quote: llama.cpp's statistics and uncertainties, and block-wise ones beside them.

Pure functions of arrays; nothing here knows where a row came from. Natural logarithms throughout.

    mean      f = sum / n,  uncertainty  sqrt((sum of squares / n - f^2) / (n - 1)), 0 for n <= 10      (llama.cpp)
    block     tokens inside a chunk depend on each other, so the formula above is too optimistic. The rows are cut
              into K blocks of consecutive rows that never cross a chunk (whole chunks when there are at least
              ``MIN_BLOCKS``, otherwise equal parts of chunks), and with n_k rows and mean m_k in block k
              u^2 = K / (K - 1) * sum_k (n_k / n)^2 * (m_k - m)^2
    derived   PPL = e^m, u(PPL) = PPL * u(m), and in the same way for ratio and difference, whose block-wise forms
              use the per-row differences directly, so that the covariance needs no term of its own
    quantile  linear interpolation at fraction * (n - 1) of the sorted rows
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvs_core.evaluate.row_math import IDENTICAL_UNKNOWN, IDENTICAL_YES
from kvs_core.units import ceil_div

MIN_ROWS_FOR_STATISTICS = 100
"""llama-perplexity prints its closing tables from this many rows on; so do we. JSON always has the figures."""

MIN_BLOCKS = 32

Dtype = type[np.float64] | type[np.float32]
"""Precision in which llama.cpp multiplies before it adds in double."""

KLD_FRACTIONS = (0.999, 0.99, 0.95, 0.9, 0.5, 0.1, 0.05, 0.01, 0.001)
P_DIFF_FRACTIONS = (0.999, 0.99, 0.95, 0.9, 0.75, 0.5, 0.25, 0.1, 0.05, 0.01, 0.001)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure, llama.cpp's uncertainty of it, and the block-wise one (None with fewer than two blocks)."""

    value: float
    uncertainty: float
    block_uncertainty: float | None

    def to_json(self) -> dict[str, float | None]:
        return {
            "value": finite_or_none(self.value),
            "uncertainty": finite_or_none(self.uncertainty),
            "block_uncertainty": finite_or_none(self.block_uncertainty),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Mean and order statistics of one quantity over all rows; ``quantiles`` maps fraction to value."""

    mean: Estimate
    minimum: float
    maximum: float
    quantiles: dict[float, float]

    @property
    def median(self) -> float:
        return self.quantiles[0.5]


@dataclass(frozen=True, slots=True, kw_only=True)
class KldStatistics:
    """Everything llama-perplexity prints about two models, and identity, clamping and block uncertainties."""

    n_rows: int
    n_identical: int | None  # None: the base holds no hashes, so identity cannot be told
    n_clamped: int  # rows whose base log-probability sits on the file format's floor
    ppl: Estimate
    ppl_base: Estimate
    correlation: float | None  # of ln PPL and ln PPL(base); None when either does not vary
    ln_ratio: Estimate
    ratio: Estimate
    difference: Estimate
    kld: Distribution
    p_diff: Distribution
    p_diff_rms: Estimate
    same_top: Estimate


class RowBlocks:
    """Which rows belong together for block-wise uncertainties: rows [n] of chunks of equal length, in order."""

    def __init__(self, *, n_rows: int, rows_per_chunk: int) -> None:
        n_chunk = ceil_div(n_rows, rows_per_chunk)
        per_chunk = min(rows_per_chunk, max(1, ceil_div(MIN_BLOCKS, max(1, n_chunk))))
        inside = [rows_per_chunk * part // per_chunk for part in range(per_chunk)]
        starts = [chunk * rows_per_chunk + begin for chunk in range(n_chunk) for begin in inside]
        self._starts = np.array([start for start in starts if start < n_rows], np.int64)
        self._sizes = np.diff(np.append(self._starts, n_rows))

    @property
    def n_blocks(self) -> int:
        return len(self._starts)

    def uncertainty_of_mean(self, values: NDArray[np.float64]) -> float | None:
        """Block-wise standard error of the mean; None with fewer than two blocks, or values that overflowed."""
        k = self.n_blocks
        if k < 2 or not np.isfinite(values).all():
            return None
        means = np.add.reduceat(values, self._starts) / self._sizes
        weights = self._sizes / len(values)
        return math.sqrt(k / (k - 1) * float(np.sum((weights * (means - values.mean())) ** 2)))


def mean_and_uncertainty(values: NDArray[np.float64], products: Dtype = np.float64) -> tuple[float, float]:
    """llama.cpp's: the mean, and its standard error for independent rows (0 for ten rows or fewer)."""
    total = float(_multiply(values, values, products).sum(dtype=np.float64))
    return _mean_of_sums(float(values.sum()), total, len(values))


def estimate_mean(values: NDArray[np.float64], blocks: RowBlocks, products: Dtype = np.float64) -> Estimate:
    mean, uncertainty = mean_and_uncertainty(values, products)
    return Estimate(value=mean, uncertainty=uncertainty, block_uncertainty=blocks.uncertainty_of_mean(values))


def estimate_perplexity(nll: NDArray[np.float64], blocks: RowBlocks) -> Estimate:
    """e^mean of ``nll`` float64 [n]. As llama-perplexity's closing line, the uncertainty is given for any n above 1."""
    mean, uncertainty = mean_and_uncertainty(nll)
    if 1 < len(nll) <= 10:
        variance = float(np.square(nll).sum()) / len(nll) - mean * mean
        uncertainty = math.sqrt(max(0.0, variance) / (len(nll) - 1))
    return _scaled(Estimate(value=mean, uncertainty=uncertainty, block_uncertainty=blocks.uncertainty_of_mean(nll)))


def running_perplexities(nll: NDArray[np.float64], rows_per_chunk: int) -> NDArray[np.float64]:
    """Perplexity over the first 1, 2, … chunks: float64 [n_chunk]."""
    sums = np.cumsum(nll.reshape(-1, rows_per_chunk).sum(axis=1))
    return np.exp(sums / (rows_per_chunk * np.arange(1, len(sums) + 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningComparison:
    """llama-perplexity's line about the first 1, 2, … chunks; ``(value, uncertainty)`` each."""

    ppl: tuple[float, float]
    ln_ratio: tuple[float, float]
    kld: tuple[float, float]
    p_diff_rms: tuple[float, float]
    same_top: tuple[float, float]


def running_comparisons(
    rows: NDArray[Any], *, rows_per_chunk: int, products: Dtype = np.float64
) -> list[RunningComparison]:
    """One line for each chunk of ``rows`` KLD_ROW [n]; the last agrees with ``summarise_comparison``."""
    nll, nll_base, kld = rows["nll"], rows["nll_base"], rows["kld"]
    squared = np.square(rows["p_diff"])
    columns = [nll, _multiply(nll, nll, products), nll_base, _multiply(nll_base, nll_base, products)]
    columns += [_multiply(nll, nll_base, products), kld, np.square(kld), squared, np.square(squared), rows["same_top"]]
    sums = [np.cumsum(column.reshape(-1, rows_per_chunk).sum(axis=1, dtype=np.float64)) for column in columns]
    lines = []
    for chunk_idx in range(len(rows) // rows_per_chunk):
        n = (chunk_idx + 1) * rows_per_chunk
        s_nll, s_nll2, s_base, s_base2, s_cross, s_kld, s_kld2, s_square, s_square2, s_top = (
            float(column[chunk_idx]) for column in sums
        )
        mean, unc = _mean_of_sums(s_nll, s_nll2, n)
        mean_base, unc_base = _mean_of_sums(s_base, s_base2, n)
        covariance = (s_cross / n - mean * mean_base) / (n - 1) if n >= 10 else 0.0
        square, square_unc = _mean_of_sums(s_square, s_square2, n)
        rms, top = math.sqrt(square), s_top / n
        lines.append(
            RunningComparison(
                ppl=(_exp(mean), _exp(mean) * unc),
                ln_ratio=(mean - mean_base, math.sqrt(max(0.0, unc * unc + unc_base * unc_base - 2 * covariance))),
                kld=_mean_of_sums(s_kld, s_kld2, n),
                p_diff_rms=(rms, 0.5 / rms * square_unc if rms else 0.0),
                same_top=(top, math.sqrt(top * (1 - top) / (n - 1)) if n > 1 else 0.0),
            )
        )
    return lines


def summarise_comparison(rows: NDArray[Any], *, rows_per_chunk: int, products: Dtype = np.float64) -> KldStatistics:
    """All statistics of a comparison; ``rows`` KLD_ROW [n], n at least 1, whole chunks in order.

    ``products`` float32 multiplies log-probabilities as llama-perplexity does: with it, rows made against its file give
    its printed uncertainties to the last digit.
    """
    blocks = RowBlocks(n_rows=len(rows), rows_per_chunk=rows_per_chunk)
    nll, nll_base, p_diff = rows["nll"], rows["nll_base"], rows["p_diff"]
    n = len(rows)
    mean, unc = mean_and_uncertainty(nll, products)
    mean_base, unc_base = mean_and_uncertainty(nll_base, products)
    cross = float(_multiply(nll, nll_base, products).sum(dtype=np.float64))
    covariance = (cross / n - mean * mean_base) / (n - 1) if n >= 10 else 0.0
    ln_ratio = Estimate(
        value=mean - mean_base,
        uncertainty=math.sqrt(max(0.0, unc * unc + unc_base * unc_base - 2 * covariance)),
        block_uncertainty=blocks.uncertainty_of_mean(nll - nll_base),
    )
    ppl, ppl_base = _exp(mean), _exp(mean_base)
    spread, spread_base = ppl * unc, ppl_base * unc_base
    difference_variance = spread * spread + spread_base * spread_base - 2 * ppl * ppl_base * covariance
    return KldStatistics(
        n_rows=n,
        n_identical=None
        if (rows["identical"] == IDENTICAL_UNKNOWN).any()
        else int((rows["identical"] == IDENTICAL_YES).sum()),
        n_clamped=int(rows["clamped"].sum()),
        ppl=_scaled(estimate_mean(nll, blocks, products)),
        ppl_base=_scaled(estimate_mean(nll_base, blocks, products)),
        correlation=covariance / (unc * unc_base) if unc > 0 and unc_base > 0 else None,
        ln_ratio=ln_ratio,
        ratio=_scaled(ln_ratio),
        difference=Estimate(
            value=ppl - ppl_base,
            uncertainty=math.sqrt(max(0.0, difference_variance)),
            block_uncertainty=blocks.uncertainty_of_mean(ppl * nll - ppl_base * nll_base),
        ),
        kld=_distribution(rows["kld"], KLD_FRACTIONS, blocks),
        p_diff=_distribution(p_diff, P_DIFF_FRACTIONS, blocks),
        p_diff_rms=_root_mean_square(p_diff, blocks),
        same_top=_share(rows["same_top"].astype(np.float64), blocks),
    )


def quantiles(values: NDArray[np.float64], fractions: tuple[float, ...]) -> dict[float, float]:
    """Linear interpolation between the sorted values around ``fraction * (n - 1)``."""
    found = np.quantile(values, fractions, method="linear")
    return dict(zip(fractions, found.tolist(), strict=True))


def finite_or_none(value: float | None) -> float | None:
    """JSON has no NaN and no infinity: they become null."""
    return value if value is not None and math.isfinite(value) else None


def _multiply(a: NDArray[np.float64], b: NDArray[np.float64], products: Dtype) -> NDArray[Any]:
    product: NDArray[Any] = a.astype(products) * b.astype(products)
    return product


def _mean_of_sums(total: float, total_of_squares: float, n: int) -> tuple[float, float]:
    mean = total / n
    variance = total_of_squares / n - mean * mean
    return mean, math.sqrt(variance / (n - 1)) if variance > 0 and n > 10 else 0.0


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _scaled(log_mean: Estimate) -> Estimate:
    """e^x of an estimate of x; uncertainties to first order."""
    value = _exp(log_mean.value)
    block = log_mean.block_uncertainty
    return Estimate(
        value=value,
        uncertainty=value * log_mean.uncertainty,
        block_uncertainty=None if block is None else value * block,
    )


def _distribution(values: NDArray[np.float64], fractions: tuple[float, ...], blocks: RowBlocks) -> Distribution:
    return Distribution(
        mean=estimate_mean(values, blocks),
        minimum=float(values.min()),
        maximum=float(values.max()),
        quantiles=quantiles(values, fractions),
    )


def _root_mean_square(values: NDArray[np.float64], blocks: RowBlocks) -> Estimate:
    square = estimate_mean(np.square(values), blocks)
    root = math.sqrt(square.value)
    if root == 0.0:
        return Estimate(value=0.0, uncertainty=0.0, block_uncertainty=square.block_uncertainty)
    block = square.block_uncertainty
    return Estimate(
        value=root,
        uncertainty=0.5 / root * square.uncertainty,
        block_uncertainty=None if block is None else 0.5 / root * block,
    )


def _share(hits: NDArray[np.float64], blocks: RowBlocks) -> Estimate:
    share = float(hits.mean())
    return Estimate(
        value=share,
        uncertainty=math.sqrt(share * (1 - share) / (len(hits) - 1)) if len(hits) > 1 else 0.0,
        block_uncertainty=blocks.uncertainty_of_mean(hits),
    )
