"""Rotary position embedding, in place on float32 rows; the angles per position come from ``kvs_core.rope``."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import float32, types

from cuda_kernels.launch import Kernel, check_array
from kvs_core.errors import KernelArgumentError
from kvs_core.model_shape import RopeKind
from kvs_core.units import ceil_div

N_THREADS = 128


@cache
def build_rope_kernel(kind: RopeKind) -> Kernel:
    """One thread turns one pair. Whole turns are taken off in float64: float32 loses the angle at long positions."""
    is_adjacent = kind is not RopeKind.NEOX
    turns_of_radian = 0.5 / math.pi
    radians_of_turn = 2.0 * math.pi

    def rope_kernel(x, positions, freqs, magnitude):
        n_pairs = freqs.shape[0]
        i = cuda.grid(1)
        if i >= x.shape[0] * x.shape[1] * n_pairs:
            return
        pair = i % n_pairs
        head = i // n_pairs % x.shape[1]
        token = i // n_pairs // x.shape[1]

        turns = float(positions[token]) * float(freqs[pair]) * turns_of_radian
        angle = float32((turns - math.floor(turns + 0.5)) * radians_of_turn)
        cosine = math.cos(angle) * magnitude
        sine = math.sin(angle) * magnitude
        first = 2 * pair if is_adjacent else pair
        second = first + 1 if is_adjacent else pair + n_pairs
        a = x[token, head, first]
        b = x[token, head, second]

        x[token, head, first] = a * cosine - b * sine
        x[token, head, second] = a * sine + b * cosine

    signature = (
        types.Array(types.float32, 3, "C"),
        types.Array(types.int32, 1, "C"),
        types.Array(types.float32, 1, "C"),
        types.float32,
    )
    return Kernel(rope_kernel, signature, n_threads=N_THREADS)


def rope(x: Any, positions: Any, freqs: Any, *, kind: RopeKind, magnitude: float, stream: Any) -> None:
    """Turn the first ``2 * n_pairs`` dimensions of every head by its token's position.

    x           float32 [n_tokens, n_head, head_dim]   in place; dimensions beyond the pairs stay
    positions   int32   [n_tokens]
    freqs       float32 [n_pairs]                      radians a position, scaling already applied
    kind        which two dimensions turn together: 2i and 2i + 1, or i and i + n_pairs (NeoX)
    magnitude   multiplies the result (YaRN)
    Raises      KernelArgumentError if shapes or dtypes disagree.
    """
    check_array("x", x, np.float32, (None, None, None))
    check_array("positions", positions, np.int32, (x.shape[0],))
    check_array("freqs", freqs, np.float32, (None,))
    n_pairs = freqs.shape[0]
    if 2 * n_pairs > x.shape[2]:
        raise KernelArgumentError(f"rope: {n_pairs} pairs, a head has {x.shape[2]} dimensions")
    grid = (ceil_div(x.shape[0] * x.shape[1] * n_pairs, N_THREADS),)
    build_rope_kernel(kind).launch(grid, stream, x, positions, freqs, magnitude)
