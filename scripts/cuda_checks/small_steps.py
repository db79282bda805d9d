"""Factors, caps and gates element by element, and norms that are added to the residual."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numba import cuda

from cuda_kernels.add_normed import add_normed, add_normed_pair
from cuda_kernels.head_norms import Heads, norm_heads
from cuda_kernels.scaling import scale_in_place, softcap, softplus_gate, take_columns
from scripts.cuda_checks.attention import poisoned
from scripts.cuda_checks.report import Check, Outcome, close, same_bits

TIMES = 4.0


def check_scaling(n_cols: int) -> Iterator[Outcome]:
    rng = np.random.default_rng(n_cols)
    x = 40.0 * rng.standard_normal((5, n_cols), dtype=np.float32)
    x[0, :2] = (0.0, -1e30)
    d_x = cuda.to_device(x)
    scale_in_place(d_x.reshape(-1), 0.7, stream=0)
    yield same_bits(f"scale {n_cols}", d_x.copy_to_host(), x * np.float32(0.7))

    d_x = cuda.to_device(x)
    softcap(d_x.reshape(-1), 30.0, stream=0)
    exact, plain = 30.0 * np.tanh(x.astype(np.float64) / 30.0), np.float32(30.0) * np.tanh(x / np.float32(30.0))
    yield close(f"softcap {n_cols}", d_x.copy_to_host(), exact, plain, times=TIMES)

    d_out = poisoned((5, n_cols - 1))
    take_columns(cuda.to_device(x), 1, d_out, stream=0)
    yield same_bits(f"columns of {n_cols}", d_out.copy_to_host(), np.ascontiguousarray(x[:, 1:]))


def check_softplus_gate(n_gates: int, n_cols: int) -> Iterator[Outcome]:
    rng = np.random.default_rng(n_gates)
    gate = 8.0 * rng.standard_normal((5, n_gates), dtype=np.float32)
    gate[0, 0], gate[1, 0], gate[2, 0] = -100.0, 20.0, 100.0
    x = rng.standard_normal((5, n_cols), dtype=np.float32)
    d_x = cuda.to_device(x)
    softplus_gate(cuda.to_device(gate), d_x, stream=0)

    def reference(dtype: type) -> np.ndarray:
        factors = np.logaddexp(dtype(0.0), gate.astype(dtype))
        return np.asarray(x.astype(dtype) * factors.repeat(n_cols // n_gates, axis=1))

    label = f"softplus of {n_gates} gates for {n_cols}"
    yield close(label, d_x.copy_to_host(), reference(np.float64), reference(np.float32), times=TIMES)


def check_add_normed(n_cols: int) -> Iterator[Outcome]:
    rng = np.random.default_rng(n_cols + 3)
    x, residual = (rng.standard_normal((4, n_cols), dtype=np.float32) for _ in range(2))
    x[1] *= np.float32(1e30)  # its squares are beyond float32
    x[2] = 0.0
    weight = rng.standard_normal(n_cols, dtype=np.float32)

    def reference(dtype: type, scale: float) -> np.ndarray:
        wide = x.astype(np.float64)
        factor = 1.0 / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
        return np.asarray((residual + x.astype(dtype) * factor.astype(dtype) * weight) * dtype(scale))

    def run(rows: slice, scale: float | None) -> np.ndarray:
        d_scale = None if scale is None else cuda.to_device(np.array([scale], np.float32))
        arrays = (cuda.to_device(x[rows]), cuda.to_device(weight), cuda.to_device(residual[rows]))
        add_normed(*arrays, scale=d_scale, eps=1e-6, stream=0)
        return np.asarray(arrays[2].copy_to_host())

    for scale in (None, 0.375):
        got, factor = run(slice(0, 4), scale), 1.0 if scale is None else scale
        label = f"add normed {n_cols}{'' if scale is None else ' scaled'}"
        yield close(label, got, reference(np.float64, factor), reference(np.float32, factor), times=TIMES)
        yield same_bits(f"{label}: one row of many", run(slice(3, 4), scale)[0], got[3])


def check_add_normed_pair(n_cols: int) -> Iterator[Outcome]:
    rng = np.random.default_rng(n_cols + 5)
    x, y, residual = (rng.standard_normal((4, n_cols), dtype=np.float32) for _ in range(3))
    x[1] *= np.float32(1e30)  # its squares are beyond float32
    y[2] = 0.0
    weights = [rng.standard_normal(n_cols, dtype=np.float32) for _ in range(3)]

    def norm(rows: np.ndarray, weight: np.ndarray, dtype: type) -> np.ndarray:
        factor = 1.0 / np.sqrt(np.mean(rows.astype(np.float64) ** 2, axis=-1, keepdims=True) + 1e-6)
        return np.asarray(rows.astype(dtype) * factor.astype(dtype) * weight)

    def reference(dtype: type, scale: float) -> np.ndarray:
        total = norm(x, weights[0], dtype) + norm(y, weights[1], dtype)
        return np.asarray((residual + norm(total, weights[2], dtype)) * dtype(scale))

    def run(rows: slice, scale: float | None) -> np.ndarray:
        d_scale = None if scale is None else cuda.to_device(np.array([scale], np.float32))
        d_residual = cuda.to_device(residual[rows])
        arrays = (cuda.to_device(x[rows]), cuda.to_device(y[rows]), [*map(cuda.to_device, weights)], d_residual)
        add_normed_pair(*arrays, scale=d_scale, eps=1e-6, stream=0)
        return np.asarray(d_residual.copy_to_host())

    for scale in (None, 0.375):
        got, factor = run(slice(0, 4), scale), 1.0 if scale is None else scale
        label = f"add normed pair {n_cols}{'' if scale is None else ' scaled'}"
        yield close(label, got, reference(np.float64, factor), reference(np.float32, factor), times=TIMES)
        yield same_bits(f"{label}: one row of many", run(slice(3, 4), scale)[0], got[3])


def check_norm_heads(head_dim: int) -> Iterator[Outcome]:
    rng = np.random.default_rng(head_dim + 4)
    arrays = [rng.standard_normal((n_rows, head_dim), dtype=np.float32) for n_rows in (9, 3, 5)]
    arrays[0][1] *= np.float32(1e30)  # its squares are beyond float32
    arrays[1][2] = 0.0
    weights = [rng.standard_normal(head_dim, dtype=np.float32) for _ in range(2)]

    def run(n_arrays: int, first: int = 0) -> list[np.ndarray]:
        factors = [*map(cuda.to_device, weights), None]
        heads = [Heads(x=cuda.to_device(x[first:]), weight=w) for x, w in zip(arrays, factors, strict=True)][:n_arrays]
        norm_heads(heads, eps=1e-6, stream=0)
        return [np.asarray(one.x.copy_to_host()) for one in heads]

    together = run(3)
    for i, (got, x) in enumerate(zip(together, arrays, strict=True)):
        wide, weight = x.astype(np.float64), weights[i] if i < 2 else np.ones(head_dim, np.float32)
        factor = 1.0 / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
        plain = x * factor.astype(np.float32) * weight
        yield close(f"heads of {head_dim}, array {i}", got, wide * factor * weight, plain, times=TIMES)
    for i, (got, whole) in enumerate(zip(run(2, first=1), together[:2], strict=True)):
        yield same_bits(f"heads of {head_dim}, array {i}: fewer rows", got, np.ascontiguousarray(whole[1:]))


def checks() -> Iterator[Check]:
    for n_cols in (33, 4096):
        yield Check(family="rows", case=f"scaling {n_cols}", run=lambda n=n_cols: check_scaling(n))
    for n_gates, n_cols in ((4, 256), (64, 8192), (512, 512)):
        yield Check(
            family="rows",
            case=f"softplus gate {n_gates}",
            run=lambda g=n_gates, n=n_cols: check_softplus_gate(g, n),
        )
    for n_cols in (4, 640, 2816, 5376):
        yield Check(family="rows", case=f"add normed {n_cols}", run=lambda n=n_cols: check_add_normed(n))
    for head_dim in (64, 80, 256, 512):
        yield Check(family="rows", case=f"norm heads {head_dim}", run=lambda d=head_dim: check_norm_heads(d))
    for n_cols in (64, 2816, 5376):
        yield Check(family="rows", case=f"add normed pair {n_cols}", run=lambda n=n_cols: check_add_normed_pair(n))
