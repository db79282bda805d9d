"""How much host memory a run may take: what the system has free, within the limits of its control groups.

A container, a batch system and systemd limit memory by control groups, of version 1 or 2. The limits of a group hold
for all groups below it, so every one from the process's own up to the root counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """Files of a memory control group, and the line of the last that says how much file cache can be given back."""

    limit: str
    used: str
    statistics: str = "memory.stat"
    cache: str


_VERSION_1 = _Names(limit="memory.limit_in_bytes", used="memory.usage_in_bytes", cache="total_inactive_file")
_VERSION_2 = _Names(limit="memory.max", used="memory.current", cache="inactive_file")


def total_host_bytes() -> int:
    """Memory of the machine, or the smallest limit where that is less."""
    limits = (_read_number(folder / names.limit) for folder, names in _memory_groups())
    return min([int(psutil.virtual_memory().total), *(limit for limit in limits if limit is not None)])


def free_host_bytes() -> int:
    """Memory that can be taken now without swapping, within every limit."""
    free = int(psutil.virtual_memory().available)
    for folder, names in _memory_groups():
        limit, used = _read_number(folder / names.limit), _read_number(folder / names.used)
        if limit is not None and used is not None:
            free = min(free, max(0, limit - used + _reclaimable(folder / names.statistics, names.cache)))
    return free


def _memory_groups() -> Iterator[tuple[Path, _Names]]:
    """Folders of the process's memory control groups, its own first; those that are not mounted here do not exist.

    In a container the path may be that of the host, and the folder of the container's own group be the root.
    """
    for line in _read_text(_OWN_GROUPS).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            root, names = _CGROUP_ROOT, _VERSION_2
        elif "memory" in controllers.split(","):
            root, names = _CGROUP_ROOT / "memory", _VERSION_1
        else:
            continue
        folder = root / path.lstrip("/")
        while folder != root:
            yield folder, names
            folder = folder.parent
        yield root, names


def _read_text(path: Path) -> str:
    """What a file holds; nothing where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_number(path: Path) -> int | None:
    text = _read_text(path).strip()
    return int(text) if text.isdecimal() else None


def _reclaimable(path: Path, name: str) -> int:
    """File cache that the kernel gives back under pressure."""
    values = dict(line.split(" ", 1) for line in _read_text(path).splitlines() if " " in line)
    text = values.get(name, "0").strip()
    return int(text) if text.isdecimal() else 0
