"""Experts chosen by one warp, and rows of experts on their way through shared memory, carried out by numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")

from gguf import GGMLQuantizationType as Q

from cuda_kernels.expert_choice import ExpertChoice
from cuda_kernels.expert_ring import ExpertRing, can_be_ringed
from cuda_kernels.expert_stream import GATED_BYTES, SUM_BYTES, gated_expert_ring, sum_expert_ring
from cuda_kernels.launch import SHARED_LIMIT_90
from cuda_kernels.row_units import RowUnits
from cuda_kernels.unit_formats import Unit
from cuda_kernels.weight_units import UNIT_FORMATS
from cuda_kernels.weights import FAST_TYPES, MAX_PLANES, WeightGeometry
from scripts.cuda_checks.weights import random_blocks
from tests.cuda.host_layout import laid_out_on_host
from tests.cuda.numpy_emitter import LANES, NumpyEmitter

LANE_WORDS = LANES.astype(np.uint32)
RESERVED = 1024  # bytes of shared memory that every block costs beside its own
STREAMED = [weight_type for weight_type in FAST_TYPES if can_be_ringed(weight_type)]


@pytest.mark.parametrize(("n_expert", "n_used"), [(6, 3), (32, 4), (128, 8), (160, 6), (512, 10)])
def test_experts_are_taken_by_their_logits_the_lower_first_among_equals(n_expert: int, n_used: int) -> None:
    rng = np.random.default_rng(n_expert)
    logits = np.round(rng.standard_normal(n_expert) * 4).astype(np.float32) / np.float32(4)
    logits[:5] = (np.nan, -np.inf, -0.0, 0.0, -np.nan)
    scores = np.maximum(np.nan_to_num(logits, nan=-np.inf), np.finfo(np.float32).min)
    wanted = np.argsort(-scores, kind="stable")[:n_used]
    emit, choice = NumpyEmitter(logits.view(np.uint8)), ExpertChoice(n_expert, n_used)
    chosen = choice._take(emit, choice._read(emit, np.zeros(32, np.int64), LANE_WORDS), LANE_WORDS)
    np.testing.assert_array_equal(chosen[:n_used], wanted)


class CopyingEmitter(NumpyEmitter):
    """Bulk copies arrive at once; a barrier counts the bytes it expects and those that came."""

    def __init__(self, memory: np.ndarray, shared: np.ndarray) -> None:
        super().__init__(memory, shared)
        self.expected = self.copied = 0

    def asm(self, text: str, results: str, operands: Any, values: Any, **_: Any) -> None:
        assert self._active.tolist() == [True] + [False] * 31
        numbers = [int(value[0]) for value in values]
        if "expect_tx" in text:
            self.expected += numbers[1]
            return
        assert text.startswith("cp.async.bulk")
        place, address, n_bytes = numbers[:3]
        assert place % 16 == address % 16 == n_bytes % 16 == 0
        assert n_bytes > 0
        assert address + n_bytes <= self.memory.size
        self.shared[place : place + n_bytes] = self.memory[address : address + n_bytes]
        self.copied += n_bytes


@pytest.mark.parametrize("weight_type", STREAMED, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("n_matrices", "n_rows"), [(2, 1), (1, 4)])
def test_units_in_a_place_are_those_of_the_matrix(weight_type: Q, n_matrices: int, n_rows: int) -> None:
    n_cols = 768 if weight_type.name.endswith("_K") or weight_type is Q.IQ4_XS else 608
    geometry = WeightGeometry(weight_type=weight_type, n_rows=13, n_cols=n_cols)
    rng = np.random.default_rng(1)
    matrices = [laid_out_on_host(geometry, random_blocks(geometry, rng)) for _ in range(n_matrices)]
    assert matrices[0].size % 16 == 0
    stride = matrices[0].size + -matrices[0].size % 256
    memory = np.zeros(n_matrices * stride, np.uint8)
    planes = []
    for i, matrix in enumerate(matrices):
        memory[i * stride : i * stride + matrix.size] = matrix
        planes += [np.full(32, base, np.int64) for base in geometry.plane_arguments(i * stride)[0]]
    ring = ExpertRing(
        weight_type=weight_type, n_cols=n_cols, n_rows=n_rows, n_matrices=n_matrices, n_warps=2, n_places=2,
        vector_bytes=0, n_words=4,
    )  # fmt: skip
    emit = CopyingEmitter(memory, np.full(ring.n_bytes, 0xEE, np.uint8))
    place, row, expert = (
        emit.word(ring.rings_offset + ring.place_bytes),
        emit.word(8 - n_rows),
        np.full(32, 5, np.int64),
    )
    own_planes = ring._expert_planes(emit, planes, expert)
    ring._bring(emit, place, emit.word(0), own_planes, row, LANE_WORDS)
    assert emit.copied == emit.expected <= ring.place_bytes
    assert (emit.shared[ring.rings_offset + 2 * ring.place_bytes :] == 0xEE).all()
    assert (emit.shared[: ring.rings_offset + ring.place_bytes] == 0xEE).all()

    rows, n_planes = ring._locate(emit, place, own_planes, row), len(geometry.fields)
    units = n_cols // UNIT_FORMATS[weight_type].elements
    number = np.minimum(LANES, units - 1).astype(np.uint32)
    unit = Unit.of(emit, emit.word(0), number)
    for i in range(n_matrices * n_rows):
        first = i // n_rows * MAX_PLANES
        source = expert + row + i % n_rows
        in_memory = [planes[first + p] + source * geometry.row_strides[p] for p in range(n_planes)]
        load = UNIT_FORMATS[weight_type].load
        found, wanted = load(emit, rows[i * n_planes : (i + 1) * n_planes], unit), load(emit, in_memory, unit)
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("weight_type", [Q.Q4_K, Q.Q8_0, Q.MXFP4], ids=lambda kind: kind.name)
@pytest.mark.parametrize(("n_steps", "n_unrolled"), [(1, 1), (3, 3), (5, 1), (8, 4)])
def test_steps_that_are_unrolled_add_up_as_one_by_one(weight_type: Q, n_steps: int, n_unrolled: int) -> None:
    """The bits of one step after the other by the lanes that have a unit; the others keep what they have."""
    n_units = 32 * n_steps - 16
    n_cols = n_units * UNIT_FORMATS[weight_type].elements
    geometry = WeightGeometry(weight_type=weight_type, n_rows=2, n_cols=n_cols)
    rng = np.random.default_rng(n_cols)
    matrix = laid_out_on_host(geometry, random_blocks(geometry, rng))
    vector_at = matrix.size + -matrix.size % 256
    quants, scales = rng.integers(-127, 128, n_cols).astype(np.int8), rng.random(n_cols // 8).astype(np.float32)
    memory = np.concatenate(
        [matrix, np.zeros(vector_at - matrix.size, np.uint8), quants.view(np.uint8), scales.view(np.uint8)]
    )
    emit = NumpyEmitter(memory)
    ring = ExpertRing(
        weight_type=weight_type, n_cols=n_cols, n_rows=2, n_matrices=1, n_warps=2, n_places=2, vector_bytes=0, n_words=4
    )
    units = RowUnits(weight_type, 2, 1)
    rows = [
        np.full(32, offset + row * stride, np.int64)
        for row in range(2)
        for offset, stride in zip(geometry.plane_offsets, geometry.row_strides, strict=True)
    ]
    places = (np.full(32, vector_at, np.int64), np.full(32, vector_at + n_cols, np.int64), emit.word(n_cols))
    assert ring.n_unrolled == n_unrolled

    sums = expected = [emit.float(0.0)] * 2
    for step in range(ring.n_steps):
        sums = ring._add_step(emit, units, sums, rows, emit.word(step), LANE_WORDS, *places)
        number = np.minimum(32 * step + LANES, ring.n_units - 1).astype(np.uint32)
        at, lane = number // np.uint32(32), number % np.uint32(32)
        n_planes, load, unit = len(geometry.fields), UNIT_FORMATS[weight_type].load, Unit.of(emit, at, lane)
        words = [word for i in range(2) for word in load(emit, rows[i * n_planes : (i + 1) * n_planes], unit)]
        added = units.emit_add(emit, expected, words, at, lane, *places)
        has_unit = 32 * step + LANES < ring.n_units
        expected = [np.where(has_unit, new, old) for new, old in zip(added, expected, strict=True)]
    np.testing.assert_array_equal(sums, expected)


@pytest.mark.parametrize("weight_type", STREAMED, ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("n_embd", "n_ff", "n_used"), [(2816, 768, 8), (2048, 768, 10), (4096, 1536, 6), (768, 256, 3)]
)
def test_a_block_of_each_kernel_fits_a_multiprocessor(weight_type: Q, n_embd: int, n_ff: int, n_used: int) -> None:
    gated = gated_expert_ring(weight_type, n_embd, n_ff, 1, n_used)
    if weight_type is Q.Q8_0 and n_embd == 4096:
        assert gated is None  # two places of two rows do not fit even eight warps
        return
    assert gated is not None
    assert gated.vector_bytes >= n_embd + n_embd // 16 * 8
    summed = sum_expert_ring(weight_type, n_ff, n_embd, n_used, True)
    assert summed is not None
    assert summed.vector_bytes >= n_used * (n_ff + n_ff // 16 * 8)
    assert summed.n_warps % n_used == 0
    assert gated.n_bytes + summed.n_bytes + 2 * RESERVED <= SHARED_LIMIT_90 + RESERVED
    assert gated.n_places >= 2 <= summed.n_places
    several = gated_expert_ring(weight_type, n_embd, n_ff, 8, n_used)
    assert several is not None
    assert several.n_bytes <= SHARED_LIMIT_90


def test_what_does_not_fit_or_is_not_multiplied_by_neighbours_does_not_stream() -> None:
    assert GATED_BYTES + SUM_BYTES + 2 * RESERVED <= SHARED_LIMIT_90 + RESERVED
    assert gated_expert_ring(Q.F16, 2048, 768, 1, 8) is None
    assert gated_expert_ring(Q.Q8_0, 16384, 768, 1, 8) is None
    assert sum_expert_ring(Q.Q8_0, 768, 2048, 17, True) is None
    assert sum_expert_ring(Q.Q8_0, 14336, 4096, 2, True) is None
