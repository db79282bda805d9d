"""The forward pass of `gemma2` and `gemma3` in plain numpy float64, straight from the formulas.

Reads a GGUF with the `gguf` package alone and shares no code with kvs_core. All positions at once, no cache.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

DEFAULT_PERIOD = {"gemma2": 2, "gemma3": 6}
ATTENTION_CAP = {"gemma2": 50.0, "gemma3": None}
LOGIT_CAP = {"gemma2": 30.0, "gemma3": None}


class GemmaFloat64:
    """One model file, its matrices dequantised to float64."""

    def __init__(self, path: Path | str) -> None:
        reader = gguf.GGUFReader(str(path))
        self._fields = reader.fields
        self.architecture = self._fields["general.architecture"].contents()
        self.tensors = {
            tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
            for tensor in reader.tensors
        }
        self.n_layer = int(self._key("block_count"))
        self.n_head = int(self._key("attention.head_count"))
        self.n_head_kv = int(self._key("attention.head_count_kv", self.n_head))
        self.head_dim = int(self._key("attention.key_length"))
        self.n_swa = int(self._key("attention.sliding_window"))
        self.eps = float(self._key("attention.layer_norm_rms_epsilon"))

    def logits(self, tokens: list[int]) -> np.ndarray:
        """float64 [n_tokens, n_vocab] for tokens at positions 0, 1, 2, ..."""
        embedding = self.tensors["token_embd.weight"]
        hidden = embedding[tokens] * np.sqrt(embedding.shape[1])
        for layer_idx in range(self.n_layer):
            block = f"blk.{layer_idx}."
            attended = self._attention(block, layer_idx, self._norm(hidden, block + "attn_norm.weight"))
            hidden = hidden + self._norm(attended, block + "post_attention_norm.weight")
            mixed = self._feed_forward(block, self._norm(hidden, block + "ffn_norm.weight"))
            hidden = hidden + self._norm(mixed, block + "post_ffw_norm.weight")
        logits = self._norm(hidden, "output_norm.weight") @ self.tensors.get("output.weight", embedding).T
        cap = self._cap("final_logit_softcapping", LOGIT_CAP)
        return cap * np.tanh(logits / cap) if cap else logits

    def _attention(self, block: str, layer_idx: int, x: np.ndarray) -> np.ndarray:
        n_tokens = len(x)
        period = int(self._key("attention.sliding_window_pattern", DEFAULT_PERIOD[self.architecture]))
        is_window = layer_idx % period != period - 1
        q = (x @ self.tensors[block + "attn_q.weight"].T).reshape(n_tokens, self.n_head, self.head_dim)
        k = (x @ self.tensors[block + "attn_k.weight"].T).reshape(n_tokens, self.n_head_kv, self.head_dim)
        v = (x @ self.tensors[block + "attn_v.weight"].T).reshape(n_tokens, self.n_head_kv, self.head_dim)
        if self.architecture == "gemma3":
            q, k = self._norm(q, block + "attn_q_norm.weight"), self._norm(k, block + "attn_k_norm.weight")
        angle = np.arange(n_tokens)[:, None] * self._frequencies(is_window)
        q, k = _rotate(q, angle), _rotate(k, angle)

        cap = self._cap("attn_logit_softcapping", ATTENTION_CAP)
        distance = np.arange(n_tokens)[:, None] - np.arange(n_tokens)
        hidden = (distance < 0) | (is_window & (distance >= self.n_swa))
        heads = []
        for head_idx in range(self.n_head):
            kv_head_idx = head_idx // (self.n_head // self.n_head_kv)
            scores = q[:, head_idx] @ k[:, kv_head_idx].T / np.sqrt(self.head_dim)
            if cap:
                scores = cap * np.tanh(scores / cap)
            scores[hidden] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            heads.append(weights / weights.sum(axis=1, keepdims=True) @ v[:, kv_head_idx])
        return np.concatenate(heads, axis=1) @ self.tensors[block + "attn_output.weight"].T

    def _frequencies(self, is_window: bool) -> np.ndarray:
        """Radians a position of each pair; a stretched context stretches the layers without a window."""
        base = float(self._key("rope.freq_base", 10000.0))
        factor = float(self._key("rope.scaling.factor", 1.0))
        if is_window and self.architecture == "gemma3":
            base, factor = float(self._key("rope.freq_base_swa", 10000.0)), 1.0
        elif is_window:
            base = float(self._key("rope.freq_base_swa", base))
        return base ** (-2.0 * np.arange(self.head_dim // 2) / self.head_dim) / factor

    def _feed_forward(self, block: str, x: np.ndarray) -> np.ndarray:
        gate = x @ self.tensors[block + "ffn_gate.weight"].T
        gelu = 0.5 * gate * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (gate + 0.044715 * gate**3)))
        return (gelu * (x @ self.tensors[block + "ffn_up.weight"].T)) @ self.tensors[block + "ffn_down.weight"].T

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps) * self.tensors[name]

    def _cap(self, name: str, defaults: dict[str, float | None]) -> float:
        return float(self._key(name, defaults[self.architecture] or 0.0))

    def _key(self, name: str, default: object = None) -> object:
        field = self._fields.get(f"{self.architecture}.{name}")
        if field is None:
            if default is None:
                raise KeyError(f"{self.architecture}.{name}")
            return default
        return field.contents()


def _rotate(x: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """Turn the pairs (i, i + head_dim / 2) of each head [n_tokens, n_head, head_dim]."""
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
