"""Copies between the host store and the arena on a second thread, in the order they were asked for."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition, Thread
from time import perf_counter

from kvs_core.cpu.arena import CpuArena
from kvs_core.errors import HostStoreError, KvsError, StateError
from kvs_core.host_store import HostStore


@dataclass(slots=True)
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
    """

    def __init__(self, arena: CpuArena, store: HostStore) -> None:
        self._arena = arena
        self._store = store
        self._changed = Condition()
        self._waiting: deque[_Copy] = deque()
        self._asked = 0
        self._done = 0
        self._moved: dict[int, int] = {}
        self._errors: dict[int, KvsError] = {}
        self._closing = False
        self._copy_seconds = 0.0
        self._wait_seconds = 0.0
        self._thread = Thread(target=self._work, name="kvs-copy", daemon=True)
        self._thread.start()

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
        if self._done < ticket:
            started = perf_counter()
            with self._changed:
                self._changed.wait_for(lambda: self._done >= ticket)
            self._wait_seconds += perf_counter() - started
        error = self._errors.pop(ticket, None)
        if error is not None:
            raise error

    def finish_all(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._done >= self._asked)
        self._errors.clear()
        self._moved.clear()

    def bytes_of(self, ticket: int) -> int:
        return self._moved.pop(ticket, 0)

    def move(self, *, source_offset: int, target_offset: int, n_bytes: int) -> None:
        ctypes.memmove(self._arena.address + target_offset, self._arena.address + source_offset, n_bytes)

    def poison(self, *, arena_offset: int, n_bytes: int) -> None:
        ctypes.memset(self._arena.address + arena_offset, 0xFF, n_bytes)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
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
        with self._changed:
            if self._closing:
                raise StateError("the copy engine is closed")
            self._asked += 1
            self._waiting.append(_Copy(self._asked, transfer, store_offset, arena_offset, n_bytes, is_fetch))
            self._changed.notify_all()
            return self._asked

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._closing)
                if self._closing:
                    return
                copy = self._waiting.popleft()
            started = perf_counter()
            error: KvsError | None = None
            try:
                copy.transfer(copy.store_offset, self._arena.address + copy.arena_offset, copy.n_bytes)
            except KvsError as failure:
                error = failure
            except OSError as failure:
                error = HostStoreError(f"a page copy of {copy.n_bytes} bytes failed: {failure}")
            seconds = perf_counter() - started
            with self._changed:
                if error is not None:
                    self._errors[copy.ticket] = error
                elif copy.is_fetch:
                    self._moved[copy.ticket] = copy.n_bytes
                    self._copy_seconds += seconds
                self._done = copy.ticket
                self._changed.notify_all()
