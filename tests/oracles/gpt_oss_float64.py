"""The forward pass of `gpt-oss` in plain numpy float64, straight from the formulas.

Reads a GGUF with the `gguf` package alone and shares no code with kvs_core. All positions at once, no cache.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np


class GptOssFloat64:
    """One model file, its matrices dequantised to float64; every second layer, from the first on, has a window."""

    def __init__(self, path: Path | str) -> None:
        reader = gguf.GGUFReader(str(path))
        self._fields = reader.fields
        self.tensors = {
            tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
            for tensor in reader.tensors
        }
        self.n_layer = int(self._key("block_count"))
        self.n_head = int(self._key("attention.head_count"))
        self.n_head_kv = int(self._key("attention.head_count_kv"))
        self.head_dim = int(self._key("attention.key_length"))
        self.n_swa = int(self._key("attention.sliding_window"))
        self.n_used = int(self._key("expert_used_count"))
        self.eps = float(self._key("attention.layer_norm_rms_epsilon"))

    def logits(self, tokens: list[int]) -> np.ndarray:
        """float64 [n_tokens, n_vocab] for tokens at positions 0, 1, 2, ..."""
        hidden = self.tensors["token_embd.weight"][tokens]
        for layer_idx in range(self.n_layer):
            block = f"blk.{layer_idx}."
            normed = self._norm(hidden, block + "attn_norm.weight")
            hidden = hidden + self._attention(block, normed, has_window=layer_idx % 2 == 0)
            normed = self._norm(hidden, block + "post_attention_norm.weight")
            hidden = hidden + np.stack([self._experts(block, token) for token in normed])
        return self._norm(hidden, "output_norm.weight") @ self.tensors["output.weight"].T

    def _attention(self, block: str, x: np.ndarray, *, has_window: bool) -> np.ndarray:
        n_tokens = len(x)
        cos, sin = self._rotation(n_tokens)
        q = _rotate(self._linear(x, block + "attn_q").reshape(n_tokens, self.n_head, self.head_dim), cos, sin)
        k = _rotate(self._linear(x, block + "attn_k").reshape(n_tokens, self.n_head_kv, self.head_dim), cos, sin)
        v = self._linear(x, block + "attn_v").reshape(n_tokens, self.n_head_kv, self.head_dim)

        distance = np.arange(n_tokens)[:, None] - np.arange(n_tokens)
        hidden = (distance < 0) | (has_window & (distance >= self.n_swa))
        heads = []
        for head_idx in range(self.n_head):
            kv_head_idx = head_idx // (self.n_head // self.n_head_kv)
            scores = q[:, head_idx] @ k[:, kv_head_idx].T / np.sqrt(self.head_dim)
            scores[hidden] = -np.inf
            sink = self.tensors[block + "attn_sinks.weight"][head_idx]
            largest = np.maximum(scores.max(axis=1, keepdims=True), sink)
            weights = np.exp(scores - largest)
            total = weights.sum(axis=1, keepdims=True) + np.exp(sink - largest)
            heads.append(weights / total @ v[:, kv_head_idx])
        return self._linear(np.concatenate(heads, axis=1), block + "attn_output")

    def _rotation(self, n_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines [n_tokens, head_dim / 2] of YaRN with its usual bounds of 32 turns and of one."""
        base = float(self._key("rope.freq_base"))
        factor = float(self._key("rope.scaling.factor"))
        n_trained = float(self._key("rope.scaling.original_context_length"))
        pair = np.arange(self.head_dim // 2)
        trained = base ** (-2.0 * pair / self.head_dim)
        pair_of_turns = self.head_dim * np.log(n_trained / (np.array([32.0, 1.0]) * 2.0 * np.pi)) / (2.0 * np.log(base))
        low, high = max(0.0, np.floor(pair_of_turns[0])), min(self.head_dim - 1.0, np.ceil(pair_of_turns[1]))
        kept = 1.0 - np.clip((pair - low) / max(0.001, high - low), 0.0, 1.0)
        angle = np.arange(n_tokens)[:, None] * (trained / factor * (1.0 - kept) + trained * kept)
        magnitude = 1.0 + 0.1 * np.log(factor)
        return magnitude * np.cos(angle), magnitude * np.sin(angle)

    def _experts(self, block: str, token: np.ndarray) -> np.ndarray:
        scores = self._linear(token, block + "ffn_gate_inp")
        chosen = np.argsort(-scores, kind="stable")[: self.n_used]
        weights = np.exp(scores[chosen] - scores[chosen].max())
        out = np.zeros_like(token)
        for expert, weight in zip(chosen, weights / weights.sum(), strict=True):
            gate = np.minimum(self._expert(token, block + "ffn_gate_exps", expert), 7.0)
            up = np.clip(self._expert(token, block + "ffn_up_exps", expert), -7.0, 7.0)
            gated = gate / (1.0 + np.exp(-1.702 * gate)) * (up + 1.0)
            out += weight * self._expert(gated, block + "ffn_down_exps", expert)
        return out

    def _expert(self, x: np.ndarray, name: str, expert: int) -> np.ndarray:
        return self.tensors[name + ".weight"][expert] @ x + self.tensors[name + ".bias"][expert]

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.tensors[name + ".weight"].T + self.tensors[name + ".bias"]

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps) * self.tensors[name]

    def _key(self, name: str) -> object:
        return self._fields[f"gpt-oss.{name}"].contents()


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Turn the pairs (i, i + head_dim / 2) of each head [n_tokens, n_head, head_dim]."""
    first, second = np.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
