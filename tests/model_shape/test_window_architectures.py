"""Which layers get a window, with which RoPE and caps, and how contradicting keys are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvs_core.config import RunConfig
from kvs_core.device_budget import DeviceBudget, DeviceKind
from kvs_core.errors import ModelFileError, UnsupportedError
from kvs_core.expert_shape import ExpertShape, Gating
from kvs_core.metadata_reader import MetadataReader
from kvs_core.model_file import open_model
from kvs_core.model_reader import read_model_shape
from kvs_core.model_shape import LayerCache, ModelShape, RopeKind, RopeScaling
from kvs_core.models.gemma_blocks import attention_scale
from kvs_core.plan import plan_run
from kvs_core.validate import validate
from kvs_core.window_shape import read_window_pattern
from tests.fixtures.tiny_models import TinyModel, write_model
from tests.fixtures.tiny_window_models import N_SWA, tiny_window_models

MODELS_BY_NAME = tiny_window_models()


def read(path: Path, model: TinyModel, **keys: Any) -> ModelShape:
    kept = {name: value for name, value in (dict(model.extra_keys) | keys).items() if value is not None}
    with open_model(write_model(path, replace(model, extra_keys=kept))) as model_file:
        return read_model_shape(model_file)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def windows_of(shape: ModelShape) -> list[int]:
    assert all((layer.cache is LayerCache.WINDOW_KV) == (layer.n_swa > 0) for layer in shape.layers)
    return [layer.n_swa for layer in shape.layers]


def test_every_second_layer_of_gemma2_and_five_of_six_of_gemma3_have_windows(path: Path) -> None:
    assert windows_of(read(path, MODELS_BY_NAME["gemma2"])) == [N_SWA, 0, N_SWA, 0]
    assert windows_of(read(path, MODELS_BY_NAME["gemma3"])) == [N_SWA] * 5 + [0, N_SWA]


def test_a_file_without_a_window_key(path: Path) -> None:
    """gemma2 takes 4096, gemma3 has no windows at all."""
    assert windows_of(read(path, MODELS_BY_NAME["gemma2"], **{"attention.sliding_window": None})) == [4096, 0] * 2
    assert windows_of(read(path, MODELS_BY_NAME["gemma3"], **{"attention.sliding_window": None})) == [0] * 7


def test_caps_and_rope_of_gemma2(path: Path) -> None:
    shape = read(path, MODELS_BY_NAME["gemma2"])
    assert (shape.attention_softcap, shape.logit_softcap) == (1.5, 2.0)
    assert shape.rope.kind is RopeKind.NEOX
    assert shape.rope_in_window == shape.rope
    missing = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "rope.freq_base_swa": 5e5}
    shape = read(path, MODELS_BY_NAME["gemma2"], **missing)
    assert (shape.attention_softcap, shape.logit_softcap) == (50.0, 30.0)
    assert shape.rope_in_window == replace(shape.rope, freq_base=5e5)


def test_caps_and_rope_of_gemma3(path: Path) -> None:
    shape = read(path, MODELS_BY_NAME["gemma3"])
    assert (shape.attention_softcap, shape.logit_softcap) == (0.0, 0.0)
    assert (shape.rope.freq_base, shape.rope.factor, shape.rope.scaling) == (1e6, 8.0, RopeScaling.LINEAR)
    assert shape.rope_in_window == replace(shape.rope, freq_base=10000.0, scaling=RopeScaling.NONE)
    assert read(path, MODELS_BY_NAME["gemma3"], final_logit_softcapping=30.0).logit_softcap == 30.0


def test_gpt_oss_has_experts_in_every_layer_and_one_rotation(path: Path) -> None:
    shape = read(path, MODELS_BY_NAME["gpt-oss"])
    assert windows_of(shape) == [N_SWA, 0, N_SWA, 0]
    experts = ExpertShape(n_expert=6, n_used=2, n_ff=96, normalises=True)
    assert [(layer.n_ff, layer.experts) for layer in shape.layers] == [(0, experts)] * 4
    assert shape.rope.scaling is RopeScaling.YARN
    assert shape.rope_in_window == shape.rope
    assert not shape.tied_output
    with pytest.raises(ModelFileError, match=r"gpt-oss\.attention\.sliding_window is missing"):
        read(path, MODELS_BY_NAME["gpt-oss"], **{"attention.sliding_window": None})


@pytest.mark.parametrize("name", ["output.weight", "blk.1.attn_sinks.weight", "blk.0.ffn_up_exps.bias"])
def test_gpt_oss_without_one_of_its_tensors_is_refused(name: str, path: Path) -> None:
    model = MODELS_BY_NAME["gpt-oss"]
    with pytest.raises(ModelFileError, match=f"tensor {name} is missing"):
        read(path, replace(model, omit_tensors=model.omit_tensors | {name}))


def test_gemma4_has_heads_of_two_sizes(path: Path) -> None:
    shape = read(path, MODELS_BY_NAME["gemma4"])
    assert windows_of(shape) == [N_SWA, 0, N_SWA, 0]
    assert [(layer.head_dim_k, layer.head_dim_v, layer.n_head_kv) for layer in shape.layers] == [
        (48, 48, 2),
        (64, 64, 1),
    ] * 2
    assert (shape.rope.n_rot, shape.rope.freq_base, shape.rope.has_factors) == (64, 1e6, True)
    assert shape.rope_in_window is not None
    assert (shape.rope_in_window.n_rot, shape.rope_in_window.freq_base) == (48, 10000.0)
    assert not shape.rope_in_window.has_factors
    assert (shape.attention_softcap, shape.logit_softcap) == (0.0, 2.0)


def test_the_last_layers_of_gemma4_e2b_attend_to_the_last_of_their_kind_before_them(path: Path) -> None:
    shape = read(path, MODELS_BY_NAME["gemma4-e2b"])
    assert [layer.kv_from for layer in shape.layers] == [None, None, None, None, 2, 3]
    assert [layer.n_swa > 0 for layer in shape.layers] == [True, False] * 3
    assert {layer.cache for layer in shape.layers[4:]} == {LayerCache.NONE}
    assert {layer.n_own_embd for layer in shape.layers} == {32}
    assert [layer.n_ff for layer in shape.layers] == [192] * 4 + [256] * 2


@pytest.mark.parametrize("n_shared", [1, 3, 5])
def test_shared_caches_need_a_window_and_a_full_layer_right_before_them(n_shared: int, path: Path) -> None:
    with pytest.raises(ModelFileError, match=f"attention.shared_kv_layers is {n_shared}; a layer with a window"):
        read(path, MODELS_BY_NAME["gemma4-e2b"], **{"attention.shared_kv_layers": n_shared})


def test_a_layer_with_other_heads_than_the_cache_it_shares_is_refused(path: Path) -> None:
    with pytest.raises(ModelFileError, match="is 1 in layer 4, which attends to layer 2 with 2"):
        read(path, MODELS_BY_NAME["gemma4-e2b"], **{"attention.head_count_kv": [2, 1, 2, 1, 1, 1]})


@pytest.mark.parametrize("name", ["blk.3.attn_k", "blk.3.attn_k_norm", "per_layer_token_embd", "blk.5.inp_gate"])
def test_a_missing_tensor_of_gemma4_e2b_is_named(name: str, path: Path) -> None:
    model = MODELS_BY_NAME["gemma4-e2b"]
    model = replace(model, omit_tensors=model.omit_tensors | {f"{name}.weight"})
    with pytest.raises(ModelFileError, match=f"tensor {name}.weight is missing"):
        read(path, model)


def test_laguna_is_full_in_each_fourth_layer_from_the_first_on(path: Path) -> None:
    shape = read(path, MODELS_BY_NAME["laguna"])
    assert [layer.n_swa for layer in shape.layers] == [0, N_SWA, N_SWA, N_SWA, 0]
    assert [layer.n_head for layer in shape.layers] == [4, 8, 8, 8, 4]
    assert [layer.n_ff for layer in shape.layers] == [192, 96, 96, 96, 96]
    assert shape.layers[0].experts is None
    assert shape.layers[1].experts is not None
    assert (shape.layers[1].experts.gating, shape.layers[1].experts.weight_scale) == (Gating.SIGMOID, 2.5)
    assert (shape.rope.n_rot, shape.rope.scaling) == (32, RopeScaling.YARN)
    assert shape.rope_in_window is not None
    assert (shape.rope_in_window.n_rot, shape.rope_in_window.scaling) == (64, RopeScaling.NONE)


def test_laguna_without_a_window_is_full_everywhere(path: Path) -> None:
    shape = read(path, MODELS_BY_NAME["laguna-m"], **{"attention.sliding_window": 0})
    assert {layer.cache for layer in shape.layers} == {LayerCache.FULL_KV}


def test_a_gate_of_laguna_is_for_each_head_or_each_element(path: Path) -> None:
    model = MODELS_BY_NAME["laguna"]
    shapes = model.layer_shapes | {"blk.1.attn_gate.weight": (16, 128)}
    with pytest.raises(ModelFileError, match=r"attn_gate\.weight is 128 x 16; 128 x 8 needed"):
        read(path, replace(model, layer_shapes=shapes))


@pytest.mark.parametrize("value", [66, 33])
def test_a_rotated_part_larger_than_a_head_or_odd_is_refused(value: int, path: Path) -> None:
    for key in ("rope.dimension_count", "rope.dimension_count_swa"):
        with pytest.raises(ModelFileError, match=f"laguna.{key} is {value}"):
            read(path, MODELS_BY_NAME["laguna"], **{key: value})


@pytest.mark.parametrize("key", ["attention.sliding_window_pattern", "attention.key_length_swa"])
def test_keys_that_gemma4_cannot_do_without(key: str, path: Path) -> None:
    with pytest.raises(ModelFileError, match=f"gemma4.{key} is missing"):
        read(path, MODELS_BY_NAME["gemma4"], **{key: None})


def test_experts_of_gemma4_have_gate_and_up_in_one_matrix_or_in_two(path: Path) -> None:
    model = MODELS_BY_NAME["gemma4-moe"]
    shape = read(path, model)
    assert [(layer.n_ff, layer.experts) for layer in shape.layers] == [
        (192, ExpertShape(n_expert=6, n_used=2, n_ff=96, normalises=True))
    ] * 4
    tensors = dict(model.extra_tensors)
    del tensors["ffn_gate_up_exps.weight"]
    with pytest.raises(ModelFileError, match=r"tensor blk\.0\.ffn_gate_exps\.weight is missing"):
        read(path, replace(model, extra_tensors=tensors))
    halves = {"ffn_gate_exps.weight": (6, 96, 128), "ffn_up_exps.weight": (6, 96, 128)}
    assert read(path, replace(model, extra_tensors=tensors | halves)).layers == shape.layers


def test_the_file_may_give_another_pattern() -> None:
    key = "gemma3.attention.sliding_window_pattern"

    def pattern(value: Any) -> tuple[bool, ...]:
        return read_window_pattern(MetadataReader({key: value}, "model.gguf", "gemma3"), 4, period=6)

    assert pattern(3) == (True, True, False, True)
    assert pattern(1) == (False,) * 4
    assert pattern(0) == (True,) * 4
    assert pattern(np.array([True, False, False, True])) == (True, False, False, True)
    for wrong in (np.array([True]), np.array([0.5] * 4), -1, "yes"):
        with pytest.raises(ModelFileError, match="sliding_window_pattern"):
            pattern(wrong)


@pytest.mark.parametrize(
    ("key", "value"), [("attention.sliding_window", 0), ("rope.freq_base_swa", 1.0), ("attn_logit_softcapping", -1.0)]
)
def test_numbers_that_make_no_sense_are_refused(key: str, value: float, path: Path) -> None:
    with pytest.raises(ModelFileError, match=f"gemma2.{key} is"):
        read(path, MODELS_BY_NAME["gemma2"], **{key: value})


def test_the_largest_model_of_a_family_scales_by_its_width(path: Path) -> None:
    shape = read(path, MODELS_BY_NAME["gemma3"])
    layer = shape.layers[0]
    assert attention_scale(shape, layer, n_layer_largest=62) == pytest.approx(layer.head_dim_k**-0.5)
    assert attention_scale(shape, layer, n_layer_largest=shape.n_layer) == pytest.approx((128 / 4) ** -0.5)


CARD = DeviceBudget(kind=DeviceKind.CUDA, name="x", total_bytes=1 << 40, free_bytes=1 << 40, host_free_bytes=1 << 40)
ON_A_GPU = tiny_window_models(head_dims=(256, 512))


@pytest.mark.parametrize("name", ON_A_GPU)
def test_a_gpu_takes_windows_caps_and_sinks(path: Path, name: str) -> None:
    """The head sizes of Gemma 4: 256 with a window, 512 without."""
    shape = read(path, ON_A_GPU[name])
    config = RunConfig(model_path=path, n_ctx=64, page_tokens=64)
    assert plan_run(config, shape, CARD).window_bytes > 0
    assert not validate(replace(config, device="cuda:0"), shape)


def test_a_gpu_has_no_windows_over_heads_of_512(path: Path) -> None:
    shape = read(path, tiny_window_models(head_dims=(512, 512))["gemma4"])
    config = RunConfig(model_path=path, n_ctx=64, page_tokens=64)
    message = "a window and heads of 512: CUDA attention has windows up to 256"
    with pytest.raises(UnsupportedError, match=message):
        plan_run(config, shape, CARD)
    (problem,) = validate(replace(config, device="cuda:0"), shape)
    assert message in str(problem)
