"""Shapes read from valid files, and every way (U06 to U09) in which keys and tensors of a file can disagree."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from kvs_core.model_file import open_model
from kvs_core.model_reader import read_model_shape
from kvs_core.model_shape import LayerCache, LayerShape, ModelShape, RopeKind, RopeScaling, RopeShape, WeightTotal
from kvs_core.model_tensors import WEIGHT_TYPES
from tests.fixtures.gguf_bytes import (
    Q4_0,
    Q4_1,
    Q8_0,
    GgufBytes,
    Value,
    boolean,
    f32,
    i32,
    numbers,
    string,
    strings,
    tiny_llama,
    u32,
)
from tests.fixtures.refusals import refused_shape, unsupported_shape

VALID = tiny_llama()
DOWN = "blk.1.ffn_down.weight"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def write(path: Path, file: GgufBytes) -> Path:
    path.write_bytes(file.build())
    return path


def read(path: Path, file: GgufBytes) -> ModelShape:
    with open_model(write(path, file)) as model_file:
        return read_model_shape(model_file)


def test_every_field_of_a_tiny_model(path: Path) -> None:
    shape = read(path, VALID)
    layers = tuple(
        LayerShape(
            layer_idx=idx, cache=LayerCache.FULL_KV, n_head=4, n_head_kv=2, head_dim_k=16, head_dim_v=16, n_ff=96
        )
        for idx in range(2)
    )
    n_elements = sum(int(np.prod(tensor.shape)) for tensor in VALID.tensors)
    assert shape == ModelShape(
        architecture="llama",
        name="tiny é 模型",
        n_embd=64,
        n_vocab=20,
        n_ctx_train=512,
        rms_eps=float(np.float32(1e-5)),
        layers=layers,
        rope=RopeShape(
            kind=RopeKind.NORM,
            n_rot=16,
            freq_base=10000.0,
            scaling=RopeScaling.LINEAR,
            factor=0.0,
            n_ctx_orig=512,
            attn_factor=1.0,
            has_factors=False,
        ),
        tied_output=False,
        tensors_bytes=4 * n_elements,
        weight_types=(WeightTotal(type_name="F32", n_tensors=21, n_elements=n_elements, n_bytes=4 * n_elements),),
        file_path=str(path),
    )
    assert shape.n_layer == 2
    assert (shape.rope.yarn_ext_factor, shape.rope.yarn_beta_fast, shape.rope.yarn_beta_slow) == (1.0, 32.0, 1.0)


def test_the_shape_of_smollm2(smollm2: Path) -> None:
    with open_model(smollm2) as model_file:
        shape = read_model_shape(model_file)
    assert (shape.n_layer, shape.n_embd, shape.n_vocab, shape.n_ctx_train) == (30, 576, 49152, 8192)
    assert shape.rope.freq_base == 100000.0
    assert shape.tied_output
    assert {(layer.n_head, layer.n_head_kv, layer.head_dim_k, layer.n_ff) for layer in shape.layers} == {
        (9, 3, 64, 1536)
    }
    assert {(total.type_name, total.n_tensors) for total in shape.weight_types} == {
        ("Q8_0", 1),
        ("F32", 61),
        ("Q4_1", 210),
    }
    assert shape.tensors_bytes == 30_081_024 + 140_544 + 66_355_200


def test_defaults_of_optional_keys(path: Path) -> None:
    file = VALID.without_key("llama.attention.head_count_kv").without_key("llama.rope.freq_base")
    for idx in range(2):
        for name in ("attn_k", "attn_v"):
            file = file.with_tensor(f"blk.{idx}.{name}.weight", shape=(64, 64))
    shape = read(path, file.without_key("general.name").without_key("general.type"))
    assert {layer.n_head_kv for layer in shape.layers} == {4}
    assert shape.rope.freq_base == 10000.0
    assert shape.name == ""


def test_optional_tensors_are_taken(path: Path) -> None:
    file = VALID.with_tensor("rope_freqs.weight", shape=(8,))
    for name, n_rows in (
        ("attn_q", 64),
        ("attn_k", 32),
        ("attn_v", 32),
        ("attn_output", 64),
        ("ffn_gate", 96),
        ("ffn_up", 96),
        ("ffn_down", 64),
    ):
        file = file.with_tensor(f"blk.1.{name}.bias", shape=(n_rows,))
        refused_shape(
            write(path, file.with_tensor(f"blk.1.{name}.bias", shape=(n_rows + 1,))),
            f"blk.1.{name}.bias is {n_rows + 1}; {n_rows} needed",
            key=f"blk.1.{name}.bias",
        )
    assert read(path, file).rope.has_factors


def test_a_head_size_of_its_own(path: Path) -> None:
    file = VALID.with_key("llama.attention.key_length", u32(24)).with_key("llama.attention.value_length", u32(20))
    for idx in range(2):
        for name, shape in (
            ("attn_q", (64, 96)),
            ("attn_k", (64, 48)),
            ("attn_v", (64, 40)),
            ("attn_output", (80, 64)),
        ):
            file = file.with_tensor(f"blk.{idx}.{name}.weight", shape=shape)
    shape = read(path, file)
    assert {(layer.head_dim_k, layer.head_dim_v) for layer in shape.layers} == {(24, 20)}
    assert shape.rope.n_rot == 24
    # With both sizes given, the width need not be a multiple of the heads.
    refused_shape(
        write(path, VALID.with_key("llama.attention.head_count", u32(6))),
        "llama.embedding_length 64 is not a multiple of llama.attention.head_count 6",
        key="llama.embedding_length",
    )


def test_counts_per_layer(path: Path) -> None:
    file = (
        VALID.with_key("llama.attention.head_count", numbers(4, [4, 4]))
        .with_key("llama.attention.head_count_kv", numbers(5, [2, 4]))
        .with_key("llama.feed_forward_length", numbers(4, [96, 32]))
    )
    for name, shape in (
        ("attn_k", (64, 64)),
        ("attn_v", (64, 64)),
        ("ffn_gate", (64, 32)),
        ("ffn_up", (64, 32)),
        ("ffn_down", (32, 64)),
    ):
        file = file.with_tensor(f"blk.1.{name}.weight", shape=shape)
    layers = read(path, file).layers
    assert [(layer.n_head_kv, layer.n_ff) for layer in layers] == [(2, 96), (4, 32)]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, (RopeScaling.LINEAR, 0.0, 512, 1.0)),
        ({"rope.scaling.type": string("none")}, (RopeScaling.NONE, 0.0, 512, 1.0)),
        ({"rope.scale_linear": f32(2.0)}, (RopeScaling.LINEAR, 2.0, 512, 1.0)),
        ({"rope.scale_linear": f32(2.0), "rope.scaling.factor": f32(4.0)}, (RopeScaling.LINEAR, 4.0, 512, 1.0)),
        (
            {
                "rope.scaling.type": string("yarn"),
                "rope.scaling.factor": f32(4.0),
                "rope.scaling.original_context_length": u32(128),
                "rope.scaling.attn_factor": f32(0.5),
            },
            (RopeScaling.YARN, 4.0, 128, 0.5),
        ),
    ],
)
def test_rope_scaling(path: Path, keys: dict[str, Value], expected: tuple[object, ...]) -> None:
    file = VALID
    for key, value in keys.items():
        file = file.with_key(f"llama.{key}", value)
    rope = read(path, file).rope
    assert (rope.scaling, rope.factor, rope.n_ctx_orig, rope.attn_factor) == expected


def test_tied_and_untied_outputs(path: Path) -> None:
    untied = read(path, VALID)
    tied = read(path, VALID.without_tensor("output.weight"))
    assert (untied.tied_output, tied.tied_output) == (False, True)
    assert untied.tensors_bytes - tied.tensors_bytes == 64 * 20 * 4
    refused_shape(
        write(path, VALID.without_tensor("token_embd.weight")),
        "tensor token_embd.weight is missing",
        key="token_embd.weight",
    )


def test_mixed_types_are_counted_by_type(path: Path) -> None:
    file = VALID.with_tensor("token_embd.weight", type_id=Q8_0)
    for tensor in VALID.tensors:
        if ".ffn_" in tensor.name and "norm" not in tensor.name:
            file = file.with_tensor(tensor.name, type_id=Q4_0)
    shape = read(path, file.with_tensor(DOWN, type_id=Q4_1))
    by_name = {total.type_name: (total.n_tensors, total.n_elements, total.n_bytes) for total in shape.weight_types}
    assert list(by_name) == ["Q8_0", "F32", "Q4_0", "Q4_1"]
    assert by_name["Q8_0"] == (1, 1280, 40 * 34)
    assert by_name["Q4_0"] == (5, 5 * 6144, 5 * 192 * 18)
    assert by_name["Q4_1"] == (1, 6144, 192 * 20)
    assert shape.tensors_bytes == sum(n_bytes for _, _, n_bytes in by_name.values())
    fast = frozenset({"F32", "Q4_0", "Q8_0"})
    assert shape.slow_types(fast) == (WeightTotal(type_name="Q4_1", n_tensors=1, n_elements=6144, n_bytes=192 * 20),)
    assert shape.expanded_bytes(fast) == 2 * 6144
    assert shape.loaded_bytes(fast) == shape.tensors_bytes - 192 * 20 + 2 * 6144
    assert shape.expanded_bytes(frozenset(by_name)) == 0
    assert shape.loaded_bytes(frozenset(by_name)) == shape.tensors_bytes


# --- Refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        "general.architecture",
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
        "tokenizer.ggml.tokens",
    ],
)
def test_a_missing_key_is_named_with_its_prefix(path: Path, key: str) -> None:
    refused_shape(write(path, VALID.without_key(key)), f"{key} is missing", key=key)


@pytest.mark.parametrize("architecture", ["deepseek4", "qwen", "LLAMA", "", "x\ny"])
def test_an_unknown_architecture_is_refused_with_the_known_ones(path: Path, architecture: str) -> None:
    shown = architecture.replace("\n", "\\n")
    unsupported_shape(
        write(path, VALID.with_key("general.architecture", string(architecture))),
        shown,
        "known: ",
        "llama, mistral3, qwen2, qwen2moe, qwen3, qwen35, qwen35moe, qwen3moe, qwen3next",
        field="general.architecture",
    )


@pytest.mark.parametrize(
    ("key", "value", "fragment"),
    [
        ("general.architecture", u32(1), "is 1; a string needed"),
        ("llama.block_count", string("2"), 'is the string "2"; a whole number'),
        ("llama.block_count", f32(2.0), "is 2.0; a whole number"),
        ("llama.block_count", boolean(True), "is true; a whole number"),
        ("llama.block_count", numbers(4, [2]), "is an array; a whole number"),
        ("llama.block_count", u32(0), "is 0; a whole number from 1"),
        ("llama.block_count", i32(-1), "is -1; a whole number from 1"),
        ("llama.block_count", u32(2**32 - 1), "is 4294967295; a whole number from 1 to 2147483647"),
        ("llama.block_count", u32(2**31 - 1), "is 2147483647, but the file has only 21 tensors"),
        ("llama.context_length", u32(0), "is 0; a whole number"),
        ("llama.embedding_length", u32(0), "is 0; a whole number"),
        ("llama.attention.head_count", u32(0), "is 0; a whole number"),
        ("llama.attention.head_count", strings(["4", "4"]), "is an array; a whole number, or one for each layer"),
        ("llama.attention.head_count", numbers(6, [4.0, 4.0]), "is an array; a whole number, or one for each layer"),
        ("llama.attention.head_count", numbers(4, [4]), "has 1 entries; llama.block_count is 2"),
        ("llama.attention.head_count_kv", numbers(4, [2, 0]), "is 0; a whole number"),
        ("llama.attention.head_count_kv", numbers(4, [2, 2, 2]), "has 3 entries; llama.block_count is 2"),
        ("llama.attention.layer_norm_rms_epsilon", f32(float("nan")), "is nan; a finite number"),
        ("llama.attention.layer_norm_rms_epsilon", f32(-1.0), "is -1.0; a finite number, 0 or more"),
        ("llama.attention.layer_norm_rms_epsilon", string("x"), 'is the string "x"; a finite number'),
        ("llama.rope.freq_base", f32(0.0), "is 0; a number above 1"),
        ("llama.rope.freq_base", f32(1.0), "is 1; a number above 1"),
        ("llama.rope.freq_base", f32(float("inf")), "is inf; a finite number"),
        ("llama.rope.dimension_count", u32(8), "is 8; the size of a key head, 16, needed"),
        ("llama.rope.scaling.factor", f32(-2.0), "is -2.0; a finite number"),
        ("llama.rope.scaling.factor", f32(2e6), "is 2000000.0; a finite number, 0 to 1e+06, needed"),
        ("llama.rope.scaling.factor", f32(2.0**-20), "is 9.53674e-07; 0 for none, or 1e-06 or more, needed"),
        ("llama.rope.scale_linear", f32(2.0**-20), "is 9.53674e-07; 0 for none, or 1e-06 or more, needed"),
        ("llama.rope.scaling.attn_factor", f32(2e6), "is 2000000.0; a finite number, 0 to 1e+06, needed"),
        ("llama.rope.scaling.type", u32(1), "is 1; a string needed"),
        ("llama.rope.scaling.original_context_length", u32(0), "is 0; a whole number"),
        ("llama.attention.causal", u32(0), "is 0; true or false needed"),
        ("tokenizer.ggml.tokens", string("a"), 'is the string "a"; an array needed'),
        ("tokenizer.ggml.scores", f32(0.5), "is 0.5; an array needed"),
    ],
)
def test_a_value_that_cannot_be_is_refused(path: Path, key: str, value: Value, fragment: str) -> None:
    refused_shape(write(path, VALID.with_key(key, value)), f"{key} {fragment}", key=key)


def test_query_heads_must_share_kv_heads_evenly(path: Path) -> None:
    refused_shape(
        write(path, VALID.with_key("llama.attention.head_count_kv", u32(3))),
        "llama.attention.head_count 4 is not a multiple of llama.attention.head_count_kv 3 in layer 0",
        key="llama.attention.head_count",
    )


def test_an_odd_head_size_is_refused(path: Path) -> None:
    refused_shape(
        write(path, VALID.with_key("llama.attention.key_length", u32(15))),
        "llama.rope.dimension_count is 15",
        "even",
        key="llama.rope.dimension_count",
    )


@pytest.mark.parametrize(
    ("key", "value", "fragment"),
    [
        ("llama.attention.causal", boolean(False), "embedding model"),
        ("llama.rope.scaling.type", string("longrope"), "supported: linear, none, yarn"),
        ("llama.rope.scaling.type", string("foo"), "supported: linear, none, yarn"),
    ],
)
def test_variants_without_a_forward_pass_are_refused_by_name(path: Path, key: str, value: Value, fragment: str) -> None:
    unsupported_shape(write(path, VALID.with_key(key, value)), fragment, field=key)


def test_no_experts_is_a_dense_model(path: Path) -> None:
    assert read(path, VALID.with_key("llama.expert_count", u32(0))).n_layer == 2


@pytest.mark.parametrize("name", [tensor.name for tensor in VALID.tensors if tensor.name != "output.weight"])
def test_a_missing_tensor_is_named(path: Path, name: str) -> None:
    refused_shape(write(path, VALID.without_tensor(name)), f"tensor {name} is missing", key=name)


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        (tensor.name, axis)
        for tensor in VALID.tensors
        for axis in range(len(tensor.shape))
        if (axis, "blk" in tensor.name) != (1, False)  # rows of the embeddings have a message of their own
    ],
)
def test_a_tensor_of_another_shape_is_refused_with_both(path: Path, name: str, axis: int) -> None:
    shape = next(tensor.shape for tensor in VALID.tensors if tensor.name == name)
    grown = tuple(dim + 2 * (idx == axis) for idx, dim in enumerate(shape))
    has = " x ".join(str(dim) for dim in grown)
    needs = " x ".join(str(dim) for dim in shape)
    refused_shape(
        write(path, VALID.with_tensor(name, shape=grown)), f"tensor {name} is {has}; {needs} needed", key=name
    )


def test_a_trailing_axis_of_one_is_no_difference(path: Path) -> None:
    assert read(path, VALID.with_tensor("output_norm.weight", shape=(64, 1, 1))).n_embd == 64


@pytest.mark.parametrize("n_rows", [28, 19])
@pytest.mark.parametrize("name", ["token_embd.weight", "output.weight"])
def test_embedding_rows_and_tokens_must_agree(path: Path, name: str, n_rows: int) -> None:
    refused_shape(
        write(path, VALID.with_tensor(name, shape=(64, n_rows))),
        f"tensor {name} has {n_rows} rows; tokenizer.ggml.tokens has 20",
        key=name,
    )


@pytest.mark.parametrize(
    ("key", "make"),
    [
        ("tokenizer.ggml.scores", lambda n_entries: numbers(6, [0.0] * n_entries)),
        ("tokenizer.ggml.token_type", lambda n_entries: numbers(5, [1] * n_entries)),
    ],
)
@pytest.mark.parametrize("n_entries", [0, 19, 21])
def test_token_lists_must_be_equally_long(path: Path, key: str, make: Callable[[int], Value], n_entries: int) -> None:
    refused_shape(
        write(path, VALID.with_key(key, make(n_entries))),
        f"{key} has {n_entries} entries; tokenizer.ggml.tokens has 20",
        key=key,
    )
    assert read(path, VALID.without_key(key)).n_vocab == 20


def test_a_file_with_only_a_vocabulary_is_refused(path: Path) -> None:
    refused_shape(write(path, replace(VALID, tensors=())), "has no tensors, only metadata", key=None)


def test_a_block_count_that_is_not_the_files_is_refused(path: Path) -> None:
    refused_shape(
        write(path, VALID.with_key("llama.block_count", u32(3))),
        "tensor blk.2.attn_norm.weight is missing",
        key="blk.2.attn_norm.weight",
    )
    unsupported_shape(
        write(path, VALID.with_key("llama.block_count", u32(1))), "blk.1.attn_norm.weight", field="tensor"
    )


@pytest.mark.parametrize(
    "name", ["blk.0.attn_q_norm.weight", "blk.0.attn_q.scale", "rope_factors_long.weight", "blk.0.ffn_gate_inp.weight"]
)
def test_a_tensor_the_forward_pass_would_ignore_is_refused(path: Path, name: str) -> None:
    unsupported_shape(write(path, VALID.with_tensor(name, shape=(8,))), name, field="tensor")


@pytest.mark.parametrize(("type_id", "name"), [(26, "I32"), (28, "F64"), (41, "Q1_0")])
def test_a_type_that_is_none_of_weights_is_refused(path: Path, type_id: int, name: str) -> None:
    # A row of 128 suits every block size, so that only the type is wrong.
    file = VALID.with_key("llama.feed_forward_length", numbers(4, [96, 128]))
    for tensor_name in ("blk.1.ffn_gate.weight", "blk.1.ffn_up.weight"):
        file = file.with_tensor(tensor_name, shape=(64, 128))
    assert read(path, file.with_tensor(DOWN, shape=(128, 64))).n_layer == 2
    file = file.with_tensor(DOWN, shape=(128, 64), type_id=type_id)
    refused_shape(write(path, file), f"tensor {DOWN} has type {name} ({type_id})", "Q4_K", key=DOWN)


def test_readable_types_are_those_gguf_can_dequantise() -> None:
    readable = set()
    for type_, (_, block_bytes) in GGML_QUANT_SIZES.items():
        try:
            dequantize(np.zeros((1, block_bytes), np.uint8), type_)
        except NotImplementedError:
            continue
        readable.add(type_.name)
    assert readable == WEIGHT_TYPES
    assert all(name in GGMLQuantizationType.__members__ for name in WEIGHT_TYPES)


def test_a_shape_is_a_value(path: Path) -> None:
    shape = read(path, VALID)
    assert hash(shape) == hash(read(path, VALID))
    assert replace(shape, n_ctx_train=1024) != shape


def test_importing_the_shape_loads_no_numpy() -> None:
    code = "import sys, kvs_core.model_shape; print(sorted({'numpy', 'gguf', 'numba'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
