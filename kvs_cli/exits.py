"""One table: error class to exit code. Nothing else decides how the process ends."""

from __future__ import annotations

import signal

from kvs_core.errors import (
    BackendError,
    CheckFailedError,
    ConfigError,
    FileAccessError,
    IntegrityError,
    KvsError,
    ModelFileError,
    PlanError,
    StateError,
    UnsupportedModelError,
)

DONE = 0
CHECK_FAILED = 1
REFUSED = 2
MODEL_FILE = 3
DOES_NOT_FIT = 4
DEVICE = 5
INPUT_OUTPUT = 6
SIGNAL_BASE = 128

EXIT_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (CheckFailedError, CHECK_FAILED),
    (UnsupportedModelError, MODEL_FILE),
    (ConfigError, REFUSED),
    (ModelFileError, MODEL_FILE),
    (PlanError, DOES_NOT_FIT),
    (MemoryError, DOES_NOT_FIT),
    (BackendError, DEVICE),
    (FileAccessError, INPUT_OUTPUT),
    (StateError, CHECK_FAILED),
    (IntegrityError, CHECK_FAILED),
    (KvsError, CHECK_FAILED),
    (OSError, INPUT_OUTPUT),
    (Exception, CHECK_FAILED),
)
"""First match wins. A StateError, an IntegrityError and whatever nobody expected is a mistake of ours: a check of the
toolkit on itself failed."""

EXIT_HELP = (
    "0 done; 1 a check failed; 2 usage or configuration refused; 3 model file; 4 does not fit; 5 device; "
    "6 input or output; 130 interrupted; 143 terminated"
)


class SignalReceived(BaseException):
    """Raised in the main thread by the handlers of signals.py; no ``except Exception`` may hold it up.

    A standard output that nobody reads any more counts as SIGPIPE, which Python itself ignores.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number


def exit_code_of(error: BaseException) -> int:
    """The exit code for an error."""
    if isinstance(error, SignalReceived):
        return SIGNAL_BASE + error.signal_number
    if isinstance(error, KeyboardInterrupt):
        return SIGNAL_BASE + signal.SIGINT
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))
