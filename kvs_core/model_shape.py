"""The shape of a model: its sizes, and what each layer caches, read from GGUF metadata and the tensor table.
No arrays and no arithmetic on weights; the forward passes are in models/, the planning is in plan.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from kvs_core.errors import ModelFileError, Problem, UnsupportedModelError
from kvs_core.expert_shape import (
    ExpertShape,
    read_llama_experts,
    read_qwen2_experts,
    read_qwen3_experts,
)
from kvs_core.messages import show_text
from kvs_core.metadata_reader import MetadataReader
from kvs_core.model_tensors import (
    OUTPUT,
    ROPE_FACTORS,
    TOKEN_EMBEDDING,
    TensorSpec,
    check_tensors,
    gemma2_tensors,
    gemma3_tensors,
    gemma4_tensors,
    gpt_oss_tensors,
    llama_tensors,
    qwen2_tensors,
    qwen2moe_tensors,
    qwen3_tensors,
)
from kvs_core.window_shape import read_window_pattern

if TYPE_CHECKING:
    from kvs_core.gguf_header import TensorInfo
    from kvs_core.model_file import ModelFile

ARCHITECTURE_KEY = "general.architecture"
TOKENS_KEY = "tokenizer.ggml.tokens"
_F16_BYTES = 2


class LayerCache(Enum):
    """What one layer keeps of the tokens it has seen."""

    FULL_KV = "full"
    WINDOW_KV = "window"
    LATENT_KV = "latent"
    RECURRENT = "recurrent"
    NONE = "none"


class RopeKind(Enum):
    """Which elements rotate together: NORM pairs (2i, 2i + 1), NEOX pairs (i, i + n_rot / 2)."""

    NORM = "norm"
    NEOX = "neox"


class RopeScaling(Enum):
    """How positions beyond the training length are mapped; the value is llama.cpp's spelling."""

    NONE = "none"
    LINEAR = "linear"
    YARN = "yarn"
    LONGROPE = "longrope"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Sizes of one layer.

    head_dim_k   size of a query or key head; head_dim_v that of a value head
    n_ff         width of the feed-forward that every token takes, a shared expert included; 0 for none
    experts      of which every token takes a few; None in a dense layer
    n_swa        WINDOW_KV layers: a token sees the last ``n_swa`` positions, its own included; 0 elsewhere
    """

    layer_idx: int
    cache: LayerCache
    n_head: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    n_ff: int
    experts: ExpertShape | None = None
    n_swa: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeShape:
    """Rotary embedding as the model file asks for it; flags of a run may override it.

    n_rot        leading elements of a head that rotate
    scaling      a file that says nothing counts as LINEAR without a factor, as in llama.cpp, so that a factor given
                 by a flag takes effect
    factor       how many times the context was stretched; 0 means unset
    n_ctx_orig   context length before stretching
    attn_factor  multiplies cos and sin
    has_factors  the tensor rope_freqs.weight divides each frequency
    yarn_*       of no effect unless scaling is YARN; files of most architectures cannot set them
    yarn_log_multiplier   how much of YaRN's growth of cos and sin the model was trained without; 0 for none
    """

    kind: RopeKind
    n_rot: int
    freq_base: float
    scaling: RopeScaling
    factor: float
    n_ctx_orig: int
    attn_factor: float
    has_factors: bool
    yarn_ext_factor: float = 1.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_log_multiplier: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTotal:
    """All tensors of one type together; ``type_name`` as the gguf package spells it, such as ``Q4_K``."""

    type_name: str
    n_tensors: int
    n_elements: int
    n_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Everything planning needs to know of a model.

    name           general.name, fit to print on one line; empty if the file has none
    n_ctx_train    context length of training
    tied_output    the file has no output.weight: logits use token_embd.weight, which is held once
    tensors_bytes  weights as stored in the file, all types together
    weight_types   the same by type, in order of first appearance
    temperature_scale   queries grow by this times the logarithm of the number of ``rope.n_ctx_orig`` begun; 0 for none
    rope_in_window   of the window layers, which flags of a run do not reach; None where there are none
    attention_softcap, logit_softcap   caps of scores and of logits; 0 for none
    """

    architecture: str
    name: str
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    rms_eps: float
    layers: tuple[LayerShape, ...]
    rope: RopeShape
    tied_output: bool
    tensors_bytes: int
    weight_types: tuple[WeightTotal, ...]
    file_path: str
    temperature_scale: float = 0.0
    rope_in_window: RopeShape | None = None
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0

    @property
    def n_layer(self) -> int:
        return len(self.layers)

    def slow_types(self, fast_types: frozenset[str]) -> tuple[WeightTotal, ...]:
        """Weights of types without a fast kernel; the backend holds these as F16."""
        return tuple(total for total in self.weight_types if total.type_name not in fast_types)

    def expanded_bytes(self, fast_types: frozenset[str]) -> int:
        """Bytes that the weights of ``slow_types`` take once they are F16."""
        return sum(total.n_elements * _F16_BYTES for total in self.slow_types(fast_types))

    def loaded_bytes(self, fast_types: frozenset[str]) -> int:
        """Bytes that all weights take in memory: fast types as stored, the others as F16."""
        stored = sum(total.n_bytes for total in self.slow_types(fast_types))
        return self.tensors_bytes - stored + self.expanded_bytes(fast_types)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What kvs knows of one value of general.architecture.

    rope_scalings  scalings its forward pass implements
    read_layers    sizes and cache of every layer, from the keys
    tensors        (n_embd, n_vocab, rope, layers) -> the tensors its forward pass uses
    tunes_attention   its files may set YaRN's bounds and growth, and the temperature of queries
    read_more         adds to the shape what only this family's files say
    """

    rope_kind: RopeKind
    rope_scalings: frozenset[RopeScaling]
    read_layers: Callable[[MetadataReader, int, int], tuple[LayerShape, ...]]
    tensors: Callable[[int, int, RopeShape, Iterable[LayerShape]], Iterator[TensorSpec]]
    tunes_attention: bool = False
    read_more: Callable[[MetadataReader, ModelShape], ModelShape] | None = None


def read_model_shape(model_file: ModelFile) -> ModelShape:
    """Read the shape and check that keys, vocabulary and tensors of the file agree.

    Raises ModelFileError with the missing or contradicting key, UnsupportedModelError for an architecture, or a variant
    of one, that has no forward pass here.
    """
    reader = MetadataReader(model_file.metadata, model_file.path)
    if not model_file.tensors:
        raise ModelFileError(
            f"{show_text(model_file.path)}: has no tensors, only metadata",
            path=model_file.path,
            hint="this looks like a vocabulary-only file; pass a model with weights",
        )
    architecture = reader.text(ARCHITECTURE_KEY)
    known = ARCHITECTURES.get(architecture)
    if known is None:
        raise _unsupported(
            reader, ARCHITECTURE_KEY, architecture, f"is not supported; known: {', '.join(sorted(ARCHITECTURES))}"
        )
    reader.prefix = architecture
    n_ctx_train = reader.integer("context_length")
    n_embd = reader.integer("embedding_length")
    n_layer = reader.integer("block_count")
    if n_layer > len(model_file.tensors):
        # Checked before anything is made per layer, so that a damaged count cannot ask for gigabytes.
        raise reader.error("block_count", f"is {n_layer}, but the file has only {len(model_file.tensors)} tensors")
    rms_eps = reader.number("attention.layer_norm_rms_epsilon")
    layers = known.read_layers(reader, n_layer, n_embd)
    rotated = next((layer for layer in layers if not layer.n_swa), layers[0])
    rope = _read_rope(reader, known, rotated.head_dim_k, n_ctx_train, ROPE_FACTORS in model_file.tensors)
    n_vocab = _read_vocabulary(reader, model_file)
    specs = known.tensors(n_embd, n_vocab, rope, layers)
    check_tensors(specs, model_file.tensors, path=model_file.path, architecture=architecture)
    weight_types = _total_by_type(model_file.tensors.values())
    shape = ModelShape(
        architecture=architecture,
        name=show_text(reader.text("general.name", default="")),
        n_embd=n_embd,
        n_vocab=n_vocab,
        n_ctx_train=n_ctx_train,
        rms_eps=rms_eps,
        layers=layers,
        rope=rope,
        tied_output=OUTPUT not in model_file.tensors,
        tensors_bytes=sum(total.n_bytes for total in weight_types),
        weight_types=weight_types,
        file_path=model_file.path,
        temperature_scale=reader.number("attention.temperature_scale", 0.0) if known.tunes_attention else 0.0,
    )
    return shape if known.read_more is None else known.read_more(reader, shape)


def _read_dense_layers(reader: MetadataReader, n_layer: int, n_embd: int) -> tuple[LayerShape, ...]:
    """Full attention and a gated feed-forward in every layer."""
    n_expert = reader.integer("expert_count", 0, low=0)
    if n_expert:
        reason = f"architecture {reader.prefix} has no mixture-of-experts layers"
        raise _unsupported(reader, "expert_count", str(n_expert), reason)
    return _read_attention_layers(reader, n_layer, n_embd, reader.per_layer("feed_forward_length", n_layer))


def _read_llama_layers(reader: MetadataReader, n_layer: int, n_embd: int) -> tuple[LayerShape, ...]:
    """Dense without ``expert_count``, else experts instead of the feed-forward (Mixtral)."""
    experts = read_llama_experts(reader, n_layer)
    n_ff = (0,) * n_layer if experts else reader.per_layer("feed_forward_length", n_layer)
    return _read_attention_layers(reader, n_layer, n_embd, n_ff, experts)


def _read_qwen2moe_layers(reader: MetadataReader, n_layer: int, n_embd: int) -> tuple[LayerShape, ...]:
    """Experts, and one more that every token takes."""
    key = "expert_shared_feed_forward_length"
    width = reader.per_layer(key if reader.has(key) else "feed_forward_length", n_layer)
    return _read_attention_layers(reader, n_layer, n_embd, width, read_qwen2_experts(reader, n_layer))


def _read_qwen3moe_layers(reader: MetadataReader, n_layer: int, n_embd: int) -> tuple[LayerShape, ...]:
    """Experts alone."""
    return _read_attention_layers(reader, n_layer, n_embd, (0,) * n_layer, read_qwen3_experts(reader, n_layer))


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
    """Windows where the file says, with heads of their own size; experts beside the feed-forward if there are any."""
    for key, what in (
        ("attention.shared_kv_layers", "layers that attend to the cache of another layer"),
        ("embedding_length_per_layer_input", "embeddings of every layer"),
    ):
        value = reader.integer(key, 0, low=0)
        if value:
            raise _unsupported(reader, key, str(value), f"{what} are not supported yet")
    experts = read_qwen3_experts(reader, n_layer) if reader.integer("expert_count", 0, low=0) else ()
    n_ff = reader.per_layer("feed_forward_length", n_layer)
    layers = _read_attention_layers(reader, n_layer, n_embd, n_ff, experts)
    reader.value("attention.sliding_window_pattern")
    layers = _give_windows(layers, reader.integer("attention.sliding_window"), reader, period=0)
    head_dim_k = reader.integer("attention.key_length_swa")
    head_dim_v = reader.integer("attention.value_length_swa")
    return tuple(
        replace(layer, head_dim_k=head_dim_k, head_dim_v=head_dim_v) if layer.n_swa else layer for layer in layers
    )


def _read_gpt_oss_layers(reader: MetadataReader, n_layer: int, n_embd: int) -> tuple[LayerShape, ...]:
    """Experts alone; a window in every layer but each second."""
    layers = _read_qwen3moe_layers(reader, n_layer, n_embd)
    return _give_windows(layers, reader.integer("attention.sliding_window"), reader, period=2)


def _give_windows(
    layers: tuple[LayerShape, ...], n_swa: int, reader: MetadataReader, *, period: int
) -> tuple[LayerShape, ...]:
    pattern = read_window_pattern(reader, len(layers), period=period)
    return tuple(
        replace(layer, cache=LayerCache.WINDOW_KV, n_swa=n_swa) if has_window else layer
        for layer, has_window in zip(layers, pattern, strict=True)
    )


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
        raise _unsupported(
            reader, "attention.causal", "false", "is an embedding model, which attends to later tokens too"
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


def _read_rope(
    reader: MetadataReader, known: Architecture, head_dim_k: int, n_ctx_train: int, has_factors: bool
) -> RopeShape:
    n_rot = reader.integer("rope.dimension_count", head_dim_k)
    if n_rot != head_dim_k or n_rot % 2:
        raise reader.error(
            "rope.dimension_count", f"is {n_rot}; the size of a key head, {head_dim_k}, needed, and an even number"
        )
    scaling_name = reader.text("rope.scaling.type", RopeScaling.LINEAR.value)
    supported = sorted(scaling.value for scaling in known.rope_scalings)
    if scaling_name not in supported:
        raise _unsupported(
            reader, "rope.scaling.type", scaling_name, f"is not supported; supported: {', '.join(supported)}"
        )
    freq_base = reader.number("rope.freq_base", 10000.0)
    if freq_base <= 1.0:
        raise reader.error("rope.freq_base", f"is {freq_base:g}; a number above 1 needed")
    old_factor = reader.number("rope.scale_linear", 0.0)  # what files of 2023 have instead of rope.scaling.factor
    return RopeShape(
        kind=known.rope_kind,
        n_rot=n_rot,
        freq_base=freq_base,
        scaling=RopeScaling(scaling_name),
        factor=reader.number("rope.scaling.factor", old_factor),
        n_ctx_orig=reader.integer("rope.scaling.original_context_length", n_ctx_train),
        attn_factor=reader.number("rope.scaling.attn_factor", 1.0),
        has_factors=has_factors,
        **(_read_yarn(reader) if known.tunes_attention else {}),
    )


def _read_yarn(reader: MetadataReader) -> dict[str, float]:
    return {
        "yarn_beta_fast": reader.number("rope.scaling.yarn_beta_fast", 32.0),
        "yarn_beta_slow": reader.number("rope.scaling.yarn_beta_slow", 1.0),
        "yarn_log_multiplier": reader.number("rope.scaling.yarn_log_multiplier", 0.0),
    }


def _read_vocabulary(reader: MetadataReader, model_file: ModelFile) -> int:
    """Number of tokens; every list of the tokenizer and both embeddings must have exactly as many entries."""
    n_vocab = reader.length(TOKENS_KEY)
    for key in ("tokenizer.ggml.scores", "tokenizer.ggml.token_type"):
        if reader.has(key) and reader.length(key) != n_vocab:
            raise reader.error(key, f"has {reader.length(key)} entries; {TOKENS_KEY} has {n_vocab}")
    for name in (TOKEN_EMBEDDING, OUTPUT):
        tensor = model_file.tensors.get(name)
        if tensor is not None and tensor.n_rows != n_vocab:
            raise ModelFileError(
                f"{show_text(model_file.path)}: tensor {name} has {tensor.n_rows} rows; {TOKENS_KEY} has {n_vocab} "
                "tokens, and both counts must be equal",
                path=model_file.path,
                key=name,
                hint="convert the model again: a converter pads the token list to the embedding's rows",
            )
    return n_vocab


def _total_by_type(tensors: Iterable[TensorInfo]) -> tuple[WeightTotal, ...]:
    by_type: dict[str, list[TensorInfo]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.type.name, []).append(tensor)
    return tuple(
        WeightTotal(
            type_name=type_name,
            n_tensors=len(members),
            n_elements=sum(tensor.n_elements for tensor in members),
            n_bytes=sum(tensor.n_bytes for tensor in members),
        )
        for type_name, members in by_type.items()
    )


def _unsupported(reader: MetadataReader, key: str, value: str, reason: str) -> UnsupportedModelError:
    hint = "use a model of a supported kind"
    problem = Problem(
        field=reader.full_key(key), value=show_text(value, 60), reason=f"{reason} ({show_text(reader.path)})", hint=hint
    )
    return UnsupportedModelError([problem], hint=hint)


_SCALINGS = frozenset({RopeScaling.NONE, RopeScaling.LINEAR, RopeScaling.YARN})

ARCHITECTURES: dict[str, Architecture] = {
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
    "qwen3moe": Architecture(
        rope_kind=RopeKind.NEOX,
        rope_scalings=_SCALINGS,
        read_layers=_read_qwen3moe_layers,
        tensors=qwen3_tensors,
    ),
}
"""Every architecture that runs, by its general.architecture. One that is not here is refused by name."""
