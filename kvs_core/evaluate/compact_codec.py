"""Rows of log-probabilities in about five bits a token: the arithmetic of our own base format. No files.

A row is stored as levels ``k = round(sqrt(p) / step)``. A level step changes ln p by ``2 * step / sqrt(p)``, so the
probable tokens are kept finely and the improbable ones coarsely, in just the proportion that makes every token add
the same share, ``step**2 / 6``, to the KL divergence between the stored row and the exact one: for a given size no
other split is better. ``step`` is chosen so that the shares add up to ``KLD_FLOOR_TARGET``.

    decoded    p = level**2 * c for levels above 0, one common value for all tokens of level 0 (their exact mean, kept
               with the row); c makes the row sum to 1
    packed     one byte a level, 255 standing for "see below", then the levels of 255 and more as uint16 (low bytes,
               then high bytes); the whole Huffman-coded (a raw deflate stream)

The divergence between stored and exact row is computed when the row is written and kept with it. When a measured row q
is compared, ``KL(stored || q)`` is exactly that number plus ``KL(exact || q)`` plus a term that is linear in the
rounding errors and averages to nothing, so the number is subtracted and no bias is left: the error of a row's
divergence D is near ``step * sqrt(2 D / 3)``, far below the floor.
"""

from __future__ import annotations

import hashlib
import math
import zlib

import numpy as np
from numba import njit
from numpy.typing import NDArray

from kvs_core.cpu.kernel_cache import cached_njit

KLD_FLOOR_TARGET = 3e-5
"""Mean KL divergence, in nats, between stored and exact rows that the step is chosen for."""

ROW_TABLE = np.dtype(
    [
        ("payload_bytes", "<u4"),
        ("top", "<i4"),  # first index of the largest logit
        ("tail_log_prob", "<f4"),  # ln of the mean probability of the tokens at level 0
        ("bias", "<f4"),  # KL(stored || exact), nats
        ("nll", "<f8"),  # exact -ln p of the row's target
        ("hash", "<u8"),  # BLAKE2b-64 of the exact float32 logits
    ]
)
"""What is kept of each row beside its levels."""

_ESCAPE = 255
_TAIL_LOG_PROB_MIN = -700.0  # keeps exp() above zero; a mean below it adds nothing to any sum
_N_LOG_TABLE = 4096


def quantisation_step(n_vocab: int) -> float:
    """Distance of two levels, in units of sqrt(p). Vocabularies above half a million meet the uint16 range first."""
    return max(math.sqrt(6.0 * KLD_FLOOR_TARGET / n_vocab), 1.0 / 65535.0)


def log_level_table() -> NDArray[np.float64]:
    """``2 ln k`` for small levels, so that decoding needs no logarithm for most tokens; entry 0 is unused."""
    return 2.0 * np.log(np.maximum(np.arange(_N_LOG_TABLE, dtype=np.float64), 1.0))


@njit(nogil=True)
def _level_scale(levels: NDArray[np.uint16], tail_log_prob: float) -> float:
    """``c``: what a squared level is worth, given that tokens of level 0 share what their mean says."""
    squares = 0.0
    n_tail = 0
    for i in range(levels.size):
        level = np.float64(levels[i])
        squares += level * level
        if levels[i] == 0:
            n_tail += 1
    return (1.0 - n_tail * math.exp(tail_log_prob)) / squares


@cached_njit()
def quantise_rows(
    logits: NDArray[np.float32],
    log_sum: NDArray[np.float64],
    step: float,
    log_table: NDArray[np.float64],
    levels: NDArray[np.uint16],
    tail_log_prob: NDArray[np.float32],
    bias: NDArray[np.float32],
    begin: int,
    end: int,
) -> None:
    """Rows ``begin..end`` to levels.

    logits, levels  [n_rows, n_vocab]; log_sum float64 [n_rows] as from ``row_math.reduce_rows``; rows must be finite
    tail_log_prob, bias  float32 [n_rows], out
    """
    for r in range(begin, end):
        row = logits[r]
        tail = 0.0
        n_tail = 0
        for i in range(row.size):
            root = math.exp(0.5 * (np.float64(row[i]) - log_sum[r]))
            level = np.uint16(np.rint(root / step))
            levels[r, i] = level
            if level == 0:
                tail += root * root
                n_tail += 1
        tail_log_prob[r] = math.log(tail / n_tail) if tail > 0.0 else _TAIL_LOG_PROB_MIN
        tail_log_prob[r] = max(tail_log_prob[r], np.float32(_TAIL_LOG_PROB_MIN))

        tail_log = np.float64(tail_log_prob[r])
        scale = _level_scale(levels[r], tail_log)
        log_scale = math.log(scale)
        tail_prob = math.exp(tail_log)
        divergence = 0.0
        for i in range(row.size):
            exact = np.float64(row[i]) - log_sum[r]
            level = levels[r, i]
            if level == 0:
                divergence += tail_prob * (tail_log - exact)
            else:
                log_square = log_table[level] if level < log_table.size else 2.0 * math.log(np.float64(level))
                divergence += scale * np.float64(level) * np.float64(level) * (log_scale + log_square - exact)
        bias[r] = divergence


@cached_njit()
def dequantise_rows(
    levels: NDArray[np.uint16],
    tail_log_prob: NDArray[np.float32],
    log_table: NDArray[np.float64],
    log_probs: NDArray[np.float64],
    begin: int,
    end: int,
) -> None:
    """Levels back to log-probabilities, float64 [n_rows, n_vocab], out; the probabilities of a row add up to 1."""
    for r in range(begin, end):
        tail_log = np.float64(tail_log_prob[r])
        log_scale = math.log(_level_scale(levels[r], tail_log))
        for i in range(levels.shape[1]):
            level = levels[r, i]
            if level == 0:
                log_probs[r, i] = tail_log
            elif level < log_table.size:
                log_probs[r, i] = log_scale + log_table[level]
            else:
                log_probs[r, i] = log_scale + 2.0 * math.log(np.float64(level))


def pack_levels(levels: NDArray[np.uint16]) -> bytes:
    """One row of levels, uint16 [n_vocab], as bytes."""
    symbols = np.minimum(levels, _ESCAPE).astype(np.uint8)
    escaped = levels[levels >= _ESCAPE]
    packer = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    planes = symbols.tobytes() + (escaped & 255).astype(np.uint8).tobytes() + (escaped >> 8).astype(np.uint8).tobytes()
    return packer.compress(planes) + packer.flush()


def unpack_levels(payload: bytes, levels: NDArray[np.uint16]) -> None:
    """Fill ``levels`` (uint16 [n_vocab]); raises ValueError when the payload is not one row of that many tokens."""
    try:
        planes = np.frombuffer(zlib.decompress(payload, -15), np.uint8)
    except zlib.error as error:
        raise ValueError(f"a row cannot be unpacked: {error}") from error
    symbols = planes[: levels.size]
    is_escaped = symbols == _ESCAPE
    n_escaped = int(is_escaped.sum())
    if len(planes) != levels.size + 2 * n_escaped or not symbols.any():
        raise ValueError(f"a row unpacks to {len(planes)} bytes, needs {levels.size + 2 * n_escaped}")
    levels[:] = symbols
    low = planes[levels.size : levels.size + n_escaped].astype(np.uint16)
    high = planes[levels.size + n_escaped :].astype(np.uint16)
    levels[is_escaped] = low | (high << 8)


def hash_row(row: NDArray[np.float32]) -> int:
    """BLAKE2b of the row's bytes, 64 bits: equal hashes prove equal logits for every practical purpose."""
    return int.from_bytes(hashlib.blake2b(row.data, digest_size=8).digest(), "little")
