"""Tiles and fragments of prefill attention on warpgroups: products by ``wgmma``, the softmax of ``prefill_tiles``.

Rows of float16 lie in panels of 64 elements, each panel all rows of the tile, 128 bytes a row, its 16-byte pieces
swapped by row number: what a descriptor of ``warpgroup`` reads.

    | row 0, elements 0-63 | row 1, elements 0-63 | ... | row 0, elements 64-127 | row 1, elements 64-127 | ...

A warp of a warpgroup holds 16 of its 64 rows, in the registers that ``prefill_tiles`` gives a 16-row tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from numba.cuda import types

from cuda_kernels.emit import Emitter, Value, emitted, floats, words
from cuda_kernels.prefill_tiles import PIECE_BYTES, PrefillFragments
from cuda_kernels.warpgroup import (
    PANEL_BYTES,
    ROW_GROUP_BYTES,
    multiply_registers,
    multiply_shared,
    tile_descriptor,
    wait_products,
)

PANEL_ELEMENTS = 64
STEP_ELEMENTS = 16  # summed elements of one product
N_CHAINS = 4  # of dependent maxima, and of dependent additions, of a row
STEPS_OF_PANEL = PANEL_ELEMENTS // STEP_ELEMENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelRows:
    """``n_rows`` rows (a multiple of 8) of ``head_dim`` float16 (a multiple of 64) at a multiple of 1024 bytes."""

    n_rows: int
    head_dim: int

    @property
    def panel_bytes(self) -> int:
        return self.n_rows * PANEL_BYTES

    @property
    def n_bytes(self) -> int:
        return self.head_dim // PANEL_ELEMENTS * self.panel_bytes

    def place(self, emit: Emitter, base: Value, row: Value, piece: Value) -> Value:
        """Shared address of 16 bytes of a row."""
        panel = emit.multiply(emit.shift_right(piece, 3), self.panel_bytes)
        swapped = emit.bit_xor(emit.bit_and(piece, 7), emit.bit_and(row, 7))
        in_panel = emit.add(emit.multiply(row, PANEL_BYTES), emit.multiply(swapped, PIECE_BYTES))
        return emit.add(emit.add(base, panel), in_panel)

    def step_offset(self, step: int) -> int:
        """Bytes to the elements ``16 * step`` of row 0."""
        return step // STEPS_OF_PANEL * self.panel_bytes + step % STEPS_OF_PANEL * STEP_ELEMENTS * 2


class WgmmaFragments(PrefillFragments):
    """Operations of a warpgroup on its 64 rows; those of ``PrefillFragments`` on one 16-row tile, and:

    start_scores(q_base, k_base)          rows x keys of a tile, under way; ``q_base`` is the warpgroup's first row
    scores_ready(scores)                  once at most one newer group of products is under way
    all_ready(scores)                     once no product is under way
    pack(probabilities)                   as float16, operands of ``start_sums``
    start_sums(sums, packed, v_base)      sums + probabilities @ values, under way
    sums_ready(sums)                      once no product is under way
    """

    def __init__(
        self, head_dim_k: int, head_dim_v: int, block_rows: int, tile_keys: int, *, gqa_ratio: int, softcap: float
    ) -> None:
        super().__init__(head_dim_k, head_dim_v, 1, tile_keys, gqa_ratio=gqa_ratio, softcap=softcap)
        self.q_panels = PanelRows(n_rows=block_rows, head_dim=head_dim_k)
        self.k_panels = PanelRows(n_rows=tile_keys, head_dim=head_dim_k)
        self.v_panels = PanelRows(n_rows=tile_keys, head_dim=head_dim_v)
        scores, sums, packed, u32 = floats(self.n_scores), floats(self.n_sums), words(self.n_scores // 2), types.uint32
        self.place_query = emitted(u32, u32, u32, u32)(self.q_panels.place)
        self.start_scores = emitted(scores, u32, u32)(self._start_scores)
        self.scores_ready = emitted(scores, scores)(lambda emit, values: wait_products(emit, values, 1))
        self.all_ready = emitted(scores, scores)(lambda emit, values: wait_products(emit, values, 0))
        self.sums_ready = emitted(sums, sums)(lambda emit, values: wait_products(emit, values, 0))
        self.pack = emitted(packed, scores)(self._pack)
        self.start_sums = emitted(sums, sums, packed, u32)(self._start_sums)

    def _start_scores(self, emit: Emitter, q_base: Value, k_base: Value) -> list[Value]:
        q = tile_descriptor(emit, q_base, self.q_panels.panel_bytes)
        k = tile_descriptor(emit, k_base, self.k_panels.panel_bytes)
        steps = range(self.q_panels.head_dim // STEP_ELEMENTS)
        offsets = [(self.q_panels.step_offset(step), self.k_panels.step_offset(step)) for step in steps]
        return multiply_shared(emit, self.tile_keys, q, k, offsets)

    def _softmax(self, emit: Emitter, scores: list[Value], state: list[Value], scale_log2: Value) -> list[Value]:
        """As of ``PrefillFragments``, with the numbers of a row taken in N_CHAINS independent chains."""
        maxima, totals, factors = [], [], []
        probabilities = list(scores)
        for row in range(self.n_rows):
            mine = [i for i in range(self.n_scores) if self._row_of(i, self.n_key_columns) == row]
            chains = [mine[i::N_CHAINS] for i in range(N_CHAINS)]
            largest = state[row]
            for found in [self._reduce(emit.float_maximum, [scores[i] for i in chain]) for chain in chains]:
                largest = emit.float_maximum(largest, found)
            for lane_mask in (1, 2):
                largest = emit.float_maximum(largest, emit.exchange(largest, lane_mask))
            shift = emit.float_multiply(emit.float_negate(largest), scale_log2)
            # a difference first: without any key both are the same huge number, and the factor must be 1
            factor = emit.exp2(emit.float_multiply(emit.float_subtract(state[row], largest), scale_log2))
            for i in mine:
                probabilities[i] = emit.exp2(emit.fma(scores[i], scale_log2, shift))
            total = emit.float_multiply(state[self.n_rows + row], factor)
            for part in [self._reduce(emit.float_add, [probabilities[i] for i in chain]) for chain in chains]:
                total = emit.float_add(total, part)
            maxima.append(largest)
            totals.append(total)
            factors.append(factor)
        return probabilities + maxima + totals + factors

    @staticmethod
    def _reduce(combine: Callable[[Value, Value], Value], values: list[Value]) -> Value:
        result = values[0]
        for value in values[1:]:
            result = combine(result, value)
        return result

    def _pack(self, emit: Emitter, probabilities: list[Value]) -> list[Value]:
        return [emit.pack_half2(probabilities[i], probabilities[i + 1]) for i in range(0, len(probabilities), 2)]

    def _start_sums(self, emit: Emitter, sums: list[Value], packed: list[Value], v_base: Value) -> list[Value]:
        v = tile_descriptor(emit, v_base, self.v_panels.panel_bytes)
        step_bytes = STEP_ELEMENTS // 8 * ROW_GROUP_BYTES
        return multiply_registers(emit, self.v_panels.head_dim, sums, packed, v, step_bytes)
