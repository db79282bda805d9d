"""The forward pass of `llama` and its relatives in plain numpy float64, straight from the formulas.

Covers llama, mistral3, qwen2, qwen3, qwen2moe and qwen3moe, for checking anything faster. Reads a GGUF with the `gguf`
package alone and shares no code with kvs_core. All positions at once, no cache.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

NORMALISES_EXPERTS = {
    "llama": True,
    "mistral3": True,
    "qwen2moe": False,
    "qwen3moe": True,
    "qwen35moe": True,
    "qwen3next": True,
}


class LlamaFloat64:
    """One model file, its matrices dequantised to float64."""

    def __init__(self, path: Path | str) -> None:
        reader = gguf.GGUFReader(str(path))
        self._fields = reader.fields
        self.tensors = {
            tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
            for tensor in reader.tensors
        }
        self.architecture = str(self._fields["general.architecture"].contents())
        self.n_layer = int(self._key("block_count"))
        self.n_head = int(self._key("attention.head_count"))
        self.n_head_kv = int(self._key("attention.head_count_kv", self.n_head))
        self.head_dim = int(self._key("attention.key_length", int(self._key("embedding_length")) // self.n_head))
        self.eps = float(self._key("attention.layer_norm_rms_epsilon"))

    @property
    def n_trained(self) -> float:
        """Context length before any stretching."""
        return float(self._key("rope.scaling.original_context_length", self._key("context_length")))

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
            fast = float(self._key("rope.scaling.yarn_beta_fast", 32.0))
            slow = float(self._key("rope.scaling.yarn_beta_slow", 1.0))
            low = max(0.0, np.floor(self._pair_with_turns(fast, self.n_trained, base)))
            high = min(self.head_dim - 1.0, np.ceil(self._pair_with_turns(slow, self.n_trained, base)))
            kept = 1.0 - np.clip((pair - low) / max(0.001, high - low), 0.0, 1.0)
            frequency = frequency * (1.0 - kept) + extrapolated * kept
            magnitude *= 1.0 + 0.1 * np.log(factor)
            magnitude /= 1.0 + 0.1 * np.log(factor) * float(self._key("rope.scaling.yarn_log_multiplier", 0.0))

        angle = np.arange(n_tokens)[:, None] * frequency
        return magnitude * np.cos(angle), magnitude * np.sin(angle)

    def _pair_with_turns(self, turns: float, n_trained: float, base: float) -> float:
        return float(self.head_dim * np.log(n_trained / (turns * 2.0 * np.pi)) / (2.0 * np.log(base)))

    def _attention(self, block: str, x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
        n_tokens = len(x)
        q = self._linear(x, block + "attn_q").reshape(n_tokens, self.n_head, self.head_dim)
        k = self._linear(x, block + "attn_k").reshape(n_tokens, self.n_head_kv, self.head_dim)
        if block + "attn_q_norm.weight" in self.tensors:
            q, k = self._norm(q, block + "attn_q_norm.weight"), self._norm(k, block + "attn_k_norm.weight")
        rotate = rotate_halves if self.architecture.startswith("qwen") else rotate_neighbours
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        temperature = float(self._key("attention.temperature_scale", 0.0))
        begun = np.floor(np.arange(n_tokens) / self.n_trained) + 1.0
        q = q * (1.0 + temperature * np.log(begun))[:, None, None]
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
        if block + "ffn_gate_inp.weight" not in self.tensors:
            return self._gated(x, block, "")
        mixed = np.stack([self._experts(block, token) for token in x])
        if block + "ffn_gate_inp_shexp.weight" in self.tensors:
            gate = x @ self.tensors[block + "ffn_gate_inp_shexp.weight"].ravel()
            mixed = mixed + self._gated(x, block, "_shexp") / (1.0 + np.exp(-gate))[:, None]
        return mixed

    def _experts(self, block: str, token: np.ndarray) -> np.ndarray:
        scores = self.tensors[block + "ffn_gate_inp.weight"] @ token
        chosen = np.argsort(-scores, kind="stable")[: int(self._key("expert_used_count"))]
        likely = np.exp(scores - scores.max())
        weights = likely[chosen] / likely.sum()
        if NORMALISES_EXPERTS[self.architecture]:
            weights = weights / weights.sum()
        out = np.zeros_like(token)
        for expert, weight in zip(chosen, weights, strict=True):
            gate, up, down = (self.tensors[f"{block}ffn_{name}_exps.weight"][expert] for name in ("gate", "up", "down"))
            out += weight * (down @ (silu(gate @ token) * (up @ token)))
        return out

    def _gated(self, x: np.ndarray, block: str, suffix: str) -> np.ndarray:
        gate, up = self._linear(x, f"{block}ffn_gate{suffix}"), self._linear(x, f"{block}ffn_up{suffix}")
        return self._linear(silu(gate) * up, f"{block}ffn_down{suffix}")

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.tensors[name + ".weight"].T + self.tensors.get(name + ".bias", 0.0)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps) * self.tensors[name]

    def _key(self, name: str, default: object = None) -> object:
        field = self._fields.get(f"{self.architecture}.{name}")
        if field is None:
            if default is None:
                raise KeyError(f"{self.architecture}.{name}")
            return default
        return field.contents()


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1.0 + np.exp(-x))


def rotate_neighbours(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Turn the pairs (0, 1), (2, 3), ... of each head [n_tokens, n_head, head_dim]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = np.empty_like(x)
    turned[..., 0::2] = even * cos[:, None] - odd * sin[:, None]
    turned[..., 1::2] = even * sin[:, None] + odd * cos[:, None]
    return turned


def rotate_halves(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Turn the pairs (i, i + head_dim / 2) of each head [n_tokens, n_head, head_dim]."""
    first, second = np.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
