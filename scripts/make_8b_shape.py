"""Make a GGUF file of the 8B shape with random weights, for measuring: 32 layers, 4096 wide, 32 heads over 8 of 128.

    python -m scripts.make_8b_shape FILE [--layers 32] [--type Q4_K] [--vocab SMOLLM2]

Every matrix repeats one random strip of rows; norms are 1. With --vocab the tokenizer is copied from a model of 49152
tokens, such as SmolLM2, so that text can be read; without it the words are made up.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q

N_EMBD, N_FF, N_HEAD, N_HEAD_KV, HEAD_DIM, N_VOCAB = 4096, 14336, 32, 8, 128, 49152
STRIP_ROWS = 256
_SCALES = {Q.Q4_K: (5e-5, 4e-4), Q.Q8_0: (5e-4,)}


def random_rows(rng: np.random.Generator, weight_type: Q, n_rows: int, n_cols: int) -> np.ndarray:
    """uint8 [n_rows, bytes of a row]: random quants under scales that keep activations of ordinary size."""
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[weight_type]
    strip = rng.integers(0, 256, (min(STRIP_ROWS, n_rows), n_cols // block_elements, block_bytes), dtype=np.uint8)
    scales = np.array(_SCALES[weight_type], dtype=np.float16).view(np.uint8)
    strip[:, :, : scales.size] = scales
    return np.tile(strip.reshape(len(strip), -1), (-(-n_rows // len(strip)), 1))[:n_rows]


def add_vocabulary(writer: gguf.GGUFWriter, source: Path | None) -> None:
    """The tokenizer keys of ``source``, or a made-up vocabulary; raises ValueError for another number of tokens."""
    if source is None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([f"<{i}>" for i in range(N_VOCAB)])
        writer.add_token_scores([0.0] * N_VOCAB)
        writer.add_token_types([1] * N_VOCAB)
        return
    fields = gguf.GGUFReader(str(source)).fields
    n_tokens = len(fields["tokenizer.ggml.tokens"].data)
    if n_tokens != N_VOCAB:
        raise ValueError(f"{source} has {n_tokens} tokens; the shape needs {N_VOCAB}")
    for key, field in fields.items():
        if key.startswith("tokenizer."):
            is_array = field.types[0] is gguf.GGUFValueType.ARRAY
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if is_array else None)


def write_shape(path: Path, n_layer: int, weight_type: Q, vocab: Path | None = None) -> None:
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(n_layer)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD_KV)
    writer.add_rope_freq_base(5e5)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(N_VOCAB)
    add_vocabulary(writer, vocab)

    def add_matrix(name: str, n_rows: int, n_cols: int) -> None:
        writer.add_tensor(f"{name}.weight", random_rows(rng, weight_type, n_rows, n_cols), raw_dtype=weight_type)

    def add_norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(N_EMBD, np.float32))

    add_matrix("token_embd", N_VOCAB, N_EMBD)
    add_norm("output_norm")
    add_matrix("output", N_VOCAB, N_EMBD)
    for layer in range(n_layer):
        block = f"blk.{layer}."
        add_norm(block + "attn_norm")
        add_norm(block + "ffn_norm")
        for name, n_rows, n_cols in (
            ("attn_q", N_HEAD * HEAD_DIM, N_EMBD),
            ("attn_k", N_HEAD_KV * HEAD_DIM, N_EMBD),
            ("attn_v", N_HEAD_KV * HEAD_DIM, N_EMBD),
            ("attn_output", N_EMBD, N_HEAD * HEAD_DIM),
            ("ffn_gate", N_FF, N_EMBD),
            ("ffn_up", N_FF, N_EMBD),
            ("ffn_down", N_EMBD, N_FF),
        ):
            add_matrix(block + name, n_rows, n_cols)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--type", choices=[t.name for t in _SCALES], default="Q4_K")
    parser.add_argument("--vocab", type=Path, help="GGUF file whose tokenizer is copied")
    arguments = parser.parse_args()
    write_shape(arguments.file, arguments.layers, Q[arguments.type], arguments.vocab)


if __name__ == "__main__":
    main()
