"""Sizes of multi-head latent attention (MLA), and the keys that give them.

One row of ``kv_rank + n_rot`` numbers stands for the keys and values of all heads::

    cached row   | latent, kv_rank | rotated, n_rot |      values are the latent part
    a query      | plain, n_plain  | rotated, n_rot |      -> n_plain becomes kv_rank by the head's attn_k_b
    attended     | kv_rank |                               -> value_dim by the head's attn_v_b
"""

from __future__ import annotations

from dataclasses import dataclass

from kvs_core.metadata_reader import MetadataReader


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Sizes of one layer beside those of its cache.

    q_rank       queries come from a latent of their own, of this size; 0: straight from the hidden state
    kv_rank      of the latent that is cached
    n_rot        elements that RoPE turns, of a query head and of the cached row
    key_dim      of a query head as the model was trained: plain and rotated elements
    value_dim    of a value head as the model was trained
    """

    q_rank: int
    kv_rank: int
    n_rot: int
    key_dim: int
    value_dim: int

    @property
    def n_plain(self) -> int:
        """Elements of a query head that are not rotated."""
        return self.key_dim - self.n_rot


def read_latent_shape(reader: MetadataReader, *, has_q_rank: bool) -> LatentShape:
    """Read the sizes; raises ModelFileError when they contradict each other or the sizes of the cached row."""
    for key in ("attention.key_length_mla", "attention.value_length_mla"):
        if not reader.has(key):
            raise reader.unsupported(
                key, "missing", "its attn_kv_b is not split; convert the model again with a current converter"
            )
    latent = LatentShape(
        q_rank=reader.integer("attention.q_lora_rank") if has_q_rank else 0,
        kv_rank=reader.integer("attention.kv_lora_rank"),
        n_rot=reader.integer("rope.dimension_count"),
        key_dim=reader.integer("attention.key_length_mla"),
        value_dim=reader.integer("attention.value_length_mla"),
    )
    if latent.n_plain < 1:
        raise reader.error(
            "attention.key_length_mla", f"is {latent.key_dim}; more than {latent.n_rot}, RoPE's part, needed"
        )
    for key, size in (
        ("attention.key_length", latent.kv_rank + latent.n_rot),
        ("attention.value_length", latent.kv_rank),
    ):
        if reader.integer(key) != size:
            raise reader.error(key, f"is {reader.integer(key)}; {size} needed, the size of what is cached")
    return latent
