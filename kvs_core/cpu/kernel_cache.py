"""Where compiled CPU kernels are kept between runs, and how often that helped. No kernel lives here.

Numba's own disk cache notices edits in the file of the cached function only, not in the functions it calls. So
the folder's name carries a hash of every source in this package, of the compiler's version and of the processor.

    <cache root>/kvs/kernels/<hash>/
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile

from kvs_core.errors import StateError
from kvs_core.kernel_files import use_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCache:
    """Outcome of choosing a cache folder.

    path      the folder in use; None when nothing can be kept, so that kernels compile at every start
    warning   one sentence for the user when ``path`` is None
    """

    path: Path | None
    warning: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCacheCounts:
    """Kernels of this process: taken from disk, compiled, and compiled but not kept because writing failed.

    unsaved_reason   why the last of those could not be written; None when all were
    """

    n_loaded: int
    n_compiled: int
    n_unsaved: int
    unsaved_reason: str | None = None


_config: Any = numba.config  # its settings are created at run time, so type checkers do not see them
_FunctionCache: Any = FunctionCache
_CacheFile: Any = IndexDataCacheFile

_chosen: KernelCache | None = None
_chosen_root: Path | None = None
_dispatchers: list[Any] = []
_n_unsaved = 0
_unsaved_reason: str | None = None
_report_compilation: Callable[[], None] | None = None


def configure_kernel_cache(cache_root: Path) -> KernelCache:
    """Keep compiled kernels below ``cache_root``; call it before any kernel module is imported.

    Calling it again with the same root returns the same value. Without a call, the first kernel module chooses
    ``~/.cache``.
    Raises  StateError when kernels were already set up with another root.
    """
    global _chosen, _chosen_root
    if _chosen is not None:
        if cache_root != _chosen_root:
            raise StateError(
                f"kernel cache root {cache_root} comes too late: kernels already use {_chosen_root}",
                hint="call configure_kernel_cache before importing kernel modules",
            )
        return _chosen
    _chosen_root = cache_root
    _chosen = _open_folder(cache_root / "kvs" / "kernels" / _sources_hash())
    return _chosen


def report_compilation(report: Callable[[], None]) -> None:
    """Call ``report`` once, when the first kernel that the folder does not hold begins to compile.

    A processor, a weight type or a KV type that was not used before makes some compile, which may take half a minute.
    """
    global _report_compilation
    _report_compilation = report


def _open_folder(path: Path) -> KernelCache:
    try:
        use_folder(path)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        warning = f"kernel cache {path} cannot be written ({reason}): kernels are compiled again at every start"
        return KernelCache(path=None, warning=warning)
    return KernelCache(path=path, warning=None)


def _sources_hash() -> str:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode())
        digest.update(source.read_bytes())
    features = llvm.get_host_cpu_features().flatten()
    for part in (numba.__version__, llvmlite.__version__, llvm.get_host_cpu_name(), features):
        digest.update(part.encode())
    return digest.hexdigest()[:16]


_DAMAGED = (EOFError, pickle.UnpicklingError)


class _KernelCacheFile(_CacheFile):  # type: ignore[misc]
    """Numba's index of a kernel's compiled signatures, except that no two of them ever have a file of one name.

    Numba counts: two processes that compile a kernel for different types at the same time, neither of which sees the
    other's entry, write one file, and the index gives the machine code of one for the types of the other.
    """

    def _data_name(self, number: int) -> str:
        return str(super()._data_name(number)).removesuffix(".nbc") + f".{uuid.uuid4().hex[:16]}.nbc"


class _KernelFunctionCache(_FunctionCache):  # type: ignore[misc]
    """Numba's disk cache, except that a full, vanished or damaged disk costs a compilation, not this run."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        locator, base = self._impl.locator, self._impl.filename_base
        self._cache_file = _KernelCacheFile(self._cache_path, base, locator.get_source_stamp())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        global _report_compilation
        found = self._load(sig, target_context)
        if found is None and _report_compilation is not None:  # the compiler's lock is held: no other thread is here
            report, _report_compilation = _report_compilation, None
            report()
        return found

    def _load(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except OSError:
            return None
        except _DAMAGED:
            self._forget_all()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        global _n_unsaved, _unsaved_reason
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _n_unsaved += 1
            _unsaved_reason = error.strerror or str(error)

    def _forget_all(self) -> None:
        """Empty the index, so that what is compiled now can be kept."""
        with contextlib.suppress(OSError):  # saving will fail too, and is counted
            self.flush()


def cached_njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """``numba.njit(**options)`` for the entry points of kernels: released GIL, kept on disk, counted."""
    cache = _chosen or configure_kernel_cache(Path.home() / ".cache")

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = njit(nogil=True, **options)(function)
        if cache.path is not None:
            # The folder is fixed when the cache object is made; the setting goes back to what the process had.
            previous = _config.CACHE_DIR
            _config.CACHE_DIR = str(cache.path)
            try:
                dispatcher._cache = _KernelFunctionCache(dispatcher.py_func)
            finally:
                _config.CACHE_DIR = previous
        _dispatchers.append(dispatcher)
        return dispatcher

    return decorate


def kernel_cache_counts() -> KernelCacheCounts:
    """How many kernels were loaded and compiled so far; one kernel counts once per specialisation."""
    statistics = [dispatcher.stats for dispatcher in _dispatchers]
    return KernelCacheCounts(
        n_loaded=sum(sum(entry.cache_hits.values()) for entry in statistics),
        n_compiled=sum(sum(entry.cache_misses.values()) for entry in statistics),
        n_unsaved=_n_unsaved,
        unsaved_reason=_unsaved_reason,
    )


def find_unsaved_note() -> str | None:
    """A sentence for the user about kernels that could not be kept; None when there are none."""
    counts = kernel_cache_counts()
    if not counts.n_unsaved:
        return None
    folder = "the kernel cache" if _chosen is None or _chosen.path is None else f"kernel cache {_chosen.path}"
    return (
        f"{folder}: {counts.n_unsaved} of {counts.n_compiled} compiled kernels could not be written "
        f"({counts.unsaved_reason}); the next start compiles them again"
    )
