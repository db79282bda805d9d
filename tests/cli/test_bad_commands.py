"""Every way a command can fail before it generates: one clear line each, its exit code, nothing on standard output."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.conftest import Finished, Kvs
from tests.fixtures.gguf_bytes import GgufBytes, Value, string, tiny_llama, u32

ARRAY_TYPE = 9
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1234567\n"
WHOLE = tiny_llama().build()
COUNT = 2**63


def in_table() -> bytes:
    return WHOLE[: tiny_llama().table_begin() + 100]


def built(change: Callable[[GgufBytes], GgufBytes]) -> bytes:
    return change(tiny_llama()).build()


LONG_ARRAY = Value(type_id=ARRAY_TYPE, raw=struct.pack("<IQ", 4, COUNT))

BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "LFS pointer": (LFS_POINTER, "LFS"),
    "web page": (b"<!DOCTYPE html><html><body>404</body></html>", "HTML"),
    "60 percent": (WHOLE[: len(WHOLE) * 6 // 10], "tensor"),
    "last byte missing": (WHOLE[:-1], "tensor"),
    "cut in the tensor table": (in_table(), "tensor"),
    "2^63 keys": (built(lambda file: replace(file, n_keys=COUNT)), "key"),
    "2^63 tensors": (built(lambda file: replace(file, n_tensors=COUNT)), "tensor"),
    "array of 2^63": (built(lambda file: file.with_key("tokenizer.ggml.tokens", LONG_ARRAY)), "tokenizer.ggml.tokens"),
    "big-endian": (WHOLE[:4] + struct.pack(">I", 3) + WHOLE[8:], "big-endian"),
    "version 99": (built(lambda file: replace(file, version=99)), "99"),
    "alignment 3": (built(lambda file: file.with_key("general.alignment", u32(3))), "general.alignment"),
    "unknown architecture": (
        built(lambda file: file.with_key("general.architecture", string("made-up-2027"))),
        "made-up-2027",
    ),
    "missing key": (built(lambda file: file.without_key("llama.context_length")), "llama.context_length"),
}


def check_one_line(finished: Finished, code: int, *fragments: str) -> None:
    assert finished.code == code, finished.err
    assert finished.out == b""
    errors = [line for line in finished.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert all(fragment in errors[0] for fragment in fragments), errors
    assert "Traceback" not in finished.err


@pytest.mark.parametrize("command", ["run", "validate"])
@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_model_file(kvs: Kvs, tmp_path: Path, command: str, name: str) -> None:
    data, fragment = BAD_FILES[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    check_one_line(kvs(command, "-m", path, "-p", "hi", "-n", "4"), 3, "m.gguf", fragment)


@pytest.mark.parametrize("command", ["run", "validate"])
def test_a_path_that_is_no_file(kvs: Kvs, tmp_path: Path, command: str) -> None:
    check_one_line(kvs(command, "-m", tmp_path, "-p", "hi"), 3, str(tmp_path), "directory")
    check_one_line(kvs(command, "-m", tmp_path / "none.gguf", "-p", "hi"), 3, "none.gguf", "no such file")
    check_one_line(kvs(command, "-m", "/dev/null", "-p", "hi"), 3, "/dev/null")
    check_one_line(kvs(command, "-m", tmp_path / ("x" * 5000), "-p", "hi"), 3, "more characters")


def test_an_unknown_architecture_lists_the_known_ones(kvs: Kvs, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(BAD_FILES["unknown architecture"][0])
    assert "known: " in kvs("run", "-m", path, "-p", "hi").err


@pytest.mark.parametrize("value", ["-1", "nan", "many"])
def test_an_arena_that_is_no_number(kvs: Kvs, tiny_model: Path, value: str) -> None:
    check_one_line(kvs("run", "-m", tiny_model, "-p", "hi", "--kv-stream-arena-mib", value), 2, "--kv-stream-arena-mib")


def test_an_arena_below_the_minimum_names_the_minimum(kvs: Kvs, tiny_model: Path) -> None:
    words = ("-m", tiny_model, "-p", "hi", "-c", "512", "-ub", "512", "--kv-stream-arena-mib", "1", "--device", "cpu")
    check_one_line(kvs("run", *words), 4, "arena 1 MiB is too small", "needs ")


def test_a_context_beyond_host_memory(kvs: Kvs, tiny_model: Path) -> None:
    words = ("-m", tiny_model, "-p", "hi", "-c", "2000000000", "--device", "cpu")
    check_one_line(kvs("run", *words), 4, "2000000000", "GiB are free")


def test_a_prompt_longer_than_the_context(kvs: Kvs, tiny_model: Path) -> None:
    check_one_line(kvs("run", "-m", tiny_model, "-p", "the " * 80, "-c", "16"), 2, "more than the context of 16 tokens")


def test_no_prompt_from_a_closed_standard_input(kvs: Kvs, tiny_model: Path) -> None:
    check_one_line(kvs("run", "-m", tiny_model), 2, "standard input: holds no prompt")


def test_two_contradictions_are_both_named(kvs: Kvs, tiny_model: Path) -> None:
    finished = kvs("run", "-m", tiny_model, "-p", "hi", "-f", "x.txt", "--rope-scaling", "none", "--rope-scale", "4")
    assert (finished.code, finished.out) == (2, b"")
    errors = [line for line in finished.err.splitlines() if line.startswith("error: ")]
    assert errors == [
        "error: -p: -f also gives the prompt",
        "error: --rope-scaling none: contradicts a scale of 4",
    ]


def test_a_weight_that_is_not_a_number_ends_the_run(kvs: Kvs, tmp_path: Path) -> None:
    """U21's rule for generation: the first logit that cannot be sampled ends the run, and says where."""
    import numpy as np

    from tests.fixtures.tiny_models import TinyModel, random_weights, write_model

    model = TinyModel()
    weights = random_weights(model)
    weights["output.weight"][7, 0] = np.nan
    path = write_model(tmp_path / "nan.gguf", model, {"output.weight": weights["output.weight"]})
    finished = kvs("run", "-m", path, "-c", "64", "-p", "hi", "-n", "4", "--no-display-prompt", "--device", "cpu")
    check_one_line(finished, 1, "cannot be sampled: token 7 has nan")
