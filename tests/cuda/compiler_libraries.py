"""Whether kernels can be compiled here; Numba's CUDA package installs without the compiler."""

from __future__ import annotations

from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib


def missing_compiler() -> str | None:
    """Why kernels cannot be compiled, or None."""
    for library in ("nvvm", "nvJitLink"):
        try:
            load_nvidia_dynamic_lib(library)
        except DynamicLibNotFoundError:
            return f"the CUDA compiler's lib{library} is not installed (extra 'cuda' or 'cuda-compile')"
    return None
