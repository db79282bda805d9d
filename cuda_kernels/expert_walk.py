"""How a warp goes through its tiles in the kernels of ``expert_stream``, and fills the places of its ring ahead.

A tile is a row tile and a column: a pair, or a token whose pair is that of the warp's slot. Columns of a row tile are
neighbours. A warp's tiles are ``steps`` apart, in both, and a column beyond the last is one of the next row tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numba import cuda
from numba.cuda import int32, int64, types, uint32

from cuda_kernels.emit import Emitter, Value, emitted
from cuda_kernels.expert_ring import ExpertRing
from cuda_kernels.intrinsics import FULL_WARP
from cuda_kernels.launch import device_function
from cuda_kernels.warpgroup import init_barrier
from cuda_kernels.weight_ring import BARRIER_BYTES, fence_barriers


@emitted(types.int32, types.uint32)
def load_shared_int(emit: Emitter, address: Value) -> Value:
    return emit.load_shared_words(address, 0, 1)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWalk:
    """Device functions.

    begin(start, warp, lane)            addresses of the warp's ring and of its barriers, which are made ready
    place_at(rings, place)              address of a place of these, and of its barrier
    next_place(place, parity)           the place after it, and what its barrier will say
    next_tile(tile, steps, n_columns)   the tile after it: row tile, column
    bring_next(place, coming, steps, n_columns, own_planes, experts, lane)
                                        fills a place with the tile ``coming`` if there is one; the tile after it
    experts     planes of the matrices, rows from one expert to the next, rows of one, row tiles, ids in shared memory
    own_planes  of the expert that the warp stays with, where it does
    """

    begin: Any
    place_at: Any
    next_place: Any
    next_tile: Any
    bring_next: Any

    @property
    def functions(self) -> tuple[Any, Any, Any, Any, Any]:
        return self.begin, self.place_at, self.next_place, self.next_tile, self.bring_next


def build_walk(ring: ExpertRing, *, stays: bool, ids_apart: int) -> ExpertWalk:
    """``stays``: a warp has one expert. ``ids_apart``: ids from one column to the next."""
    bring, expert_planes = ring.build_bring(), ring.build_expert_planes()
    n_places, n_rows_of_tile = ring.n_places, ring.n_rows
    place_bytes, warp_bytes, rings_offset = ring.place_bytes, ring.warp_bytes, ring.rings_offset

    @device_function
    def place_at(rings, place):
        own_ring, barriers = rings
        at = uint32(own_ring + uint32(place) * uint32(place_bytes))
        return at, uint32(barriers + uint32(place) * uint32(BARRIER_BYTES))

    @device_function
    def begin(start, warp, lane):
        own_ring = uint32(start + uint32(rings_offset) + uint32(warp) * uint32(warp_bytes))
        barriers = uint32(start + uint32(warp) * uint32(n_places * BARRIER_BYTES))
        if lane == 0:
            for place in range(n_places):
                init_barrier(uint32(barriers + uint32(place) * uint32(BARRIER_BYTES)), int32(1))
            fence_barriers()
        cuda.syncwarp(FULL_WARP)
        return own_ring, barriers

    @device_function
    def next_place(place, parity):
        place = int32(place + int32(1))
        if place == int32(n_places):
            place, parity = int32(0), int32(parity ^ int32(1))
        return place, parity

    @device_function
    def next_tile(tile, steps, n_columns):
        row_tile, column = int32(tile[0] + steps[0]), tile[1]
        if not stays:
            column = int32(column + steps[1])
            if column >= n_columns:
                row_tile, column = int32(row_tile + int32(1)), int32(column - n_columns)
        return row_tile, column

    @device_function
    def bring_next(place, coming, steps, n_columns, own_planes, experts, lane):
        planes, expert_rows, n_rows, n_row_tiles, ids_at = experts
        row_tile, column = coming
        if row_tile < n_row_tiles:
            row = int32(min(int32(row_tile * int32(n_rows_of_tile)), int32(n_rows - int32(n_rows_of_tile))))
            if stays:
                bring(place[0], place[1], own_planes, row, lane)
            else:
                expert = load_shared_int(uint32(ids_at + uint32(column) * uint32(4 * ids_apart)))
                bring(place[0], place[1], expert_planes(planes, int64(expert) * expert_rows), row, lane)
            row_tile, column = next_tile(coming, steps, n_columns)
        return row_tile, column

    return ExpertWalk(begin=begin, place_at=place_at, next_place=next_place, next_tile=next_tile, bring_next=bring_next)
