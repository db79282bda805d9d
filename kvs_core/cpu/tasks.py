"""``run_tasks``: how a CPU kernel shares its work among the threads of a team.

No kernel lives here; ``threads`` starts the threads. This replaces Numba's ``prange``: its pools make every thread
take part in every loop, so one that the system holds up, for example while the copy thread has its processor, stalls
the loop for a whole time slice. Measured on 2 busy processors, 576 x 576 weights times one token: 8 ms a call, here
16 us. Threads claim tasks one by one, and a loop waits only for tasks that were begun.

    @kernel_task
    def _scale_row(row, thread_idx, x, factor):      # one task; must not raise
        ...

    @cached_njit()
    def scale_kernel(team, x, factor):
        run_tasks(team, x.shape[0], _scale_row, (x, factor))

``team`` is ``ThreadTeam.control``. Tasks run in any order on any thread; ``thread_idx`` (below
``ThreadTeam.n_threads``) is for choosing scratch memory only, so that results never depend on it.
"""

# mypy: ignore-errors
# Jitted bodies and code generators work on values that Python's type system cannot describe.

from __future__ import annotations

import platform
from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.imputils import lower_constant
from numba.extending import intrinsic, models, register_model, typeof_impl

from kvs_core.cpu.kernel_cache import cached_njit
from kvs_core.cpu.vector_types import item_pointer

# Words of the control array, one cache line apart so that threads polling one do not slow writers of another.
#
#   caller                                          worker
#   write job, NEXT_TASK = 0                        wait until JOB_ID is neither 0 nor the last one joined
#   JOB_ID = new number                             N_INSIDE += 1
#   claim and run tasks until none is left          JOB_ID still the same? no: N_INSIDE -= 1, wait again
#   JOB_ID = 0                                      claim and run tasks until none is left
#   wait until N_INSIDE == 0                        N_INSIDE -= 1
#
# A worker inside has seen JOB_ID open after it was counted, so the caller, which closes first and counts then,
# waits for it; a worker that comes later turns back. All of these are sequentially consistent.
_LINE = 8
_JOB_ID = 0 * _LINE
_NEXT_TASK = 1 * _LINE
_N_INSIDE = 2 * _LINE
_N_ASLEEP = 3 * _LINE
_IS_TAKEN = 4 * _LINE  # 1 while a caller uses the team
IS_CLOSED = 5 * _LINE
_JOB = 6 * _LINE  # function, arguments, number of tasks, last job number
WAKE_FD = 7 * _LINE
_ERROR = 8 * _LINE
N_WORDS = 9 * _LINE

# How long an idle worker polls before it sleeps: 90 us on Zen 5. That covers the pauses between the kernels of a token
# (about 10 us); waking a sleeper costs about 25 us, and polling takes a processor away from the copy thread.
_POLLS_BEFORE_SLEEP = 4000
_POLLS_BEFORE_YIELD = 200

_I64 = ir.IntType(64)
_I8_POINTER = ir.IntType(8).as_pointer()
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64", "i686")


# ---------------------------------------------------------------------------------------------------------
# Task functions as constants of kernels. (Numba takes a jitted function as a constant too, but as an address of
# this process, which it cannot keep on disk.)


class _TaskFunctionType(types.Type):
    def __init__(self, dispatcher) -> None:
        self.dispatcher = dispatcher
        function = dispatcher.py_func
        super().__init__(name=f"TaskFunction({function.__module__}.{function.__qualname__})")


register_model(_TaskFunctionType)(models.OpaqueModel)


class TaskFunction:
    """A function that ``run_tasks`` can call; made by ``kernel_task``."""

    def __init__(self, function: Callable[..., None]) -> None:
        # Counting references of the arrays is atomic and made threads contend for one cache line; a task frees nothing.
        self._numba_type_ = _TaskFunctionType(njit(nogil=True, _nrt=False)(function))


def kernel_task(function: Callable[..., None]) -> TaskFunction:
    """Decorate a module-level function ``(task, thread_idx, *arguments)`` that does one task of a kernel."""
    return TaskFunction(function)


@typeof_impl.register(TaskFunction)
def _typeof_task_function(value, context):
    return value._numba_type_


@lower_constant(_TaskFunctionType)
def _constant_task_function(context, builder, numba_type, value):
    return context.get_dummy_value()


# ---------------------------------------------------------------------------------------------------------
# Instructions


@intrinsic
def _atomic_load(typingctx, array, index):
    def codegen(context, builder, sig, args):
        pointer = item_pointer(context, builder, sig.args[0], args[0], args[1], _I64)
        return builder.load_atomic(pointer, "seq_cst", align=8)

    return types.int64(array, types.int64), codegen


@intrinsic
def _atomic_store(typingctx, array, index, value):
    def codegen(context, builder, sig, args):
        pointer = item_pointer(context, builder, sig.args[0], args[0], args[1], _I64)
        builder.store_atomic(args[2], pointer, "seq_cst", align=8)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), codegen


@intrinsic
def _atomic_add(typingctx, array, index, value):
    """Add and return the value before."""

    def codegen(context, builder, sig, args):
        pointer = item_pointer(context, builder, sig.args[0], args[0], args[1], _I64)
        return builder.atomic_rmw("add", pointer, args[2], "seq_cst")

    return types.int64(array, types.int64, types.int64), codegen


@intrinsic
def _atomic_exchange(typingctx, array, index, value):
    """Write and return the value before."""

    def codegen(context, builder, sig, args):
        pointer = item_pointer(context, builder, sig.args[0], args[0], args[1], _I64)
        return builder.atomic_rmw("xchg", pointer, args[2], "seq_cst")

    return types.int64(array, types.int64, types.int64), codegen


@intrinsic
def _relax(typingctx):
    """Tell the processor that this is a polling loop."""

    def codegen(context, builder, sig, args):
        if _IS_X86:
            pause = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause"
            )
            builder.call(pause, [])
        return context.get_dummy_value()

    return types.void(), codegen


_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_read = types.ExternalFunction("read", types.intp(types.int32, types.voidptr, types.uintp))
_write = types.ExternalFunction("write", types.intp(types.int32, types.voidptr, types.uintp))


@intrinsic
def _prepare_job(typingctx, task_function, arguments):
    """Addresses of a function ``(arguments, task, thread) -> failed`` and of its arguments.

    The arguments lie in the frame of the function that calls this, and are valid until it returns.
    """
    if not (isinstance(task_function, _TaskFunctionType) and isinstance(arguments, types.BaseTuple)):
        return None

    def codegen(context, builder, sig, args):
        dispatcher = sig.args[0].dispatcher
        task_types = (types.int64, types.int64, *sig.args[1].types)
        dispatcher.compile(task_types)
        compiled = dispatcher.overloads[task_types]
        context.add_linking_libs([compiled.library])

        pack = cgutils.alloca_once_value(builder, args[1])
        function_type = ir.FunctionType(_I64, [_I8_POINTER, _I64, _I64])
        name = builder.module.get_unique_name("task." + compiled.fndesc.mangled_name)
        function = ir.Function(builder.module, function_type, name)
        function.linkage = "internal"
        inner = ir.IRBuilder(function.append_basic_block())
        packed, task, thread_idx = function.args
        values = cgutils.unpack_tuple(inner, inner.load(inner.bitcast(packed, pack.type)))
        status, _ = context.call_internal_no_propagate(
            inner, compiled.fndesc, compiled.signature, [task, thread_idx, *values]
        )
        inner.ret(inner.zext(status.is_error, _I64))

        addresses = [builder.ptrtoint(function, _I64), builder.ptrtoint(pack, _I64)]
        return context.make_tuple(builder, sig.return_type, addresses)

    return types.UniTuple(types.int64, 2)(task_function, arguments), codegen


@intrinsic
def _call_task(typingctx, function, arguments, task, thread_idx):
    def codegen(context, builder, sig, args):
        function_type = ir.FunctionType(_I64, [_I8_POINTER, _I64, _I64])
        function = builder.inttoptr(args[0], function_type.as_pointer())
        return builder.call(function, [builder.inttoptr(args[1], _I8_POINTER), args[2], args[3]])

    index = types.int64
    return index(index, index, index, index), codegen


# ---------------------------------------------------------------------------------------------------------
# Sharing tasks


@njit(nogil=True, inline="always")  # otherwise each kernel's tasks are compiled once more, inside a copy of this
def run_tasks(team, n_tasks, task_function, arguments):
    """Call ``task_function(task, thread_idx, *arguments)`` for every task below ``n_tasks``; inside kernels only.

    team            ThreadTeam.control
    task_function   made by ``kernel_task``; it must not raise
    arguments       a tuple of what kernels can take: arrays, numbers, block kinds; no vectors
    """
    function, packed = _prepare_job(task_function, arguments)
    if n_tasks <= 1 or _atomic_exchange(team, _IS_TAKEN, 1) != 0:
        failed = 0
        for task in range(n_tasks):
            failed |= _call_task(function, packed, task, 0)
        if failed:
            raise RuntimeError("a kernel task raised an error")
        return

    job_id = team[_JOB + 3] + 1
    team[_JOB] = function
    team[_JOB + 1] = packed
    team[_JOB + 2] = n_tasks
    team[_JOB + 3] = job_id
    _atomic_store(team, _NEXT_TASK, 0)
    _atomic_store(team, _JOB_ID, job_id)
    n_asleep = _atomic_load(team, _N_ASLEEP)
    if n_asleep > 0:
        _wake(team, min(n_asleep, n_tasks - 1))

    _claim_tasks(team, function, packed, n_tasks, 0)

    _atomic_store(team, _JOB_ID, 0)
    n_polls = 0
    while _atomic_load(team, _N_INSIDE) != 0:
        n_polls += 1
        _poll_politely(n_polls)
    failed = _atomic_exchange(team, _ERROR, 0)
    _atomic_store(team, _IS_TAKEN, 0)
    if failed:
        raise RuntimeError("a kernel task raised an error")


@njit(nogil=True)
def _claim_tasks(team, function, packed, n_tasks, thread_idx):
    task = _atomic_add(team, _NEXT_TASK, 1)
    while task < n_tasks:
        if _call_task(function, packed, task, thread_idx):
            _atomic_store(team, _ERROR, 1)
        task = _atomic_add(team, _NEXT_TASK, 1)


@njit(nogil=True)
def _poll_politely(n_polls):
    """Wait a moment; after a while, let whoever we are waiting for have this processor."""
    if n_polls < _POLLS_BEFORE_YIELD:
        _relax()
    else:
        _sched_yield()


@njit(nogil=True)
def _wake(team, n_workers):
    amount = np.empty(1, np.uint64)
    amount[0] = n_workers
    _write(np.int32(team[WAKE_FD]), amount.ctypes, 8)


@njit(nogil=True)
def _sleep(team):
    amount = np.empty(1, np.uint64)
    _atomic_add(team, _N_ASLEEP, 1)
    # A job opened before the line above may not have seen us asleep.
    if _atomic_load(team, _JOB_ID) == 0 and _atomic_load(team, IS_CLOSED) == 0:
        _read(np.int32(team[WAKE_FD]), amount.ctypes, 8)
    _atomic_add(team, _N_ASLEEP, -1)


@cached_njit()
def work(team, thread_idx):
    """Body of a worker thread."""
    last_job_id = 0
    n_polls = 0
    while _atomic_load(team, IS_CLOSED) == 0:
        job_id = _atomic_load(team, _JOB_ID)
        if job_id == 0 or job_id == last_job_id:
            n_polls += 1
            if n_polls < _POLLS_BEFORE_SLEEP:
                _relax()
            else:
                _sleep(team)
                n_polls = 0
            continue

        _atomic_add(team, _N_INSIDE, 1)
        if _atomic_load(team, _JOB_ID) == job_id:
            _claim_tasks(team, team[_JOB], team[_JOB + 1], team[_JOB + 2], thread_idx)
        _atomic_add(team, _N_INSIDE, -1)
        last_job_id = job_id
        n_polls = 0
