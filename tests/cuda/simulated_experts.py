"""Run in a process of its own with NUMBA_ENABLE_CUDASIM=1: the loops of experts that stream their rows, in Python.

As in ``simulated_stream``: copies arrive at once and a warp runs alone, as lane 0. What is checked is that every row of
every expert taken is brought, read and stored once, that a place is free when it is filled and full when it is read.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from gguf import GGMLQuantizationType

from cuda_kernels import expert_stream, expert_walk
from cuda_kernels.activation import Activation
from cuda_kernels.expert_ring import ExpertRing
from cuda_kernels.expert_stream import Chosen
from cuda_kernels.launch import IN_SIMULATOR
from cuda_kernels.weight_ring import BARRIER_BYTES
from tests.cuda.simulated_stream import cells_of

IDS, OUT, HIDDEN = 1 << 40, 1 << 50, 1 << 45


class Warp:
    """Stands for what the kernels call; remembers what is in its places and what it stored."""

    def __init__(self, ring: ExpertRing, warp: int, block: int, n_blocks: int, ids: list[int]) -> None:
        self.ring, self.warp, self.ids = ring, warp, ids
        self.places: dict[int, int] = {}  # number of a place -> first row in it
        self.n_brought, self.n_awaited = [0] * ring.n_places, [0] * ring.n_places
        self.reading: int | None = None
        self.words: dict[int, int] = {}
        self.stored: dict[int, Any] = {}
        self.totals: list[Any] = []
        self.cuda = SimpleNamespace(
            shared=SimpleNamespace(array=lambda *_, **__: None),
            threadIdx=SimpleNamespace(x=32 * warp),
            blockIdx=SimpleNamespace(x=block),
            gridDim=SimpleNamespace(x=n_blocks),
            syncwarp=self.sync,
            syncthreads=self.share_ids,
            shfl_xor_sync=lambda _, value, __: value,
        )

    def share_ids(self) -> None:
        """What other threads would have written."""
        for pair, expert in enumerate(self.ids):
            self.words[self.ring.words_offset + 4 * pair] = expert

    def bring(self, place: int, barrier: int, first: int, row: int, _: int) -> None:
        ring = self.ring
        index, rest = divmod(int(place) - ring.rings_offset - self.warp * ring.warp_bytes, ring.place_bytes)
        assert rest == 0
        assert 0 <= index < ring.n_places
        assert int(barrier) == (self.warp * ring.n_places + index) * BARRIER_BYTES
        assert index not in self.places, "a place is filled while it is in use"
        self.places[index] = int(first) + int(row)
        self.n_brought[index] += 1

    def wait(self, barrier: int, parity: int) -> None:
        index = int(barrier) // BARRIER_BYTES - self.warp * self.ring.n_places
        assert int(parity) == self.n_awaited[index] % 2
        self.n_awaited[index] += 1
        assert self.n_brought[index] == self.n_awaited[index], "a place is read before it was filled"
        self.reading = index

    def sync(self, _: int) -> None:
        if self.reading is not None:
            del self.places[self.reading]
            self.reading = None

    def locate(self, place: int, first: int, row: int) -> int:
        index = (int(place) - self.ring.rings_offset - self.warp * self.ring.warp_bytes) // self.ring.place_bytes
        assert self.places[index] == int(first) + int(row)
        return self.places[index]

    def store(self, at: int, value: Any) -> None:
        assert int(at) not in self.stored
        self.stored[int(at)] = value

    def run(self, kernel: Any, *arguments: Any) -> None:
        cells = cells_of(kernel)
        n_steps = -(-self.ring.n_cols // self.ring.elements // 32)

        def total(sums: list[Any], _: int) -> Any:
            source, vector = sums[0][0], sums[0][2]
            assert sums == [(source, step, vector) for step in range(n_steps)]
            return source, vector

        replaced = {
            "bring": self.bring,
            "locate": self.locate,
            "expert_planes": lambda _, first: int(first),
            "add_steps": lambda sums, rows, step, _, vector, *__: [
                *sums,
                *((rows, int(step) + i, int(vector)) for i in range(self.ring.n_unrolled)),
            ],
            "zeros": list,
            "lane_total": total,
            "ask": lambda *_: 0,
            "take": lambda *_: None,
            "gated_value": lambda x, _: x,
        }
        walk = cells_of(cells["bring_next"].cell_contents.fn)
        for inside in (cells, walk):
            for name in replaced.keys() & inside.keys():
                inside[name].cell_contents = replaced[name]
        nothing = lambda *_: None  # noqa: E731
        everywhere = dict(
            cuda=self.cuda,
            init_barrier=nothing,
            fence_barriers=nothing,
            load_shared_int=lambda at: self.words[int(at)],
        )
        vars(expert_walk).update(everywhere)
        kernel.__globals__.update(
            everywhere,
            shared_address=lambda _: 0,
            warp_uniform=lambda value: value,
            wait_for_all_before=nothing,
            wait_for_previous=nothing,
            let_next_start=nothing,
            load_early_int=lambda at: self.ids[(int(at) - IDS) // 4],
            store_shared_int=lambda at, value: self.words.update({int(at): int(value)}),
            wait_barrier=self.wait,
            store_float=self.store,
            load_float_past_l1=lambda _: 0.0,
            store_shared_float=lambda _, value: self.totals.append(value),
            load_shared_float=lambda _: 0.0,
            fma=lambda *_: 0.0,
            meet=nothing,
        )
        kernel(*arguments)
        assert not self.places


def check_gated(ring: ExpertRing, n_used: int, n_tokens: int, n_rows: int, n_blocks: int) -> None:
    ids = [(7 * pair + 3) % 11 for pair in range(n_tokens * n_used)]
    kernel = expert_stream.build_stream_gated_kernel(ring, Activation.SILU, False, Chosen(n_used=n_used)).function
    stored: dict[int, Any] = {}
    for block in range(n_blocks):
        for number in range(ring.n_warps):
            warp = Warp(ring, number, block, n_blocks, ids)
            warp.run(kernel, None, n_rows, n_rows, OUT, 0, 0, IDS, 0, 0, 0, n_tokens)
            assert not stored.keys() & warp.stored.keys()
            stored |= warp.stored
    expected = {
        OUT + 4 * (pair * n_rows + row): (
            expert * n_rows + row,
            ring.vectors_offset + pair // n_used * (ring.n_cols * 3 // 2),
        )
        for pair, expert in enumerate(ids)
        for row in range(0, n_rows - ring.n_rows + 1, ring.n_rows)  # lane 0 stores the first row of a tile
    }
    assert stored == expected


def check_sum(ring: ExpertRing, n_used: int, n_tokens: int, n_rows: int, n_blocks: int) -> None:
    ids = [(5 * pair + 2) % 11 for pair in range(n_tokens * n_used)]
    kernel = expert_stream.build_stream_sum_kernel(ring, Chosen(n_used=n_used)).function
    stored: dict[int, Any] = {}
    totals = []
    for block in range(n_blocks):
        for number in range(ring.n_warps):
            warp = Warp(ring, number, block, n_blocks, ids)
            warp.run(kernel, None, n_rows, OUT, 0, IDS, 0, 0, 0, 1.0, HIDDEN, 0, n_tokens)
            assert not stored.keys() & warp.stored.keys()
            stored |= warp.stored
            totals += [total for total in warp.totals if total != 0.0]  # zeros are weights
    n_tiles = -(-n_rows // ring.n_rows)
    starts = [min(tile * ring.n_rows, n_rows - ring.n_rows) for tile in range(n_tiles)]
    assert sorted(totals) == sorted(
        (expert * n_rows + row, HIDDEN + pair * ring.n_cols) for pair, expert in enumerate(ids) for row in starts
    )
    whole = range(0, n_rows - ring.n_rows + 1, ring.n_rows)
    assert set(stored) == {OUT + 4 * (token * n_rows + row) for token in range(n_tokens) for row in whole}


def main() -> None:
    q4, q8 = GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q8_0
    gated = (
        (q4, 512, 1, 4, 2, 3, 2, 37, 3),
        (q8, 704, 2, 3, 3, 2, 1, 18, 2),
        (q4, 256, 1, 16, 2, 4, 3, 5, 1),
        (q8, 96, 1, 6, 2, 3, 1, 25, 2),
    )
    for kind, n_cols, n_rows, n_warps, n_places, n_used, n_tokens, rows, n_blocks in gated:
        ring = ExpertRing(
            weight_type=kind, n_cols=n_cols, n_rows=n_rows, n_matrices=2, n_warps=n_warps, n_places=n_places,
            vector_bytes=n_tokens * n_cols * 3 // 2, n_words=8 * n_used,
        )  # fmt: skip
        check_gated(ring, n_used, n_tokens, rows, n_blocks)
    sums = (
        (q8, 704, 4, 6, 2, 3, 1, 37, 3),
        (q4, 512, 2, 8, 3, 4, 3, 18, 2),
        (q8, 96, 1, 5, 2, 5, 2, 7, 1),
        (q8, 2560, 4, 4, 1, 4, 2, 21, 2),
    )
    for kind, n_cols, n_rows, n_warps, n_places, n_used, n_tokens, rows, n_blocks in sums:
        ring = ExpertRing(
            weight_type=kind, n_cols=n_cols, n_rows=n_rows, n_matrices=1, n_warps=n_warps, n_places=n_places,
            vector_bytes=0, n_words=16 * n_used + 2 * n_warps * n_rows,
        )  # fmt: skip
        check_sum(ring, n_used, n_tokens, rows, n_blocks)
    print(f"{len(gated) + len(sums)} rings, 0 failed")


if __name__ == "__main__":
    assert IN_SIMULATOR, "set NUMBA_ENABLE_CUDASIM=1"
    main()
    sys.exit(0)
