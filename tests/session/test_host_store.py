"""Both host stores: bytes come back, limits hold, and a file leaves nothing behind and overwrites nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvs_core.errors import HostStoreError, StateError
from kvs_core.host_store import HostStore, check_store_path, open_store

N_BYTES = 10_000

Open = Callable[[], HostStore]


@pytest.fixture(params=["memory", "file", "directory"])
def open_kind(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    places = {"memory": None, "file": tmp_path / "store", "directory": tmp_path}
    return lambda: open_store(N_BYTES, places[request.param])


def test_bytes_come_back_and_nothing_is_left_behind(open_kind: Open, tmp_path: Path) -> None:
    store = open_kind()
    assert store.n_bytes == N_BYTES
    assert list(tmp_path.iterdir()) == []
    sent = np.random.default_rng(6).integers(0, 256, N_BYTES, dtype=np.uint8)
    received = np.zeros(N_BYTES, dtype=np.uint8)
    store.write(0, sent.ctypes.data, N_BYTES)
    store.read(1, received.ctypes.data, N_BYTES - 1)
    np.testing.assert_array_equal(received[:-1], sent[1:])
    store.close()
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_bytes_outside_and_use_after_close_are_refused(open_kind: Open) -> None:
    store = open_kind()
    byte = np.zeros(1, dtype=np.uint8)
    for call in (store.read, store.write):
        for offset in (-1, N_BYTES):
            with pytest.raises(StateError, match="lie outside its 10000 bytes"):
                call(offset, byte.ctypes.data, 1)
    store.close()
    for call in (store.read, store.write):
        with pytest.raises(StateError, match="the host store is closed"):
            call(0, byte.ctypes.data, 1)


def test_a_file_that_exists_is_refused_and_untouched(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.write_text("precious")
    with pytest.raises(HostStoreError, match="exists already and is not overwritten") as caught:
        open_store(N_BYTES, path)
    assert caught.value.hint == "name a new file or a folder"
    assert path.read_text() == "precious"


@pytest.mark.parametrize("place", ["missing/store", "a file/store"])
def test_a_place_that_cannot_be_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "a file").write_text("")
    with pytest.raises(HostStoreError, match="cannot be created"):
        open_store(N_BYTES, tmp_path / place)


@pytest.mark.parametrize("name", ["", "store"])
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Tests may run as a user whom no permission stops, so the answer of the system is made up."""
    monkeypatch.setattr(os, "access", lambda place, mode: False)
    with pytest.raises(HostStoreError) as caught:
        check_store_path(tmp_path / name, N_BYTES)
    reason = f"cannot be created: folder {tmp_path} cannot be written (Permission denied)"
    assert str(caught.value) == f"host store {tmp_path / name} {reason}"
    assert caught.value.hint is not None
    assert "--kv-stream-store" in caught.value.hint


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_file_system_is_told_by_its_bytes_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(fd: int, offset: int, n_bytes: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    n_files = len(os.listdir("/proc/self/fd"))
    for place in (tmp_path, tmp_path / "store"):
        with pytest.raises(HostStoreError, match="needs 10000 bytes, more than the file system grants"):
            open_store(N_BYTES, place)
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == n_files


def test_a_read_cut_short_is_continued_and_one_past_the_end_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(N_BYTES, tmp_path)
    sent = np.random.default_rng(7).integers(0, 256, N_BYTES, dtype=np.uint8)
    store.write(0, sent.ctypes.data, N_BYTES)
    received = np.zeros(N_BYTES, dtype=np.uint8)
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: whole(fd, [memoryview(buffers[0])[:700]], offset))
    store.read(0, received.ctypes.data, N_BYTES)
    np.testing.assert_array_equal(received, sent)
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: 0)
    with pytest.raises(HostStoreError, match="ends at 0, short of 10000 bytes"):
        store.read(0, received.ctypes.data, N_BYTES)
    store.close()
