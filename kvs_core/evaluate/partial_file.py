"""Writing a large file so that its final name never holds half of it. Bytes and names only; no formats."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvs_core.errors import ConfigError, FileAccessError
from kvs_core.file_creation import check_writable_folder, explain_os_error, suggest_other_file

PARTIAL_SUFFIX = ".partial"


def partial_path(path: Path) -> Path:
    """Where the bytes of ``path`` grow until they are complete: beside the file that a link leads to."""
    target = _target(path)
    return target.with_name(target.name + PARTIAL_SUFFIX)


def _target(path: Path) -> Path:
    """The file itself where ``path`` is a symbolic link, so that the link stays and only its file is replaced."""
    return Path(os.path.realpath(path))


def check_output_path(path: Path, *, inputs: Iterable[Path]) -> None:
    """Refuse, before any work, a name whose replacement would destroy something.

    inputs  files that the same command reads; one that does not exist is somebody else's error
    Raises  FileAccessError when ``path`` is a folder, device or pipe or has no folder that it could be made in,
            ConfigError when it is one of ``inputs``
    """
    with reporting_os_errors(path):
        folder = _target(path).parent
        if not folder.is_dir():
            raise FileAccessError(f"{path}: there is no folder {path.parent}", hint="create it or name another file")
        with reporting_os_errors(partial_path(path)):
            check_writable_folder(folder)
        if not path.exists():
            return
        if not path.is_file():
            kind = "a directory" if path.is_dir() else "not a regular file"
            raise FileAccessError(f"{path}: is {kind}", hint="name a file")
        for read in inputs:
            if read.exists() and path.samefile(read):
                raise ConfigError(f"{path}: would overwrite {read}, which this command reads", hint="name another file")


def check_free_space(path: Path, *, needed_bytes: int, what: str) -> None:
    """Refuse before any work when the file system that holds ``path`` has less than ``needed_bytes`` left.

    Raises  FileAccessError with both figures; also when the folder does not exist or ``path`` is a folder.
    """
    folder = partial_path(path).parent
    if path.is_dir():
        raise FileAccessError(f"{path}: is a directory", hint="name a file")
    try:
        status = os.statvfs(folder)
    except OSError as error:
        raise FileAccessError(f"{folder}: {error.strerror}", hint="create the folder or name another file") from error
    free = status.f_bavail * status.f_frsize
    if free < needed_bytes:
        raise FileAccessError(
            f"{path}: {what} needs {needed_bytes} bytes more, {free} are free",
            hint="free space, choose another folder, lower --chunks, or use --kld-format kvs",
        )


@contextlib.contextmanager
def reporting_os_errors(path: Path) -> Iterator[None]:
    """Turn an operating system error on ``path`` into one FileAccessError line."""
    try:
        yield
    except FileAccessError:
        raise
    except OSError as error:
        raise FileAccessError(f"{path}: {explain_os_error(path, error)}", hint=_hint(path, error)) from error


def _hint(path: Path, error: OSError) -> str | None:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space and run the same command again: finished chunks are kept"
    if error.errno == errno.EFBIG:
        return "raise the limit (ulimit -f), or name a place on a file system that takes larger files"
    return suggest_other_file(path, error)


class PartialFile:
    """A file that grows under a temporary name and gets its own name in one step at the end.

    Another process writing the same file is refused by a lock on the temporary one, which the kernel drops however the
    process ends. ``close`` without ``publish`` keeps the temporary file when a later run can go on with it: when it was
    synced since its start, or holds what an earlier run left; never with ``keeps`` False.
    """

    def __init__(self, path: Path, *, keeps: bool = True) -> None:
        self.path = path
        self.partial = partial_path(path)
        self._keeps = keeps
        with reporting_os_errors(self.partial):
            self._file = open_or_create(self.partial)
            try:
                if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                    raise FileAccessError(f"{self.partial}: is not a regular file", hint="name another file")
                lock_or_refuse(self._file.fileno(), self.partial)
            except BaseException:
                self._file.close()
                raise
        self._is_useful = self._file.seek(0, os.SEEK_END) > 0

    def __enter__(self) -> PartialFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def n_bytes(self) -> int:
        """Bytes written so far; the next ``write`` continues here."""
        return self._file.tell()

    def truncate(self, n_bytes: int) -> None:
        """Drop everything from ``n_bytes`` on (an unfinished chunk of an earlier run) and continue there."""
        with reporting_os_errors(self.partial):
            self._file.seek(n_bytes)
            self._file.truncate()
        self._is_useful = n_bytes > 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append; raises FileAccessError when not every byte could be written."""
        with reporting_os_errors(self.partial):
            write_all(self._file, data)

    def read_at(self, offset: int, n_bytes: int) -> bytes:
        """Bytes written earlier, fewer when the file ends before; the write position stays."""
        with reporting_os_errors(self.partial):
            return os.pread(self._file.fileno(), n_bytes, offset)

    def sync(self) -> None:
        """Return only when everything written so far is on the disk."""
        with reporting_os_errors(self.partial):
            os.fsync(self._file.fileno())
        self._is_useful = True

    def publish(self) -> None:
        """Sync, give the file its final name (replacing an older file) and close it."""
        self.sync()
        with reporting_os_errors(self.path):
            os.replace(self.partial, _target(self.path))
            sync_folder(self.partial.parent)
        self._file.close()

    def close(self) -> None:
        """May be called twice; removes what is not to be kept. Writes are unbuffered: nothing is lost here."""
        if not self._file.closed:
            if not (self._keeps and self._is_useful):
                self.partial.unlink(missing_ok=True)
            self._file.close()


def open_or_create(path: Path) -> io.FileIO:
    """Open for reading and writing without truncating and without a buffer; the caller closes it."""
    return io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+")


def write_all(file: io.FileIO, data: bytes | bytearray | memoryview) -> None:
    """Write every byte or raise OSError."""
    rest = memoryview(data).cast("B")
    while rest.nbytes:
        rest = rest[file.write(rest) or 0 :]


def lock_or_refuse(descriptor: int, path: Path) -> None:
    """Hold an open file against other processes for as long as it is open.

    Between opening and locking, another run may have renamed or removed the file: then the lock is on its finished
    result, which must not be touched.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = os.path.samestat(os.fstat(descriptor), os.stat(path))
    except (BlockingIOError, FileNotFoundError):
        is_ours = False
    if not is_ours:
        raise FileAccessError(f"{path}: another run is writing it", hint="wait for that run, or use another file")


def sync_folder(folder: Path) -> None:
    """Make a rename or a new name durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
