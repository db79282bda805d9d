"""The `llama` forward pass in plain numpy float64, straight from the formulas, for checking anything faster.

Reads a GGUF with the `gguf` package alone and shares no code with kvs_core. All positions at once, no cache.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np


class LlamaFloat64:
    """One model file, its matrices dequantised to float64."""

    def __init__(self, path: Path | str) -> None:
        reader = gguf.GGUFReader(str(path))
        self._fields = reader.fields
        self.tensors = {
            tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
            for tensor in reader.tensors
        }
        self.n_layer = int(self._key("block_count"))
        self.n_head = int(self._key("attention.head_count"))
        self.n_head_kv = int(self._key("attention.head_count_kv", self.n_head))
        self.head_dim = int(self._key("attention.key_length", int(self._key("embedding_length")) // self.n_head))
        self.eps = float(self._key("attention.layer_norm_rms_epsilon"))

    def logits(self, tokens: list[int]) -> np.ndarray:
        """float64 [n_tokens, n_vocab] for tokens at positions 0, 1, 2, ..."""
        hidden = self.tensors["token_embd.weight"][tokens]
        cos, sin = self.rotation(len(tokens))
        for layer_idx in range(self.n_layer):
            block = f"blk.{layer_idx}."
            hidden = hidden + self._attention(block, self._norm(hidden, block + "attn_norm.weight"), cos, sin)
            hidden = hidden + self._feed_forward(block, self._norm(hidden, block + "ffn_norm.weight"))
        output = self.tensors.get("output.weight", self.tensors["token_embd.weight"])
        return self._norm(hidden, "output_norm.weight") @ output.T

    def rotation(self, n_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines [n_tokens, head_dim / 2] of the RoPE angles, with all scalings of the file applied."""
        base = float(self._key("rope.freq_base", 10000.0))
        scaling = str(self._key("rope.scaling.type", "none"))
        factor = float(self._key("rope.scaling.factor", 1.0)) if scaling != "none" else 1.0
        magnitude = float(self._key("rope.scaling.attn_factor", 1.0))
        pair = np.arange(self.head_dim // 2)
        extrapolated = base ** (-2.0 * pair / self.head_dim) / self.tensors.get("rope_freqs.weight", 1.0)
        frequency = extrapolated / factor

        if scaling == "yarn":
            # pairs turning more than 32 times in the trained context keep their speed, those under one turn are slowed
            n_trained = float(self._key("rope.scaling.original_context_length", self._key("context_length")))
            low = max(0.0, np.floor(self._pair_with_turns(32.0, n_trained, base)))
            high = min(self.head_dim - 1.0, np.ceil(self._pair_with_turns(1.0, n_trained, base)))
            kept = 1.0 - np.clip((pair - low) / max(0.001, high - low), 0.0, 1.0)
            frequency = frequency * (1.0 - kept) + extrapolated * kept
            magnitude *= 1.0 + 0.1 * np.log(factor)

        angle = np.arange(n_tokens)[:, None] * frequency
        return magnitude * np.cos(angle), magnitude * np.sin(angle)

    def _pair_with_turns(self, turns: float, n_trained: float, base: float) -> float:
        return float(self.head_dim * np.log(n_trained / (turns * 2.0 * np.pi)) / (2.0 * np.log(base)))

    def _attention(self, block: str, x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
        n_tokens = len(x)
        q = _rotate(self._linear(x, block + "attn_q").reshape(n_tokens, self.n_head, self.head_dim), cos, sin)
        k = _rotate(self._linear(x, block + "attn_k").reshape(n_tokens, self.n_head_kv, self.head_dim), cos, sin)
        v = self._linear(x, block + "attn_v").reshape(n_tokens, self.n_head_kv, self.head_dim)

        future = np.triu(np.ones((n_tokens, n_tokens), dtype=bool), k=1)
        heads = []
        for head_idx in range(self.n_head):
            kv_head_idx = head_idx // (self.n_head // self.n_head_kv)
            scores = q[:, head_idx] @ k[:, kv_head_idx].T / np.sqrt(self.head_dim)
            scores[future] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            heads.append(weights / weights.sum(axis=1, keepdims=True) @ v[:, kv_head_idx])
        return self._linear(np.concatenate(heads, axis=1), block + "attn_output")

    def _feed_forward(self, block: str, x: np.ndarray) -> np.ndarray:
        gate = self._linear(x, block + "ffn_gate")
        return self._linear(gate / (1.0 + np.exp(-gate)) * self._linear(x, block + "ffn_up"), block + "ffn_down")

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.tensors[name + ".weight"].T + self.tensors.get(name + ".bias", 0.0)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps) * self.tensors[name]

    def _key(self, name: str, default: object = None) -> object:
        field = self._fields.get(f"llama.{name}")
        if field is None:
            if default is None:
                raise KeyError(f"llama.{name}")
            return default
        return field.contents()


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Turn the pairs (0, 1), (2, 3), ... of each head [n_tokens, n_head, head_dim]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = np.empty_like(x)
    turned[..., 0::2] = even * cos[:, None] - odd * sin[:, None]
    turned[..., 1::2] = even * sin[:, None] + odd * cos[:, None]
    return turned
