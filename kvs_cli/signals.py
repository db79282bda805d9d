"""SIGINT, SIGTERM and SIGHUP: the run ends within two seconds, cleanly when it can.

The handler raises in the main thread, so that every ``with`` on the way out closes what it holds. A long call into
native code (compiling a kernel) holds handlers up; a watcher thread, woken by the signal itself, then ends the
process. A second signal ends it at once. Inside ``interrupt_as_request`` one SIGINT asks instead of ending.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from kvs_cli.exits import SIGNAL_BASE, SignalReceived

GRACE_SECONDS = 1.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """Whether Ctrl-C asked for something to stop."""

    def __init__(self) -> None:
        self.is_made = False


class _Requests:
    """What handler and watcher know of requests; each hears of every signal, in either order.

    n_taken    signals that the handler took for a request
    n_passed   those that the watcher let pass as one
    """

    def __init__(self) -> None:
        self.open: StopRequest | None = None
        self.n_taken = self.n_passed = 0

    def take(self) -> bool:
        """For the handler: make the request that is open, if it is not made yet."""
        if self.open is None or self.open.is_made:
            return False
        self.n_taken += 1
        self.open.is_made = True
        return True

    def pass_by(self) -> bool:
        """For the watcher: whether the handler took this signal, or will."""
        request = self.open
        will_be_taken = self.n_taken == self.n_passed and request is not None and not request.is_made
        passes = will_be_taken or self.n_taken > self.n_passed
        self.n_passed += passes
        return passes


_requests = _Requests()


def install_signal_handlers() -> None:
    """Call once, in the main thread, before any work starts."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup asked for SIGHUP to be ignored
            signal.signal(number, _raise)
    threading.Thread(target=_watch, args=(read_end,), name="kvs-signals", daemon=True).start()


@contextmanager
def interrupt_as_request() -> Iterator[StopRequest]:
    """While it is open, a first SIGINT is a request to look at; a second one, or any other signal, ends the run."""
    _requests.open = request = StopRequest()
    try:
        yield request
    finally:
        _requests.open = None


def restore_default_signals() -> None:
    """For the last moments of the process, when nobody catches SignalReceived any more."""
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _raise(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGINT and _requests.take():
        return
    for other in _SIGNALS:
        if signal.getsignal(other) is _raise:
            signal.signal(other, _leave_to_the_watcher)
    raise SignalReceived(number)


def _leave_to_the_watcher(number: int, frame: FrameType | None) -> None:
    """A later signal: raising again would cut the cleaning up short; the watcher ends the process."""


def _watch(read_end: int) -> None:
    """Wait for the first of our signals, give the main thread its time, then end the process."""
    while (number := os.read(read_end, 1)[0]) not in _SIGNALS or (number == signal.SIGINT and _requests.pass_by()):
        continue
    deadline = time.monotonic() + GRACE_SECONDS
    while (remaining := deadline - time.monotonic()) > 0:
        if _second_signal(read_end, remaining):
            break
    _say(describe_signal(number))
    os._exit(SIGNAL_BASE + number)


def _second_signal(read_end: int, timeout: float) -> bool:
    ready, _, _ = select.select([read_end], [], [], timeout)
    return bool(ready) and os.read(read_end, 1)[0] in _SIGNALS


def describe_signal(number: int) -> str:
    """The one line that says why the run ended."""
    names = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "the terminal went away"}
    return names.get(signal.Signals(number), f"ended by signal {number}")


def _say(text: str) -> None:
    # Past the buffers of sys.stderr: the main thread may be inside one of its methods.
    os.write(sys.stderr.fileno(), f"{text}\n".encode("ascii"))
