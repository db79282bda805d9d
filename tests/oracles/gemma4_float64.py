"""The forward pass of `gemma4` in plain numpy float64, straight from the formulas; text only.

Reads a GGUF with the `gguf` package alone and shares no code with kvs_core. All positions at once, no cache.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np


class Gemma4Float64:
    """One model file, its matrices dequantised to float64."""

    def __init__(self, path: Path | str) -> None:
        reader = gguf.GGUFReader(str(path))
        self._fields = reader.fields
        self.tensors = {
            tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
            for tensor in reader.tensors
        }
        self.n_head = int(self._key("attention.head_count"))
        self.n_swa = int(self._key("attention.sliding_window"))
        self.has_window = [bool(flag) for flag in self._key("attention.sliding_window_pattern")]
        self.n_head_kv = [int(count) for count in self._key("attention.head_count_kv")]
        self._rows: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.eps = float(self._key("attention.layer_norm_rms_epsilon"))

    def logits(self, tokens: list[int]) -> np.ndarray:
        """float64 [n_tokens, n_vocab] for tokens at positions 0, 1, 2, ..."""
        embedding = self.tensors["token_embd.weight"]
        hidden = embedding[tokens] * np.sqrt(embedding.shape[1])
        own = self._own_embeddings(tokens, hidden)
        for layer_idx in range(len(self.has_window)):
            block = f"blk.{layer_idx}."
            attended = self._attention(block, layer_idx, self._norm(hidden, block + "attn_norm.weight"))
            hidden = hidden + self._norm(attended, block + "post_attention_norm.weight")
            mixed = self._gated(block, self._norm(hidden, block + "ffn_norm.weight"))
            if block + "ffn_gate_inp.weight" in self.tensors:
                mixed = self._norm(mixed, block + "post_ffw_norm_1.weight")
                chosen = self._experts(block, hidden, self._norm(hidden, block + "pre_ffw_norm_2.weight"))
                mixed = mixed + self._norm(chosen, block + "post_ffw_norm_2.weight")
            hidden = hidden + self._norm(mixed, block + "post_ffw_norm.weight")
            if own is not None:
                gated = _gelu(hidden @ self.tensors[block + "inp_gate.weight"].T) * own[:, layer_idx]
                added = gated @ self.tensors[block + "proj.weight"].T
                hidden = hidden + self._norm(added, block + "post_norm.weight")
            hidden = hidden * self.tensors.get(block + "layer_output_scale.weight", 1.0)
        logits = self._norm(hidden, "output_norm.weight") @ embedding.T
        cap = float(self._key("final_logit_softcapping"))
        return cap * np.tanh(logits / cap)

    def _attention(self, block: str, layer_idx: int, x: np.ndarray) -> np.ndarray:
        n_tokens, has_window = len(x), self.has_window[layer_idx]
        head_dim = int(self._key("attention.key_length_swa" if has_window else "attention.key_length"))
        n_head_kv = self.n_head_kv[layer_idx]
        n_shared = int(self._key("attention.shared_kv_layers", 0))
        n_caching = len(self.has_window) - n_shared
        base = float(self._key("rope.freq_base_swa" if has_window else "rope.freq_base"))
        frequency = base ** (-2.0 * np.arange(head_dim // 2) / head_dim)
        if not has_window:
            frequency = frequency / self.tensors["rope_freqs.weight"]
        angle = np.arange(n_tokens)[:, None] * frequency
        q = (x @ self.tensors[block + "attn_q.weight"].T).reshape(n_tokens, self.n_head, head_dim)
        q = _rotate(self._norm(q, block + "attn_q_norm.weight"), angle)
        if layer_idx < n_caching:
            k = (x @ self.tensors[block + "attn_k.weight"].T).reshape(n_tokens, n_head_kv, head_dim)
            v = k
            if block + "attn_v.weight" in self.tensors:
                v = (x @ self.tensors[block + "attn_v.weight"].T).reshape(n_tokens, n_head_kv, head_dim)
            k = _rotate(self._norm(k, block + "attn_k_norm.weight"), angle)
            self._rows[layer_idx] = (k, self._norm(v, None))
        k, v = self._rows[layer_idx if layer_idx < n_caching else n_caching - 1 - has_window]

        distance = np.arange(n_tokens)[:, None] - np.arange(n_tokens)
        hidden = (distance < 0) | (has_window & (distance >= self.n_swa))
        heads = []
        for head_idx in range(self.n_head):
            kv_head_idx = head_idx // (self.n_head // n_head_kv)
            scores = q[:, head_idx] @ k[:, kv_head_idx].T
            scores[hidden] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            heads.append(weights / weights.sum(axis=1, keepdims=True) @ v[:, kv_head_idx])
        return np.concatenate(heads, axis=1) @ self.tensors[block + "attn_output.weight"].T

    def _own_embeddings(self, tokens: list[int], hidden: np.ndarray) -> np.ndarray | None:
        """float64 [n_tokens, n_layer, width]: what each layer adds of its own, from the token and its embedding."""
        width = int(self._key("embedding_length_per_layer_input"))
        if not width:
            return None
        shape = (len(tokens), len(self.has_window), width)
        shared = (hidden @ self.tensors["per_layer_model_proj.weight"].T / np.sqrt(hidden.shape[1])).reshape(shape)
        of_token = self.tensors["per_layer_token_embd.weight"][tokens].reshape(shape) * np.sqrt(width)
        return (self._norm(shared, "per_layer_proj_norm.weight") + of_token) / np.sqrt(2.0)

    def _gated(self, block: str, x: np.ndarray) -> np.ndarray:
        gate = x @ self.tensors[block + "ffn_gate.weight"].T
        return (_gelu(gate) * (x @ self.tensors[block + "ffn_up.weight"].T)) @ self.tensors[block + "ffn_down.weight"].T

    def _experts(self, block: str, hidden: np.ndarray, x: np.ndarray) -> np.ndarray:
        """What the experts make of ``x``, chosen by ``hidden`` under a norm of its own."""
        seen = self._norm(hidden, None) / np.sqrt(hidden.shape[1]) * self.tensors[block + "ffn_gate_inp.scale"]
        scores = seen @ self.tensors[block + "ffn_gate_inp.weight"].T
        scales = self.tensors.get(block + "ffn_down_exps.scale", np.ones(scores.shape[1]))
        out = np.zeros_like(x)
        for token, row in enumerate(scores):
            chosen = np.argsort(-row, kind="stable")[: int(self._key("expert_used_count"))]
            weights = np.exp(row[chosen] - row[chosen].max())
            for expert, weight in zip(chosen, weights / weights.sum(), strict=True):
                if block + "ffn_gate_up_exps.weight" in self.tensors:
                    both = self.tensors[block + "ffn_gate_up_exps.weight"][expert] @ x[token]
                    gate, up = np.split(both, 2)
                else:
                    gate = self.tensors[block + "ffn_gate_exps.weight"][expert] @ x[token]
                    up = self.tensors[block + "ffn_up_exps.weight"][expert] @ x[token]
                down = self.tensors[block + "ffn_down_exps.weight"][expert] @ (_gelu(gate) * up)
                out[token] += weight * scales[expert] * down
        return out

    def _norm(self, x: np.ndarray, name: str | None) -> np.ndarray:
        normed = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return normed if name is None else normed * self.tensors[name]

    def _key(self, name: str, default: object = None) -> object:
        field = self._fields.get(f"gemma4.{name}")
        if field is None and default is not None:
            return default
        return self._fields[f"gemma4.{name}"].contents()


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


def _rotate(x: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """Turn the pairs (i, i + head_dim / 2) of each head [n_tokens, n_head, head_dim]."""
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
