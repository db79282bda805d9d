"""Small PTX instructions for kernels written in Numba, with plain fallbacks where the simulator can run the caller.

Everything that works on fragments (tuples of registers) is built where it is used, with ``emit.emitted``.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from cuda_kernels.emit import I32, Emitter, Value, emitted

FULL_WARP = 0xFFFFFFFF


@intrinsic
def shared_address(typing_context: Any, array: Any) -> Any:
    """Address of a shared array inside the shared window, as uint32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Value:
        pointer = context.make_array(signature.args[0])(context, builder, args[0]).data
        # the compiler's older dialect wants typed pointers, the newer one opaque pointers
        is_typed = not getattr(pointer.type, "is_opaque", True)
        shared = ir.PointerType(pointer.type.pointee, 3) if is_typed else ir.PointerType(addrspace=3)
        return builder.ptrtoint(builder.addrspacecast(pointer, shared), I32)

    return types.uint32(array), codegen


@emitted(types.int64, types.int64)
def load_address(emit: Emitter, address: Value) -> Value:
    """An int64 that this launch does not write."""
    return emit.asm("ld.global.nc.u64 $0,[$1];", "l", "l", [address])


@emitted(types.int32, types.int64)
def load_int(emit: Emitter, address: Value) -> Value:
    """An int32 that this launch does not write."""
    return emit.load_cached(address, 0, 1)[0]


@emitted(types.float32, types.int64)
def load_float(emit: Emitter, address: Value) -> Value:
    """A float32, read in program order."""
    return emit.asm("ld.global.f32 $0,[$1];", "f", "l", [address], ordered=True)


@emitted(types.float32, types.int64)
def load_float_past_l1(emit: Emitter, address: Value) -> Value:
    """A float32 that this kernel replaces: its neighbours, which other blocks replace, must not stay in L1."""
    return emit.asm("ld.global.cg.f32 $0,[$1];", "f", "l", [address], ordered=True)


@emitted(types.void, types.int64, types.float32)
def store_float(emit: Emitter, address: Value, value: Value) -> None:
    emit.asm("st.global.f32 [$0],$1;", "", "lf", [address, value], ordered=True)


@emitted(types.void, types.int64, types.float32)
def store_half(emit: Emitter, address: Value, value: Value) -> None:
    """Rounded to float16."""
    text = "{.reg .b16 h; cvt.rn.f16.f32 h,$1; st.global.b16 [$0],h;}"
    emit.asm(text, "", "lf", [address, value], ordered=True)


@emitted(types.void, types.int64, types.int32)
def store_byte(emit: Emitter, address: Value, value: Value) -> None:
    """The low byte."""
    emit.asm("{.reg .b16 h; cvt.u16.u32 h,$1; st.global.b8 [$0],h;}", "", "lr", [address, value], ordered=True)


@emitted(types.void, types.int64, types.float32, types.float32)
def store_two_floats(emit: Emitter, address: Value, first: Value, second: Value) -> None:
    emit.asm("st.global.v2.f32 [$0],{$1,$2};", "", "lff", [address, first, second], ordered=True)


@emitted(types.UniTuple(types.float32, 4), types.uint32)
def load_shared_four_floats(emit: Emitter, address: Value) -> list[Value]:
    return emit.load_shared_floats(address, 0, 4)


@emitted(types.float32, types.float32)
def exp2_approx(emit: Emitter, x: Value) -> Value:
    """2 to the power ``x`` within 2 units in the last place; minus infinity gives exactly 0."""
    return emit.exp2(x)


@emitted(types.float32, types.float32, types.float32, types.float32)
def fma(emit: Emitter, a: Value, b: Value, c: Value) -> Value:
    """a * b + c rounded once."""
    return emit.fma(a, b, c)


@emitted(types.float32, types.float32, types.float32)
def multiply(emit: Emitter, a: Value, b: Value) -> Value:
    """a * b rounded on its own: never contracted into a neighbouring addition."""
    return emit.float_multiply(a, b)


@emitted(types.float32, types.float32, types.float32)
def add(emit: Emitter, a: Value, b: Value) -> Value:
    """a + b rounded on its own: never contracted with a neighbouring multiplication."""
    return emit.float_add(a, b)


@emitted(types.uint32, types.float32, types.float32)
def pack_half2(emit: Emitter, low: Value, high: Value) -> Value:
    """Two float32 rounded to float16 in one word."""
    return emit.pack_half2(low, high)


@emitted(types.void, types.uint32, types.int64, types.int32)
def copy_16_async(emit: Emitter, shared: Value, address: Value, n_bytes: Value) -> None:
    """Start a copy of 16 bytes from global to shared memory; bytes from ``n_bytes`` (0 to 16) on arrive as zeros."""
    emit.copy_16_async(shared, address, (0, 0), n_bytes)


@emitted(types.void)
def commit_copies(emit: Emitter) -> None:
    """Close the group of copies started so far."""
    emit.asm("cp.async.commit_group;", "", "", [], ordered=True)


@emitted(types.void)
def wait_copies_but_one(emit: Emitter) -> None:
    """Wait until only the last committed group of this thread may still be under way."""
    emit.asm("cp.async.wait_group 1;", "", "", [], ordered=True)


@emitted(types.void)
def wait_all_copies(emit: Emitter) -> None:
    """Wait until every copy this thread started has arrived; a barrier makes them visible to the others."""
    emit.asm("cp.async.wait_all;", "", "", [], ordered=True)
