"""Interrupted runs: finished chunks are kept, torn records are redone, and the result is the uninterrupted one."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvs_core.errors import FileAccessError
from kvs_core.evaluate import journal as journal_module
from kvs_core.evaluate.journal import ChunkRecord, Journal, configuration_key
from kvs_core.evaluate.perplexity import NLL_ROW
from tests.evaluate.fake_source import FakeSource
from tests.evaluate.resumable_run import N_CHUNK, N_CTX, ONE_IS_DONE, evaluate

KINDS = ("ppl", "llama", "kvs", "kld")
TILES_PER_CHUNK = 4
ROOT = Path(__file__).parents[2]


def make_sources(stop_after_tiles: int | None = None) -> tuple[FakeSource, FakeSource]:
    sources = FakeSource(bytes_per_token=7), FakeSource(bytes_per_token=9, noise=0.01)
    sources[0].stop_after_tiles = stop_after_tiles
    return sources


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_run_goes_on_and_gives_the_same_result(tmp_path: Path, kind: str) -> None:
    whole = evaluate(kind, tmp_path, sources=make_sources())
    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.raises(KeyboardInterrupt):
        evaluate(kind, tmp_path, sources=make_sources(stop_after_tiles=5 * TILES_PER_CHUNK + 2))
    assert not (tmp_path / f"base.{kind}").exists()
    sources = make_sources()
    resumed = evaluate(kind, tmp_path, sources=sources)
    assert resumed == whole
    assert sources[0].n_tokens_seen == (N_CHUNK - 5) * N_CTX, "five finished chunks are not computed again"
    assert not (tmp_path / f"{kind}.journal").exists()


@pytest.mark.parametrize("cut", [1, 7, 30, 200])
def test_a_torn_last_record_is_computed_again(tmp_path: Path, cut: int) -> None:
    whole = evaluate("kld", tmp_path, sources=make_sources())
    with pytest.raises(KeyboardInterrupt):
        evaluate("kld", tmp_path, sources=make_sources(stop_after_tiles=5 * TILES_PER_CHUNK + 2))
    journal = tmp_path / "kld.journal"
    os.truncate(journal, journal.stat().st_size - cut)
    sources = make_sources()
    assert evaluate("kld", tmp_path, sources=sources) == whole
    assert sources[0].n_tokens_seen == (N_CHUNK - 4) * N_CTX


def test_a_damaged_record_and_all_behind_it_are_computed_again(tmp_path: Path) -> None:
    key = configuration_key({"a": 1})
    with Journal(tmp_path / "j", key=key, dtype=NLL_ROW) as journal:
        for value in range(4):
            journal.append(ChunkRecord(rows=np.full(3, float(value)), notes={"chunk": value}))
    data = bytearray((tmp_path / "j").read_bytes())
    record = (len(data) - 40) // 4
    data[40 + record + record // 2] ^= 1
    (tmp_path / "j").write_bytes(bytes(data))
    with Journal(tmp_path / "j", key=key, dtype=NLL_ROW) as journal:
        assert [record.notes["chunk"] for record in journal.records] == [0]
        assert journal.records[0].rows.tolist() == [0.0, 0.0, 0.0]
        journal.append(ChunkRecord(rows=np.full(3, 9.0), notes={"chunk": 9}))
    with Journal(tmp_path / "j", key=key, dtype=NLL_ROW) as journal:
        assert [record.notes["chunk"] for record in journal.records] == [0, 9]


def test_a_journal_of_another_configuration_is_not_used(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", key=configuration_key({"types": "f16"}), dtype=NLL_ROW) as journal:
        journal.append(ChunkRecord(rows=np.zeros(3), notes={}))
    with Journal(tmp_path / "j", key=configuration_key({"types": "q8_0"}), dtype=NLL_ROW) as journal:
        assert journal.records == []


def test_keeping_the_first_records_forgets_the_others_on_disk_too(tmp_path: Path) -> None:
    key = configuration_key({})
    with Journal(tmp_path / "j", key=key, dtype=NLL_ROW) as journal:
        for value in range(3):
            journal.append(ChunkRecord(rows=np.full(value + 1, 1.0), notes={}))
        journal.keep_first(2)
        journal.append(ChunkRecord(rows=np.full(9, 1.0), notes={}))
    with Journal(tmp_path / "j", key=key, dtype=NLL_ROW) as journal:
        assert [len(record.rows) for record in journal.records] == [1, 2, 9]


def test_a_disk_that_fills_up_ends_the_list_and_whoever_asked_to_know_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, told = configuration_key({}), []
    original = journal_module.write_all

    def write_half(file: io.FileIO, data: bytes) -> None:
        original(file, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    record = ChunkRecord(rows=np.zeros(3), notes={})
    with Journal(tmp_path / "j", key=key, dtype=NLL_ROW, on_loss=told.append) as journal:
        journal.append(record)
        with monkeypatch.context() as patch:
            patch.setattr(journal_module, "write_all", write_half)
            journal.append(record)
        journal.append(record)  # there is room again, but a chunk is missing before this one
        assert len(journal.records) == 1
    assert [str(error) for error in told] == [f"{tmp_path / 'j'}: No space left on device"]
    with Journal(tmp_path / "j", key=key, dtype=NLL_ROW) as journal:
        assert len(journal.records) == 1
        monkeypatch.setattr(journal_module, "write_all", write_half)
        with pytest.raises(FileAccessError, match="No space left on device"):
            journal.append(record)


def test_a_journal_without_a_finished_chunk_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    Journal(path, key=configuration_key({}), dtype=NLL_ROW).close()
    assert not path.exists()


def test_two_runs_of_the_same_command_do_not_share_a_journal(tmp_path: Path) -> None:
    key = configuration_key({})
    first = Journal(tmp_path / "j", key=key, dtype=NLL_ROW)
    with pytest.raises(FileAccessError, match="another run is writing it"):
        Journal(tmp_path / "j", key=key, dtype=NLL_ROW)
    first.close()
    Journal(tmp_path / "j", key=key, dtype=NLL_ROW).close()


@pytest.mark.parametrize("kind", ["llama", "kvs"])
def test_a_partial_file_without_its_last_chunk_is_written_again_from_there(tmp_path: Path, kind: str) -> None:
    whole = evaluate(kind, tmp_path, sources=make_sources())
    with pytest.raises(KeyboardInterrupt):
        evaluate(kind, tmp_path, sources=make_sources(stop_after_tiles=5 * TILES_PER_CHUNK))
    partial = tmp_path / f"base.{kind}.partial"
    os.truncate(partial, partial.stat().st_size - 100)
    sources = make_sources()
    assert evaluate(kind, tmp_path, sources=sources) == whole
    assert sources[0].n_tokens_seen == (N_CHUNK - 4) * N_CTX


@pytest.mark.parametrize("kind", ["llama", "kvs"])
def test_a_foreign_partial_file_is_written_from_the_start(tmp_path: Path, kind: str) -> None:
    (tmp_path / f"base.{kind}.partial").write_bytes(bytes(100_000))
    report = evaluate(kind, tmp_path, sources=make_sources())
    (tmp_path / f"base.{kind}").unlink()
    assert evaluate(kind, tmp_path, sources=make_sources(), with_journal=False) == report


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kvs", "kld"])
def test_a_run_killed_five_times_at_random_gives_the_uninterrupted_result(tmp_path: Path, kind: str) -> None:
    whole = evaluate(kind, tmp_path, sources=make_sources())
    for path in tmp_path.iterdir():
        path.unlink()
    seed = random.randrange(10**6)
    print("seed", seed)
    moments = random.Random(seed)
    command = [sys.executable, "-m", "tests.evaluate.resumable_run", kind, str(tmp_path), "20"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    sizes, journal = [], tmp_path / f"{kind}.journal"
    for _ in range(5):
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline().decode().strip() == ONE_IS_DONE
            time.sleep(moments.uniform(0.0, 0.1))  # up to another chunk
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        sizes.append(journal.stat().st_size)
    assert sizes == sorted(set(sizes)), "every process kept what it finished, beside what was there"
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True, text=True)
    assert json.loads(done.stdout.splitlines()[-1]) == json.loads(json.dumps(whole))
