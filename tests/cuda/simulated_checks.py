"""Run in a process of its own with NUMBA_ENABLE_CUDASIM=1: the plain kernels at toy sizes, under Numba's simulator."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain

import numpy as np
from gguf import GGMLQuantizationType
from numba import cuda

from cuda_kernels.activation import Activation
from cuda_kernels.launch import IN_SIMULATOR
from cuda_kernels.rope import RopePairing
from cuda_kernels.weights import WeightGeometry, lay_out
from scripts.cuda_checks import experts, recurrent, rows, small_steps
from scripts.cuda_checks.report import Outcome, same_bits
from scripts.cuda_checks.weights import random_blocks
from tests.cuda.host_layout import laid_out_on_host


def check_layout(weight_type: GGMLQuantizationType) -> Iterator[Outcome]:
    geometry = WeightGeometry(weight_type=weight_type, n_rows=2, n_cols=256)
    blocks = random_blocks(geometry, np.random.default_rng(1))
    unit = np.dtype(geometry.unit)
    d_matrix = cuda.to_device(np.full(geometry.n_bytes // unit.itemsize, np.iinfo(unit).max, unit))
    for row in range(2):
        part = np.ascontiguousarray(blocks[row]).view(unit)
        lay_out(cuda.to_device(part), d_matrix, geometry=geometry, first_row=row, stream=0)
    matrix, wanted = d_matrix.copy_to_host().view(np.uint8), laid_out_on_host(geometry, blocks)
    for offset, stride in zip(geometry.plane_offsets, geometry.row_strides, strict=True):
        plane = slice(offset, offset + 2 * stride)
        yield same_bits(f"{weight_type.name} plane at {offset}", matrix[plane], wanted[plane])


def outcomes() -> Iterator[Outcome]:
    yield from rows.check_norm(2, 70)
    yield from chain.from_iterable(rows.check_rope(pairing, 16, 8, b) for pairing in RopePairing for b in (0, 5))
    yield from chain.from_iterable(rows.check_activation(kind, 40) for kind in Activation)
    yield from rows.check_log_position(40)
    yield from rows.check_sequence(20, 6)
    yield from small_steps.check_scaling(33)
    yield from small_steps.check_softplus_gate(4, 32)
    yield from rows.check_logits(300, 20)
    yield from recurrent.check_gates(3)
    yield from chain.from_iterable(experts.check_route(name, 16, 3, 2) for name in experts.RULES)
    yield from experts.check_order(7, 2, 5, 4)
    names = ("Q8_0", "Q5_1", "Q6_K", "Q4_K", "Q5_K", "Q2_K", "Q3_K", "MXFP4", "IQ4_XS")
    yield from chain.from_iterable(check_layout(GGMLQuantizationType[name]) for name in names)


if __name__ == "__main__":
    assert IN_SIMULATOR, "set NUMBA_ENABLE_CUDASIM=1"
    results = list(outcomes())
    failed = [outcome for outcome in results if not outcome.passed]
    print(f"{len(results)} outcomes, {len(failed)} failed", *failed, sep="\n")
    sys.exit(1 if failed or not results else 0)
