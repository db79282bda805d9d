"""Models with a latent cache: logits of llama.cpp and of exact arithmetic, the same bits however they stream."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from kvs_core.backend import open_backend
from kvs_core.config import RopeOverrides, RunConfig
from kvs_core.errors import ModelFileError
from kvs_core.kv_types import KvType
from kvs_core.model_file import open_model
from kvs_core.model_shape import LayerCache
from kvs_core.phase import Phase
from kvs_core.units import MIB
from scripts.make_golden_architectures import KEPT_COLUMNS, KEPT_ROWS, N_PROMPT
from tests.fixtures.tiny_latent_models import dense_latent_model, tiny_latent_models
from tests.fixtures.tiny_models import random_weights, write_model
from tests.oracles.deepseek2_float64 import Deepseek2Float64
from tests.session.comparing import all_logits, assert_near, kl_divergence, together_and_singly
from tests.session.harness import plan_for, random_tokens, run

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "latent_logits.npz")
TOKENS = GOLDEN["tokens"].tolist()
MODELS = tiny_latent_models()
NAMES = sorted(key.removesuffix("/best") for key in GOLDEN.files if key.endswith("/best"))

FROM_LLAMA_CPP = 1e-3
FROM_EXACT = 1e-4


def config_of(path: Path, **fields: object) -> RunConfig:
    config = RunConfig(model_path=path, n_ctx=128, page_tokens=32, n_threads=2, paranoid=True)
    return replace(config, type_k=KvType.F32, type_v=KvType.F32, **fields)  # type: ignore[arg-type]


def test_there_is_a_golden_record_of_every_tiny_model() -> None:
    assert sorted(MODELS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_llama_cpp_and_of_exact_arithmetic(name: str, tmp_path: Path) -> None:
    """In one micro-batch and in several that cut pages, then single tokens."""
    path = write_model(tmp_path / "model.gguf", MODELS[name])
    exact = Deepseek2Float64(path).logits(TOKENS)
    for n_ubatch in (96, 20):
        logits = all_logits(config_of(path, n_ubatch=n_ubatch), TOKENS, N_PROMPT)
        assert_near(logits, exact, FROM_EXACT)
        assert_near(logits[:, KEPT_COLUMNS], GOLDEN[f"{name}/columns"], FROM_LLAMA_CPP)
        np.testing.assert_array_equal(logits.argmax(axis=1), GOLDEN[f"{name}/best"])
        assert kl_divergence(GOLDEN[f"{name}/rows"], logits[KEPT_ROWS]).max() < 1e-9


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("deepseek-v3", "expert_group_used_count", 4),
        ("deepseek-v3", "expert_weights_scale", 0.0),
        ("deepseek-v3", "expert_weights_norm", False),
        ("deepseek-v3", "expert_gating_func", 1),
    ],
)
def test_the_golden_logits_show_each_key_of_the_routing(name: str, key: str, value: object, tmp_path: Path) -> None:
    """What a reference with another value would have said is far from the golden logits."""
    model = replace(MODELS[name], extra_keys=MODELS[name].extra_keys | {key: value})
    other = Deepseek2Float64(write_model(tmp_path / "model.gguf", model)).logits(TOKENS)[:, KEPT_COLUMNS]
    assert np.abs(other - GOLDEN[f"{name}/columns"]).max() > 10 * FROM_LLAMA_CPP


def test_the_golden_logits_show_the_bias_of_the_choice_and_the_growth_of_the_scores(tmp_path: Path) -> None:
    model = MODELS["deepseek-v3"]
    even = {name: np.zeros_like(values) for name, values in random_weights(model).items() if "exp_probs_b" in name}
    unbiased = Deepseek2Float64(write_model(tmp_path / "model.gguf", model, even))
    flat = replace(model, rope_scaling=dict(model.rope_scaling or {}) | {"yarn_log_multiplier": 1e-9})
    ungrown = Deepseek2Float64(write_model(tmp_path / "flat.gguf", flat))
    for other in (unbiased, ungrown):
        error = np.abs(other.logits(TOKENS)[:, KEPT_COLUMNS] - GOLDEN["deepseek-v3/columns"])
        assert error.max() > 10 * FROM_LLAMA_CPP


@pytest.mark.parametrize(("kv_type", "n_layer", "n_ubatch"), [(KvType.F32, 16, 48), (KvType.Q8_0, 16, 32)])
def test_streaming_a_tenth_resident_changes_no_bit(
    kv_type: KvType, n_layer: int, n_ubatch: int, tmp_path: Path
) -> None:
    """Enough layers that the cache outweighs the workspace; a page is one region of keys."""
    model = replace(tiny_latent_models(n_layer=n_layer)["deepseek-v3"], n_ctx_train=2048)
    path = write_model(tmp_path / "model.gguf", model)
    config = config_of(path, n_ctx=2048, page_tokens=16, n_ubatch=n_ubatch)
    config = replace(config, type_k=kv_type, type_v=kv_type)
    prompt, forced = random_tokens(1100, 259, seed=3), random_tokens(8, 259, seed=4)
    free = run(plan_for(path, config), prompt, forced)
    tight = run(plan_for(path, config, free.plan.minimum_arena_bytes // MIB), prompt, forced)

    geometry = tight.plan.kv_layers[0].geometry
    assert geometry.payload_bytes == geometry.k_region.n_bytes
    n_pages = (len(prompt) + len(forced)) // config.page_tokens
    assert sum(tight.plan.decode.resident_pages) <= 0.1 * n_pages * model.n_layer
    np.testing.assert_array_equal(tight.logits, free.logits)
    assert tight.counters.bytes_streamed == tight.counters.predicted_bytes_streamed
    assert tight.counters.bytes_streamed == tight.plan.streamed_bytes_of_run(len(prompt), len(forced)) > 0
    for phase in Phase:
        layout = tight.plan.layout(phase)
        parts = (layout.resident_bytes, layout.ring_bytes, layout.state_bytes, layout.workspace_bytes)
        assert sum(parts) + layout.unused_bytes == tight.plan.arena_bytes


def test_the_cache_is_that_of_one_head_and_of_no_values(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", MODELS["deepseek-v2"])
    plan = plan_for(path, replace(config_of(path), type_k=KvType.F16, type_v=KvType.F16))
    assert {layer.cache for layer in plan.shape.layers} == {LayerCache.LATENT_KV}
    assert plan.kv_bytes == len(plan.shape.layers) * 128 * 192 * 2


@pytest.mark.parametrize("n_tokens", [2, 5, 8])
def test_a_decode_step_of_several_tokens_is_that_many_steps_of_one(n_tokens: int, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", MODELS["deepseek-v3"])
    config = config_of(path, n_ubatch=20)
    np.testing.assert_array_equal(*together_and_singly(config, TOKENS[:90], TOKENS[90 : 90 + n_tokens]))


@pytest.mark.parametrize(
    ("kv_type", "kl_max"),
    [(KvType.F16, 1e-6), (KvType.Q8_0, 1e-4), (KvType.Q5_1, 3e-3), (KvType.Q4_0, 3e-2), (KvType.TURBO4, 3e-2)],
)
def test_quantised_latent_rows_lose_little(kv_type: KvType, kl_max: float, tmp_path: Path) -> None:
    """Rotated with the queries, and the attended values rotated back by the same matrix."""
    path = write_model(tmp_path / "model.gguf", dense_latent_model())
    exact = Deepseek2Float64(path).logits(TOKENS)
    for kv_rotate in (True, False):
        config = replace(config_of(path, n_ubatch=20), type_k=kv_type, type_v=kv_type, kv_rotate=kv_rotate)
        divergence = kl_divergence(exact, all_logits(config, TOKENS, N_PROMPT))
        assert 0 < divergence.mean() < kl_max


def test_a_stretch_given_by_a_flag_reaches_the_scores(tmp_path: Path) -> None:
    """The same factor from the file and from the flag."""
    model = MODELS["deepseek-v3"]
    stretched = replace(model, rope_scaling=dict(model.rope_scaling or {}) | {"factor": 8.0})
    wanted = all_logits(config_of(write_model(tmp_path / "eight.gguf", stretched)), TOKENS, N_PROMPT)
    config = config_of(write_model(tmp_path / "four.gguf", model), rope=RopeOverrides(scale=8.0))
    np.testing.assert_array_equal(all_logits(config, TOKENS, N_PROMPT), wanted)


def test_quantised_weights_of_every_head_are_as_exact_as_they_are(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", replace(MODELS["deepseek-v2"], weight_type=GGMLQuantizationType.BF16))
    assert_near(all_logits(config_of(path), TOKENS, N_PROMPT), Deepseek2Float64(path).logits(TOKENS), FROM_EXACT)


def test_a_bias_of_experts_that_is_no_number_is_refused(tmp_path: Path) -> None:
    """No comparison chooses that expert, so that logits stay numbers: nothing later would tell."""
    name, model = "blk.1.exp_probs_b.bias", MODELS["deepseek-v3"]
    bias = random_weights(model)[name]
    bias[3] = np.nan
    path = write_model(tmp_path / "model.gguf", model, {name: bias})
    with pytest.raises(ModelFileError, match=f"tensor {name} holds NaN") as caught, open_model(path) as model_file:
        open_backend("cpu", n_threads=1).load_weights(model_file)
    assert caught.value.key == name
