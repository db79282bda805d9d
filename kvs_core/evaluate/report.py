"""Results as JSON-ready dictionaries. Only what a resumed run repeats exactly: no times, no dates, no "resumed".

``docs/perplexity.md`` documents every key; a number that does not exist (or is not finite) is null.
"""

from __future__ import annotations

from typing import Any

from kvs_core.evaluate.chunk_run import NonFinite
from kvs_core.evaluate.chunks import ChunkPlan
from kvs_core.evaluate.kl_divergence import KldResult
from kvs_core.evaluate.perplexity import PerplexityResult
from kvs_core.evaluate.source import StreamTotals
from kvs_core.evaluate.statistics import Distribution, KldStatistics, finite_or_none


def perplexity_to_json(result: PerplexityResult) -> dict[str, Any]:
    """Keys ``perplexity``, ``evaluation``, ``streaming``."""
    ppl = result.ppl
    return {
        "perplexity": {
            "ppl": None if ppl is None else finite_or_none(ppl.value),
            "uncertainty": None if ppl is None else finite_or_none(ppl.uncertainty),
            "block_uncertainty": None if ppl is None else finite_or_none(ppl.block_uncertainty),
            "rows": len(result.nll),
            "chunks": [finite_or_none(value) for value in result.chunk_ppl],
        },
        "evaluation": _plan_to_json(result.plan, result.non_finite),
        "streaming": _totals_to_json(result.streaming),
    }


def kld_to_json(result: KldResult) -> dict[str, Any]:
    """Keys ``kld``, ``perplexity``, ``p_diff``, ``evaluation``, ``streaming``, ``base_streaming``."""
    statistics = result.statistics
    figures = {"kld": None, "perplexity": None, "p_diff": None} if statistics is None else _figures(result, statistics)
    return {
        **figures,
        "evaluation": _plan_to_json(result.plan, result.non_finite),
        "streaming": _totals_to_json(result.streaming),
        "base_streaming": _totals_to_json(result.base_streaming),
        "idle_sides": list(result.idle_sides),
    }


def _figures(result: KldResult, statistics: KldStatistics) -> dict[str, Any]:
    return {
        "kld": {
            **_distribution_to_json(statistics.kld),
            "floor": result.kld_floor,
            "rows": statistics.n_rows,
            "rows_identical": statistics.n_identical,
            "same_top": statistics.same_top.value,
            "same_top_uncertainty": statistics.same_top.uncertainty,
            "same_top_block_uncertainty": finite_or_none(statistics.same_top.block_uncertainty),
        },
        "perplexity": {
            "ppl": statistics.ppl.to_json(),
            "ppl_base": statistics.ppl_base.to_json(),
            "ppl_base_exact": result.is_base_exact,
            "rows_clamped": statistics.n_clamped,
            "correlation": None if statistics.correlation is None else finite_or_none(statistics.correlation),
            "ln_ratio": statistics.ln_ratio.to_json(),
            "ratio": statistics.ratio.to_json(),
            "difference": statistics.difference.to_json(),
        },
        "p_diff": {**_distribution_to_json(statistics.p_diff), "rms": statistics.p_diff_rms.to_json()},
    }


def _distribution_to_json(distribution: Distribution) -> dict[str, Any]:
    return {
        "mean": distribution.mean.value,
        "mean_uncertainty": distribution.mean.uncertainty,
        "mean_block_uncertainty": finite_or_none(distribution.mean.block_uncertainty),
        "min": distribution.minimum,
        "max": distribution.maximum,
        "median": distribution.median,
        "quantiles": {f"{100 * fraction:g}": value for fraction, value in distribution.quantiles.items()},
    }


def _plan_to_json(plan: ChunkPlan, non_finite: NonFinite | None) -> dict[str, Any]:
    return {
        "n_ctx": plan.n_ctx,
        "chunks": plan.n_chunk,
        "rows_per_chunk": plan.rows_per_chunk,
        "stride": plan.step if plan.is_strided else 0,
        "non_finite": None
        if non_finite is None
        else {"chunk": non_finite.chunk_idx + 1, "token": non_finite.token_idx},
    }


def _totals_to_json(totals: StreamTotals | None) -> dict[str, int] | None:
    return None if totals is None else totals.to_json()
