"""Compile every CUDA kernel for every supported device generation, without a device; one line a kernel.

    python -m scripts.compile_cuda [--only NAME ...] [--jobs N]

Columns: for each generation the registers and the bytes of local memory of a thread, and the bytes of shared memory of
a block. Exit code 1 if a kernel does not compile or breaks a promise of ``cuda_checks/kernel_limits.py``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from importlib.metadata import version

from scripts.cuda_checks.assemble import GENERATIONS, Assemblers, name_of
from scripts.cuda_checks.kernel_limits import find_complaints
from tests.cuda.kernel_list import every_entry

PACKAGES = ("numba-cuda", "nvidia-nvvm", "nvidia-nvjitlink")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="kernels, with * for any text")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="processes")
    arguments = parser.parse_args(argv)
    if arguments.jobs < 1:
        parser.error(f"--jobs {arguments.jobs}: needs at least 1")
    entries = [entry for entry in every_entry() if any(fnmatchcase(entry.name, only) for only in arguments.only)]
    generations = {entry.name: (entry.only,) if entry.only else GENERATIONS for entry in entries}
    if not entries:
        parser.error(f"--only {' '.join(arguments.only)}: no kernel has such a name")

    print(", ".join(f"{package} {version(package)}" for package in PACKAGES))
    print(f"{'registers / stack bytes / shared bytes':44}", *(f"{name_of(g):>13}" for g in GENERATIONS), sep="  ")
    started = time.perf_counter()
    complaints = []
    assemblers = Assemblers(arguments.jobs)
    try:
        for name, future in [(name, assemblers.submit(name, wanted)) for name, wanted in generations.items()]:
            try:
                usages = future.result()
            except Exception as error:
                complaints.append(f"{name}: {type(error).__name__}: {error}")
                print(f"{name:44}  does not compile", flush=True)
                continue
            found = {u.generation: f"{u.registers}/{u.stack_bytes}/{u.shared_bytes}" for u in usages}
            print(f"{name:44}", *(f"{found.get(g, ''):>13}" for g in GENERATIONS), sep="  ", flush=True)
            complaints += [line for usage in usages for line in find_complaints(name, usage)]
    finally:
        assemblers.close()
    for line in complaints:
        print(f"FAIL {line}")
    seconds = time.perf_counter() - started
    print(f"{len(entries)} kernels, {len(GENERATIONS)} generations, {len(complaints)} complaints, {seconds:.0f} s")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
