"""The short convolution and the gated delta rule in plain numpy, written for clarity; shares no code with any backend.

Every step is done in ``dtype``: with float32 the result shows what plain single precision costs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating]


def short_convolution(x: Array, taps: Array, *, dtype: type[np.floating] = np.float64) -> Array:
    """silu of each channel's causal convolution: x [n_tokens, n_channels], taps [n_taps, n_channels], last for now."""
    n_earlier = len(taps) - 1
    padded = np.concatenate([np.zeros((n_earlier, x.shape[1])), x]).astype(dtype)
    total = sum(padded[tap : tap + len(x)] * taps[tap].astype(dtype) for tap in range(n_earlier + 1))
    return np.asarray(total / (dtype(1.0) + np.exp(-total)))


def unit_heads(x: Array, eps: float) -> Array:
    """Heads [..., head_dim] divided by their lengths, or by ``eps`` if that is more."""
    return np.asarray(x / np.maximum(np.sqrt((x * x).sum(axis=-1, keepdims=True)), x.dtype.type(eps)))


def gates(beta: Array, decay: Array, bias: Array, rate: Array) -> tuple[Array, Array]:
    """What beta and decay [n_tokens, n_head] stand for: the share of a change, and the logarithm of what is kept."""
    one = beta.dtype.type(1.0)
    return one / (one + np.exp(-beta)), rate * np.log1p(np.exp(decay + bias))


def delta_rule(
    q: Array, k: Array, v: Array, share: Array, log_kept: Array, state: Array | None = None
) -> tuple[Array, Array]:
    """One head, token by token: q, k, v [n_tokens, head_dim], the other two [n_tokens].

    Returns the outputs and the matrix after the last token; ``state`` is the one before the first.
    """
    head_dim = q.shape[1]
    matrix = np.zeros((head_dim, head_dim), q.dtype) if state is None else state.copy()
    out = np.zeros_like(v)
    for token in range(len(q)):
        matrix = matrix * np.exp(log_kept[token])
        change = share[token] * (v[token] - k[token] @ matrix)
        matrix = matrix + np.outer(k[token], change)
        out[token] = q[token] @ matrix / np.sqrt(q.dtype.type(head_dim))
    return out, matrix


def chunked_delta_rule(
    q: Array, k: Array, v: Array, share: Array, log_kept: Array, *, chunk: int
) -> tuple[Array, Array]:
    """The same, ``chunk`` tokens at a time by matrix products and one triangular system."""
    head_dim = q.shape[1]
    matrix = np.zeros((head_dim, head_dim), q.dtype)
    outs = []
    for begin in range(0, len(q), chunk):
        rows = slice(begin, begin + chunk)
        queries, keys = q[rows] / np.sqrt(q.dtype.type(head_dim)), k[rows]
        since_begin = np.cumsum(log_kept[rows])
        between = np.tril(np.exp(np.minimum(since_begin[:, None] - since_begin, 0.0)))
        kept = np.exp(since_begin)[:, None]
        mixed = np.tril((share[rows, None] * (keys @ keys.T)) * between, -1)
        wanted = share[rows, None] * (v[rows] - (kept * keys) @ matrix)
        changes = np.linalg.solve(np.eye(len(keys)) + mixed, wanted)
        outs.append((kept * queries) @ matrix + ((queries @ keys.T) * between) @ changes)
        until_end = np.exp(since_begin[-1] - since_begin)[:, None]
        matrix = np.exp(since_begin[-1]) * matrix + (until_end * keys).T @ changes
    return np.concatenate(outs), matrix
