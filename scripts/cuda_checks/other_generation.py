"""Sessions with the kernels that devices of another generation would take, compiled for the device at hand.

Which kernels a session launches depends on the compute capability: 9.0 has products of warpgroups, weights and experts
that stream through shared memory, and launches that overlap; 12.0 overlaps; those before have none of it. A card of one
generation can run the choice of the others, all but instructions that it lacks.
"""

from __future__ import annotations

import argparse
import sys


def take_kernels_of(capability: tuple[int, int]) -> None:
    """From here on every CUDA session of this process chooses as on a device of this compute capability."""
    from cuda_kernels.backend import CudaBackend  # with it every module that chooses
    from cuda_kernels.launch import device_capability

    def chosen() -> tuple[int, int]:
        return capability

    for name, module in list(sys.modules.items()):
        if name.startswith("cuda_kernels.") and getattr(module, "device_capability", None) is device_capability:
            setattr(module, "device_capability", chosen)  # noqa: B010  a module's attribute
    CudaBackend._compute_capability = capability  # type: ignore[method-assign, assignment]


def add_option(parser: argparse.ArgumentParser) -> None:
    """``--kernels-of MAJOR.MINOR``, for ``apply_option``."""
    parser.add_argument(
        "--kernels-of",
        type=_capability,
        metavar="MAJOR.MINOR",
        help="take the kernels of devices of this compute capability, compiled for the device at hand",
    )


def apply_option(arguments: argparse.Namespace) -> None:
    if arguments.kernels_of is not None:
        take_kernels_of(arguments.kernels_of)
        print(f"kernels of compute capability {'.'.join(map(str, arguments.kernels_of))}")


def _capability(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)
