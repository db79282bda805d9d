"""Kernels on disk: a second start compiles nothing, an edit compiles all, and no disk is no failure."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvs_core.cpu import kernel_cache
from kvs_core.cpu.kernel_cache import KernelCache, configure_kernel_cache
from kvs_core.errors import StateError

ROOT = Path(__file__).parents[2]

# An addition, an embedding and a worker thread: three kernels that compile quickly.
SCRIPT = """
import json, sys
from dataclasses import asdict
from pathlib import Path
import numpy as np
from gguf import GGMLQuantizationType
from kvs_core.cpu.kernel_cache import configure_kernel_cache, find_unsaved_note, kernel_cache_counts

cache = configure_kernel_cache(Path(sys.argv[1]))
from kvs_core.cpu.elementwise import add_in_place
from kvs_core.cpu.threads import ThreadTeam
from kvs_core.cpu.weights import embed_rows, load_weight

exec(sys.argv[2])
weight = load_weight(GGMLQuantizationType.Q8_0, n_out=64, n_in=64, data=bytes(64 * 68))
x, out = np.ones((500, 64), np.float32), np.full((500, 64), 7, np.float32)
with ThreadTeam(2) as team:
    add_in_place(out, x, team)
    embed_rows(weight, np.zeros(500, np.int32), x)
assert (out == 8).all() and not x.any()
said = {"path": str(cache.path), "warning": cache.warning, "note": find_unsaved_note()}
print(json.dumps(said | asdict(kernel_cache_counts())))
"""


def start(cache_root: Path, before_kernels: str = "", source_root: Path = ROOT) -> dict[str, object]:
    """Run the script in a process of its own; what it printed."""
    command = [sys.executable, "-c", SCRIPT, str(cache_root), before_kernels]
    environment = os.environ | {"PYTHONPATH": str(source_root), "PYTHONDONTWRITEBYTECODE": "1"}
    finished = subprocess.run(
        command, cwd=source_root, env=environment, check=True, capture_output=True, text=True, timeout=300
    )
    result = json.loads(finished.stdout)
    assert isinstance(result, dict)
    return result


@pytest.mark.slow
def test_a_second_start_compiles_nothing_and_an_edit_compiles_all(tmp_path: Path) -> None:
    source_root = tmp_path / "source"
    shutil.copytree(ROOT / "kvs_core", source_root / "kvs_core", ignore=shutil.ignore_patterns("__pycache__"))
    root = tmp_path / "cache"

    first = start(root, source_root=source_root)
    assert first["n_compiled"] == 3
    assert first["n_loaded"] == 0
    assert first["n_unsaved"] == 0
    assert first["note"] is None
    assert first["warning"] is None
    assert Path(str(first["path"])).parent == root / "kvs" / "kernels"

    second = start(root, source_root=source_root)
    assert (second["n_compiled"], second["n_loaded"]) == (0, 3)
    assert second["path"] == first["path"]

    # A function that kernels call, in a file that holds no kernel: Numba itself would not notice.
    helper = source_root / "kvs_core" / "cpu" / "weight_blocks.py"
    helper.write_text(helper.read_text(encoding="utf-8") + "\n# edited\n", encoding="utf-8")
    third = start(root, source_root=source_root)
    assert (third["n_compiled"], third["n_loaded"]) == (3, 0)
    assert third["path"] != first["path"]


@pytest.mark.slow
def test_a_wait_for_the_compiler_is_told_once_whatever_was_compiled_before(tmp_path: Path) -> None:
    report = (
        "import atexit; from kvs_core.cpu.kernel_cache import report_compilation; calls = [];"
        "report_compilation(lambda: calls.append(1));"
        "atexit.register(lambda: print(len(calls), file=open(sys.argv[1] + '/calls', 'w')))"
    )
    calls = tmp_path / "calls"
    start(tmp_path, report)
    assert calls.read_text() == "1\n"  # for three kernels
    result = start(tmp_path, report)
    assert calls.read_text() == "0\n"
    for index in list(Path(str(result["path"])).rglob("*.nbi"))[:1]:
        index.unlink()  # as after a change of types, which needs one more kernel
    assert start(tmp_path, report)["n_loaded"] == 2
    assert calls.read_text() == "1\n"


@pytest.mark.slow
def test_a_folder_that_vanishes_costs_only_the_saving(tmp_path: Path) -> None:
    # A file in place of the folder fails for every user, root included.
    result = start(tmp_path, "import shutil; shutil.rmtree(cache.path.parent); cache.path.parent.write_text('')")
    assert result["n_compiled"] == 3
    assert result["n_unsaved"] == 3
    assert result["note"] == (
        f"kernel cache {result['path']}: 3 of 3 compiled kernels could not be written (Not a directory); "
        "the next start compiles them again"
    )


@pytest.mark.slow
def test_a_damaged_cache_is_compiled_again(tmp_path: Path) -> None:
    path = Path(str(start(tmp_path)["path"]))
    for index in path.rglob("*.nbi"):
        index.write_bytes(index.read_bytes()[:20])
    second = start(tmp_path)
    assert (second["n_compiled"], second["n_unsaved"]) == (3, 0)
    assert start(tmp_path)["n_loaded"] == 3


@pytest.fixture
def _unconfigured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "_chosen", None)
    monkeypatch.setattr(kernel_cache, "_chosen_root", None)


@pytest.mark.usefixtures("_unconfigured")
def test_an_unwritable_folder_is_reported_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "kvs").write_text("a file where the folder should be")
    cache = configure_kernel_cache(tmp_path)
    assert cache.path is None
    assert cache.warning is not None
    assert str(tmp_path / "kvs" / "kernels") in cache.warning
    assert "\n" not in cache.warning

    @kernel_cache.cached_njit()
    def double(x: float) -> float:
        return 2 * x

    assert double(1.5) == 3.0


@pytest.mark.usefixtures("_unconfigured")
def test_a_second_root_is_refused_and_the_same_root_is_not(tmp_path: Path) -> None:
    cache = configure_kernel_cache(tmp_path / "one")
    assert configure_kernel_cache(tmp_path / "one") is cache
    with pytest.raises(StateError, match="comes too late"):
        configure_kernel_cache(tmp_path / "two")


@pytest.mark.usefixtures("_unconfigured")
def test_another_processor_has_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = configure_kernel_cache(tmp_path)
    monkeypatch.setattr(kernel_cache, "_chosen", None)
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_name", lambda: "another")
    there = configure_kernel_cache(tmp_path)
    assert here != there
    assert isinstance(there, KernelCache)


@pytest.mark.usefixtures("_unconfigured")
def test_processes_that_compile_a_kernel_at_once_never_take_each_others_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One writes its index and is held up; another, which has read the index before that, writes all of its own."""
    configure_kernel_cache(tmp_path)

    def double(x: float) -> float:
        return 2 * x

    first, second, later = (kernel_cache.cached_njit()(double) for _ in range(3))
    save = kernel_cache._KernelCacheFile._save_data

    def save_after_another(file: object, name: str, data: object) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(kernel_cache._KernelCacheFile, "_save_data", save)
            patch.setattr(kernel_cache._KernelCacheFile, "_load_index", lambda _: {})
            assert second(1.5) == 3.0
        save(file, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(kernel_cache._KernelCacheFile, "_save_data", save_after_another)
        assert first(3) == 6
    assert (later(1.5), later(3)) == (3.0, 6)
    assert sum(later.stats.cache_hits.values()) == 1, "the index of the last one holds"
