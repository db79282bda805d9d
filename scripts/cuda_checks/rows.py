"""Norms, RoPE, activations and reductions of logits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numba import cuda

from cuda_kernels.activation import HALF_SHRINK, Activation, gated_activation, to_half
from cuda_kernels.elementwise import scale_by_log_position, write_sequence
from cuda_kernels.norm import norm_first, rms_norm
from cuda_kernels.rope import RopePairing, rope
from cuda_kernels.sampling_reduce import row_summary, top_k
from scripts.cuda_checks.attention import poisoned
from scripts.cuda_checks.experts import activate
from scripts.cuda_checks.report import Check, Outcome, close, same_bits

TIMES = 4.0


def check_norm(n_rows: int, n_cols: int) -> Iterator[Outcome]:
    rng = np.random.default_rng(n_cols)
    x = rng.standard_normal((n_rows, n_cols), dtype=np.float32)
    weight = rng.standard_normal(n_cols, dtype=np.float32)
    eps = 1e-5

    def reference(values: np.ndarray) -> np.ndarray:
        mean = np.mean(values * values, axis=-1, keepdims=True)
        return np.asarray(values / np.sqrt(mean + values.dtype.type(eps)) * weight)

    d_out = poisoned((n_rows, n_cols))
    rms_norm(cuda.to_device(x), cuda.to_device(weight), d_out, eps=eps, stream=0)
    yield close(f"rms_norm {n_cols}", d_out.copy_to_host(), reference(x.astype(np.float64)), reference(x), times=TIMES)
    d_quarter = poisoned((n_rows, n_cols))
    rms_norm(cuda.to_device(x), cuda.to_device(weight), d_quarter, factor=0.25, eps=eps, stream=0)
    yield same_bits(f"rms_norm {n_cols} times a quarter", d_quarter.copy_to_host() * 4, d_out.copy_to_host())
    d_half = poisoned((n_rows, n_cols), np.float16)
    d_out = poisoned((n_rows, n_cols))
    rms_norm(cuda.to_device(x), cuda.to_device(weight), d_out, half=d_half, eps=eps, stream=0)
    yield same_bits(f"rms_norm {n_cols} as float16", d_half.copy_to_host(), d_out.copy_to_host().astype(np.float16))

    d_out_plain, ones = poisoned((n_rows, n_cols)), cuda.to_device(np.ones(n_cols, np.float32))
    rms_norm(cuda.to_device(x), None, d_out_plain, eps=eps, stream=0)
    d_ones = poisoned((n_rows, n_cols))
    rms_norm(cuda.to_device(x), ones, d_ones, eps=eps, stream=0)
    yield same_bits(f"rms_norm {n_cols} without a weight", d_out_plain.copy_to_host(), d_ones.copy_to_host())
    wider = cuda.to_device(np.concatenate([x, weight[None].repeat(n_rows, 0)], axis=1))
    norm_first(wider, cuda.to_device(weight), eps=eps, stream=0)
    first = np.ascontiguousarray(wider.copy_to_host()[:, :n_cols])
    yield same_bits(f"rms_norm of the first {n_cols}", first, d_out.copy_to_host())
    rest = np.ascontiguousarray(wider.copy_to_host()[:, n_cols:])
    yield same_bits(f"rms_norm of the first {n_cols}: the rest", rest, weight[None].repeat(n_rows, 0))

    d_one = poisoned((1, n_cols))
    rms_norm(cuda.to_device(x[-1:]), cuda.to_device(weight), d_one, eps=eps, stream=0)
    yield same_bits(f"rms_norm {n_cols}: one row of many", d_one.copy_to_host()[0], d_out.copy_to_host()[-1])

    for scale in (2.0**96, 2.0**125):  # squares that float32 cannot hold; powers of two change no bit of the result
        large = (np.clip(x, -3.0, 3.0) * scale).astype(np.float32)
        d_out = poisoned((n_rows, n_cols))
        rms_norm(cuda.to_device(large), cuda.to_device(weight), d_out, eps=eps, stream=0)
        exact, plain = reference(large.astype(np.float64)), reference(np.clip(x, -3.0, 3.0))
        yield close(f"rms_norm {n_cols} of {scale:.0e}", d_out.copy_to_host(), exact, plain, times=TIMES)


ROPES = ((64, 64, 0), (128, 64, 0), (80, 32, 0), (256, 256, 0), (192, 64, 128), (80, 32, 7))
"""Head size, elements that turn, and where these begin."""


def check_rope(pairing: RopePairing, head_dim: int, n_rot: int, begin: int = 0) -> Iterator[Outcome]:
    rng = np.random.default_rng(head_dim)
    positions = np.array([0, 1, 4095, 131071, 1_000_003], np.int32)
    x = rng.standard_normal((5, 3, head_dim), dtype=np.float32)
    frequencies = 500000.0 ** (-np.arange(0, n_rot, 2) / n_rot)
    d_x = cuda.to_device(x)
    arrays = (d_x, cuda.to_device(positions), cuda.to_device(frequencies))
    rope(*arrays, pairing=pairing, attention_factor=1.25, begin=begin, stream=0)

    def turn(dtype: type) -> np.ndarray:
        angles = positions[:, None].astype(np.float64) * frequencies
        cosine, sine = (f(angles).astype(dtype)[:, None] * dtype(1.25) for f in (np.cos, np.sin))
        first = begin + (np.arange(n_rot // 2) if pairing is RopePairing.HALVES else np.arange(0, n_rot, 2))
        second = first + (n_rot // 2 if pairing is RopePairing.HALVES else 1)
        out = x.astype(dtype)
        a, b = out[..., first].copy(), out[..., second].copy()
        out[..., first], out[..., second] = a * cosine - b * sine, a * sine + b * cosine
        return out

    label = f"{pairing.value} {n_rot} of {head_dim}" + (f" from {begin}" if begin else "")
    got, turned = d_x.copy_to_host(), slice(begin, begin + n_rot)
    yield close(label, got[..., turned], turn(np.float64)[..., turned], turn(np.float32)[..., turned], times=TIMES)
    rest = np.delete(np.arange(head_dim), turned)
    yield same_bits(f"{label}: the rest", got[..., rest], x[..., rest])


def check_activation(activation: Activation, n_cols: int) -> Iterator[Outcome]:
    rng = np.random.default_rng(n_cols)
    gate, up = (3.0 * rng.standard_normal((5, n_cols), dtype=np.float32) for _ in range(2))
    gate[0, :4] = (-100.0, 100.0, 0.0, -20.0)
    gate[1, :2], up[1, :2] = (500.0, 1000.0), (-600.0, 900.0)  # products beyond the largest float16

    d_out = poisoned((5, n_cols))
    gated_activation(cuda.to_device(gate), cuda.to_device(up), d_out, activation=activation, stream=0)
    exact, plain = activate(activation, gate.astype(np.float64), up.astype(np.float64)), activate(activation, gate, up)
    yield close(f"{activation.value} {n_cols}", d_out.copy_to_host(), exact, plain, times=TIMES)

    d_half = poisoned((5, n_cols), np.float16)
    gated_activation(cuda.to_device(gate), cuda.to_device(up), d_half, activation=activation, stream=0)
    rounded = (d_out.copy_to_host() * np.float32(HALF_SHRINK)).astype(np.float16)
    yield same_bits(f"{activation.value} {n_cols} as float16", d_half.copy_to_host(), rounded)

    d_half = poisoned((5, n_cols), np.float16)
    to_half(cuda.to_device(1e3 * gate), d_half, factor=HALF_SHRINK, stream=0)
    shrunk = (np.float32(1e3) * gate * np.float32(HALF_SHRINK)).astype(np.float16)
    yield same_bits(f"to_half {n_cols}", d_half.copy_to_host(), shrunk)


def check_log_position(n_cols: int) -> Iterator[Outcome]:
    positions = np.array([0, 4095, 4096, 8191, 1_000_003], np.int32)
    x = np.random.default_rng(n_cols).standard_normal((5, n_cols), dtype=np.float32)
    d_x = cuda.to_device(x)
    scale_by_log_position(d_x, cuda.to_device(positions), scale=0.25, n_step=4096, stream=0)

    def reference(dtype: type) -> np.ndarray:
        factors = dtype(1.0) + dtype(0.25) * np.log((positions // 4096 + 1).astype(dtype))
        return np.asarray(x.astype(dtype) * factors[:, None])

    got = d_x.copy_to_host()
    yield close(f"log position {n_cols}", got, reference(np.float64), reference(np.float32), times=TIMES)
    yield same_bits(f"log position {n_cols}: first step", got[:2], x[:2])


def check_logits(n_vocab: int, k: int) -> Iterator[Outcome]:
    rng = np.random.default_rng(n_vocab)
    logits = 4.0 * rng.standard_normal((3, n_vocab), dtype=np.float32)
    logits[1] = np.round(logits[1])  # many equal ones
    logits[2, n_vocab // 2 :] = -np.inf
    d_logits, d_best, d_sums = cuda.to_device(logits), poisoned((3,), np.int32), poisoned((3,))
    row_summary(d_logits, d_best, d_sums, stream=0)
    yield same_bits(f"largest of {n_vocab}", d_best.copy_to_host(), logits.argmax(axis=-1).astype(np.int32))

    def log_sum(values: np.ndarray) -> np.ndarray:
        largest = values.max(axis=-1, keepdims=True)
        return np.asarray(largest + np.log(np.exp(values - largest).sum(axis=-1, keepdims=True)))

    got = d_sums.copy_to_host()[:, None]
    yield close(f"log-sum-exp of {n_vocab}", got, log_sum(logits.astype(np.float64)), log_sum(logits), times=TIMES)

    d_values, d_ids = poisoned((3, k)), poisoned((3, k), np.int32)
    top_k(d_logits, d_values, d_ids, stream=0)
    values, ids = d_values.copy_to_host(), d_ids.copy_to_host()
    # largest first, equal ones by token: a stable sort of the negated row
    expected = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
    yield same_bits(f"top {k} of {n_vocab}", np.sort(ids, axis=-1), np.sort(expected, axis=-1).astype(np.int32))
    yield same_bits(f"top {k} of {n_vocab}: values", values, np.take_along_axis(logits, ids, axis=-1))


def check_sequence(count: int, period: int | None) -> Iterator[Outcome]:
    """Page tables: a run of places, and the slots that pages of a window layer take turns in."""
    wanted = np.full(count + 5, -1, np.int64)
    d_out = cuda.to_device(wanted)
    write_sequence(d_out, begin=3, count=count, first=1 << 40, step=768, period=period, stream=0)
    wanted[3 : 3 + count] = (1 << 40) + 768 * (np.arange(count) % (period or count))
    yield same_bits(f"sequence of {count}, period {period}", d_out.copy_to_host(), wanted)


def checks() -> Iterator[Check]:
    for n_cols in (1, 64, 576, 4096, 5120):
        yield Check(family="rows", case=f"norm {n_cols}", run=lambda n=n_cols: check_norm(4, n))
    for pairing in RopePairing:
        for head_dim, n_rot, begin in ROPES:
            yield Check(
                family="rows",
                case=f"rope {pairing.value}",
                run=lambda p=pairing, d=head_dim, n=n_rot, b=begin: check_rope(p, d, n, b),
            )
    for activation in Activation:
        yield Check(family="rows", case="activation", run=lambda a=activation: check_activation(a, 1536))
        yield Check(family="rows", case="activation", run=lambda a=activation: check_activation(a, 333))
    yield Check(family="rows", case="log position", run=lambda: check_log_position(4096))
    for count, period in ((1, None), (300, None), (300, 7)):
        yield Check(family="rows", case="sequence", run=lambda n=count, p=period: check_sequence(n, p))
    for n_vocab, k in ((32, 32), (49152, 40), (151936, 1000)):
        yield Check(family="rows", case="logits", run=lambda n=n_vocab, k=k: check_logits(n, k))
