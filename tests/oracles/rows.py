"""Operations on rows of activations in plain numpy, written for clarity; shares no code with any backend.

Every function computes in ``dtype``: float64 for the reference, float32 to see what plain single precision costs.
"""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

Numbers = NDArray[np.floating]


def unpack(packed: NDArray[np.uint8], weight_type: GGMLQuantizationType, n_out: int) -> NDArray[np.float32]:
    """The weights [n_out, n_in] that the gguf package reads from a tensor's bytes."""
    return np.asarray(dequantize(packed.reshape(n_out, -1), weight_type), dtype=np.float32)


def matmul(x: Numbers, weight: Numbers, dtype: type[np.floating] = np.float64) -> Numbers:
    return x.astype(dtype) @ weight.astype(dtype).T


def rms_norm(x: Numbers, weight: Numbers, eps: float, dtype: type[np.floating] = np.float64) -> Numbers:
    x = x.astype(dtype)
    mean = (x * x).mean(axis=-1, keepdims=True, dtype=dtype)
    return x / np.sqrt(mean + dtype(eps)) * weight.astype(dtype)


def silu_mul(gate: Numbers, up: Numbers, dtype: type[np.floating] = np.float64) -> Numbers:
    gate = gate.astype(dtype)
    return gate / (1 + np.exp(-gate)) * up.astype(dtype)


def gelu_mul(gate: Numbers, up: Numbers, dtype: type[np.floating] = np.float64) -> Numbers:
    gate = gate.astype(dtype)
    inner = dtype(np.sqrt(2.0 / np.pi)) * (gate + dtype(0.044715) * gate * gate * gate)
    return gate * (dtype(1.0) + np.tanh(inner)) / dtype(2.0) * up.astype(dtype)


def clamped_swiglu(gate: Numbers, up: Numbers, dtype: type[np.floating] = np.float64) -> Numbers:
    gate = np.minimum(gate.astype(dtype), dtype(7.0))
    up = np.clip(up.astype(dtype), dtype(-7.0), dtype(7.0))
    return gate / (dtype(1.0) + np.exp(dtype(-1.702) * gate)) * (up + dtype(1.0))


def softcap(x: Numbers, cap: float, dtype: type[np.floating] = np.float64) -> Numbers:
    return dtype(cap) * np.tanh(x.astype(dtype) / dtype(cap))


def rotate(
    x: Numbers, first_pos: int, freqs: NDArray[np.float32], magnitude: float, *, neox: bool, dtype: type[np.floating]
) -> Numbers:
    """Rotary embedding of x [n_tokens, n_head, head_dim]; angles are float32 products, as the specification says."""
    n_pairs = len(freqs)
    positions = np.arange(first_pos, first_pos + len(x), dtype=np.float32)
    angles = (positions[:, None] * freqs).astype(dtype)[:, None, :]
    cosine = np.cos(angles) * dtype(magnitude)
    sine = np.sin(angles) * dtype(magnitude)
    first = slice(0, n_pairs) if neox else slice(0, 2 * n_pairs, 2)
    second = slice(n_pairs, 2 * n_pairs) if neox else slice(1, 2 * n_pairs, 2)
    out = x.astype(dtype)
    x_0, x_1 = x[..., first].astype(dtype), x[..., second].astype(dtype)
    out[..., first] = x_0 * cosine - x_1 * sine
    out[..., second] = x_0 * sine + x_1 * cosine
    return out
