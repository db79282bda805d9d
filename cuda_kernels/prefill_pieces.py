"""How prefill attention fills shared memory with queries and row limits."""

from __future__ import annotations

from numba.cuda import types

from cuda_kernels.emit import Emitter, Value, emitted


@emitted(types.UniTuple(types.uint32, 4), types.int64)
def load_query_piece(emit: Emitter, address: Value) -> list[Value]:
    """8 float32 of a query rounded to float16."""
    values = emit.load_floats(address, 0, 4) + emit.load_floats(address, 16, 4)
    return [emit.pack_half2(values[i], values[i + 1]) for i in range(0, 8, 2)]


@emitted(types.void, types.uint32, types.UniTuple(types.uint32, 4))
def store_piece(emit: Emitter, address: Value, piece: list[Value]) -> None:
    emit.store_shared_words(address, 0, piece)


@emitted(types.void, types.uint32, types.int32)
def store_int(emit: Emitter, address: Value, value: Value) -> None:
    emit.store_shared_words(address, 0, [value])
