"""Compiled kernels on disk between runs: folders that come and go with versions, files that prove they are whole.

    <cache root>/kvs/kernels/<hash>/               CPU kernels, written by Numba
    <cache root>/kvs/cuda-kernels/<hash>/NAME      CUDA kernels, written here

Any file may vanish or be damaged at any time, and several processes may use a folder at once. What cannot be read is
compiled again; what cannot be written is said once. What a kernel is, and what its folder's hash covers, is decided
elsewhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

KEPT_FOLDERS = 4
"""Folders of a kind that stay, the latest used ones: a few versions or environments side by side."""

_FOLDER_NAME = re.compile(r"[0-9a-f]{16}")
_MAGIC = b"kvs kernel 1\n"
_CHECKSUM_BYTES = hashlib.sha256().digest_size
_TEMPORARY_PREFIX = ".new-"
_TEMPORARY_SECONDS = 3600  # no kernel takes an hour to write: an older file was left by a process that died


def use_folder(path: Path) -> None:
    """Make a folder of kernels, mark it as used now, and delete those beside it that were not used for longest.

    Raises  OSError when the folder cannot be made; failing to tidy up is no error.
    """
    path.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):
        os.utime(path)
        _delete_old_folders(path.parent, keep=path.name)


def _delete_old_folders(parent: Path, *, keep: str) -> None:
    used: list[tuple[float, Path]] = []
    for entry in os.scandir(parent):
        if _FOLDER_NAME.fullmatch(entry.name) and entry.name != keep and entry.is_dir(follow_symlinks=False):
            used.append((entry.stat().st_mtime, Path(entry.path)))
    for _, folder in sorted(used, reverse=True)[KEPT_FOLDERS - 1 :]:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFilesState:
    """What is kept for one version of the kernels.

    path        their folder, which may not exist yet
    n_kernels   whole files in it, by name and not by content
    n_bytes     their size
    n_matching  those among them for the device that was asked about
    """

    path: str
    n_kernels: int
    n_bytes: int
    n_matching: int


class KernelFiles:
    """Compiled CUDA kernels by name. ``report`` gets one line when kernels are about to be compiled.

    ``select`` comes first: it chooses the folder by a hash of everything that decides how kernels are compiled.
    """

    def __init__(self, cache_root: Path, *, report: Callable[[str], None]) -> None:
        self.report = report
        self.warning: str | None = None
        self._parent = cache_root / "kvs" / "cuda-kernels"
        self._folder = self._parent

    def select(self, version_hash: str) -> None:
        """Use the folder of this version. ``version_hash``: 16 hexadecimal digits."""
        self._folder = self._parent / version_hash
        try:
            use_folder(self._folder)
            self._delete_left_files()
        except OSError as error:
            self._warn(error)

    def read(self, name: str) -> bytes | None:
        """The bytes that were written under this name; None if there are none, or not all of them."""
        try:
            stored = (self._folder / name).read_bytes()
        except OSError:
            return None
        begin = len(_MAGIC) + _CHECKSUM_BYTES
        content = stored[begin:]
        is_whole = stored[:begin] == _MAGIC + hashlib.sha256(content).digest()
        return content if is_whole else None

    def write(self, name: str, content: bytes) -> None:
        """Keep bytes under a name. Readers see the old file or the new one; the last of several writers wins."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)  # another process may have tidied it away
            descriptor, temporary = tempfile.mkstemp(prefix=_TEMPORARY_PREFIX, dir=self._folder)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(_MAGIC + hashlib.sha256(content).digest() + content)
                os.replace(temporary, self._folder / name)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            self._warn(error)

    def state(self, prefix: str) -> KernelFilesState:
        """What the selected folder holds, and how much of it under names that begin with ``prefix``."""
        sizes: dict[str, int] = {}
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._folder):
                if not entry.name.startswith(_TEMPORARY_PREFIX):
                    sizes[entry.name] = entry.stat().st_size
        return KernelFilesState(
            path=str(self._folder),
            n_kernels=len(sizes),
            n_bytes=sum(sizes.values()),
            n_matching=sum(name.startswith(prefix) for name in sizes),
        )

    def _delete_left_files(self) -> None:
        oldest = time.time() - _TEMPORARY_SECONDS
        for entry in os.scandir(self._folder):
            if entry.name.startswith(_TEMPORARY_PREFIX) and entry.stat().st_mtime < oldest:
                os.unlink(entry.path)

    def _warn(self, error: OSError) -> None:
        if self.warning is None:
            reason = error.strerror or str(error)
            self.warning = (
                f"kernel cache {self._folder} cannot be written ({reason}): "
                "CUDA kernels are compiled again at every start"
            )
