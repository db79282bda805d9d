"""Copies between the host store and the arena on a second thread, in the order they were asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from queue import SimpleQueue
from threading import Lock, Thread
from time import perf_counter, sleep

from kvs_core.cpu.arena import CpuArena
from kvs_core.errors import BackendError, HostStoreError, StateError
from kvs_core.host_store import HostStore
from kvs_core.units import KIB, ceil_div

# What a thread copies before it looks up. Smaller pieces make the two threads fight for the interpreter lock. Helping
# took a token of SmolLM2 at depth 4096 with a tenth resident from 19.7 to 18.1 ms (2 threads on 2 processors of an
# AMD EPYC, whose memory moves 21 GB/s for one thread and 35 for two); with pieces of 1 MiB it gained nothing.
_PIECE_BYTES = 256 * KIB

_MOMENT_SECONDS = 20e-6  # less than copying a piece takes


@dataclass(slots=True, kw_only=True)
class _Copy:
    """One request, cut into pieces that the copy thread and a helper take turns in claiming.

    A helper may be interrupted and never finish its piece, so the copy thread copies unfinished pieces again instead
    of waiting for them: the same bytes written twice do no harm. But it waits until the helper is out, so that nothing
    of a copy goes on when the next one begins.
    """

    ticket: int
    transfer: Callable[[int, int, int], None]
    store_offset: int
    address: int
    n_bytes: int
    is_fetch: bool
    claims: Iterator[int] = field(default_factory=partial(count, 1))  # the first piece is the copy thread's own
    is_finished: bytearray = field(init=False)
    is_helped: bool = False
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.is_finished = bytearray(ceil_div(self.n_bytes, _PIECE_BYTES))

    def run(self) -> None:
        """On the copy thread: return when every piece is copied or one failed."""
        if self.is_finished:
            self._copy_piece(0)
        while self._copy_next():
            pass
        for index, is_finished in enumerate(self.is_finished):
            if not is_finished:
                self._copy_piece(index)
        while self.is_helped:
            sleep(_MOMENT_SECONDS)

    def help(self) -> bool:
        """On another thread: copy one piece; False when none is left to claim, or when the copy has failed."""
        try:
            self.is_helped = True
            return self._copy_next()
        finally:
            self.is_helped = False

    def _copy_next(self) -> bool:
        index = next(self.claims)
        if index >= len(self.is_finished) or self.error is not None:
            return False
        self._copy_piece(index)
        return True

    def _copy_piece(self, index: int) -> None:
        if self.error is not None:
            return
        begin = index * _PIECE_BYTES
        n_bytes = min(_PIECE_BYTES, self.n_bytes - begin)
        try:
            self.transfer(self.store_offset + begin, self.address + begin, n_bytes)
        except HostStoreError as failure:
            self.error = failure
        except OSError as failure:
            self.error = HostStoreError(f"a page copy of {n_bytes} bytes failed: {failure}")
        except Exception as failure:  # whatever it is, the caller that waits for the copy has to see it
            self.error = failure
        self.is_finished[index] = True


class CpuCopyEngine:
    """A first-in first-out copy thread beside the compute threads.

    Compute on this backend is synchronous: when ``fetch`` is called, every earlier reader of the target bytes has
    returned, so the copy may start at once. Reads follow writes of the same store bytes because one thread does both
    in order. Moving bytes releases the interpreter lock. While the caller waits it helps with the copy under way, or
    its processor would be idle; the order of copies stays.

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
        self._current = self._make_copy(0, _copy_nothing, 0, 0, 0, is_fetch=False)
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
        self._arena.move(source_offset=source_offset, target_offset=target_offset, n_bytes=n_bytes)

    def poison(self, *, arena_offset: int, n_bytes: int) -> None:
        self._arena.poison(offset=arena_offset, n_bytes=n_bytes)

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
        if self._closing:
            raise StateError("the copy engine is closed")
        ticket = next(self._tickets)
        self._requests.put(self._make_copy(ticket, transfer, store_offset, arena_offset, n_bytes, is_fetch=is_fetch))
        return ticket

    def _make_copy(
        self,
        ticket: int,
        transfer: Callable[[int, int, int], None],
        store_offset: int,
        arena_offset: int,
        n_bytes: int,
        *,
        is_fetch: bool,
    ) -> _Copy:
        return _Copy(
            ticket=ticket,
            transfer=transfer,
            store_offset=store_offset,
            address=self._arena.locate(arena_offset, n_bytes),
            n_bytes=n_bytes,
            is_fetch=is_fetch,
        )

    def _wait_until_done(self, ticket: int) -> None:
        if self._done >= ticket:
            return
        started = perf_counter()
        while self._done < ticket:
            if self._closing:
                raise StateError("the copy engine was closed before the copy was made")
            if not self._current.help():
                self._progress.acquire()
        self._wait_seconds += perf_counter() - started

    def _work(self) -> None:
        while (copy := self._requests.get()) is not None and not self._closing:
            started = perf_counter()
            self._current = copy
            if len(copy.is_finished) > 1:
                self._tell_progress()  # there is something to help with
            copy.run()
            if copy.error is not None:
                self._errors[copy.ticket] = copy.error
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
