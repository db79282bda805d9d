"""Rows of experts on their way through shared memory, for compute capability 9.0: rings as in ``weight_ring``.

A place holds some neighbouring rows of one or two matrices of one expert, whole, plane after plane. Rows of a plane
follow each other without a gap, so a place takes one copy a plane; where a row of a plane is no multiple of 16 bytes,
the copy begins and ends at multiples outside.

    | barriers of all warps | warp 0: place 0, place 1, .. | warp 1: place 0, .. | vectors | ids, weights, sums |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gguf import GGMLQuantizationType
from numba.cuda import types

from cuda_kernels.emit import Emitter, Value, emitted, floats, words
from cuda_kernels.row_units import RowUnits, takes_float_activations
from cuda_kernels.unit_formats import Unit
from cuda_kernels.weight_ring import Rings, copy_bulk, expect_bytes
from cuda_kernels.weight_units import UNIT_FORMATS
from cuda_kernels.weights import MAX_PLANES, WeightGeometry
from kvs_core.units import align_up, ceil_div

COPY_BYTES = 16
"""What a bulk copy begins and ends at a multiple of."""
MAX_UNROLLED = 4
"""Steps of a row that are unrolled together. One H200, 26B-A4B, one token: down 5.9 instead of 6.3 us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRing(Rings):
    """Rings of whole rows of one expert each.

    n_words        words behind the vectors
    least_bytes    of shared memory for the whole block
    """

    n_words: int
    least_bytes: int = 0

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes of a row in each plane."""
        return WeightGeometry(weight_type=self.weight_type, n_rows=1, n_cols=self.n_cols).row_strides

    @property
    def elements(self) -> int:
        """Weights of a unit."""
        return UNIT_FORMATS[self.weight_type].elements

    @property
    def run_bytes(self) -> tuple[int, ...]:
        """Room for the rows of one matrix in each plane."""
        slack = [0 if stride % COPY_BYTES == 0 else COPY_BYTES - 1 for stride in self.strides]
        return tuple(
            align_up(self.n_rows * stride + extra, COPY_BYTES)
            for stride, extra in zip(self.strides, slack, strict=True)
        )

    @property
    def place_bytes(self) -> int:
        return self.n_matrices * sum(self.run_bytes)

    @property
    def words_offset(self) -> int:
        return align_up(self.vectors_offset + self.vector_bytes, COPY_BYTES)

    @property
    def n_bytes(self) -> int:
        return max(self.words_offset + 4 * self.n_words, self.least_bytes)

    def _runs(self) -> Iterator[tuple[int, int, int, int]]:
        """Offset in a place, number among the planes of all matrices, plane and matrix."""
        at = 0
        for matrix in range(self.n_matrices):
            for plane, n_bytes in enumerate(self.run_bytes):
                yield at, matrix * MAX_PLANES + plane, plane, matrix
                at += n_bytes

    def _planes(self) -> Any:
        return types.UniTuple(types.int64, self.n_matrices * MAX_PLANES)

    def build_expert_planes(self) -> Any:
        """Intrinsic expert_planes(planes, first): addresses of row ``first`` in the planes of every matrix."""
        return emitted(self._planes(), self._planes(), types.int64)(self._expert_planes)

    def _expert_planes(self, emit: Emitter, planes: list[Value], first: Value) -> list[Value]:
        found = list(planes)
        for _, number, plane, _ in self._runs():
            found[number] = emit.add(planes[number], emit.multiply(first, self.strides[plane]))
        return found

    def build_bring(self) -> Any:
        """Intrinsic bring(place, barrier, planes, row, lane): lane 0 starts the copies of a place.

        planes   of an expert, ``MAX_PLANES`` of each matrix
        row      the first
        """
        u32, i32 = types.uint32, types.int32
        return emitted(types.void, u32, u32, self._planes(), i32, i32)(self._bring)

    def _bring(self, emit: Emitter, place: Value, barrier: Value, planes: list[Value], row: Value, lane: Value) -> None:
        with emit.when(emit.less(lane, emit.word(1))):
            copies, total = [], emit.word(0)
            for at, number, plane, _ in self._runs():
                stride = self.strides[plane]
                address = emit.add(planes[number], emit.widen(emit.multiply(row, stride)))
                n_bytes = emit.word(self.n_rows * stride)
                if stride % COPY_BYTES:
                    before = emit.bit_and(emit.narrow(address), COPY_BYTES - 1)
                    address = emit.subtract(address, emit.widen(before))
                    n_bytes = emit.bit_and(emit.add(emit.add(before, n_bytes), COPY_BYTES - 1), -COPY_BYTES)
                copies.append((at, address, n_bytes))
                total = emit.add(total, n_bytes)
            expect_bytes(emit, barrier, total)
            for at, address, n_bytes in copies:
                copy_bulk(emit, emit.add(place, at), address, n_bytes, barrier)

    def build_locate(self) -> Any:
        """Intrinsic locate(place, planes, row): address of every row of a place in each of its planes."""
        n_found = self.n_matrices * self.n_rows * len(self.strides)
        return emitted(words(n_found), types.uint32, self._planes(), types.int32)(self._locate)

    def _locate(self, emit: Emitter, place: Value, planes: list[Value], row: Value) -> list[Value]:
        found: dict[tuple[int, int, int], Value] = {}
        for at, number, plane, matrix in self._runs():
            stride = self.strides[plane]
            first = emit.add(place, at)
            if stride % COPY_BYTES:
                address = emit.add(emit.narrow(planes[number]), emit.multiply(row, stride))
                first = emit.add(first, emit.bit_and(address, COPY_BYTES - 1))
            for i in range(self.n_rows):
                found[matrix, i, plane] = emit.add(first, i * stride)
        return [found[key] for key in sorted(found)]

    @property
    def n_units(self) -> int:
        """Units of a row."""
        return self.n_cols // self.elements

    @property
    def n_steps(self) -> int:
        """Steps of a row, in each of which a lane has one unit; the last may be short."""
        return ceil_div(self.n_units, 32)

    @property
    def n_unrolled(self) -> int:
        """Steps that ``add`` takes at once: all of a short row; a divisor of their number in a long one."""
        return max(n for n in range(1, MAX_UNROLLED + 1) if self.n_steps % n == 0)

    def build_add(self, units: RowUnits, *, has_shared_vectors: bool) -> Any:
        """Intrinsic add(sums, rows, step, lane, vector, scales, n_cols): sums plus the products of some steps.

        These are ``n_unrolled`` from ``step`` on; ``rows`` as ``locate`` found them, in the order of ``units``.
        """
        at, i32 = types.uint32 if has_shared_vectors else types.int64, types.int32
        n_found = self.n_matrices * self.n_rows * len(self.strides)

        def add(emit: Emitter, sums: list[Value], rows: list[Value], step: Value, *rest: Value) -> list[Value]:
            for i in range(self.n_unrolled):
                sums = self._add_step(emit, units, sums, rows, emit.add(step, i), *rest)
            return sums

        sums = floats(units.n_sums)
        return emitted(sums, sums, words(n_found), i32, i32, at, at, i32)(add)

    def _add_step(
        self, emit: Emitter, units: RowUnits, sums: list[Value], rows: list[Value], step: Value, *rest: Value
    ) -> list[Value]:
        """Lanes without a unit multiply one of the first step and drop the products."""
        lane, *vector = rest
        n_planes = len(self.strides)
        is_there = emit.less(emit.add(emit.shift_left(step, 5), lane), emit.word(self.n_units))
        own_step = emit.select(is_there, step, emit.word(0))
        own_lane = lane if self.n_units >= 32 else emit.select(is_there, lane, emit.word(0))
        unit, loaded = Unit.of(emit, own_step, own_lane), []
        for i in range(units.n_rows):
            loaded += UNIT_FORMATS[self.weight_type].load(emit, rows[i * n_planes : (i + 1) * n_planes], unit)
        added = units.emit_add(emit, sums, loaded, own_step, own_lane, *vector)
        return [emit.select(is_there, new, old) for new, old in zip(added, sums, strict=True)]


def can_be_ringed(weight_type: GGMLQuantizationType) -> bool:
    """Whether a lane's unit is multiplied with neighbouring columns, which is how vectors lie in shared memory."""
    if takes_float_activations(weight_type):
        return False
    unit_format = UNIT_FORMATS[weight_type]
    return unit_format.n_groups == (2 if unit_format.is_block else 1)
