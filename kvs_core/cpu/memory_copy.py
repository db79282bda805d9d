"""A copy in memory shared among the threads of a team. Who copies what and when is in the copy engines."""

# mypy: ignore-errors
# Jitted bodies and code generators work on values that Python's type system cannot describe.

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvs_core.cpu.kernel_cache import cached_njit
from kvs_core.cpu.tasks import kernel_task, run_tasks
from kvs_core.cpu.threads import ThreadTeam

_PIECE_BYTES = 128 << 10  # large beside the claiming of a task (about 1 us), small beside a span of megabytes


def copy_memory(team: ThreadTeam, *, target: int, source: int, n_bytes: int) -> None:
    """Copy ``n_bytes`` from one address to another; the ranges may not overlap, and nothing is checked."""
    _copy_memory_kernel(team.control, target, source, n_bytes)


@intrinsic
def _copy(typingctx, target, source, n_bytes):
    def codegen(context, builder, sig, args):
        pointer = ir.IntType(8).as_pointer()
        target, source = (builder.inttoptr(address, pointer) for address in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@kernel_task
def _copy_piece(task, thread_idx, target, source, n_bytes):
    begin = task * _PIECE_BYTES
    _copy(target + begin, source + begin, min(_PIECE_BYTES, n_bytes - begin))


@cached_njit()
def _copy_memory_kernel(team, target, source, n_bytes):
    run_tasks(team, (n_bytes + _PIECE_BYTES - 1) // _PIECE_BYTES, _copy_piece, (target, source, n_bytes))
