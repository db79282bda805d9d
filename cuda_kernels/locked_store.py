"""Page-locking of the host store ahead of its use, so that the copy engine moves it beside everything else."""

from __future__ import annotations

import ctypes
import resource
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from cuda.bindings import driver

from cuda_kernels.device import checked
from kvs_core.errors import BackendError, StateError
from kvs_core.host_store import RamStore
from kvs_core.units import GIB, MIB, align_up, ceil_div

EXTENT_BYTES = 64 * MIB
"""One copy never crosses an extent. Copies of 16 MiB and more reach the link's rate, so few may be cut in two."""
LEAD_GROUPS = 1
"""Groups of extents that are locked ahead of the latest one in use."""
_HOST_PAGE = resource.getpagesize()


class _State(Enum):
    PENDING = "pending"
    LOCKED = "locked"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Store bytes that are locked by one call; ``group`` numbers the parts of a run in the order of their use."""

    begin: int
    end: int
    group: int


def plan_extents(run_offsets: Sequence[int], n_bytes: int, *, extent_bytes: int) -> tuple[Extent, ...]:
    """Cut a store into extents that begin at host pages, in the order of their bytes.

    A prompt writes the first pages of every layer, then the next of every layer; each run of the store is one layer.
    So every run is cut into parts, and the parts with the same number are used at about the same time.
    """
    ends = [*run_offsets[1:], n_bytes]
    sizes = [end - begin for begin, end in zip(run_offsets, ends, strict=True)]
    counts = [max(1, round(size / extent_bytes)) for size in sizes]
    groups: dict[int, int] = {}
    for run_begin, size, n_parts in zip(run_offsets, sizes, counts, strict=True):
        step = ceil_div(size, n_parts)
        for part in range(n_parts):
            begin = (run_begin + part * step) // _HOST_PAGE * _HOST_PAGE
            group = part * max(counts) // n_parts
            groups[begin] = min(group, groups.get(begin, group))
    begins = sorted(groups)
    limits = [*begins[1:], align_up(n_bytes, _HOST_PAGE)]
    return tuple(Extent(begin=begin, end=end, group=groups[begin]) for begin, end in zip(begins, limits, strict=True))


class LockedStore:
    """A ``RamStore`` whose memory a thread of its own locks, extent by extent, ahead of the copies that need it.

    ``pieces`` waits where a copy has overtaken the thread. What is locked never depends on anything but the order of
    use, and a copy moves the same bytes either way, so results do not depend on it.

    A machine that refuses to lock keeps working: for extents after the first refusal the driver copies through a
    locked window of its own, slower and with the host waiting. The order of copies still holds: the driver returns
    from a copy into ordinary memory when the bytes are there, and from a copy out of it when it has taken them.
    ``report`` is called once, from the thread, with the line that says so.
    """

    def __init__(self, store: RamStore, run_offsets: Sequence[int], *, report: Callable[[str], None]) -> None:
        self._store = store
        store.prefer_large_pages()  # locked twice as fast, and in shorter calls, which hold up launches
        self._report = report
        self._extents = plan_extents(run_offsets, max(store.n_bytes, 1), extent_bytes=EXTENT_BYTES)
        self._begins = [extent.begin for extent in self._extents]
        self._states = [_State.PENDING] * len(self._extents)
        self._changed = threading.Condition()
        self._latest_group = 0
        self._is_closing = False
        self._is_over = False
        context = checked(driver.cuCtxGetCurrent(), "asking for the context")
        self._thread = threading.Thread(target=self._lock_ahead, args=(context,), name="page-locking", daemon=True)
        self._thread.start()

    def pieces(self, offset: int, n_bytes: int) -> Iterator[tuple[int, int, int]]:
        """(host address, bytes from the start, size) of each part of a range within one extent, each ready to copy."""
        begin = offset
        while begin < offset + n_bytes:
            index = bisect_right(self._begins, begin) - 1
            self._need(index)
            end = min(offset + n_bytes, self._extents[index].end)
            yield self._store.address + begin, begin - offset, end - begin
            begin = end

    def close(self) -> None:
        """Stop the thread, then unlock; raises BackendError when the driver refuses that."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        try:
            self._thread.join()
        finally:
            self._thread.join()  # a signal may have ended the first wait, and the memory goes away after this
        for index, state in enumerate(self._states):
            if state is _State.LOCKED:
                self._states[index] = _State.PENDING
                address = self._store.address + self._begins[index]
                checked(driver.cuMemHostUnregister(address), "unlocking the host store")

    def _need(self, index: int) -> None:
        """An extent is about to be used: let the thread go on, and wait while this one is still pending."""
        group = self._extents[index].group
        if self._states[index] is not _State.PENDING and group <= self._latest_group:
            return
        with self._changed:
            self._latest_group = max(self._latest_group, group)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._states[index] is not _State.PENDING or self._is_over)
            if self._states[index] is _State.PENDING:
                raise StateError("the host store is not being locked any more")

    def _lock_ahead(self, context: Any) -> None:
        """The thread: extents in the order of their use, up to LEAD_GROUPS ahead of it."""
        try:
            checked(driver.cuCtxSetCurrent(context), "taking the context to the thread that locks memory")
            for index in sorted(range(len(self._extents)), key=lambda index: self._extents[index].group):
                if not self._may_lock(self._extents[index].group):
                    return
                self._lock(self._extents[index])
                self._settle([index], _State.LOCKED)
        except BackendError as error:
            pending = [index for index, state in enumerate(self._states) if state is _State.PENDING]
            locked_bytes = sum(
                extent.end - extent.begin
                for extent, state in zip(self._extents, self._states, strict=True)
                if state is _State.LOCKED
            )
            self._report(
                f"{error}; {locked_bytes / GIB:.2f} of {self._extents[-1].end / GIB:.2f} GiB are locked, the rest is "
                "copied through a window and slower (see ulimit -l)"
            )
            self._settle(pending, _State.REFUSED)
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _may_lock(self, group: int) -> bool:
        """Wait until a group is due; False when the store is being closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or group <= self._latest_group + LEAD_GROUPS)
            return not self._is_closing

    def _lock(self, extent: Extent) -> None:
        address, size = self._store.address + extent.begin, extent.end - extent.begin
        ctypes.memset(address, 0, size)  # unused so far; made real here, so that the driver's call is short
        checked(driver.cuMemHostRegister(address, size, 0), f"page-locking the host store from byte {extent.begin} on")

    def _settle(self, indices: Sequence[int], state: _State) -> None:
        with self._changed:
            for index in indices:
                self._states[index] = state
            self._changed.notify_all()
