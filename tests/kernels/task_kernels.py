"""Small kernels for the tests of ``run_tasks``; in a module of their own so that they can be kept on disk."""

from __future__ import annotations

from kvs_core.cpu.kernel_cache import cached_njit
from kvs_core.cpu.tasks import kernel_task, run_tasks


@kernel_task
def _count_task(task, thread_idx, n_calls, threads, n_spins):  # type: ignore[no-untyped-def]
    work = 0.0
    for step in range(n_spins):
        work += step * 0.5
    n_calls[task] += 1
    threads[task] = thread_idx if work >= 0.0 else -1


@cached_njit()
def count_kernel(team, n_calls, threads, n_spins):  # type: ignore[no-untyped-def]
    """Count the calls of every task and note which thread ran it."""
    run_tasks(team, n_calls.size, _count_task, (n_calls, threads, n_spins))


@kernel_task
def _failing_task(task, thread_idx, bad_task):  # type: ignore[no-untyped-def]
    if task == bad_task:
        raise ValueError("deliberate")


@cached_njit()
def failing_kernel(team, n_tasks, bad_task):  # type: ignore[no-untyped-def]
    """Break the rule that tasks do not raise."""
    run_tasks(team, n_tasks, _failing_task, (bad_task,))
