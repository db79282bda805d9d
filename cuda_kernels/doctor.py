"""What a CUDA device has and how fast it moves bytes: figures for ``kvs doctor``, nothing printed."""

from __future__ import annotations

import mmap
import resource
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter
from typing import Any

import numpy as np
import pynvml
from cuda.bindings import driver
from numba import cuda

from cuda_kernels.cubin import target_of
from cuda_kernels.device import (
    DeviceMemory,
    Event,
    PinnedBuffer,
    checked,
    device_name,
    memory_info,
    open_device,
    raw_stream,
)
from cuda_kernels.elementwise import add_in_place
from cuda_kernels.launch import keep_kernels
from cuda_kernels.locked_store import LockedStore
from kvs_core.devices import DeviceName
from kvs_core.errors import BackendError
from kvs_core.host_store import RamStore
from kvs_core.kernel_files import KernelFiles, KernelFilesState
from kvs_core.units import MIB

PACKAGES = (
    "numba",
    "numba-cuda",
    "cuda-bindings",
    "cuda-core",
    "nvmath-python",
    "nvidia-cublas",
    "nvidia-ml-py",
    "numpy",
)
_PROBE_BYTES = 256 * MIB
_REPEATS = 5
_UNLIMITED = resource.RLIM_INFINITY


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """Sizes in bytes, rates in bytes a second; link figures are None where the management library does not tell.

    ``kernel_cache`` is what there was before the probe's own kernel.
    """

    name: str
    driver_version: str
    compute_capability: str
    n_multiprocessors: int
    total_bytes: int
    free_bytes: int
    link_generation: int | None
    link_width: int | None
    host_to_device_rate: float
    device_to_host_rate: float
    device_memory_rate: float
    page_lock_rate: float
    page_lock_limit_bytes: int | None
    page_lock_note: str | None
    first_kernel_seconds: float
    kernel_cache: KernelFilesState
    kernel_cache_warning: str | None
    versions: dict[str, str]


def examine_device(wanted: DeviceName, kernel_files: KernelFiles) -> DeviceReport:
    """Open a device, copy, load or compile one kernel and check its result.

    Raises   BackendUnavailableError without a working device; BackendError when a copy or the kernel goes wrong.
    """
    device = open_device(wanted)
    major, minor = device.compute_capability
    keep_kernels(kernel_files)
    kernel_cache = kernel_files.state(target_of((major, minor)) + "-")
    stream = cuda.stream()
    free, total = memory_info()
    handle = raw_stream(stream)
    with ExitStack() as closing:
        host = PinnedBuffer(_PROBE_BYTES)
        closing.callback(host.close)
        source, target = (DeviceMemory(_PROBE_BYTES, "the copy probe") for _ in range(2))
        closing.callback(source.close)
        closing.callback(target.close)

        def to_device() -> None:
            checked(driver.cuMemcpyHtoDAsync(source.address, host.address, _PROBE_BYTES, handle), "a probe copy")

        def to_host() -> None:
            checked(driver.cuMemcpyDtoHAsync(host.address, source.address, _PROBE_BYTES, handle), "a probe copy")

        def within() -> None:
            checked(driver.cuMemcpyDtoDAsync(target.address, source.address, _PROBE_BYTES, handle), "a probe copy")

        rates = [_PROBE_BYTES / _fastest(action, handle) for action in (to_device, to_host, within)]
        first_kernel_seconds = _try_kernel(target, stream)
    lock_rate, lock_note = _lock_rate()
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    driver_version, generation, width = _link_of(device)
    return DeviceReport(
        name=device_name(device),
        driver_version=driver_version,
        compute_capability=f"{major}.{minor}",
        n_multiprocessors=int(device.MULTIPROCESSOR_COUNT),
        total_bytes=total,
        free_bytes=free,
        link_generation=generation,
        link_width=width,
        host_to_device_rate=rates[0],
        device_to_host_rate=rates[1],
        device_memory_rate=2 * rates[2],
        page_lock_rate=lock_rate,
        page_lock_limit_bytes=None if limit == _UNLIMITED else limit,
        page_lock_note=lock_note,
        first_kernel_seconds=first_kernel_seconds,
        kernel_cache=kernel_cache,
        kernel_cache_warning=kernel_files.warning,
        versions={name: _version_of(name) for name in PACKAGES},
    )


def _fastest(action: Callable[[], None], stream: Any) -> float:
    """Seconds of the fastest of a few runs."""
    begin, end = Event(timed=True), Event(timed=True)
    best = float("inf")
    for _ in range(_REPEATS):
        begin.record(stream)
        action()
        end.record(stream)
        end.wait()
        best = min(best, end.seconds_since(begin))
    begin.close()
    end.close()
    return best


def _try_kernel(memory: DeviceMemory, stream: Any) -> float:
    """Load or compile the sum of two vectors, and run it; seconds until its result was seen to be right."""
    started = perf_counter()
    x, y = memory.view(0, (1024,), np.float32), memory.view(4096, (1024,), np.float32)
    numbers = np.arange(1024, dtype=np.float32)
    x.copy_to_device(numbers)
    y.copy_to_device(numbers)
    add_in_place(x, y, stream=stream)
    checked(driver.cuStreamSynchronize(raw_stream(stream)), "a kernel")
    if not np.array_equal(x.copy_to_host(), 2 * numbers):
        raise BackendError("a kernel that adds two vectors gave wrong sums", hint="check the driver and the packages")
    return perf_counter() - started


def _lock_rate() -> tuple[float, str | None]:
    """Bytes a second of reserving and locking host memory, and why it was refused."""
    notes: list[str] = []
    started = perf_counter()
    with RamStore(_PROBE_BYTES // mmap.PAGESIZE * mmap.PAGESIZE) as store:
        locked = LockedStore(store, (0,), report=notes.append)
        for _ in locked.pieces(0, store.n_bytes):  # each is locked or refused when it comes
            pass
        seconds = perf_counter() - started
        locked.close()
        return (0.0 if notes else store.n_bytes / seconds), (notes[0] if notes else None)


def _link_of(device: Any) -> tuple[str, int | None, int | None]:
    """Driver version, generation and width of the link, by the management library."""
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(device.uuid)
        text = pynvml.nvmlSystemGetDriverVersion()
        generation = int(pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
        width = int(pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
    except pynvml.NVMLError:
        return "unknown", None, None
    return text.decode() if isinstance(text, bytes) else str(text), generation, width


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
