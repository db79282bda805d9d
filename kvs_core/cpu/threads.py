"""The threads that CPU kernels share their work with. How they share it is in ``tasks``."""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from kvs_core.cpu.tasks import IS_CLOSED, N_WORDS, WAKE_FD, work
from kvs_core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from numpy.typing import NDArray


class ThreadTeam:
    """A caller and ``n_threads - 1`` waiting worker threads; a context manager.

    control     int64 array that kernels take as ``team``
    Any thread may call kernels; while one call uses the workers, a second runs its tasks alone. A forked child has
    no workers and runs its tasks alone.
    """

    def __init__(self, n_threads: int) -> None:
        """Raises ConfigError when ``n_threads`` is below 1."""
        if n_threads < 1:
            problem = Problem(field="threads", value=str(n_threads), reason="at least 1 is needed", hint="use -t 1")
            raise ConfigError([problem])
        self.n_threads = n_threads
        self.control: NDArray[np.int64] = np.zeros(N_WORDS, dtype=np.int64)
        self._wake_fd = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC) if n_threads > 1 else -1
        self.control[WAKE_FD] = self._wake_fd
        self._workers = [
            threading.Thread(target=work, args=(self.control, idx), name=f"kvs-cpu-{idx}", daemon=True)
            for idx in range(1, n_threads)
        ]
        for worker in self._workers:
            worker.start()

    def close(self) -> None:
        """End the workers; may be called twice. Kernels still run afterwards, on the calling thread alone."""
        if self._wake_fd < 0:
            return
        self.control[IS_CLOSED] = 1
        os.eventfd_write(self._wake_fd, len(self._workers))
        for worker in self._workers:
            worker.join()
        os.close(self._wake_fd)
        self._wake_fd = -1
        self.n_threads = 1

    def __enter__(self) -> ThreadTeam:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


ALONE = ThreadTeam(1)
"""No workers: kernels run on the calling thread."""
