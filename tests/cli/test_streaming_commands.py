"""``kvs run`` and ``kvs validate`` with an arena: the same numbers, and a store that cannot be had or read."""

from __future__ import annotations

import json
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvs_core.cpu import backend as cpu_backend
from tests.cli.conftest import Kvs

SHAPE = ("-c", "512", "-ub", "16", "-b", "16", "--kv-page-tokens", "16", "--device", "cpu")
LONG_PROMPT = "🦙" * 127  # with BOS and the space in front 510 tokens: all that leaves room for one step of decode
RUN = ("--temp", "0", "--ignore-eos", "-p", LONG_PROMPT)


@pytest.mark.parametrize(
    "words",
    [
        ("-ctk", "f32", "-ctv", "f32"),
        ("-ctk", "f32", "-ctv", "f32", "--kv-stream-arena-mib", "1"),
        ("-ctk", "f32", "-ctv", "q8_0", "--kv-stream-arena-mib", "2"),
        ("-ctk", "f32", "-ctv", "f32", "--kv-stream-arena-mib", "2", "--kv-stream-store", "PLACE"),
        ("-ctk", "f32", "-ctv", "f32", "--kv-stream-arena-mib", "auto"),
    ],
)
def test_validate_and_run_agree_on_every_number(
    kvs: Kvs, deep_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr(cpu_backend, "free_host_bytes", lambda: 8 << 30)
    words = tuple(str(tmp_path) if word == "PLACE" else word for word in words)
    planned = kvs("validate", "-m", deep_model, *SHAPE, *words, "--json")
    ran = kvs("run", "-m", deep_model, *SHAPE, *words, *RUN, "-n", "2", "--json")
    assert (planned.code, ran.code) == (0, 0), planned.err + ran.err
    plan, result = json.loads(planned.out)["plan"], json.loads(ran.out)
    assert result["plan"] == plan

    # The prediction is for one more token in the prompt and one more before the step, which change no page here.
    predicted = plan["predicted"]["prompt_streamed_bytes"] + plan["predicted"]["decode_step_streamed_bytes"]
    assert (predicted > 0) == plan["streams"]
    streaming = result["streaming"]
    if streaming is None:
        assert plan["arena"]["mode"] == "off"
    else:
        assert (result["n_prompt"], streaming["decode_steps"]) == (510, 1)
        assert streaming["bytes_streamed"] == streaming["predicted_bytes_streamed"] == predicted


def store_words(place: Path) -> tuple[str, ...]:
    return (*SHAPE, "-ctk", "f32", "-ctv", "f32", "--kv-stream-arena-mib", "1", "--kv-stream-store", str(place))


@contextmanager
def file_size_limit(n_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond ``n_bytes``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_store_without_space_ends_with_code_6_and_leaves_nothing(kvs: Kvs, deep_model: Path, tmp_path: Path) -> None:
    kvs("run", "-m", deep_model, *store_words(tmp_path), *RUN, "-n", "1")  # compiled kernels are kept before the limit
    for place in (tmp_path, tmp_path / "store"):
        with file_size_limit(1 << 20):
            finished = kvs("run", "-m", deep_model, *store_words(place), *RUN, "-n", "1")
        assert finished.code == 6
        assert finished.out == b""
        *_, error, hint = finished.err.splitlines()
        assert error.startswith(f"error: host store {place} needs ")
        assert error.endswith(" bytes, more than the file system grants: File too large")
        assert hint.startswith("hint: free space, choose another place for --kv-stream-store")
        assert list(tmp_path.iterdir()) == []


def test_a_store_that_exists_ends_with_code_6_and_is_untouched(kvs: Kvs, deep_model: Path, tmp_path: Path) -> None:
    place = tmp_path / "store"
    place.write_bytes(b"precious")
    finished = kvs("run", "-m", deep_model, *store_words(place), *RUN, "-n", "1")
    assert finished.code == 6
    assert finished.out == b""
    assert f"error: host store {place} exists already and is not overwritten\n" in finished.err
    assert place.read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("file", "exists already and is not overwritten"),
        ("missing/store", "cannot be created: there is no folder .*/missing"),
        ("file/store", "cannot be created: .*/file is not a folder"),
        ("full", "needs [0-9]+ bytes, more than the file system grants: File too large"),
    ],
)
def test_validate_refuses_the_stores_that_run_refuses(
    kvs: Kvs, deep_model: Path, tmp_path: Path, place: str, reason: str
) -> None:
    (tmp_path / "file").write_bytes(b"precious")
    words = ("-m", deep_model, *store_words(tmp_path / place))
    with file_size_limit((1 if place == "full" else 64) << 20):
        planned, ran = kvs("validate", *words), kvs("run", *words, *RUN, "-n", "1")
    assert (planned.code, ran.code) == (6, 6)
    for finished in (planned, ran):
        assert finished.out == b""
        assert re.search(f"^error: host store {tmp_path / place} {reason}$", finished.err, re.MULTILINE)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_store_for_pages_that_all_fit_is_said_to_change_nothing(kvs: Kvs, tiny_model: Path, tmp_path: Path) -> None:
    words = ("-m", tiny_model, "-c", "64", "-ub", "16", "--kv-stream-arena-mib", "64", "--kv-stream-store", tmp_path)
    finished = kvs("validate", *words)
    assert finished.code == 0
    assert "warning: --kv-stream-store changes nothing: every page fits in the arena" in finished.err


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_store_that_fails_during_the_run_ends_with_code_6(
    kvs: Kvs, deep_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, call, fail)
    finished = kvs("run", "-m", deep_model, *store_words(tmp_path), *RUN, "-n", "1", "--no-display-prompt")
    assert finished.code == 6
    assert finished.out == b""
    errors = [line for line in finished.err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert errors[0].endswith(f"could not be {'read' if call == 'preadv' else 'written'}: Input/output error")
    assert list(tmp_path.iterdir()) == []
