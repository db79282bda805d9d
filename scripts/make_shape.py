"""Make a GGUF file of a real model's shape with random weights, for measuring.

    python -m scripts.make_shape {8b,27b,26b-a4b} FILE [--layers N] [--type Q4_K] [--vocab MODEL]

8b: 32 layers, 4096 wide, 32 heads over 8 of 128. 27b: the hybrid of 64 layers, 5120 wide, each fourth with 24 heads
over 4 of 256, the others recurrent with 48 heads over 16 of 128. 26b-a4b: 30 layers, 2816 wide, 128 experts of 704
beside a feed-forward of 2112, each sixth with 16 heads over 2 of 512, the others with a window of 1024 and 16 over 8 of
256. Every matrix repeats one random strip of rows; norms are 1. Rows that blocks of the type do not divide are Q8_0 or
Q5_0, as files of Q4_K_M have them. With --vocab the tokenizer is copied from a model, which must have as many tokens as
the shape, so that text can be read; SmolLM2 fits 8b. Without it the words are made up.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q

from kvs_core.units import MIB, align_up

STRIP_ROWS = 256
_ALIGNMENT = gguf.GGUF_DEFAULT_ALIGNMENT
_WRITTEN_AT_ONCE = 16 * MIB
_SCALES = {Q.Q4_K: (5e-5, 4e-4), Q.Q8_0: (5e-4,), Q.Q5_0: (4e-3,)}
Matrix = tuple[str, *tuple[int, ...]]  # name within the block, perhaps experts, rows, columns
Keys = dict[str, int | float | list[int] | list[bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """``block`` gives a layer's matrices, and its float32 vectors and taps; ``layer_keys`` the keys of n layers."""

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
    keys: Keys
    block: Callable[[Shape, int], tuple[list[Matrix], dict[str, np.ndarray]]]
    layer_keys: Callable[[Shape, int], Keys] = lambda shape, n_layer: {}
    has_output: bool = True
    rms_eps: float = 1e-5


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


def has_no_window(layer: int) -> bool:
    """Each sixth layer of Gemma 4."""
    return layer % 6 == 5


def mixture_block(shape: Shape, layer: int) -> tuple[list[Matrix], dict[str, np.ndarray]]:
    n_expert, n_ff = (int(shape.keys[key]) for key in ("expert_count", "expert_feed_forward_length"))  # type: ignore[arg-type]
    head_dim, n_head_kv = shape.head_dim, shape.n_head_kv
    if not has_no_window(layer):
        head_dim, n_head_kv = int(shape.keys["attention.key_length_swa"]), 4 * n_head_kv  # type: ignore[arg-type]
    matrices: list[Matrix] = [
        ("attn_q", shape.n_head * head_dim, shape.n_embd),
        ("attn_k", n_head_kv * head_dim, shape.n_embd),
        ("attn_output", shape.n_embd, shape.n_head * head_dim),
        ("ffn_gate_up_exps", n_expert, 2 * n_ff, shape.n_embd),
        ("ffn_down_exps", n_expert, shape.n_embd, n_ff),
        *_feed_forward(shape),
    ]
    if not has_no_window(layer):
        matrices.append(("attn_v", n_head_kv * head_dim, shape.n_embd))
    before = ("attn_norm", "post_attention_norm", "ffn_norm", "pre_ffw_norm_2")
    behind = ("post_ffw_norm_1", "post_ffw_norm_2", "post_ffw_norm")
    vectors = _ones(*(f"{name}.weight" for name in (*before, *behind)), "ffn_gate_inp.scale", size=shape.n_embd)
    vectors |= _ones("attn_q_norm.weight", "attn_k_norm.weight", size=head_dim)
    vectors |= _ones("layer_output_scale.weight", size=1) | _ones("ffn_down_exps.scale", size=n_expert)
    router = np.random.default_rng(layer).standard_normal((n_expert, shape.n_embd), dtype=np.float32)
    vectors["ffn_gate_inp.weight"] = router
    return matrices, vectors


def mixture_keys(shape: Shape, n_layer: int) -> Keys:
    n_head_kv = shape.n_head_kv
    return {
        "attention.head_count_kv": [n_head_kv if has_no_window(layer) else 4 * n_head_kv for layer in range(n_layer)],
        "attention.sliding_window_pattern": [not has_no_window(layer) for layer in range(n_layer)],
    }


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
    "26b-a4b": Shape(
        architecture="gemma4",
        n_layer=30,
        n_embd=2816,
        n_ff=2112,
        n_head=16,
        n_head_kv=2,
        head_dim=512,
        n_rot=512,
        rope_base=1e6,
        n_vocab=262144,
        keys={
            "attention.sliding_window": 1024,
            "attention.key_length_swa": 256,
            "attention.value_length_swa": 256,
            "rope.dimension_count_swa": 256,
            "rope.freq_base_swa": 1e4,
            "embedding_length_per_layer_input": 0,
            "expert_count": 128,
            "expert_used_count": 8,
            "expert_feed_forward_length": 704,
            "final_logit_softcapping": 30.0,
        },
        block=mixture_block,
        layer_keys=mixture_keys,
        has_output=False,
        rms_eps=1e-6,
    ),
}


def random_strip(rng: np.random.Generator, weight_type: Q, n_rows: int, n_cols: int) -> np.ndarray:
    """uint8 [up to STRIP_ROWS, bytes of a row]: random quants under scales that keep activations of ordinary size."""
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[weight_type]
    strip = rng.integers(0, 256, (min(STRIP_ROWS, n_rows), n_cols // block_elements, block_bytes), dtype=np.uint8)
    scales = np.array(_SCALES[weight_type], dtype=np.float16).view(np.uint8)
    strip[:, :, : scales.size] = scales
    return strip.reshape(len(strip), -1)


def type_of(weight_type: Q, n_cols: int, layer: int, n_layer: int) -> Q:
    """Of a matrix; as in files of Q4_K_M the outer layers and each third between have the larger of the other types."""
    if n_cols % gguf.GGML_QUANT_SIZES[weight_type][0] == 0:
        return weight_type
    outer = n_layer // 8
    return Q.Q8_0 if layer < outer or layer >= n_layer - outer or (layer - outer) % 3 == 2 else Q.Q5_0


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
    keys: Keys = {
        "context_length": 1 << 20,
        "embedding_length": shape.n_embd,
        "block_count": n_layer,
        "feed_forward_length": shape.n_ff,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "rope.freq_base": shape.rope_base,
        "rope.dimension_count": shape.n_rot,
        "attention.layer_norm_rms_epsilon": shape.rms_eps,
        "vocab_size": shape.n_vocab,
    }
    for key, value in (keys | shape.keys | shape.layer_keys(shape, n_layer)).items():
        name = f"{shape.architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """``values`` as they are, or a matrix [experts, rows, columns] of random blocks of a type."""

    name: str
    shape: tuple[int, ...]
    weight_type: Q = Q.F32
    values: np.ndarray | None = None

    @property
    def n_bytes(self) -> int:
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[self.weight_type]
        return prod(self.shape) // block_elements * block_bytes


def tensors(shape: Shape, n_layer: int, weight_type: Q) -> Iterator[Tensor]:
    yield Tensor(name="token_embd.weight", shape=(shape.n_vocab, shape.n_embd), weight_type=weight_type)
    ones = np.ones(shape.n_embd, np.float32)
    yield Tensor(name="output_norm.weight", shape=ones.shape, values=ones)
    if shape.has_output:
        yield Tensor(name="output.weight", shape=(shape.n_vocab, shape.n_embd), weight_type=weight_type)
    if shape.architecture == "gemma4":  # layers without a window turn the first quarter of the pairs
        factors = np.where(np.arange(shape.n_rot // 2) < shape.n_rot // 8, 1.0, 1e30).astype(np.float32)
        yield Tensor(name="rope_freqs.weight", shape=factors.shape, values=factors)
    for layer in range(n_layer):
        matrices, vectors = shape.block(shape, layer)
        for name, values in vectors.items():
            yield Tensor(name=f"blk.{layer}.{name}", shape=values.shape, values=values)
        for name, *sizes in matrices:
            own_type = type_of(weight_type, sizes[-1], layer, n_layer)
            yield Tensor(name=f"blk.{layer}.{name}.weight", shape=tuple(sizes), weight_type=own_type)


def write_tensor(file: int, offset: int, tensor: Tensor, seed: int) -> None:
    if tensor.values is not None:
        os.pwrite(file, tensor.values.tobytes(), offset)
        return
    n_rows = prod(tensor.shape[:-1])
    strip = random_strip(np.random.default_rng(seed), tensor.weight_type, n_rows, tensor.shape[-1])
    part = np.tile(strip, (max(1, min(_WRITTEN_AT_ONCE, tensor.n_bytes) // strip.nbytes), 1)).reshape(-1)
    for begin in range(0, tensor.n_bytes, part.nbytes):
        os.pwrite(file, part[: tensor.n_bytes - begin].data, offset + begin)


def write_shape(path: Path, shape: Shape, n_layer: int, weight_type: Q, vocab: Path | None = None) -> None:
    """Matrices are made part by part as they are written, several at a time: the file may be larger than the memory."""
    writer = gguf.GGUFWriter(str(path), shape.architecture)
    add_keys(writer, shape, n_layer)
    add_vocabulary(writer, shape.n_vocab, vocab)
    found = list(tensors(shape, n_layer, weight_type))
    for tensor in found:
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[tensor.weight_type]
        if tensor.values is None:
            bytes_shape = (*tensor.shape[:-1], tensor.shape[-1] // block_elements * block_bytes)
            kind = np.dtype(np.uint8)
            writer.add_tensor_info(tensor.name, bytes_shape, kind, tensor.n_bytes, raw_dtype=tensor.weight_type)
        else:
            writer.add_tensor_info(tensor.name, tensor.shape, tensor.values.dtype, tensor.n_bytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    offset = align_up(path.stat().st_size, _ALIGNMENT)
    file = os.open(path, os.O_WRONLY)
    try:
        with ThreadPoolExecutor() as pool:
            waiting = []
            for seed, tensor in enumerate(found):
                waiting.append(pool.submit(write_tensor, file, offset, tensor, seed))
                offset += align_up(tensor.n_bytes, _ALIGNMENT)
            for one in waiting:
                one.result()
        os.ftruncate(file, offset)
    finally:
        os.close(file)


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
