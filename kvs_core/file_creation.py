"""Why a file cannot be made or opened, in words that name the folder when the folder is the reason."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)


def check_writable_folder(folder: Path) -> None:
    """Raises OSError, as making a file there would, when this user may make none in an existing folder."""
    if not os.access(folder, os.W_OK | os.X_OK):
        is_mounted_so = os.access(folder, os.X_OK) and os.statvfs(folder).f_flag & os.ST_RDONLY
        number = errno.EROFS if is_mounted_so else errno.EACCES
        raise OSError(number, os.strerror(number))


def explain_os_error(path: Path, error: OSError) -> str:
    """The reason of ``error``, which came of opening or making the file ``path``, or a nameless file in that folder.

    Asks the file system about the folder only.
    """
    is_folder = os.path.isdir(path)
    folder = path if is_folder else path.parent
    reason = error.strerror or str(error)
    if error.errno == errno.ENOENT and not os.path.lexists(folder):
        return f"there is no folder {folder}"
    if error.errno == errno.ENOTDIR:
        return f"{folder} is not a folder"
    if _is_refused_by_folder(path, error):
        return f"folder {folder} cannot be written ({reason})"
    return reason


def suggest_other_file(path: Path, error: OSError) -> str | None:
    """What to do where the file ``path`` that was named could not be opened, None where there is nothing to say."""
    if error.errno == errno.ENOENT:
        return "check the spelling; a relative path starts where the command runs"
    if error.errno == errno.EISDIR:
        return "name a file, not a folder"
    return suggest_permission(path, error)


def suggest_permission(path: Path, error: OSError) -> str | None:
    """What to change where ``error`` is about permissions, else None."""
    if error.errno not in _REFUSED:
        return None
    if _is_refused_by_folder(path, error):
        return "allow this user to write there, or name a place elsewhere"
    return "allow this user to use the file, or name another one"


def _is_refused_by_folder(path: Path, error: OSError) -> bool:
    if error.errno not in _REFUSED:
        return False
    is_folder = os.path.isdir(path)
    if os.path.lexists(path) and not is_folder:
        return False
    try:
        check_writable_folder(path if is_folder else path.parent)
    except OSError:
        return True
    return False
