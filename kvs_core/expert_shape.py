"""The expert half of a mixture-of-experts layer: its sizes, and the keys that each family gives them by."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvs_core.metadata_reader import MetadataReader


class Gating(Enum):
    """How the router's logits become weights: by softmax over all experts, or each on its own by sigmoid."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """Experts of one layer: gated feed-forwards of which every token takes a few.

    n_expert        how many there are
    n_used          how many a token takes: those of highest weight
    n_ff            width of each
    normalises      the weights of the experts taken are divided by their sum
    weight_scale    and then multiplied by this
    n_groups        groups of equally many experts, one after another, of which a token takes from ``n_groups_used``:
                    those whose two best experts have the highest sum
    """

    n_expert: int
    n_used: int
    n_ff: int
    normalises: bool
    gating: Gating = Gating.SOFTMAX
    weight_scale: float = 1.0
    n_groups: int = 1
    n_groups_used: int = 1


_GATINGS = (Gating.SOFTMAX, Gating.SIGMOID)
"""By the number that files give them, from 1 on."""


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


def read_deepseek_experts(reader: MetadataReader, n_layer: int, default_gating: Gating) -> tuple[ExpertShape, ...]:
    """``deepseek2``: everything by a key of its own; ``default_gating`` where the file does not say."""
    n_expert, n_used = _counts(reader)
    n_groups = reader.integer("expert_group_count", 1, low=0) or 1
    n_groups_used = reader.integer("expert_group_used_count", n_groups, low=0) if n_groups > 1 else 1
    if n_expert % n_groups or (n_groups > 1 and n_expert // n_groups < 2):
        raise reader.error(
            "expert_group_count", f"{n_groups} does not part {n_expert} experts into groups of two or more"
        )
    if not 1 <= n_groups_used <= n_groups or n_groups_used * (n_expert // n_groups) < n_used:
        raise reader.error(
            "expert_group_used_count",
            f"{n_groups_used} of {n_groups} groups do not hold the {n_used} experts of a token",
        )
    widths = reader.per_layer("expert_feed_forward_length", n_layer)
    gating = _read_gating(reader, default_gating)
    weight_scale = reader.number("expert_weights_scale", 0.0) or 1.0
    normalises = reader.flag("expert_weights_norm", False)
    return tuple(
        ExpertShape(
            n_expert=n_expert,
            n_used=n_used,
            n_ff=n_ff,
            normalises=normalises,
            gating=gating,
            weight_scale=weight_scale,
            n_groups=n_groups,
            n_groups_used=n_groups_used,
        )
        for n_ff in widths
    )


def _read_gating(reader: MetadataReader, default: Gating) -> Gating:
    number = reader.integer("expert_gating_func", 0, low=0)
    if number > len(_GATINGS):
        raise reader.unsupported("expert_gating_func", str(number), "is neither softmax (1) nor sigmoid (2)")
    return (default, *_GATINGS)[number]


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
