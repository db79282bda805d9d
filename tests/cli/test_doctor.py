"""``kvs doctor`` without a GPU: refusals with exit code 5; with a report, the table and the document."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from kvs_core.devices import DeviceName
from kvs_core.errors import BackendUnavailableError
from kvs_core.kernel_files import KernelFiles, KernelFilesState
from tests.cli.conftest import Kvs

KEPT = KernelFilesState(path="/cache", n_kernels=23, n_bytes=700_000, n_matching=21)


@dataclass(frozen=True, kw_only=True)
class Report:
    name: str = "Some GPU"
    driver_version: str = "580.1"
    compute_capability: str = "9.0"
    n_multiprocessors: int = 132
    total_bytes: int = 140 << 30
    free_bytes: int = 139 << 30
    link_generation: int | None = 5
    link_width: int | None = 16
    host_to_device_rate: float = 55.4e9
    device_to_host_rate: float = 55.1e9
    device_memory_rate: float = 4e12
    page_lock_rate: float = 2.6e9
    page_lock_limit_bytes: int | None = None
    page_lock_note: str | None = None
    first_kernel_seconds: float = 0.8
    kernel_cache: KernelFilesState = KEPT
    kernel_cache_warning: str | None = None


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> list[int | str]:
    """Device numbers that were asked for; number 3 is not there."""
    asked: list[int | str] = []

    def examine_device(wanted: DeviceName, kernel_files: KernelFiles) -> object:
        assert kernel_files.warning is None
        asked.append(wanted.uuid or wanted.index)
        if wanted.index == 3:
            raise BackendUnavailableError("device cuda:3: this machine has 1 CUDA device", hint="give a smaller number")
        return report

    @dataclass(frozen=True, kw_only=True)
    class Full(Report):
        versions: dict[str, str]

    report = Full(versions={"numba": "0.68.0"})
    module = SimpleNamespace(examine_device=examine_device)
    monkeypatch.setattr("kvs_cli.doctor.import_module", lambda _: module)
    return asked


def test_the_table_names_rates_and_ends_with_the_verdict(kvs: Kvs, examined: list[int | str]) -> None:
    finished = kvs("doctor")
    assert finished.code == 0
    assert "Some GPU" in finished.text
    assert "55.4 GB/s" in finished.text
    assert "/cache: 23 kernels, 683.59 KiB, 21 of them for this device" in finished.text
    assert finished.text.endswith("can work\n")
    assert examined == [0]


def test_json_holds_the_plain_numbers(kvs: Kvs, examined: list[int | str]) -> None:
    finished = kvs("doctor", "--json", "--device", "cuda:2")
    document = json.loads(finished.text)
    assert document["command"] == "doctor"
    assert document["device"]["host_to_device_rate"] == 55.4e9
    assert document["device"]["kernel_cache"]["n_matching"] == 21
    assert examined == [2]


def test_a_missing_device_is_exit_code_5(kvs: Kvs, examined: list[int | str]) -> None:
    assert kvs("doctor", "--device", "cuda:3").code == 5


def test_the_cpu_is_not_a_gpu(kvs: Kvs, examined: list[int | str]) -> None:
    assert kvs("doctor", "--device", "cpu").code == 2
    assert examined == []


def test_a_missing_package_is_named(kvs: Kvs, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise ImportError("No module named 'nvmath'")

    monkeypatch.setattr("kvs_cli.doctor.import_module", fail)
    finished = kvs("doctor")
    assert finished.code == 5
    assert "nvmath" in finished.err


def test_a_device_can_be_named_by_its_uuid(kvs: Kvs, examined: list[int | str]) -> None:
    assert kvs("doctor", "--device", "cuda:GPU-8932f937").code == 0
    assert kvs("doctor", "--device", "auto").code == 0
    assert examined == ["GPU-8932f937", 0]
    assert kvs("doctor", "--device", "cuda:MIG-12").code == 2
