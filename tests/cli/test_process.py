"""``kvs`` as a process: signals, closed and broken streams, locales, terminals (U30, U33, U34, U36, U42, U44)."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import pytest

from kvs_cli.environment import cache_root

pytestmark = pytest.mark.slow  # every test starts an interpreter or more

ROOT = Path(__file__).parents[2]
LLAMA = "🦙"
GRACE_SECONDS = 3.0  # two for the run, one for a busy machine to reap the process
ENDLESS = ("-c", "100000", "-ub", "16", "--temp", "0", "--device", "cpu", "-p", LLAMA, "--no-display-prompt")


def make_environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVS_", "LC_", "LANG", "PYTHON"))}
    return {**kept, "PYTHONPATH": str(ROOT), **changes}


def kvs_command(*words: str | Path) -> list[str]:
    return [sys.executable, "-W", "error", "-m", "kvs_cli", *(str(word) for word in words)]


def run_kvs(*words: str | Path, stdin: bytes = b"", **changes: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        kvs_command(*words), input=stdin, capture_output=True, env=make_environment(**changes), timeout=120, check=False
    )


def start_endless_run(model: Path, *words: str) -> subprocess.Popen[bytes]:
    """A run that would go on for minutes, with its first text already read."""
    process = subprocess.Popen(
        kvs_command("run", "-m", model, *ENDLESS, *words),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=make_environment(),
    )
    assert process.stdout is not None
    assert process.stdout.read(len(LLAMA.encode())) == LLAMA.encode()
    return process


@pytest.fixture(scope="module")
def compiled(cycle_model: Path) -> None:
    """The kernels of these runs are in the disk cache: compiling one may outlast the grace of a signal."""
    words = ("run", "-m", cycle_model, *ENDLESS[2:], "-c", "64", "-n", "4")
    subprocess.run(kvs_command(*words), env=make_environment(), check=True, capture_output=True)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "terminated"),
        (signal.SIGHUP, 129, "the terminal went"),
    ],
)
def test_a_signal_ends_the_run_with_one_line_and_the_text_so_far(
    cycle_model: Path, number: int, code: int, line: str
) -> None:
    process = start_endless_run(cycle_model)
    started = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - started < GRACE_SECONDS
    assert process.returncode == code
    assert out.decode("utf-8").rstrip("\ufffd").replace(LLAMA, "") == ""
    lines = err.decode().splitlines()
    assert lines[-1].startswith(line)
    assert not any("Traceback" in line or "time =" in line for line in lines)


@pytest.mark.usefixtures("compiled")
def test_json_mode_reports_the_signal(cycle_model: Path) -> None:
    process = subprocess.Popen(
        kvs_command("run", "-m", cycle_model, *ENDLESS, "--json"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=make_environment(),
    )
    assert process.stderr is not None
    while not process.stderr.readline().startswith(b"seed: "):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b'"kind": "SignalReceived"' in out
    assert b'"exit_code": 130' in out


@pytest.mark.parametrize("n_signals", [1, 2])
def test_a_call_into_native_code_cannot_hold_the_end_up(n_signals: int) -> None:
    """One signal leaves it the usual time; after a second one it ends at once, however long that time is."""
    stuck = (
        "import hashlib, sys\n"
        "from kvs_cli import signals\n"
        f"signals.GRACE_SECONDS = {'signals.GRACE_SECONDS' if n_signals == 1 else 50.0}\n"
        "signals.install_signal_handlers()\n"
        "print('ready', flush=True)\n"
        "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", stuck], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=make_environment()
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    time.sleep(0.3)  # until it is inside the call
    started = time.monotonic()
    for _ in range(n_signals):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == b"interrupted\n"
    assert time.monotonic() - started < (GRACE_SECONDS if n_signals == 1 else 20.0)


def test_a_reader_that_goes_away_ends_the_run_quietly(cycle_model: Path) -> None:
    process = start_endless_run(cycle_model)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read().decode()
    assert process.wait(timeout=60) == 141
    assert "Traceback" not in err
    assert "error" not in err
    process.stderr.close()


def test_closed_streams_for_input_and_messages_do_not_change_the_result(cycle_model: Path) -> None:
    words = kvs_command("run", "-m", cycle_model, "-c", "64", "--temp", "0", "-p", LLAMA, "-n", "4", "--device", "cpu")
    whole = subprocess.run(words, capture_output=True, env=make_environment(), check=True, stdin=subprocess.DEVNULL)
    command = ["sh", "-c", 'exec "$@" 2>&- <&-', "sh", *words]
    done = subprocess.run(command, capture_output=True, env=make_environment(), check=False)
    assert (done.returncode, done.stdout) == (0, whole.stdout)


@pytest.mark.parametrize(("redirection", "reason"), [(">&-", b"is closed"), (">/dev/full", b"No space left on device")])
@pytest.mark.parametrize("words", [["--help"], ["run", "--json"]])
def test_a_result_that_cannot_be_written_is_a_failure_with_one_line(
    redirection: str, reason: bytes, words: list[str]
) -> None:
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", *kvs_command(*words)]
    done = subprocess.run(command, capture_output=True, env=make_environment(), check=False)
    assert done.returncode == (6 if words == ["--help"] else 2), "the first error decides"
    assert done.stderr.splitlines()[-1] == b"error: standard output: " + reason
    assert b"Traceback" not in done.stderr


def test_a_failure_with_standard_error_closed_still_has_its_code() -> None:
    command = ["sh", "-c", 'exec "$@" 2>&- <&-', "sh", *kvs_command("run", "-m", "missing.gguf")]
    done = subprocess.run(command, capture_output=True, env=make_environment(), check=False)
    assert (done.returncode, done.stdout) == (2, b"")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_text_is_utf8_and_messages_degrade_whatever_the_locale(
    cycle_model: Path, tmp_path: Path, encoding: str
) -> None:
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": encoding}
    model = tmp_path / "é 模型.gguf"
    model.symlink_to(cycle_model)
    common = ("-c", "64", "--temp", "0", "-n", "4", "--device", "cpu")
    done = run_kvs("run", "-m", model, *common, "-p", f"é█{LLAMA}", **locale)
    assert (done.returncode, done.stdout.decode("utf-8")) == (0, f" é█{LLAMA}{LLAMA}")
    stray = run_kvs("run", "-m", tmp_path / "模型.gguf", *common, stdin=b"a\x9d", **locale)
    assert (stray.returncode, stray.stdout) == (2, b"")
    assert b"error: standard input: the text is not valid UTF-8: byte offset 1" in stray.stderr
    missing = run_kvs("validate", "-m", tmp_path / "模型.gguf", **locale)
    assert missing.returncode == 3
    assert missing.stderr.isascii()
    assert b".gguf: no such file" in missing.stderr


def test_a_pipe_gets_neither_colours_nor_carriage_returns(cycle_model: Path) -> None:
    done = run_kvs("run", "-m", cycle_model, "-c", "64", "-n", "4", "--temp", "0", "-p", LLAMA, "-v", COLUMNS="20")
    assert done.stdout.decode("utf-8") == f" {LLAMA}{LLAMA}"
    for data in (done.stdout, done.stderr):
        assert b"\r" not in data
        assert b"\x1b" not in data


def test_help_works_with_every_warning_an_error_and_no_gpu() -> None:
    done = run_kvs("--help", CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.usefixtures("compiled")
def test_a_run_that_compiles_says_so_once_and_where_kernels_go(cycle_model: Path, tmp_path: Path) -> None:
    used = cache_root(make_environment()).glob("kvs/kernels/*")
    kept = max(used, key=lambda folder: folder.stat().st_mtime, default=None)
    if kept is not None:  # all that these runs need but two small kernels; compiling the rest too takes half a minute
        missing = shutil.ignore_patterns("*.tmp.*", "*.add_kernel-*", "*.rms_norm_kernel-*")
        shutil.copytree(kept, tmp_path / "kvs" / "kernels" / kept.name, ignore=missing)
    words = ("-m", cycle_model, "-c", "64", "-t", "1", "--device", "cpu")
    line = f"compiling kernels, which counts in this run's times; later runs take them from {tmp_path}/kvs/kernels/"
    for command, n_lines in ((("validate", *words), 0), (("run", *words, "-p", LLAMA, "-n", "1"), 1)):
        finished = run_kvs(*command, KVS_CACHE_DIR=str(tmp_path))
        assert finished.returncode == 0
        assert finished.stderr.count(line.encode()) == n_lines, command
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    warned = run_kvs("validate", "-m", cycle_model, "-c", "64", KVS_CACHE_DIR=str(blocked))
    assert warned.returncode == 0
    assert warned.stderr.startswith(b"warning: kernel cache ")


def talk_to_terminal(
    words: Sequence[str | Path],
    lines: Sequence[bytes | None],
    *,
    term: str,
    output: BinaryIO | None = None,
    messages: BinaryIO | None = None,
    interrupts_answers: bool = False,
    **variables: str,
) -> tuple[int, bytes]:
    """Run kvs with all streams on a terminal, or with standard output (``output``) or standard error (``messages``) in
    a file; send a line at each prompt mark.

    None instead of a line, and ``interrupts_answers`` in every answer that has begun, is an interrupt.
    """
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        kvs_command(*words),
        stdin=follower,
        stdout=follower if output is None else output,
        stderr=follower if messages is None else messages,
        env=make_environment(TERM=term, **variables),
        start_new_session=True,
    )
    os.close(follower)
    waiting, seen, asked, interrupted = list(lines), b"", 0, 0
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        ready, _, _ = select.select([leader], [], [], 0.2)
        if ready:
            try:
                data = os.read(leader, 4096)
            except OSError:  # the terminal reports the end of its other side this way
                break
            seen += data
            if not data:
                break
        if seen.count(b"> ") > asked and waiting:
            asked = seen.count(b"> ")
            line = waiting.pop(0)
            if line is None:
                time.sleep(0.3)  # the mark comes before the wait for a line
                process.send_signal(signal.SIGINT)
            else:
                os.write(leader, line)
        answer = seen.rpartition(b"> ")[2].partition(b"\n")[2]
        if interrupts_answers and asked > interrupted and answer.startswith(3 * LLAMA.encode()):
            interrupted = asked
            process.send_signal(signal.SIGINT)
    code = process.wait(timeout=60)
    os.close(leader)
    return code, seen


def test_a_conversation_on_a_terminal_answers_each_line_and_ends_at_end_of_input(cycle_model: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    words = ("run", "-m", cycle_model, "-cnv", "--chat-template", template, "-c", "64", "-n", "4", "--temp", "0")
    code, seen = talk_to_terminal(words, [f"{LLAMA}\n".encode(), b"\n", f"x{LLAMA}\n".encode(), b"\x04"], term="dumb")
    assert code == 0
    # Each question as the terminal echoes it, then its answer; the first question is the mark's whole line.
    text = seen.decode().replace("\r", "")
    assert f"> {LLAMA}\n{LLAMA}\n> \n> x{LLAMA}\n{LLAMA}\n> " in text
    assert "\x1b" not in text


@pytest.mark.usefixtures("compiled")
def test_an_interrupt_stops_an_answer_and_between_answers_the_conversation(cycle_model: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    words = ("run", "-m", cycle_model, "-cnv", "--chat-template", template, *ENDLESS[:-3])
    question = f"{LLAMA}\n".encode()
    code, seen = talk_to_terminal(words, [question, question, b"\x04"], term="dumb", interrupts_answers=True)
    assert code == 0
    answers = seen.decode().replace("\r", "").split("> ")[1:]
    assert len(answers) == 3
    for answer in answers[:2]:
        asked, text, *rest = answer.split("\n")
        assert asked == LLAMA
        assert text.rstrip("\ufffd").replace(LLAMA, "") == ""
        assert rest == [""]

    code, seen = talk_to_terminal(words, [question, None], term="dumb", interrupts_answers=True)
    assert code == 130
    assert seen.replace(b"\r", b"").endswith(b"> \ninterrupted\n")


def test_a_conversation_in_a_file_holds_the_answers_alone(cycle_model: Path, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    words = ("run", "-m", cycle_model, "-cnv", "--chat-template", template, "-c", "64", "-n", "4", "--temp", "0")
    questions = [f"{LLAMA}\n".encode(), f"x{LLAMA}\n".encode(), b"\x04"]
    with (tmp_path / "answers").open("wb") as file:
        code, seen = talk_to_terminal((*words, "--kv-stream-arena-mib", "8"), questions, term="dumb", output=file)
    assert code == 0
    assert (tmp_path / "answers").read_text() == f"{LLAMA}\n{LLAMA}\n"
    last = seen.decode().replace("\r", "").splitlines()[-1]
    assert last == "streaming: 2 pages resident, nothing streamed: every page fitted"


def test_a_question_that_cannot_be_put_does_not_end_the_conversation(cycle_model: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    words = ("run", "-m", cycle_model, "-cnv", "--chat-template", template, "-c", "64", "-n", "4", "--temp", "0")
    questions = [b"\x9d\n", b"x" * 100 + b"\n", f"{LLAMA}\n".encode(), b"\x04"]
    code, seen = talk_to_terminal(words, questions, term="dumb")
    text = seen.decode("utf-8", "replace").replace("\r", "")
    assert code == 0
    assert "error: the question: the text is not valid UTF-8: byte offset 0, bytes 9d\n" in text
    assert "tokens are more than the context of 64 tokens holds\n" in text
    assert f"> {LLAMA}\n{LLAMA}\n> " in text


@pytest.mark.parametrize(
    "variables",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
    ids=["ascii", "locale-c"],
)
def test_a_question_is_utf8_whatever_the_locale(cycle_model: Path, variables: dict[str, str]) -> None:
    """The answer goes on with the question's last token, and the template lets pass what is read as it was typed."""
    template = "{% if messages[0].content == 'é\U0001f999" + LLAMA + "' %}" + LLAMA + "{% else %}?{% endif %}"
    words = ("run", "-m", cycle_model, "-cnv", "--chat-template", template, "-c", "64", "-n", "4", "--temp", "0")
    question = f"é\U0001f999{LLAMA}\n"
    code, seen = talk_to_terminal(words, [question.encode(), b"\x04"], term="dumb", **variables)
    assert code == 0
    assert f"> {question}{LLAMA}\n> " in seen.decode().replace("\r", "")


def test_a_question_longer_than_a_terminal_passes_on_is_refused_not_cut(cycle_model: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    words = ("run", "-m", cycle_model, "-cnv", "--chat-template", template, "-c", "8192", "-n", "4", "--temp", "0")
    longest = b"x" * (4094 - len(LLAMA.encode())) + LLAMA.encode() + b"\n"
    code, seen = talk_to_terminal(words, [b"x" * 5000 + b"\n", longest, b"\x04"], term="dumb")
    refused, answered = seen.decode().replace("\r", "").split("> ")[1:3]
    assert code == 0
    assert "error: the question: has 4095 bytes, as many as a terminal passes on of one line" in refused
    assert "-f FILE" in refused
    assert answered.endswith(f"{LLAMA}\n{LLAMA}\n")


def test_the_mark_is_on_the_terminal_when_messages_go_to_a_file(cycle_model: Path, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    words = ("run", "-m", cycle_model, "-cnv", "--chat-template", template, "-c", "64", "-n", "4", "--temp", "0")
    with (tmp_path / "messages").open("wb") as file:
        code, seen = talk_to_terminal(words, [f"{LLAMA}\n".encode(), b"\x04"], term="dumb", messages=file)
    assert code == 0
    assert seen.decode().replace("\r", "") == f"> {LLAMA}\n{LLAMA}\n> \n"
    assert b"> " not in (tmp_path / "messages").read_bytes()


def test_a_conversation_without_its_template_ends_before_weights_are_read(cycle_model: Path, tmp_path: Path) -> None:
    words = ("run", "-m", cycle_model, "-cnv", "--chat-template-file", tmp_path / "none", "--device", "cpu")
    code, seen = talk_to_terminal(words, [], term="dumb")
    assert code == 6
    assert seen.decode().startswith(f"error: chat template {tmp_path}/none: No such file or directory")


def test_a_terminal_without_a_prompt_is_not_waited_for(cycle_model: Path) -> None:
    code, seen = talk_to_terminal(("run", "-m", cycle_model), [], term="xterm")
    assert code == 2
    assert b"standard input: is a terminal, and no prompt was given" in seen
    assert b"\x1b[1;31merror:\x1b[0m" in seen


@pytest.mark.parametrize("delay_seconds", [0.03, 0.1, 0.2])
def test_a_signal_during_the_first_imports_leaves_no_traceback(delay_seconds: float) -> None:
    program = (
        "import importlib.abc, sys, time\n"
        "from kvs_cli import entry\n"
        "class Slow(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'kvs_cli.app': print('importing', flush=True); time.sleep(5)\n"
        "sys.meta_path.insert(0, Slow())\n"
        "entry.main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    time.sleep(delay_seconds)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (130, "interrupted\n")
