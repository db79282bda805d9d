"""Timing on a CUDA device: launches captured in a graph, medians of replays, and the driver's copy as yardstick."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from cuda.bindings import driver
from numba import cuda

from cuda_kernels.launch import overlapped_launches
from cuda_kernels.overlap import OVERLAP_CAPABILITY

REPLAYS = 9


def checked(result: tuple[Any, ...]) -> Any:
    """The value of a driver call; raises on an error code."""
    if int(result[0]):
        raise RuntimeError(f"driver call failed: {result[0]}")
    return result[1] if len(result) > 1 else None


def raw_stream(stream: Any) -> Any:
    """A Numba stream for ``cuda.bindings``."""
    return driver.CUstream(int(getattr(stream.handle, "value", stream.handle)))


def milliseconds(action: Callable[[], None], stream: Any, repeats: int = REPLAYS) -> float:
    """Median time of ``action`` by events; one run before to warm up."""
    action()
    times = []
    for _ in range(repeats):
        begin, end = cuda.event(), cuda.event()
        begin.record(stream)
        action()
        end.record(stream)
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(np.median(times))


@contextmanager
def captured(stream: Any, step: Callable[[], None]) -> Iterator[Any]:
    """An executable graph of what ``step`` launches on ``stream``, or on streams that follow it; freed at the end."""
    handle = raw_stream(stream)
    checked(driver.cuStreamBeginCapture(handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    step()
    graph = checked(driver.cuStreamEndCapture(handle))
    executable = checked(driver.cuGraphInstantiate(graph, 0))
    checked(driver.cuGraphDestroy(graph))
    try:
        yield executable
    finally:
        checked(driver.cuGraphExecDestroy(executable))


def graph_microseconds(launches: Sequence[Callable[[Any], None]], stream: Any, *, overlapped: bool = False) -> float:
    """Median time of one launch: all of them, captured in order in one graph, replayed.

    ``overlapped``: kernels may start early as they do in recorded steps, where the device can do that.
    """
    can_overlap = tuple(cuda.get_current_device().compute_capability) >= OVERLAP_CAPABILITY
    for launch in launches:
        launch(stream)  # compiles, loads
    stream.synchronize()

    def step() -> None:
        with overlapped_launches(supported=overlapped and can_overlap):
            for launch in launches:
                launch(stream)

    with captured(stream, step) as executable:
        handle = raw_stream(stream)
        replay = milliseconds(lambda: checked(driver.cuGraphLaunch(executable, handle)), stream)
    return 1000.0 * replay / len(launches)


def copy_gigabytes_per_second(stream: Any, n_bytes: int = 2**31) -> float:
    """The driver's device-to-device copy, bytes read plus written, launched eagerly: a captured one is slower."""
    source, target = (cuda.device_array(n_bytes, np.uint8) for _ in range(2))
    addresses = [int(array.device_ctypes_pointer.value) for array in (target, source)]
    handle = raw_stream(stream)
    elapsed = milliseconds(lambda: checked(driver.cuMemcpyDtoDAsync(*addresses, n_bytes, handle)), stream)
    return 2 * n_bytes / elapsed / 1e6


def host_copy_gigabytes_per_second(stream: Any, n_bytes: int = 2**28) -> float:
    """The driver's copy from page-locked host memory to the device."""
    source, target = cuda.pinned_array(n_bytes, np.uint8), cuda.device_array(n_bytes, np.uint8)
    source[:] = 0
    address, handle = int(target.device_ctypes_pointer.value), raw_stream(stream)
    elapsed = milliseconds(
        lambda: checked(driver.cuMemcpyHtoDAsync(address, source.ctypes.data, n_bytes, handle)), stream
    )
    return n_bytes / elapsed / 1e6
