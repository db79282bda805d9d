"""Copies between page-locked host memory and the arena on two streams of their own, beside the compute stream."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver

from cuda_kernels.device import DeviceMemory, Event, checked
from cuda_kernels.locked_store import LockedStore
from kvs_core.errors import StateError

_FETCHES_KEPT = 64


@dataclass(frozen=True, slots=True)
class _Seal:
    """Store bytes that a copy under way writes."""

    begin: int
    end: int
    done: Event


@dataclass(slots=True)
class _Fetch:
    """The events around a copy, and when compute came to need it."""

    begin: Event
    end: Event
    needed: Event | None = None


class CudaCopyEngine:
    """Implements ``kvs_core.backend.CopyEngine``; no call waits on the host but ``finish_all`` and ``close``.

    Which event makes what safe:

    fetch   The copy stream waits for an event recorded on the compute stream by this call: the copy begins after
            every kernel asked for before it, the last reader of the ring bytes among them; later ones do not delay it.
            Store bytes that a seal under way still writes: the copy stream waits for that seal's event.
    seal    The seal stream waits for an event recorded on the compute stream by this call: the rows are written.
    wait    The compute stream waits for the ticket's event, recorded right behind the copy. Kernels asked for
            afterwards read the fetched bytes, or overwrite the sealed ones, only then.
    move, poison   on the compute stream itself.

    A copy that fails makes the driver refuse every later call, which raises there.
    """

    def __init__(self, arena: DeviceMemory, store: LockedStore, compute: Any) -> None:
        self._arena = arena
        self._store = store
        self._compute = compute
        self._copy_stream = _new_stream()
        self._seal_stream = _new_stream()
        self._spare: list[Event] = []
        self._spare_timed: list[Event] = []
        self._sealing: dict[int, Event] = {}
        self._fetching: dict[int, _Fetch] = {}
        self._bytes: dict[int, int] = {}
        self._seals: deque[_Seal] = deque()
        self._asked = 0
        self._fetched: deque[_Fetch] = deque()
        self._copy_seconds = 0.0
        self._wait_seconds = 0.0
        self._is_closed = False

    @property
    def copy_seconds(self) -> float:
        self._collect(everything=True)
        return self._copy_seconds

    @property
    def wait_seconds(self) -> float:
        self._collect(everything=True)
        return self._wait_seconds

    def fetch(self, *, store_offset: int, arena_offset: int, n_bytes: int) -> int:
        self._check(arena_offset, n_bytes)
        self._follow_compute(self._copy_stream)
        self._follow_seals(store_offset, store_offset + n_bytes)
        begin, end = self._timed_event(), self._timed_event()
        begin.record(self._copy_stream)
        target = self._arena.address + arena_offset
        for address, begin_at, size in self._store.pieces(store_offset, n_bytes):
            checked(
                driver.cuMemcpyHtoDAsync(target + begin_at, address, size, self._copy_stream), "copying to the device"
            )
        end.record(self._copy_stream)
        self._asked += 1
        self._fetching[self._asked] = _Fetch(begin, end)
        self._bytes[self._asked] = n_bytes
        return self._asked

    def seal(self, *, arena_offset: int, store_offset: int, n_bytes: int) -> int:
        self._check(arena_offset, n_bytes)
        self._follow_compute(self._seal_stream)
        source = self._arena.address + arena_offset
        for address, begin_at, size in self._store.pieces(store_offset, n_bytes):
            checked(
                driver.cuMemcpyDtoHAsync(address, source + begin_at, size, self._seal_stream), "copying to the host"
            )
        written, done = self._event(), self._event()
        written.record(self._seal_stream)
        done.record(self._seal_stream)
        self._seals.append(_Seal(store_offset, store_offset + n_bytes, written))
        self._asked += 1
        self._sealing[self._asked] = done
        return self._asked

    def wait(self, ticket: int) -> None:
        fetch = self._fetching.pop(ticket, None)
        if fetch is not None:
            fetch.needed = self._timed_event()
            fetch.needed.record(self._compute)
            fetch.end.hold(self._compute)
            self._fetched.append(fetch)
            self._collect(everything=False)
            return
        done = self._sealing.pop(ticket, None)
        if done is not None:  # else waited for before, or over since finish_all
            done.hold(self._compute)
            self._spare.append(done)

    def finish_all(self) -> None:
        for stream in (self._copy_stream, self._seal_stream):
            checked(driver.cuStreamSynchronize(stream), "finishing copies")
        self._fetched += self._fetching.values()
        self._fetching.clear()
        self._spare += self._sealing.values()
        self._sealing.clear()
        self._bytes.clear()
        self._drop_seals()

    def bytes_of(self, ticket: int) -> int:
        return self._bytes.pop(ticket, 0)

    def move(self, *, source_offset: int, target_offset: int, n_bytes: int) -> None:
        source, target = self._arena.address + source_offset, self._arena.address + target_offset
        checked(driver.cuMemcpyDtoDAsync(target, source, n_bytes, self._compute), "moving a page")

    def poison(self, *, arena_offset: int, n_bytes: int) -> None:
        address = self._arena.address + arena_offset
        checked(driver.cuMemsetD8Async(address, 0xFF, n_bytes, self._compute), "poisoning a page")

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            for stream in (self._compute, self._copy_stream, self._seal_stream):
                checked(driver.cuStreamSynchronize(stream), "finishing copies")
            self.finish_all()
            self._collect(everything=True)
            for event in (*self._spare, *self._spare_timed):
                event.close()
            for stream in (self._copy_stream, self._seal_stream):
                checked(driver.cuStreamDestroy(stream), "freeing a stream")
        finally:
            self._store.close()  # also on a broken device: its thread must not outlive the memory

    def _check(self, arena_offset: int, n_bytes: int) -> None:
        if self._is_closed:
            raise StateError("the copy engine is closed")
        if arena_offset < 0 or arena_offset + n_bytes > self._arena.n_bytes:
            raise StateError(f"arena bytes {arena_offset}..{arena_offset + n_bytes} lie outside the arena")

    def _follow_compute(self, stream: Any) -> None:
        event = self._event()
        event.record(self._compute)
        event.hold(stream)
        self._spare.append(event)  # a wait keeps what it waits for, so the event may be recorded again

    def _follow_seals(self, begin: int, end: int) -> None:
        while self._seals and self._seals[0].done.is_done():
            self._spare.append(self._seals.popleft().done)
        for seal in self._seals:
            if seal.begin < end and begin < seal.end:
                seal.done.hold(self._copy_stream)

    def _drop_seals(self) -> None:
        self._spare += [seal.done for seal in self._seals]
        self._seals.clear()

    def _event(self) -> Event:
        return self._spare.pop() if self._spare else Event()

    def _timed_event(self) -> Event:
        return self._spare_timed.pop() if self._spare_timed else Event(timed=True)

    def _collect(self, *, everything: bool) -> None:
        """Add up the times of fetches that are over: all, waiting if need be, or only when many have gathered."""
        if not everything and len(self._fetched) < _FETCHES_KEPT:
            return
        while self._fetched and (everything or self._fetched[0].end.is_done()):
            fetch = self._fetched[0]
            fetch.end.wait()
            if fetch.needed is not None:
                if not everything and not fetch.needed.is_done():
                    return
                fetch.needed.wait()
                self._wait_seconds += max(0.0, fetch.end.seconds_since(fetch.needed))
                self._spare_timed.append(fetch.needed)
            self._copy_seconds += fetch.end.seconds_since(fetch.begin)
            self._spare_timed += (fetch.begin, fetch.end)
            self._fetched.popleft()


def _new_stream() -> Any:
    """A stream that the default stream does not hold up."""
    return checked(driver.cuStreamCreate(int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)), "making a stream")
