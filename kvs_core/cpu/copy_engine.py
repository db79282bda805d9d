"""Copies between the host store and the arena on a second thread, in the order they were asked for."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from queue import SimpleQueue
from threading import Lock, Thread
from time import perf_counter

from kvs_core.cpu.arena import CpuArena
from kvs_core.errors import BackendError, HostStoreError, StateError
from kvs_core.host_store import HostStore


@dataclass(frozen=True, slots=True)
class _Copy:
    ticket: int
    transfer: Callable[[int, int, int], None]
    store_offset: int
    arena_offset: int
    n_bytes: int
    is_fetch: bool


class CpuCopyEngine:
    """A first-in first-out copy thread beside the compute threads.

    Compute on this backend is synchronous: when ``fetch`` is called, every earlier reader of the target bytes has
    returned, so the copy may start at once. Reads follow writes of the same store bytes because one thread does both
    in order. Moving bytes releases the interpreter lock.

    One thread asks and waits. It may be interrupted by a signal at any place and still close or go on: the requests
    and ``_done`` are changed in single indivisible operations, and no lock guards more than one of them. ``_progress``
    is a lock used as an event: the copy thread releases it when there is news, and a waiter that takes it looks at
    ``_done`` again.
    """

    def __init__(self, arena: CpuArena, store: HostStore) -> None:
        """Raises BackendError when the system grants no thread."""
        self._arena = arena
        self._store = store
        self._requests: SimpleQueue[_Copy | None] = SimpleQueue()
        self._tickets = count(1)
        self._done = 0
        self._progress = Lock()
        self._moved: dict[int, int] = {}
        self._errors: dict[int, Exception] = {}
        self._closing = False
        self._copy_seconds = 0.0
        self._wait_seconds = 0.0
        self._thread = Thread(target=self._work, name="kvs-copy", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            hint = "raise the limit on processes and threads (ulimit -u)"
            raise BackendError(f"the copy thread cannot be started: {error}", hint=hint) from error

    @property
    def copy_seconds(self) -> float:
        return self._copy_seconds

    @property
    def wait_seconds(self) -> float:
        return self._wait_seconds

    def fetch(self, *, store_offset: int, arena_offset: int, n_bytes: int) -> int:
        return self._ask(self._store.read, store_offset, arena_offset, n_bytes, is_fetch=True)

    def seal(self, *, arena_offset: int, store_offset: int, n_bytes: int) -> int:
        return self._ask(self._store.write, store_offset, arena_offset, n_bytes, is_fetch=False)

    def wait(self, ticket: int) -> None:
        self._wait_until_done(ticket)
        error = self._errors.pop(ticket, None)
        if error is not None:
            raise error

    def finish_all(self) -> None:
        if not self._closing:
            self._wait_until_done(self._ask(_copy_nothing, 0, 0, 0, is_fetch=False))
        self._errors.clear()
        self._moved.clear()

    def bytes_of(self, ticket: int) -> int:
        return self._moved.pop(ticket, 0)

    def move(self, *, source_offset: int, target_offset: int, n_bytes: int) -> None:
        ctypes.memmove(self._arena.address + target_offset, self._arena.address + source_offset, n_bytes)

    def poison(self, *, arena_offset: int, n_bytes: int) -> None:
        ctypes.memset(self._arena.address + arena_offset, 0xFF, n_bytes)

    def close(self) -> None:
        """Let the copy under way end, drop the others; may be called twice."""
        self._closing = True
        self._requests.put(None)
        self._thread.join()

    def _ask(
        self,
        transfer: Callable[[int, int, int], None],
        store_offset: int,
        arena_offset: int,
        n_bytes: int,
        *,
        is_fetch: bool,
    ) -> int:
        if arena_offset < 0 or arena_offset + n_bytes > self._arena.n_bytes:
            raise StateError(f"arena bytes {arena_offset}..{arena_offset + n_bytes} lie outside the arena")
        if self._closing:
            raise StateError("the copy engine is closed")
        copy = _Copy(next(self._tickets), transfer, store_offset, arena_offset, n_bytes, is_fetch)
        self._requests.put(copy)
        return copy.ticket

    def _wait_until_done(self, ticket: int) -> None:
        if self._done >= ticket:
            return
        started = perf_counter()
        while self._done < ticket:
            if self._closing:
                raise StateError("the copy engine was closed before the copy was made")
            self._progress.acquire()
        self._wait_seconds += perf_counter() - started

    def _work(self) -> None:
        while (copy := self._requests.get()) is not None and not self._closing:
            started = perf_counter()
            error: Exception | None = None
            try:
                copy.transfer(copy.store_offset, self._arena.address + copy.arena_offset, copy.n_bytes)
            except OSError as failure:
                error = _as_store_error(copy, failure)
            except Exception as failure:  # whatever it is, the thread that waits for the copy has to see it
                error = failure
            if error is not None:
                self._errors[copy.ticket] = error
            elif copy.is_fetch:
                self._moved[copy.ticket] = copy.n_bytes
                self._copy_seconds += perf_counter() - started
            self._done = copy.ticket
            self._tell_progress()
        self._tell_progress()

    def _tell_progress(self) -> None:
        if self._progress.locked():
            self._progress.release()


def _copy_nothing(store_offset: int, address: int, n_bytes: int) -> None:
    """What ``finish_all`` asks for: when it is its turn, every earlier copy is done."""


def _as_store_error(copy: _Copy, failure: OSError) -> OSError:
    if isinstance(failure, HostStoreError):
        return failure
    return HostStoreError(f"a page copy of {copy.n_bytes} bytes failed: {failure}")
