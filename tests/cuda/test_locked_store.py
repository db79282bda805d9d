"""Locking ahead of use: how a store is cut, what is locked when, what a copy waits for, and what close leaves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from time import monotonic, sleep
from typing import Any

import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")

from kvs_core.errors import BackendError, StateError
from kvs_core.host_store import RamStore
from kvs_core.units import MIB
from tests.cuda.fake_driver import FakeDriver

RUNS = (0, 3 * MIB, 6 * MIB)
N_BYTES = 9 * MIB


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    for name in ("device", "locked_store"):
        monkeypatch.setattr(import_module(f"cuda_kernels.{name}"), "driver", fake)
    monkeypatch.setattr(import_module("cuda_kernels.locked_store"), "EXTENT_BYTES", MIB)
    return fake


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def store() -> Iterator[RamStore]:
    with RamStore(N_BYTES) as store:
        yield store


def open_locked(store: RamStore, notes: list[str]) -> Any:
    return import_module("cuda_kernels.locked_store").LockedStore(store, RUNS, report=notes.append)


def wait_until(fake: FakeDriver, n_locks: int) -> None:
    end = monotonic() + 10
    while fake.n_locks < n_locks and monotonic() < end:
        sleep(0.001)
    sleep(0.01)  # one too many would come now
    assert fake.n_locks == n_locks


@pytest.mark.parametrize(
    ("runs", "n_bytes"),
    [((0,), 1), ((0,), 10 * MIB + 5), (RUNS, N_BYTES), ((0, 5000, 5100, 9 * MIB + 1), 12 * MIB), ((0, 100, 200), 300)],
)
def test_extents_cover_the_store_once_and_begin_at_host_pages(runs: tuple[int, ...], n_bytes: int) -> None:
    extents = import_module("cuda_kernels.locked_store").plan_extents(runs, n_bytes, extent_bytes=MIB)
    assert extents[0].begin == 0
    assert n_bytes <= extents[-1].end < n_bytes + 4096
    for one, following in pairwise(extents):
        assert one.end == following.begin
    assert all(extent.begin % 4096 == 0 and 0 < extent.end - extent.begin <= 1.5 * MIB + 4096 for extent in extents)


def test_the_first_parts_of_every_layer_come_first() -> None:
    extents = import_module("cuda_kernels.locked_store").plan_extents(RUNS, N_BYTES, extent_bytes=MIB)
    assert [(extent.begin // MIB, extent.group) for extent in extents] == [(i, i % 3) for i in range(9)]


def test_extents_are_locked_a_group_ahead_of_use_and_no_further(
    fake: FakeDriver, store: RamStore, notes: list[str]
) -> None:
    locked = open_locked(store, notes)
    wait_until(fake, 6)
    list(locked.pieces(3 * MIB, MIB))
    wait_until(fake, 6)  # still the first group
    list(locked.pieces(4 * MIB, 8))
    wait_until(fake, 9)
    locked.close()
    assert not fake.registered
    assert notes == []


def test_a_copy_waits_for_an_extent_that_is_not_locked_yet(fake: FakeDriver, store: RamStore, notes: list[str]) -> None:
    fake.may_lock.clear()
    locked = open_locked(store, notes)
    found: list[tuple[int, int, int]] = []
    copying = threading.Thread(target=lambda: found.extend(locked.pieces(2 * MIB + 10, 2 * MIB)))
    copying.start()
    copying.join(0.05)
    assert copying.is_alive()
    assert found == []
    fake.may_lock.set()
    copying.join(10)
    sizes = [MIB - 10, MIB, 10]
    assert [size for _, _, size in found] == sizes
    assert [begin for _, begin, _ in found] == [0, MIB - 10, 2 * MIB - 10]
    assert [address - store.address for address, _, _ in found] == [2 * MIB + 10, 3 * MIB, 4 * MIB]
    locked.close()
    assert not fake.registered


@pytest.mark.parametrize("granted", range(10))
def test_from_the_first_refusal_on_the_rest_stays_ordinary_memory(
    fake: FakeDriver, store: RamStore, notes: list[str], granted: int
) -> None:
    fake.locks_granted = granted
    locked = open_locked(store, notes)
    pieces = list(locked.pieces(0, N_BYTES))
    assert [(address - store.address, begin, size) for address, begin, size in pieces] == [
        (i * MIB, i * MIB, MIB) for i in range(9)
    ]
    assert fake.n_locks == len(fake.registered) == min(granted, 9)
    assert len(notes) == (granted < 9)
    locked.close()
    assert not fake.registered


def test_closing_in_the_middle_of_locking_leaves_nothing(fake: FakeDriver, store: RamStore, notes: list[str]) -> None:
    fake.may_lock.clear()
    locked = open_locked(store, notes)
    threading.Timer(0.05, fake.may_lock.set).start()
    locked.close()
    assert not fake.registered
    assert fake.n_locks <= 1
    locked.close()


def test_a_thread_that_cannot_work_is_a_refusal(
    fake: FakeDriver, store: RamStore, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "cuCtxSetCurrent", lambda _: (fake.CUresult.CUDA_ERROR_INVALID_CONTEXT,))
    locked = open_locked(store, notes)
    assert len(list(locked.pieces(0, N_BYTES))) == 9
    assert len(notes) == 1
    assert "0.00 of 0.01 GiB are locked" in notes[0]
    locked.close()


def test_after_close_nothing_waits_for_ever(fake: FakeDriver, store: RamStore, notes: list[str]) -> None:
    locked = open_locked(store, notes)
    locked.close()
    with pytest.raises(StateError, match="not being locked"):
        list(locked.pieces(8 * MIB, 8))


def test_memory_that_cannot_be_unlocked_is_an_error(
    fake: FakeDriver, store: RamStore, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = open_locked(store, notes)
    list(locked.pieces(0, 8))
    monkeypatch.setattr(fake, "cuMemHostUnregister", lambda _: (fake.CUresult.CUDA_ERROR_UNKNOWN,))
    with pytest.raises(BackendError, match="unlocking"):
        locked.close()


def test_a_signal_during_close_does_not_leave_the_thread_behind(
    fake: FakeDriver, store: RamStore, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.may_lock.clear()
    locked = open_locked(store, notes)
    join = threading.Thread.join
    interrupted: list[bool] = []

    def join_or_be_interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        if not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", join_or_be_interrupted)
    threading.Timer(0.05, fake.may_lock.set).start()
    with pytest.raises(KeyboardInterrupt):
        locked.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "page-locking"]
    locked.close()
    assert not fake.registered
