"""The forward pass of `laguna` in plain numpy float64: its attention; experts are those of `deepseek2`.

Shares no code with kvs_core. All positions at once, no cache.
"""

from __future__ import annotations

import numpy as np

from tests.oracles.deepseek2_float64 import Deepseek2Float64


class LagunaFloat64(Deepseek2Float64):
    """One model file, its matrices dequantised to float64."""

    def _attention(self, layer_idx: int, x: np.ndarray) -> np.ndarray:
        block, n_tokens, has_window = f"blk.{layer_idx}.", len(x), layer_idx % 4 != 0
        n_head, head_dim = int(self._key("attention.head_count")[layer_idx]), int(self._key("attention.key_length"))
        n_head_kv = int(self._key("attention.head_count_kv"))
        q = self._norm(self._linear(x, block + "attn_q").reshape(n_tokens, n_head, head_dim), block + "attn_q_norm")
        k = self._norm(self._linear(x, block + "attn_k").reshape(n_tokens, n_head_kv, head_dim), block + "attn_k_norm")
        v = self._linear(x, block + "attn_v").reshape(n_tokens, n_head_kv, head_dim)
        if has_window:
            n_rot = int(self._key("rope.dimension_count_swa"))
            frequency = float(self._key("rope.freq_base_swa")) ** (-2.0 * np.arange(n_rot // 2) / n_rot)
            angle = np.arange(n_tokens)[:, None] * frequency
            cos, sin = np.cos(angle), np.sin(angle)
        else:
            cos, sin, _ = self.rotation(n_tokens)
        q, k = _rotate_halves(q, cos, sin), _rotate_halves(k, cos, sin)

        distance = np.arange(n_tokens)[:, None] - np.arange(n_tokens)
        hidden = (distance < 0) | (has_window & (distance >= int(self._key("attention.sliding_window"))))
        heads = []
        for head_idx in range(n_head):
            kv_head_idx = head_idx // (n_head // n_head_kv)
            scores = q[:, head_idx] @ k[:, kv_head_idx].T / np.sqrt(head_dim)
            scores[hidden] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            heads.append(weights / weights.sum(axis=1, keepdims=True) @ v[:, kv_head_idx])
        gate = np.log1p(np.exp(self._linear(x, block + "attn_gate")))
        gated = np.stack(heads, axis=1) * gate.reshape(n_tokens, n_head, -1)
        return self._linear(gated.reshape(n_tokens, n_head * head_dim), block + "attn_output")


def _rotate_halves(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Turn the pairs (i, i + n) of the first 2 n elements of each head [n_tokens, n_head, head_dim]."""
    n = cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    first, second, rest = x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]
    return np.concatenate([first * cos - second * sin, first * sin + second * cos, rest], axis=-1)
