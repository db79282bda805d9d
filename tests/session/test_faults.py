"""Each copy, allocation and store that a short run needs fails once: a clear error, no hang, no leak, life goes on."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvs_core import session as session_module
from kvs_core.backend import Backend, open_backend
from kvs_core.config import RunConfig
from kvs_core.cpu import backend as cpu_backend
from kvs_core.cpu.backend import CpuBackend
from kvs_core.errors import BackendError, DeviceMemoryError, HostStoreError, KvsError, StateError
from kvs_core.host_store import HostStore, open_store
from kvs_core.kv_types import KvType
from kvs_core.model_file import open_model
from kvs_core.plan import RunPlan
from kvs_core.session import Session
from kvs_core.units import MIB
from tests.fixtures.tiny_models import TinyModel, write_model
from tests.session.harness import plan_for, random_tokens, run_tokens

pytestmark = pytest.mark.timeout(120)

PROMPT = random_tokens(46, 259, seed=3)
FORCED = random_tokens(4, 259, seed=4)


class FailingStore:
    """A store whose k-th read or write, counted from ``arm`` on, fails."""

    def __init__(self, store: HostStore) -> None:
        self._store = store
        self.n_bytes = store.n_bytes
        self.n_calls = {"read": 0, "write": 0}
        self._failing: tuple[str, int] | None = None
        self._error: Exception = OSError()

    def arm(self, kind: str, k: int, error: Exception) -> None:
        self.n_calls = {"read": 0, "write": 0}
        self._failing, self._error = (kind, k), error

    def disarm(self) -> None:
        self.n_calls = {"read": 0, "write": 0}
        self._failing = None

    def read(self, offset: int, address: int, n_bytes: int) -> None:
        self._count("read")
        self._store.read(offset, address, n_bytes)

    def write(self, offset: int, address: int, n_bytes: int) -> None:
        self._count("write")
        self._store.write(offset, address, n_bytes)

    def close(self) -> None:
        self._store.close()

    def _count(self, kind: str) -> None:
        self.n_calls[kind] += 1
        if self._failing == (kind, self.n_calls[kind]):
            raise self._error


@dataclass(frozen=True)
class Streamed:
    """An open session that streams, its store, and the logits it gives when nothing fails."""

    session: Session
    store: FailingStore
    expected: NDArray[np.float32]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "faults.gguf"
    return write_model(path, TinyModel(n_layer=8, n_head=4, n_head_kv=4, weight_std=0.08))


@pytest.fixture(scope="module")
def plan(model: Path) -> RunPlan:
    """A run of two micro-batches whose phases stream, with pages that become resident and pages that seal in decode."""
    config = RunConfig(
        model_path=model,
        n_ctx=512,
        n_ubatch=32,
        page_tokens=16,
        n_threads=2,
        type_k=KvType.F32,
        type_v=KvType.F32,
        paranoid=True,
    )
    plan = plan_for(model, config, plan_for(model, config).minimum_arena_bytes // MIB)
    assert sum(plan.decode.resident_pages) > sum(plan.prefill.resident_pages)
    assert plan.streamed_bytes_of_run(32 + 1, 0) > 0
    return plan


@pytest.fixture(scope="module")
def backend(model: Path) -> Iterator[Backend]:
    backend = open_backend("cpu", n_threads=2)
    with open_model(model) as model_file:
        backend.load_weights(model_file)
        yield backend
    backend.close()


@pytest.fixture(params=["copy thread", "compute threads"])
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Who copies from a store in memory; the number of copy threads."""
    has_thread = request.param == "copy thread"
    monkeypatch.setattr(cpu_backend, "available_processors", lambda: 3 if has_thread else 2)
    return int(has_thread)


@pytest.fixture
def streamed(plan: RunPlan, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Iterator[Streamed]:
    stores: list[FailingStore] = []

    def open_failing_store(n_bytes: int, path: Path | None) -> FailingStore:
        stores.append(FailingStore(open_store(n_bytes, path)))
        return stores[0]

    monkeypatch.setattr(session_module, "open_store", open_failing_store)
    with Session(plan, backend) as session:
        expected = run_tokens(session, PROMPT, FORCED)
        assert session.counters.bytes_filled > 0
        assert session.counters.bytes_streamed == session.counters.predicted_bytes_streamed > 0
        session.clear()
        yield Streamed(session, stores[0], expected)
    assert copy_threads() == []


def copy_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvs-copy"]


def count_calls(streamed: Streamed, kind: str) -> tuple[int, int]:
    """Calls of a whole run, and of the same run without its last step."""
    streamed.store.disarm()
    run_tokens(streamed.session, PROMPT, FORCED[:-1])
    n_before_last = streamed.store.n_calls[kind]
    streamed.session.decode(FORCED[-1:])
    streamed.session.clear()
    return streamed.store.n_calls[kind], n_before_last


@pytest.mark.parametrize("kind", ["read", "write"])
def test_whichever_copy_fails_the_step_says_so_and_the_session_goes_on(streamed: Streamed, kind: str) -> None:
    session, store = streamed.session, streamed.store
    failure = OSError(errno.EIO, "Input/output error")
    n_calls, n_before_last = count_calls(streamed, kind)
    assert n_calls > 20
    unnoticed = []
    for k in range(1, n_calls + 1):
        store.arm(kind, k, failure)
        logits = None
        with suppress(HostStoreError):
            logits = run_tokens(session, PROMPT, FORCED)
        if logits is None:
            with pytest.raises(StateError, match="clear the session first"):
                session.decode(FORCED[:1])
        else:
            unnoticed.append(k)
            np.testing.assert_array_equal(logits, streamed.expected)
        session.clear()  # every copy that was asked for has been tried now
        assert store.n_calls[kind] >= k
        store.disarm()
        np.testing.assert_array_equal(run_tokens(session, PROMPT, FORCED), streamed.expected, err_msg=f"after {k}")
        session.clear()
    # Copies that the last step asked for on behalf of a step that never came are nobody's loss.
    assert all(k > n_before_last for k in unnoticed), (unnoticed, n_before_last, n_calls)


@pytest.mark.parametrize("error", [HostStoreError("the disk is gone"), MemoryError("no memory"), ValueError("odd")])
def test_whatever_a_copy_raises_reaches_the_caller(streamed: Streamed, error: Exception) -> None:
    streamed.store.arm("write", 1, error)
    with pytest.raises(type(error), match=str(error)):
        run_tokens(streamed.session, PROMPT, FORCED)


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_session_closes_after_a_failed_copy(streamed: Streamed, kind: str) -> None:
    assert len(copy_threads()) == 1
    streamed.store.arm(kind, 1, OSError(errno.EIO, "Input/output error"))
    with pytest.raises(HostStoreError):
        run_tokens(streamed.session, PROMPT, FORCED)
    streamed.session.close()
    streamed.session.close()
    assert copy_threads() == []


def test_a_closed_session_refuses_to_run_and_hangs_nowhere(plan: RunPlan, backend: Backend, copies: int) -> None:
    session = Session(plan, backend)
    session.prefill(PROMPT)
    assert len(copy_threads()) == copies
    session.close()
    for call in (lambda: session.prefill(PROMPT), lambda: session.decode(FORCED[:1]), session.clear):
        with pytest.raises(StateError, match="closed"):
            call()


def test_closing_in_the_middle_of_a_prompt_leaves_nothing(plan: RunPlan, backend: Backend, copies: int) -> None:
    session = Session(plan, backend)
    rows = session.prefill_rows(PROMPT, output_begin=0)
    next(rows)
    assert len(copy_threads()) == copies
    session.close()
    assert copy_threads() == []
    with pytest.raises(StateError, match="closed"):
        list(rows)


@pytest.mark.parametrize(("k", "kind"), [(1, DeviceMemoryError), (2, HostStoreError)])
def test_an_allocation_that_is_refused_leaves_nothing_behind(
    plan: RunPlan, backend: Backend, monkeypatch: pytest.MonkeyPatch, k: int, kind: type[KvsError]
) -> None:
    """The arena is the first mapping a session makes, the host store the second; there is no third."""
    calls = 0
    map_memory = mmap.mmap

    def refuse_kth(*arguments: Any, **options: Any) -> mmap.mmap:
        nonlocal calls
        calls += 1
        if calls == k:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return map_memory(*arguments, **options)

    monkeypatch.setattr(mmap, "mmap", refuse_kth)
    n_files = count_open_files()
    with pytest.raises(kind, match="Cannot allocate memory"):
        Session(plan, backend)
    assert copy_threads() == []
    assert count_open_files() == n_files
    with Session(plan, backend) as session:
        assert session.prefill(PROMPT).shape == (plan.shape.n_vocab,)
    assert calls == k + 2


def test_a_thread_that_is_refused_leaves_nothing_behind(
    plan: RunPlan, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(cpu_backend, "available_processors", lambda: 3)
    n_files = count_open_files()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(BackendError, match="copy thread cannot be started: can't start new thread"):
            Session(plan, backend)
    assert count_open_files() == n_files
    Session(plan, backend).close()


def count_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the parts of streaming that sessions open."""
    names: list[str] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            names.append(name)
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(session_module, "open_store", counted("store", open_store))
    monkeypatch.setattr(CpuBackend, "open_copy_engine", counted("engine", CpuBackend.open_copy_engine))
    monkeypatch.setattr(CpuBackend, "measure_copy_rate", counted("measurement", CpuBackend.measure_copy_rate))
    monkeypatch.setattr(threading.Thread, "start", counted("thread", threading.Thread.start))
    return names


def test_with_the_arena_off_no_part_of_streaming_is_opened(
    plan: RunPlan, backend: Backend, opened: list[str], copies: int
) -> None:
    for arena_mib in (0, plan.useful_arena_bytes // MIB):
        with Session(plan_for(plan.config.model_path, plan.config, arena_mib), backend) as session:
            opened.clear()
            n_files = count_open_files()
            run_tokens(session, PROMPT, FORCED)
            assert session.store is None
            assert session.engine is None
            assert count_open_files() == n_files
        assert opened == []
    with Session(plan, backend):
        assert sorted(opened) == ["engine", "measurement", "store", *["thread"] * copies]
