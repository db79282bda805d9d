"""A CUDA backend whose driver has no device behind it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest


class FakeProducts:
    def __init__(self, workspace_bytes: int) -> None:
        self.workspace_bytes = workspace_bytes

    def multiply(self, **_: int) -> None:
        return

    def close(self) -> None:
        return


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The driver in place of the real one, on a device of its ``generation``; compiling gives code of two bytes."""
    fake = import_module("tests.cuda.fake_driver").FakeDriver()
    names = ("device", "copy_engine", "locked_store", "operations", "device_weights", "backend", "recording", "cubin")
    for name in names:
        monkeypatch.setattr(import_module(f"cuda_kernels.{name}"), "driver", fake)
    launch, cubin = import_module("cuda_kernels.launch"), import_module("cuda_kernels.cubin")
    take = launch.Kernel._take

    def compile_cubin(function: Any, *_: object, **__: object) -> Any:
        fake.compiled.append(function.__name__)
        return cubin.Cubin(entry=function.__name__, code=b"ok")

    def take_and_remember(kernel: Any, code: Any) -> None:
        take(kernel, code)
        fake.loaded.append(kernel)

    monkeypatch.setattr(launch.Kernel, "launch", lambda kernel, *_, **__: fake.launched.append(kernel))
    monkeypatch.setattr(launch.Kernel, "_take", take_and_remember)
    monkeypatch.setattr(launch, "compile_cubin", compile_cubin)
    monkeypatch.setattr(launch, "_current_generation", lambda: fake.generation)
    monkeypatch.setattr(launch, "_current_multiprocessors", lambda: 132)
    monkeypatch.setattr(launch, "_files", None)
    device, backend = import_module("cuda_kernels.device"), import_module("cuda_kernels.backend")
    stream = SimpleNamespace(handle=0)
    monkeypatch.setattr(device, "cuda", SimpleNamespace(current_context=lambda: None))
    monkeypatch.setattr(
        backend,
        "cuda",
        SimpleNamespace(stream=lambda: stream, to_device=lambda values: SimpleNamespace(shape=values.shape)),
    )
    for name in ("rope", "rotate_store"):
        monkeypatch.setattr(import_module(f"cuda_kernels.{name}"), "check_array", lambda *_: None)
        monkeypatch.setattr(import_module(f"cuda_kernels.{name}"), "address_of", lambda _: 0, raising=False)
    monkeypatch.setattr(
        backend, "open_device", lambda _: SimpleNamespace(name=b"fake", id=0, compute_capability=fake.generation)
    )
    monkeypatch.setattr(backend, "LtProducts", FakeProducts)
    yield fake
    fake.forget_kernels()
    assert not fake.blocks
    assert not fake.registered
    assert not any(fake.live.values()), fake.live
