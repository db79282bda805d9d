"""Architectures with sliding windows: logits of llama.cpp and of exact arithmetic, the same bits however they run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvs_core.config import RunConfig
from kvs_core.kv_layer_types import parse_layer_types
from kvs_core.kv_types import KvType
from kvs_core.model_shape import LayerCache
from kvs_core.phase import Phase
from kvs_core.units import MIB
from scripts.make_golden_architectures import KEPT_COLUMNS, N_PROMPT
from tests.fixtures.tiny_models import random_weights, write_model
from tests.fixtures.tiny_window_models import N_SWA, tiny_window_models
from tests.oracles.gemma4_float64 import Gemma4Float64
from tests.oracles.gemma_float64 import GemmaFloat64
from tests.oracles.gpt_oss_float64 import GptOssFloat64
from tests.oracles.laguna_float64 import LagunaFloat64
from tests.session.comparing import all_logits, assert_near, together_and_singly
from tests.session.harness import plan_for, random_tokens, run

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "window_logits.npz")
TOKENS = GOLDEN["tokens"].tolist()
MODELS = tiny_window_models()
NAMES = sorted(key.removesuffix("/best") for key in GOLDEN.files if key.endswith("/best"))
PAGE_TOKENS = 32

# llama.cpp looks GELU up in a table of half floats.
FROM_LLAMA_CPP = dict.fromkeys(("gemma2", "gemma3", "gemma4", "gemma4-e2b", "gemma4-moe"), 2e-2) | dict.fromkeys(
    ("gpt-oss", "laguna", "laguna-m"), 1e-3
)
FROM_EXACT = 1e-4


REFERENCES = {
    "gemma2": GemmaFloat64,
    "gemma3": GemmaFloat64,
    "gemma4": Gemma4Float64,
    "gemma4-e2b": Gemma4Float64,
    "gemma4-moe": Gemma4Float64,
    "gpt-oss": GptOssFloat64,
    "laguna": LagunaFloat64,
    "laguna-m": LagunaFloat64,
}


def reference_of(path: Path, name: str) -> GemmaFloat64 | Gemma4Float64 | GptOssFloat64 | LagunaFloat64:
    return REFERENCES[name](path)


def config_of(path: Path, **fields: object) -> RunConfig:
    config = RunConfig(model_path=path, n_ctx=128, page_tokens=PAGE_TOKENS, n_threads=2, paranoid=True)
    return replace(config, type_k=KvType.F32, type_v=KvType.F32, **fields)  # type: ignore[arg-type]


def test_there_is_a_golden_record_of_every_tiny_model() -> None:
    assert sorted(MODELS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_golden_prompts_leave_the_window_and_bend_under_the_caps(name: str, tmp_path: Path) -> None:
    """What a reference that ignored windows or caps would have said is far from the golden logits."""
    model = MODELS[name]
    columns = GOLDEN[f"{name}/columns"]
    for key, value in {"attention.sliding_window": 128, "attn_logit_softcapping": 1e6}.items():
        if key in model.extra_keys:
            changed = replace(model, extra_keys=model.extra_keys | {key: value})
            other = reference_of(write_model(tmp_path / "model.gguf", changed), name).logits(TOKENS)[:, KEPT_COLUMNS]
            assert np.abs(other - columns).max() > 10 * FROM_LLAMA_CPP[name], key
    assert N_SWA < N_PROMPT


def test_the_golden_logits_of_gpt_oss_show_its_sinks(tmp_path: Path) -> None:
    model = MODELS["gpt-oss"]
    none = {f"blk.{layer_idx}.attn_sinks.weight": np.full(4, -30.0, np.float32) for layer_idx in range(model.n_layer)}
    other = GptOssFloat64(write_model(tmp_path / "model.gguf", model, none)).logits(TOKENS)[:, KEPT_COLUMNS]
    assert np.abs(other - GOLDEN["gpt-oss/columns"]).max() > 10 * FROM_LLAMA_CPP["gpt-oss"]


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_llama_cpp_and_of_exact_arithmetic(name: str, tmp_path: Path) -> None:
    """In one micro-batch and in several that cut pages and windows, then single tokens; with small and full windows."""
    path = write_model(tmp_path / "model.gguf", MODELS[name])
    exact = reference_of(path, name).logits(TOKENS)
    config = config_of(path)

    cut = all_logits(replace(config, n_ubatch=20), TOKENS, N_PROMPT)
    for logits in (all_logits(replace(config, n_ubatch=96), TOKENS, N_PROMPT), cut):
        assert_near(logits, exact, FROM_EXACT)
        assert_near(logits[:, KEPT_COLUMNS], GOLDEN[f"{name}/columns"], FROM_LLAMA_CPP[name])
    np.testing.assert_array_equal(all_logits(replace(config, n_ubatch=20, swa_full=True), TOKENS, N_PROMPT), cut)


@pytest.mark.parametrize("name", NAMES)
def test_residency_changes_no_bit_and_windows_never_stream(name: str, tmp_path: Path) -> None:
    model = replace(tiny_window_models(n_layer=9)[name], n_head_kv=4, n_ctx_train=1024)
    path = write_model(tmp_path / "model.gguf", model)
    config = config_of(path, n_ctx=1024, page_tokens=16, n_ubatch=48)
    prompt, forced = random_tokens(500, 259, seed=3), random_tokens(8, 259, seed=4)
    free = run(plan_for(path, config), prompt, forced)
    smallest = free.plan.minimum_arena_bytes // MIB
    useful = free.plan.useful_arena_bytes // MIB

    for arena_mib in sorted({smallest, smallest + (useful - smallest) // 2, useful}):
        held = run(plan_for(path, config, arena_mib), prompt, forced)
        np.testing.assert_array_equal(held.logits, free.logits)
        assert held.counters.bytes_streamed == held.counters.predicted_bytes_streamed
        assert held.plan.streams == (arena_mib < useful) == (held.counters.bytes_streamed > 0)
        for phase in Phase:
            layout = held.plan.layout(phase)
            parts = (layout.resident_bytes, layout.ring_bytes, layout.state_bytes, layout.workspace_bytes)
            assert sum(parts) + layout.unused_bytes == held.plan.arena_bytes
            assert layout.state_bytes == held.plan.window_bytes > 0
            assert layout.cache.n_layers == sum(layer.cache is LayerCache.FULL_KV for layer in held.plan.shape.layers)
    assert smallest < useful


def test_rotated_rows_are_shared_as_they_are(tmp_path: Path) -> None:
    """Queries of layers without keys go through the rotation of the cache they attend to."""
    path = write_model(tmp_path / "model.gguf", MODELS["gemma4-e2b"])
    layer_types = parse_layer_types("3:q8_0")  # the last layer with a cache, which another attends to
    exact = reference_of(path, "gemma4-e2b").logits(TOKENS)
    rotated, plain = (
        np.abs(
            all_logits(config_of(path, layer_types=layer_types, kv_rotate=kv_rotate), TOKENS, N_PROMPT) - exact
        ).mean()
        for kv_rotate in (True, False)
    )
    assert 0 < rotated < 2 * plain < 0.05


def test_matrices_for_keys_and_values_that_are_not_used_change_nothing(tmp_path: Path) -> None:
    model = MODELS["gemma4-e2b"]
    extra = {f"blk.{idx}.{name}": (96, 128) for idx in (4,) for name in ("attn_k.weight", "attn_v.weight")}
    more = replace(model, layer_shapes=model.layer_shapes | extra, omit_tensors=model.omit_tensors - set(extra))
    one = write_model(tmp_path / "one.gguf", model)
    two = write_model(tmp_path / "two.gguf", more)
    np.testing.assert_array_equal(
        all_logits(config_of(two), TOKENS, N_PROMPT), all_logits(config_of(one), TOKENS, N_PROMPT)
    )


def test_gate_and_up_of_experts_in_two_matrices_give_the_logits_of_one(tmp_path: Path) -> None:
    model = MODELS["gemma4-moe"]
    weights = random_weights(model)
    halves = {}
    tensors = {name: shape for name, shape in model.extra_tensors.items() if name != "ffn_gate_up_exps.weight"}
    for layer_idx in range(model.n_layer):
        both = weights[f"blk.{layer_idx}.ffn_gate_up_exps.weight"]
        halves[f"blk.{layer_idx}.ffn_gate_exps.weight"] = both[:, :96].copy()
        halves[f"blk.{layer_idx}.ffn_up_exps.weight"] = both[:, 96:].copy()
    tensors |= {"ffn_gate_exps.weight": (6, 96, 128), "ffn_up_exps.weight": (6, 96, 128)}
    one = write_model(tmp_path / "one.gguf", model)
    two = write_model(tmp_path / "two.gguf", replace(model, extra_tensors=tensors), halves)

    np.testing.assert_array_equal(
        all_logits(config_of(two), TOKENS, N_PROMPT), all_logits(config_of(one), TOKENS, N_PROMPT)
    )


@pytest.mark.parametrize("n_tokens", [2, 5, 8])
def test_a_decode_step_of_several_tokens_is_that_many_steps_of_one(n_tokens: int, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", MODELS["gemma3"])
    config = config_of(path, n_ubatch=20)
    np.testing.assert_array_equal(*together_and_singly(config, TOKENS[:90], TOKENS[90 : 90 + n_tokens]))
