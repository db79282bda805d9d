"""The first lines of the ``kvs`` process: a signal is answered from the start, while the slow imports still run."""

from __future__ import annotations

import os
import signal
from types import FrameType

_SIGNAL_BASE = 128
_STANDARD_ERROR = 2
_LINES = {
    signal.SIGINT: b"interrupted\n",
    signal.SIGTERM: b"terminated\n",
    signal.SIGHUP: b"the terminal went away\n",
}


def main() -> None:
    """Entry point of the ``kvs`` command."""
    for number in _LINES:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)

    from kvs_cli.app import main as run

    run()


def _leave(number: int, frame: FrameType | None) -> None:
    """Nothing has begun yet: one line, and the signal's exit code."""
    try:
        os.write(_STANDARD_ERROR, _LINES[signal.Signals(number)])
    finally:
        os._exit(_SIGNAL_BASE + number)
