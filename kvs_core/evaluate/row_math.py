"""Reductions over rows of logits, one row at a time and never more than a tile in memory. Numba, no Python objects.

No files and no statistics over many rows. Two families:

    exact     float64 arithmetic on float32 logits; equal rows give a KL divergence of exactly 0
    llama     the float32 steps of llama-perplexity, so that numbers made with its file format agree with its own

Every function works on rows ``begin..end`` of its arrays and writes only those, so that ``RowWorkers`` can share a tile
among threads: the result does not depend on how many there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from kvs_core.cpu.kernel_cache import cached_njit
from kvs_core.processors import available_processors

KLD_ROW = np.dtype(
    [
        ("nll", "<f8"),  # -ln p of the true next token, measured side
        ("nll_base", "<f8"),  # the same on the base side
        ("kld", "<f8"),  # KL(base || measured), nats
        ("p_diff", "<f8"),  # p - p_base of the true next token
        ("same_top", "u1"),
        ("identical", "u1"),  # an IDENTICAL_* value
        ("clamped", "u1"),  # 1: nll_base sits on the floor of the file format
    ]
)
"""What a comparison keeps of each row; every statistic is a function of these."""

IDENTICAL_NO, IDENTICAL_YES, IDENTICAL_UNKNOWN = 0, 1, 2

LLAMA_LOG_PROB_FLOOR = -16.0
"""Base log-probabilities at or below this do not enter llama-perplexity's KL divergence."""


class RowWorkers:
    """Threads that share the rows of a tile. Use as a context manager; 1 thread means no pool at all."""

    def __init__(self, n_threads: int | None = None) -> None:
        self.n_threads = max(1, n_threads or available_processors())
        self._pool = ThreadPoolExecutor(self.n_threads, "kvs-rows") if self.n_threads > 1 else None

    def __enter__(self) -> RowWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def run(self, work: Callable[[int, int], object], n_rows: int) -> None:
        """Call ``work(begin, end)`` over slices of ``range(n_rows)``; returns when all are done."""
        n_parts = min(self.n_threads, n_rows)
        if self._pool is None or n_parts < 2:
            if n_rows:
                work(0, n_rows)
            return
        bounds = [n_rows * part // n_parts for part in range(n_parts + 1)]
        for future in [self._pool.submit(work, bounds[i], bounds[i + 1]) for i in range(n_parts)]:
            future.result()


@njit(nogil=True)
def _row_peak(row: NDArray[np.float32]) -> tuple[np.float32, int, bool]:
    """Largest logit, its first index, and whether every entry is finite."""
    peak = row[0]
    top = 0
    probe = np.float32(0.0)
    for i in range(row.size):
        value = row[i]
        probe += value * np.float32(0.0)  # stays 0 unless some entry is infinite or NaN
        if value > peak:
            peak = value
            top = i
    return peak, top, probe == np.float32(0.0)


@njit(nogil=True)
def _sum_of_exps(row: NDArray[np.float32], peak: np.float32) -> float:
    total = 0.0
    for i in range(row.size):
        total += np.float64(math.exp(np.float32(row[i] - peak)))
    return total


@cached_njit()
def reduce_rows(
    logits: NDArray[np.float32],
    targets: NDArray[np.int32],
    nll: NDArray[np.float64],
    log_sum: NDArray[np.float64],
    top: NDArray[np.int32],
    finite: NDArray[np.uint8],
    begin: int,
    end: int,
) -> None:
    """Log-softmax of each row, reduced.

    logits   float32 [n_rows, n_vocab]
    targets  int32 [n_rows]
    nll      float64 [n_rows]  -ln p(target)
    log_sum  float64 [n_rows]  ln of the sum of exp(logit)
    top      int32 [n_rows]    first index of the largest logit
    finite   uint8 [n_rows]    0 when an entry is infinite or NaN; the other outputs of that row mean nothing then
    """
    for r in range(begin, end):
        peak, top_idx, is_finite = _row_peak(logits[r])
        log_of_sum = math.log(_sum_of_exps(logits[r], peak)) if is_finite else math.nan
        log_sum[r] = np.float64(peak) + log_of_sum
        nll[r] = log_sum[r] - np.float64(logits[r, targets[r]])
        top[r] = top_idx
        finite[r] = 1 if is_finite else 0


@cached_njit()
def encode_llama_rows(
    logits: NDArray[np.float32],
    targets: NDArray[np.int32],
    codes: NDArray[np.uint16],
    nll: NDArray[np.float64],
    finite: NDArray[np.uint8],
    begin: int,
    end: int,
) -> None:
    """Rows of llama.cpp's saved-logits file; see ``logits_file`` for the layout.

    codes  uint16 [n_rows, row_codes]  out; the odd vocabulary's padding entry is written as 0
    nll    float64 [n_rows]            out; float32 arithmetic, as llama-perplexity sums it when it saves
    """
    header = np.empty(2, np.float32)
    header_codes = header.view(np.uint16)
    for r in range(begin, end):
        row = logits[r]
        peak, _, is_finite = _row_peak(row)
        finite[r] = 1 if is_finite else 0
        if not is_finite:
            nll[r] = math.nan
            continue
        low = row[0]
        for i in range(row.size):
            low = min(low, row[i])
        low = max(low, np.float32(peak - np.float32(16.0)))
        log_of_sum = np.float32(math.log(_sum_of_exps(row, peak)))
        scale = np.float32(np.float32(peak - low) / np.float32(65535.0))

        header[0] = scale
        header[1] = np.float32(np.float32(low - peak) - log_of_sum)
        codes[r, :4] = header_codes
        codes[r, 4:] = 0
        if scale > np.float32(0.0):
            inverse = np.float32(np.float32(1.0) / scale)
            for i in range(row.size):
                if row[i] > low:
                    codes[r, 4 + i] = np.uint16(np.rint(np.float32(inverse * np.float32(row[i] - low))))

        nll[r] = np.float64(np.float32(np.float32(peak + log_of_sum) - row[targets[r]]))


@cached_njit()
def sum_llama_probs(codes: NDArray[np.uint16], n_vocab: int, out: NDArray[np.float64], begin: int, end: int) -> None:
    """What the probabilities of each stored row add up to, ``out`` float64 [n_rows]; NaN where a header is damaged.

    A row that was written whole gives 1, within the format's rounding and what lies 16 nats below the best token.
    """
    for r in range(begin, end):
        header = codes[r, :4].copy().view(np.float32)
        total = 0.0
        for i in range(n_vocab):
            total += np.float64(math.exp(np.float32(codes[r, 4 + i]) * header[0] + header[1]))
        out[r] = total


@cached_njit()
def compare_llama_rows(
    logits: NDArray[np.float32],
    codes: NDArray[np.uint16],
    targets: NDArray[np.int32],
    out: NDArray[np.void],
    finite: NDArray[np.uint8],
    begin: int,
    end: int,
) -> None:
    """Compare logits with rows of llama.cpp's file in its own float32 steps; fills ``out`` (KLD_ROW [n_rows])."""
    for r in range(begin, end):
        row = logits[r]
        peak, top, is_finite = _row_peak(row)
        finite[r] = 1 if is_finite else 0
        if not is_finite:
            continue
        log_of_sum = np.float32(math.log(_sum_of_exps(row, peak)))
        header = codes[r, :4].copy().view(np.float32)
        scale = header[0]
        floor = header[1]
        target = targets[r]

        nll = np.float32(np.float32(peak + log_of_sum) - row[target])
        nll_base = -np.float32(np.float32(scale * np.float32(codes[r, 4 + target])) + floor)
        log_sum = np.float32(peak + log_of_sum)
        total = 0.0
        top_base = 0
        highest = np.float32(0.0)
        for i in range(row.size):
            log_base = np.float32(np.float32(scale * np.float32(codes[r, 4 + i])) + floor)
            if i == 0 or log_base > highest:
                highest = log_base
                top_base = i
            if log_base > np.float32(LLAMA_LOG_PROB_FLOOR):
                ratio = np.float32(np.float32(log_base - row[i]) + log_sum)
                total += np.float64(np.float32(np.float32(math.exp(log_base)) * ratio))

        out[r].nll = np.float64(nll)
        out[r].nll_base = np.float64(nll_base)
        out[r].kld = total
        out[r].p_diff = np.float64(np.float32(np.float32(math.exp(-nll)) - np.float32(math.exp(-nll_base))))
        out[r].same_top = 1 if top == top_base else 0
        out[r].identical = IDENTICAL_UNKNOWN
        out[r].clamped = 1 if codes[r, 4 + target] == 0 else 0


@cached_njit()
def compare_logit_rows(
    base: NDArray[np.float32],
    other: NDArray[np.float32],
    targets: NDArray[np.int32],
    out: NDArray[np.void],
    finite: NDArray[np.uint8],
    begin: int,
    end: int,
) -> None:
    """Compare two rows of exact logits over the whole vocabulary; fills ``out`` (KLD_ROW [n_rows]).

    ``identical`` is bit for bit, so 0.0 and -0.0 differ. Identical rows skip the second pass: their divergence is 0.
    """
    for r in range(begin, end):
        a = base[r]
        b = other[r]
        peak_a, top_a, finite_a = _row_peak(a)
        peak_b, top_b, finite_b = _row_peak(b)
        finite[r] = 1 if finite_a and finite_b else 0
        if not (finite_a and finite_b):
            continue
        log_sum_a = np.float64(peak_a) + math.log(_sum_of_exps(a, peak_a))
        log_sum_b = np.float64(peak_b) + math.log(_sum_of_exps(b, peak_b))
        bits_a = a.view(np.uint32)
        bits_b = b.view(np.uint32)
        is_identical = True
        for i in range(a.size):
            if bits_a[i] != bits_b[i]:
                is_identical = False
                break
        total = 0.0
        if not is_identical:
            for i in range(a.size):
                log_a = np.float64(a[i]) - log_sum_a
                log_b = np.float64(b[i]) - log_sum_b
                total += math.exp(log_a) * (log_a - log_b)
        target = targets[r]
        log_target_a = np.float64(a[target]) - log_sum_a
        log_target_b = np.float64(b[target]) - log_sum_b

        out[r].nll = -log_target_b
        out[r].nll_base = -log_target_a
        out[r].kld = total
        out[r].p_diff = math.exp(log_target_b) - math.exp(log_target_a)
        out[r].same_top = 1 if top_a == top_b else 0
        out[r].identical = IDENTICAL_YES if is_identical else IDENTICAL_NO
        out[r].clamped = 0


@cached_njit()
def kl_of_log_probs(
    base: NDArray[np.float64],
    other: NDArray[np.floating[Any]],
    other_log_sum: NDArray[np.float64],
    floor: float,
    kld: NDArray[np.float64],
    begin: int,
    end: int,
) -> None:
    """KL divergence of rows, base entries at or below ``floor`` left out.

    base           float64 [n_rows, n_vocab]  log-probabilities
    other          float32 or float64 [n_rows, n_vocab]  logits or log-probabilities
    other_log_sum  float64 [n_rows]  ln of the sum of exp(other); 0 for log-probabilities
    kld            float64 [n_rows], out
    """
    for r in range(begin, end):
        total = 0.0
        for i in range(base.shape[1]):
            log_base = base[r, i]
            if log_base > floor:
                total += math.exp(log_base) * (log_base - (np.float64(other[r, i]) - other_log_sum[r]))
        kld[r] = total
