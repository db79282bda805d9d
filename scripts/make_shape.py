"""Make a GGUF file of a real model's shape with random weights, for measuring.

    python -m scripts.make_shape {8b,27b} FILE [--layers N] [--type Q4_K] [--vocab MODEL]

8b: 32 layers, 4096 wide, 32 heads over 8 of 128. 27b: the hybrid of 64 layers, 5120 wide, each fourth with 24 heads
over 4 of 256, the others recurrent with 48 heads over 16 of 128. Every matrix repeats one random strip of rows; norms
are 1. With --vocab the tokenizer is copied from a model, which must have as many tokens as the shape, so that text can
be read; SmolLM2 fits 8b. Without it the words are made up.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q

STRIP_ROWS = 256
_SCALES = {Q.Q4_K: (5e-5, 4e-4), Q.Q8_0: (5e-4,)}
Matrix = tuple[str, int, int]  # name within the block, rows, columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """``block`` gives a layer's matrices, and its float32 vectors and taps."""

    architecture: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_rot: int
    rope_base: float
    n_vocab: int
    keys: dict[str, int | list[int]]
    block: Callable[[Shape, int], tuple[list[Matrix], dict[str, np.ndarray]]]


def _feed_forward(shape: Shape) -> list[Matrix]:
    return [
        ("ffn_gate", shape.n_ff, shape.n_embd),
        ("ffn_up", shape.n_ff, shape.n_embd),
        ("ffn_down", shape.n_embd, shape.n_ff),
    ]


def _attention(shape: Shape, *, query_parts: int = 1) -> list[Matrix]:
    n_inner, n_kv = shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
    return [
        ("attn_q", query_parts * n_inner, shape.n_embd),
        ("attn_k", n_kv, shape.n_embd),
        ("attn_v", n_kv, shape.n_embd),
        ("attn_output", shape.n_embd, n_inner),
    ]


def _ones(*names: str, size: int) -> dict[str, np.ndarray]:
    return {name: np.ones(size, np.float32) for name in names}


def llama_block(shape: Shape, layer: int) -> tuple[list[Matrix], dict[str, np.ndarray]]:
    norms = _ones("attn_norm.weight", "ffn_norm.weight", size=shape.n_embd)
    return _attention(shape) + _feed_forward(shape), norms


def hybrid_block(shape: Shape, layer: int) -> tuple[list[Matrix], dict[str, np.ndarray]]:
    vectors = _ones("attn_norm.weight", "post_attention_norm.weight", size=shape.n_embd)
    if (layer + 1) % 4 == 0:
        vectors |= _ones("attn_q_norm.weight", "attn_k_norm.weight", size=shape.head_dim)
        return _attention(shape, query_parts=2) + _feed_forward(shape), vectors
    n_inner, state_dim, n_head_k, n_head_v, n_taps = (
        int(shape.keys[f"ssm.{key}"])  # type: ignore[arg-type]
        for key in ("inner_size", "state_size", "group_count", "time_step_rank", "conv_kernel")
    )
    n_channels = 2 * n_head_k * state_dim + n_inner
    rng = np.random.default_rng(layer)
    vectors |= _ones("ssm_norm.weight", size=state_dim)
    vectors["ssm_conv1d.weight"] = (rng.standard_normal((n_channels, n_taps)) / n_taps).astype(np.float32)
    vectors["ssm_dt.bias"] = rng.standard_normal(n_head_v).astype(np.float32)
    vectors["ssm_a"] = -rng.uniform(0.01, 1.0, n_head_v).astype(np.float32)
    matrices = [
        ("attn_qkv", n_channels, shape.n_embd),
        ("attn_gate", n_inner, shape.n_embd),
        ("ssm_beta", n_head_v, shape.n_embd),
        ("ssm_alpha", n_head_v, shape.n_embd),
        ("ssm_out", shape.n_embd, n_inner),
    ]
    return matrices + _feed_forward(shape), vectors


SHAPES = {
    "8b": Shape(
        architecture="llama",
        n_layer=32,
        n_embd=4096,
        n_ff=14336,
        n_head=32,
        n_head_kv=8,
        head_dim=128,
        n_rot=128,
        rope_base=5e5,
        n_vocab=49152,
        keys={},
        block=llama_block,
    ),
    "27b": Shape(
        architecture="qwen35",
        n_layer=64,
        n_embd=5120,
        n_ff=17408,
        n_head=24,
        n_head_kv=4,
        head_dim=256,
        n_rot=64,
        rope_base=1e7,
        n_vocab=248320,
        keys={
            "rope.dimension_sections": [11, 11, 10, 0],
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 6144,
            "ssm.state_size": 128,
            "ssm.time_step_rank": 48,
            "ssm.group_count": 16,
        },
        block=hybrid_block,
    ),
}


def random_rows(rng: np.random.Generator, weight_type: Q, n_rows: int, n_cols: int) -> np.ndarray:
    """uint8 [n_rows, bytes of a row]: random quants under scales that keep activations of ordinary size."""
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[weight_type]
    strip = rng.integers(0, 256, (min(STRIP_ROWS, n_rows), n_cols // block_elements, block_bytes), dtype=np.uint8)
    scales = np.array(_SCALES[weight_type], dtype=np.float16).view(np.uint8)
    strip[:, :, : scales.size] = scales
    return np.tile(strip.reshape(len(strip), -1), (-(-n_rows // len(strip)), 1))[:n_rows]


def add_vocabulary(writer: gguf.GGUFWriter, n_vocab: int, source: Path | None) -> None:
    """The tokenizer keys of ``source``, or a made-up vocabulary; raises ValueError for another number of tokens."""
    if source is None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([f"<{i}>" for i in range(n_vocab)])
        writer.add_token_scores([0.0] * n_vocab)
        writer.add_token_types([1] * n_vocab)
        return
    fields = gguf.GGUFReader(str(source)).fields
    n_tokens = len(fields["tokenizer.ggml.tokens"].data)
    if n_tokens != n_vocab:
        raise ValueError(f"{source} has {n_tokens} tokens; the shape needs {n_vocab}")
    for key, field in fields.items():
        if key.startswith("tokenizer."):
            is_array = field.types[0] is gguf.GGUFValueType.ARRAY
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if is_array else None)


def add_keys(writer: gguf.GGUFWriter, shape: Shape, n_layer: int) -> None:
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(n_layer)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.n_rot)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.n_vocab)
    for key, value in shape.keys.items():
        name = f"{shape.architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_uint32(name, value)


def tensors(shape: Shape, n_layer: int) -> Iterator[tuple[str, tuple[int, int] | np.ndarray]]:
    """Name of each tensor, and rows and columns of a matrix or the values of anything else."""
    yield "token_embd.weight", (shape.n_vocab, shape.n_embd)
    yield "output_norm.weight", np.ones(shape.n_embd, np.float32)
    yield "output.weight", (shape.n_vocab, shape.n_embd)
    for layer in range(n_layer):
        matrices, vectors = shape.block(shape, layer)
        for name, values in vectors.items():
            yield f"blk.{layer}.{name}", values
        for name, n_rows, n_cols in matrices:
            yield f"blk.{layer}.{name}.weight", (n_rows, n_cols)


def write_shape(path: Path, shape: Shape, n_layer: int, weight_type: Q, vocab: Path | None = None) -> None:
    """Matrices are made one at a time as they are written: the file may be larger than the memory."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), shape.architecture)
    add_keys(writer, shape, n_layer)
    add_vocabulary(writer, shape.n_vocab, vocab)
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[weight_type]
    found = list(tensors(shape, n_layer))
    for name, what in found:
        if isinstance(what, tuple):
            row_bytes = what[1] // block_elements * block_bytes
            n_bytes = what[0] * row_bytes
            writer.add_tensor_info(name, (what[0], row_bytes), np.dtype(np.uint8), n_bytes, raw_dtype=weight_type)
        else:
            writer.add_tensor_info(name, what.shape, what.dtype, what.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, what in found:
        writer.write_tensor_data(random_rows(rng, weight_type, *what) if isinstance(what, tuple) else what)
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--type", choices=[t.name for t in _SCALES], default="Q4_K")
    parser.add_argument("--vocab", type=Path, help="GGUF file whose tokenizer is copied")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    write_shape(arguments.file, shape, arguments.layers or shape.n_layer, Q[arguments.type], arguments.vocab)


if __name__ == "__main__":
    main()
