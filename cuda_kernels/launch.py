"""What every launcher shares: kernels with a fixed signature, and checks of the arrays they are given. No kernels.

A kernel is compiled for exactly one signature, the first time it is launched or prepared, and never by importing; an
earlier start's machine code is taken instead where it was kept. Launchers allocate nothing, synchronise nothing, and
refuse host arrays.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from cuda.bindings import driver
from numba import cuda
from numba.cuda import config, types
from numba.cuda.cudadrv.devicearray import is_cuda_ndarray

from cuda_kernels import launch_list
from cuda_kernels.cubin import Cubin, compile_cubin, compile_ptx, file_name, load_function, version_hash
from kvs_core.errors import BackendError, KernelArgumentError
from kvs_core.kernel_files import KernelFiles

_SCALARS = {types.int32: np.int32, types.int64: np.int64, types.float32: np.float32}

config.CUDA_LOW_OCCUPANCY_WARNINGS = 0  # a decode step launches small grids on purpose

IN_SIMULATOR = bool(config.ENABLE_CUDASIM)
SHARED_LIMIT = 99 * 1024
"""Shared memory a block may use on every supported device (consumer cards; data-centre cards allow more)."""
SHARED_LIMIT_90 = 227 * 1024
"""Shared memory that a block may use on compute capability 9.0."""


def device_function(function: Callable[..., Any]) -> Any:
    """Let kernels call ``function``. ``cuda.jit(device=True)`` would ask for a device even to compile to PTX."""
    return cuda.jit(function, device=True) if IN_SIMULATOR else cuda.jit(function, device=True, inline="always")


_files: KernelFiles | None = None


def keep_kernels(files: KernelFiles | None) -> None:
    """Where machine code is looked for before it is compiled, and kept afterwards; None: nowhere."""
    global _files
    _files = files
    if files is not None:
        files.select(version_hash())


def kernel_builder(build: Callable[..., Kernel]) -> Callable[..., Kernel]:
    """``functools.cache`` for functions that build a kernel, with a name on disk for what they build.

    Arguments must be all that the kernel depends on beside the sources, and be told apart by ``repr``.
    """

    @cache
    def built(*args: Any) -> Kernel:
        kernel = build(*args)
        kernel.case = f"{build.__module__}.{build.__qualname__}{args!r}"
        return kernel

    built.__name__, built.__doc__, built.__module__ = build.__name__, build.__doc__, build.__module__
    return built


class Kernel:
    """A kernel's Python function bound to one signature.

    function            the kernel's Python function, closed over its compile-time sizes
    signature           argument types, Numba types
    n_threads           threads of a block
    min_blocks          blocks of one multiprocessor that the registers must leave room for, 0: no bound
    dynamic_bytes       dynamic shared memory of a block
    shared_limit        what a block may use on the devices that the kernel is for
    is_whole            compiled as a program of its own (``cubin.compile_cubin``)
    overlaps            whether the kernel waits for those before it (``overlap``), so that it may start early
    shares_multiprocessor      whether its blocks leave shared memory for those of another kernel: then they ask for all

    ``case`` says what was built, for the name on disk; a kernel without one is compiled at every start.
    """

    def __init__(
        self,
        function: Callable[..., None],
        signature: Sequence[Any],
        *,
        n_threads: int,
        min_blocks: int = 0,
        dynamic_bytes: int = 0,
        shared_limit: int = SHARED_LIMIT,
        is_whole: bool = False,
        overlaps: bool = False,
        shares_multiprocessor: bool = False,
    ) -> None:
        if dynamic_bytes > shared_limit:
            raise KernelArgumentError(
                f"{function.__name__}: {dynamic_bytes} bytes of shared memory, its devices have {shared_limit}"
            )
        self.function = function
        self.name = function.__name__
        self.signature = tuple(signature)
        self.n_threads = n_threads
        self.launch_bounds = (n_threads, min_blocks) if min_blocks else (n_threads,)
        self.dynamic_bytes = dynamic_bytes
        self.shared_limit = shared_limit
        self.is_whole = is_whole
        self.overlaps = overlaps
        self.shares_multiprocessor = shares_multiprocessor
        self.case: str | None = None
        self._dispatcher = cuda.jit(function) if IN_SIMULATOR else None
        self._packed: _Parameters | None = None

    def load(self) -> bool:
        """Load machine code that an earlier start kept; False if there is none that the driver takes."""
        if IN_SIMULATOR or self._packed is not None:
            return True
        if _files is None or self.case is None:
            return False
        content = _files.read(self._file_name(_current_generation()))
        if content is None:
            return False
        try:
            self._take(Cubin.from_bytes(content))
        except BackendError:
            return False  # whole, but not what it says: it is compiled again and replaced
        return True

    def prepare(self) -> None:
        """Load, after compiling for the current device if need be; does nothing the second time."""
        if self.load():
            return
        generation = _current_generation()
        cubin = compile_cubin(self.function, self.signature, self.launch_bounds, generation, is_whole=self.is_whole)
        self._take(cubin)
        if _files is not None and self.case is not None:
            _files.write(self._file_name(generation), cubin.to_bytes())

    def _take(self, cubin: Cubin) -> None:
        function = load_function(cubin, self.dynamic_bytes, takes_all_shared=self.shares_multiprocessor)
        self._packed = _Parameters(self.signature, function)

    def _file_name(self, generation: tuple[int, int]) -> str:
        return file_name(self.name, str(self.case), self.signature, self.launch_bounds, generation)

    def launch(self, grid: tuple[int, ...], stream: Any, *args: Any, may_overlap: bool = True) -> None:
        """Launch on ``stream``; an empty grid launches nothing. Parameters of one dimension take any shape.

        ``may_overlap``: whether this launch may start early where its kernel and the step allow that.
        """
        if 0 in grid:
            return
        if self._packed is None:
            self.prepare()
        if self._packed is not None:
            starts_early = self.overlaps and may_overlap and _may_overlap
            self._packed.launch(grid, self.n_threads, self.dynamic_bytes, int(stream), args, starts_early)
            return
        assert self._dispatcher is not None, "only the simulator launches through Numba"
        typed = (_as_type(ty, arg) for ty, arg in zip(self.signature, args, strict=True))
        self._dispatcher[grid, self.n_threads, stream, self.dynamic_bytes](*typed)

    def ptx(self, compute_capability: tuple[int, int]) -> str:
        """PTX for a device generation; needs neither a device nor a driver."""
        return compile_ptx(self.function, self.signature, self.launch_bounds, compute_capability)


def prepare_kernels(kernels: Iterable[Kernel]) -> None:
    """Prepare several; says so before the first is compiled."""
    missing = [kernel for kernel in kernels if not kernel.load()]
    if missing and _files is not None:
        plural = "s" if len(missing) != 1 else ""
        _files.report(f"compiling {len(missing)} CUDA kernel{plural} (first start on this device)")
    for kernel in missing:
        kernel.prepare()


def _current_generation() -> tuple[int, int]:
    major, minor = cuda.get_current_device().compute_capability
    return int(major), int(minor)


def _current_multiprocessors() -> int:
    return int(cuda.get_current_device().MULTIPROCESSOR_COUNT)


class _Parameters:
    """A compiled kernel's parameters in one block of memory, filled anew at every launch.

    Numba's own launch looks at every argument's type again and costs several times as much; a step of a language
    model is hundreds of launches. An array reaches a kernel as: two unused words, elements, bytes of one, address,
    lengths, strides in bytes.
    """

    def __init__(self, signature: Sequence[Any], function: Any) -> None:
        self._function = function
        self._signature = signature
        self._format = "<" + "".join(_field_codes(signature))
        n_fields = struct.calcsize(self._format) // 8
        self._values = (ctypes.c_uint64 * n_fields)()
        base = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * n_fields)(*(base + 8 * i for i in range(n_fields)))
        self._address = ctypes.addressof(self._pointers)

    def launch(
        self, grid: tuple[int, ...], n_threads: int, dynamic_bytes: int, stream: int, args: Any, starts_early: bool
    ) -> None:
        struct.pack_into(self._format, self._values, 0, *_fields(self._signature, args))
        sizes = (*(*grid, 1, 1)[:3], n_threads, 1, 1, dynamic_bytes)
        if starts_early:
            config = _early_launch(sizes[:3], n_threads, dynamic_bytes, stream)
            _check_launch(driver.cuLaunchKernelEx(config, self._function, self._address, 0))
            return
        call_launch((self._function, *sizes, stream, self._address, 0))
        if launch_list.kept_in is not None:
            launch_list.kept_in.add(self._function, sizes, stream, bytes(self._values))


def call_launch(arguments: tuple[Any, ...]) -> None:
    """The driver's launch; raises BackendError with the driver's name for what is wrong."""
    _check_launch(driver.cuLaunchKernel(*arguments))


def _check_launch(result: tuple[Any, ...]) -> None:
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise BackendError(f"CUDA: a kernel could not be launched: {result[0].name}")


def _early_launch(grid: tuple[int, ...], n_threads: int, dynamic_bytes: int, stream: int) -> Any:
    """A launch whose blocks may take places before the kernel before it has ended."""
    config, attribute = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = n_threads, 1, 1
    config.sharedMemBytes = dynamic_bytes
    config.hStream = driver.CUstream(stream)
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    value = driver.CUlaunchAttributeValue()
    value.programmaticStreamSerializationAllowed = 1
    attribute.value = value
    config.attrs, config.numAttrs = [attribute], 1
    return config


_may_overlap = False


@contextmanager
def overlapped_launches(*, supported: bool = True) -> Iterator[None]:
    """Launches within start early where their kernel waits for those before it; for steps that are recorded.

    Outside, page tables and positions are written between the kernels that read them before they wait.
    """
    global _may_overlap
    _may_overlap = supported
    try:
        yield
    finally:
        _may_overlap = False


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


def device_capability() -> tuple[int, int]:
    """Compute capability of the current device; (0, 0) in the simulator."""
    return (0, 0) if IN_SIMULATOR else _current_generation()


def device_multiprocessors() -> int:
    """Of the current device; 1 in the simulator."""
    return 1 if IN_SIMULATOR else _current_multiprocessors()


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
