"""How much host memory a run may take: what the system has free, within the limits of its control groups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from kvs_core.control_groups import find_groups, read_number, read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """Files of a memory group, and the line of its statistics that says how much file cache can be given back."""

    limit: str
    used: str
    cache: str


_NAMES = {
    1: _Names(limit="memory.limit_in_bytes", used="memory.usage_in_bytes", cache="total_inactive_file"),
    2: _Names(limit="memory.max", used="memory.current", cache="inactive_file"),
}


def total_host_bytes() -> int:
    """Memory of the machine, or the smallest limit where that is less."""
    limits = (read_number(folder / _NAMES[version].limit) for folder, version in find_groups("memory"))
    return min([int(psutil.virtual_memory().total), *(limit for limit in limits if limit is not None)])


def free_host_bytes() -> int:
    """Memory that can be taken now without swapping, within every limit."""
    free = int(psutil.virtual_memory().available)
    for folder, version in find_groups("memory"):
        names = _NAMES[version]
        limit, used = read_number(folder / names.limit), read_number(folder / names.used)
        if limit is not None and used is not None:
            free = min(free, max(0, limit - used + _reclaimable(folder, names.cache)))
    return free


def _reclaimable(folder: Path, name: str) -> int:
    """File cache that the kernel gives back under pressure."""
    lines = read_text(folder / "memory.stat").splitlines()
    values = dict(line.split(" ", 1) for line in lines if " " in line)
    text = values.get(name, "0").strip()
    return int(text) if text.isdecimal() else 0
