"""Both copy engines on their own: order, errors, interruptions, and what happens after they are closed."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import numpy as np
import pytest

from kvs_core.backend import CopyEngine
from kvs_core.cpu.arena import CpuArena
from kvs_core.cpu.copy_engine import CpuCopyEngine
from kvs_core.cpu.memory_copy import copy_memory
from kvs_core.cpu.team_copy_engine import TeamCopyEngine
from kvs_core.cpu.threads import ThreadTeam
from kvs_core.errors import HostStoreError, StateError
from kvs_core.host_store import RamStore

pytestmark = pytest.mark.timeout(60)

N_BYTES = 1 << 16


class SlowStore(RamStore):
    """Every read takes a while."""

    def read(self, offset: int, address: int, n_bytes: int) -> None:
        time.sleep(0.2)
        super().read(offset, address, n_bytes)


@pytest.fixture
def arena() -> CpuArena:
    return CpuArena(N_BYTES)


@pytest.fixture
def store() -> Iterator[RamStore]:
    with RamStore(N_BYTES) as store:
        yield store


@pytest.fixture
def engine(arena: CpuArena, store: RamStore) -> Iterator[CpuCopyEngine]:
    engine = CpuCopyEngine(arena, store)
    yield engine
    engine.close()


@pytest.fixture(params=[CpuCopyEngine, TeamCopyEngine])
def either(request: pytest.FixtureRequest, arena: CpuArena, store: RamStore) -> Iterator[CopyEngine]:
    """Copies by a thread of their own, and by the compute threads."""
    with ThreadTeam(2) as team:
        is_team = request.param is TeamCopyEngine
        engine = TeamCopyEngine(arena, store, team) if is_team else CpuCopyEngine(arena, store)
        yield engine
        engine.close()


@pytest.fixture
def slow_engine(arena: CpuArena) -> Iterator[CpuCopyEngine]:
    with SlowStore(N_BYTES) as store:
        engine = CpuCopyEngine(arena, store)
        yield engine
        engine.close()


def test_copies_run_in_the_order_they_were_asked_for(arena: CpuArena, either: CopyEngine) -> None:
    """Random seals and fetches against the same done at once on plain arrays; waits only now and then."""
    rng = np.random.default_rng(5)
    arena.bytes[:] = rng.integers(0, 256, N_BYTES, dtype=np.uint8)
    expected_arena, expected_store = arena.bytes.copy(), np.zeros(N_BYTES, dtype=np.uint8)
    tickets = []
    for _ in range(3000):
        n_bytes = int(rng.integers(1, 2000))
        here, there = (int(offset) for offset in rng.integers(0, N_BYTES - n_bytes, 2))
        if rng.random() < 0.5:
            tickets.append(either.seal(arena_offset=here, store_offset=there, n_bytes=n_bytes))
            expected_store[there : there + n_bytes] = expected_arena[here : here + n_bytes]
        else:
            tickets.append(either.fetch(store_offset=there, arena_offset=here, n_bytes=n_bytes))
            expected_arena[here : here + n_bytes] = expected_store[there : there + n_bytes]
        if rng.random() < 0.1:
            either.wait(tickets[int(rng.integers(len(tickets)))])
    either.finish_all()
    np.testing.assert_array_equal(arena.bytes, expected_arena)


def test_bytes_are_counted_once_for_fetches_that_were_waited_for(either: CopyEngine) -> None:
    fetched = either.fetch(store_offset=0, arena_offset=0, n_bytes=100)
    sealed = either.seal(store_offset=0, arena_offset=0, n_bytes=100)
    either.wait(sealed)
    either.wait(fetched)
    assert [either.bytes_of(ticket) for ticket in (fetched, fetched, sealed)] == [100, 0, 0]
    assert either.copy_seconds > 0


def test_a_failed_fetch_counts_no_bytes(engine: CpuCopyEngine) -> None:
    bad = engine.fetch(store_offset=N_BYTES, arena_offset=0, n_bytes=100)
    with pytest.raises(StateError, match="lie outside its 65536 bytes"):
        engine.wait(bad)
    assert engine.bytes_of(bad) == 0


def test_bytes_outside_the_arena_are_refused_at_once(either: CopyEngine) -> None:
    for offset in (-1, N_BYTES - 99):
        for ask in (
            lambda at: either.fetch(store_offset=0, arena_offset=at, n_bytes=100),
            lambda at: either.seal(store_offset=0, arena_offset=at, n_bytes=100),
            lambda at: either.move(source_offset=at, target_offset=0, n_bytes=100),
            lambda at: either.move(source_offset=0, target_offset=at, n_bytes=100),
            lambda at: either.poison(arena_offset=at, n_bytes=100),
        ):
            with pytest.raises(StateError, match="outside the arena of 65536 bytes"):
                ask(offset)


def test_compute_threads_refuse_bytes_outside_the_store_at_once(arena: CpuArena, store: RamStore) -> None:
    with ThreadTeam(2) as team:
        engine = TeamCopyEngine(arena, store, team)
        for offset in (-1, N_BYTES - 99):
            with pytest.raises(StateError, match="lie outside its 65536 bytes"):
                engine.fetch(store_offset=offset, arena_offset=0, n_bytes=100)
            with pytest.raises(StateError, match="lie outside its 65536 bytes"):
                engine.seal(store_offset=offset, arena_offset=0, n_bytes=100)


def test_a_closed_engine_refuses_everything_but_closing(either: CopyEngine) -> None:
    ticket = either.fetch(store_offset=0, arena_offset=0, n_bytes=100)
    either.wait(ticket)
    either.close()
    either.close()
    for call in (either.fetch, either.seal):
        with pytest.raises(StateError, match="closed"):
            call(store_offset=0, arena_offset=0, n_bytes=100)
    either.finish_all()


@pytest.mark.parametrize("n_bytes", [0, 1, (1 << 17) - 1, 1 << 17, (1 << 17) + 1, 3_000_001])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_memory_is_copied_whole_and_nothing_beside_it(n_bytes: int, n_threads: int) -> None:
    source = np.random.default_rng(9).integers(0, 256, n_bytes + 2, dtype=np.uint8)
    target = np.zeros_like(source)
    with ThreadTeam(n_threads) as team:
        copy_memory(team, target=target.ctypes.data + 1, source=source.ctypes.data + 1, n_bytes=n_bytes)
    np.testing.assert_array_equal(target[1:-1], source[1:-1])
    assert (target[0], target[-1]) == (0, 0)


def test_errors_of_forgotten_copies_are_forgotten_too(engine: CpuCopyEngine) -> None:
    engine.fetch(store_offset=N_BYTES, arena_offset=0, n_bytes=100)
    engine.finish_all()
    engine.wait(engine.fetch(store_offset=0, arena_offset=0, n_bytes=100))


def test_an_error_of_the_system_becomes_one_of_the_store(
    engine: CpuCopyEngine, store: RamStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(offset: int, address: int, n_bytes: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(store, "read", fail)
    with pytest.raises(HostStoreError, match="a page copy of 100 bytes failed"):
        engine.wait(engine.fetch(store_offset=0, arena_offset=0, n_bytes=100))


def test_time_that_compute_is_held_back_is_counted(slow_engine: CpuCopyEngine) -> None:
    slow_engine.wait(slow_engine.fetch(store_offset=0, arena_offset=0, n_bytes=100))
    assert slow_engine.wait_seconds > 0.1
    assert slow_engine.copy_seconds > 0.1


def test_closing_drops_what_has_not_begun_and_nothing_waits_for_it(slow_engine: CpuCopyEngine) -> None:
    tickets = [slow_engine.fetch(store_offset=0, arena_offset=0, n_bytes=100) for _ in range(50)]
    slow_engine.close()
    slow_engine.close()
    with pytest.raises(StateError, match="closed"):
        slow_engine.wait(tickets[-1])
    with pytest.raises(StateError, match="closed"):
        slow_engine.fetch(store_offset=0, arena_offset=0, n_bytes=100)
    slow_engine.finish_all()
    assert not [thread for thread in threading.enumerate() if thread.name == "kvs-copy"]


def test_a_waiter_is_let_go_when_another_thread_closes(slow_engine: CpuCopyEngine) -> None:
    slow_engine.fetch(store_offset=0, arena_offset=0, n_bytes=100)
    never_made = slow_engine.fetch(store_offset=0, arena_offset=0, n_bytes=100)
    closer = threading.Timer(0.05, slow_engine.close)
    closer.start()
    with pytest.raises(StateError, match="closed"):
        slow_engine.wait(never_made)
    closer.join()


class _Interruption(BaseException):
    """What the signal handler of the next tests raises."""


@contextmanager
def interruption_after(seconds: float) -> Iterator[None]:
    """A signal interrupts the block, and has to come out of it."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _Interruption

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _Interruption:
        pass
    else:
        pytest.fail("nothing was interrupted")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_a_signal_that_interrupts_a_wait_leaves_the_engine_usable(slow_engine: CpuCopyEngine) -> None:
    with interruption_after(0.05):
        slow_engine.wait(slow_engine.fetch(store_offset=0, arena_offset=0, n_bytes=100))
    slow_engine.finish_all()
    slow_engine.wait(slow_engine.fetch(store_offset=0, arena_offset=0, n_bytes=100))


class PiecesStore(RamStore):
    """Remembers which thread moved which bytes; a helper takes long."""

    def __init__(self, n_bytes: int) -> None:
        super().__init__(n_bytes)
        self.calls: list[tuple[str, int, int]] = []
        self.failing_offset: int | None = None

    def read(self, offset: int, address: int, n_bytes: int) -> None:
        name = threading.current_thread().name
        self.calls.append((name, offset, n_bytes))
        if offset == self.failing_offset:
            raise OSError(5, "Input/output error")
        time.sleep(0.02 if name == "kvs-copy" else 0.06)
        super().read(offset, address, n_bytes)


BIG_BYTES = 2 * (1 << 20) + 777


@pytest.fixture
def big() -> Iterator[tuple[CpuArena, PiecesStore, CpuCopyEngine]]:
    """An engine over megabytes; the store is full of random bytes, the arena empty."""
    arena = CpuArena(BIG_BYTES)
    with PiecesStore(BIG_BYTES) as store:
        content = np.random.default_rng(8).integers(0, 256, BIG_BYTES, dtype=np.uint8)
        store.write(0, content.ctypes.data, BIG_BYTES)
        engine = CpuCopyEngine(arena, store)
        yield arena, store, engine
        engine.close()
    np.testing.assert_array_equal(arena.bytes, content)


def test_a_waiter_helps_with_the_copy_under_way(big: tuple[CpuArena, PiecesStore, CpuCopyEngine]) -> None:
    _, store, engine = big
    ticket = engine.fetch(store_offset=0, arena_offset=0, n_bytes=BIG_BYTES)
    engine.wait(ticket)
    assert engine.bytes_of(ticket) == BIG_BYTES
    assert {name for name, _, _ in store.calls} == {"kvs-copy", threading.current_thread().name}
    assert sum(dict((offset, n_bytes) for _, offset, n_bytes in store.calls).values()) == BIG_BYTES


def test_an_interrupted_helper_leaves_no_hole(big: tuple[CpuArena, PiecesStore, CpuCopyEngine]) -> None:
    _, _, engine = big
    with interruption_after(0.03):
        engine.wait(engine.fetch(store_offset=0, arena_offset=0, n_bytes=BIG_BYTES))
    engine.finish_all()


@pytest.mark.parametrize("piece", [0, 3, 8])
def test_an_error_in_any_piece_is_an_error_of_the_copy(
    big: tuple[CpuArena, PiecesStore, CpuCopyEngine], piece: int
) -> None:
    _, store, engine = big
    store.failing_offset = piece * (1 << 18)
    ticket = engine.fetch(store_offset=0, arena_offset=0, n_bytes=BIG_BYTES)
    with pytest.raises(HostStoreError, match="Input/output error"):
        engine.wait(ticket)
    assert engine.bytes_of(ticket) == 0
    store.failing_offset = None
    engine.wait(engine.fetch(store_offset=0, arena_offset=0, n_bytes=BIG_BYTES))
