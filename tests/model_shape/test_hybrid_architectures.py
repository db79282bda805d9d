"""Which layers are recurrent, with which sizes and gates, and how contradicting keys and tensors are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvs_core.config import RunConfig
from kvs_core.device_budget import DeviceBudget, DeviceKind
from kvs_core.errors import ModelFileError, UnsupportedError
from kvs_core.expert_shape import ExpertShape
from kvs_core.metadata_reader import MetadataReader
from kvs_core.model_file import open_model
from kvs_core.model_reader import read_model_shape
from kvs_core.model_shape import LayerCache, ModelShape, RopeKind
from kvs_core.plan import plan_run
from kvs_core.recurrent_shape import RecurrentShape, read_recurrent_pattern
from kvs_core.validate import validate
from tests.fixtures.refusals import refused_shape, unsupported_shape
from tests.fixtures.tiny_hybrid_models import tiny_hybrid_models
from tests.fixtures.tiny_models import TinyModel, write_model

MODELS_BY_NAME = tiny_hybrid_models()
RECURRENT = RecurrentShape(n_head_k=2, n_head_v=4, head_dim=32, n_taps=4, groups_values=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def read(path: Path, model: TinyModel, **keys: Any) -> ModelShape:
    with open_model(write_model(path, with_keys(model, **keys))) as model_file:
        return read_model_shape(model_file)


def with_keys(model: TinyModel, **keys: Any) -> TinyModel:
    kept = {name: value for name, value in (dict(model.extra_keys) | keys).items() if value is not None}
    return replace(model, extra_keys=kept)


@pytest.mark.parametrize(
    ("name", "pattern", "n_ff", "experts"),
    [
        ("qwen35", "RRRA", 192, None),
        ("qwen35moe", "RARA", 160, ExpertShape(n_expert=8, n_used=3, n_ff=64, normalises=True)),
        ("qwen3next", "RRRA", 160, ExpertShape(n_expert=8, n_used=3, n_ff=64, normalises=True)),
    ],
)
def test_layers_are_as_the_keys_say(
    path: Path, name: str, pattern: str, n_ff: int, experts: ExpertShape | None
) -> None:
    shape = read(path, MODELS_BY_NAME[name])
    caches = {"R": LayerCache.RECURRENT, "A": LayerCache.FULL_KV}
    assert [layer.cache for layer in shape.layers] == [caches[kind] for kind in pattern]
    assert [(layer.n_ff, layer.experts) for layer in shape.layers] == [(n_ff, experts)] * 4
    recurrent = replace(RECURRENT, groups_values=name == "qwen3next")
    for layer in shape.layers:
        heads = (layer.n_head, layer.n_head_kv, layer.head_dim_k, layer.head_dim_v)
        if layer.cache is LayerCache.RECURRENT:
            assert (layer.recurrent, heads) == (recurrent, (0, 0, 0, 0))
        else:
            assert (layer.recurrent, heads) == (None, (4, 2, 64, 64))
    assert (shape.rope.kind, shape.rope.n_rot, shape.rope.freq_base) == (RopeKind.NEOX, 48, 1e6)


def test_the_file_may_say_which_layers_are_recurrent() -> None:
    key = "qwen35.attention.recurrent_layers"

    def pattern(value: Any, **others: Any) -> tuple[bool, ...]:
        metadata = {} if value is None else {key: value}
        metadata |= {f"qwen35.{name}": other for name, other in others.items()}
        return read_recurrent_pattern(MetadataReader(metadata, "model.gguf", "qwen35"), 5, 4)

    assert pattern(None) == (True, True, True, False)
    assert pattern(None, full_attention_interval=3) == (True, True, False, True)
    assert pattern(None, full_attention_interval=1) == (False,) * 4
    assert pattern(np.array([False, True, True, False, False])) == (False, True, True, False)
    assert pattern(np.array([0, 1, 1, 0, 0])) == (False, True, True, False)
    for wrong in (np.array([True] * 4), np.array([0.5] * 5), 4, "yes"):
        with pytest.raises(ModelFileError, match="recurrent_layers is no list of 5 flags"):
            pattern(wrong)
    with pytest.raises(ModelFileError, match="none of the layers attends"):
        pattern(None, full_attention_interval=5)
    with pytest.raises(ModelFileError, match="none of the layers attends"):
        pattern(np.array([True] * 4 + [False]))


@pytest.mark.parametrize(
    ("key", "value", "fragment"),
    [
        ("ssm.group_count", None, "is missing"),
        ("ssm.conv_kernel", 1, "is 1; a whole number from 2"),
        ("ssm.time_step_rank", 5, "is 5; a multiple of qwen35.ssm.group_count 2 needed"),
        ("ssm.inner_size", 96, "is 96; 4 heads of 32 elements needed"),
        ("rope.dimension_count", 66, "is 66; at most the size of a key head, 64, needed"),
        ("rope.dimension_count", 47, "is 47; at most the size of a key head, 64, needed, and an even number"),
        ("rope.dimension_sections", None, "is missing"),
        ("rope.dimension_sections", [8, 8, 8], "is no list of 4 whole numbers"),
        ("rope.dimension_sections", [0, 0, 0, 0], "4 lengths needed"),
        ("nextn_predict_layers", 4, "is 4; a whole number from 0 to 3"),
    ],
)
def test_keys_that_make_no_sense_are_refused(path: Path, key: str, value: Any, fragment: str) -> None:
    model = with_keys(MODELS_BY_NAME["qwen35"], **{key: value})
    refused_shape(write_model(path, model), fragment, key=f"qwen35.{key}")


def test_models_that_need_other_code_are_refused_by_name(path: Path) -> None:
    model = with_keys(MODELS_BY_NAME["qwen35"], **{"ssm.state_size": 24, "ssm.inner_size": 96})
    unsupported_shape(write_model(path, model), "is no multiple of 16", field="qwen35.ssm.state_size")
    model = with_keys(MODELS_BY_NAME["qwen35"], **{"rope.dimension_sections": [9, 8, 7, 0]})
    unsupported_shape(
        write_model(path, model), "leaves pair 23 without a position", field="qwen35.rope.dimension_sections"
    )


@pytest.mark.parametrize("sections", [[11, 11, 10, 0], [8, 8, 8, 0]])
def test_sections_that_cover_all_pairs_are_plain_rope(path: Path, sections: list[int]) -> None:
    assert read(path, MODELS_BY_NAME["qwen35"], **{"rope.dimension_sections": sections}).rope.n_rot == 48


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen35", "blk.0.ssm_a"),
        ("qwen35", "blk.1.ssm_conv1d.weight"),
        ("qwen35", "blk.3.post_attention_norm.weight"),
        ("qwen35moe", "blk.0.ssm_alpha.weight"),
        ("qwen3next", "blk.2.ssm_ba.weight"),
        ("qwen3next", "blk.3.ffn_gate_inp_shexp.weight"),
    ],
)
def test_a_missing_tensor_is_named(path: Path, name: str, tensor: str) -> None:
    model = MODELS_BY_NAME[name]
    model = replace(model, omit_tensors=model.omit_tensors | {tensor})
    refused_shape(write_model(path, model), f"{tensor} is missing; architecture {name} needs it", key=tensor)


def test_a_file_with_both_projections_in_one_matrix_is_refused_by_its_name(path: Path) -> None:
    model = MODELS_BY_NAME["qwen3next"]
    shapes, omitted = dict(model.layer_shapes), set(model.omit_tensors)
    for layer_idx in range(3):
        shapes[f"blk.{layer_idx}.ssm_in.weight"] = (384, 128)
        omitted |= {f"blk.{layer_idx}.attn_qkv.weight", f"blk.{layer_idx}.attn_gate.weight"}
    model = replace(model, layer_shapes=shapes, omit_tensors=frozenset(omitted))
    unsupported_shape(write_model(path, model), "blk.0.ssm_in.weight", "qwen3next does not use it", field="tensor")


def test_queries_without_their_gate_are_refused(path: Path) -> None:
    model = MODELS_BY_NAME["qwen35"]
    tensor = "blk.3.attn_q.weight"
    model = replace(model, layer_shapes=dict(model.layer_shapes) | {tensor: (256, 128)})
    refused_shape(write_model(path, model), f"{tensor} is 128 x 256; 128 x 512 needed", key=tensor)


def test_layers_of_a_dense_model_are_no_place_for_tensors_behind_them(path: Path) -> None:
    """Only blocks that the key counts as drafting may hold what nothing here uses."""
    model = MODELS_BY_NAME["qwen35"]
    tensor = "blk.4.nextn.eh_proj.weight"
    model = replace(model, layer_shapes=dict(model.layer_shapes) | {tensor: (128, 256)})
    unsupported_shape(write_model(path, model), "does not use it", tensor, field="tensor")


@pytest.mark.parametrize("name", MODELS_BY_NAME)
def test_a_gpu_takes_recurrent_layers_and_refuses_experts_by_name(path: Path, name: str) -> None:
    shape = read(path, MODELS_BY_NAME[name])
    budget = DeviceBudget(
        kind=DeviceKind.CUDA, name="x", total_bytes=1 << 40, free_bytes=1 << 40, host_free_bytes=1 << 40
    )
    config = RunConfig(model_path=path, n_ctx=64, page_tokens=64)
    assert not validate(replace(config, device="cpu"), shape)
    if name == "qwen35":
        assert plan_run(config, shape, budget).recurrent_bytes > 0
        assert not validate(replace(config, device="cuda:0"), shape)
        return
    reason = f"architecture {name} has mixture-of-experts layers, which run on the CPU only so far"
    with pytest.raises(UnsupportedError, match=reason):
        plan_run(config, shape, budget)
    assert reason in [problem.reason for problem in validate(replace(config, device="cuda:0"), shape)]
