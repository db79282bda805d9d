"""Rows of weight matrices on their way through shared memory, for compute capability 9.0.

Every warp has a ring of its own: places that bulk copies fill and a barrier for each that says when they have. The warp
that used a place has it filled again itself, so that warps never wait for each other.

    | barriers of all warps | warp 0: place 0, place 1, .. | warp 1: place 0, .. | vectors, where they are kept here |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import Any

from gguf import GGMLQuantizationType
from numba.cuda import types

from cuda_kernels.emit import Emitter, Value, emitted
from cuda_kernels.vector_input import PARTIAL_BYTES
from cuda_kernels.weights import WeightGeometry
from kvs_core.units import align_up, ceil_div

BARRIER_BYTES = 8
ALIGNMENT = 128
_STEP_COLS = 1024  # a warp takes 32 units of a row in a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Rings(ABC):
    """Where the rings of one block of threads are, whatever a place holds.

    n_cols         weights of a row
    n_rows         rows of one matrix that a warp reduces together
    n_matrices     matrices that it takes these rows from
    n_warps        warps of a block
    n_places       places of a ring
    vector_bytes   room for what the rows are multiplied with
    """

    weight_type: GGMLQuantizationType
    n_cols: int
    n_rows: int
    n_matrices: int
    n_warps: int
    n_places: int
    vector_bytes: int = 0

    @property
    @abstractmethod
    def place_bytes(self) -> int:
        """Of one place."""

    @property
    def warp_bytes(self) -> int:
        return self.n_places * self.place_bytes

    @property
    def rings_offset(self) -> int:
        return align_up(self.n_warps * self.n_places * BARRIER_BYTES, ALIGNMENT)

    @property
    def vectors_offset(self) -> int:
        return align_up(self.rings_offset + self.n_warps * self.warp_bytes, ALIGNMENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRing(Rings):
    """Rings of pieces of rows.

    n_blocks       blocks of a multiprocessor
    place_steps    steps of 1024 weights of a row that a place has room for
    """

    n_blocks: int
    place_steps: int

    @property
    def step_bytes(self) -> int:
        """Bytes of a row in a step."""
        return WeightGeometry(weight_type=self.weight_type, n_rows=1, n_cols=_STEP_COLS).row_strides[0]

    @property
    def n_steps(self) -> int:
        """Steps of a row, the last of which may be short."""
        return ceil_div(self.n_cols, _STEP_COLS)

    @property
    def n_chunks(self) -> int:
        """Places that a row takes."""
        return ceil_div(self.n_steps, self.place_steps)

    @property
    def last_bytes(self) -> int:
        """Bytes of a row in the last of its places."""
        geometry = WeightGeometry(weight_type=self.weight_type, n_rows=1, n_cols=self.n_cols)
        return geometry.row_strides[0] - (self.n_chunks - 1) * self.row_bytes

    @property
    def holds_rows(self) -> bool:
        """Whether a place has room for whole rows, which then lie in it as they lie in the matrix."""
        return self.n_chunks == 1

    @property
    def row_bytes(self) -> int:
        """From one row to the next in a place."""
        geometry = WeightGeometry(weight_type=self.weight_type, n_rows=1, n_cols=self.n_cols)
        return geometry.row_strides[0] if self.holds_rows else self.place_steps * self.step_bytes

    @property
    def place_bytes(self) -> int:
        return self.n_matrices * self.n_rows * self.row_bytes

    @property
    def n_bytes(self) -> int:
        return self.vectors_offset + self.vector_bytes

    def build_bring(self) -> Any:
        """Intrinsic bring(place, barrier, address, .., stride, n_bytes, lane): lane 0 starts the copies of a place.

        address   of the first row, one for each matrix; rows are ``stride`` bytes apart
        n_bytes   of each row
        """
        u32, i32, i64 = types.uint32, types.int32, types.int64
        addresses = [i64] * self.n_matrices

        def bring(emit: Emitter, place: Value, barrier: Value, *rest: Value) -> None:
            firsts, (stride, n_bytes, lane) = rest[: self.n_matrices], rest[self.n_matrices :]
            n_copies = self.n_matrices * self.n_rows
            with emit.when(emit.less(lane, emit.word(1))):
                expect_bytes(emit, barrier, emit.multiply(n_bytes, n_copies))
                n_runs = 1 if self.holds_rows else self.n_rows
                run_bytes = emit.multiply(n_bytes, self.n_rows // n_runs)
                for i, address in enumerate(firsts):
                    row = address
                    for j in range(n_runs):
                        at = emit.add(place, (i * self.n_rows + j) * self.row_bytes)
                        copy_bulk(emit, at, row, run_bytes, barrier)
                        row = emit.add(row, stride)

        return emitted(types.void, u32, u32, *addresses, i64, i32, i32)(bring)


STREAMED_TYPES = (GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q5_K)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """How a block is made up; ``n_bytes`` is what it may take of the shared memory."""

    n_rows: int
    n_warps: int
    n_blocks: int
    place_steps: int
    n_bytes: int
    has_vectors: bool


_ONE = _Form(n_rows=2, n_warps=16, n_blocks=1, place_steps=5, n_bytes=220 * 1024, has_vectors=True)
"""One vector: one block takes a whole multiprocessor, so that few blocks prepare the vector."""
_SEVERAL = _Form(n_rows=4, n_warps=8, n_blocks=2, place_steps=2, n_bytes=112 * 1024, has_vectors=False)
"""More vectors: rows share what is read of them through the first-level cache."""


@cache
def product_ring(weight_type: GGMLQuantizationType, n_vectors: int, n_cols: int, n_rows: int) -> WeightRing | None:
    """For matrices of at least ``n_rows`` rows; None if they do not go through shared memory."""
    return _ring(weight_type, n_vectors, n_cols, n_rows=n_rows, n_matrices=1)


@cache
def gated_ring(weight_type: GGMLQuantizationType, n_vectors: int, n_cols: int, n_rows: int) -> WeightRing | None:
    """The same for a pair of matrices."""
    return _ring(weight_type, n_vectors, n_cols, n_rows=n_rows, n_matrices=2)


def _ring(
    weight_type: GGMLQuantizationType, n_vectors: int, n_cols: int, *, n_rows: int, n_matrices: int
) -> WeightRing | None:
    form = _ONE if n_vectors == 1 else _SEVERAL
    warp_rows = form.n_rows // n_matrices
    if weight_type not in STREAMED_TYPES or n_rows < warp_rows:
        return None
    n_steps = ceil_div(n_cols, _STEP_COLS)
    for most in range(min(form.place_steps, n_steps), 0, -1):
        ring = WeightRing(
            weight_type=weight_type,
            n_cols=n_cols,
            n_rows=warp_rows,
            n_matrices=n_matrices,
            n_warps=form.n_warps,
            n_blocks=form.n_blocks,
            n_places=2,
            place_steps=ceil_div(n_steps, ceil_div(n_steps, most)),
            vector_bytes=n_vectors * n_cols * 3 // 2 + PARTIAL_BYTES if form.has_vectors else 0,
        )
        if ring.n_bytes <= form.n_bytes:
            return ring
    return None


def expect_bytes(emit: Emitter, barrier: Value, n_bytes: Value) -> None:
    """Arrive at a barrier whose phase ends when so many bytes have been copied, too."""
    text = "{.reg .b64 s; mbarrier.arrive.expect_tx.shared::cta.b64 s,[$0],$1;}"
    emit.asm(text, "", "rr", [barrier, n_bytes], ordered=True)


def copy_bulk(emit: Emitter, shared: Value, address: Value, n_bytes: Value, barrier: Value) -> None:
    """Start a copy from global to shared memory; all three are multiples of 16."""
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0],[$1],$2,[$3];"
    emit.asm(text, "", "rlrr", [shared, address, n_bytes, barrier], ordered=True)


@emitted(types.void)
def fence_barriers(emit: Emitter) -> None:
    """Barriers that this thread made are there for copies, too."""
    emit.asm("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;", "", "", [], ordered=True)
