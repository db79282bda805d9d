"""Run in a process of its own with NUMBA_ENABLE_CUDASIM=1: the loop of products that stream their weights, in Python.

Copies arrive at once and a warp runs alone, as lane 0. What is checked is which bytes are brought where, that a place
is free when it is filled and full when it is read, and that every row goes through all of its steps in order.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from gguf import GGMLQuantizationType

from cuda_kernels import matvec_stream
from cuda_kernels.launch import IN_SIMULATOR
from cuda_kernels.weight_ring import BARRIER_BYTES, WeightRing
from cuda_kernels.weights import WeightGeometry

MATRICES = (1 << 40, 2 << 40, 3 << 40)
OUTS = (1 << 50, 2 << 50, 3 << 50)


class Warp:
    """Stands for what the kernel calls; remembers what was brought and what was stored."""

    def __init__(self, ring: WeightRing, warp: int, block: int, n_blocks: int, stored: dict[int, Any]) -> None:
        self.ring, self.warp, self.stored = ring, warp, stored
        self.rows: dict[int, tuple[int, int]] = {}  # place of a row -> address and bytes
        self.brought: dict[int, int] = defaultdict(int)
        self.awaited: dict[int, int] = defaultdict(int)
        self.full: set[int] = set()
        self.reading: int | None = None
        self.cuda = SimpleNamespace(
            shared=SimpleNamespace(array=lambda *_, **__: None),
            threadIdx=SimpleNamespace(x=32 * warp),
            blockIdx=SimpleNamespace(x=block),
            gridDim=SimpleNamespace(x=n_blocks),
            syncwarp=self.sync,
            syncthreads=lambda: None,
            shfl_sync=lambda _, value, __: value,
        )

    def bring(self, place: int, barrier: int, *rest: int) -> None:
        firsts, (stride, n_bytes, _) = rest[:-3], rest[-3:]
        place, ring = int(place), self.ring
        index = (place - ring.rings_offset - self.warp * ring.warp_bytes) // ring.place_bytes
        assert 0 <= index < ring.n_places
        assert int(barrier) == (self.warp * ring.n_places + index) * BARRIER_BYTES
        assert index not in self.full, "a place is filled while it is in use"
        assert 0 < n_bytes <= ring.row_bytes
        assert n_bytes % 16 == 0
        self.full.add(index)
        self.brought[index] += 1
        for i, first in enumerate(firsts):
            for j in range(ring.n_rows):
                at = place + (i * ring.n_rows + j) * ring.row_bytes
                self.rows[at] = int(first) + j * int(stride), int(n_bytes)

    def wait(self, barrier: int, parity: int) -> None:
        index = int(barrier) // BARRIER_BYTES - self.warp * self.ring.n_places
        assert int(parity) == self.awaited[index] % 2
        self.awaited[index] += 1
        assert self.brought[index] == self.awaited[index], "a place is read before it was filled"
        self.reading = index

    def sync(self, _: int) -> None:
        if self.reading is not None:
            self.full.discard(self.reading)
            self.reading = None

    def load(self, row_at: int, row_bytes: int, *_: int) -> list[int]:
        """The address in the matrix that each row's words come from."""
        found = []
        for i in range(self.ring.n_matrices * self.ring.n_rows):
            at = int(row_at) + i * int(row_bytes)
            start = max(place for place in self.rows if place <= at)
            address, n_bytes = self.rows[start]
            assert at - start < n_bytes
            found.append(address + at - start)
        return found

    def store(self, at: int, total: Any) -> None:
        assert int(at) not in self.stored
        self.stored[int(at)] = total.steps


class Total:
    """The steps that a row's sum has seen."""

    def __init__(self, steps: Any) -> None:
        self.steps = steps


def add_step(sums: list[Any], addresses: list[int], step: int, *_: int) -> list[Any]:
    return [[*steps, (address, int(step))] for steps, address in zip(sums, addresses, strict=True)]


def cells_of(function: Any) -> dict[str, Any]:
    """What a function closes over."""
    return dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))


def check(ring: WeightRing, rows: list[int], n_blocks: int) -> None:
    kernel = matvec_stream.build_stream_matvec_kernel(ring, 1, False).function
    cells = cells_of(kernel)
    cells |= {"bring": cells_of(cells["bring_next"].cell_contents.fn)["bring"]}
    stride = WeightGeometry(weight_type=ring.weight_type, n_rows=1, n_cols=ring.n_cols).row_strides[0]
    planes = [address for first in MATRICES for address in (first, 0, 0, 0)]
    stored: dict[int, Any] = {}
    n_sums = ring.n_matrices * ring.n_rows
    for block in range(n_blocks):
        for number in range(ring.n_warps):
            warp = Warp(ring, number, block, n_blocks, stored)
            replaced = {
                "bring": warp.bring,
                "load_shared": warp.load,
                "accumulate": add_step,
                "zeros": lambda: [[]] * n_sums,
                "lane_total": lambda sums, _: Total(sums),
                "begin": lambda *_: 0,
                "ask": lambda *_: 0,
                "take": lambda *_: None,
                "gated_value": lambda total, _: total,
            }
            for name, function in replaced.items():
                cells[name].cell_contents = function
            kernel.__globals__.update(
                cuda=warp.cuda,
                shared_address=lambda _: 0,
                warp_uniform=lambda value: value,
                init_barrier=lambda *_: None,
                fence_barriers=lambda: None,
                wait_for_previous=lambda: None,
                wait_barrier=warp.wait,
                store_float=warp.store,
            )
            kernel(planes, [stride, 0, 0, 0], OUTS, [0, 0, 0], rows, 0, 0, ring.n_cols, 0, 0.0)
            assert not warp.full
    expected = {}
    for matrix in range(1 if ring.n_matrices == 2 else len(rows)):
        for row in range(0, rows[matrix] - ring.n_rows + 1, ring.n_rows):  # lane 0 stores the first row of a tile
            firsts = [
                MATRICES[matrix + m] + (row + r) * stride for m in range(ring.n_matrices) for r in range(ring.n_rows)
            ]
            expected[OUTS[matrix] + 4 * row] = [
                [(first + step * ring.step_bytes, step) for step in range(ring.n_steps)] for first in firsts
            ]
    assert stored == expected


def main() -> None:
    q4, q5 = GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q5_K
    cases = (
        (q4, 5120, 2, 1, 4, 2, 5, [71, 0, 0], 3),
        (q4, 14336, 2, 1, 4, 2, 4, [64, 16, 15], 2),
        (q5, 5376, 4, 1, 2, 3, 2, [37, 9, 4], 2),
        (q4, 4096, 1, 2, 4, 2, 2, [70, 70, 0], 3),
        (q5, 256, 1, 1, 8, 2, 1, [5, 0, 0], 1),
    )
    for weight_type, n_cols, n_rows, n_matrices, n_warps, n_places, place_steps, rows, n_blocks in cases:
        ring = WeightRing(
            weight_type=weight_type,
            n_cols=n_cols,
            n_rows=n_rows,
            n_matrices=n_matrices,
            n_warps=n_warps,
            n_blocks=1,
            n_places=n_places,
            place_steps=place_steps,
            vector_bytes=16,
        )
        check(ring, rows, n_blocks)
    print(f"{len(cases)} rings, 0 failed")


if __name__ == "__main__":
    assert IN_SIMULATOR, "set NUMBA_ENABLE_CUDASIM=1"
    main()
    sys.exit(0)
