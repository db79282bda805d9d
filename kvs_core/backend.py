"""What a device must offer, and the one place that opens one. No device code is imported before it is asked for."""

from __future__ import annotations

import ctypes
from importlib import import_module
from typing import Any, Protocol

from kvs_core.device_budget import DeviceBudget
from kvs_core.devices import DeviceName, parse_device
from kvs_core.errors import BackendUnavailableError
from kvs_core.host_store import HostStore
from kvs_core.kernel_files import KernelFiles
from kvs_core.model_file import ModelFile
from kvs_core.operations import Operations
from kvs_core.plan import RunPlan

_CUDA_BACKEND = "cuda_kernels.backend"


class Arena(Protocol):
    """The single device allocation that holds pages, ring, state and workspace."""

    @property
    def n_bytes(self) -> int: ...

    def close(self) -> None: ...


class CopyEngine(Protocol):
    """Moves pages between the host store and the arena beside compute.

    Copies run in the order they were asked for. ``fetch`` overwrites arena bytes only after all compute that was
    asked for before the call, which is what makes reuse of ring bytes safe: the caller asks only once the last
    reader of those bytes has been asked for. ``wait`` holds back compute, not necessarily the caller.
    Until a copy was waited for, nobody changes the bytes that it reads or looks at those that it writes: an engine may
    make it at any time in between.
    """

    def fetch(self, *, store_offset: int, arena_offset: int, n_bytes: int) -> int:
        """Start copying store bytes into the arena; returns a ticket."""
        ...

    def seal(self, *, arena_offset: int, store_offset: int, n_bytes: int) -> int:
        """Start copying arena bytes into the store; returns a ticket."""
        ...

    def wait(self, ticket: int) -> None:
        """Compute asked for from now on sees the copy done; raises HostStoreError if it failed."""
        ...

    def finish_all(self) -> None:
        """Wait until no copy is under way any more, failed ones included."""
        ...

    def bytes_of(self, ticket: int) -> int:
        """Bytes the engine really moved for a ticket that has been waited for."""
        ...

    def move(self, *, source_offset: int, target_offset: int, n_bytes: int) -> None:
        """Copy inside the arena, in compute order."""
        ...

    def poison(self, *, arena_offset: int, n_bytes: int) -> None:
        """Fill arena bytes with NaN patterns, in compute order."""
        ...

    @property
    def copy_seconds(self) -> float:
        """Time the engine spent moving bytes for ``fetch``."""
        ...

    @property
    def wait_seconds(self) -> float:
        """Time compute was held back by ``wait``."""
        ...

    def close(self) -> None: ...


class Backend(Protocol):
    """A device: its limits, its memory, its operations."""

    @property
    def name(self) -> str: ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines that a user should know, such as memory that could not be locked; more may come while sessions run."""
        ...

    def budget(self) -> DeviceBudget: ...

    def load_weights(self, model_file: ModelFile) -> tuple[str, ...]:
        """Make the weights usable; returns one line for each thing a user should know (expanded types)."""
        ...

    def open_arena(self, n_bytes: int) -> Arena: ...

    def open_copy_engine(self, plan: RunPlan, arena: Any, store: HostStore) -> CopyEngine: ...

    def operations(self, plan: RunPlan, arena: Any) -> Operations: ...

    def measure_copy_rate(self) -> float:
        """Bytes per second of a large host-to-device copy on this machine, now."""
        ...

    def close(self) -> None: ...


def resolve_device(device: str) -> str:
    """``auto`` as what ``open_backend`` would take, ``cuda`` or ``cpu``; any other name as it is. Opens nothing."""
    if device != "auto":
        return device
    if not _has_cuda_device():
        return "cpu"
    try:
        import_module(_CUDA_BACKEND)
    except ImportError:
        return "cpu"
    return "cuda"


def open_backend(device: str, *, n_threads: int | None, kernel_files: KernelFiles | None = None) -> Backend:
    """Open ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``cuda:GPU-UUID``; the only place that imports device code.

    ``kernel_files`` keeps compiled CUDA kernels between starts; the CPU's have a folder of their own.

    ``auto`` takes a GPU when there is one and the CUDA packages are installed; a GPU that then does not work is an
    error, like one that was asked for.
    """
    wanted = parse_device(device)
    if wanted.kind == "auto" and _has_cuda_device():
        try:
            return _open_cuda(wanted, kernel_files)
        except ImportError as error:
            note = f"there is a GPU, but a CUDA package is missing ({error}): running on the CPU"
            return _open_cpu(n_threads, (f"{note}; install kvs-toolkit[cuda] to use it",))
    if wanted.kind != "cuda":
        return _open_cpu(n_threads, ())
    try:
        return _open_cuda(wanted, kernel_files)
    except ImportError as error:
        raise BackendUnavailableError(
            f"device {device}: a CUDA package is missing: {error}",
            hint="install kvs-toolkit[cuda], or use --device cpu",
        ) from error


def _open_cpu(n_threads: int | None, notes: tuple[str, ...]) -> Backend:
    from kvs_core.cpu.backend import CpuBackend

    return CpuBackend(n_threads=n_threads, notes=notes)


def _open_cuda(wanted: DeviceName, kernel_files: KernelFiles | None) -> Backend:
    backend: Backend = import_module(_CUDA_BACKEND).CudaBackend(wanted, kernel_files=kernel_files)
    return backend


def _has_cuda_device() -> bool:
    """Whether the driver sees a device; asks the driver library itself, so that no CUDA package is needed to say no."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
