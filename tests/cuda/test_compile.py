"""Every kernel compiles for every device generation, without a device; ``ptxas``, if present, says what it needs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")

from cuda_kernels.cubin import target_of
from cuda_kernels.launch import SHARED_LIMIT
from tests.cuda.kernel_list import Entry, attention_entries, other_entries

GENERATIONS = ((8, 0), (8, 6), (8, 9), (9, 0), (12, 0))
STACK_LIMIT = 96
"""Bytes of local memory a thread may use: on an H200 a few dozen cost nothing that shows, 424 cost a quarter."""

ENTRIES = attention_entries() + other_entries()
DEFAULT_EVERY = 13
"""Without ``-m slow``, every 13th kernel is compiled, for one generation, so that a run covers all of both."""


def find_ptxas() -> str | None:
    """The assembler of the CUDA compiler package, or of an installed toolkit."""
    wheels = sorted(Path(sys.prefix).glob("lib/python*/site-packages/nvidia/*/bin/ptxas"))
    return str(wheels[-1]) if wheels else shutil.which("ptxas")


def check(entry: Entry, generation: tuple[int, int], folder: Path) -> None:
    kernel = entry.build()
    ptx = kernel.ptx(generation)
    assert f".target {target_of(generation)}\n" in ptx
    assert "call.uni" not in ptx.replace("__internal_trig_reduction", ""), "a device function was not inlined"
    assert kernel.dynamic_bytes <= SHARED_LIMIT
    ptxas = find_ptxas()
    if ptxas is None:
        return
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    target = ["-arch", target_of(generation), "-o", str(folder / "kernel.cubin")]
    result = subprocess.run([ptxas, "-v", *target, str(source)], capture_output=True, text=True, check=False)
    if "Unsupported .version" in result.stderr:
        pytest.skip("ptxas is older than the compiler: registers and stack are not checked")
    assert result.returncode == 0, result.stderr
    stacks = [int(number) for number in re.findall(r"(\d+) bytes stack frame", result.stderr)]
    static = [int(number) for number in re.findall(r"(\d+) bytes smem", result.stderr)]
    assert max(stacks) <= STACK_LIMIT, result.stderr
    assert kernel.dynamic_bytes + sum(static) <= SHARED_LIMIT


@pytest.mark.parametrize("index", range(0, len(ENTRIES), DEFAULT_EVERY), ids=lambda index: ENTRIES[index].name)
def test_a_sample_of_kernels_compiles(index: int, tmp_path: Path) -> None:
    check(ENTRIES[index], GENERATIONS[index // DEFAULT_EVERY % len(GENERATIONS)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("generation", GENERATIONS, ids=lambda generation: f"sm_{generation[0]}{generation[1]}")
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_kernel_compiles_for_every_generation(entry: Entry, generation: tuple[int, int], tmp_path: Path) -> None:
    check(entry, generation, tmp_path)


def test_importing_and_building_compile_nothing() -> None:
    script = (
        "from numba.cuda import compiler, dispatcher\n"
        "def refuse(*args, **kwargs): raise AssertionError('compiled')\n"
        "compiler.compile_cuda = dispatcher.compile_cuda = refuse\n"
        "from tests.cuda.kernel_list import other_entries\n"
        "for entry in other_entries(): entry.build()\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
