"""The forward pass of `qwen35`, `qwen35moe` and `qwen3next` in plain numpy float64, straight from the formulas.

Norms, experts and the head of the model are those of `llama_float64`. All positions at once, no cache, no state.
"""

from __future__ import annotations

import numpy as np

from tests.oracles import delta_net
from tests.oracles.llama_float64 import LlamaFloat64, rotate_halves


class HybridFloat64(LlamaFloat64):
    """One model file, its matrices dequantised to float64."""

    def logits(self, tokens: list[int]) -> np.ndarray:
        """float64 [n_tokens, n_vocab] for tokens at positions 0, 1, 2, ..."""
        hidden = self.tensors["token_embd.weight"][tokens]
        for layer_idx in range(self.n_layer - int(self._key("nextn_predict_layers", 0))):
            block = f"blk.{layer_idx}."
            normed = self._norm(hidden, block + "attn_norm.weight")
            is_recurrent = block + "ssm_a" in self.tensors
            hidden = hidden + (self._recurrent(block, normed) if is_recurrent else self._gated_attention(block, normed))
            hidden = hidden + self._feed_forward(block, self._norm(hidden, block + "post_attention_norm.weight"))
        output = self.tensors.get("output.weight", self.tensors["token_embd.weight"])
        return self._norm(hidden, "output_norm.weight") @ output.T

    def _gated_attention(self, block: str, x: np.ndarray) -> np.ndarray:
        n_tokens = len(x)
        both = self._linear(x, block + "attn_q").reshape(n_tokens, self.n_head, 2, self.head_dim)
        k = self._linear(x, block + "attn_k").reshape(n_tokens, self.n_head_kv, self.head_dim)
        v = self._linear(x, block + "attn_v").reshape(n_tokens, self.n_head_kv, self.head_dim)
        q = self._turn(self._norm(both[:, :, 0], block + "attn_q_norm.weight"))
        k = self._turn(self._norm(k, block + "attn_k_norm.weight"))
        future = np.triu(np.ones((n_tokens, n_tokens), dtype=bool), k=1)
        heads = []
        for head_idx in range(self.n_head):
            kv_head_idx = head_idx // (self.n_head // self.n_head_kv)
            scores = q[:, head_idx] @ k[:, kv_head_idx].T / np.sqrt(self.head_dim)
            scores[future] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            attended = weights / weights.sum(axis=1, keepdims=True) @ v[:, kv_head_idx]
            heads.append(attended / (1.0 + np.exp(-both[:, head_idx, 1])))
        return self._linear(np.concatenate(heads, axis=1), block + "attn_output")

    def _turn(self, x: np.ndarray) -> np.ndarray:
        """Rotate the first n_rot elements of each head [n_tokens, n_head, head_dim]."""
        n_rot = int(self._key("rope.dimension_count"))
        frequency = float(self._key("rope.freq_base")) ** (-2.0 * np.arange(n_rot // 2) / n_rot)
        angle = np.arange(len(x))[:, None] * frequency
        return np.concatenate([rotate_halves(x[..., :n_rot], np.cos(angle), np.sin(angle)), x[..., n_rot:]], axis=-1)

    def _recurrent(self, block: str, x: np.ndarray) -> np.ndarray:
        n_tokens = len(x)
        n_key, n_value = int(self._key("ssm.group_count")), int(self._key("ssm.time_step_rank"))
        head_dim = int(self._key("ssm.state_size"))
        mixed = delta_net.short_convolution(
            self._linear(x, block + "attn_qkv"), self.tensors[block + "ssm_conv1d.weight"].T
        )
        heads = mixed.reshape(n_tokens, 2 * n_key + n_value, head_dim)
        q = delta_net.unit_heads(heads[:, :n_key], self.eps)
        k = delta_net.unit_heads(heads[:, n_key : 2 * n_key], self.eps)
        beta, decay = self._gates(block, x, n_key, n_value)
        share, log_kept = delta_net.gates(
            beta, decay, self.tensors[block + "ssm_dt.bias"], self.tensors[block + "ssm_a"]
        )
        out = np.zeros((n_tokens, n_value, head_dim))
        for head in range(n_value):
            of_key = head // (n_value // n_key) if self.architecture == "qwen3next" else head % n_key
            v = heads[:, 2 * n_key + head]
            out[:, head], _ = delta_net.delta_rule(q[:, of_key], k[:, of_key], v, share[:, head], log_kept[:, head])
        out = self._norm(out, block + "ssm_norm.weight")
        gate = self._linear(x, block + "attn_gate")
        return self._linear(out.reshape(n_tokens, -1) * gate / (1.0 + np.exp(-gate)), block + "ssm_out")

    def _gates(self, block: str, x: np.ndarray, n_key: int, n_value: int) -> tuple[np.ndarray, np.ndarray]:
        if block + "ssm_ba.weight" not in self.tensors:
            return self._linear(x, block + "ssm_beta"), self._linear(x, block + "ssm_alpha")
        both = self._linear(x, block + "ssm_ba").reshape(len(x), n_key, 2, n_value // n_key)
        return both[:, :, 0].reshape(len(x), n_value), both[:, :, 1].reshape(len(x), n_value)
