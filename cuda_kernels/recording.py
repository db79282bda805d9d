"""Steps recorded once as CUDA graphs and replayed: hundreds of launches become one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from cuda.bindings import driver

from cuda_kernels.device import checked
from cuda_kernels.launch import overlapped_launches

KEPT = 8


class Recordings:
    """The latest recorded steps of one stream by what they depend on; older ones are freed.

    A recording holds addresses and sizes as they were, so a key must name everything that changes them; values in
    device memory (tokens, positions, page tables) are read when it is replayed. ``overlaps``: whether the device lets
    a kernel start before the one before it has ended.
    """

    def __init__(self, stream: Any, *, overlaps: bool) -> None:
        self._stream = stream
        self._overlaps = overlaps
        self._graphs: OrderedDict[Hashable, Any] = OrderedDict()

    def replay(self, key: Hashable) -> bool:
        """Launch the recording of ``key``; False if there is none."""
        graph = self._graphs.get(key)
        if graph is None:
            return False
        self._graphs.move_to_end(key)
        checked(driver.cuGraphLaunch(graph, self._stream), "replaying a step")
        return True

    def record(self, key: Hashable, step: Callable[[], None]) -> None:
        """Record what ``step`` launches, without running it. Its kernels must be loaded already."""
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        checked(driver.cuStreamBeginCapture(self._stream, mode), "recording a step")
        try:
            with overlapped_launches(supported=self._overlaps):
                step()
        except BaseException:
            _, graph = driver.cuStreamEndCapture(self._stream)
            if graph is not None and int(graph):
                driver.cuGraphDestroy(graph)
            raise
        graph = checked(driver.cuStreamEndCapture(self._stream), "recording a step")
        self._graphs[key] = checked(driver.cuGraphInstantiate(graph, 0), "preparing a recorded step")
        checked(driver.cuGraphDestroy(graph), "freeing a graph")
        while len(self._graphs) > KEPT:
            _, oldest = self._graphs.popitem(last=False)
            checked(driver.cuGraphExecDestroy(oldest), "freeing a recorded step")

    def close(self) -> None:
        for graph in self._graphs.values():
            checked(driver.cuGraphExecDestroy(graph), "freeing a recorded step")
        self._graphs.clear()
