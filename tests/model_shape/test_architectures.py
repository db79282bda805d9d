"""What is read from files of each architecture, and how contradicting keys and tensors of experts are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvs_core.architectures import ARCHITECTURES
from kvs_core.config import RunConfig
from kvs_core.errors import UnsupportedError
from kvs_core.expert_shape import ExpertShape
from kvs_core.model_file import open_model
from kvs_core.model_reader import read_model_shape
from kvs_core.model_shape import LayerCache, ModelShape, RopeKind
from kvs_core.models import MODELS
from kvs_core.plan import DeviceBudget, DeviceKind, plan_run
from tests.fixtures.refusals import refused_shape, unsupported_shape
from tests.fixtures.tiny_architectures import tiny_architectures
from tests.fixtures.tiny_models import TinyModel, write_model

MODELS_BY_NAME = tiny_architectures()


def read(path: Path, model: TinyModel) -> ModelShape:
    with open_model(write_model(path, model)) as model_file:
        return read_model_shape(model_file)


def with_keys(model: TinyModel, **keys: Any) -> TinyModel:
    kept = {name: value for name, value in model.extra_keys.items() if keys.get(name, 0) is not None}
    return replace(model, extra_keys=kept | {name: value for name, value in keys.items() if value is not None})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def test_every_architecture_has_a_forward_pass() -> None:
    assert set(ARCHITECTURES) == set(MODELS)


@pytest.mark.parametrize(
    ("name", "n_ff", "experts"),
    [
        ("qwen2", 192, None),
        ("qwen3", 192, None),
        ("mistral3", 192, None),
        ("mixtral", 0, ExpertShape(n_expert=5, n_used=2, n_ff=96, normalises=True)),
        ("qwen2moe", 160, ExpertShape(n_expert=10, n_used=4, n_ff=64, normalises=False)),
        ("qwen3moe", 0, ExpertShape(n_expert=12, n_used=3, n_ff=64, normalises=True)),
    ],
)
def test_layers_are_as_the_keys_say(path: Path, name: str, n_ff: int, experts: ExpertShape | None) -> None:
    shape = read(path, MODELS_BY_NAME[name])
    assert shape.rope.kind is (RopeKind.NEOX if name.startswith("qwen") else RopeKind.NORM)
    assert [layer.cache for layer in shape.layers] == [LayerCache.FULL_KV] * 2
    assert [(layer.n_ff, layer.experts) for layer in shape.layers] == [(n_ff, experts)] * 2
    assert shape.tied_output == (name == "qwen2")


def test_mistral3_sets_its_yarn_and_its_temperature(path: Path) -> None:
    shape = read(path, MODELS_BY_NAME["mistral3"])
    rope = shape.rope
    assert (rope.yarn_beta_fast, rope.yarn_beta_slow, rope.yarn_log_multiplier) == (16.0, 2.0, 0.5)
    assert (shape.temperature_scale, rope.n_ctx_orig) == (0.25, 32)


def test_experts_without_a_width_share_that_of_a_feed_forward(path: Path) -> None:
    model = replace(MODELS_BY_NAME["qwen3moe"], n_ff=192, omit_keys=frozenset({"qwen3moe.expert_feed_forward_length"}))
    shape = read(path, model)
    assert [layer.experts and layer.experts.n_ff for layer in shape.layers] == [64, 64]


@pytest.mark.parametrize(
    ("name", "key", "value", "fragment"),
    [
        ("mixtral", "expert_used_count", 6, "is 6; llama.expert_count is 5"),
        ("mixtral", "expert_used_count", 0, "is 0; a whole number from 1"),
        ("mixtral", "expert_used_count", None, "is missing"),
        ("qwen3moe", "expert_count", None, "is missing"),
        ("qwen2moe", "expert_feed_forward_length", "64", "whole number"),
    ],
)
def test_keys_of_experts_that_make_no_sense_are_refused(
    path: Path, name: str, key: str, value: Any, fragment: str
) -> None:
    model = MODELS_BY_NAME[name]
    refused_shape(write_model(path, with_keys(model, **{key: value})), fragment, key=f"{model.architecture}.{key}")


def test_experts_of_another_number_than_the_key_says_are_refused(path: Path) -> None:
    model = with_keys(MODELS_BY_NAME["qwen3moe"], expert_count=11)
    tensor = "blk.0.ffn_gate_inp.weight"
    refused_shape(write_model(path, model), f"{tensor} is 128 x 12; 128 x 11 needed", key=tensor)


@pytest.mark.parametrize("name", ["ffn_gate_inp", "ffn_up_exps", "ffn_gate_inp_shexp", "ffn_down_shexp"])
def test_a_missing_expert_tensor_is_named(path: Path, name: str) -> None:
    tensor = f"blk.1.{name}.weight"
    model = replace(MODELS_BY_NAME["qwen2moe"], omit_tensors=frozenset({tensor}))
    refused_shape(write_model(path, model), f"{tensor} is missing; architecture qwen2moe needs it", key=tensor)


def test_a_dense_architecture_with_experts_is_refused_by_name(path: Path) -> None:
    model = with_keys(MODELS_BY_NAME["qwen3"], expert_count=8)
    unsupported_shape(
        write_model(path, model), "architecture qwen3 has no mixture-of-experts layers", field="qwen3.expert_count"
    )


def test_a_gpu_that_was_only_found_refuses_too_many_experts_too(path: Path) -> None:
    budget = DeviceBudget(
        kind=DeviceKind.CUDA, name="x", total_bytes=1 << 40, free_bytes=1 << 40, host_free_bytes=1 << 40
    )
    config = RunConfig(model_path=path, n_ctx=64)
    shape = read(path, MODELS_BY_NAME["qwen3moe"])
    plan_run(config, shape, budget)
    experts = [layer.experts for layer in shape.layers if layer.experts is not None]
    many = tuple(
        replace(layer, experts=replace(one, n_expert=513)) for layer, one in zip(shape.layers, experts, strict=True)
    )
    with pytest.raises(UnsupportedError, match="layer 0 takes 3 of 513 experts; a GPU takes up to 32 of 512"):
        plan_run(config, replace(shape, layers=many), budget)
