"""The threads that CPU kernels run on. Kernels get their number of threads as an argument; this opens the pool."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numba

from kvs_core.errors import ConfigError, Problem

_config: Any = numba.config  # its settings are created at run time, so type checkers do not see them

# OpenMP starts a parallel loop in 1.4 microseconds on two Zen 5 cores, Numba's own pool in 79; a decoded token
# has hundreds. The module needs libgomp, which most systems have.
_FAST_LAYER = "omp"
_PORTABLE_LAYER = "workqueue"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadTeam:
    """Threads in use, and what the user should hear about them.

    n_threads   what kernels run with; at most the processors of this process
    layer       Numba's threading layer
    warnings    one sentence each
    """

    n_threads: int
    layer: str
    warnings: tuple[str, ...]


def open_threads(n_threads: int) -> ThreadTeam:
    """Choose the threading layer and make ``n_threads`` threads available to the calling thread's kernels.

    The number holds per calling thread: call it in the thread that runs the kernels. Run kernels in one thread at
    a time; copies may run beside them.
    Raises  ConfigError when ``n_threads`` is below 1.
    """
    if n_threads < 1:
        raise ConfigError(
            [Problem(field="threads", value=str(n_threads), reason="at least one thread is needed", hint="use -t 1")]
        )
    warnings = []
    limit = int(_config.NUMBA_NUM_THREADS)
    if n_threads > limit:
        warnings.append(f"threads {n_threads}: this process may use {limit} processors; running on {limit}")
    layer = _choose_layer()
    if layer != _FAST_LAYER:
        warnings.append("OpenMP (libgomp) was not found: every kernel call costs about 80 microseconds more")
    _config.THREADING_LAYER = layer
    numba.set_num_threads(min(n_threads, limit))
    return ThreadTeam(n_threads=min(n_threads, limit), layer=layer, warnings=tuple(warnings))


def _choose_layer() -> str:
    try:
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError:
        return _PORTABLE_LAYER
    return _FAST_LAYER
