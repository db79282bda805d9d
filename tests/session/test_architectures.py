"""Every architecture beside `llama`: the logits of llama.cpp and of exact arithmetic, streamed or not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from kvs_core.config import RunConfig
from kvs_core.kv_types import KvType
from kvs_core.units import MIB
from scripts.make_golden_architectures import KEPT_COLUMNS, KEPT_ROWS, N_PROMPT
from tests.fixtures.tiny_architectures import tiny_architectures
from tests.fixtures.tiny_models import write_model
from tests.oracles.llama_float64 import LlamaFloat64
from tests.session.comparing import all_logits, assert_near, kl_divergence
from tests.session.harness import open_session, plan_for, random_tokens, run

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "architecture_logits.npz")
TOKENS = GOLDEN["tokens"].tolist()
MODELS = tiny_architectures()
NAMES = sorted(key.removesuffix("/best") for key in GOLDEN.files if key.endswith("/best"))

# Logits of size 5 to 7. llama.cpp's float32 was 5e-6 to 2e-5 from the float64 reference, ours 3e-6 to 1.5e-5.
FROM_LLAMA_CPP = 1e-3
FROM_EXACT = 1e-4


def test_there_is_a_golden_record_of_every_tiny_architecture() -> None:
    assert sorted(MODELS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_llama_cpp_and_of_exact_arithmetic(name: str, tmp_path: Path) -> None:
    """A prompt over four pages in one micro-batch and in several that cut pages, then single tokens."""
    path = write_model(tmp_path / "model.gguf", MODELS[name])
    exact = LlamaFloat64(path).logits(TOKENS)
    config = RunConfig(
        model_path=path, n_ctx=128, page_tokens=32, type_k=KvType.F32, type_v=KvType.F32, n_threads=2, paranoid=True
    )
    whole = all_logits(replace(config, n_ubatch=96), TOKENS, N_PROMPT)
    cut = all_logits(replace(config, n_ubatch=20), TOKENS, N_PROMPT)

    for logits in (whole, cut):
        assert_near(logits, exact, FROM_EXACT)
        assert_near(logits[:, KEPT_COLUMNS], GOLDEN[f"{name}/columns"], FROM_LLAMA_CPP)
        np.testing.assert_array_equal(logits.argmax(axis=1), GOLDEN[f"{name}/best"])
        assert kl_divergence(GOLDEN[f"{name}/rows"], logits[KEPT_ROWS]).max() < 1e-9


def test_the_gate_of_a_shared_expert_may_be_a_vector_or_a_matrix_of_one_row(tmp_path: Path) -> None:
    logits = []
    for shape in ((128,), (1, 128)):
        tensors = dict(MODELS["qwen2moe"].extra_tensors) | {"ffn_gate_inp_shexp.weight": shape}
        path = write_model(tmp_path / "model.gguf", replace(MODELS["qwen2moe"], extra_tensors=tensors))
        logits.append(all_logits(RunConfig(model_path=path, n_ctx=128, n_threads=2), TOKENS, N_PROMPT))
    np.testing.assert_array_equal(logits[0], logits[1])


def test_quantised_experts_are_as_exact_as_their_weights(tmp_path: Path) -> None:
    model = replace(MODELS["qwen3moe"], weight_type=GGMLQuantizationType.Q8_0)
    path = write_model(tmp_path / "model.gguf", model)
    config = RunConfig(model_path=path, n_ctx=128, type_k=KvType.F32, type_v=KvType.F32, n_threads=2)
    assert_near(all_logits(config, TOKENS, N_PROMPT), LlamaFloat64(path).logits(TOKENS), FROM_EXACT)


@pytest.mark.parametrize("name", ["qwen2moe", "qwen3"])
def test_streaming_a_tenth_resident_changes_no_bit(name: str, tmp_path: Path) -> None:
    """Enough layers and K/V heads that the cache outweighs the workspace."""
    model = replace(tiny_architectures(n_head_kv=2)[name], n_layer=12, n_ctx_train=1024)
    path = write_model(tmp_path / "model.gguf", model)
    config = RunConfig(
        model_path=path, n_ctx=1024, n_ubatch=48, page_tokens=16, type_k=KvType.F32, type_v=KvType.F32, n_threads=2
    )
    prompt, forced = random_tokens(500, 259, seed=3), random_tokens(8, 259, seed=4)
    free = run(plan_for(path, config), prompt, forced)
    tight = run(plan_for(path, config, free.plan.minimum_arena_bytes // MIB), prompt, forced)

    n_pages = (len(prompt) + len(forced)) // config.page_tokens
    assert sum(tight.plan.decode.resident_pages) <= 0.1 * n_pages * model.n_layer
    np.testing.assert_array_equal(tight.logits, free.logits)
    assert tight.counters.bytes_streamed == tight.counters.predicted_bytes_streamed
    assert tight.counters.bytes_streamed == tight.plan.streamed_bytes_of_run(len(prompt), len(forced)) > 0


def test_a_step_of_several_tokens_gives_each_the_bits_of_single_steps(tmp_path: Path) -> None:
    """Tokens that share an expert in one step are multiplied with it together."""
    path = write_model(tmp_path / "model.gguf", MODELS["qwen2moe"])
    with open_session(plan_for(path, RunConfig(model_path=path, n_ctx=128, n_threads=2))) as session:
        session.prefill(TOKENS[:40])
        single = np.concatenate([session.decode([token]) for token in TOKENS[40:56]])
        session.clear()
        session.prefill(TOKENS[:40])
        grouped = np.concatenate([session.decode(TOKENS[begin : begin + 8]) for begin in (40, 48)])
    np.testing.assert_array_equal(grouped, single)
