"""Progress lines and where the state of interrupted runs lives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvs_cli.console import Console
from kvs_cli.environment import cache_folder
from kvs_cli.evaluation_progress import LINE_SECONDS, ProgressReporter, show_duration
from kvs_core.evaluate.chunk_run import Progress
from kvs_core.evaluate.identity import fingerprint_files, fingerprint_tokenizer


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def at(*, done: int, rows: int = 0, resumed: int = 0) -> Progress:
    return Progress(
        n_chunk=10,
        n_chunks_done=done,
        n_resumed=resumed,
        chunk_rows_done=rows,
        rows_per_chunk=100,
        rows=np.zeros(done * 100),
    )


def make_reporter() -> tuple[ProgressReporter, Clock]:
    clock = Clock()
    console = Console()

    def render_chunks(progress: Progress, n_before: int) -> str:
        return "".join(f"[{number}]" for number in range(n_before + 1, progress.n_chunks_done + 1))

    return ProgressReporter(console, lambda progress: f"{len(progress.rows)} rows", render_chunks, clock), clock


def test_lines_come_now_and_then_and_name_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    reporter, clock = make_reporter()
    reporter(at(done=0))
    clock.now += LINE_SECONDS - 1
    reporter(at(done=1))
    assert capsys.readouterr().err == ""
    clock.now += 11
    reporter(at(done=2))
    assert capsys.readouterr().err == "chunk 3 of 10, about 3 min left, 200 rows\n"  # 40 s for two of ten
    reporter(at(done=2, rows=10))
    assert capsys.readouterr().err == ""


def test_time_left_counts_only_chunks_of_this_run(capsys: pytest.CaptureFixture[str]) -> None:
    reporter, clock = make_reporter()
    reporter(at(done=8, resumed=8))
    assert (
        capsys.readouterr().err == "going on with chunk 9 of 10: the ones before it are kept from an interrupted run\n"
    )
    clock.now += 60
    reporter(at(done=8, rows=100, resumed=8))
    assert capsys.readouterr().err == "chunk 9 of 10, about 60 s left, 800 rows\n"


def test_rows_of_a_chunk_are_its_second_half() -> None:
    reporter, clock = make_reporter()
    reporter(at(done=0))
    assert reporter.line(at(done=0, rows=50), clock.now + 75) == "chunk 1 of 10, about 15 min left"


def test_results_come_as_chunks_end_and_once_each(capfd: pytest.CaptureFixture[str]) -> None:
    reporter, _ = make_reporter()
    shown = []
    for progress in (at(done=2, resumed=2), at(done=2, rows=50, resumed=2), at(done=3, resumed=2)):
        reporter(progress)
        shown.append(capfd.readouterr().out)
    assert shown == ["[1][2]", "", "[3]"]


def test_json_keeps_results_for_its_document(capfd: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console.json = True
    reporter = ProgressReporter(console, lambda _: "", lambda *_: "text")
    reporter(at(done=1))
    assert capfd.readouterr().out == ""


def test_an_interruption_says_what_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    reporter, _ = make_reporter()
    reporter.say_kept(0)
    reporter(at(done=0))
    reporter.say_kept(0)
    assert capsys.readouterr().err == ""
    reporter(at(done=5))
    reporter.say_kept(3)
    assert "3 of 10 chunks are finished and kept" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0 s"), (89, "89 s"), (91, "2 min"), (3600, "60 min"), (12000, "3 h 20 min")]
)
def test_durations_are_rounded_to_what_matters(seconds: float, shown: str) -> None:
    assert show_duration(seconds) == shown


def test_the_cache_folder_follows_the_base_directory_specification() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/var/cache"}) == Path("/var/cache/kvs")
    for environ in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert cache_folder(environ) == Path.home() / ".cache" / "kvs"


def test_fingerprints_tell_files_and_vocabularies_apart(tmp_path: Path) -> None:
    path = tmp_path / "model"
    data = bytearray(np.random.default_rng(0).bytes(3 << 20))
    path.write_bytes(data)
    before = fingerprint_files([str(path)])
    assert fingerprint_files([str(path)]) == before
    data[2_500_000] ^= 1
    path.write_bytes(data)
    assert fingerprint_files([str(path)]) != before

    tokens = {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.scores": np.zeros(2, np.float32)}
    assert fingerprint_tokenizer(tokens) == fingerprint_tokenizer({**tokens, "general.name": "other"})
    assert fingerprint_tokenizer(tokens) != fingerprint_tokenizer({**tokens, "tokenizer.ggml.tokens": ["ab", ""]})
    assert fingerprint_tokenizer(tokens) != fingerprint_tokenizer({**tokens, "tokenizer.ggml.pre": "qwen2"})
