"""Sharing tasks among threads: each exactly once, whoever else is busy, and nothing left behind."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvs_core.cpu.threads import ALONE, ThreadTeam
from kvs_core.errors import BackendError, ConfigError
from tests.kernels.task_kernels import count_kernel, failing_kernel


def run_counted(team: ThreadTeam, n_tasks: int, n_spins: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    n_calls = np.zeros(n_tasks, dtype=np.int64)
    threads = np.full(n_tasks, -1, dtype=np.int64)
    count_kernel(team.control, n_calls, threads, n_spins)
    return n_calls, threads


@pytest.mark.parametrize("n_threads", [1, 2, 3, 8])
def test_every_task_runs_exactly_once(n_threads: int) -> None:
    with ThreadTeam(n_threads) as team:
        for repeat in range(300):
            n_calls, threads = run_counted(team, n_tasks=repeat % 40, n_spins=50 * (repeat % 7))
            assert (n_calls == 1).all()
            assert ((threads >= 0) & (threads < n_threads)).all()


def test_workers_take_part() -> None:
    with ThreadTeam(2) as team:
        seen: set[int] = set()
        for _ in range(200):  # one run of several milliseconds would do, were the second processor free
            seen |= set(run_counted(team, n_tasks=20, n_spins=100_000)[1].tolist())
            if seen == {0, 1}:
                return
    pytest.fail("the worker never ran a task")


def test_two_callers_of_one_team_both_finish() -> None:
    with ThreadTeam(3) as team:
        wrong: list[int] = []

        def call_often() -> None:
            for repeat in range(400):
                n_calls, _ = run_counted(team, n_tasks=1 + repeat % 16, n_spins=repeat % 100)
                wrong.extend(np.flatnonzero(n_calls != 1).tolist())

        callers = [threading.Thread(target=call_often) for _ in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert not wrong


def test_a_closed_team_runs_tasks_on_the_caller() -> None:
    team = ThreadTeam(2)
    run_counted(team, 4)
    team.close()
    team.close()
    n_calls, threads = run_counted(team, 50, n_spins=1000)
    assert (n_calls == 1).all()
    assert (threads == 0).all()


def test_threads_start_with_the_first_kernel_and_end_with_the_team() -> None:
    def workers() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("kvs-cpu-")]

    n_before, n_files_before = len(workers()), len(os.listdir("/proc/self/fd"))
    team = ThreadTeam(4)
    assert len(workers()) == n_before
    run_counted(team, 4)
    assert len(workers()) == n_before + 3
    del team
    gc.collect()
    assert len(workers()) == n_before
    assert len(os.listdir("/proc/self/fd")) == n_files_before


def test_alone_starts_no_thread() -> None:
    n_before = threading.active_count()
    assert (run_counted(ALONE, 9)[0] == 1).all()
    assert threading.active_count() == n_before


@pytest.mark.parametrize("n_tasks", [1, 64])
def test_a_task_that_raises_is_reported_and_the_team_goes_on(n_tasks: int) -> None:
    with ThreadTeam(2) as team:
        with pytest.raises(RuntimeError, match="a kernel task raised an error"):
            failing_kernel(team.control, n_tasks, n_tasks - 1)
        failing_kernel(team.control, n_tasks, -1)
        assert (run_counted(team, 10)[0] == 1).all()


def test_a_thread_that_cannot_start_is_an_error_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    started: list[str] = []

    def start_one_only(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread.name)
        start(thread)

    n_threads, n_files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(threading.Thread, "start", start_one_only)
    team = ThreadTeam(4)
    with pytest.raises(BackendError, match="thread 3 of 4 could not be started"):
        run_counted(team, 4)
    assert threading.active_count() == n_threads
    assert len(os.listdir("/proc/self/fd")) == n_files
    assert (run_counted(team, 4)[0] == 1).all()


def test_no_threads_are_refused() -> None:
    with pytest.raises(ConfigError, match="threads 0: at least 1 is needed"):
        ThreadTeam(0)


def test_a_process_ends_while_workers_poll_and_a_forked_child_computes() -> None:
    script = """
import os
import numpy as np
from kvs_core.cpu.threads import ThreadTeam
from tests.kernels.task_kernels import count_kernel

team = ThreadTeam(3)
def total():
    n_calls, threads = np.zeros(100, np.int64), np.zeros(100, np.int64)
    count_kernel(team.control, n_calls, threads, 100)
    return int(n_calls.sum())
assert total() == 100
child = os.fork()
if child == 0:
    os._exit(0 if total() == 100 else 1)
assert os.waitpid(child, 0)[1] == 0
assert total() == 100
"""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script]  # forking with threads is the point
    subprocess.run(command, cwd=root, check=True, timeout=120, env=os.environ | {"PYTHONPATH": str(root)})
