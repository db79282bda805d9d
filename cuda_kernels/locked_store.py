"""Page-locking of the host store, so that the copy engine moves it at the link's rate and beside everything else."""

from __future__ import annotations

import resource
from collections.abc import Iterator

from cuda.bindings import driver

from cuda_kernels.device import checked
from kvs_core.errors import BackendError
from kvs_core.host_store import RamStore
from kvs_core.units import GIB, MIB, align_up

EXTENT_BYTES = 512 * MIB
_HOST_PAGE = resource.getpagesize()


class LockedStore:
    """A ``RamStore`` whose memory is locked in extents, all of them before the first step.

    A machine that refuses to lock keeps working: the driver then copies through a locked window of its own, slower
    and with the host waiting. ``note`` is the line that says so, None when everything is locked.
    """

    def __init__(self, store: RamStore) -> None:
        self._store = store
        self._locked: list[int] = []
        self.note: str | None = None
        length = align_up(max(store.n_bytes, 1), _HOST_PAGE)
        for begin in range(0, length, EXTENT_BYTES):
            address = store.address + begin
            try:
                checked(
                    driver.cuMemHostRegister(address, min(EXTENT_BYTES, length - begin), 0),
                    f"page-locking the host store from byte {begin} on",
                )
            except BackendError as error:
                self.note = (
                    f"{error}; {begin / GIB:.2f} of {length / GIB:.2f} GiB are locked, the rest is copied through a "
                    "window and slower (see ulimit -l)"
                )
                break
            self._locked.append(address)

    def pieces(self, offset: int, n_bytes: int) -> Iterator[tuple[int, int, int]]:
        """(host address, bytes from the start, size) of each part of a range within one extent."""
        begin = offset
        while begin < offset + n_bytes:
            end = min(offset + n_bytes, (begin // EXTENT_BYTES + 1) * EXTENT_BYTES)
            yield self._store.address + begin, begin - offset, end - begin
            begin = end

    def close(self) -> None:
        for address in self._locked:
            checked(driver.cuMemHostUnregister(address), "unlocking the host store")
        self._locked.clear()
