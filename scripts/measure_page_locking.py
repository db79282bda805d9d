"""How fast host memory is page-locked, and what that takes on the device: by the driver alone, or made real first.

    python -m scripts.measure_page_locking [--mib 1024] [--extent 16 64 512]

One line for each way and extent size: GB/s of the whole, the longest single call of the driver in milliseconds, and
the device memory that is gone meanwhile. "allocated" and "made and mapped" are memory that the driver itself
provides; the latter includes writing it once.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
from dataclasses import dataclass
from time import perf_counter

from cuda.bindings import driver

from cuda_kernels.device import PinnedBuffer, checked, memory_info, open_device
from kvs_core.devices import DeviceName
from kvs_core.errors import BackendError
from kvs_core.units import MIB

WAYS = {"driver alone": (False, False), "made real first": (True, False), "made real first, 2 MiB pages": (True, True)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Locking:
    """Seconds of everything and of the longest call of the driver; bytes of device memory taken meanwhile."""

    seconds: float
    longest: float
    device_bytes: int


def allocate(n_bytes: int, extent_bytes: int) -> Locking:
    free, _ = memory_info()
    longest, started, buffers = 0.0, perf_counter(), []
    for _ in range(0, n_bytes, extent_bytes):
        called = perf_counter()
        buffers.append(PinnedBuffer(extent_bytes))
        longest = max(longest, perf_counter() - called)
    seconds = perf_counter() - started
    taken = free - memory_info()[0]
    for buffer in buffers:
        buffer.close()
    return Locking(seconds=seconds, longest=longest, device_bytes=taken)


def map_pages(n_bytes: int, extent_bytes: int) -> Locking:
    """Host memory that the driver makes and maps itself, in pages of its own size; raises where it cannot."""
    location = driver.CUmemLocation()
    location.type, location.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA, 0
    properties = driver.CUmemAllocationProp()
    properties.type, properties.location = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED, location
    here = driver.CUmemLocation()
    here.type, here.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
    access = []
    for place in (location, here):
        one = driver.CUmemAccessDesc()
        one.location, one.flags = place, driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        access.append(one)
    free, _ = memory_info()
    longest, started, handles = 0.0, perf_counter(), []
    base = int(checked(driver.cuMemAddressReserve(n_bytes, 0, 0, 0), "reserving addresses"))
    for begin in range(0, n_bytes, extent_bytes):
        called = perf_counter()
        handle = checked(driver.cuMemCreate(extent_bytes, properties, 0), "making host memory")
        checked(driver.cuMemMap(base + begin, extent_bytes, 0, handle, 0), "mapping host memory")
        checked(driver.cuMemSetAccess(base + begin, extent_bytes, access, len(access)), "opening host memory")
        handles.append(handle)
        longest = max(longest, perf_counter() - called)
    ctypes.memset(base, 1, n_bytes)
    seconds = perf_counter() - started
    taken = free - memory_info()[0]
    checked(driver.cuMemUnmap(base, n_bytes), "unmapping host memory")
    for handle in handles:
        checked(driver.cuMemRelease(handle), "freeing host memory")
    checked(driver.cuMemAddressFree(base, n_bytes), "freeing addresses")
    return Locking(seconds=seconds, longest=longest, device_bytes=taken)


def lock(n_bytes: int, extent_bytes: int, *, touches: bool, huge: bool) -> Locking:
    free, _ = memory_info()
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
    taken = free - memory_info()[0]
    for address in addresses:
        checked(driver.cuMemHostUnregister(address), "unlocking")
    del anchor
    memory.close()
    return Locking(seconds=seconds, longest=longest, device_bytes=taken)


def show(name: str, extent_mib: int, n_bytes: int, locking: Locking) -> None:
    print(
        f"{name:30} {extent_mib:4} MiB: {n_bytes / locking.seconds / 1e9:.2f} GB/s, longest call "
        f"{locking.longest * 1e3:.1f} ms, device {locking.device_bytes / MIB:.1f} MiB of {n_bytes / MIB:.0f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--extent", type=int, nargs="+", default=[16, 64, 512], help="MiB")
    arguments = parser.parse_args()
    open_device(DeviceName(kind="cuda"))
    for extent_mib in arguments.extent:
        n_bytes = max(1, arguments.mib // extent_mib) * extent_mib * MIB
        for name, (touches, huge) in WAYS.items():
            show(name, extent_mib, n_bytes, lock(n_bytes, extent_mib * MIB, touches=touches, huge=huge))
        show("allocated", extent_mib, n_bytes, allocate(n_bytes, extent_mib * MIB))
        try:
            show("made and mapped", extent_mib, n_bytes, map_pages(n_bytes, extent_mib * MIB))
        except BackendError as error:
            print(f"made and mapped: {error}")


if __name__ == "__main__":
    main()
