"""Compiled kernels on disk: whole or not there, whoever else writes; old folders go; no disk is no failure."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvs_core.cpu import kernel_cache
from kvs_core.kernel_files import KEPT_FOLDERS, KernelFiles, use_folder

VERSION = "0123456789abcdef"
NAME = "sm_90a-add-1.cubin"
CONTENT = b"entry\0" + bytes(range(256)) * 40


@pytest.fixture
def files(tmp_path: Path) -> KernelFiles:
    files = KernelFiles(tmp_path, report=lambda _: None)
    files.select(VERSION)
    return files


@pytest.fixture
def stored(files: KernelFiles, tmp_path: Path) -> Path:
    files.write(NAME, CONTENT)
    return tmp_path / "kvs" / "cuda-kernels" / VERSION / NAME


def test_what_was_written_is_read_by_the_next_start(stored: Path, tmp_path: Path) -> None:
    again = KernelFiles(tmp_path, report=lambda _: None)
    again.select(VERSION)
    assert again.read(NAME) == CONTENT
    assert again.warning is None
    assert os.listdir(stored.parent) == [NAME]


def test_another_version_finds_nothing(stored: Path, tmp_path: Path) -> None:
    other = KernelFiles(tmp_path, report=lambda _: None)
    other.select(VERSION[::-1])
    assert stored.exists()
    assert other.read(NAME) is None


@pytest.mark.parametrize("kept", [0, 1, 13, 40, 100])
def test_a_cut_file_is_not_read_and_is_replaced(files: KernelFiles, stored: Path, kept: int) -> None:
    stored.write_bytes(stored.read_bytes()[:kept])
    assert files.read(NAME) is None
    files.write(NAME, CONTENT)
    assert files.read(NAME) == CONTENT


@pytest.mark.parametrize("place", [0, 20, 50, -1])
def test_one_changed_byte_is_noticed(files: KernelFiles, stored: Path, place: int) -> None:
    content = bytearray(stored.read_bytes())
    content[place] ^= 1
    stored.write_bytes(content)
    assert files.read(NAME) is None


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "kvs").write_text("a file where the folder should be")
    files = KernelFiles(tmp_path, report=lambda _: None)
    files.select(VERSION)
    files.write(NAME, CONTENT)
    assert files.read(NAME) is None
    assert files.warning is not None
    assert str(tmp_path / "kvs" / "cuda-kernels" / VERSION) in files.warning
    assert "\n" not in files.warning
    assert files.state("sm_90a-").n_kernels == 0


def test_a_full_disk_leaves_nothing_behind(files: KernelFiles, stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    files.write("other", CONTENT)
    assert files.warning is not None
    assert "No space left on device" in files.warning
    assert os.listdir(stored.parent) == [NAME]


WRITER = """
import sys
from pathlib import Path
from kvs_core.kernel_files import KernelFiles
files = KernelFiles(Path(sys.argv[1]), report=print)
files.select(sys.argv[2])
content = sys.argv[3].encode() * 20000
print("ready", flush=True)
sys.stdin.readline()
for _ in range(150):
    files.write("name", content)
    seen = files.read("name")
    assert seen is not None and len(set(seen)) == 1 and len(seen) == 20000, seen and len(seen)
assert files.warning is None, files.warning
"""


def test_several_processes_write_the_same_kernel_and_none_sees_a_part(tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    arguments = [sys.executable, "-c", WRITER, str(tmp_path), VERSION]
    writers = [subprocess.Popen([*arguments, letter], stdin=pipe, stdout=pipe, text=True) for letter in "abc"]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.communicate("go\n")
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert os.listdir(tmp_path / "kvs" / "cuda-kernels" / VERSION) == ["name"]


def make_folders(parent: Path, n: int) -> list[Path]:
    """Folders as versions leave them, oldest first."""
    folders = [parent / f"{i:016x}" for i in range(n)]
    for age, folder in enumerate(reversed(folders)):
        folder.mkdir(parents=True)
        (folder / "kernel").write_text("code")
        when = time.time() - 100 - age
        os.utime(folder, (when, when))
    return folders


def test_the_latest_used_folders_stay(tmp_path: Path) -> None:
    folders = make_folders(tmp_path, KEPT_FOLDERS + 3)
    (tmp_path / "not ours").mkdir()
    use_folder(folders[0])  # the oldest is used again
    left = sorted(path.name for path in tmp_path.iterdir())
    kept = [folders[0], *folders[-(KEPT_FOLDERS - 1) :]]
    assert left == sorted([*(folder.name for folder in kept), "not ours"])


def test_a_link_to_a_folder_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folders = make_folders(tmp_path / "kernels", KEPT_FOLDERS + 1)
    link = tmp_path / "kernels" / f"{15:016x}"
    link.symlink_to(elsewhere)
    use_folder(folders[0])
    assert elsewhere.exists()
    assert link.is_symlink()


def test_the_cpu_backend_deletes_its_old_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "_chosen", None)
    monkeypatch.setattr(kernel_cache, "_chosen_root", None)
    folders = make_folders(tmp_path / "kvs" / "kernels", KEPT_FOLDERS + 2)
    chosen = kernel_cache.configure_kernel_cache(tmp_path).path
    assert chosen is not None
    assert [folder.exists() for folder in folders] == [False] * 3 + [True] * (KEPT_FOLDERS - 1)


def test_what_a_dead_process_left_is_deleted_and_what_is_being_written_is_not(stored: Path, tmp_path: Path) -> None:
    old, new = stored.with_name(".new-old"), stored.with_name(".new-new")
    for path in (old, new):
        path.write_text("part")
    os.utime(old, (time.time() - 7200,) * 2)
    KernelFiles(tmp_path, report=lambda _: None).select(VERSION)
    assert (old.exists(), new.exists(), stored.exists()) == (False, True, True)


def test_the_state_counts_what_fits_the_device(files: KernelFiles, stored: Path) -> None:
    files.write("sm_80-add-1.cubin", CONTENT)
    stored.with_name(".new-part").write_text("part")
    state = files.state("sm_90a-")
    assert (state.n_kernels, state.n_matching) == (2, 1)
    assert state.n_bytes == 2 * stored.stat().st_size
    assert state.path == str(stored.parent)
