"""Where bytes go: results to standard output as UTF-8, everything else to standard error. No layout, no rich."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from kvs_cli.exits import SignalReceived
from kvs_core.errors import FileAccessError

SCHEMA_VERSION = 1


class Console:
    """One command's output.

    Standard output gets UTF-8 whatever the locale, flushed piece by piece, and nothing but results. Messages are one
    line each with a prefix; characters that standard error cannot express are written as escapes.
    """

    def __init__(self, *, colour: bool = False, rewrites_lines: bool = False) -> None:
        self.json = False
        self.verbose = False
        self.colour = colour and is_terminal(sys.stderr)
        self.shows_progress = rewrites_lines and is_terminal(sys.stderr)
        self._log: TextIO | None = None
        self._line_is_open = False
        self._progress_is_shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def open_log(self, path: Path) -> None:
        """Copy every message to ``path`` from now on. Raises FileAccessError."""
        try:
            self._log = path.open("w", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise FileAccessError(f"log file {path}: {error.strerror}", hint="choose another --log-file") from error

    def write_text(self, text: str) -> None:
        """Results as they come. When nobody reads them any more the run ends like one that SIGPIPE ended.

        Raises FileAccessError when they cannot be written.
        """
        if not text:
            return
        try:
            sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            _drop_standard_output()
            raise SignalReceived(signal.SIGPIPE) from None
        except OSError as error:
            _drop_standard_output()
            reason = "is closed" if error.errno == errno.EBADF else error.strerror
            raise FileAccessError(f"standard output: {reason}") from error
        self._line_is_open = not text.endswith("\n")

    def write_json(self, document: Mapping[str, Any]) -> None:
        """One document with its ``schema_version``; NaN and infinities are a mistake of ours and raise ValueError.

        A byte of a file name that is no UTF-8 becomes a JSON escape, so that the document can always be decoded.
        """
        body = {"schema_version": SCHEMA_VERSION, **document}
        text = json.dumps(body, ensure_ascii=False, allow_nan=False, indent=2) + "\n"
        self.write_text(text.encode("utf-8", "backslashreplace").decode("utf-8"))

    def write_error_document(self, error: Mapping[str, Any]) -> None:
        """The document of a run that failed. That it cannot be written is said, but is not what the run died of."""
        try:
            self.write_json({"error": error})
        except FileAccessError as second:
            self.error(str(second))

    def error(self, message: str) -> None:
        self._message("error", message, "1;31")

    def errors(self, lines: Iterable[tuple[str, str | None]]) -> None:
        """Everything wrong at once: each message with its hint, if it has one."""
        for message, hint in lines:
            self.error(message)
            if hint:
                self.hint(hint)

    def warning(self, message: str) -> None:
        self._message("warning", message, "1;33")

    def hint(self, message: str) -> None:
        self._message("hint", message, "1;36")

    def info(self, message: str) -> None:
        """A line without a prefix."""
        self._line(message, message)

    def detail(self, message: str) -> None:
        """A line that only ``-v`` shows; the log file always gets it."""
        if self.verbose:
            self.info(message)
        else:
            self._write_log(message)

    def progress(self, message: str) -> None:
        """Rewrite the terminal's current line; an empty message clears it. Nothing anywhere else.

        A line that ends in text, such as the prompt's last one, is not rewritten: the text would be gone.
        """
        if self._line_is_open and is_terminal(sys.stdout):
            return
        if self.shows_progress and (message or self._progress_is_shown):
            _write_message(f"\r\x1b[K{message}")
            self._progress_is_shown = bool(message)

    def _message(self, prefix: str, message: str, style: str) -> None:
        coloured = f"\x1b[{style}m{prefix}:\x1b[0m" if self.colour else f"{prefix}:"
        self._line(f"{coloured} {message}", f"{prefix}: {message}")

    def _line(self, shown: str, plain: str) -> None:
        if self._progress_is_shown:
            self.progress("")
        if self._line_is_open and _streams_meet():
            shown = "\n" + shown  # keep the message off the end of the text
            self._line_is_open = False
        _write_message(shown + "\n")
        self._write_log(plain)

    def _write_log(self, message: str) -> None:
        """A log that can no longer be written ends with a warning; the run's result is still worth finishing."""
        if self._log is None:
            return
        try:
            self._log.write(message + "\n")
            self._log.flush()
        except OSError as error:
            log, self._log = self._log, None
            with contextlib.suppress(OSError):  # closing tries to write once more
                log.close()
            self.warning(f"log file {log.name}: {error.strerror}; it ends here")


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a standard stream is there and a terminal."""
    return stream is not None and not stream.closed and stream.isatty()


def _streams_meet() -> bool:
    """Whether both standard streams show up in one place: a terminal, or one file or pipe as after ``2>&1``."""
    if is_terminal(sys.stdout) and is_terminal(sys.stderr):
        return True
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError):  # a stream without a descriptor
        return False


def find_stream_in(path: Path) -> str | None:
    """The standard stream that goes to the file ``path`` (by a redirection, or /dev/stdout), if one does."""
    for number, name in ((1, "standard output"), (2, "standard error")):
        try:
            if os.path.samestat(os.fstat(number), os.stat(path)):
                return name
        except OSError:  # a closed stream, or no such file yet
            continue
    return None


def open_standard_streams() -> None:
    """Give a process that was started with closed streams something in their place.

    Otherwise the next file opened would get number 0, 1 or 2, and what is meant for a stream would land in it.
    Standard output gets something that cannot be written: a result that went nowhere is not a success.
    """
    for number, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, mode)
            assert opened == number, "descriptors are given out lowest first"
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - lives as long as the process
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def _drop_standard_output() -> None:
    """Point the stream elsewhere, so that the interpreter's last flush does not fail a second time."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write_message(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        # Standard error is a broken pipe or a full disk. There is nowhere left to say so, and the run's result on
        # standard output is still worth finishing.
        pass
