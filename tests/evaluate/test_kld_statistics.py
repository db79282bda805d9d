"""Statistics over rows: llama.cpp's formulas, blocks, and what JSON shows."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from kvs_core.evaluate.chunks import plan_saved_chunks
from kvs_core.evaluate.kl_divergence import KldResult
from kvs_core.evaluate.report import kld_to_json
from kvs_core.evaluate.row_math import KLD_ROW
from kvs_core.evaluate.statistics import (
    RowBlocks,
    estimate_perplexity,
    mean_and_uncertainty,
    quantiles,
    running_comparisons,
    summarise_comparison,
)


def random_rows(n: int, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = np.zeros(n, KLD_ROW)
    rows["nll_base"] = rng.gamma(2.0, 1.5, n)
    rows["nll"] = rows["nll_base"] + rng.normal(0, 0.1, n)
    rows["kld"] = rng.gamma(1.0, 0.01, n)
    rows["p_diff"] = np.exp(-rows["nll"]) - np.exp(-rows["nll_base"])
    rows["same_top"] = rng.random(n) < 0.9
    return rows


def test_uncertainty_is_the_standard_error_and_zero_for_ten_rows_or_fewer() -> None:
    values = np.array([1.0, 2.0, 4.0, 8.0] * 3)
    assert mean_and_uncertainty(values) == pytest.approx((3.75, values.std() / math.sqrt(11)))
    assert mean_and_uncertainty(values[:10])[1] == 0.0
    assert mean_and_uncertainty(values[:11])[1] > 0.0


def test_perplexity_of_few_rows_still_has_an_uncertainty() -> None:
    blocks = RowBlocks(n_rows=2, rows_per_chunk=1)
    estimate = estimate_perplexity(np.array([1.0, 2.0]), blocks)
    assert estimate.value == pytest.approx(math.exp(1.5))
    assert estimate.uncertainty == pytest.approx(math.exp(1.5) * 0.5)
    alone = estimate_perplexity(np.array([1.0]), RowBlocks(n_rows=1, rows_per_chunk=1))
    assert (alone.uncertainty, alone.block_uncertainty) == (0.0, None)


@pytest.mark.parametrize(
    ("n_chunk", "per_chunk", "n_blocks"),
    [(40, 31, 40), (32, 31, 32), (8, 31, 32), (1, 4095, 32), (3, 5, 15), (1, 1, 1)],
)
def test_blocks_never_cross_a_chunk(n_chunk: int, per_chunk: int, n_blocks: int) -> None:
    blocks = RowBlocks(n_rows=n_chunk * per_chunk, rows_per_chunk=per_chunk)
    assert blocks.n_blocks == n_blocks
    assert set(range(0, n_chunk * per_chunk, per_chunk)) <= set(blocks._starts.tolist())


def test_block_uncertainty_of_equal_blocks_is_the_standard_error_of_their_means() -> None:
    values = np.random.default_rng(3).normal(size=40 * 10)
    blocks = RowBlocks(n_rows=400, rows_per_chunk=10)
    means = values.reshape(40, 10).mean(axis=1)
    assert blocks.uncertainty_of_mean(values) == pytest.approx(means.std(ddof=1) / math.sqrt(40))


def test_block_uncertainty_sees_the_correlation_that_the_plain_one_misses() -> None:
    """Rows share their chunk's mood: the true standard error of the mean is known and only the blocks find it."""
    rng = np.random.default_rng(5)
    n_chunk, per_chunk = 400, 50
    values = (rng.normal(size=(n_chunk, 1)) + rng.normal(size=(n_chunk, per_chunk))).ravel()
    true = math.sqrt((1 + 1 / per_chunk) / n_chunk)
    block = RowBlocks(n_rows=values.size, rows_per_chunk=per_chunk).uncertainty_of_mean(values)
    assert block == pytest.approx(true, rel=0.15)  # a standard error from 400 blocks is known to 4 %
    assert mean_and_uncertainty(values)[1] < 0.3 * true


def test_quantiles_interpolate_between_sorted_values() -> None:
    values = np.array([30.0, 10.0, 20.0, 40.0, 0.0])
    assert quantiles(values, (0.0, 0.1, 0.5, 0.999, 1.0)) == pytest.approx(
        {0.0: 0.0, 0.1: 4.0, 0.5: 20.0, 0.999: 39.96, 1.0: 40.0}
    )


def test_running_lines_agree_with_the_summary_of_their_rows() -> None:
    rows = random_rows(120)
    for number, line in enumerate(running_comparisons(rows, rows_per_chunk=30), 1):
        summary = summarise_comparison(rows[: 30 * number], rows_per_chunk=30)
        for found, expected in (
            (line.ppl, summary.ppl),
            (line.ln_ratio, summary.ln_ratio),
            (line.kld, summary.kld.mean),
            (line.p_diff_rms, summary.p_diff_rms),
            (line.same_top, summary.same_top),
        ):
            assert found == pytest.approx((expected.value, expected.uncertainty), rel=1e-9)


def test_block_forms_of_ratio_and_difference_use_the_pairing() -> None:
    """A constant shift has no uncertainty, however much the rows themselves vary."""
    rows = random_rows(400)
    rows["nll"] = rows["nll_base"] + 0.25
    statistics = summarise_comparison(rows, rows_per_chunk=50)
    assert statistics.ln_ratio.value == pytest.approx(0.25)
    assert statistics.ln_ratio.uncertainty == pytest.approx(0.0, abs=1e-7)
    assert statistics.ln_ratio.block_uncertainty == pytest.approx(0.0, abs=1e-12)
    assert statistics.correlation == pytest.approx(1.0)
    assert statistics.ppl.block_uncertainty is not None
    assert statistics.ppl.block_uncertainty > 0.1


def test_json_has_no_nan_and_no_infinity() -> None:
    rows = random_rows(20)
    rows["nll"] = 2000.0  # PPL overflows a double
    rows["nll_base"] = 1.0  # and the base does not vary: no correlation
    plan = plan_saved_chunks(n_ctx=40 + 2, n_present=1)
    rows = np.resize(rows, plan.rows_per_chunk)
    result = KldResult(
        plan=plan,
        rows=rows,
        non_finite=None,
        kld_floor=0.0,
        is_base_exact=True,
        products=np.float64,
        base_streaming=None,
        streaming=None,
    )
    text = json.dumps(kld_to_json(result), allow_nan=False)
    report = json.loads(text)
    assert report["perplexity"]["ppl"]["value"] is None
    assert report["perplexity"]["correlation"] is None
    assert report["kld"]["rows"] == 20
