"""Launches that are made again are those that the step itself would have asked for."""

from __future__ import annotations

import ctypes
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")
pytest.importorskip("nvmath", reason="the extra 'cuda' is not installed")

from cuda_kernels import launch_list
from cuda_kernels.launch import address_of
from cuda_kernels.launch_list import KeptSteps, LaunchList, keeping_launches
from kvs_core.config import RunConfig
from kvs_core.devices import DeviceName
from kvs_core.errors import StateError
from kvs_core.model_file import open_model
from kvs_core.model_reader import read_model_shape
from kvs_core.plan import plan_run, with_arena
from kvs_core.session import Session
from tests.fixtures.tiny_models import TinyModel, write_model

PAGE_TOKENS = 64
ARENA_KERNELS = ("sequence", "store", "attention", "merge")
"""Kernels whose parameters are numbers and addresses in the arena; weights lie elsewhere."""
PROMPT = [int(t) for t in np.random.default_rng(1).integers(3, 259, 1000)]
FORCED = [int(t) for t in np.random.default_rng(2).integers(3, 259, 3 * PAGE_TOKENS)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "lists.gguf"
    return write_model(path, TinyModel(n_layer=3, n_head=8, n_head_kv=4, head_dim=128, n_ctx_train=4096))


def shown(arg: Any) -> Any:
    """A parameter as a value that can be compared."""
    if hasattr(arg, "device_ctypes_pointer"):
        return address_of(arg), arg.shape
    return arg if isinstance(arg, int | float) else type(arg).__name__


def decode(monkeypatch: pytest.MonkeyPatch, model: Path, step: int) -> tuple[list[list[Any]], int]:
    """Launches of every decode step, and how many of them were made again."""
    log: list[Any] = []
    counts = {"again": 0}

    def launch(kernel: Any, grid: tuple[int, ...], _: Any, *args: Any, may_overlap: bool = True) -> None:
        if 0 in grid:
            return
        entry = (kernel.name, grid, tuple(shown(arg) for arg in args))
        log.append(entry)
        if launch_list.kept_in is not None:
            launch_list.kept_in.add(entry, (), 0, bytes(8))

    def call(arguments: tuple[Any, ...]) -> None:
        counts["again"] += 1
        log.append(arguments[0])

    monkeypatch.setattr(import_module("cuda_kernels.launch").Kernel, "launch", launch)
    monkeypatch.setattr(import_module("cuda_kernels.operations"), "call_launch", call)
    backend = import_module("cuda_kernels.backend").CudaBackend(DeviceName(kind="cuda"))
    steps = []
    with open_model(model) as model_file:
        backend.load_weights(model_file)
        shape = read_model_shape(model_file)
    config = RunConfig(model_path=model, n_ctx=2048, n_ubatch=200, page_tokens=PAGE_TOKENS, paranoid=True)
    arena = plan_run(config, shape, backend.budget()).minimum_arena_bytes
    with Session(plan_run(with_arena(config, arena), shape, backend.budget()), backend) as session:
        base = session.arena.address
        session.prefill(PROMPT)
        for begin in range(0, len(FORCED), step):
            log.clear()
            session.decode(FORCED[begin : begin + step])
            steps.append([moved(entry, base) for entry in log])
        counters = session.counters
    backend.close()
    assert counters.bytes_streamed == counters.predicted_bytes_streamed > 0
    return steps, counts["again"]


def moved(entry: Any, base: int) -> Any:
    """Addresses counted from the arena's first byte, which lies elsewhere in every run."""
    name, grid, args = entry
    far = 1 << 32

    def relative(value: Any) -> Any:
        if isinstance(value, tuple):
            return relative(value[0]), value[1]
        return value - base if isinstance(value, int) and value > far else value

    return name, grid, tuple(relative(arg) for arg in args)


@pytest.mark.parametrize("step", [1, 4])
def test_replayed_steps_launch_what_they_would_have_asked_for(
    monkeypatch: pytest.MonkeyPatch, fake: Any, model: Path, step: int
) -> None:
    replayed, n_again = decode(monkeypatch, model, step)
    monkeypatch.setattr(KeptSteps, "begin", lambda *_: False)
    asked, none_again = decode(monkeypatch, model, step)
    assert none_again == 0
    assert n_again > len(FORCED) // step * len(asked[0]) // 2, "most steps are replayed"
    for index, (one, other) in enumerate(zip(replayed, asked, strict=True)):
        differ = [(a, b) for a, b in zip(one, other, strict=True) if a[:2] != b[:2]]
        assert not differ, f"step {index}"
        inside = [(a[2], b[2]) for a, b in zip(one, other, strict=True) if any(kind in a[0] for kind in ARENA_KERNELS)]
        assert all(a == b for a, b in inside), f"step {index}"


def test_parts_are_kept_apart_and_parameters_copied() -> None:
    made: list[Any] = []
    launches = LaunchList(made.append)
    values = (ctypes.c_uint64 * 2)(7, 8)
    more = (ctypes.c_uint64 * 1)(5)
    with keeping_launches(launches):
        kept = launch_list.kept_in
        assert kept is not None
        kept.add("zeroth", (1, 1, 1, 32, 1, 1, 0), 5, bytes(more))
        kept.add("first", (1, 1, 1, 32, 1, 1, 0), 5, bytes(values))
        kept.end_part()
        values[0] = 9
        kept.add("second", (2, 1, 1, 32, 1, 1, 0), 5, bytes(values))
    assert launch_list.kept_in is None
    launches.replay(1)
    launches.replay(0)
    assert [arguments[0] for arguments in made] == ["second", "zeroth", "first"]
    pointers = (ctypes.c_void_p * 2).from_address(made[2][-2])
    assert [ctypes.c_uint64.from_address(pointer).value for pointer in pointers] == [7, 8]


def test_a_step_that_does_not_follow_is_no_replay() -> None:
    steps = KeptSteps(lambda _: None)
    steps.keep("key", 10, lambda: None)
    assert not steps.begin("other", 10, 11)
    assert not steps.begin("key", 12, 13)
    assert steps.begin("key", 10, 11)
    steps.replay_part()
    with pytest.raises(StateError, match="more parts"):
        steps.replay_part()
    steps.forget()
    assert not steps.begin("key", 11, 12)
