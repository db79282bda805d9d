"""``read_model_shape``: from a model file's keys and tensor table to a checked ``ModelShape``. No bytes of weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from kvs_core.architectures import ARCHITECTURES, Architecture
from kvs_core.errors import ModelFileError
from kvs_core.messages import show_text
from kvs_core.metadata_reader import MetadataReader
from kvs_core.model_shape import ModelShape, RopeScaling, RopeShape, WeightTotal
from kvs_core.model_tensors import OUTPUT, ROPE_FACTORS, TOKEN_EMBEDDING, check_tensors

if TYPE_CHECKING:
    from kvs_core.gguf_header import TensorInfo
    from kvs_core.model_file import ModelFile

ARCHITECTURE_KEY = "general.architecture"
TOKENS_KEY = "tokenizer.ggml.tokens"

MAX_STRETCH = 1e6
"""Largest factor on positions, or on attention, and the inverse of the smallest: beyond them float32 overflows."""


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
        raise reader.unsupported(
            ARCHITECTURE_KEY, architecture, f"is not supported; known: {', '.join(sorted(ARCHITECTURES))}"
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
    attending = [layer for layer in layers if layer.recurrent is None]
    rotated = next((layer for layer in attending if not layer.n_swa), attending[0])
    rope = _read_rope(reader, known, rotated.head_dim_k, n_ctx_train, ROPE_FACTORS in model_file.tensors)
    n_vocab = _read_vocabulary(reader, model_file)
    specs = known.tensors(n_embd, n_vocab, rope, layers)
    tensors = _tensors_of_layers(model_file.tensors, range(len(layers), n_layer))
    check_tensors(specs, tensors, path=model_file.path, architecture=architecture)
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


def _tensors_of_layers(tensors: Mapping[str, TensorInfo], left_out: range) -> Mapping[str, TensorInfo]:
    """All tensors but those of blocks that the model's forward pass leaves out, which lie behind its layers."""
    if not left_out:
        return tensors
    prefixes = tuple(f"blk.{layer_idx}." for layer_idx in left_out)
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(prefixes)}


def _read_rope(
    reader: MetadataReader, known: Architecture, head_dim_k: int, n_ctx_train: int, has_factors: bool
) -> RopeShape:
    n_rot = reader.integer("rope.dimension_count", head_dim_k)
    fits = n_rot <= head_dim_k if known.rotates_part else n_rot == head_dim_k
    if not fits or n_rot % 2:
        bound = "at most " if known.rotates_part else ""
        raise reader.error(
            "rope.dimension_count",
            f"is {n_rot}; {bound}the size of a key head, {head_dim_k}, needed, and an even number",
        )
    scaling_name = reader.text("rope.scaling.type", RopeScaling.LINEAR.value)
    supported = sorted(scaling.value for scaling in known.rope_scalings)
    if scaling_name not in supported:
        raise reader.unsupported(
            "rope.scaling.type", scaling_name, f"is not supported; supported: {', '.join(supported)}"
        )
    freq_base = reader.number("rope.freq_base", 10000.0)
    if freq_base <= 1.0:
        raise reader.error("rope.freq_base", f"is {freq_base:g}; a number above 1 needed")
    # rope.scale_linear is what files of 2023 have instead.
    factor_key = next((key for key in ("rope.scaling.factor", "rope.scale_linear") if reader.has(key)), None)
    factor = 0.0 if factor_key is None else reader.number(factor_key, high=MAX_STRETCH)
    if factor_key is not None and 0.0 < factor < 1.0 / MAX_STRETCH:
        raise reader.error(factor_key, f"is {factor:g}; 0 for none, or {1.0 / MAX_STRETCH:g} or more, needed")
    rope = RopeShape(
        kind=known.rope_kind,
        n_rot=n_rot,
        freq_base=freq_base,
        scaling=RopeScaling(scaling_name),
        factor=factor,
        n_ctx_orig=reader.integer("rope.scaling.original_context_length", n_ctx_train),
        attn_factor=reader.number("rope.scaling.attn_factor", 1.0, high=MAX_STRETCH),
        has_factors=has_factors,
    )
    return _read_yarn(reader, rope) if known.tunes_attention else rope


def _read_yarn(reader: MetadataReader, rope: RopeShape) -> RopeShape:
    return replace(
        rope,
        yarn_beta_fast=reader.number("rope.scaling.yarn_beta_fast", rope.yarn_beta_fast),
        yarn_beta_slow=reader.number("rope.scaling.yarn_beta_slow", rope.yarn_beta_slow),
        yarn_log_multiplier=reader.number("rope.scaling.yarn_log_multiplier", 0.0),
    )


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
