"""How many processors a run may use: those it may run on, and the time that control groups give it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvs_core import processors
from kvs_core.processors import available_processors, processor_name
from tests.fixtures.control_groups import put_in_groups


def make_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own_groups: str, files: dict[str, str]) -> None:
    """A machine of which the process may use eight processors; ``files`` are those of the control groups, by path."""
    put_in_groups(monkeypatch, tmp_path, own_groups, files)
    monkeypatch.setattr(processors.os, "sched_getaffinity", lambda _: set(range(8)))


@pytest.mark.parametrize(
    ("own_groups", "files", "expected"),
    [
        ("", {}, 8),
        ("0::/\n", {"cpu.max": "max 100000"}, 8),
        ("0::/\n", {"cpu.max": "250000 100000"}, 3),
        ("0::/\n", {"cpu.max": "1000 100000"}, 1),
        ("0::/\n", {"cpu.max": "3200000 100000"}, 8),
        ("0::/job/step\n", {"job/step/cpu.max": "600000 100000", "job/cpu.max": "200000 50000"}, 4),
        ("3:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, 8),
        ("3:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"}, 2),
    ],
)
def test_a_quota_of_time_counts_as_processors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own_groups: str, files: dict[str, str], expected: int
) -> None:
    make_system(monkeypatch, tmp_path, own_groups, files)
    assert available_processors() == expected


def test_a_processor_without_a_name_is_called_by_its_architecture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    description = tmp_path / "cpuinfo"
    description.write_text("processor\t: 0\nmodel name\t: Fast CPU 9000\nmodel name\t: another\n")
    monkeypatch.setattr(processors, "_DESCRIPTION", description)
    assert processor_name() == "Fast CPU 9000"
    description.write_text("processor\t: 0\nmodel name\t:\n")
    assert processor_name() == processors.platform.machine()
    description.unlink()
    assert processor_name() == processors.platform.machine()
