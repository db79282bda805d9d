"""The table of exit codes (U30)."""

from __future__ import annotations

import signal

import pytest

from kvs_cli.exits import EXIT_CODES, SignalReceived, exit_code_of
from kvs_core import errors
from kvs_core.errors import KvsError, ModelFileError, PlanError


def make_error(kind: type[KvsError]) -> KvsError:
    if kind is ModelFileError:
        return ModelFileError("x", path="m.gguf")
    if kind is PlanError:
        return PlanError("x", required_bytes=2, available_bytes=1)
    return kind("x")


EXPECTED = {
    "ConfigError": 2,
    "UnsupportedError": 2,
    "UnsupportedModelError": 3,
    "ModelFileError": 3,
    "PlanError": 4,
    "BackendError": 5,
    "BackendUnavailableError": 5,
    "DeviceMemoryError": 5,
    "KernelArgumentError": 5,
    "FileAccessError": 6,
    "HostStoreError": 6,
    "StateError": 1,
    "IntegrityError": 1,
    "CheckFailedError": 1,
    "KvsError": 1,
}


def test_every_error_class_has_its_code() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, KvsError)]
    assert {kind.__name__: exit_code_of(make_error(kind)) for kind in kinds} == EXPECTED


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FileNotFoundError(2, "no such file"), 6),
        (MemoryError(), 4),
        (KeyboardInterrupt(), 130),
        (SignalReceived(signal.SIGINT), 130),
        (SignalReceived(signal.SIGTERM), 143),
        (SignalReceived(signal.SIGHUP), 129),
        (SignalReceived(signal.SIGPIPE), 141),
    ],
)
def test_errors_and_signals_from_outside_have_theirs(error: BaseException, code: int) -> None:
    assert exit_code_of(error) == code


def test_an_error_nobody_expected_is_a_mistake_of_ours() -> None:
    assert exit_code_of(ZeroDivisionError()) == 1


def test_no_entry_of_the_table_hides_behind_an_earlier_one() -> None:
    for place, (kind, code) in enumerate(EXIT_CODES):
        for earlier, earlier_code in EXIT_CODES[:place]:
            assert not issubclass(kind, earlier) or code == earlier_code
