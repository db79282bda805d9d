"""The authoritative bytes of sealed pages: in host memory or in a file. Which page lies where is the plan's."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from kvs_core.errors import HostStoreError, StateError
from kvs_core.file_creation import check_writable_folder, explain_os_error

_CHUNK_BYTES = 1 << 30  # Linux moves at most 2 GiB in one call


class HostStore(Protocol):
    """Random access to ``n_bytes`` of page storage from raw addresses; safe to call without the interpreter lock."""

    n_bytes: int

    def read(self, offset: int, address: int, n_bytes: int) -> None:
        """Copy store bytes to memory at ``address``; raises HostStoreError."""
        ...

    def write(self, offset: int, address: int, n_bytes: int) -> None:
        """Copy memory at ``address`` into the store; raises HostStoreError."""
        ...

    def close(self) -> None: ...


class _Closing(ABC):
    """Context-manager half of both stores."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RamStore(_Closing):
    """Anonymous host memory. Pages of it become real only when first written, so RSS follows use."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        try:
            self._map: mmap.mmap | None = mmap.mmap(-1, max(n_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise HostStoreError(
                f"host store of {n_bytes} bytes cannot be reserved in memory: {error}",
                hint="lower the context (-c) or give --kv-stream-store PATH",
            ) from error
        anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(anchor)
        del anchor

    def prefer_large_pages(self) -> None:
        """Ask for pages of 2 MiB, for memory that is about to be used as a whole; a system without them is no error."""
        if self._map is not None and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):
                self._map.madvise(mmap.MADV_HUGEPAGE)

    def read(self, offset: int, address: int, n_bytes: int) -> None:
        ctypes.memmove(address, self.locate(offset, n_bytes), n_bytes)

    def write(self, offset: int, address: int, n_bytes: int) -> None:
        ctypes.memmove(self.locate(offset, n_bytes), address, n_bytes)

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None

    def locate(self, offset: int, n_bytes: int) -> int:
        """Address of store bytes; raises StateError when they lie outside, or after close."""
        if self._map is None:
            raise StateError("the host store is closed")
        if offset < 0 or offset + n_bytes > self.n_bytes:
            raise StateError(f"store bytes {offset}..{offset + n_bytes} lie outside its {self.n_bytes} bytes")
        return self.address + offset


class FileStore(_Closing):
    """A scratch file. Its space is reserved at the start and its name removed at once, so nothing is left behind."""

    def __init__(self, path: Path, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self.path = path
        self._fd: int | None = None
        try:
            if path.is_dir():
                self._fd = os.open(path, os.O_TMPFILE | os.O_RDWR, 0o600)
            else:
                self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
                os.unlink(path)
            os.posix_fallocate(self._fd, 0, max(n_bytes, 1))
        except OSError as error:
            self.close()
            raise HostStoreError(_creation_message(path, n_bytes, error), hint=_creation_hint(error)) from error

    def read(self, offset: int, address: int, n_bytes: int) -> None:
        self._transfer(os.preadv, "read", offset, address, n_bytes)

    def write(self, offset: int, address: int, n_bytes: int) -> None:
        self._transfer(os.pwritev, "written", offset, address, n_bytes)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _transfer(
        self, call: Callable[[int, list[Any], int], int], done: str, offset: int, address: int, n_bytes: int
    ) -> None:
        """``call`` moves bytes of the file beside a list of buffers: ``preadv`` or ``pwritev``."""
        if self._fd is None:
            raise StateError("the host store is closed")
        if offset < 0 or offset + n_bytes > self.n_bytes:
            raise StateError(f"store bytes {offset}..{offset + n_bytes} lie outside its {self.n_bytes} bytes")
        moved = 0
        while moved < n_bytes:
            size = min(_CHUNK_BYTES, n_bytes - moved)
            view = (ctypes.c_char * size).from_address(address + moved)
            try:
                count = call(self._fd, [view], offset + moved)
            except OSError as error:
                raise HostStoreError(
                    f"host store {self.path}: {size} bytes at {offset + moved} could not be {done}: {error.strerror}"
                ) from error
            if count == 0:
                raise HostStoreError(f"host store {self.path} ends at {offset + moved}, short of {self.n_bytes} bytes")
            moved += count


def check_store_path(path: Path, n_bytes: int) -> None:
    """Whether a file store of ``n_bytes`` could be made at ``path`` now, without making it; raises HostStoreError."""
    try:
        folder = path if path.is_dir() else path.parent
        if folder is not path and os.path.lexists(path):
            raise _os_error(errno.EEXIST)
        if not stat.S_ISDIR(os.stat(folder).st_mode):
            raise _os_error(errno.ENOTDIR)
        check_writable_folder(folder)
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if limit != resource.RLIM_INFINITY and limit < n_bytes:
            raise _os_error(errno.EFBIG)
        space = os.statvfs(folder)
        if space.f_bavail * space.f_frsize < n_bytes:
            raise _os_error(errno.ENOSPC)
    except OSError as error:
        raise HostStoreError(_creation_message(path, n_bytes, error), hint=_creation_hint(error)) from error


def _os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def _creation_message(path: Path, n_bytes: int, error: OSError) -> str:
    if error.errno == errno.EEXIST:
        return f"host store {path} exists already and is not overwritten"
    if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        return f"host store {path} needs {n_bytes} bytes, more than the file system grants: {error.strerror}"
    return f"host store {path} cannot be created: {explain_os_error(path, error)}"


def _creation_hint(error: OSError) -> str:
    if error.errno == errno.EEXIST:
        return "name a new file or a folder"
    if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        return "free space, choose another place for --kv-stream-store, or lower the context (-c)"
    return "name a new file in a folder that this user may write, or such a folder itself, with --kv-stream-store"


def open_store(n_bytes: int, path: Path | None) -> HostStore:
    """A store in memory, or in a file when a path is given."""
    return RamStore(n_bytes) if path is None else FileStore(path, n_bytes)
