"""Eight columns of a delta net's matrix in the registers of a warp, and one token's step of them. No kernels.

A lane holds two neighbouring columns (value elements) in rows (key elements) of its own::

    column   2 (lane % 4), + 1          row   4 (lane // 4) + 32 quad + 0..3          element  8 quad + 2 row + column

In memory a tile is 4 elements of each lane, lane after lane, then the next 4: loads of 16 bytes in one run. So the
state of a layer is float32 [n_head_v, head_dim / 8 tiles, head_dim / 16, 32 lanes, 4].
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.cuda import types

from cuda_kernels.emit import Emitter, Value, emitted, floats

TILE_COLUMNS = 8
ROW_LANES = 8
LANE_COLUMNS = 2
HEAD_DIM_STEP = 4 * ROW_LANES
"""Head sizes are multiples of this: lanes hold rows by fours."""
_ROW_LANE_MASKS = (4, 8, 16)


class DeltaTile:
    """Attributes that are intrinsics, for heads of ``head_dim`` elements:

    load(address) -> tile                address of the lane's first four elements; read in place
    store(address, tile)
    zeros() -> tile
    step(tile, key, query, v0, v1, kept, share) -> tile, then the query's product with the tile before, two columns
    multiply(tile, query) -> two columns

    ``key`` and ``query`` are shared addresses of float32 [head_dim] plus 16 times the lane's number among those of its
    columns; results of all lanes that hold a column are the same bits.
    """

    def __init__(self, head_dim: int) -> None:
        if head_dim % HEAD_DIM_STEP:
            raise ValueError(f"heads of {head_dim} elements; a multiple of {HEAD_DIM_STEP} needed")
        self.n_quads = head_dim // HEAD_DIM_STEP
        self.n_elements = 4 * LANE_COLUMNS * self.n_quads
        self.n_bytes = 32 * 4 * self.n_elements
        tile, f32, u32, i64 = floats(self.n_elements), types.float32, types.uint32, types.int64
        self.load = emitted(tile, i64)(self._load)
        self.store = emitted(types.void, i64, tile)(self._store)
        self.zeros = emitted(tile)(lambda emit: [emit.float(0.0)] * self.n_elements)
        self.step = emitted(floats(self.n_elements + LANE_COLUMNS), tile, u32, u32, f32, f32, f32, f32)(self._step)
        self.multiply = emitted(floats(LANE_COLUMNS), tile, u32)(self._multiply)

    def _load(self, emit: Emitter, address: Value) -> list[Value]:
        fours = [emit.load_recent_floats(address, 512 * i, 4) for i in range(self.n_elements // 4)]
        return [value for four in fours for value in four]

    def _store(self, emit: Emitter, address: Value, tile: list[Value]) -> None:
        for i in range(self.n_elements // 4):
            emit.store_words(address, 512 * i, [emit.as_word(value) for value in tile[4 * i : 4 * i + 4]])

    def _rows(self, emit: Emitter, address: Value) -> list[Value]:
        """The lane's elements of a vector in shared memory."""
        return [
            value
            for quad in range(self.n_quads)
            for value in emit.load_shared_floats(address, 16 * ROW_LANES * quad, 4)
        ]

    def _products(self, emit: Emitter, tile: list[Value], vectors: list[list[Value]]) -> list[Value]:
        """Each vector times each column, summed over the lanes; two chains a sum, so that additions overlap."""
        sums = []
        for vector in vectors:
            for column in range(LANE_COLUMNS):
                chains = []
                for chain in range(2):
                    rows = range(chain, len(vector), 2)
                    total = emit.float_multiply(vector[rows[0]], tile[2 * rows[0] + column])
                    for row in rows[1:]:
                        total = emit.fma(vector[row], tile[2 * row + column], total)
                    chains.append(total)
                sums.append(emit.float_add(*chains))
        for mask in _ROW_LANE_MASKS:
            others = [emit.exchange(total, mask) for total in sums]
            sums = [emit.float_add(total, other) for total, other in zip(sums, others, strict=True)]
        return sums

    def _step(self, emit: Emitter, tile: list[Value], key: Value, query: Value, *scalars: Value) -> list[Value]:
        """The query is that of the token before: both products read the same tile, and their sums share the waiting."""
        *values, kept, share = scalars
        k, q = self._rows(emit, key), self._rows(emit, query)
        *held, out_0, out_1 = self._products(emit, tile, [k, q])
        changes = [
            emit.float_multiply(share, emit.fma(emit.float_negate(kept), total, value))
            for total, value in zip(held, values, strict=True)
        ]
        stepped = [
            emit.fma(k[i // LANE_COLUMNS], changes[i % LANE_COLUMNS], emit.float_multiply(kept, element))
            for i, element in enumerate(tile)
        ]
        return [*stepped, out_0, out_1]

    def _multiply(self, emit: Emitter, tile: list[Value], query: Value) -> list[Value]:
        return self._products(emit, tile, [self._rows(emit, query)])


def tile_elements(head_dim: int) -> tuple[Any, Any]:
    """Row and column of every element of a head's tiles in the order of memory: two int arrays [head_dim ** 2]."""
    shape = (head_dim // TILE_COLUMNS, head_dim // 16, 32, 4)
    tile, group, lane, word = np.indices(shape).reshape(4, -1)
    element = 4 * group + word
    quad, row, column = element // 8, element % 8 // 2, element % 2
    return 4 * (lane // 4) + HEAD_DIM_STEP * quad + row, TILE_COLUMNS * tile + 2 * (lane % 4) + column
