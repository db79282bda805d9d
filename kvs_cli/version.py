"""The version of the toolkit."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "kvs-toolkit"


def read_version() -> str:
    """The installed version; a source tree that is not installed has none."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "(not installed)"
