"""Kernels as machine code: compiled for one device generation, named for the disk, loaded by the driver.

Compiling and naming need no device. A cubin's bytes are what is loaded whether it was compiled now or by an earlier
start, so a cache changes no bit of any result.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver
from cuda.core import Linker, LinkerOptions, ObjectCode
from cuda.pathfinder import load_nvidia_dynamic_lib
from numba import cuda

import kvs_core
from kvs_core.errors import BackendError

_OPTIONS = {"debug": False, "lineinfo": False, "fastmath": False, "opt": True}
"""Given explicitly, so that nobody's environment changes how kernels are compiled."""

_PACKAGES = ("numba", "numba-cuda", "llvmlite", "cuda-bindings", "cuda-core", "numpy", "gguf")
_COMPILERS = {"nvvm": "nvidia-nvvm", "nvJitLink": "nvidia-nvjitlink"}
"""Library that compiles or links -> the package it usually comes from."""

_ENTRY = re.compile(r"^\.visible \.entry (\w+)\(", re.MULTILINE)
_SECTION = re.compile(rb"\0\.text\.(\w+)\0")
"""Every function has a section of its own in machine code; a whole program has inlined all but the kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cubin:
    """Machine code of one kernel; ``entry`` is its symbol."""

    entry: str
    code: bytes

    def to_bytes(self) -> bytes:
        return self.entry.encode() + b"\0" + self.code

    @staticmethod
    def from_bytes(content: bytes) -> Cubin:
        entry, _, code = content.partition(b"\0")
        return Cubin(entry=entry.decode(), code=code)


def target_of(compute_capability: tuple[int, int]) -> str:
    """The generation's name for the compilers; from 9.0 on with what only this generation has, as Numba chooses it."""
    major, minor = compute_capability
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def _numba_target(compute_capability: tuple[int, int]) -> tuple[Any, ...]:
    is_specific = target_of(compute_capability).endswith("a")
    return (*compute_capability, "a") if is_specific else compute_capability


def compile_ptx(
    function: Callable[..., None],
    signature: Sequence[Any],
    launch_bounds: tuple[int, ...],
    compute_capability: tuple[int, int],
) -> str:
    """PTX of one kernel for the target of a device generation."""
    cc = _numba_target(compute_capability)
    text, _ = cuda.compile_ptx(function, tuple(signature), cc=cc, launch_bounds=launch_bounds, **_OPTIONS)
    return str(text)


def compile_cubin(
    function: Callable[..., None],
    signature: Sequence[Any],
    launch_bounds: tuple[int, ...],
    compute_capability: tuple[int, int],
    *,
    is_whole: bool = False,
) -> Cubin:
    """Machine code of one kernel. Raises BackendError when the compiler's output is not understood.

    ``is_whole``: as a program of its own. nvJitLink assembles PTX as a part of some program, where it ignores
    ``setmaxnreg`` and lets products of warpgroups wait for each other; from LLVM code it makes whole programs. The
    driver, which links where nvJitLink is missing, takes PTX only and always makes whole programs.
    """
    if is_whole and _links_by_nvjitlink():
        return _compile_whole(function, signature, launch_bounds, compute_capability)
    ptx = compile_ptx(function, signature, launch_bounds, compute_capability)
    entry = _only_one(function, _ENTRY.findall(ptx))
    code = _link(ObjectCode.from_ptx(ptx.encode()), LinkerOptions(arch=target_of(compute_capability)))
    return Cubin(entry=entry, code=code)


def _compile_whole(
    function: Callable[..., None],
    signature: Sequence[Any],
    launch_bounds: tuple[int, ...],
    compute_capability: tuple[int, int],
) -> Cubin:
    llvm_code, _ = cuda.compile(
        function,
        tuple(signature),
        cc=_numba_target(compute_capability),
        launch_bounds=launch_bounds,
        device=False,
        abi="numba",
        output="ltoir",
        **_OPTIONS,
    )
    options = LinkerOptions(arch=target_of(compute_capability), link_time_optimization=True)
    code = _link(ObjectCode.from_ltoir(bytes(llvm_code)), options)
    return Cubin(entry=_only_one(function, [name.decode() for name in set(_SECTION.findall(code))]), code=code)


def _links_by_nvjitlink() -> bool:
    """Whether ``Linker`` will use nvJitLink; versions of cuda-core that cannot say use it where it is found."""
    ask = getattr(Linker, "which_backend", None)
    if ask is not None:
        return str(ask()).lower().endswith("nvjitlink")
    try:
        load_nvidia_dynamic_lib("nvJitLink")
    except (OSError, RuntimeError):  # the finder's own error is a RuntimeError
        return False
    return True


def _link(part: Any, options: LinkerOptions) -> bytes:
    linker = Linker(part, options=options)
    try:
        return bytes(linker.link("cubin").code)
    finally:
        linker.close()


def _only_one(function: Callable[..., None], entries: Sequence[str]) -> str:
    """The kernel's symbol. Raises BackendError unless there is one."""
    if len(entries) != 1:
        raise BackendError(
            f"CUDA: numba-cuda {_version_of('numba-cuda')} compiled {function.__name__} to {len(entries)} kernels, "
            "needs one",
            hint="numba-cuda 0.30 is known to work",
        )
    return entries[0]


def load_function(cubin: Cubin, dynamic_bytes: int, *, takes_all_shared: bool = False) -> Any:
    """The kernel as a function of the current device; stays loaded until the process ends. Raises BackendError.

    ``takes_all_shared``: a multiprocessor that runs it has as much shared memory, and as little cache, as it can.
    """
    from cuda_kernels.device import checked  # not at the top: the simulator cannot import it

    code = np.frombuffer(cubin.code, dtype=np.uint8)
    module = checked(driver.cuModuleLoadData(code.ctypes.data), "loading a kernel")
    function = checked(driver.cuModuleGetFunction(module, cubin.entry.encode()), f"finding kernel {cubin.entry}")
    if dynamic_bytes:
        # more than 48 KiB, static and dynamic together, only after the function asked for it
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(driver.cuFuncSetAttribute(function, attribute, dynamic_bytes), "asking for shared memory")
    if takes_all_shared:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        checked(driver.cuFuncSetAttribute(function, attribute, 100), "asking for all shared memory")
    return function


def file_name(
    name: str, case: str, signature: Sequence[Any], launch_bounds: tuple[int, ...], compute_capability: tuple[int, int]
) -> str:
    """What a kernel is called on disk. ``case``: who built it, with which compile-time sizes."""
    described = repr((name, case, [str(ty) for ty in signature], launch_bounds))
    digest = hashlib.sha256(described.encode()).hexdigest()[:20]
    return f"{target_of(compute_capability)}-{name}-{digest}.cubin"


@cache
def version_hash() -> str:
    """16 hexadecimal digits that change with the sources kernels are built from, the packages and the options."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(kvs_core.__file__).parent):
        for source in sorted(folder.glob("*.py")):
            digest.update(source.name.encode())
            digest.update(source.read_bytes())
    parts = [platform.python_version(), repr(_OPTIONS)]
    parts += [f"{package} {_version_of(package)}" for package in _PACKAGES]
    parts += [_identify_compiler(library, package) for library, package in _COMPILERS.items()]
    digest.update(repr(parts).encode())
    return digest.hexdigest()[:16]


def _identify_compiler(library: str, package: str) -> str:
    """The package's version; for a library from elsewhere its file, size and time, or the driver that replaces it."""
    found = _version_of(package)
    if found != "missing":
        return f"{package} {found}"
    try:
        path = load_nvidia_dynamic_lib(library).abs_path
        status = os.stat(path)
    except (OSError, RuntimeError):  # the finder's own error is a RuntimeError
        return f"{library} of driver {driver.cuDriverGetVersion()[1]}"
    return f"{path} {status.st_size} {status.st_mtime_ns}"


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
