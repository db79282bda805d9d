"""How many processors a run may use, and what they are called."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from kvs_core.control_groups import find_groups, read_number, read_text
from kvs_core.units import ceil_div

_DESCRIPTION = Path("/proc/cpuinfo")


def available_processors() -> int:
    """Processors that this process may run on, or as many as its control groups give it the time of, rounded up."""
    quotas = (_read_quota(folder, version) for folder, version in find_groups("cpu"))
    return min([len(os.sched_getaffinity(0)), *(quota for quota in quotas if quota is not None)])


def processor_name() -> str:
    """What the system calls the processor; the machine's architecture where it has no name for it."""
    lines = read_text(_DESCRIPTION).splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(filter(None, named), platform.machine())


def _read_quota(folder: Path, version: int) -> int | None:
    """Whole processors that a group may keep busy, at least one; None where it has no limit."""
    if version == 2:
        words = read_text(folder / "cpu.max").split()
        quota, period = (int(word) if word.isdecimal() else 0 for word in (*words, "", "")[:2])
    else:
        quota = read_number(folder / "cpu.cfs_quota_us") or 0
        period = read_number(folder / "cpu.cfs_period_us") or 0
    return ceil_div(quota, period) if quota and period else None
