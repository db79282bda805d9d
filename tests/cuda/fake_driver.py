"""A driver without a device: memory is host memory, every copy is done at once, kernels do nothing.

It checks what can be checked without a GPU: that calls are made in a legal order with sizes and addresses inside
what was allocated, that everything allocated is freed, and that the session's counters are right.
"""

from __future__ import annotations

import ctypes
import threading
from itertools import count
from typing import Any

from cuda.bindings import driver as real

OK = real.CUresult.CUDA_SUCCESS


class FakeDriver:
    """The part of ``cuda.bindings.driver`` that the backend calls."""

    CUresult, CUevent_flags, CUstream_flags = real.CUresult, real.CUevent_flags, real.CUstream_flags
    CUstreamCaptureMode, CUdeviceptr, CUstream = real.CUstreamCaptureMode, real.CUdeviceptr, int
    CUfunction_attribute = real.CUfunction_attribute

    def __init__(self) -> None:
        self.blocks: dict[int, Any] = {}
        self.live: dict[str, set[int]] = {"event": set(), "stream": set(), "graph": set(), "host": set()}
        self.registered: dict[int, int] = {}
        self.locks_granted: int | None = None  # None: all of them
        self.n_locks = 0
        self.may_lock = threading.Event()
        self.may_lock.set()
        self._context_threads: set[int] = set()
        self.n_replays = 0
        self.n_modules = 0
        self.refuse_modules = False
        self.shared_bytes: dict[int, int] = {}
        self.compiled: list[str] = []
        self.loaded: list[Any] = []
        self.generation = (9, 0)
        self.launched: list[Any] = []
        self._handles = count(1)

    def forget_kernels(self) -> None:
        """Another process begins: nothing is loaded."""
        for kernel in self.loaded:
            kernel._packed = None
        for names_or_kernels in (self.compiled, self.loaded, self.launched):
            names_or_kernels.clear()

    def _new(self, kind: str) -> tuple[Any, int]:
        handle = next(self._handles)
        self.live[kind].add(handle)
        return OK, handle

    def _free(self, kind: str, handle: int) -> tuple[Any]:
        self.live[kind].remove(handle)
        return (OK,)

    def _check(self, address: int, n_bytes: int) -> None:
        assert any(begin <= address and address + n_bytes <= begin + len(b) for begin, b in self.blocks.items())

    def cuGetErrorName(self, code: Any) -> tuple[Any, bytes]:  # noqa: N802
        return OK, code.name.encode()

    def cuMemGetInfo(self) -> tuple[Any, int, int]:  # noqa: N802
        return OK, 100 << 30, 140 << 30

    def cuMemAlloc(self, n_bytes: int) -> tuple[Any, int]:  # noqa: N802
        block = (ctypes.c_uint8 * n_bytes)()
        address = ctypes.addressof(block)
        self.blocks[address] = block
        return OK, address

    def cuMemFree(self, address: int) -> tuple[Any]:  # noqa: N802
        del self.blocks[address]
        return (OK,)

    def cuMemHostAlloc(self, n_bytes: int, _: int) -> tuple[Any, int]:  # noqa: N802
        block = (ctypes.c_uint8 * n_bytes)()
        self.live["host"].add(ctypes.addressof(block))
        self.blocks[ctypes.addressof(block)] = block
        return OK, ctypes.addressof(block)

    def cuMemFreeHost(self, address: int) -> tuple[Any]:  # noqa: N802
        del self.blocks[address]
        return self._free("host", address)

    def cuCtxGetCurrent(self) -> tuple[Any, int]:  # noqa: N802
        return OK, 7

    def cuCtxSetCurrent(self, context: int) -> tuple[Any]:  # noqa: N802
        assert context == 7
        self._context_threads.add(threading.get_ident())
        return (OK,)

    def cuMemHostRegister(self, address: int, n_bytes: int, _: int) -> tuple[Any]:  # noqa: N802
        if threading.get_ident() not in self._context_threads:
            return (real.CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        self.may_lock.wait()
        assert address % 4096 == 0
        assert n_bytes % 4096 == 0
        assert not any(begin < address + n_bytes and address < begin + size for begin, size in self.registered.items())
        if self.locks_granted is not None and self.n_locks >= self.locks_granted:
            return (real.CUresult.CUDA_ERROR_OUT_OF_MEMORY,)
        self.n_locks += 1
        self.registered[address] = n_bytes
        return (OK,)

    def cuMemHostUnregister(self, address: int) -> tuple[Any]:  # noqa: N802
        del self.registered[address]
        return (OK,)

    def cuMemcpyHtoDAsync(self, target: int, source: int, n_bytes: int, _: int) -> tuple[Any]:  # noqa: N802
        self._check(target, n_bytes)
        ctypes.memmove(target, source, n_bytes)
        return (OK,)

    def cuMemcpyDtoHAsync(self, target: int, source: int, n_bytes: int, _: int) -> tuple[Any]:  # noqa: N802
        self._check(source, n_bytes)
        ctypes.memmove(target, source, n_bytes)
        return (OK,)

    def cuMemcpyDtoDAsync(self, target: int, source: int, n_bytes: int, _: int) -> tuple[Any]:  # noqa: N802
        self._check(target, n_bytes)
        self._check(source, n_bytes)
        ctypes.memmove(target, source, n_bytes)
        return (OK,)

    def cuMemsetD8Async(self, target: int, value: int, n_bytes: int, _: int) -> tuple[Any]:  # noqa: N802
        self._check(target, n_bytes)
        ctypes.memset(target, value, n_bytes)
        return (OK,)

    def cuStreamCreate(self, _: int) -> tuple[Any, int]:  # noqa: N802
        return self._new("stream")

    def cuStreamDestroy(self, handle: int) -> tuple[Any]:  # noqa: N802
        return self._free("stream", handle)

    def cuStreamSynchronize(self, _: int) -> tuple[Any]:  # noqa: N802
        return (OK,)

    def cuEventCreate(self, _: int) -> tuple[Any, int]:  # noqa: N802
        return self._new("event")

    def cuEventDestroy(self, handle: int) -> tuple[Any]:  # noqa: N802
        return self._free("event", handle)

    def _use_event(self, handle: int) -> tuple[Any]:
        assert handle in self.live["event"]
        return (OK,)

    def cuEventRecord(self, handle: int, _: int) -> tuple[Any]:  # noqa: N802
        return self._use_event(handle)

    def cuEventQuery(self, handle: int) -> tuple[Any]:  # noqa: N802
        return self._use_event(handle)

    def cuEventSynchronize(self, handle: int) -> tuple[Any]:  # noqa: N802
        return self._use_event(handle)

    def cuStreamWaitEvent(self, _: int, handle: int, __: int) -> tuple[Any]:  # noqa: N802
        return self._use_event(handle)

    def cuEventElapsedTime(self, begin: int, end: int) -> tuple[Any, float]:  # noqa: N802
        self._use_event(begin)
        self._use_event(end)
        return OK, 0.25

    def cuStreamBeginCapture(self, *_: Any) -> tuple[Any]:  # noqa: N802
        return (OK,)

    def cuStreamEndCapture(self, _: int) -> tuple[Any, int]:  # noqa: N802
        return self._new("graph")

    def cuGraphInstantiate(self, *_: Any) -> tuple[Any, int]:  # noqa: N802
        return self._new("graph")

    def cuGraphDestroy(self, handle: int) -> tuple[Any]:  # noqa: N802
        return self._free("graph", handle)

    def cuGraphExecDestroy(self, handle: int) -> tuple[Any]:  # noqa: N802
        return self._free("graph", handle)

    def cuGraphLaunch(self, handle: int, _: int) -> tuple[Any]:  # noqa: N802
        assert handle in self.live["graph"]
        self.n_replays += 1
        return (OK,)

    def cuModuleLoadData(self, address: int) -> tuple[Any, int]:  # noqa: N802
        assert address
        if self.refuse_modules:
            return real.CUresult.CUDA_ERROR_INVALID_IMAGE, 0
        self.n_modules += 1
        return OK, next(self._handles)

    def cuModuleGetFunction(self, module: int, name: bytes) -> tuple[Any, int]:  # noqa: N802
        assert module
        assert name
        return OK, next(self._handles)

    def cuFuncSetAttribute(self, function: int, attribute: Any, value: int) -> tuple[Any]:  # noqa: N802
        attributes = self.CUfunction_attribute
        if attribute is attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
            assert value == 100
            return (OK,)
        assert attribute is attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.shared_bytes[function] = value
        return (OK,)
