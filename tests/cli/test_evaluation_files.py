"""Where and when ``kvs perplexity`` and ``kvs kl-divergence`` write, and what they leave alone."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from kvs_cli import evaluation, perplexity_command
from kvs_cli.exits import SignalReceived
from kvs_core.errors import FileAccessError
from kvs_core.evaluate import journal
from tests.cli.conftest import Kvs
from tests.cli.test_evaluation_commands import COMMON, bases, document_of, interrupt_after, state_folder
from tests.cli.test_process import kvs_command, make_environment

__all__ = ["bases", "state_folder"]


@pytest.mark.parametrize("victim", ["model.gguf", "text.txt"])
def test_a_base_file_never_replaces_what_the_command_reads(
    kvs: Kvs, tiny_model: Path, text_file: Path, tmp_path: Path, victim: str
) -> None:
    (tmp_path / "model.gguf").write_bytes(tiny_model.read_bytes())
    (tmp_path / "text.txt").write_bytes(text_file.read_bytes())
    before = (tmp_path / victim).read_bytes()
    finished = kvs(
        *("perplexity", "-m", tmp_path / "model.gguf", "-f", tmp_path / "text.txt", *COMMON),
        *("--save-all-logits", tmp_path / victim),
    )
    assert finished.code == 2
    assert "which this command reads" in finished.err
    assert (tmp_path / victim).read_bytes() == before


def test_a_picture_never_replaces_what_the_command_reads(
    kvs: Kvs, tiny_model: Path, text_file: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model.png"
    model.write_bytes(tiny_model.read_bytes())
    finished = kvs("kl-divergence", "-m", model, "-f", text_file, *COMMON, "--plot", model)
    assert finished.code == 2
    assert model.read_bytes() == tiny_model.read_bytes()


@pytest.mark.parametrize("flag", ["--base", "--other"])
def test_a_log_never_replaces_a_file_of_logits(kvs: Kvs, tmp_path: Path, flag: str) -> None:
    saved = tmp_path / "saved.kld"
    saved.write_bytes(b"precious")
    files = {"--base": tmp_path / "b", "--other": tmp_path / "o", flag: saved}
    words = [word for item in files.items() for word in item]
    finished = kvs("kl-divergence", *words, "--log-file", saved)
    assert finished.code == 2
    assert f"--log-file: is the file of {flag}, which it would overwrite" in finished.err
    assert saved.read_bytes() == b"precious"


def test_pipes_are_neither_replaced_nor_waited_for(kvs: Kvs, tiny_model: Path, text_file: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for words in (
        ("perplexity", "-m", tiny_model, "-f", text_file, *COMMON, "--save-all-logits", pipe),
        ("perplexity", "-m", tiny_model, "--kl-divergence", "--kl-divergence-base", pipe),
        ("kl-divergence", "--base", pipe, "--other", pipe),
    ):
        finished = kvs(*words)
        assert finished.code == 6
        assert "pipe: is not a regular file" in finished.err
    assert pipe.is_fifo()


@pytest.mark.parametrize("stream", ["1", "2"])
def test_a_base_file_never_replaces_what_a_stream_is_redirected_to(
    tiny_model: Path, text_file: Path, tmp_path: Path, stream: str
) -> None:
    place = tmp_path / "out"
    words = ("perplexity", "-m", tiny_model, "-f", text_file, *COMMON, "--save-all-logits", place)
    shell = f'"$@" {stream}>"$0"'
    run = subprocess.run(["/bin/sh", "-c", shell, place, *kvs_command(*words)], env=make_environment())
    assert run.returncode == 6
    if stream == "2":
        assert f"error: {place}: is where standard error goes, which it would replace\n" in place.read_text()
    assert list(tmp_path.glob("out*")) == [place]


@pytest.mark.parametrize("kind", ["llama", "kvs"])
def test_a_run_without_resume_leaves_nothing_and_takes_old_state_away(
    kvs: Kvs, tiny_model: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Otherwise rows of the second run could end up under the first one's list of finished chunks."""
    words = (
        *("perplexity", "-m", tiny_model, "-f", text_file, *COMMON),
        *("--kl-divergence-base", tmp_path / "base", "--kld-format", kind),
    )
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2)
        assert kvs(*words).code == 130
    assert {path.name for path in tmp_path.glob("base*")} == {"base.partial", "base.journal"}
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        stopped = kvs(*words, "-ctk", "q8_0", "--no-resume")
    assert stopped.code == 130
    assert "kept" not in stopped.err
    assert list(tmp_path.glob("base*")) == []


def test_an_interruption_before_the_first_chunk_leaves_no_state(
    kvs: Kvs, tiny_model: Path, text_file: Path, state_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(monkeypatch, 0)
    assert kvs("perplexity", "-m", tiny_model, "-f", text_file, *COMMON).code == 130
    assert list(state_folder.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        "perplexity -f {text} -c 64",
        "perplexity --kl-divergence --kl-divergence-base {base} -ctk q8_0",
        "kl-divergence -f {text} -c 64 -ctk q8_0 --base-ctk f16",
    ],
)
def test_each_chunk_s_result_is_out_when_it_ends_and_again_after_a_resume(
    kvs: Kvs, tiny_model: Path, text_file: Path, bases: dict[str, Path], monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    filled = [word.format(text=text_file, base=bases["llama"]) for word in words.split()]
    command = (*filled, "-m", tiny_model, "-b", "64", "-t", "2")
    whole = kvs(*command)
    with monkeypatch.context() as patch:
        interrupt_after(patch, n_passes=2 if words.startswith("kl-divergence") else 1)
        interrupted = kvs(*command)
    assert interrupted.code == 130
    assert whole.out.startswith(interrupted.out)
    assert whole.text.startswith("[1]") or interrupted.text.endswith("\n")  # a comparison's line is whole
    shown = interrupted.text.removesuffix("\n").splitlines()[-1].lstrip(" [")
    assert shown.startswith("1"), "the first chunk's figures, and no other's"
    assert kvs(*command).out == whole.out


@pytest.mark.parametrize("as_json", [False, True])
def test_a_picture_that_cannot_be_drawn_at_the_end_loses_nothing(
    kvs: Kvs, tiny_model: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    picture = tmp_path / "picture.svg"
    words = ("kl-divergence", "-m", tiny_model, "-f", text_file, *COMMON, "-ctk", "q8_0", "--base-ctk", "f16")
    words += ("--plot", picture, *(("--json",) if as_json else ()))
    whole = kvs(*words)
    picture.unlink()

    def fail(*_: object, **__: object) -> None:
        raise FileAccessError(f"{picture}: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "plot_divergence", fail)
        failed = kvs(*words)
    assert failed.code == 6
    assert failed.err.count("error: ") == failed.err.count(f"error: {picture}: No space left on device\n") == 1
    if as_json:
        document = json.loads(failed.out)
        assert document.pop("error")["exit_code"] == 6
        assert document == json.loads(whole.out)
    else:
        assert failed.out == whole.out
    with monkeypatch.context() as patch:
        interrupt_after(patch, 0)  # nothing is computed again
        again = kvs(*words)
    assert (again.code, again.out) == (0, whole.out)
    assert picture.exists()


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_cache_folder_that_fills_up_costs_only_a_warning(
    kvs: Kvs, tiny_model: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch, is_interrupted: bool
) -> None:
    words = ("perplexity", "-m", tiny_model, "-f", text_file, *COMMON)
    whole = kvs(*words)
    original, left = journal.write_all, 2  # the head of the file and one chunk

    def write_all(file: io.FileIO, data: bytes) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(journal, "write_all", write_all)
        if is_interrupted:
            patch.setattr(perplexity_command, "render_perplexity", stop)
        finished = kvs(*words)
    assert finished.err.count("warning: finished chunks are not kept from here on, should this run be inter") == 1
    assert finished.code == (130 if is_interrupted else 0)
    if is_interrupted:
        assert "1 of 9 chunks are finished and kept" in finished.err
        assert "going on with chunk 2 of 9" in kvs(*words).err
    else:
        assert finished.out == whole.out


def stop(*_: object) -> str:
    raise SignalReceived(signal.SIGINT)


def test_two_files_are_compared_without_a_model(kvs: Kvs, bases: dict[str, Path]) -> None:
    document = document_of(kvs("kl-divergence", "--base", bases["kvs"], "--other", bases["kvs"], "--json"))
    assert document["kld"]["rows_identical"] == document["kld"]["rows"]
    mixed = kvs("kl-divergence", "--base", bases["llama"], "--other", bases["kvs"], "--max-kld", "1e-3")
    assert mixed.code == 0
    assert "Rows identical: unknown" in mixed.text
