"""What every launcher shares: kernels with a fixed signature, and checks of the arrays they are given. No kernels.

A kernel is compiled for exactly one signature, the first time it is launched or prepared, and never by importing.
Launchers allocate nothing, synchronise nothing, and refuse host arrays.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from cuda.bindings import driver
from numba import cuda
from numba.cuda import config, types
from numba.cuda.cudadrv.devicearray import is_cuda_ndarray

from kvs_core.errors import BackendError, KernelArgumentError

_SCALARS = {types.int32: np.int32, types.int64: np.int64, types.float32: np.float32}

config.CUDA_LOW_OCCUPANCY_WARNINGS = 0  # a decode step launches small grids on purpose

IN_SIMULATOR = bool(config.ENABLE_CUDASIM)
SHARED_LIMIT = 99 * 1024
"""Shared memory a block may use on every supported device (consumer cards; data-centre cards allow more)."""


def device_function(function: Callable[..., Any]) -> Any:
    """Let kernels call ``function``. ``cuda.jit(device=True)`` would ask for a device even to compile to PTX."""
    return cuda.jit(function, device=True) if IN_SIMULATOR else cuda.jit(function, device=True, inline="always")


class Kernel:
    """A ``cuda.jit`` function bound to one signature.

    function            the kernel's Python function, closed over its compile-time sizes
    signature           argument types, Numba types
    n_threads           threads of a block
    min_blocks          blocks of one multiprocessor that the registers must leave room for, 0: no bound
    dynamic_bytes       dynamic shared memory of a block
    """

    def __init__(
        self,
        function: Callable[..., None],
        signature: Sequence[Any],
        *,
        n_threads: int,
        min_blocks: int = 0,
        dynamic_bytes: int = 0,
    ) -> None:
        if dynamic_bytes > SHARED_LIMIT:
            raise KernelArgumentError(
                f"{function.__name__}: {dynamic_bytes} bytes of shared memory, at most {SHARED_LIMIT} are portable"
            )
        self.function = function
        self.name = function.__name__
        self.signature = tuple(signature)
        self.n_threads = n_threads
        self.launch_bounds = (n_threads, min_blocks) if min_blocks else (n_threads,)
        self.dynamic_bytes = dynamic_bytes
        self._dispatcher = cuda.jit(function) if IN_SIMULATOR else cuda.jit(function, launch_bounds=self.launch_bounds)
        self._is_prepared = IN_SIMULATOR
        self._packed: _Parameters | None = None

    def prepare(self) -> None:
        """Compile for the current device and load; does nothing the second time."""
        if self._is_prepared:
            return
        compiled = self._dispatcher.compile(self.signature)
        compiled.bind()
        self._packed = _Parameters(self.signature, compiled.library.get_cufunc())
        if self.dynamic_bytes:
            self._raise_dynamic_limit(compiled)
        self._is_prepared = True

    def _raise_dynamic_limit(self, compiled: Any) -> None:
        """Blocks get more than 48 KiB, static and dynamic together, only after their function asked for it."""
        from numba.cuda.cudadrv.driver import driver as numba_driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        function = compiled.library.get_cufunc()
        numba_driver.cuKernelSetAttribute(attribute, self.dynamic_bytes, function.handle, function.device.id)

    def launch(self, grid: tuple[int, ...], stream: Any, *args: Any) -> None:
        """Launch on ``stream``; an empty grid launches nothing. Parameters of one dimension take any shape."""
        if 0 in grid:
            return
        self.prepare()
        if self._packed is not None:
            self._packed.launch(grid, self.n_threads, self.dynamic_bytes, int(stream), args)
            return
        typed = (_as_type(ty, arg) for ty, arg in zip(self.signature, args, strict=True))
        self._dispatcher[grid, self.n_threads, stream, self.dynamic_bytes](*typed)

    def ptx(self, compute_capability: tuple[int, int]) -> str:
        """PTX for a device generation; needs neither a device nor a driver."""
        text, _ = cuda.compile_ptx(
            self.function, self.signature, cc=compute_capability, launch_bounds=self.launch_bounds
        )
        return str(text)


class _Parameters:
    """A compiled kernel's parameters in one block of memory, filled anew at every launch.

    Numba's own launch looks at every argument's type again and costs several times as much; a step of a language
    model is hundreds of launches. An array reaches a kernel as: two unused words, elements, bytes of one, address,
    lengths, strides in bytes.
    """

    def __init__(self, signature: Sequence[Any], function: Any) -> None:
        self._function = driver.CUfunction(int(function.handle))
        self._signature = signature
        self._format = "<" + "".join(_field_codes(signature))
        n_fields = struct.calcsize(self._format) // 8
        self._values = (ctypes.c_uint64 * n_fields)()
        base = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * n_fields)(*(base + 8 * i for i in range(n_fields)))
        self._address = ctypes.addressof(self._pointers)

    def launch(self, grid: tuple[int, ...], n_threads: int, dynamic_bytes: int, stream: int, args: Any) -> None:
        struct.pack_into(self._format, self._values, 0, *_fields(self._signature, args))
        x, y, z = (*grid, 1, 1)[:3]
        result = driver.cuLaunchKernel(
            self._function, x, y, z, n_threads, 1, 1, dynamic_bytes, stream, self._address, 0
        )
        if result[0] != driver.CUresult.CUDA_SUCCESS:
            raise BackendError(f"CUDA: a kernel could not be launched: {result[0].name}")


def _field_codes(signature: Sequence[Any]) -> Iterator[str]:
    """``struct`` codes of eight bytes each."""
    for ty in signature:
        if isinstance(ty, types.Array):
            yield from "q" * (5 + 2 * ty.ndim)
        elif isinstance(ty, types.BaseTuple):
            yield from _field_codes(tuple(ty))
        else:
            yield "f4x" if ty is types.float32 else "q"


def _fields(signature: Sequence[Any], args: Sequence[Any]) -> Iterator[Any]:
    for ty, arg in zip(signature, args, strict=True):
        if isinstance(ty, types.Array):
            size, item_bytes = arg.size, arg.dtype.itemsize
            places = (size, item_bytes) if ty.ndim == 1 else (*arg.shape, *arg.strides)
            yield from (0, 0, size, item_bytes, address_of(arg), *places)
        elif isinstance(ty, types.BaseTuple):
            yield from _fields(tuple(ty), arg)
        else:
            yield arg


def _as_type(ty: Any, arg: Any) -> Any:
    """A number as the scalar type that makes Numba find the one compiled signature, an array as flat as it wants it."""
    if isinstance(ty, types.Array) and ty.ndim == 1 and arg.ndim > 1:
        return arg.reshape(-1)
    return _SCALARS[ty](arg) if ty in _SCALARS else arg


def check_array(name: str, array: Any, dtype: Any, shape: tuple[int | None, ...]) -> None:
    """Raise unless ``array`` is a contiguous device array of this dtype and shape (None: any length)."""
    if not is_cuda_ndarray(array):
        raise KernelArgumentError(f"{name}: {type(array).__name__} is not in device memory", hint="copy it first")
    if array.dtype != np.dtype(dtype):
        raise KernelArgumentError(f"{name}: dtype {array.dtype}, needs {np.dtype(dtype)}")
    fits = len(array.shape) == len(shape) and all(
        wanted is None or seen == wanted for seen, wanted in zip(array.shape, shape, strict=True)
    )
    if not fits:
        wanted_text = ", ".join("any" if length is None else str(length) for length in shape)
        raise KernelArgumentError(f"{name}: shape {list(array.shape)}, needs [{wanted_text}]")
    if not array.is_c_contiguous():
        raise KernelArgumentError(f"{name}: strides {list(array.strides)}, needs C order without gaps")


def address_of(array: Any) -> int:
    """Device address of the first element."""
    if IN_SIMULATOR:
        return int(array.__cuda_array_interface__["data"][0])
    return array.device_ctypes_pointer.value or 0
