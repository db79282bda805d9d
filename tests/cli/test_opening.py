"""Sessions as commands open them: warmed up and looked at again on a GPU, with every note of the backend said once."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Self

import pytest

from kvs_cli.console import Console
from kvs_cli.opening import open_sessions
from kvs_core.device_budget import DeviceBudget, DeviceKind
from kvs_core.errors import PlanError
from kvs_core.plan import RunPlan, plan_run, with_arena
from kvs_core.units import MIB
from tests.plan.shapes import make_budget, make_config, make_shape

BUDGET = make_budget()


class FakeSession:
    """Counts how often it is warmed up and closed."""

    warm_ups = 0
    closed = 0

    def __init__(self, plan: RunPlan, backend: Any) -> None:
        self.plan = plan

    def warm_up(self) -> None:
        FakeSession.warm_ups += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        FakeSession.closed += 1


@pytest.fixture(autouse=True)
def sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvs_cli.opening.Session", FakeSession)
    FakeSession.warm_ups = FakeSession.closed = 0


def plan_on(kind: DeviceKind) -> RunPlan:
    return plan_run(with_arena(make_config(n_ctx=8192), 96 * MIB), make_shape(), replace(BUDGET, kind=kind))


def backend_with(free_bytes: int, notes: list[str]) -> Any:
    def budget() -> DeviceBudget:
        return replace(BUDGET, kind=DeviceKind.CUDA, free_bytes=free_bytes)

    class Backend(SimpleNamespace):
        notes = property(lambda _: tuple(notes))

    return Backend(budget=budget)


@pytest.mark.parametrize(("kind", "warm_ups"), [(DeviceKind.CPU, 0), (DeviceKind.CUDA, 2)])
def test_sessions_are_warmed_up_on_a_gpu_only(
    kind: DeviceKind, warm_ups: int, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = ["early"]
    with Console() as console, open_sessions([plan_on(kind)] * 2, backend_with(1 << 30, notes), console) as opened:
        assert len(opened) == 2
        assert FakeSession.warm_ups == warm_ups
        assert capsys.readouterr().err == "warning: early\n"
        notes.append("late")
    assert FakeSession.closed == 2
    assert capsys.readouterr().err == "warning: late\n"


def test_a_gpu_that_is_full_after_the_warm_up_is_refused_and_notes_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    backend = backend_with(3 * MIB, ["locking was refused"])
    with (
        Console() as console,
        pytest.raises(PlanError, match=r"after the warm-up 3\.00 MiB are free"),
        open_sessions([plan_on(DeviceKind.CUDA)], backend, console),
    ):
        pass
    assert FakeSession.closed == 1
    assert capsys.readouterr().err == "warning: locking was refused\n"
