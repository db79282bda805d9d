"""The CUDA backend's own logic over a driver without a device: order of calls, addresses, counters, nothing left."""

from __future__ import annotations

import gc
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")
pytest.importorskip("nvmath", reason="the extra 'cuda' is not installed")

from cuda_kernels.weights import FAST_TYPES
from kvs_core.config import RunConfig
from kvs_core.cuda_support import CUDA_FAST_WEIGHT_TYPES
from kvs_core.devices import DeviceName
from kvs_core.model_file import open_model
from kvs_core.model_reader import read_model_shape
from kvs_core.plan import plan_run, with_arena
from kvs_core.session import Session
from kvs_core.units import MIB
from tests.cuda.fake_driver import FakeDriver
from tests.fixtures.tiny_architectures import tiny_architectures
from tests.fixtures.tiny_hybrid_models import tiny_hybrid_models
from tests.fixtures.tiny_latent_models import tiny_latent_models
from tests.fixtures.tiny_models import TinyModel, write_model
from tests.fixtures.tiny_window_models import tiny_window_models

PROMPT = list(np.random.default_rng(1).integers(3, 259, 1500))
FORCED = list(np.random.default_rng(2).integers(3, 259, 90))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "cuda.gguf"
    return write_model(path, TinyModel(n_layer=8, n_head=8, n_head_kv=8, head_dim=128, n_ctx_train=4096))


LONG = ((PROMPT, FORCED[:70]), (PROMPT[:300], FORCED[70:]))
SHORT = ((PROMPT[:300], FORCED[:2]),)


def run(
    model: Path, arena_mib: int | None, step: int = 1, turns: Any = LONG, warms_up: bool = False
) -> tuple[Any, Any, Any]:
    """Prompts and tokens after each; ``None``: the smallest arena."""
    backend = import_module("cuda_kernels.backend").CudaBackend(DeviceName(kind="cuda"))
    with open_model(model) as model_file:
        backend.load_weights(model_file)
        config = RunConfig(model_path=model, n_ctx=2048, n_ubatch=200, page_tokens=64, paranoid=True)
        shape = read_model_shape(model_file)
        free = plan_run(config, shape, backend.budget())
        arena = free.minimum_arena_bytes // MIB if arena_mib is None else arena_mib
        plan = plan_run(with_arena(config, arena * MIB), shape, backend.budget())
        with Session(plan, backend) as session:
            if warms_up:
                session.warm_up()
            for prompt, forced in turns:
                session.prefill(prompt)
                for begin in range(0, len(forced), step):
                    session.decode(forced[begin : begin + step])
            seconds = (session.engine.copy_seconds, session.engine.wait_seconds) if session.engine else None
            counters = session.counters
    notes = backend.notes
    backend.close()
    return counters, notes, seconds


def test_the_budget_says_what_the_choice_of_a_micro_batch_needs(fake: FakeDriver, model: Path) -> None:
    backend = import_module("cuda_kernels.backend").CudaBackend(DeviceName(kind="cuda"))
    with open_model(model) as model_file:
        shape = read_model_shape(model_file)
    config = RunConfig(model_path=model, n_ctx=4096, page_tokens=64)
    off = plan_run(config, shape, backend.budget())
    streamed = plan_run(with_arena(config, off.minimum_arena_bytes), shape, backend.budget())
    backend.close()
    assert streamed.streams
    assert off.n_ubatch == streamed.n_ubatch == 4096  # a head to every K/V head: any smaller one waits for copies


def test_without_an_arena_steps_are_replayed(fake: FakeDriver, model: Path) -> None:
    counters, _, seconds = run(model, 0)
    assert seconds is None
    assert counters.bytes_streamed == 0
    assert fake.n_replays == len(FORCED) - 1  # the first step loads the kernels


@pytest.mark.parametrize("step", [1, 4])
def test_the_smallest_arena_streams_what_was_predicted(fake: FakeDriver, model: Path, step: int) -> None:
    counters, notes, seconds = run(model, None, step)
    assert counters.bytes_streamed == counters.predicted_bytes_streamed > 0
    assert counters.phase_switches == 3
    assert fake.n_replays == 0
    assert notes == ()
    assert seconds[0] > 0


def test_steps_leave_no_python_objects_behind(fake: FakeDriver, model: Path) -> None:
    """Objects that outlive a launch set off garbage collections, which once stopped a prompt for seconds."""
    backend = import_module("cuda_kernels.backend").CudaBackend(DeviceName(kind="cuda"))
    with open_model(model) as model_file:
        backend.load_weights(model_file)
        config = RunConfig(model_path=model, n_ctx=2048, n_ubatch=100, page_tokens=64)
        plan = plan_run(config, read_model_shape(model_file), backend.budget())
    with Session(plan, backend) as session:
        session.prefill(PROMPT[:300])  # three micro-batches of three layers' kernels
        session.clear()
        gc.collect()
        before = len(gc.get_objects())
        session.prefill(PROMPT)
        grown = len(gc.get_objects()) - before
    backend.close()
    assert grown < plan.shape.n_layer * len(plan.ubatches(len(PROMPT)))


@pytest.mark.parametrize("arena_mib", [0, None])
def test_a_warm_up_loads_kernels_and_is_not_seen(fake: FakeDriver, model: Path, arena_mib: int | None) -> None:
    expected, _, _ = run(model, arena_mib, turns=SHORT)
    n_replays = fake.n_replays
    counters, notes, _ = run(model, arena_mib, turns=SHORT, warms_up=True)
    assert counters == expected
    assert notes == ()
    # one replay of its own, and both steps of the run are replayed instead of one
    assert fake.n_replays - n_replays == (n_replays + 2 if arena_mib == 0 else 0)


@pytest.fixture
def small_extents(monkeypatch: pytest.MonkeyPatch) -> int:
    """One extent for each layer of the model; returns how many there are."""
    monkeypatch.setattr(import_module("cuda_kernels.locked_store"), "EXTENT_BYTES", 8 * MIB)
    return 8


def test_a_machine_that_refuses_to_lock_memory_works_and_says_so(
    fake: FakeDriver, model: Path, small_extents: int
) -> None:
    expected, _, _ = run(model, None, turns=SHORT)
    assert fake.n_locks == small_extents
    for granted in range(small_extents):
        fake.n_locks, fake.locks_granted = 0, granted
        counters, notes, _ = run(model, None, turns=SHORT)
        assert counters == expected
        assert len(notes) == 1
        assert f"{granted * 8 / 1024:.2f} of 0.06 GiB are locked" in notes[0]
        assert "ulimit -l" in notes[0]
        assert not fake.registered


WINDOWED = tiny_window_models(n_layer=12, head_dims=(64, 128))


@pytest.mark.parametrize("name", WINDOWED)
def test_steps_with_windows_are_replayed_or_kept(fake: FakeDriver, name: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", replace(WINDOWED[name], n_ctx_train=4096))
    counters, _, _ = run(path, 0)
    assert counters.decode_steps == len(FORCED)
    assert fake.n_replays == len(FORCED) - 1
    counters, _, _ = run(path, None, step=4)
    assert counters.bytes_streamed == counters.predicted_bytes_streamed


@pytest.mark.parametrize("arena_mib", [0, None])
@pytest.mark.parametrize(
    "name",
    [
        *("mistral3", "qwen2", "qwen3", "mixtral", "qwen2moe", "qwen3moe", "qwen35", "qwen35moe"),
        *("gemma2", "gemma3", "gpt-oss", "laguna"),
        *("deepseek-v2", "deepseek-v3"),
    ],
)
def test_other_architectures_ask_for_nothing_that_is_missing(
    fake: FakeDriver, name: str, arena_mib: int | None, tmp_path: Path
) -> None:
    models = tiny_architectures() | tiny_hybrid_models(n_layer=12) | tiny_latent_models(n_layer=12, q_rank=96)
    models |= tiny_window_models(head_dims=(64, 128))
    path = write_model(tmp_path / "model.gguf", replace(models[name], n_ctx_train=4096))
    counters, _, _ = run(path, arena_mib)
    assert counters.decode_steps == len(FORCED)
    if name != "mixtral":  # the workspace of its prefill has room for every page of decode
        assert (counters.bytes_streamed > 0) is (arena_mib is None)
    assert counters.bytes_streamed == counters.predicted_bytes_streamed


def test_the_planner_knows_the_types_that_stay_quantised_on_the_device() -> None:
    assert {weight_type.name for weight_type in FAST_TYPES} == CUDA_FAST_WEIGHT_TYPES
