"""How fast host memory is page-locked: by the driver alone, or made real first, in small or in 2 MiB pages.

    python -m scripts.measure_page_locking [--mib 1024] [--extent 16 64 512]

One line for each way and extent size: GB/s of the whole, and the longest single call of the driver, in milliseconds.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
from time import perf_counter

from cuda.bindings import driver

from cuda_kernels.device import checked, open_device
from kvs_core.devices import DeviceName
from kvs_core.units import MIB

WAYS = {"driver alone": (False, False), "made real first": (True, False), "made real first, 2 MiB pages": (True, True)}


def lock(n_bytes: int, extent_bytes: int, *, touches: bool, huge: bool) -> tuple[float, float]:
    """(seconds of everything, seconds of the longest call of the driver) for fresh memory."""
    memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        memory.madvise(mmap.MADV_HUGEPAGE)
    anchor = ctypes.c_char.from_buffer(memory)
    addresses = range(ctypes.addressof(anchor), ctypes.addressof(anchor) + n_bytes, extent_bytes)
    longest, started = 0.0, perf_counter()
    for address in addresses:
        if touches:
            ctypes.memset(address, 0, extent_bytes)
        called = perf_counter()
        checked(driver.cuMemHostRegister(address, extent_bytes, 0), "page-locking")
        longest = max(longest, perf_counter() - called)
    seconds = perf_counter() - started
    for address in addresses:
        checked(driver.cuMemHostUnregister(address), "unlocking")
    del anchor
    memory.close()
    return seconds, longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--extent", type=int, nargs="+", default=[16, 64, 512], help="MiB")
    arguments = parser.parse_args()
    open_device(DeviceName(kind="cuda"))
    for extent_mib in arguments.extent:
        n_bytes = max(1, arguments.mib // extent_mib) * extent_mib * MIB
        for name, (touches, huge) in WAYS.items():
            seconds, longest = lock(n_bytes, extent_mib * MIB, touches=touches, huge=huge)
            rate = n_bytes / seconds / 1e9
            print(f"{name:30} {extent_mib:4} MiB: {rate:.2f} GB/s, longest call {longest * 1e3:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
