"""Compile kernels for any device generation, down to machine code, and read what they need. Needs no device.

The PTX compiler (libNVVM) and the assembler (nvJitLink) are those that a start on a device uses.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from typing import Any

from cuda.bindings import nvjitlink
from numba.cuda import compiler

from cuda_kernels.cubin import target_of
from cuda_kernels.launch import SHARED_LIMIT, Kernel
from tests.cuda.kernel_list import Entry, every_entry

Generation = tuple[int, int]
GENERATIONS: tuple[Generation, ...] = ((8, 0), (8, 6), (8, 9), (9, 0), (12, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one kernel takes on one device generation.

    registers      of a thread
    stack_bytes    local memory of a thread: spilled registers, and arrays that did not fit registers
    spill_bytes    stored to and loaded from it, counted by instruction
    shared_bytes   of a block: static and dynamic
    shared_limit   what it may be
    has_calls      a device function was not inlined
    is_serialised  products of warpgroups wait for each other
    """

    generation: Generation
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    shared_limit: int
    has_calls: bool
    is_serialised: bool


def name_of(generation: Generation) -> str:
    return target_of(generation)


def compilation_target(generation: Generation) -> tuple[Any, ...]:
    """The generation as Numba's compiler takes it, with its own instructions where a start on a device has them."""
    return (*generation, "a") if target_of(generation).endswith("a") else generation


def lower(kernel: Kernel) -> Any:
    """The kernel in LLVM's language, which is the same for every generation and takes longest to reach.

    ``Kernel.ptx`` goes through Numba's public function and would lower anew for each; a test compares the two.
    """
    library, _ = compiler._compile_pyfunc_with_fixup(
        kernel.function,
        kernel.signature,
        device=False,
        abi="numba",
        cc=GENERATIONS[0],
        launch_bounds=kernel.launch_bounds,
    )
    return library


def assemble(code: bytes, generation: Generation, *, is_whole: bool) -> str:
    """Machine code for one generation is made and dropped; returns the assembler's report. Raises if it refuses.

    code   PTX, or LLVM code for a program of its own if ``is_whole``
    """
    kind = nvjitlink.InputType.LTOIR if is_whole else nvjitlink.InputType.PTX
    options = [f"-arch={name_of(generation)}", "-verbose", *(["-lto"] if is_whole else [])]
    handle = nvjitlink.create(len(options), options)
    try:
        nvjitlink.add_data(handle, kind, code, len(code), "kernel")
        nvjitlink.complete(handle)
        log = bytearray(nvjitlink.get_info_log_size(handle))
        nvjitlink.get_info_log(handle, log)
        return log.decode()
    finally:
        nvjitlink.destroy(handle)


def read_report(
    report: str, generation: Generation, *, dynamic_bytes: int, ptx: str, shared_limit: int = SHARED_LIMIT
) -> Usage:
    """Figures of the report; several functions (a call that was not inlined) count as their largest."""
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    if not registers or not frames:
        raise ValueError(f"the assembler's report for {name_of(generation)} names no registers or no stack:\n{report}")
    static = [int(n) for n in re.findall(r"(\d+) bytes smem", report)]
    return Usage(
        generation=generation,
        registers=max(registers),
        stack_bytes=max(int(stack) for stack, _, _ in frames),
        spill_bytes=max(int(stores) + int(loads) for _, stores, loads in frames),
        shared_bytes=dynamic_bytes + max(static, default=0),
        shared_limit=shared_limit,
        has_calls="call.uni" in ptx,
        is_serialised="are serialized" in report,
    )


def examine(entry: Entry, generations: Iterable[Generation]) -> list[Usage]:
    """Compile one kernel for each generation."""
    kernel = entry.build()
    library = lower(kernel)
    usages = []
    for generation in generations:
        target = compilation_target(generation)
        ptx = library.get_asm_str(cc=target)
        if f".target {name_of(generation)}" not in ptx:
            raise ValueError(f"{entry.name}: PTX for {name_of(generation)} has another target")
        code = bytes(library.get_ltoir(cc=target)) if kernel.is_whole else ptx.encode()
        report = assemble(code, generation, is_whole=kernel.is_whole)
        limits = {"dynamic_bytes": kernel.dynamic_bytes, "shared_limit": kernel.shared_limit}
        usages.append(read_report(report, generation, ptx=ptx, **limits))
    return usages


@cache
def _entries_by_name() -> dict[str, Entry]:
    return {entry.name: entry for entry in every_entry()}


def _examine_by_name(name: str, generations: tuple[Generation, ...]) -> list[Usage]:
    return examine(_entries_by_name()[name], generations)


def _spare_collections() -> None:
    """Numba makes objects by the million and keeps most: looking for cycles among them costs a fifth of the time.

    50 kernels take 77 s and 0.7 GB like this, 81 s at ``(100_000, 50, 50)``, 76 s and 1.0 GB without any collection.
    """
    gc.freeze()
    gc.set_threshold(1_000_000, 50, 1000)


class Assemblers:
    """Processes that compile kernels; ``submit`` returns at once."""

    def __init__(self, n_processes: int) -> None:
        self._pool = ProcessPoolExecutor(n_processes, get_context("spawn"), initializer=_spare_collections)

    def submit(self, name: str, generations: tuple[Generation, ...]) -> Future[list[Usage]]:
        return self._pool.submit(_examine_by_name, name, generations)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
