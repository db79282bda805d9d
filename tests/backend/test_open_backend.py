"""Which device a name opens, with and without a GPU and its packages."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvs_core import backend
from kvs_core.cpu.arena import CpuArena
from kvs_core.devices import DeviceName
from kvs_core.errors import BackendUnavailableError, DeviceMemoryError, UnsupportedError


def refuse_import(_: str) -> None:
    raise ImportError("No module named 'nvmath'")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[DeviceName]:
    """A machine with a GPU and its packages: the devices opened."""
    wanted: list[DeviceName] = []
    module = SimpleNamespace(
        CudaBackend=lambda name, kernel_files: wanted.append(name) or SimpleNamespace(name="cuda:0")
    )
    monkeypatch.setattr(backend, "_has_cuda_device", lambda: True)
    monkeypatch.setattr(backend, "import_module", lambda _: module)
    return wanted


@pytest.mark.parametrize(
    ("device", "index", "uuid"),
    [("auto", 0, None), ("cuda", 0, None), ("cuda:3", 3, None), ("cuda:GPU-8932f937", 0, "GPU-8932f937")],
)
def test_a_gpu_is_taken_when_there_is_one(opened: list[DeviceName], device: str, index: int, uuid: str | None) -> None:
    assert backend.open_backend(device, n_threads=1).name == "cuda:0"
    assert [(name.index, name.uuid) for name in opened] == [(index, uuid)]


def test_the_cpu_is_used_when_asked_for(opened: list[DeviceName]) -> None:
    assert backend.open_backend("cpu", n_threads=1).name == "cpu"
    assert opened == []


def test_auto_without_a_gpu_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_has_cuda_device", lambda: False)
    found = backend.open_backend("auto", n_threads=1)
    assert (found.name, found.notes) == ("cpu", ())


def test_auto_without_the_packages_is_the_cpu_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_has_cuda_device", lambda: True)
    monkeypatch.setattr(backend, "import_module", refuse_import)
    found = backend.open_backend("auto", n_threads=1)
    assert found.name == "cpu"
    assert len(found.notes) == 1
    assert "nvmath" in found.notes[0]


def test_a_gpu_that_was_asked_for_needs_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "import_module", refuse_import)
    with pytest.raises(BackendUnavailableError, match="nvmath"):
        backend.open_backend("cuda:1", n_threads=1)


def test_other_names_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="rocm"):
        backend.open_backend("rocm", n_threads=1)


def test_auto_is_resolved_to_what_would_be_opened(opened: list[DeviceName], monkeypatch: pytest.MonkeyPatch) -> None:
    assert [backend.resolve_device(name) for name in ("auto", "cpu", "cuda:3")] == ["cuda", "cpu", "cuda:3"]
    monkeypatch.setattr(backend, "import_module", refuse_import)
    assert backend.resolve_device("auto") == "cpu"
    monkeypatch.setattr(backend, "_has_cuda_device", lambda: False)
    assert backend.resolve_device("auto") == "cpu"
    assert opened == []


@pytest.mark.parametrize("n_bytes", [1 << 60, 1 << 70])
def test_memory_that_the_system_refuses_says_what_to_lower(n_bytes: int) -> None:
    with pytest.raises(DeviceMemoryError, match=f"^{n_bytes} bytes for KV cache and workspace cannot be al") as caught:
        CpuArena(n_bytes)
    assert caught.value.hint is not None
    assert "(-c)" in caught.value.hint
