"""Kernels that start before the one before them has ended, in recorded steps on compute capability 9.0 and later.

A step of one token is hundreds of short kernels, each of which begins by waiting for memory. Launched as dependents
(``Kernel.overlaps``), the blocks of the next kernel take their places while the last blocks of this one still run, read
what no kernel of the step writes (weights), and wait here for everything before them. Elsewhere the call is nothing.

    load constants | wait_for_previous | read and write what the step computes

Nothing that another kernel of the step writes may be read or written before the wait. Only behind a kernel that lets
the next one start after its own wait (``let_next_start``) what came before that kernel may be, as it has ended.

A kernel lets the next one start before it waits itself, so several may be under way. That is safe: a kernel ends after
its own wait, so whoever waits for it waits for all before it; and the next one gets places only when every block of
this one has begun, so none of them can keep this one from ending. Reads after the wait use plain loads: the read-only
path (``ld.global.nc``) promises nothing about data that was written while the kernel was resident, and the assembler
moves such loads before the wait.

8B shape on an H200, steps of one token: 1.63 ms instead of 1.74 with kernels that let the next start after their wait.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.cuda import types

from cuda_kernels.emit import I8, I32, Emitter, emitted
from cuda_kernels.launch import IN_SIMULATOR, device_function

OVERLAP_CAPABILITY = (9, 0)

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
    def wait_for_all_before():
        """Nothing to wait for."""

    @device_function
    def let_next_start():
        """It does anyway."""

else:

    @emitted(types.void)
    def wait_for_previous(emit: Emitter) -> None:
        """Let the next kernel start, then return once all before this one have ended and their results can be read."""
        _emit_if_supported(emit, "griddepcontrol.launch_dependents; griddepcontrol.wait;")

    @emitted(types.void)
    def wait_for_all_before(emit: Emitter) -> None:
        """The second half of ``wait_for_previous`` alone, for kernels whose followers read something before they wait:
        what starts after ``let_next_start`` finds all that came before this kernel ended."""
        _emit_if_supported(emit, "griddepcontrol.wait;")

    @emitted(types.void)
    def let_next_start(emit: Emitter) -> None:
        _emit_if_supported(emit, "griddepcontrol.launch_dependents;")
