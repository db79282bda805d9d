"""Hybrid architectures: logits of llama.cpp and of exact arithmetic, the same bits however they run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvs_core.config import RunConfig
from kvs_core.errors import StateError
from kvs_core.kv_types import KvType
from kvs_core.phase import Phase
from kvs_core.units import MIB
from scripts.make_golden_architectures import KEPT_COLUMNS, KEPT_ROWS, N_PROMPT
from tests.fixtures.tiny_hybrid_models import tiny_hybrid_models
from tests.fixtures.tiny_models import random_weights, write_model
from tests.oracles.hybrid_float64 import HybridFloat64
from tests.session.comparing import all_logits, assert_near, kl_divergence
from tests.session.harness import open_session, plan_for, random_tokens, run, run_tokens

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "hybrid_logits.npz")
TOKENS = GOLDEN["tokens"].tolist()
MODELS = tiny_hybrid_models()
NAMES = sorted(key.removesuffix("/best") for key in GOLDEN.files if key.endswith("/best"))

# Logits of size 5. llama.cpp's float32 was 5e-6 to 2e-5 from the float64 reference, ours 5e-6 to 1.2e-5.
FROM_LLAMA_CPP = 1e-3
FROM_EXACT = 1e-4


def config_of(path: Path, **fields: object) -> RunConfig:
    config = RunConfig(model_path=path, n_ctx=128, page_tokens=32, n_threads=2, paranoid=True)
    return replace(config, type_k=KvType.F32, type_v=KvType.F32, **fields)  # type: ignore[arg-type]


def test_there_is_a_golden_record_of_every_tiny_model() -> None:
    assert sorted(MODELS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_llama_cpp_and_of_exact_arithmetic(name: str, tmp_path: Path) -> None:
    """In one micro-batch and in some that end neither with a page nor with a power of two; then single tokens."""
    path = write_model(tmp_path / "model.gguf", MODELS[name])
    exact = HybridFloat64(path).logits(TOKENS)
    whole = all_logits(config_of(path, n_ubatch=96), TOKENS, N_PROMPT)
    cut = all_logits(config_of(path, n_ubatch=20), TOKENS, N_PROMPT)

    for logits in (whole, cut):
        assert_near(logits, exact, FROM_EXACT)
        assert_near(logits[:, KEPT_COLUMNS], GOLDEN[f"{name}/columns"], FROM_LLAMA_CPP)
        np.testing.assert_array_equal(logits.argmax(axis=1), GOLDEN[f"{name}/best"])
        assert kl_divergence(GOLDEN[f"{name}/rows"], logits[KEPT_ROWS]).max() < 1e-9
    assert_near(cut, whole.astype(np.float64), FROM_EXACT)


@pytest.mark.parametrize(
    ("part", "changed"),
    [
        ("ssm_conv1d.weight", lambda taps: taps * np.float32([0, 0, 0, 1])),  # the token's own input alone
        ("ssm_a", lambda rate: rate - 1e3),  # nothing remembered
        ("ssm_norm.weight", np.ones_like),
        ("attn_q_norm.weight", np.ones_like),
    ],
)
def test_the_golden_logits_show_each_part(part: str, changed: object, tmp_path: Path) -> None:
    model = MODELS["qwen35"]
    weights = {
        name: changed(values)  # type: ignore[operator]
        for name, values in random_weights(model).items()
        if name.endswith("." + part)
    }
    other = HybridFloat64(write_model(tmp_path / "model.gguf", model, weights)).logits(TOKENS)[:, KEPT_COLUMNS]
    assert np.abs(other - GOLDEN["qwen35/columns"]).max() > 10 * FROM_LLAMA_CPP


@pytest.mark.parametrize("name", NAMES)
def test_residency_changes_no_bit_and_recurrent_layers_never_stream(name: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", replace(tiny_hybrid_models(n_layer=16)[name], n_ctx_train=1024))
    config = config_of(path, n_ctx=1024, page_tokens=16, n_ubatch=48)
    prompt, forced = random_tokens(900, 259, seed=3), random_tokens(8, 259, seed=4)
    free = run(plan_for(path, config), prompt, forced)
    smallest = free.plan.minimum_arena_bytes // MIB
    useful = free.plan.useful_arena_bytes // MIB
    assert smallest < useful

    for arena_mib in (smallest, useful):
        held = run(plan_for(path, config, arena_mib), prompt, forced)
        np.testing.assert_array_equal(held.logits, free.logits)
        assert held.counters.bytes_streamed == held.counters.predicted_bytes_streamed
        assert held.counters.bytes_streamed == held.plan.streamed_bytes_of_run(len(prompt), len(forced))
        assert held.plan.streams == (arena_mib < useful) == (held.counters.bytes_streamed > 0)
        for phase in Phase:
            layout = held.plan.layout(phase)
            parts = (layout.resident_bytes, layout.ring_bytes, layout.state_bytes, layout.workspace_bytes)
            assert sum(parts) + layout.unused_bytes == held.plan.arena_bytes
            assert layout.state_bytes == held.plan.recurrent_bytes > 0
            assert layout.cache.n_layers == (8 if name == "qwen35moe" else 4)
        if held.plan.streams:
            n_pages = (len(prompt) + len(forced)) // config.page_tokens
            assert sum(held.plan.decode.resident_pages) <= 0.1 * n_pages * held.plan.cache.n_layers


@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_several_tokens_gives_each_the_bits_of_single_steps(name: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", MODELS[name])
    with open_session(plan_for(path, config_of(path))) as session:
        session.prefill(TOKENS[:40])
        single = np.concatenate([session.decode([token]) for token in TOKENS[40:61]])
        session.clear()
        session.prefill(TOKENS[:40])
        grouped = np.concatenate([session.decode(TOKENS[begin:end]) for begin, end in ((40, 48), (48, 53), (53, 61))])
    np.testing.assert_array_equal(grouped, single)


def test_a_cleared_session_is_a_new_one(tmp_path: Path) -> None:
    """After a whole run, after a prompt alone, and after a step that failed half-way through the layers."""
    path = write_model(tmp_path / "model.gguf", MODELS["qwen35"])
    with open_session(plan_for(path, config_of(path))) as session:
        first = run_tokens(session, TOKENS[:50], TOKENS[50:60])
        session.clear()
        np.testing.assert_array_equal(run_tokens(session, TOKENS[:50], TOKENS[50:60]), first)

        session.clear()
        session.prefill(TOKENS[60:64])
        session.clear()
        np.testing.assert_array_equal(run_tokens(session, TOKENS[:50], TOKENS[50:60]), first)

        ops = session._ops
        session._ops = BreaksInLayer(ops, 2)  # type: ignore[assignment]
        with pytest.raises(RuntimeError, match="half-way"):
            session.decode(TOKENS[:1])
        session._ops = ops
        with pytest.raises(StateError, match="clear the session first"):
            session.decode(TOKENS[:1])
        session.clear()
        np.testing.assert_array_equal(run_tokens(session, TOKENS[:50], TOKENS[50:60]), first)


class BreaksInLayer:
    """Operations that fail in the delta net of one layer, when those before have moved their state on."""

    def __init__(self, ops: object, layer_idx: int) -> None:
        self._ops = ops
        self._layer_idx = layer_idx

    def __getattr__(self, name: str) -> object:
        return getattr(self._ops, name)

    def delta_net(self, layer_idx: int, *arguments: object) -> None:
        if layer_idx == self._layer_idx:
            raise RuntimeError("half-way")
        self._ops.delta_net(layer_idx, *arguments)  # type: ignore[attr-defined]


def test_a_session_that_was_warmed_up_is_a_new_one(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", MODELS["qwen3next"])
    with open_session(plan_for(path, config_of(path))) as session:
        first = run_tokens(session, TOKENS[:50], TOKENS[50:54])
        session.clear()
        session.warm_up()
        np.testing.assert_array_equal(run_tokens(session, TOKENS[:50], TOKENS[50:54]), first)


def test_two_sessions_remember_apart(tmp_path: Path) -> None:
    """As a comparison in lock-step runs them."""
    path = write_model(tmp_path / "model.gguf", MODELS["qwen35"])
    plan = plan_for(path, config_of(path))
    with open_session(plan) as one, open_session(plan) as other:
        other.prefill(TOKENS[64:])
        for begin in range(0, 48, 16):
            for session in (one, other):
                if begin == 0:
                    session.clear()
            rows = [session.prefill(TOKENS[begin : begin + 16]) for session in (one, other)]
            np.testing.assert_array_equal(rows[0], rows[1])


def test_blocks_that_draft_tokens_are_left_out(tmp_path: Path) -> None:
    """A block behind the layers, of which the key says that it drafts, changes no bit."""
    model = MODELS["qwen35"]
    expected = all_logits(config_of(write_model(tmp_path / "model.gguf", model)), TOKENS, N_PROMPT)
    block = f"blk.{model.n_layer}."
    drafting = {"attn_norm.weight": (128,), "nextn.eh_proj.weight": (128, 256), "attn_k.weight": (128, 128)}
    longer = replace(
        model,
        extra_keys=dict(model.extra_keys) | {"block_count": model.n_layer + 1, "nextn_predict_layers": 1},
        layer_shapes=dict(model.layer_shapes) | {block + name: shape for name, shape in drafting.items()},
    )
    np.testing.assert_array_equal(
        all_logits(config_of(write_model(tmp_path / "longer.gguf", longer)), TOKENS, N_PROMPT), expected
    )
