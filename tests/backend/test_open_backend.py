"""Which device a name opens, with and without a GPU and its packages."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvs_core import backend
from kvs_core.errors import BackendUnavailableError, UnsupportedError


def refuse_import(_: str) -> None:
    raise ImportError("No module named 'nvmath'")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine with a GPU and its packages: the numbers of the devices opened."""
    numbers: list[int] = []
    module = SimpleNamespace(
        CudaBackend=lambda index, kernel_files: numbers.append(index) or SimpleNamespace(name=f"cuda:{index}")
    )
    monkeypatch.setattr(backend, "_has_cuda_device", lambda: True)
    monkeypatch.setattr(backend, "import_module", lambda _: module)
    return numbers


@pytest.mark.parametrize(("device", "index"), [("auto", 0), ("cuda", 0), ("cuda:3", 3)])
def test_a_gpu_is_taken_when_there_is_one(opened: list[int], device: str, index: int) -> None:
    assert backend.open_backend(device, n_threads=1).name == f"cuda:{index}"
    assert opened == [index]


def test_the_cpu_is_used_when_asked_for(opened: list[int]) -> None:
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
