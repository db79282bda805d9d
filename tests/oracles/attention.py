"""Attention and page contents in plain numpy, written for clarity; shares no code with any backend."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvs_core.kv_types import PageGeometry
from tests.oracles.kv_formats import read_row


def attend(
    q: npt.NDArray[np.float32],
    k: npt.NDArray[np.float64],
    v: npt.NDArray[np.float64],
    *,
    first_pos: int,
    scale: float,
    n_swa: int = 0,
    softcap: float = 0.0,
    sinks: npt.NDArray[np.float32] | None = None,
    dtype: type[np.floating] = np.float64,
) -> npt.NDArray[np.floating]:
    """Causal attention of ``q`` [n_tokens, n_head, head_dim_k] at positions ``first_pos ..`` over all rows of
    ``k`` [n_kv, n_head_kv, head_dim_k] and ``v`` [n_kv, n_head_kv, head_dim_v].

    With ``n_swa`` a row sees the last ``n_swa`` positions only, with ``softcap`` scores go through softcap * tanh, and
    ``sinks`` [n_head] are scores that every row sees and that bring no value.
    Every step is done in ``dtype``: with float32 the result shows what plain single precision costs. Rows that see no
    key are 0. Returns [n_tokens, n_head, head_dim_v].
    """
    n_tokens, n_head, _ = q.shape
    n_kv, n_head_kv, head_dim_v = v.shape
    out = np.zeros((n_tokens, n_head, head_dim_v), dtype=dtype)
    for token in range(n_tokens):
        n_visible = min(n_kv, first_pos + token + 1)
        if n_visible <= 0:
            continue
        for head in range(n_head):
            head_kv = head // (n_head // n_head_kv)
            begin = max(0, first_pos + token + 1 - n_swa) if n_swa else 0
            keys = k[begin:n_visible, head_kv].astype(dtype)
            values = v[begin:n_visible, head_kv].astype(dtype)
            scores = (keys @ q[token, head].astype(dtype)) * dtype(scale)
            if softcap:
                scores = dtype(softcap) * np.tanh(scores / dtype(softcap))
            if len(scores) == 0:
                continue
            largest = scores.max()
            sink = dtype(-np.inf if sinks is None else sinks[head])
            largest = max(largest, sink)
            weights = np.exp(scores - largest)
            out[token, head] = (weights @ values) / (weights.sum(dtype=dtype) + np.exp(sink - largest))
    return out


def read_kv(
    arena: npt.NDArray[np.uint8], geometry: PageGeometry, page_offsets: npt.NDArray[np.int64], n_kv: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """What the first ``n_kv`` rows of the pages hold: K and V as [n_kv, n_head_kv, head_dim]."""
    k = np.zeros((n_kv, geometry.n_head_kv, geometry.head_dim_k))
    v = np.zeros((n_kv, geometry.n_head_kv, geometry.head_dim_v))
    for pos in range(n_kv):
        page = arena[page_offsets[pos // geometry.page_tokens] :][: geometry.page_bytes]
        for head in range(geometry.n_head_kv):
            k_at = head * geometry.k_region.n_bytes
            v_at = geometry.v_offset + head * geometry.v_region.n_bytes
            k[pos, head] = read_row(page[k_at:], geometry.k_region, pos % geometry.page_tokens)
            if geometry.v_in_k:
                v[pos, head] = k[pos, head, : geometry.head_dim_v]
                continue
            v[pos, head] = read_row(page[v_at:], geometry.v_region, pos % geometry.page_tokens)
    return k, v
