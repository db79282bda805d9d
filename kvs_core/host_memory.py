"""How much host memory a run may take: what the system has free, within the container's limit."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP_ROOT = Path("/sys/fs/cgroup")


def total_host_bytes() -> int:
    """Memory of the machine, or of the container where that is less."""
    total = int(psutil.virtual_memory().total)
    limit = _read_limit(_CGROUP_ROOT / "memory.max")
    return total if limit is None else min(total, limit)


def free_host_bytes() -> int:
    """Memory that can be taken now without swapping, within the container's limit."""
    free = int(psutil.virtual_memory().available)
    limit = _read_limit(_CGROUP_ROOT / "memory.max")
    used = _read_limit(_CGROUP_ROOT / "memory.current")
    if limit is not None and used is not None:
        cache = _reclaimable(_CGROUP_ROOT / "memory.stat")
        free = min(free, max(0, limit - used + cache))
    return free


def _read_limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(path: Path) -> int:
    """File cache that the kernel gives back under pressure."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(values.get("inactive_file", 0))
