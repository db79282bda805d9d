"""Rotary position embedding, in place on float32 rows, with both pairings of dimensions."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import float32, types

from cuda_kernels.launch import Kernel, check_array, kernel_builder
from kvs_core.errors import KernelArgumentError
from kvs_core.units import ceil_div

N_THREADS = 128


class RopePairing(Enum):
    """Which two dimensions turn together: ``2i, 2i + 1`` (llama) or ``i, i + n_rot / 2`` (NeoX)."""

    ADJACENT = "adjacent"
    HALVES = "halves"


@kernel_builder
def build_rope_kernel(pairing: RopePairing) -> Kernel:
    """One thread turns one pair. Whole turns are taken off in float64: float32 loses the angle at long positions."""
    is_adjacent = pairing is RopePairing.ADJACENT
    turns_of_radian = 0.5 / math.pi
    radians_of_turn = 2.0 * math.pi

    def rope_kernel(x, positions, frequencies, attention_factor, begin):
        n_pairs = frequencies.shape[0]
        i = cuda.grid(1)
        if i >= x.shape[0] * x.shape[1] * n_pairs:
            return
        pair = i % n_pairs
        head = i // n_pairs % x.shape[1]
        token = i // n_pairs // x.shape[1]

        turns = float(positions[token]) * frequencies[pair] * turns_of_radian
        angle = float32((turns - math.floor(turns + 0.5)) * radians_of_turn)
        cosine = math.cos(angle) * attention_factor
        sine = math.sin(angle) * attention_factor
        first = begin + (2 * pair if is_adjacent else pair)
        second = first + (1 if is_adjacent else n_pairs)
        a = x[token, head, first]
        b = x[token, head, second]

        x[token, head, first] = a * cosine - b * sine
        x[token, head, second] = a * sine + b * cosine

    signature = (
        types.Array(types.float32, 3, "C"),
        types.Array(types.int32, 1, "C"),
        types.Array(types.float64, 1, "C"),
        types.float32,
        types.int32,
    )
    return Kernel(rope_kernel, signature, n_threads=N_THREADS)


def rope(
    x: Any,
    positions: Any,
    frequencies: Any,
    *,
    pairing: RopePairing,
    attention_factor: float = 1.0,
    begin: int = 0,
    stream: Any,
) -> None:
    """Turn ``2 * n_pairs`` dimensions of every head, from ``begin`` on, by its token's position.

    x                 float32 [n_tokens, n_head, head_dim]   in place; other dimensions stay
    positions         int32   [n_tokens]
    frequencies       float64 [n_pairs]                      radians a position, scaling already applied
    attention_factor  multiplies the result (YaRN)
    Raises            KernelArgumentError if shapes or dtypes disagree.
    """
    check_array("x", x, np.float32, (None, None, None))
    check_array("positions", positions, np.int32, (x.shape[0],))
    check_array("frequencies", frequencies, np.float64, (None,))
    n_pairs = frequencies.shape[0]
    if begin < 0 or begin + 2 * n_pairs > x.shape[2]:
        raise KernelArgumentError(f"rope: {n_pairs} pairs from {begin} on, a head has {x.shape[2]} dimensions")
    grid = (ceil_div(x.shape[0] * x.shape[1] * n_pairs, N_THREADS),)
    build_rope_kernel(pairing).launch(grid, stream, x, positions, frequencies, attention_factor, begin)
