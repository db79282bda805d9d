"""The expert half of a mixture-of-experts layer: its sizes, and the keys that each family gives them by."""

from __future__ import annotations

from dataclasses import dataclass

from kvs_core.metadata_reader import MetadataReader


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """Experts of one layer: gated feed-forwards of which every token takes a few.

    n_expert     how many there are
    n_used       how many a token takes: those of highest router logit, weighted by the softmax over all
    n_ff         width of each
    normalises   the weights of the experts taken are divided by their sum
    """

    n_expert: int
    n_used: int
    n_ff: int
    normalises: bool


def read_llama_experts(reader: MetadataReader, n_layer: int) -> tuple[ExpertShape, ...]:
    """``llama`` and its kin: experts as wide as a dense feed-forward, weights normalised; dense without the key."""
    if not reader.integer("expert_count", 0, low=0):
        return ()
    n_expert, n_used = _counts(reader)
    widths = reader.per_layer("feed_forward_length", n_layer)
    return tuple(ExpertShape(n_expert=n_expert, n_used=n_used, n_ff=n_ff, normalises=True) for n_ff in widths)


def read_qwen2_experts(reader: MetadataReader, n_layer: int) -> tuple[ExpertShape, ...]:
    """``qwen2moe``: experts of their own width, whose weights stay as the softmax gave them."""
    return _read_narrow_experts(reader, n_layer, normalises=False)


def read_qwen3_experts(reader: MetadataReader, n_layer: int) -> tuple[ExpertShape, ...]:
    """``qwen3moe``: experts of their own width, weights normalised."""
    return _read_narrow_experts(reader, n_layer, normalises=True)


def _read_narrow_experts(reader: MetadataReader, n_layer: int, *, normalises: bool) -> tuple[ExpertShape, ...]:
    n_expert, n_used = _counts(reader)
    if reader.has("expert_feed_forward_length"):
        widths = reader.per_layer("expert_feed_forward_length", n_layer)
    else:
        widths = tuple(n_ff // n_used for n_ff in reader.per_layer("feed_forward_length", n_layer))
        if not all(widths):
            raise reader.error("feed_forward_length", f"is too small to share among the {n_used} experts of a token")
    return tuple(ExpertShape(n_expert=n_expert, n_used=n_used, n_ff=n_ff, normalises=normalises) for n_ff in widths)


def _counts(reader: MetadataReader) -> tuple[int, int]:
    n_expert = reader.integer("expert_count")
    n_used = reader.integer("expert_used_count")
    if n_used > n_expert:
        raise reader.error("expert_used_count", f"is {n_used}; {reader.full_key('expert_count')} is {n_expert}")
    return n_expert, n_used
