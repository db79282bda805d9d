"""Quantised caches in whole runs: their logits stay near those of float keys and values, rotated or not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvs_core.config import RunConfig
from kvs_core.kv_types import KvType
from tests.fixtures.tiny_models import TinyModel, write_model
from tests.oracles.llama_float64 import LlamaFloat64
from tests.session.harness import plan_for, random_tokens, run

PROMPT = random_tokens(90, 259, seed=3)
FORCED = random_tokens(6, 259, seed=4)

# Share of the logits' spread that a type may cost on this model of random weights: at most twice what was seen.
# Logits that have nothing to do with each other are 1.4 apart.
ALLOWED = {
    KvType.F16: 0.0012,
    KvType.BF16: 0.012,
    KvType.Q8_0: 0.032,
    KvType.Q5_1: 0.22,
    KvType.Q5_0: 0.25,
    KvType.Q4_1: 0.42,
    KvType.Q4_0: 0.45,
    KvType.IQ4_NL: 0.42,
    KvType.TURBO4: 0.5,
    KvType.TURBO3: 0.75,
    KvType.TURBO2: 1.1,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "types.gguf"
    write_model(path, TinyModel(n_layer=2, n_ctx_train=128, n_head=2, n_head_kv=1, head_dim=128, weight_std=0.08))
    return path


@pytest.fixture(scope="module")
def exact(model: Path) -> np.ndarray:
    return logits_of(model, KvType.F32)


def logits_of(model: Path, kv_type: KvType, *, kv_rotate: bool = True) -> np.ndarray:
    config = RunConfig(model_path=model, n_ctx=128, page_tokens=16, n_threads=2, kv_rotate=kv_rotate)
    config = replace(config, type_k=kv_type, type_v=kv_type)
    return run(plan_for(model, config), PROMPT, FORCED).logits


@pytest.mark.parametrize("head_dim", [40, 80, 160])
def test_heads_that_are_padded_lose_no_more_than_whole_ones(tmp_path: Path, head_dim: int) -> None:
    path = tmp_path / "padded.gguf"
    write_model(path, TinyModel(n_layer=2, n_ctx_train=128, n_head=2, n_head_kv=1, head_dim=head_dim, weight_std=0.08))
    exact = LlamaFloat64(path).logits(PROMPT + FORCED)[len(PROMPT) - 8 :]
    for kv_type in (KvType.F16, KvType.Q8_0, KvType.Q5_1, KvType.IQ4_NL, KvType.TURBO4, KvType.TURBO3, KvType.TURBO2):
        assert 0 < loss(logits_of(path, kv_type), exact) < ALLOWED[kv_type]


def loss(logits: np.ndarray, exact: np.ndarray) -> float:
    return float(np.sqrt(np.mean((logits - exact) ** 2)) / exact.std())


@pytest.mark.parametrize("kv_rotate", [True, False])
@pytest.mark.parametrize("kv_type", ALLOWED)
def test_logits_stay_near_those_of_a_float_cache(
    model: Path, exact: np.ndarray, kv_type: KvType, kv_rotate: bool
) -> None:
    assert 0 < loss(logits_of(model, kv_type, kv_rotate=kv_rotate), exact) < ALLOWED[kv_type]


def test_rotation_changes_quantised_caches_and_no_others(model: Path) -> None:
    for kv_type in (KvType.F16, KvType.BF16, KvType.TURBO4, KvType.Q8_0):
        on, off = (logits_of(model, kv_type, kv_rotate=kv_rotate) for kv_rotate in (True, False))
        assert np.array_equal(on, off) is (kv_type is not KvType.Q8_0)
