"""Streaming caches of every kind of type: six ways to hold them give the same bits, also padded and with windows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvs_core.config import RunConfig
from kvs_core.kv_layer_types import parse_layer_types
from kvs_core.kv_types import KvType
from kvs_core.plan import RunPlan
from kvs_core.units import MIB
from scripts.streaming_runs import resident_share
from tests.fixtures.tiny_models import TinyModel, write_model
from tests.fixtures.tiny_window_models import tiny_window_models
from tests.session.harness import open_session, plan_for, random_tokens, run, run_tokens

N_CTX = 512
PROMPT = random_tokens(300, 259, seed=5)
FORCED = random_tokens(8, 259, seed=6)
N_HELD = len(PROMPT) + len(FORCED)

# Many layers and K/V heads, so that the smallest arena of whole MiB holds less than a tenth of the cache.
MODELS = {
    "head 64": TinyModel(n_layer=16, n_ctx_train=N_CTX, n_head=8, n_head_kv=8, head_dim=64, weight_std=0.08),
    "head 72": TinyModel(n_layer=16, n_ctx_train=N_CTX, n_head=8, n_head_kv=8, head_dim=72, weight_std=0.08),
    "head 80": TinyModel(n_layer=16, n_ctx_train=N_CTX, n_head=8, n_head_kv=8, head_dim=80, weight_std=0.08),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_model(folder / f"{name}.gguf", model) for name, model in MODELS.items()}


def config_of(path: Path, types: str, **fields: object) -> RunConfig:
    type_k, type_v = map(KvType, types.split("/"))
    config = RunConfig(model_path=path, n_ctx=N_CTX, n_ubatch=32, page_tokens=16, n_threads=1)
    return replace(config, type_k=type_k, type_v=type_v, **fields)  # type: ignore[arg-type]


def arena_near(config: RunConfig, share: float) -> int:
    """The arena in MiB whose resident share at the end of the run is nearest to ``share``; streaming ones only."""
    free = plan_for(config.model_path, config)
    sizes = range(free.minimum_arena_bytes // MIB, free.useful_arena_bytes // MIB)
    return min(sizes, key=lambda mib: abs(resident_share(plan_for(config.model_path, config, mib), N_HELD) - share))


def six_plans(config: RunConfig) -> dict[str, RunPlan]:
    free = plan_for(config.model_path, config)
    arenas = {
        "everything": free.useful_arena_bytes // MIB,
        "half": arena_near(config, 0.5),
        "a tenth": arena_near(config, 0.1),
        "the minimum": free.minimum_arena_bytes // MIB,
        "again": free.minimum_arena_bytes // MIB,
    }
    return {name: plan_for(config.model_path, config, mib) for name, mib in arenas.items()}


@pytest.mark.parametrize(
    ("model", "types", "kv_rotate"),
    [
        ("head 64", "turbo3/turbo2", True),
        ("head 64", "turbo2/f16", True),
        ("head 64", "q8_0/turbo4", False),
        ("head 80", "turbo4/turbo3", True),
        ("head 80", "q8_0/q4_0", True),
        ("head 72", "f16/q5_1", True),
    ],
)
def test_six_ways_to_hold_a_cache_give_the_same_bits(
    paths: dict[str, Path], model: str, types: str, kv_rotate: bool
) -> None:
    config = config_of(paths[model], types, kv_rotate=kv_rotate)
    off = run(plan_for(config.model_path, config), PROMPT, FORCED)
    assert np.isfinite(off.logits).all()
    for name, plan in six_plans(config).items():
        held = run(plan, PROMPT, FORCED)
        np.testing.assert_array_equal(held.logits, off.logits, err_msg=name)
        assert held.counters.bytes_streamed == held.counters.predicted_bytes_streamed
        assert held.counters.bytes_streamed == plan.streamed_bytes_of_run(len(PROMPT), len(FORCED))
        assert (held.counters.bytes_streamed > 0) is (name != "everything")
        if name == "a tenth":
            assert resident_share(plan, N_HELD) < 0.15


@pytest.mark.parametrize("types", ["turbo4/turbo3", "turbo2/f16", "q8_0/iq4_nl"])
def test_rows_stored_from_the_middle_of_a_page_on_are_the_right_ones(paths: dict[str, Path], types: str) -> None:
    """Prompts that follow single tokens begin inside pages, of which some are streamed already."""
    config = config_of(paths["head 80"], types, paranoid=True)
    minimum = plan_for(config.model_path, config).minimum_arena_bytes // MIB
    results = []
    for arena_mib in (0, minimum):
        with open_session(plan_for(config.model_path, config, arena_mib)) as session:
            rows = [run_tokens(session, PROMPT[:70], FORCED[:5]), run_tokens(session, PROMPT[70:153], FORCED[5:])]
            results.append(np.concatenate(rows))
            assert session.counters.bytes_streamed == session.counters.predicted_bytes_streamed
            assert (session.counters.bytes_streamed > 0) is (arena_mib > 0)
    np.testing.assert_array_equal(results[1], results[0])


@pytest.mark.parametrize(
    ("name", "head_dim", "types", "layer_types"),
    [
        ("gemma2", 48, "turbo4/turbo4", ""),
        ("gemma2", 64, "turbo2/q4_0", "first2:f16,last1:q8_0"),
        ("gemma2", 64, "q5_1/iq4_nl", ""),
        ("gemma3", 48, "f16/turbo3", ""),
    ],
)
def test_window_layers_cache_in_every_type(
    name: str, head_dim: int, types: str, layer_types: str, tmp_path: Path
) -> None:
    """The full layers stream, the window layers never; buffers of a window hold what full-size ones do."""
    model = tiny_window_models(n_layer=20)[name]
    model = replace(model, n_head=8, n_head_kv=8, head_dim=head_dim, n_ctx_train=N_CTX)
    path = write_model(tmp_path / "model.gguf", model)
    rules = parse_layer_types(layer_types) if layer_types else ()
    config = config_of(path, types, layer_types=rules)
    off = run(plan_for(path, config), PROMPT, FORCED)
    smallest = off.plan.minimum_arena_bytes // MIB

    tight = run(plan_for(path, replace(config, paranoid=True), smallest), PROMPT, FORCED)
    np.testing.assert_array_equal(tight.logits, off.logits)
    assert tight.counters.bytes_streamed == tight.counters.predicted_bytes_streamed > 0
    seen = {layer.geometry.type_k for layer in tight.plan.window_layers}
    assert seen == {KvType(types.split("/")[0])} | ({KvType.F16} if layer_types else set())

    whole = run(plan_for(path, replace(config, swa_full=True)), PROMPT, FORCED)
    np.testing.assert_array_equal(whole.logits, off.logits)
    floats = replace(config, type_k=KvType.F32, type_v=KvType.F32, layer_types=())
    exact = run(plan_for(path, floats), PROMPT, FORCED).logits
    # Logits that have nothing to do with each other would be 1.4 apart.
    assert 0 < np.std(off.logits - exact) < 0.9 * np.std(exact)
