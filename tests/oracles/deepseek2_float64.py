"""The forward pass of `deepseek2` in plain numpy float64: every head gets keys and values of its own from the latent.

The product does the opposite, absorbing those matrices into queries and results. Reads a GGUF with the `gguf` package
alone and shares no code with kvs_core. All positions at once, no cache.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from tests.oracles.llama_float64 import rotate_neighbours, silu

DEFAULT_GATING = {"deepseek2": 1, "laguna": 2}  # softmax, sigmoid


class Deepseek2Float64:
    """One model file, its matrices dequantised to float64."""

    def __init__(self, path: Path | str) -> None:
        reader = gguf.GGUFReader(str(path))
        self._fields = reader.fields
        self.tensors = {
            tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
            for tensor in reader.tensors
        }
        self.architecture = str(self._fields["general.architecture"].contents())
        self.n_rot = int(self._key("rope.dimension_count"))
        self.eps = float(self._key("attention.layer_norm_rms_epsilon"))

    @property
    def n_head(self) -> int:
        return int(self._key("attention.head_count"))

    @property
    def kv_rank(self) -> int:
        return int(self._key("attention.kv_lora_rank"))

    @property
    def key_dim(self) -> int:
        return int(self._key("attention.key_length_mla"))

    def logits(self, tokens: list[int]) -> np.ndarray:
        """float64 [n_tokens, n_vocab] for tokens at positions 0, 1, 2, ..."""
        hidden = self.tensors["token_embd.weight"][tokens]
        for layer_idx in range(int(self._key("block_count"))):
            block = f"blk.{layer_idx}."
            hidden = hidden + self._attention(layer_idx, self._norm(hidden, block + "attn_norm"))
            hidden = hidden + self._feed_forward(block, self._norm(hidden, block + "ffn_norm"))
        output = self.tensors.get("output.weight", self.tensors["token_embd.weight"])
        return self._norm(hidden, "output_norm") @ output.T

    def rotation(self, n_tokens: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Cosines and sines [n_tokens, n_rot / 2], perhaps under YaRN, and what the scores are multiplied by for it."""
        base = float(self._key("rope.freq_base"))
        pair = np.arange(self.n_rot // 2)
        trained = base ** (-2.0 * pair / self.n_rot)
        if self._key("rope.scaling.type") == "none":
            angle = np.arange(n_tokens)[:, None] * trained
            return np.cos(angle), np.sin(angle), 1.0
        factor = float(self._key("rope.scaling.factor"))
        n_trained = float(self._key("rope.scaling.original_context_length"))
        turns = np.log(n_trained / (np.array([32.0, 1.0]) * 2.0 * np.pi)) * self.n_rot / (2.0 * np.log(base))
        low, high = max(0.0, np.floor(turns[0])), min(self.n_rot - 1.0, np.ceil(turns[1]))
        kept = 1.0 - np.clip((pair - low) / max(0.001, high - low), 0.0, 1.0)
        angle = np.arange(n_tokens)[:, None] * (trained / factor * (1.0 - kept) + trained * kept)
        stored = float(self._key("rope.scaling.yarn_log_multiplier", 0.0))
        growth = 1.0 + 0.1 * np.log(factor) * (stored * 10.0 if stored else 1.0)
        magnitude = 1.0 if stored else growth
        return magnitude * np.cos(angle), magnitude * np.sin(angle), growth**2

    def _attention(self, layer_idx: int, x: np.ndarray) -> np.ndarray:
        block = f"blk.{layer_idx}."
        n_tokens, n_plain = len(x), self.key_dim - self.n_rot
        cos, sin, growth = self.rotation(n_tokens)
        if block + "attn_q_a.weight" in self.tensors:
            narrow = self._norm(self._linear(x, block + "attn_q_a"), block + "attn_q_a_norm")
            q = self._linear(narrow, block + "attn_q_b")
        else:
            q = self._linear(x, block + "attn_q")
        q = q.reshape(n_tokens, self.n_head, self.key_dim)
        row = self._linear(x, block + "attn_kv_a_mqa")
        latent = self._norm(row[:, : self.kv_rank], block + "attn_kv_a_norm")
        q_rotated = rotate_neighbours(q[..., n_plain:], cos, sin)
        k_rotated = rotate_neighbours(row[:, None, self.kv_rank :], cos, sin)[:, 0]

        future = np.triu(np.ones((n_tokens, n_tokens), dtype=bool), k=1)
        heads = []
        for head_idx in range(self.n_head):
            keys = latent @ self.tensors[block + "attn_k_b.weight"][head_idx]
            values = latent @ self.tensors[block + "attn_v_b.weight"][head_idx].T
            scores = q[:, head_idx, :n_plain] @ keys.T + q_rotated[:, head_idx] @ k_rotated.T
            scores *= growth / np.sqrt(self.key_dim)
            scores[future] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            heads.append(weights / weights.sum(axis=1, keepdims=True) @ values)
        return self._linear(np.concatenate(heads, axis=1), block + "attn_output")

    def _feed_forward(self, block: str, x: np.ndarray) -> np.ndarray:
        if block + "ffn_gate_inp.weight" not in self.tensors:
            return self._gated(x, block, "")
        return np.stack([self._experts(block, token) for token in x]) + self._gated(x, block, "_shexp")

    def _experts(self, block: str, token: np.ndarray) -> np.ndarray:
        scores = self.tensors[block + "ffn_gate_inp.weight"] @ token
        if int(self._key("expert_gating_func", DEFAULT_GATING[self.architecture])) == 2:
            likely = 1.0 / (1.0 + np.exp(-scores))
        else:
            likely = np.exp(scores - scores.max())
            likely /= likely.sum()
        chosen = self._choose(likely + self.tensors.get(block + "exp_probs_b.bias", 0.0))
        weights = likely[chosen]
        if bool(self._key("expert_weights_norm", False)):
            weights = weights / weights.sum()
        weights = weights * (float(self._key("expert_weights_scale", 0.0)) or 1.0)
        out = np.zeros_like(token)
        for expert, weight in zip(chosen, weights, strict=True):
            gate, up, down = (self.tensors[f"{block}ffn_{name}_exps.weight"][expert] for name in ("gate", "up", "down"))
            out += weight * (down @ (silu(gate @ token) * (up @ token)))
        return out

    def _choose(self, scores: np.ndarray) -> np.ndarray:
        """The experts of highest score among those of the groups whose two best have the highest sum."""
        n_groups = int(self._key("expert_group_count", 1))
        if n_groups > 1:
            best_two = np.sort(scores.reshape(n_groups, -1), axis=1)[:, -2:].sum(axis=1)
            used = np.argsort(-best_two, kind="stable")[: int(self._key("expert_group_used_count"))]
            is_used = np.repeat(np.isin(np.arange(n_groups), used), len(scores) // n_groups)
            scores = np.where(is_used, scores, -np.inf)
        return np.argsort(-scores, kind="stable")[: int(self._key("expert_used_count"))]

    def _gated(self, x: np.ndarray, block: str, suffix: str) -> np.ndarray:
        gate, up = self._linear(x, f"{block}ffn_gate{suffix}"), self._linear(x, f"{block}ffn_up{suffix}")
        return self._linear(silu(gate) * up, f"{block}ffn_down{suffix}")

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.tensors[name + ".weight"].T

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps) * self.tensors[name + ".weight"]

    def _key(self, name: str, default: object = None) -> object:
        field = self._fields.get(f"{self.architecture}.{name}")
        if field is None:
            if default is None:
                raise KeyError(name)
            return default
        return field.contents()
