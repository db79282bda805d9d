"""Sixteen columns of a delta net's matrix in the registers of a warp, and one token's step of them. No kernels.

A lane holds four neighbouring columns (value elements) in rows (key elements) of its own::

    column  4 (lane % 4) + 0..3        row  4 (lane // 4) + 32 quad + 0..3        element  16 quad + 4 row + column

In memory a tile is 4 elements of each lane, lane after lane, then the next 4: loads of 16 bytes in one run. So the
state of a layer is float32 [n_head_v, head_dim / 16 tiles, head_dim / 8, 32 lanes, 4].
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.cuda import types

from cuda_kernels.emit import Emitter, Value, emitted, floats

LANE_COLUMNS = 4
TILE_COLUMNS = 4 * LANE_COLUMNS
ROW_LANES = 8
HEAD_DIM_STEP = 4 * ROW_LANES
"""Head sizes are multiples of this: lanes hold rows by fours."""
_ROW_LANE_MASKS = (4, 8, 16)


class DeltaTile:
    """Attributes that are intrinsics, for heads of ``head_dim`` elements:

    load(address) -> tile                address of the lane's first four elements; read in place
    store(address, tile)
    zeros() -> tile
    rows(vector) -> the lane's elements of a vector
    step(tile, key, next_key, query, v0 .. v3, kept, share) -> tile, then the rows of ``next_key``, then the query's
                                         product with the tile before, four columns
    multiply(tile, query) -> four columns

    ``key`` are rows; vectors are shared addresses of float32 [head_dim] plus 16 times the lane's number among those of
    its columns. Results of all lanes that hold a column are the same bits.
    """

    def __init__(self, head_dim: int) -> None:
        if head_dim % HEAD_DIM_STEP:
            raise ValueError(f"heads of {head_dim} elements; a multiple of {HEAD_DIM_STEP} needed")
        self.n_quads = head_dim // HEAD_DIM_STEP
        self.n_rows = 4 * self.n_quads
        self.n_elements = LANE_COLUMNS * self.n_rows
        self.n_bytes = 32 * 4 * self.n_elements
        tile, rows, columns = floats(self.n_elements), floats(self.n_rows), floats(LANE_COLUMNS)
        stepped = floats(self.n_elements + self.n_rows + LANE_COLUMNS)
        f32, u32, i64 = types.float32, types.uint32, types.int64
        self.load = emitted(tile, i64)(self._load)
        self.store = emitted(types.void, i64, tile)(self._store)
        self.zeros = emitted(tile)(lambda emit: [emit.float(0.0)] * self.n_elements)
        self.rows = emitted(rows, u32)(self._rows)
        self.step = emitted(stepped, tile, rows, u32, u32, *[f32] * (LANE_COLUMNS + 2))(self._step)
        self.multiply = emitted(columns, tile, u32)(self._multiply)

    def _load(self, emit: Emitter, address: Value) -> list[Value]:
        fours = [emit.load_recent_floats(address, 512 * i, 4) for i in range(self.n_elements // 4)]
        return [value for four in fours for value in four]

    def _store(self, emit: Emitter, address: Value, tile: list[Value]) -> None:
        for i in range(self.n_elements // 4):
            emit.store_words(address, 512 * i, [emit.as_word(value) for value in tile[4 * i : 4 * i + 4]])

    def _rows(self, emit: Emitter, vector: Value) -> list[Value]:
        fours = [emit.load_shared_floats(vector, 16 * ROW_LANES * quad, 4) for quad in range(self.n_quads)]
        return [value for four in fours for value in four]

    def _shares(self, emit: Emitter, tile: list[Value], rows: list[Value]) -> list[Value]:
        """The lane's part of a vector times each column; two chains a sum, so that additions overlap."""
        sums = []
        for column in range(LANE_COLUMNS):
            chains = []
            for chain in range(2):
                total = emit.float_multiply(rows[chain], tile[LANE_COLUMNS * chain + column])
                for row in range(chain + 2, len(rows), 2):
                    total = emit.fma(rows[row], tile[LANE_COLUMNS * row + column], total)
                chains.append(total)
            sums.append(emit.float_add(*chains))
        return sums

    @staticmethod
    def _over_lanes(emit: Emitter, sums: list[Value]) -> list[Value]:
        for mask in _ROW_LANE_MASKS:
            others = [emit.exchange(total, mask) for total in sums]
            sums = [emit.float_add(total, other) for total, other in zip(sums, others, strict=True)]
        return sums

    def _step(
        self, emit: Emitter, tile: list[Value], key: list[Value], next_key: Value, query: Value, *scalars: Value
    ) -> list[Value]:
        """The query is that of the token before: both products read the same tile.

        Its products fill the time in which the lanes exchange the key's sums, and the next key arrives meanwhile.
        """
        *values, kept, share = scalars
        q, ahead = self._rows(emit, query), self._rows(emit, next_key)
        held = self._over_lanes(emit, self._shares(emit, tile, key))
        outs = self._over_lanes(emit, self._shares(emit, tile, q))
        changes = [
            emit.float_multiply(share, emit.fma(emit.float_negate(kept), total, value))
            for total, value in zip(held, values, strict=True)
        ]
        stepped = [
            emit.fma(key[i // LANE_COLUMNS], changes[i % LANE_COLUMNS], emit.float_multiply(kept, element))
            for i, element in enumerate(tile)
        ]
        return [*stepped, *ahead, *outs]

    def _multiply(self, emit: Emitter, tile: list[Value], query: Value) -> list[Value]:
        return self._over_lanes(emit, self._shares(emit, tile, self._rows(emit, query)))


def tile_elements(head_dim: int) -> tuple[Any, Any]:
    """Row and column of every element of a head's tiles in the order of memory: two int arrays [head_dim ** 2]."""
    shape = (head_dim // TILE_COLUMNS, head_dim // ROW_LANES, 32, LANE_COLUMNS)
    tile, group, lane, word = np.indices(shape).reshape(4, -1)
    rows = 4 * (lane // 4) + HEAD_DIM_STEP * (group // 4) + group % 4
    return rows, TILE_COLUMNS * tile + LANE_COLUMNS * (lane % 4) + word
