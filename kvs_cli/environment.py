"""The environment variables this toolkit reads, all of them. A flag beats its variable; an empty one is unset."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

PREFIX = "KVS_"

VARIABLES: Mapping[str, tuple[str, str]] = {
    "KVS_MODEL": ("model_path", "the model, like -m"),
    "KVS_DEVICE": ("device", "the device, like --device"),
    "KVS_THREADS": ("n_threads", "CPU threads, like -t"),
    "KVS_KV_STREAM_ARENA_MIB": ("arena", "the arena, like --kv-stream-arena-mib"),
}
"""Variable -> the value it sets and what to say about it."""

OTHER_VARIABLES: Mapping[str, str] = {
    "KVS_CACHE_DIR": "where compiled kernels and finished chunks are kept; otherwise XDG_CACHE_HOME or ~/.cache",
    "NO_COLOR": "no colours",
}
"""Variables that no flag stands for; TERM=dumb also means no colours."""


def read_environment(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """dest -> (variable, its text) for every variable of ours that is set and not empty."""
    return {dest: (name, environ[name]) for name, (dest, _) in VARIABLES.items() if environ.get(name)}


def find_unknown(environ: Mapping[str, str]) -> str | None:
    """A line about variables that look like ours and are none; None when there are no such."""
    known = [name for name in (*VARIABLES, *OTHER_VARIABLES) if name.startswith(PREFIX)]
    unknown = sorted(name for name, value in environ.items() if name.startswith(PREFIX) and value and name not in known)
    if not unknown:
        return None
    return f"{', '.join(unknown)} in the environment: not known and ignored; known: {', '.join(known)}"


def wants_colour(environ: Mapping[str, str]) -> bool:
    """Whether a terminal may get colours: not under NO_COLOR, nor on one that calls itself dumb."""
    return not environ.get("NO_COLOR") and rewrites_lines(environ)


def rewrites_lines(environ: Mapping[str, str]) -> bool:
    """Whether the terminal understands more than plain lines."""
    return environ.get("TERM", "") not in ("", "dumb")


def cache_root(environ: Mapping[str, str]) -> Path:
    """The folder that ``kvs/`` with files that may be lost lies in; without a home it is the temporary folder."""
    if environ.get("KVS_CACHE_DIR"):
        return Path(os.path.expanduser(environ["KVS_CACHE_DIR"]))
    root = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(root):  # the base directory specification asks for relative paths to be ignored
        return Path(root)
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        return Path(tempfile.gettempdir())


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Where files that may be lost are kept."""
    return cache_root(environ) / "kvs"
