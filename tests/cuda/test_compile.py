"""Every kernel compiles to machine code without a device, within its limits; each device generation has its share.

``python -m scripts.compile_cuda`` compiles everything for every generation, which takes several times as long; here
kernels are compiled for one generation, those of small families for all of them, and of weights that are rare and of
experts a part.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")
from tests.cuda.compiler_libraries import missing_compiler

if reason := missing_compiler():
    pytest.skip(reason, allow_module_level=True)

from cuda_kernels.attention_decode import decode_kernel
from kvs_core.kv_types import KvType, PageGeometry
from scripts.cuda_checks.assemble import (
    GENERATIONS,
    Assemblers,
    Generation,
    Usage,
    compilation_target,
    lower,
    name_of,
    read_report,
)
from scripts.cuda_checks.kernel_limits import find_complaints
from tests.cuda.kernel_list import Entry, every_entry

ENTRIES = [entry for entry in every_entry() if entry.in_tests]
MAX_PROCESSES = 4
"""A process that has compiled hundreds of kernels holds 1 GB."""


def choose_generations(entries: list[Entry]) -> dict[str, tuple[Generation, ...]]:
    """By name: one generation for a kernel of a family that covers them all, or its only one, else every one."""
    turns = defaultdict(set)
    for entry in entries:
        turns[entry.family].add(entry.turn % len(GENERATIONS))
    return {
        entry.name: (entry.only or GENERATIONS[entry.turn % len(GENERATIONS)],)
        if entry.only or len(turns[entry.family]) == len(GENERATIONS)
        else GENERATIONS
        for entry in entries
    }


CHOSEN = choose_generations(ENTRIES)


@pytest.fixture(scope="module")
def compile_kernel(request: pytest.FixtureRequest) -> Iterator[Callable[[str], list[Usage]]]:
    """Compiles a kernel in a process beside this one, where objects that Numba keeps do not slow other tests down.

    Kernels of all selected tests are on their way from the start, unless pytest-xdist shares the tests out: which of
    them come to this worker is not known then, and the other workers need the processors as well.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        assemblers, names = Assemblers(1), []
    else:
        items = [item for item in request.session.items if request.fixturename in getattr(item, "fixturenames", ())]
        assemblers = Assemblers(min(MAX_PROCESSES, len(os.sched_getaffinity(0))))
        names = [item.callspec.params["name"] for item in items]
    ahead = {name: assemblers.submit(name, CHOSEN[name]) for name in names}
    yield lambda name: (ahead.get(name) or assemblers.submit(name, CHOSEN[name])).result()
    assemblers.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOSEN)
def test_a_kernel_compiles_within_its_limits(name: str, compile_kernel: Callable[[str], list[Usage]]) -> None:
    usages = compile_kernel(name)
    assert tuple(usage.generation for usage in usages) == CHOSEN[name]
    assert not [line for usage in usages for line in find_complaints(name, usage)]


def test_every_family_is_compiled_for_every_generation() -> None:
    covered = defaultdict(set)
    for entry in ENTRIES:
        if entry.only is None:
            covered[entry.family].update(CHOSEN[entry.name])
    assert {family: generations for family, generations in covered.items() if generations != set(GENERATIONS)} == {}


@pytest.mark.parametrize("use", ["attention_decode", "attention_prefill"])
@pytest.mark.parametrize("part", [1, 2, 3], ids=["keys", "values", "head size"])
def test_attention_of_every_type_and_head_size_is_spread_over_the_generations(use: str, part: int) -> None:
    covered = defaultdict(list)
    for entry in ENTRIES:
        if entry.family == use:
            covered[entry.name.split("-")[part]] += CHOSEN[entry.name]
    assert len(covered) >= 3
    for case, generations in covered.items():
        assert len(set(generations)) == min(len(GENERATIONS), len(generations)), case


@pytest.mark.parametrize("generation", [GENERATIONS[0], GENERATIONS[-1]], ids=name_of)
def test_lowering_once_for_every_generation_changes_nothing(generation: Generation) -> None:
    """Names carry a count of the compilations in this process; all else is compared."""
    kernel = next(entry for entry in ENTRIES if entry.name == "rms_norm-F32").build()

    def body(ptx: str) -> list[str]:
        lines = (line for line in ptx.splitlines() if "_Z" not in line)
        return [re.sub(r"_cudapy_smem_\d+", "_cudapy_smem", line) for line in lines]

    shared = body(lower(kernel).get_asm_str(cc=compilation_target(generation)))
    assert f".target {name_of(generation)}" in shared
    assert shared == body(kernel.ptx(generation))


REPORT = """ptxas info    : Compiling entry function 'f' for 'sm_86'
ptxas         .     {stack} bytes stack frame, 24 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, {static} bytes smem
"""


def complaints(name: str, ptx: str = "", *, stack: int = 0, static: int = 0, dynamic: int = 0) -> list[str]:
    report = REPORT.format(stack=stack, static=static)
    return list(find_complaints(name, read_report(report, (8, 6), dynamic_bytes=dynamic, ptx=ptx)))


def test_broken_promises_are_named() -> None:
    name = "attention_decode-f32-f32-64"
    assert complaints(name, static=1024, dynamic=98 * 1024) == []
    assert complaints(name, "call.uni helper") == [f"{name} on sm_86: a device function was not inlined"]
    assert complaints(name, stack=8) == [f"{name} on sm_86: 8 bytes of local memory a thread, at most 0 are accepted"]
    assert complaints(name, static=1025, dynamic=98 * 1024) == [
        f"{name} on sm_86: 101377 bytes of shared memory, at most 101376 are there"
    ]


def test_a_report_without_figures_is_no_success() -> None:
    with pytest.raises(ValueError, match="names no registers"):
        read_report("ptxas info    : 0 bytes gmem", (8, 0), dynamic_bytes=0, ptx="")


def test_importing_and_building_compile_nothing() -> None:
    script = (
        "from numba.cuda import compiler, dispatcher\n"
        "def refuse(*args, **kwargs): raise AssertionError('compiled')\n"
        "compiler.compile_cuda = dispatcher.compile_cuda = refuse\n"
        "from tests.cuda.kernel_list import other_entries\n"
        "for entry in other_entries(): entry.build()\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    if "Unsupported .version" in result.stderr:
        pytest.skip("the assembler is older than the compiler")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("kv_type", [KvType.F16, KvType.Q8_0, KvType.TURBO4], ids=lambda kv_type: kv_type.value)
def test_decode_attention_does_not_read_keys_and_values_past_coherence(kv_type: KvType) -> None:
    """The kernel before writes some of them while this one waits, and read-only loads may be moved before the wait."""
    page = PageGeometry(page_tokens=256, n_head_kv=8, head_dim_k=128, head_dim_v=128, type_k=kv_type, type_v=kv_type)
    ptx = decode_kernel(page, 4, 1).ptx((9, 0))
    assert "griddepcontrol.wait" in ptx
    assert "ld.global.L1::no_allocate" in ptx
    assert "ld.global.nc.L1::no_allocate" not in ptx
    assert "ld.global.nc.u16" not in ptx
