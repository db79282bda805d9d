"""Interrupts that ask instead of ending the run: what the handler and the watcher of signals.py make of each."""

from __future__ import annotations

import signal

import pytest

from kvs_cli import signals
from kvs_cli.exits import SignalReceived


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_requests", signals._Requests())


def test_the_first_interrupt_asks_and_the_second_ends_the_run() -> None:
    with signals.interrupt_as_request() as request:
        assert not request.is_made
        signals._raise(signal.SIGINT, None)
        assert request.is_made
        with pytest.raises(SignalReceived):
            signals._raise(signal.SIGINT, None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_end_the_run(number: int) -> None:
    with signals.interrupt_as_request() as request, pytest.raises(SignalReceived):
        signals._raise(number, None)
    assert not request.is_made


def test_an_interrupt_outside_ends_the_run() -> None:
    with signals.interrupt_as_request():
        pass
    with pytest.raises(SignalReceived):
        signals._raise(signal.SIGINT, None)


@pytest.mark.parametrize("watcher_is_first", [True, False])
def test_the_watcher_lets_one_interrupt_of_each_request_pass(watcher_is_first: bool) -> None:
    requests = signals._requests
    for _ in range(2):
        with signals.interrupt_as_request():
            if watcher_is_first:
                assert requests.pass_by()
                assert not requests.pass_by(), "the handler has taken none yet, and takes one"
            assert requests.take()
        if not watcher_is_first:
            assert requests.pass_by(), "it may hear of the signal when the request is over"
        assert not requests.pass_by()
