"""The CUDA backend's own logic over a driver without a device: order of calls, addresses, counters, nothing left."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")
pytest.importorskip("nvmath", reason="the extra 'cuda' is not installed")

from cuda_kernels.weights import FAST_TYPES
from kvs_core.config import RunConfig
from kvs_core.cuda_support import CUDA_FAST_WEIGHT_TYPES
from kvs_core.model_file import open_model
from kvs_core.model_reader import read_model_shape
from kvs_core.plan import plan_run, with_arena
from kvs_core.session import Session
from kvs_core.units import MIB
from tests.cuda.fake_driver import FakeDriver
from tests.fixtures.tiny_architectures import tiny_architectures
from tests.fixtures.tiny_models import TinyModel, write_model

PROMPT = list(np.random.default_rng(1).integers(3, 259, 1500))
FORCED = list(np.random.default_rng(2).integers(3, 259, 90))


class FakeProducts:
    def __init__(self, workspace_bytes: int) -> None:
        self.workspace_bytes = workspace_bytes

    def multiply(self, **_: int) -> None:
        return

    def close(self) -> None:
        return


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    names = ("device", "copy_engine", "locked_store", "operations", "device_weights", "backend", "recording")
    for name in names:
        monkeypatch.setattr(import_module(f"cuda_kernels.{name}"), "driver", fake)
    launch = import_module("cuda_kernels.launch")
    monkeypatch.setattr(launch.Kernel, "launch", lambda *_: None)
    device, backend = import_module("cuda_kernels.device"), import_module("cuda_kernels.backend")
    stream = SimpleNamespace(handle=0)
    monkeypatch.setattr(device, "cuda", SimpleNamespace(current_context=lambda: None))
    monkeypatch.setattr(backend, "cuda", SimpleNamespace(stream=lambda: stream, to_device=lambda _: None))
    monkeypatch.setattr(import_module("cuda_kernels.operations"), "rope", lambda *_, **__: None)
    monkeypatch.setattr(backend, "open_device", lambda _: SimpleNamespace(name=b"fake"))
    monkeypatch.setattr(backend, "LtProducts", FakeProducts)
    yield fake
    assert not fake.blocks
    assert not fake.registered
    assert not any(fake.live.values()), fake.live


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "cuda.gguf"
    return write_model(path, TinyModel(n_layer=8, n_head=8, n_head_kv=8, head_dim=128, n_ctx_train=4096))


def run(model: Path, arena_mib: int | None, step: int = 1) -> tuple[Any, Any, Any]:
    """A prompt, tokens, another prompt and more tokens; ``None``: the smallest arena."""
    backend = import_module("cuda_kernels.backend").CudaBackend(0)
    with open_model(model) as model_file:
        backend.load_weights(model_file)
        config = RunConfig(model_path=model, n_ctx=2048, n_ubatch=200, page_tokens=64, paranoid=True)
        shape = read_model_shape(model_file)
        free = plan_run(config, shape, backend.budget())
        arena = free.minimum_arena_bytes // MIB if arena_mib is None else arena_mib
        plan = plan_run(with_arena(config, arena * MIB), shape, backend.budget())
        with Session(plan, backend) as session:
            for prompt, forced in ((PROMPT, FORCED[:70]), (PROMPT[:300], FORCED[70:])):
                session.prefill(prompt)
                for begin in range(0, len(forced), step):
                    session.decode(forced[begin : begin + step])
            seconds = (session.engine.copy_seconds, session.engine.wait_seconds) if session.engine else None
            counters = session.counters
    notes = backend.notes
    backend.close()
    return counters, notes, seconds


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
    backend = import_module("cuda_kernels.backend").CudaBackend(0)
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


def test_a_machine_that_refuses_to_lock_memory_works_and_says_so(fake: FakeDriver, model: Path) -> None:
    fake.refuse_locking = True
    counters, notes, _ = run(model, None)
    assert counters.bytes_streamed == counters.predicted_bytes_streamed > 0
    assert len(notes) == 1
    assert "ulimit -l" in notes[0]


@pytest.mark.parametrize("name", ["mistral3", "qwen2", "qwen3"])
def test_other_dense_architectures_ask_for_nothing_that_is_missing(fake: FakeDriver, name: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", replace(tiny_architectures()[name], n_ctx_train=4096))
    counters, _, _ = run(path, 0)
    assert counters.decode_steps == len(FORCED)


def test_the_planner_knows_the_types_that_stay_quantised_on_the_device() -> None:
    assert {weight_type.name for weight_type in FAST_TYPES} == CUDA_FAST_WEIGHT_TYPES
