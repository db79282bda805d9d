"""Instructions of compute capability 9.0: products of a warpgroup (``wgmma``) and barriers in shared memory.

A warpgroup is four warps. ``wgmma`` multiplies 64 rows of A (registers or shared memory) by a tile of B in shared
memory, asynchronously: its accumulators are read after ``wait_products`` only. Tiles in shared memory are described by
a 64-bit descriptor and lie as ``PanelRows`` in ``wgmma_tiles`` puts them. No kernel lives here.
"""

from __future__ import annotations

from collections.abc import Sequence

from numba.cuda import types

from cuda_kernels.emit import I64, Emitter, Value, emitted

PANEL_BYTES = 128  # 64 float16: the width that the swizzle of a descriptor spans
ROW_GROUP_BYTES = 8 * PANEL_BYTES
WARPGROUP_THREADS = 128


def tile_descriptor(emit: Emitter, address: Value, panel_stride: int) -> Value:
    """Of a tile of 128-byte swizzled panels at a multiple of 1024 bytes; panels are ``panel_stride`` bytes apart.

    bits 0 to 13 address / 16, 16 to 29 distance of panels / 16 (read where rows run along the summed dimension),
    32 to 45 distance of groups of eight rows / 16, 62 and 63 swizzle (1: 128 bytes).
    """
    fixed = 1 << 62 | ROW_GROUP_BYTES // 16 << 32 | panel_stride // 16 << 16
    start = emit.bit_and(emit.shift_right(address, 4), 0x3FFF)
    return emit.builder.or_(emit.builder.zext(start, I64), I64(fixed))


def multiply_shared(emit: Emitter, n_cols: int, a: Value, b: Value, steps: Sequence[tuple[int, int]]) -> list[Value]:
    """Start ``A @ B^T`` into new accumulators: 64 x ``n_cols``, both tiles with rows along the summed dimension.

    ``steps``: bytes from the start of A and of B to every 16 summed elements.
    """
    n = n_cols // 2
    lines = ["{.reg .b64 a,b; wgmma.fence.sync.aligned;"]
    for i, (a_offset, b_offset) in enumerate(steps):
        lines.append(f"add.s64 a,${n},{a_offset // 16}; add.s64 b,${n + 1},{b_offset // 16};")
        lines.append(_product(n_cols, 0, "a", f"b,{int(i > 0)},1,1,0,0"))
    lines.append("wgmma.commit_group.sync.aligned;}")
    return list(emit.asm(" ".join(lines), "f" * n, "ll", [a, b], ordered=True))


def multiply_registers(
    emit: Emitter, n_cols: int, sums: Sequence[Value], a: Sequence[Value], b: Value, step_bytes: int
) -> list[Value]:
    """Start ``sums + A @ B``; ``a`` holds four words for every 16 summed elements, B has rows of ``n_cols``."""
    n = n_cols // 2
    first_a, b_at = 2 * n, 2 * n + len(a)
    lines = ["{.reg .b64 b; wgmma.fence.sync.aligned;"]
    for i in range(len(a) // 4):
        registers = ",".join(f"${first_a + 4 * i + j}" for j in range(4))
        lines.append(f"add.s64 b,${b_at},{i * step_bytes // 16};")
        lines.append(_product(n_cols, 0, f"{{{registers}}}", "b,1,1,1,1"))
    lines.append("wgmma.commit_group.sync.aligned;}")
    operands = [*(str(i) for i in range(n)), *"r" * len(a), "l"]
    return list(emit.asm(" ".join(lines), "f" * n, operands, [*sums, *a, b], ordered=True))


def wait_products(emit: Emitter, values: Sequence[Value], n_pending: int) -> list[Value]:
    """Accumulators that are ready once at most ``n_pending`` newer groups of products are under way."""
    n = len(values)
    text = f"wgmma.wait_group.sync.aligned {n_pending};"
    return list(emit.asm(text, "f" * n, [str(i) for i in range(n)], list(values), ordered=True))


def _product(n_cols: int, first: int, a: str, rest: str) -> str:
    accumulators = ",".join(f"${first + i}" for i in range(n_cols // 2))
    return f"wgmma.mma_async.sync.aligned.m64n{n_cols}k16.f32.f16.f16 {{{accumulators}}},{a},{rest};"


@emitted(types.void, types.uint32, types.int32)
def init_barrier(emit: Emitter, address: Value, count: Value) -> None:
    """A barrier in shared memory (8 bytes) whose phase ends with ``count`` arrivals."""
    emit.asm("mbarrier.init.shared::cta.b64 [$0],$1;", "", "rr", [address, count], ordered=True)


@emitted(types.void, types.uint32, types.int32)
def arrive_if(emit: Emitter, address: Value, flag: Value) -> None:
    """Count one arrival where ``flag`` is not 0."""
    text = "{.reg .pred p; .reg .b64 s; setp.ne.s32 p,$1,0; @p mbarrier.arrive.shared::cta.b64 s,[$0];}"
    emit.asm(text, "", "rr", [address, flag], ordered=True)


@emitted(types.void, types.uint32, types.uint32)
def wait_barrier(emit: Emitter, address: Value, parity: Value) -> None:
    """Wait until the phase of this parity has ended; phases count from 0, and the one before the first has ended."""
    text = "{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p,[$0],$1; @p bra done; bra again; done:}"
    emit.asm(text, "", "rr", [address, parity], ordered=True)


@emitted(types.void)
def fence_tensor_reads(emit: Emitter) -> None:
    """What this thread wrote, or saw written, in shared memory comes before products that it starts or releases."""
    emit.asm("fence.proxy.async.shared::cta;", "", "", [], ordered=True)


@emitted(types.void, types.int32, types.int32)
def meet(emit: Emitter, barrier: Value, n_threads: Value) -> None:
    """Wait at a numbered barrier until ``n_threads`` threads have met there or announced themselves."""
    emit.asm("bar.sync $0,$1;", "", "rr", [barrier, n_threads], ordered=True)


@emitted(types.void, types.int32, types.int32)
def announce(emit: Emitter, barrier: Value, n_threads: Value) -> None:
    """Count as met at a numbered barrier, without waiting."""
    emit.asm("bar.arrive $0,$1;", "", "rr", [barrier, n_threads], ordered=True)


@emitted(types.int32, types.int32)
def warp_uniform(emit: Emitter, value: Value) -> Value:
    """The value of lane 0: tells the compiler that the whole warp agrees."""
    return emit.asm("shfl.sync.idx.b32 $0,$1,0,31,0xffffffff;", "r", "r", [value], ordered=True)


def limit_registers(n_registers: int, *, more: bool) -> object:
    """Intrinsic: this warpgroup gives registers back, or takes some that others gave back."""
    direction = "inc" if more else "dec"
    text = f"setmaxnreg.{direction}.sync.aligned.u32 {n_registers};"
    return emitted(types.void)(lambda emit: emit.asm(text, "", "", [], ordered=True))
