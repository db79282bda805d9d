"""The console alone: logs that fill up, bytes that are no UTF-8 (U30, U33, U35)."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvs_cli.console import Console
from kvs_cli.options import PromptOptions
from kvs_cli.prompt import read_prompt
from kvs_core.errors import FileAccessError

FULL = Path("/dev/full")


def test_a_log_that_cannot_be_written_any_more_ends_with_one_warning(capfd: pytest.CaptureFixture[str]) -> None:
    with Console() as console:
        console.open_log(FULL)
        console.detail("only the log gets this")
        console.info("one")
        console.error("two")
    assert capfd.readouterr().err == (
        "warning: log file /dev/full: No space left on device; it ends here\none\nerror: two\n"
    )


def test_a_json_document_is_utf8_whatever_bytes_a_file_name_has(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    name = "é \udcff"
    with Console() as console:
        console.write_json({"name": name})
    out, _ = capfdbinary.readouterr()
    assert json.loads(out.decode("utf-8"))["name"] == name
    assert "é" in out.decode("utf-8")


class FakeTerminal(io.TextIOWrapper):
    """Keeps what is written and calls itself a terminal."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

    def isatty(self) -> bool:
        return True

    def text(self) -> str:
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue().decode("utf-8")


def test_progress_rewrites_its_own_line_and_never_one_with_text(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = FakeTerminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    console = Console(rewrites_lines=True)
    console.progress("1 of 2")
    console.progress("")
    assert terminal.text() == "\r\x1b[K1 of 2\r\x1b[K"
    console.write_text("Once upon")
    console.progress("2 of 2")
    console.progress("")
    console.write_text(" a time")
    assert terminal.text().endswith("\x1b[KOnce upon a time")


@pytest.mark.parametrize(("redirection", "expected"), [("2>&1", b"text\nline\n"), ("2>/dev/null", b"text")])
def test_a_message_leaves_an_open_line_only_where_both_streams_meet(redirection: str, expected: bytes) -> None:
    program = "from kvs_cli.console import Console; c = Console(); c.write_text('text'); c.info('line')"
    run = subprocess.run(["/bin/sh", "-c", f'"$0" -c "$1" {redirection}', sys.executable, program], capture_output=True)
    assert run.stdout == expected


def test_a_standard_input_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(tmp_path / "written", "wb") as only_written, open(only_written.fileno(), closefd=False) as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        with pytest.raises(FileAccessError, match=r"^standard input: Bad file descriptor$"):
            read_prompt(PromptOptions())
