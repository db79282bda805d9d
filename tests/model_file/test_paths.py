"""Paths (U35) and files that are no GGUF (U02): every one ends in one line that says what it is."""

from __future__ import annotations

import io
import os
import stat
import unicodedata
import zipfile
from pathlib import Path

import pytest

from kvs_core.model_file import open_model
from tests.fixtures.gguf_bytes import tiny_llama
from tests.fixtures.refusals import refused_open

LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4cac19f0eea5a8a5a3c8f0e3f1d7f6d1f3a1b0d5f2d6f7f5a9d1a7c7c0f9a8b1\nsize 98362432\n"
)
SAFETENSORS = (39).to_bytes(8, "little") + b'{"a":{"dtype":"F32","data_offsets":[0]}' + bytes(16)


def zip_bytes() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("data.pkl", "x")
    return buffer.getvalue()


@pytest.mark.parametrize(
    "name",
    [
        "Модели/é 模型/x y.gguf",
        unicodedata.normalize("NFC", "é") + ".gguf",
        unicodedata.normalize("NFD", "é") + ".gguf",
        "line\nbreak.gguf",
        "-m.gguf",
        "no-suffix",
        os.fsdecode(b"not-utf8-\xff.gguf"),
    ],
)
def test_an_existing_file_opens_whatever_its_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tiny_llama().build())
    with open_model(path) as model_file:
        assert model_file.path == str(path)
        assert model_file.paths == (str(path),)


def test_relative_and_tilde_paths_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_bytes(tiny_llama().build())
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for given in ("~/m.gguf", "m.gguf", "./m.gguf"):
        with open_model(given) as model_file:
            assert model_file.path == str(tmp_path / "m.gguf")


def test_a_symbolic_link_opens(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(tiny_llama().build())
    (tmp_path / "link.gguf").symlink_to(tmp_path / "blob")
    with open_model(tmp_path / "link.gguf") as model_file:
        assert model_file.path == str(tmp_path / "link.gguf")


def test_a_missing_file_shows_the_path_as_given_and_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    error = refused_open("~/models/x.gguf", "~/models/x.gguf", f"{tmp_path}/models/x.gguf", "no such file")
    assert error.path == f"{tmp_path}/models/x.gguf"


def test_a_missing_file_with_an_absolute_path_shows_it_once(tmp_path: Path) -> None:
    error = refused_open(tmp_path / "x.gguf", "no such file")
    assert str(error).count("x.gguf") == 1


def test_an_unknown_user_after_the_tilde_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused_open("~nobody-of-this-name/x.gguf", "~nobody-of-this-name/x.gguf", "no such file")


def test_a_dangling_link_shows_where_it_points(tmp_path: Path) -> None:
    (tmp_path / "link.gguf").symlink_to(tmp_path / "gone" / "blob")
    refused_open(tmp_path / "link.gguf", "link.gguf", "is a link to", "gone/blob", "does not exist")


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").symlink_to(tmp_path / "b.gguf")
    (tmp_path / "b.gguf").symlink_to(tmp_path / "a.gguf")
    refused_open(tmp_path / "a.gguf", "a.gguf", "cannot be opened")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    refused_open(tmp_path, str(tmp_path), "is a directory")


def test_a_file_used_as_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(tiny_llama().build())
    refused_open(tmp_path / "m.gguf" / "x.gguf", "m.gguf/x.gguf", "Not a directory")


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny_llama().build())
    path.chmod(0)
    as_root = os.geteuid() == 0
    if as_root:
        os.seteuid(65534)  # root may read everything, so look with the eyes of nobody
    try:
        refused_open(path, "m.gguf", "permission denied")
    finally:
        if as_root:
            os.seteuid(0)


def test_devices_and_pipes_are_refused_without_waiting(tmp_path: Path) -> None:
    refused_open("/dev/null", "/dev/null", "not a regular file")
    os.mkfifo(tmp_path / "pipe")
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)
    refused_open(tmp_path / "pipe", "pipe", "not a regular file")


@pytest.mark.parametrize("length", [300, 5000])
def test_a_path_too_long_for_the_system_is_refused_and_shortened(length: int) -> None:
    error = refused_open("/tmp/" + "x" * length + ".gguf", "/tmp/xxx", "xxx.gguf", "name too long")
    assert len(str(error)) < 700
    assert error.path == "/tmp/" + "x" * length + ".gguf"


def test_odd_path_texts_are_refused() -> None:
    refused_open("", "path is empty")
    refused_open("a\0b.gguf", "a\\x00b.gguf", "cannot be opened")
    refused_open("a\ud800b.gguf", "a\\ud800b.gguf", "cannot be opened")
    refused_open("no\nsuch.gguf", "no\\nsuch.gguf", "no such file")


@pytest.mark.parametrize(
    ("content", "fragments"),
    [
        pytest.param(b"", ["empty file"], id="empty"),
        pytest.param(LFS_POINTER, ["not a GGUF", '"version https://"', "Git-LFS pointer"], id="lfs"),
        pytest.param(
            b"<!DOCTYPE html>\n<html>404</html>", ["not a GGUF", '"<!DOCTYPE html>."', "HTML page"], id="html"
        ),
        pytest.param(b"\xef\xbb\xbf \n<HTML>", ["not a GGUF", "HTML page"], id="html-bom"),
        pytest.param(zip_bytes(), ["not a GGUF", '"PK..', "50 4b 03 04", "zip archive"], id="zip"),
        pytest.param(SAFETENSORS, ["not a GGUF", "safetensors"], id="safetensors"),
        pytest.param(b"\x1f\x8b\x08\0abc", ["not a GGUF", "compressed"], id="gzip"),
        pytest.param(b"tjgg\x03\0\0\0", ["not a GGUF", "format that GGUF replaced"], id="ggjt"),
        pytest.param(b'{"error": "gated"}', ["not a GGUF", "JSON"], id="json"),
        pytest.param(bytes(4096), ["not a GGUF", "only zero bytes"], id="zeros"),
        pytest.param(b"GGU", ["not a GGUF", '"GGU" (47 47 55)'], id="three-bytes"),
        pytest.param(b"gguf\x03\0\0\0", ["not a GGUF", '"gguf...."'], id="lower-case"),
        pytest.param(b"\x89PNG\r\n\x1a\n", ["not a GGUF", '".PNG...."'], id="other"),
    ],
)
def test_a_file_that_is_no_gguf_says_what_it_looks_like(tmp_path: Path, content: bytes, fragments: list[str]) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    refused_open(path, "model.gguf", *fragments)


def test_a_text_that_looks_like_nothing_known_is_not_guessed_at(tmp_path: Path) -> None:
    path = tmp_path / "notes.gguf"
    path.write_bytes(b"dear diary")
    error = refused_open(path, "not a GGUF file")
    assert "looks like" not in str(error)


def test_a_removed_working_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    refused_open("x.gguf", "x.gguf: no such file: the directory the command runs in was removed")
