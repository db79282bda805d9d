"""Every architecture that runs: how its layers are read from the keys of a file, and which tensors it needs.

The forward passes are in models/, one file each; ``model_reader`` reads what all architectures have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from kvs_core.expert_shape import (
    ExpertShape,
    Gating,
    read_deepseek_experts,
    read_llama_experts,
    read_qwen2_experts,
    read_qwen3_experts,
)
from kvs_core.latent_shape import read_latent_shape
from kvs_core.metadata_reader import MetadataReader
from kvs_core.model_shape import LayerCache, LayerShape, ModelShape, RopeKind, RopeScaling, RopeShape
from kvs_core.model_tensors import (
    TensorSpec,
    deepseek2_tensors,
    gemma2_tensors,
    gemma3_tensors,
    gemma4_tensors,
    gpt_oss_tensors,
    laguna_tensors,
    llama_tensors,
    qwen2_tensors,
    qwen2moe_tensors,
    qwen3_tensors,
    qwen3next_tensors,
    qwen35_tensors,
)
from kvs_core.recurrent_shape import read_recurrent, read_recurrent_pattern
from kvs_core.window_shape import read_window_pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What kvs knows of one value of general.architecture.

    rope_scalings  scalings its forward pass implements
    read_layers    sizes and cache of every layer, from the keys
    tensors        (n_embd, n_vocab, rope, layers) -> the tensors its forward pass uses
    tunes_attention   its files may set YaRN's bounds and growth, and the temperature of queries
    rotates_part      RoPE turns the elements of a head that the key says, which may be fewer than all
    read_more         adds to the shape what only this family's files say
    """

    rope_kind: RopeKind
    rope_scalings: frozenset[RopeScaling]
    read_layers: Callable[[MetadataReader, int, int], tuple[LayerShape, ...]]
    tensors: Callable[[int, int, RopeShape, Iterable[LayerShape]], Iterator[TensorSpec]]
    tunes_attention: bool = False
    rotates_part: bool = False
    read_more: Callable[[MetadataReader, ModelShape], ModelShape] | None = None


def _read_dense_layers(reader: MetadataReader, n_layer: int, n_embd: int) -> tuple[LayerShape, ...]:
    """Full attention and a gated feed-forward in every layer."""
    n_expert = reader.integer("expert_count", 0, low=0)
    if n_expert:
        reason = f"architecture {reader.prefix} has no mixture-of-experts layers"
        raise reader.unsupported("expert_count", str(n_expert), reason)
    return _read_attention_layers(reader, n_layer, n_embd, reader.per_layer("feed_forward_length", n_layer))


def _read_llama_layers(reader: MetadataReader, n_layer: int, n_embd: int) -> tuple[LayerShape, ...]:
    """Dense without ``expert_count``, else experts instead of the feed-forward (Mixtral)."""
    experts = read_llama_experts(reader, n_layer)
    n_ff = (0,) * n_layer if experts else reader.per_layer("feed_forward_length", n_layer)
    return _read_attention_layers(reader, n_layer, n_embd, n_ff, experts)


def _read_qwen2moe_layers(reader: MetadataReader, n_layer: int, n_embd: int) -> tuple[LayerShape, ...]:
    """Experts, and one more that every token takes."""
    width = _read_shared_width(reader, n_layer)
    return _read_attention_layers(reader, n_layer, n_embd, width, read_qwen2_experts(reader, n_layer))


def _read_shared_width(reader: MetadataReader, n_layer: int) -> tuple[int, ...]:
    key = "expert_shared_feed_forward_length"
    return reader.per_layer(key if reader.has(key) else "feed_forward_length", n_layer)


def _read_qwen3moe_layers(reader: MetadataReader, n_layer: int, n_embd: int) -> tuple[LayerShape, ...]:
    """Experts alone."""
    return _read_attention_layers(reader, n_layer, n_embd, (0,) * n_layer, read_qwen3_experts(reader, n_layer))


def _read_deepseek2_layers(reader: MetadataReader, n_layer: int, n_embd: int) -> tuple[LayerShape, ...]:
    """A latent cache in every layer; dense layers first, then experts and one more that every token takes.

    Blocks behind these that predict further tokens are left out.
    """
    key = "attention.temperature_scale"
    if reader.number(key, 0.0):
        reason = "queries that grow with the position are not supported in this architecture yet"
        raise reader.unsupported(key, f"{reader.number(key):g}", reason)
    n_block = n_layer
    n_predicting = reader.integer("nextn_predict_layers", 0, low=0)
    if n_predicting >= n_block:
        raise reader.error("nextn_predict_layers", f"is {n_predicting}; {reader.full_key('block_count')} is {n_block}")
    n_layer = n_block - n_predicting
    n_vocab = reader.length("tokenizer.ggml.tokens")
    is_lite = n_layer in (26, 27) or (n_layer == 48 and n_vocab == 128256)  # as llama.cpp tells them apart
    is_glm_lite = n_layer in (47, 48) and n_vocab == 154880
    latent = read_latent_shape(reader, has_q_rank=not is_lite)
    n_dense = reader.integer("leading_dense_block_count", 0, low=0)
    experts = read_deepseek_experts(reader, n_block, Gating.SIGMOID if is_glm_lite else Gating.SOFTMAX)
    n_shared = reader.integer("expert_shared_count")
    widths = reader.per_layer("feed_forward_length", n_block)
    n_head = reader.per_layer("attention.head_count", n_block)
    if reader.integer("attention.head_count_kv", 1) != 1:
        raise reader.error("attention.head_count_kv", "is not 1; all heads share the latent row")
    return tuple(
        LayerShape(
            layer_idx=layer_idx,
            cache=LayerCache.LATENT_KV,
            n_head=n_head[layer_idx],
            n_head_kv=1,
            head_dim_k=latent.kv_rank + latent.n_rot,
            head_dim_v=latent.kv_rank,
            n_ff=widths[layer_idx] if layer_idx < n_dense else n_shared * experts[layer_idx].n_ff,
            experts=None if layer_idx < n_dense else experts[layer_idx],
            latent=latent,
        )
        for layer_idx in range(n_layer)
    )


def _read_gemma2_layers(reader: MetadataReader, n_layer: int, n_embd: int) -> tuple[LayerShape, ...]:
    """A window in every layer but each second."""
    layers = _read_dense_layers(reader, n_layer, n_embd)
    return _give_windows(layers, reader.integer("attention.sliding_window", 4096), reader, period=2)


def _read_gemma3_layers(reader: MetadataReader, n_layer: int, n_embd: int) -> tuple[LayerShape, ...]:
    """A window in every layer but each sixth; in none when the file names no window."""
    layers = _read_dense_layers(reader, n_layer, n_embd)
    n_swa = reader.integer("attention.sliding_window", 0, low=0)
    return _give_windows(layers, n_swa, reader, period=6) if n_swa else layers


def _read_gemma4_layers(reader: MetadataReader, n_layer: int, n_embd: int) -> tuple[LayerShape, ...]:
    """Windows where the file says, with heads of their own size; experts beside the feed-forward if there are any.

    The last layers may attend to the cache of an earlier one, and each layer may add an embedding of its own.
    """
    experts = read_qwen3_experts(reader, n_layer) if reader.integer("expert_count", 0, low=0) else ()
    n_ff = reader.per_layer("feed_forward_length", n_layer)
    layers = _read_attention_layers(reader, n_layer, n_embd, n_ff, experts)
    reader.value("attention.sliding_window_pattern")
    layers = _give_windows(layers, reader.integer("attention.sliding_window"), reader, period=0)
    head_dim_k = reader.integer("attention.key_length_swa")
    head_dim_v = reader.integer("attention.value_length_swa")
    n_own_embd = reader.integer("embedding_length_per_layer_input", 0, low=0)
    layers = tuple(
        replace(layer, head_dim_k=head_dim_k, head_dim_v=head_dim_v) if layer.n_swa else layer for layer in layers
    )
    layers = tuple(replace(layer, n_own_embd=n_own_embd) for layer in layers)
    return _share_caches(layers, reader)


def _share_caches(layers: tuple[LayerShape, ...], reader: MetadataReader) -> tuple[LayerShape, ...]:
    """The last layers attend to the cache of the last layer of their kind before them, windows to windows."""
    key = "attention.shared_kv_layers"
    n_shared = reader.integer(key, 0, low=0)
    if not n_shared:
        return layers
    n_caching = len(layers) - n_shared
    if n_caching < 2 or not layers[n_caching - 2].n_swa or layers[n_caching - 1].n_swa:
        raise reader.error(
            key, f"is {n_shared}; a layer with a window and then one without needed before the layers that share them"
        )
    shared = []
    for layer in layers[n_caching:]:
        source = layers[n_caching - 2 if layer.n_swa else n_caching - 1]
        if (layer.n_head_kv, layer.head_dim_k) != (source.n_head_kv, source.head_dim_k):
            raise reader.error(
                "attention.head_count_kv",
                f"is {layer.n_head_kv} in layer {layer.layer_idx}, which attends to layer {source.layer_idx} with "
                f"{source.n_head_kv}",
            )
        shared.append(replace(layer, cache=LayerCache.NONE, kv_from=source.layer_idx))
    return (*layers[:n_caching], *shared)


def _read_gpt_oss_layers(reader: MetadataReader, n_layer: int, n_embd: int) -> tuple[LayerShape, ...]:
    """Experts alone; a window in every layer but each second."""
    layers = _read_qwen3moe_layers(reader, n_layer, n_embd)
    return _give_windows(layers, reader.integer("attention.sliding_window"), reader, period=2)


def _read_laguna_layers(reader: MetadataReader, n_layer: int, n_embd: int) -> tuple[LayerShape, ...]:
    """Dense layers first, then experts and a shared one; a window, if the file names one, in all but each fourth."""
    experts = read_deepseek_experts(reader, n_layer, Gating.SIGMOID)
    n_dense = reader.integer("leading_dense_block_count", low=0)
    n_shared = reader.integer("expert_shared_count", 1)
    n_ff_shared = reader.integer("expert_shared_feed_forward_length", n_shared * experts[0].n_ff)
    widths = reader.per_layer("feed_forward_length", n_layer)
    n_ff = tuple(widths[idx] if idx < n_dense else n_ff_shared for idx in range(n_layer))
    layers = _read_attention_layers(reader, n_layer, n_embd, n_ff, experts)
    layers = tuple(replace(layer, experts=None) if layer.layer_idx < n_dense else layer for layer in layers)
    n_swa = reader.integer("attention.sliding_window", 0, low=0)
    return _give_windows(layers, n_swa, reader, period=4, full_first=True) if n_swa else layers


def _read_qwen35_layers(reader: MetadataReader, n_layer: int, n_embd: int) -> tuple[LayerShape, ...]:
    """Recurrent layers between those that attend."""
    return _make_some_recurrent(_read_dense_layers(reader, n_layer, n_embd), reader, groups_values=False)


def _read_qwen35moe_layers(reader: MetadataReader, n_layer: int, n_embd: int) -> tuple[LayerShape, ...]:
    """The same, with experts and one more that every token takes."""
    return _make_some_recurrent(_read_shared_expert_layers(reader, n_layer, n_embd), reader, groups_values=False)


def _read_qwen3next_layers(reader: MetadataReader, n_layer: int, n_embd: int) -> tuple[LayerShape, ...]:
    """As ``qwen35moe``, with value heads in another order."""
    return _make_some_recurrent(_read_shared_expert_layers(reader, n_layer, n_embd), reader, groups_values=True)


def _read_shared_expert_layers(reader: MetadataReader, n_layer: int, n_embd: int) -> tuple[LayerShape, ...]:
    experts = read_qwen3_experts(reader, n_layer)
    return _read_attention_layers(reader, n_layer, n_embd, _read_shared_width(reader, n_layer), experts)


def _make_some_recurrent(
    layers: tuple[LayerShape, ...], reader: MetadataReader, *, groups_values: bool
) -> tuple[LayerShape, ...]:
    """The layers that the model runs, without the blocks behind them that only draft further tokens."""
    n_drafting = reader.integer("nextn_predict_layers", 0, low=0, high=len(layers) - 1)
    recurrent = read_recurrent(reader, groups_values=groups_values)
    pattern = read_recurrent_pattern(reader, len(layers), len(layers) - n_drafting)
    without = replace(
        layers[0], cache=LayerCache.RECURRENT, recurrent=recurrent, n_head=0, n_head_kv=0, head_dim_k=0, head_dim_v=0
    )
    return tuple(
        replace(without, layer_idx=layer.layer_idx, n_ff=layer.n_ff, experts=layer.experts) if is_recurrent else layer
        for layer, is_recurrent in zip(layers, pattern, strict=False)
    )


def _give_windows(
    layers: tuple[LayerShape, ...], n_swa: int, reader: MetadataReader, *, period: int, full_first: bool = False
) -> tuple[LayerShape, ...]:
    pattern = read_window_pattern(reader, len(layers), period=period, full_first=full_first)
    return tuple(
        replace(layer, cache=LayerCache.WINDOW_KV, n_swa=n_swa) if has_window else layer
        for layer, has_window in zip(layers, pattern, strict=True)
    )


def _read_more_of_deepseek2(reader: MetadataReader, shape: ModelShape) -> ModelShape:
    """The growth of YaRN goes to the scores; converters store a tenth of its multiplier."""
    multiplier = reader.number("rope.scaling.yarn_log_multiplier", 0.0) / 0.1
    return replace(shape, rope=replace(shape.rope, yarn_log_multiplier=multiplier, scores_grow=True))


def _check_sections_of_qwen35(reader: MetadataReader, shape: ModelShape) -> ModelShape:
    """Pairs take turns with positions in time, height and width, which text has all alike: then it is plain RoPE.

    Sections that leave a pair to the fourth kind of position, which is always 0, are refused.
    """
    key = "rope.dimension_sections"
    value = reader.value(key)
    if isinstance(value, str | int | float | list) or value.dtype.kind not in "iu" or len(value) != 4:
        raise reader.error(key, "is no list of 4 whole numbers")
    sections = [int(length) for length in value]
    if min(sections) < 0 or sum(sections) < 1:
        raise reader.error(key, f"is {sections}; 4 lengths needed, not all of them 0")
    for pair in range(shape.rope.n_rot // 2):
        place = pair % sum(sections)
        if place >= 3 * sections[place % 3]:
            raise reader.unsupported(key, str(sections), f"leaves pair {pair} without a position in text")
    return shape


def _read_more_of_gpt_oss(reader: MetadataReader, shape: ModelShape) -> ModelShape:
    """Window layers rotate as the others unless the file gives them a base."""
    base = _read_window_base(reader, default=shape.rope.freq_base)
    return replace(shape, rope_in_window=replace(shape.rope, freq_base=base))


def _read_more_of_gemma2(reader: MetadataReader, shape: ModelShape) -> ModelShape:
    """Caps on scores and logits; window layers rotate as the others unless the file gives them a base."""
    base = _read_window_base(reader, default=shape.rope.freq_base)
    return replace(
        shape,
        rope_in_window=replace(shape.rope, freq_base=base),
        attention_softcap=reader.number("attn_logit_softcapping", 50.0),
        logit_softcap=reader.number("final_logit_softcapping", 30.0),
    )


def _read_more_of_gemma3(reader: MetadataReader, shape: ModelShape) -> ModelShape:
    """Window layers have a RoPE base of their own and are not stretched with the others."""
    base = _read_window_base(reader, default=10000.0)
    return replace(
        shape,
        rope_in_window=replace(shape.rope, freq_base=base, scaling=RopeScaling.NONE),
        logit_softcap=reader.number("final_logit_softcapping", 0.0),
    )


def _read_more_of_gemma4(reader: MetadataReader, shape: ModelShape) -> ModelShape:
    """Window layers rotate their smaller heads by a base of their own, without factors or stretching."""
    in_window = next((layer.head_dim_k for layer in shape.layers if layer.n_swa), shape.rope.n_rot)
    n_rot = reader.integer("rope.dimension_count_swa", in_window)
    if n_rot != in_window or n_rot % 2:
        raise reader.error("rope.dimension_count_swa", f"is {n_rot}; the size of a key head, {in_window}, needed")
    base = _read_window_base(reader, default=10000.0)
    rope = replace(shape.rope, n_rot=n_rot, freq_base=base, scaling=RopeScaling.NONE, has_factors=False)
    return replace(shape, rope_in_window=rope, logit_softcap=reader.number("final_logit_softcapping", 30.0))


def _read_more_of_laguna(reader: MetadataReader, shape: ModelShape) -> ModelShape:
    """Window layers rotate more or fewer elements by a base of their own, and are not stretched."""
    head_dim_k = shape.layers[0].head_dim_k
    n_rot = reader.integer("rope.dimension_count_swa", shape.rope.n_rot)
    if n_rot > head_dim_k or n_rot % 2:
        raise reader.error("rope.dimension_count_swa", f"is {n_rot}; at most {head_dim_k}, and an even number, needed")
    base = _read_window_base(reader, default=shape.rope.freq_base)
    rope = replace(shape.rope, n_rot=n_rot, freq_base=base, scaling=RopeScaling.NONE, attn_factor=1.0)
    return replace(shape, rope_in_window=rope)


def _read_window_base(reader: MetadataReader, default: float) -> float:
    base = reader.number("rope.freq_base_swa", default)
    if base <= 1.0:
        raise reader.error("rope.freq_base_swa", f"is {base:g}; a number above 1 needed")
    return base


def _read_attention_layers(
    reader: MetadataReader,
    n_layer: int,
    n_embd: int,
    n_ff: tuple[int, ...],
    experts: tuple[ExpertShape, ...] = (),
) -> tuple[LayerShape, ...]:
    """Full attention in every layer; ``n_ff`` and ``experts`` say what follows it."""
    if not reader.flag("attention.causal", True):
        raise reader.unsupported(
            "attention.causal", "false", "is an embedding model, which attends to later tokens too"
        )
    n_head = reader.per_layer("attention.head_count", n_layer)
    n_head_kv = reader.per_layer("attention.head_count_kv", n_layer, default=n_head)
    default_dim = None if n_embd % n_head[0] else n_embd // n_head[0]
    if default_dim is None and not (reader.has("attention.key_length") and reader.has("attention.value_length")):
        raise reader.error(
            "embedding_length",
            f"{n_embd} is not a multiple of {reader.full_key('attention.head_count')} {n_head[0]}, and there is no "
            f"{reader.full_key('attention.key_length')} and value_length",
        )
    head_dim_k = reader.integer("attention.key_length", default_dim)
    head_dim_v = reader.integer("attention.value_length", default_dim)
    for layer_idx in range(n_layer):
        if n_head[layer_idx] % n_head_kv[layer_idx]:
            raise reader.error(
                "attention.head_count",
                f"{n_head[layer_idx]} is not a multiple of {reader.full_key('attention.head_count_kv')} "
                f"{n_head_kv[layer_idx]} in layer {layer_idx}",
            )
    return tuple(
        LayerShape(
            layer_idx=layer_idx,
            cache=LayerCache.FULL_KV,
            n_head=n_head[layer_idx],
            n_head_kv=n_head_kv[layer_idx],
            head_dim_k=head_dim_k,
            head_dim_v=head_dim_v,
            n_ff=n_ff[layer_idx],
            experts=experts[layer_idx] if experts else None,
        )
        for layer_idx in range(n_layer)
    )


_SCALINGS = frozenset(RopeScaling)

ARCHITECTURES: dict[str, Architecture] = {
    "deepseek2": Architecture(
        rope_kind=RopeKind.NORM,
        rope_scalings=_SCALINGS,
        read_layers=_read_deepseek2_layers,
        tensors=deepseek2_tensors,
        rotates_part=True,
        read_more=_read_more_of_deepseek2,
    ),
    "gemma2": Architecture(
        rope_kind=RopeKind.NEOX,
        rope_scalings=_SCALINGS - {RopeScaling.YARN},
        read_layers=_read_gemma2_layers,
        tensors=gemma2_tensors,
        read_more=_read_more_of_gemma2,
    ),
    "gemma3": Architecture(
        rope_kind=RopeKind.NEOX,
        rope_scalings=_SCALINGS - {RopeScaling.YARN},
        read_layers=_read_gemma3_layers,
        tensors=gemma3_tensors,
        read_more=_read_more_of_gemma3,
    ),
    "gemma4": Architecture(
        rope_kind=RopeKind.NEOX,
        rope_scalings=_SCALINGS - {RopeScaling.YARN},
        read_layers=_read_gemma4_layers,
        tensors=gemma4_tensors,
        read_more=_read_more_of_gemma4,
    ),
    "gpt-oss": Architecture(
        rope_kind=RopeKind.NEOX,
        rope_scalings=_SCALINGS,
        read_layers=_read_gpt_oss_layers,
        tensors=gpt_oss_tensors,
        read_more=_read_more_of_gpt_oss,
    ),
    "laguna": Architecture(
        rope_kind=RopeKind.NEOX,
        rope_scalings=_SCALINGS,
        read_layers=_read_laguna_layers,
        tensors=laguna_tensors,
        rotates_part=True,
        read_more=_read_more_of_laguna,
    ),
    "llama": Architecture(
        rope_kind=RopeKind.NORM,
        rope_scalings=_SCALINGS,
        read_layers=_read_llama_layers,
        tensors=llama_tensors,
    ),
    "mistral3": Architecture(
        rope_kind=RopeKind.NORM,
        rope_scalings=_SCALINGS,
        read_layers=_read_llama_layers,
        tensors=llama_tensors,
        tunes_attention=True,
    ),
    "qwen2": Architecture(
        rope_kind=RopeKind.NEOX,
        rope_scalings=_SCALINGS,
        read_layers=_read_dense_layers,
        tensors=qwen2_tensors,
    ),
    "qwen2moe": Architecture(
        rope_kind=RopeKind.NEOX,
        rope_scalings=_SCALINGS,
        read_layers=_read_qwen2moe_layers,
        tensors=qwen2moe_tensors,
    ),
    "qwen3": Architecture(
        rope_kind=RopeKind.NEOX,
        rope_scalings=_SCALINGS,
        read_layers=_read_dense_layers,
        tensors=qwen3_tensors,
    ),
    "qwen35": Architecture(
        rope_kind=RopeKind.NEOX,
        rope_scalings=_SCALINGS,
        read_layers=_read_qwen35_layers,
        tensors=qwen35_tensors,
        read_more=_check_sections_of_qwen35,
        rotates_part=True,
    ),
    "qwen35moe": Architecture(
        rope_kind=RopeKind.NEOX,
        rope_scalings=_SCALINGS,
        read_layers=_read_qwen35moe_layers,
        tensors=qwen35_tensors,
        read_more=_check_sections_of_qwen35,
        rotates_part=True,
    ),
    "qwen3moe": Architecture(
        rope_kind=RopeKind.NEOX,
        rope_scalings=_SCALINGS,
        read_layers=_read_qwen3moe_layers,
        tensors=qwen3_tensors,
    ),
    "qwen3next": Architecture(
        rope_kind=RopeKind.NEOX,
        rope_scalings=_SCALINGS,
        read_layers=_read_qwen3next_layers,
        tensors=qwen3next_tensors,
        rotates_part=True,
    ),
}
"""Every architecture that runs, by its general.architecture. One that is not here is refused by name."""
