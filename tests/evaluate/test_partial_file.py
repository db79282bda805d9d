"""Names and lifetimes of a file that is being written; what is written is the formats' business."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from kvs_core.errors import ConfigError, FileAccessError
from kvs_core.evaluate import partial_file
from kvs_core.evaluate.partial_file import PartialFile, check_output_path, partial_path, reporting_os_errors


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "elsewhere" / "real.kld"
    target.write_bytes(b"old")
    link = tmp_path / "base.kld"
    link.symlink_to(target)
    assert partial_path(link) == tmp_path / "elsewhere" / "real.kld.partial"
    with PartialFile(link) as file:
        file.write(b"new")
        file.publish()
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


@pytest.mark.parametrize(("keeps", "syncs"), [(True, True), (True, False), (False, True), (False, False)])
def test_only_what_a_later_run_can_use_is_left_behind(tmp_path: Path, keeps: bool, syncs: bool) -> None:
    """A chunk is synced when it is complete; half of the first one is of no use."""
    path = tmp_path / "base.kld"
    with PartialFile(path, keeps=keeps) as file:
        file.truncate(0)
        file.write(b"abc")
        if syncs:
            file.sync()
    assert partial_path(path).exists() == (keeps and syncs)


def test_a_refused_run_leaves_what_an_earlier_one_made(tmp_path: Path) -> None:
    path = tmp_path / "base.kld"
    partial_path(path).write_bytes(b"three chunks")
    PartialFile(path).close()
    assert partial_path(path).read_bytes() == b"three chunks"
    PartialFile(path, keeps=False).close()
    assert not partial_path(path).exists()


def test_an_empty_file_that_a_killed_run_left_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "base.kld"
    partial_path(path).touch()
    PartialFile(path).close()
    assert not partial_path(path).exists()
    partial_path(path).touch()
    with PartialFile(path) as file:
        file.write(b"rows")
        file.publish()
    assert path.read_bytes() == b"rows"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_was_finished_between_opening_and_locking_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "base.kld"
    first = PartialFile(path)
    first.write(b"result")
    original = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        first.publish()
        original(descriptor, operation)

    monkeypatch.setattr(partial_file.fcntl, "flock", flock)
    with pytest.raises(FileAccessError, match="another run is writing it"):
        PartialFile(path)
    assert path.read_bytes() == b"result"


def test_devices_pipes_and_folders_are_no_place_for_a_result(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, reason in (
        (pipe, "is not a regular file"),
        (Path(os.devnull), "is not a regular file"),
        (tmp_path, "is a directory"),
        (tmp_path / "absent" / "x", "there is no folder"),
    ):
        with pytest.raises(FileAccessError, match=reason):
            check_output_path(path, inputs=[])
    check_output_path(tmp_path / "new", inputs=[tmp_path / "absent"])


def test_a_folder_that_cannot_be_written_is_named_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").write_bytes(b"")
    monkeypatch.setattr(os, "access", lambda place, mode: False)
    for name in ("new", "there"):
        with pytest.raises(
            FileAccessError, match=rf"folder {tmp_path} cannot be written \(Permission denied\)$"
        ) as caught:
            check_output_path(tmp_path / name, inputs=[])
        assert caught.value.hint == "allow this user to write there, or name a place elsewhere"


def test_a_file_that_cannot_be_read_is_not_blamed_on_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "base.kld"
    path.write_bytes(b"")
    monkeypatch.setattr(os, "access", lambda place, mode: False)
    with pytest.raises(FileAccessError, match=r"base\.kld: Permission denied$"), reporting_os_errors(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_what_the_command_reads_is_not_overwritten(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    (tmp_path / "link").symlink_to(model)
    (tmp_path / "other").write_bytes(b"")
    for path in (model, tmp_path / "link", tmp_path / "." / "model.gguf"):
        with pytest.raises(ConfigError, match=r"would overwrite .*, which this command reads"):
            check_output_path(path, inputs=[model])
    check_output_path(tmp_path / "other", inputs=[model])
