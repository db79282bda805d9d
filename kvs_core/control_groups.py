"""The control groups that a process is in, of version 1 or 2: how containers, batch systems and systemd limit it.

What a limit means is host_memory.py's and processors.py's subject.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def find_groups(controller: str) -> Iterator[tuple[Path, int]]:
    """(folder, version) of every group whose limits hold for the process: its own first, then those above it.

    A folder need not exist: in a container the path may be the host's, and the folder of the own group be the root.
    """
    for line in read_text(OWN_GROUPS).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            root, version = ROOT, 2
        elif controller in controllers.split(","):
            root, version = ROOT / controller, 1
        else:
            continue
        folder = root / path.lstrip("/")
        while folder != root:
            yield folder, version
            folder = folder.parent
        yield root, version


def read_text(path: Path) -> str:
    """What a file holds; nothing where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def read_number(path: Path) -> int | None:
    """The one number a file holds; None where it holds none, such as ``max``."""
    text = read_text(path).strip()
    return int(text) if text.isdecimal() else None
