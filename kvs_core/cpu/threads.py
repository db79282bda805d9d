"""The threads that CPU kernels share their work with. How they share it is in ``tasks``."""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from kvs_core.cpu.tasks import IS_CLOSED, N_WORDS, WAKE_FD, work
from kvs_core.errors import BackendError, ConfigError, Problem

if TYPE_CHECKING:
    from numpy.typing import NDArray


class ThreadTeam:
    """A caller and ``n_threads - 1`` waiting worker threads; a context manager.

    Workers start with the first kernel. Any thread may call kernels; while one call uses the workers, a second runs
    its tasks alone. More threads than processors work too, though not faster. A forked child has no workers and
    runs its tasks alone.
    """

    def __init__(self, n_threads: int) -> None:
        """Raises ConfigError when ``n_threads`` is below 1."""
        if n_threads < 1:
            problem = Problem(field="threads", value=str(n_threads), reason="at least 1 is needed", hint="use -t 1")
            raise ConfigError([problem])
        self.n_threads = n_threads
        self._control: NDArray[np.int64] = np.zeros(N_WORDS, dtype=np.int64)
        self._stop: weakref.finalize[..., ThreadTeam] | None = None
        self._is_closed = n_threads == 1

    @property
    def control(self) -> NDArray[np.int64]:
        """The int64 array that kernels take as ``team``."""
        if self._stop is None and not self._is_closed:
            self._start_workers()
        return self._control

    def _start_workers(self) -> None:
        try:
            wake_fd = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
        except OSError as error:
            raise BackendError(f"no event descriptor for {self.n_threads} threads: {error.strerror}") from error
        self._control[WAKE_FD] = wake_fd
        workers: list[threading.Thread] = []
        # Also runs when the team is forgotten, and at exit before the machine code that workers wait in is freed.
        self._stop = weakref.finalize(self, _stop_workers, self._control, wake_fd, workers)
        for idx in range(1, self.n_threads):
            worker = threading.Thread(target=work, args=(self._control, idx), name=f"kvs-cpu-{idx}", daemon=True)
            try:
                worker.start()
            except RuntimeError as error:
                self.close()
                raise BackendError(
                    f"thread {idx + 1} of {self.n_threads} could not be started", hint="use a smaller -t"
                ) from error
            workers.append(worker)

    def close(self) -> None:
        """End the workers; may be called twice. Kernels still run afterwards, on the calling thread alone."""
        self._is_closed = True
        if self._stop is not None:
            self._stop()

    def __enter__(self) -> ThreadTeam:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _stop_workers(control: NDArray[np.int64], wake_fd: int, workers: list[threading.Thread]) -> None:
    control[IS_CLOSED] = 1
    os.eventfd_write(wake_fd, len(workers))
    for worker in workers:
        worker.join()
    control[WAKE_FD] = -1
    os.close(wake_fd)


ALONE = ThreadTeam(1)
"""No workers: kernels run on the calling thread."""
