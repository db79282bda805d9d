"""The command tree: help from the flag table, misspelt commands, refusals with their exit codes (U30, U35)."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from kvs_cli.flag_table import FLAGS
from kvs_cli.flags import EVERY_COMMAND, RUN, VALIDATE
from kvs_core.processors import available_processors
from tests.cli.conftest import Kvs
from tests.cli.golden import GOLDEN, HELP_FILES
from tests.fixtures.tiny_models import TinyModel, write_model


@pytest.mark.parametrize("name", HELP_FILES)
def test_help_has_not_drifted_from_its_golden_file(kvs: Kvs, name: str) -> None:
    finished = kvs(*HELP_FILES[name])
    assert finished.code == 0
    assert finished.err == ""
    expected = (GOLDEN / name).read_text(encoding="utf-8")
    assert finished.text == expected, "python -m tests.cli.golden rewrites the files"


@pytest.mark.parametrize("command", EVERY_COMMAND)
def test_help_shows_every_spelling_of_every_flag(kvs: Kvs, command: str) -> None:
    words = kvs(command, "--help").text.replace(",", " ").split()
    for flag in FLAGS.of_command(command):
        assert set(flag.all_spellings) <= set(words)


@pytest.mark.parametrize("words", [["run", "-h"], ["run", "-c", "x", "--nonsense", "--help"]])
def test_help_wins_over_everything_else(kvs: Kvs, words: list[str]) -> None:
    finished = kvs(*words)
    assert finished.code == 0
    assert finished.text.startswith("Usage: kvs run [FLAGS]\n")


def test_the_version_is_one_line(kvs: Kvs) -> None:
    finished = kvs("--version")
    assert finished.code == 0
    assert finished.text.startswith("kvs ")
    assert finished.text.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        ([], "kvs: needs a command: run, validate, perplexity, kl-divergence, doctor", "kvs --help shows them"),
        (
            ["rum"],
            "rum: is not a command; known: run, validate, perplexity, kl-divergence, doctor",
            "did you mean kvs run?",
        ),
        (
            ["-m", "x"],
            "-m: stands before the command; first one of: run, validate, perplexity, kl-divergence, doctor",
            "kvs run -m ...",
        ),
    ],
)
def test_a_missing_command_is_explained(kvs: Kvs, words: list[str], error: str, hint: str) -> None:
    finished = kvs(*words)
    assert finished.code == 2
    assert finished.out == b""
    assert finished.err == f"error: {error}\nhint: {hint}\n"


@pytest.mark.parametrize("command", [RUN, VALIDATE])
def test_all_problems_of_a_command_are_reported_at_once(kvs: Kvs, command: str) -> None:
    finished = kvs(command, "-m", "missing.gguf", "-p", "hi", "-fa", "off", "-np", "2", "--lora", "x", "--tempp", "1")
    assert finished.code == 2
    assert finished.out == b""
    errors = [line for line in finished.err.splitlines() if line.startswith("error: ")]
    assert [line.split(":")[1].strip() for line in errors] == ["--lora", "--tempp", "-fa off", "-np 2"]


@pytest.mark.parametrize("value", ["-1", "nan", "1.5", "64M", ""])
def test_an_arena_that_is_no_whole_number_is_a_usage_error(kvs: Kvs, value: str) -> None:
    finished = kvs("run", "-m", "missing.gguf", "-p", "hi", "--kv-stream-arena-mib", value)
    assert finished.code == 2
    assert finished.err.startswith("error: --kv-stream-arena-mib: ")
    assert finished.err.count("\n") == 1


def test_json_errors_are_on_both_streams(kvs: Kvs) -> None:
    finished = kvs("run", "-m", "missing.gguf", "-p", "hi", "-np", "2", "--json", "-fa", "off")
    assert finished.code == 2
    document = json.loads(finished.out)
    assert document["schema_version"] == 1
    assert document["error"]["kind"] == "ConfigError"
    assert document["error"]["exit_code"] == 2
    assert [problem["field"] for problem in document["error"]["problems"]] == ["-fa", "-np"]
    assert document["error"]["problems"][1] == {
        "field": "-np",
        "value": "2",
        "reason": "several sequences are not supported yet, with or without an arena",
        "hint": "use -np 1",
    }
    assert finished.err.startswith("error: -fa off: ")


@pytest.mark.parametrize("command", [RUN, VALIDATE])
def test_a_missing_model_is_a_model_error_with_both_paths(
    kvs: Kvs, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    finished = kvs(command, "-m", "Модели/é.gguf", "-p", "hi")
    assert finished.code == 3
    assert finished.out == b""
    assert f"Модели/é.gguf (resolved to {tmp_path}/Модели/é.gguf): no such file" in finished.err


def test_an_empty_standard_input_is_no_prompt(kvs: Kvs) -> None:
    finished = kvs("run", "-m", "missing.gguf")
    assert finished.code == 2
    assert finished.err.startswith("error: standard input: holds no prompt: it is empty\n")


def test_the_log_file_gets_every_message(kvs: Kvs, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    finished = kvs("run", "-m", "missing.gguf", "-p", "hi", "-np", "2", "--log-file", log)
    assert finished.code == 2
    lines = log.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith(("error:", "hint:"))] == finished.err.splitlines()
    assert "-np = 2 (from -np)" in lines, "what -v would have shown is in the log as well"
    unwritable = kvs("run", "-m", "missing.gguf", "-p", "hi", "--log-file", tmp_path)
    assert unwritable.code == 6
    assert unwritable.err.startswith(f"error: log file {tmp_path}: Is a directory\n")


@pytest.mark.parametrize("flag", ["-m", "-f", "--chat-template-file"])
def test_a_log_never_overwrites_what_the_command_reads(kvs: Kvs, tmp_path: Path, flag: str) -> None:
    precious, link = tmp_path / "precious", tmp_path / "link"
    precious.write_bytes(b"precious")
    link.symlink_to(precious)
    others = () if flag == "-m" else ("-m", "missing.gguf", "--chat")
    finished = kvs("run", flag, precious, *others, "--log-file", link)
    assert finished.code == 2
    assert finished.err.startswith(f"error: --log-file: is the file of {flag}, which it would overwrite\n")
    assert precious.read_bytes() == b"precious"


def test_verbose_shows_the_configuration_and_where_it_comes_from(kvs: Kvs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVS_MODEL", "missing.gguf")
    finished = kvs("run", "-v", "-p", "hi")
    assert finished.code == 3
    assert "-m = missing.gguf (from variable KVS_MODEL)\n" in finished.err
    assert "-c " not in finished.err


def test_a_repeated_flag_and_one_for_what_happens_anyway_are_remarked_on(kvs: Kvs) -> None:
    finished = kvs("run", "-m", "missing.gguf", "-p", "hi", "-c", "8", "-c", "16", "--no-warmup")
    assert finished.err.startswith(
        "warning: -c replaces the earlier -c: the last one counts\n"
        "warning: --no-warmup changes nothing: only a GPU warms up, and has to\n"
    )


def test_turbo_keys_under_many_query_heads_are_one_warning_and_nothing_changes(kvs: Kvs, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf", TinyModel(n_head=6, n_head_kv=1, head_dim=64))
    words = ("validate", "-m", model, "-c", "64", "--device", "cpu", "-ctv", "turbo3")
    assert "warning" not in kvs(*words).err
    warned = kvs(*words, "-ctk", "turbo4", "--json")
    assert warned.code == 0
    (warning,) = (line for line in warned.err.splitlines() if line.startswith("warning:"))
    assert warning.startswith("warning: -ctk turbo4: 6 query heads share each K head where keys are turbo")
    assert "-ctk q8_0 is safer" in warned.err
    plan = json.loads(warned.out)["plan"]
    assert (plan["type_k"], plan["type_v"]) == ("turbo4", "turbo3")


def test_an_error_nobody_expected_is_one_line_and_verbose_shows_its_traceback(
    kvs: Kvs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(options: object, console: object) -> None:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr("kvs_cli.run.run_model", fail)
    finished = kvs("run", "-m", "x", "-p", "hi", "--json")
    message, hint = finished.err.splitlines()
    assert re.fullmatch(r"error: this is a mistake of kvs: ZeroDivisionError: boom \(app.py:[0-9]+\)", message)
    assert hint == "hint: run it again with -v for the traceback, and report both"
    assert finished.code == 1
    assert json.loads(finished.out)["error"]["exit_code"] == 1
    verbose = kvs("run", "-m", "x", "-p", "hi", "-v")
    assert "Traceback (most recent call last):\n" in verbose.err
    assert "\nZeroDivisionError: boom\n" in verbose.err


@pytest.mark.parametrize("words", [["--json"], ["--json", "run"], ["nope", "--json"]])
def test_a_missing_command_is_an_error_in_json_too(kvs: Kvs, words: list[str]) -> None:
    finished = kvs(*words)
    assert finished.code == 2
    assert json.loads(finished.out)["error"]["exit_code"] == 2


def test_more_threads_than_cores_are_warned_about(kvs: Kvs) -> None:
    n_cores = available_processors()
    assert "warning: -t 512: more threads than the " in kvs("run", "-m", "missing.gguf", "-p", "x", "-t", "512").err
    assert "warning" not in kvs("run", "-m", "missing.gguf", "-p", "x", "-t", str(n_cores)).err


def test_an_error_of_the_operating_system_is_input_output(kvs: Kvs, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(options: object, console: object) -> None:
        raise OSError(28, os.strerror(28), "/some/store")

    monkeypatch.setattr("kvs_cli.run.run_model", fail)
    finished = kvs("run", "-m", "x", "-p", "hi")
    assert finished.code == 6
    assert finished.err == "error: /some/store: No space left on device\n"
