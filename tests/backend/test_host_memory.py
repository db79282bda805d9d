"""Free host memory within the limits of control groups, as files of a made-up system show them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvs_core import host_memory
from kvs_core.units import GIB
from tests.fixtures.control_groups import put_in_groups

MACHINE = SimpleNamespace(total=1000 * GIB, available=900 * GIB)


def make_system(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own_groups: str, files: Mapping[str, object] | None = None
) -> None:
    """A machine of 1000 GiB, 900 of them free; ``files`` are those of the control groups, by path."""
    put_in_groups(monkeypatch, tmp_path, own_groups, files)
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: MACHINE)


def found() -> tuple[float, float]:
    return host_memory.total_host_bytes() / GIB, host_memory.free_host_bytes() / GIB


def group(folder: str, limit: object, used: int, cache: int = 0) -> dict[str, object]:
    """Files of a group of version 2, sizes in GiB."""
    return {
        f"{folder}memory.max": limit if isinstance(limit, str) else int(limit) * GIB,
        f"{folder}memory.current": used * GIB,
        f"{folder}memory.stat": f"anon 5\ninactive_file {cache * GIB}\nactive_file 7",
    }


def test_without_control_groups_the_machine_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_system(monkeypatch, tmp_path, "")
    assert found() == (1000, 900)
    (tmp_path / "own").unlink()
    assert found() == (1000, 900)


def test_a_container_sees_its_group_as_the_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_system(monkeypatch, tmp_path, "0::/\n", group("", 64, used=20, cache=6))
    assert found() == (64, 50)


def test_the_smallest_limit_on_the_way_up_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = {**group("slurm/job/step/", "max", used=1), **group("slurm/job/", 32, used=30, cache=1)}
    files |= {**group("slurm/", 500, used=100), **group("slurm/other/", 2, used=0)}
    make_system(monkeypatch, tmp_path, "0::/slurm/job/step\n", files)
    assert found() == (32, 3)


def test_a_group_that_is_full_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_system(monkeypatch, tmp_path, "0::/\n", group("", 8, used=9))
    assert found() == (8, 0)


@pytest.mark.parametrize("is_mounted_whole", [True, False])
def test_groups_of_version_1_count_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_mounted_whole: bool) -> None:
    """Where a container mounts its own group alone, the path that the host has for it leads nowhere."""
    folder = "memory/docker/1f2e/" if is_mounted_whole else "memory/"
    files: dict[str, object] = {
        f"{folder}memory.limit_in_bytes": 16 * GIB,
        f"{folder}memory.usage_in_bytes": 10 * GIB,
        f"{folder}memory.stat": f"inactive_file 3\ntotal_inactive_file {2 * GIB}",
    }
    if is_mounted_whole:
        files |= {"memory/memory.limit_in_bytes": 2**63 - 4096, "memory/memory.usage_in_bytes": 700 * GIB}
    make_system(monkeypatch, tmp_path, "5:cpu,cpuacct:/docker/1f2e\n4:memory:/docker/1f2e\n0::/docker/1f2e\n", files)
    assert found() == (16, 8)
