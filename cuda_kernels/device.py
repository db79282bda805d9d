"""The device and its driver: contexts, streams, events, memory. Every driver call of the backend goes through here."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from cuda.bindings import driver
from numba import cuda
from numba.cuda.cudadrv.devicearray import DeviceNDArray
from numba.cuda.cudadrv.driver import MemoryPointer

from kvs_core.devices import DeviceName, VisibleGpu, find_gpu
from kvs_core.errors import BackendError, BackendUnavailableError, DeviceMemoryError
from kvs_core.units import GIB

_OUT_OF_MEMORY = driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY


def checked(result: tuple[Any, ...], what: str) -> Any:
    """The value of a driver call; raises BackendError with the driver's own name for what went wrong."""
    if result[0] == driver.CUresult.CUDA_SUCCESS:
        return result[1] if len(result) > 1 else None
    _, name = driver.cuGetErrorName(result[0])
    text = name.decode() if isinstance(name, bytes) else str(result[0])
    kind = DeviceMemoryError if result[0] == _OUT_OF_MEMORY else BackendError
    raise kind(f"CUDA: {what} failed: {text}")


def open_device(wanted: DeviceName) -> Any:
    """Make a device, as CUDA_VISIBLE_DEVICES orders them, the current one; returns Numba's device."""
    try:
        devices = [cuda.gpus[index] for index in range(len(cuda.gpus))]
        gpus = [VisibleGpu(name=device_name(device), uuid=str(device.uuid)) for device in devices]
    except Exception as error:  # numba wraps driver failures in several classes of its own
        raise BackendUnavailableError(
            f"device cuda:{wanted.uuid or wanted.index}: no working CUDA driver: {_first_line(error)}",
            hint="use --device cpu, or see nvidia-smi",
        ) from error
    index = find_gpu(wanted, gpus)
    try:
        cuda.select_device(index)
        cuda.current_context()
    except Exception as error:
        raise BackendUnavailableError(f"device cuda:{index} cannot be used: {_first_line(error)}") from error
    return cuda.get_current_device()


def _first_line(error: BaseException) -> str:
    """What an error says first, headings such as "Error at driver init:" left out."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if line and not line.endswith(":")), type(error).__name__)


def device_name(device: Any) -> str:
    return device.name.decode() if isinstance(device.name, bytes) else str(device.name)


def memory_info() -> tuple[int, int]:
    """(free, total) bytes of the current device."""
    result = driver.cuMemGetInfo()
    checked(result[:1], "asking for free memory")
    return int(result[1]), int(result[2])


def raw_stream(stream: Any) -> Any:
    """A Numba stream as the driver's handle."""
    return driver.CUstream(int(getattr(stream.handle, "value", stream.handle)))


class DeviceMemory:
    """One allocation and typed views of it. Views are made once and kept: making one costs as much as a launch."""

    def __init__(self, n_bytes: int, what: str) -> None:
        self.n_bytes = n_bytes
        try:
            self.address = int(checked(driver.cuMemAlloc(max(n_bytes, 1)), f"{what} of {n_bytes} bytes"))
        except DeviceMemoryError as error:
            free, _ = memory_info()
            raise DeviceMemoryError(
                f"{what}: {n_bytes / GIB:.2f} GiB of device memory cannot be allocated, {free / GIB:.2f} GiB are free",
                hint="lower the context (-c) or give --kv-stream-arena-mib",
            ) from error
        self._context = cuda.current_context()
        self._views: dict[tuple[int, tuple[int, ...], Any], DeviceNDArray] = {}

    def view(self, offset: int, shape: Sequence[int], dtype: Any) -> DeviceNDArray:
        """The bytes from ``offset`` on as a C-ordered array."""
        key = (offset, tuple(shape), dtype)
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = self._make(offset, tuple(shape), np.dtype(dtype))
        return found

    def forget_views(self) -> None:
        self._views.clear()

    def _make(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceNDArray:
        strides, stride = [], dtype.itemsize
        for length in reversed(shape):
            strides.insert(0, stride)
            stride *= length
        pointer = MemoryPointer(self._context, driver.CUdeviceptr(self.address + offset), stride)
        return DeviceNDArray(shape=shape, strides=tuple(strides), dtype=dtype, gpu_data=pointer)

    def close(self) -> None:
        self._views.clear()
        if self.address:
            checked(driver.cuMemFree(self.address), "freeing device memory")
            self.address = 0


class PinnedBuffer:
    """Page-locked host memory; ``array`` is uint8 [n_bytes]."""

    def __init__(self, n_bytes: int) -> None:
        self.address = int(checked(driver.cuMemHostAlloc(max(n_bytes, 1), 0), f"page-locking {n_bytes} bytes"))
        self.array = np.frombuffer((ctypes.c_uint8 * n_bytes).from_address(self.address), dtype=np.uint8)

    def close(self) -> None:
        if self.address:
            checked(driver.cuMemFreeHost(self.address), "freeing page-locked memory")
            self.address = 0


class Event:
    """A point in a stream; ``timed`` ones can be subtracted."""

    def __init__(self, *, timed: bool = False) -> None:
        flags = driver.CUevent_flags
        flag = flags.CU_EVENT_DEFAULT if timed else flags.CU_EVENT_DISABLE_TIMING
        self.handle = checked(driver.cuEventCreate(int(flag)), "making an event")

    def record(self, stream: Any) -> None:
        checked(driver.cuEventRecord(self.handle, stream), "recording an event")

    def is_done(self) -> bool:
        code = driver.cuEventQuery(self.handle)[0]
        if code == driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        checked((code,), "asking for an event")
        return True

    def hold(self, stream: Any) -> None:
        """Work asked for on ``stream`` from now on begins after this event."""
        checked(driver.cuStreamWaitEvent(stream, self.handle, 0), "waiting for an event")

    def wait(self) -> None:
        """Block the caller until the event has happened."""
        checked(driver.cuEventSynchronize(self.handle), "waiting for an event")

    def seconds_since(self, begin: Event) -> float:
        return float(checked(driver.cuEventElapsedTime(begin.handle, self.handle), "reading an event")) / 1e3

    def close(self) -> None:
        checked(driver.cuEventDestroy(self.handle), "freeing an event")
