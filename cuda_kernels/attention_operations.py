"""Attention on a CUDA device: what ``operations.CudaOperations`` does from ``begin_attention`` to ``finish_attention``.

Page tables, spans, partitions and their fold. No kernels.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda_kernels.attention_decode import attention_decode
from cuda_kernels.attention_prefill import attention_prefill, count_state_floats
from cuda_kernels.elementwise import write_sequence
from cuda_kernels.expert_operations import ExpertOperations
from cuda_kernels.merge import merge_partials, state_floats
from cuda_kernels.partitions import (
    WINDOW_KEYS,
    count_partitions,
    most_window_partitions,
    partition_bounds,
)
from cuda_kernels.quantise import QUANT_BLOCK
from cuda_kernels.step_arrays import Rows
from kvs_core.attention_rule import AttentionRule
from kvs_core.cuda_scratch import LARGE_BEGIN, large_begin_of, partial_rows
from kvs_core.errors import StateError
from kvs_core.kv_types import PageGeometry
from kvs_core.phase import Phase
from kvs_core.policy import Layout
from kvs_core.units import align_up, ceil_div

_RECORDED_PARTITIONS = 16
"""Recorded steps cover a multiple of this many partitions, so that one recording serves thousands of tokens."""


@dataclass(slots=True, kw_only=True)
class _Attention:
    """The running attention of one layer: where the result goes, how far the keys are reduced and folded.

    ``sinks``: float32 [n_head], or None.
    """

    n_head: int
    head_dim_v: int
    out: Rows
    sinks: Any
    is_begun: bool = False  # the state of a prompt holds keys already
    n_partitions: int = 0  # reduced so far
    group_begin: int = 0  # first of those that are not folded yet
    is_folded: bool = False  # the fold carries state already
    is_done: bool = False


class AttentionOperations(ExpertOperations):
    """``attend_span`` and its frame over the arrays of a step; the end leaves the 8-bit form that a product reads."""

    _attention: _Attention | None
    _has_fixed_pages: bool

    def begin_attention(self, n_head: int, head_dim_v: int, out: Rows, sinks: str | None = None) -> None:
        scores = None if sinks is None else self._vectors[sinks]
        self._attention = _Attention(n_head=n_head, head_dim_v=head_dim_v, out=out, sinks=scores)

    def attend_span(
        self,
        layer: int,
        geometry: PageGeometry,
        offsets: array[int],
        page_begin: int,
        page_end: int,
        q: Rows,
        rule: AttentionRule,
    ) -> None:
        self._write_page_table(layer, offsets, page_begin, page_end)
        running = self._running()
        n_keys = self._first_pos + self._n_tokens
        key_end = min(page_end * geometry.page_tokens, n_keys)
        running.is_done = key_end == n_keys
        attend = self._attend_prefill if self._phase is Phase.PREFILL else self._attend_decode
        attend(self._page_table(layer), geometry, page_begin * geometry.page_tokens, key_end, q, rule, running)

    def finish_attention(self) -> None:
        if not self._running().is_done:
            raise StateError("attention ended before the newest keys")
        self._attention = None

    def _attend_prefill(
        self,
        pages: Any,
        geometry: PageGeometry,
        key_begin: int,
        key_end: int,
        q: Rows,
        rule: AttentionRule,
        running: _Attention,
    ) -> None:
        n_floats = count_state_floats(geometry, self._n_tokens, running.n_head // geometry.n_head_kv)
        attention_prefill(
            self._heads(q, running.n_head, geometry.head_dim_k),
            pages,
            self._region(self._regions.attention_state, (n_floats,), np.float32),
            self._heads(running.out, running.n_head, running.head_dim_v),
            page=geometry,
            first_position=self._first_pos,
            key_begin=key_begin,
            key_end=key_end,
            is_first=not running.is_begun,
            is_last=running.is_done,
            scale=rule.scale,
            window=rule.n_swa or None,
            softcap=rule.softcap,
            sinks=running.sinks,
            stream=self._stream,
        )
        running.is_begun = True

    def _attend_decode(
        self,
        pages: Any,
        geometry: PageGeometry,
        _: int,
        key_end: int,
        q: Rows,
        rule: AttentionRule,
        running: _Attention,
    ) -> None:
        n_complete = (
            self._count_in_window(rule.n_swa) if rule.n_swa else self._count_complete(geometry, key_end, running)
        )
        capacity = partial_rows(running.n_head, running.head_dim_v) // self._n_tokens
        while running.n_partitions < n_complete:
            n_held = running.n_partitions - running.group_begin
            if n_held == capacity:
                self._fold(running, geometry, rule, is_last=False)
                n_held = 0
            n_new = min(n_complete - running.n_partitions, capacity - n_held)
            partials, max_sum = self._partials(running, n_held, n_new)
            attention_decode(
                self._heads(q, running.n_head, geometry.head_dim_k),
                pages,
                self._positions(),
                partials,
                max_sum,
                page=geometry,
                first_partition=running.n_partitions,
                scale=rule.scale,
                window=rule.n_swa or None,
                softcap=rule.softcap,
                stream=self._stream,
            )
            running.n_partitions += n_new
        if running.is_done:
            self._fold(running, geometry, rule, is_last=True)

    def _count_complete(self, geometry: PageGeometry, key_end: int, running: _Attention) -> int:
        """Partitions that can be reduced now; a cut one waits for the pages of the next span."""
        large_begin = large_begin_of(geometry)
        if self._is_recording and running.is_done:
            return count_partitions(self._recorded_keys(key_end), large_begin)
        n_complete = count_partitions(key_end, large_begin)
        if not running.is_done and partition_bounds(n_complete - 1, large_begin)[1] > key_end:
            n_complete -= 1
        return n_complete

    def _count_in_window(self, n_swa: int) -> int:
        """Partitions of a window layer, the same in every step of as many tokens; kernels find out which these are."""
        cache = self._plan.cache
        return min(
            most_window_partitions(n_swa, self._n_tokens), ceil_div(cache.n_pages * cache.page_tokens, WINDOW_KEYS)
        )

    def _recorded_keys(self, key_end: int) -> int:
        """Keys whose partitions a recorded step launches: more than there are, since those without keys change no bit.

        Counted in the smaller partitions, so that every layer's are as many for all steps that share a recording.
        """
        cache = self._plan.cache
        n_partitions = align_up(count_partitions(key_end, LARGE_BEGIN), _RECORDED_PARTITIONS)
        return min(partition_bounds(n_partitions - 1, LARGE_BEGIN)[1], cache.n_pages * cache.page_tokens)

    def _partials(self, running: _Attention, begin: int, count: int) -> tuple[Any, Any]:
        rows = self._n_tokens * running.n_head
        shape = (count, self._n_tokens, running.n_head)
        partials_at = self._regions.partials + 4 * begin * rows * running.head_dim_v
        max_sum_at = self._regions.max_sum + 8 * begin * rows
        return (
            self._region(partials_at, (*shape, running.head_dim_v), np.float32),
            self._region(max_sum_at, (*shape, 2), np.float32),
        )

    def _fold(self, running: _Attention, geometry: PageGeometry, rule: AttentionRule, *, is_last: bool) -> None:
        partials, max_sum = self._partials(running, 0, running.n_partitions - running.group_begin)
        n_floats = self._n_tokens * state_floats(running.n_head, running.head_dim_v)
        is_quantised = is_last and running.head_dim_v % QUANT_BLOCK == 0 and self._is_input(running.out)
        quants, scales = self._quantised(running.out) if is_quantised else (None, None)
        merge_partials(
            partials,
            max_sum,
            self._positions(),
            self._region(self._regions.attention_state, (n_floats,), np.float32),
            self._heads(running.out, running.n_head, running.head_dim_v),
            n_head=running.n_head,
            head_dim=running.head_dim_v,
            first_partition=running.group_begin,
            is_first=not running.is_folded,
            is_last=is_last,
            quants=quants,
            scales=scales,
            window=rule.n_swa or None,
            large_begin=large_begin_of(geometry),
            sinks=running.sinks,
            stream=self._stream,
        )
        if is_quantised:
            self._held = running.out
        running.group_begin = running.n_partitions
        running.is_folded = True

    def _running(self) -> _Attention:
        if self._attention is None:
            raise StateError("attention was not begun")
        return self._attention

    def _write_fixed_tables(self, layout: Layout) -> None:
        """Every page of a layout without streaming lies at its own place."""
        for layer in range(layout.cache.n_layers):
            write_sequence(
                self._page_table(layer),
                begin=0,
                count=layout.cache.n_pages,
                first=self._arena.address + layout.resident_slot_offset(layer, 0),
                step=layout.cache.row_bytes,
                stream=self._stream,
            )

    def _write_window_tables(self) -> None:
        """Pages of a window layer take turns in its slots, whatever streams."""
        for index, window in enumerate(self._plan.window_layers):
            write_sequence(
                self._page_table(self._plan.cache.n_layers + index),
                begin=0,
                count=window.n_pages,
                first=self._arena.address + window.arena_offset,
                step=window.geometry.page_bytes,
                period=window.n_slots,
                stream=self._stream,
            )

    def _write_page_table(self, layer: int, offsets: array[int], page_begin: int, page_end: int) -> None:
        """Device addresses of some pages, written by kernels from numbers: copies would queue behind the stream's."""
        if self._has_fixed_pages or layer >= self._plan.cache.n_layers:  # all of a window layer's are there
            return
        places = np.frombuffer(offsets, dtype=np.int64)[page_begin:page_end]
        for begin, count, first, step in _runs(places):
            write_sequence(
                self._page_table(layer),
                begin=page_begin + begin,
                count=count,
                first=self._arena.address + first,
                step=step,
                stream=self._stream,
            )

    def _write_tail_table(self, layer: int, geometry: PageGeometry, offsets: array[int]) -> None:
        """The pages that the step's own rows go to."""
        page_begin = self._first_pos // geometry.page_tokens
        page_end = ceil_div(self._first_pos + self._n_tokens, geometry.page_tokens)
        self._write_page_table(layer, offsets, page_begin, page_end)

    def _page_table(self, layer: int) -> Any:
        n_pages = self._plan.cache.n_pages
        return self._region(self._regions.page_table + 8 * layer * n_pages, (n_pages,), np.int64)


def _runs(places: NDArray[np.int64]) -> Iterator[tuple[int, int, int, int]]:
    """(begin, count, first, step) of the stretches of equal distance that ``places`` consists of."""
    begin = 0
    while begin < len(places):
        first = int(places[begin])
        if begin + 1 == len(places):
            yield begin, 1, first, 0
            return
        step = int(places[begin + 1]) - first
        breaks = np.flatnonzero(np.diff(places[begin:]) != step)
        count = int(breaks[0]) + 1 if len(breaks) else len(places) - begin
        yield begin, count, first, step
        begin += count
