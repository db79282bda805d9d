"""What is read from files with a latent cache, and how contradicting keys and tensors of them are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvs_core.expert_shape import ExpertShape, Gating
from kvs_core.latent_shape import LatentShape
from kvs_core.model_file import open_model
from kvs_core.model_reader import read_model_shape
from kvs_core.model_shape import LayerCache, LayerShape, RopeKind
from tests.fixtures.refusals import refused_shape, unsupported_shape
from tests.fixtures.tiny_latent_models import dense_latent_model, tiny_latent_models
from tests.fixtures.tiny_models import TinyModel, write_model

MODELS = tiny_latent_models()
V3 = MODELS["deepseek-v3"]


def with_keys(model: TinyModel, **keys: Any) -> TinyModel:
    kept = {name: value for name, value in model.extra_keys.items() if keys.get(name, 0) is not None}
    return replace(model, extra_keys=kept | {name: value for name, value in keys.items() if value is not None})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def test_layers_are_as_the_keys_say(path: Path) -> None:
    with open_model(write_model(path, V3)) as model_file:
        shape = read_model_shape(model_file)
    dense = LayerShape(
        layer_idx=0,
        cache=LayerCache.LATENT_KV,
        n_head=4,
        n_head_kv=1,
        head_dim_k=192,
        head_dim_v=128,
        n_ff=192,
        latent=LatentShape(q_rank=80, kv_rank=128, n_rot=64, key_dim=96, value_dim=48),
    )
    experts = ExpertShape(
        n_expert=12,
        n_used=3,
        n_ff=64,
        normalises=True,
        gating=Gating.SIGMOID,
        weight_scale=2.5,
        n_groups=4,
        n_groups_used=2,
    )
    others = [replace(dense, layer_idx=idx, n_ff=128, experts=experts) for idx in (1, 2)]
    assert list(shape.layers) == [dense, *others]
    assert (shape.rope.kind, shape.rope.n_rot, shape.rope.scores_grow) == (RopeKind.NORM, 64, True)
    assert shape.rope.yarn_log_multiplier == pytest.approx(1.0)


def test_queries_of_a_lite_model_have_no_latent_whatever_the_key_says(path: Path) -> None:
    model = with_keys(MODELS["deepseek-v2-lite"], **{"attention.q_lora_rank": 80})
    with open_model(write_model(path, model)) as model_file:
        layers = read_model_shape(model_file).layers
    assert {layer.latent.q_rank for layer in layers if layer.latent} == {0}


@pytest.mark.parametrize(
    ("key", "value", "fragment"),
    [
        ("attention.key_length", 193, "is 193; 192 needed"),
        ("attention.value_length", 64, "is 64; 128 needed"),
        ("attention.key_length_mla", 64, "is 64; more than 64"),
        ("attention.kv_lora_rank", None, "is missing"),
        ("attention.q_lora_rank", None, "is missing"),
        ("rope.dimension_count", 0, "is 0; a whole number from 1"),
        ("attention.head_count_kv", 4, "is not 1"),
        ("expert_shared_count", None, "is missing"),
        ("nextn_predict_layers", 3, "is 3; deepseek2.block_count is 3"),
        ("expert_group_count", 5, "5 does not part 12 experts"),
        ("expert_group_used_count", 5, "5 of 4 groups"),
        ("expert_used_count", 7, "2 of 4 groups do not hold the 7 experts"),
    ],
)
def test_keys_that_make_no_sense_are_refused(path: Path, key: str, value: Any, fragment: str) -> None:
    named = "expert_group_used_count" if key == "expert_used_count" else key
    refused_shape(write_model(path, with_keys(V3, **{key: value})), fragment, key=f"deepseek2.{named}")


@pytest.mark.parametrize(
    ("key", "value", "fragment"),
    [
        ("attention.key_length_mla", None, "attn_kv_b is not split"),
        ("attention.value_length_mla", None, "attn_kv_b is not split"),
        ("expert_gating_func", 3, "neither softmax (1) nor sigmoid (2)"),
        ("attention.temperature_scale", 0.1, "queries that grow with the position"),
    ],
)
def test_variants_without_a_forward_pass_are_refused_by_name(path: Path, key: str, value: Any, fragment: str) -> None:
    unsupported_shape(write_model(path, with_keys(V3, **{key: value})), fragment, field=f"deepseek2.{key}")


def test_blocks_that_predict_further_tokens_are_left_out(path: Path) -> None:
    """Whatever tensors they have; the layers before them stay as they are."""
    tensor = "blk.2.nextn.eh_proj.weight"
    model = with_keys(replace(V3, layer_shapes=V3.layer_shapes | {tensor: (128, 256)}), nextn_predict_layers=1)
    with open_model(write_model(path, model)) as model_file:
        layers = read_model_shape(model_file).layers
    with open_model(write_model(path, V3)) as model_file:
        assert layers == read_model_shape(model_file).layers[:2]
    unsupported_shape(write_model(path, with_keys(model, nextn_predict_layers=0)), "does not use it", field="tensor")


@pytest.mark.parametrize("name", ["attn_kv_a_mqa", "attn_k_b", "attn_v_b", "attn_q_b", "attn_kv_a_norm"])
def test_a_missing_tensor_is_named(path: Path, name: str) -> None:
    tensor = f"blk.1.{name}.weight"
    model = replace(V3, omit_tensors=V3.omit_tensors | {tensor})
    refused_shape(write_model(path, model), f"{tensor} is missing; architecture deepseek2 needs it", key=tensor)


def test_rows_shorter_than_a_vector_are_refused_by_tensor(path: Path) -> None:
    for model in (tiny_latent_models(q_rank=15)["deepseek-v3"], dense_latent_model(q_rank=1)):
        unsupported_shape(write_model(path, model), "tensor blk.0.attn_q_b.weight: has rows of 1", field="tensor")
    with open_model(write_model(path, dense_latent_model(q_rank=16))) as model_file:
        assert read_model_shape(model_file).layers
