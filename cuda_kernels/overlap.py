"""Kernels that start before the one before them has ended, in recorded steps on compute capability 9.0 and later.

A step of one token is hundreds of short kernels, each of which begins by waiting for memory. Launched as dependents
(``Kernel.overlaps``), the blocks of the next kernel take their places while the last blocks of this one still run, read
what no kernel of the step writes (weights), and wait here for everything before them. Elsewhere both calls are nothing.

    load constants | wait_for_previous | let_next_start | read and write what the step computes

Nothing that another kernel of the step writes may be read or written before the wait. The next kernel is let in only
after it, so at most two kernels are under way; but the convolution of a recurrent layer lets the delta net in at once,
which reads its own state meanwhile and then waits for the convolution, and so for all before it. Reads after the wait
use plain loads: the read-only path promises nothing about data that was written while the kernel was resident.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.cuda import types

from cuda_kernels.emit import I8, I32, Emitter, emitted
from cuda_kernels.launch import IN_SIMULATOR, device_function

OVERLAP_CAPABILITY = (9, 0)

EARLY = True
_ARCHITECTURE = b"__CUDA_ARCH\0"


def _compiled_architecture(builder: Any) -> Any:
    """The compiler's constant 100 * major + 10 * minor; branches on it cost nothing."""
    module = builder.module
    pointer = I8.as_pointer()
    reflect = module.globals.get("__nvvm_reflect") or ir.Function(
        module, ir.FunctionType(I32, [pointer]), "__nvvm_reflect"
    )
    name = module.globals.get("kvs_architecture_name")
    if name is None:
        text = ir.ArrayType(I8, len(_ARCHITECTURE))
        name = ir.GlobalVariable(module, text, "kvs_architecture_name")
        name.global_constant, name.linkage = True, "internal"
        name.initializer = ir.Constant(text, bytearray(_ARCHITECTURE))
    return builder.call(reflect, [builder.bitcast(name, pointer)])


def _emit_if_supported(emit: Emitter, instruction: str) -> None:
    least = 100 * OVERLAP_CAPABILITY[0] + 10 * OVERLAP_CAPABILITY[1]
    architecture = _compiled_architecture(emit.builder)
    with emit.builder.if_then(emit.builder.icmp_signed(">=", architecture, ir.Constant(I32, least))):
        emit.asm(instruction, "", "", [], ordered=True)


if IN_SIMULATOR:

    @device_function
    def wait_for_previous():
        """Kernels run one after another here."""

    @device_function
    def let_next_start():
        """Kernels run one after another here."""

else:

    @emitted(types.void)
    def wait_for_previous(emit: Emitter) -> None:
        """Return once all kernels before this one have ended and their results can be read."""
        _emit_if_supported(emit, ("griddepcontrol.launch_dependents;" if EARLY else "") + "griddepcontrol.wait;")

    @emitted(types.void)
    def let_next_start(emit: Emitter) -> None:
        """The next kernel may take places on the device as soon as every block of this one has called this or ended."""
        _emit_if_supported(emit, "griddepcontrol.launch_dependents;")
