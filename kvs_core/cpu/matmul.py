"""Matrix products of activations with quantised weights: ``out = x @ weight.T`` in float32.

Checks and launches only; the kernels are in ``matmul_kernels``.

Activations stay float32: rounding them to 8 bits would make prefill and decode disagree and moves logits by far
more than any other step, and float32 already reads weights at memory speed (``scripts/benchmark_cpu_kernels.py``).

Every result is one chain of fused multiply-adds per lane over ascending inputs, then ``simd.sum_lanes``, whatever
the number of tokens, threads, or weights computed together. So one token gives the same bits alone, in a group of
up to DECODE_TOKENS_MAX, or inside a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvs_core.cpu.matmul_kernels import matmul_kernel
from kvs_core.cpu.scratch import DECODE_TOKENS_MAX, MIN_MATMUL_INPUTS, matmul_scratch_bytes
from kvs_core.errors import KernelArgumentError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvs_core.cpu.threads import ThreadTeam
    from kvs_core.cpu.weights import CpuWeight

MAX_WEIGHTS_TOGETHER = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuScratch:
    """Memory that kernels overwrite freely, and the threads that share it.

    buffer      float32, one-dimensional, best starting at a multiple of 64 bytes; matmul_scratch_bytes says how much
    """

    buffer: NDArray[np.float32]
    team: ThreadTeam


def matmul(weight: CpuWeight, x: NDArray[np.float32], out: NDArray[np.float32], scratch: CpuScratch) -> None:
    """Multiply every token by one weight: ``out = x @ weight.T``.

    x       float32 [n_tokens, n_in], C-contiguous
    out     float32 [n_tokens, n_out], C-contiguous, may hold anything; must not overlap ``x``
    Raises  KernelArgumentError if shapes or types disagree or the scratch is too small.
    """
    _check_activations(weight, x, out)
    check_scratch(weight.n_in, scratch)
    _launch(weight, weight, weight, 1, x, out, out, out, scratch)


def matmul_together(
    weights: Sequence[CpuWeight], x: NDArray[np.float32], outs: Sequence[NDArray[np.float32]], scratch: CpuScratch
) -> None:
    """Multiply the same tokens by several weights, with the results of separate ``matmul`` calls.

    Weights of one type share a kernel launch, up to MAX_WEIGHTS_TOGETHER: query, key and value, or gate and up.
    Raises  KernelArgumentError as ``matmul``, or when the two sequences differ in length.
    """
    if len(weights) != len(outs):
        raise KernelArgumentError(f"{len(weights)} weights with {len(outs)} outputs")
    for weight, out in zip(weights, outs, strict=True):
        _check_activations(weight, x, out)
        check_scratch(weight.n_in, scratch)
    begin = 0
    while begin < len(weights):
        end = begin + 1
        while end < min(len(weights), begin + MAX_WEIGHTS_TOGETHER) and weights[end].kind is weights[begin].kind:
            end += 1
        last = end - 1
        second = min(begin + 1, last)
        _launch(
            weights[begin],
            weights[second],
            weights[last],
            end - begin,
            x,
            outs[begin],
            outs[second],
            outs[last],
            scratch,
        )
        begin = end


def _launch(
    weight_a: CpuWeight,
    weight_b: CpuWeight,
    weight_c: CpuWeight,
    n_weights: int,
    x: NDArray[np.float32],
    out_a: NDArray[np.float32],
    out_b: NDArray[np.float32],
    out_c: NDArray[np.float32],
    scratch: CpuScratch,
) -> None:
    matmul_kernel(
        weight_a.kind,
        weight_a.data,
        weight_b.data,
        weight_c.data,
        n_weights,
        x,
        out_a,
        out_b,
        out_c,
        scratch.buffer,
        scratch.team.control,
        scratch.team.n_threads,
    )


def _check_activations(weight: CpuWeight, x: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    if x.ndim != 2 or x.shape[1] != weight.n_in or x.dtype != np.float32 or not x.flags.c_contiguous:
        raise KernelArgumentError(f"x must be contiguous float32 [n_tokens, {weight.n_in}], got {x.dtype} {x.shape}")
    if out.shape != (x.shape[0], weight.n_out) or out.dtype != np.float32 or not out.flags.c_contiguous:
        raise KernelArgumentError(
            f"out must be contiguous float32 {(x.shape[0], weight.n_out)}, got {out.dtype} {out.shape}"
        )


def check_scratch(n_in: int, scratch: CpuScratch) -> None:
    """Raise KernelArgumentError unless rows of ``n_in`` inputs can be multiplied with this scratch."""
    if n_in < MIN_MATMUL_INPUTS:
        raise KernelArgumentError(f"a weight with {n_in} columns: matmul needs at least {MIN_MATMUL_INPUTS}")
    buffer = scratch.buffer
    needed = matmul_scratch_bytes(n_in, scratch.team.n_threads)
    if buffer.nbytes < needed or buffer.dtype != np.float32 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise KernelArgumentError(
            f"scratch must be contiguous float32 of {needed} bytes, got {buffer.dtype} of {buffer.nbytes} bytes"
        )


__all__ = ["DECODE_TOKENS_MAX", "CpuScratch", "matmul", "matmul_scratch_bytes", "matmul_together"]
