"""Residency, ring and schedule: pure functions on integers. No arrays, files, clocks or devices.

The arena of one phase, from low to high addresses (every region starts at a multiple of 256 bytes)::

    | state | tail slots | resident pages -> | fresh slots | streaming ring | workspace | unused |
              \\---- resident_bytes ----/      \\------ ring_bytes ------/

State and tail slots never move. Resident pages are laid out by (page, layer), so a phase with more room appends
pages and moves none of those that stay. What a phase switch changes is where the ring and the workspace begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvs_core.phase import Phase
from kvs_core.units import align_up

REGION_ALIGNMENT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """The KV layers of one sequence: bytes of a page per layer, in model order."""

    page_tokens: int
    page_bytes: tuple[int, ...]
    n_pages: int
    """Pages per layer that hold the whole context."""
    reads: tuple[int, ...] = ()
    """How often a step reads each layer's pages, one reading after another; empty: each once."""

    def n_reads(self, layer: int) -> int:
        """How many layers of the model attend to a KV layer in every step."""
        return self.reads[layer] if self.reads else 1

    @property
    def n_layers(self) -> int:
        return len(self.page_bytes)

    @property
    def row_bytes(self) -> int:
        """Bytes of one page of every layer."""
        return sum(self.page_bytes)

    @property
    def largest_page_bytes(self) -> int:
        return max(self.page_bytes, default=0)

    @property
    def total_bytes(self) -> int:
        return self.n_pages * self.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RingPolicy:
    """How much of an arena the streaming ring may take and how much one copy moves; a property of the device."""

    target_bytes: int
    span_bytes: int
    room_divisor: int
    """The ring takes at most this part of the room that ring and resident pages share."""
    span_step: int = 1
    """Pages that a span may be cut at multiples of; above 1 where a kernel reduces several pages as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where each region of the arena lies during one phase."""

    phase: Phase
    cache: CacheShape
    arena_bytes: int
    state_bytes: int
    tail_bytes: int
    resident_page_bytes: int
    resident_pages: tuple[int, ...]
    """R of each layer: its first R pages by position have a place of their own."""
    fresh_slots: int
    stream_bytes: int
    span_pages: tuple[int, ...]
    """Pages of each layer that one copy moves at most; a multiple of ``span_step``."""
    workspace_bytes: int
    span_step: int = 1

    @property
    def is_fully_resident(self) -> bool:
        return all(count >= self.cache.n_pages for count in self.resident_pages)

    @property
    def tail_offset(self) -> int:
        return self.state_bytes

    @property
    def resident_offset(self) -> int:
        return self.tail_offset + self.tail_bytes

    @property
    def resident_bytes(self) -> int:
        """Tail slots and resident pages together."""
        return self.tail_bytes + self.resident_page_bytes

    @property
    def fresh_offset(self) -> int:
        return align_up(self.resident_offset + self.resident_page_bytes, REGION_ALIGNMENT)

    @property
    def fresh_bytes(self) -> int:
        return self.fresh_slots * self.cache.largest_page_bytes

    @property
    def stream_offset(self) -> int:
        return self.fresh_offset + self.fresh_bytes

    @property
    def ring_bytes(self) -> int:
        """Fresh slots and the streaming ring together."""
        return self.fresh_bytes + self.stream_bytes

    @property
    def workspace_offset(self) -> int:
        return self.stream_offset + self.stream_bytes

    @property
    def unused_bytes(self) -> int:
        used = self.state_bytes + self.resident_bytes + self.ring_bytes + self.workspace_bytes
        return self.arena_bytes - used

    def tail_slot_offset(self, layer: int) -> int:
        """Arena offset of the slot that holds the growing page of a KV layer."""
        return self.tail_offset + sum(self.cache.page_bytes[:layer])

    def resident_slot_offset(self, layer: int, page: int) -> int:
        """Arena offset of a resident page; the same in every phase in which the page is resident."""
        return self.resident_offset + page * self.cache.row_bytes + sum(self.cache.page_bytes[:layer])

    def fresh_slot_offset(self, slot: int) -> int:
        return self.fresh_offset + slot * self.cache.largest_page_bytes


def touched_pages_max(n_tokens: int, page_tokens: int) -> int:
    """Most pages of one layer that ``n_tokens`` consecutive positions can lie in, wherever they begin."""
    return (n_tokens + page_tokens - 2) // page_tokens + 1


def fresh_slots_for(n_tokens: int, cache: CacheShape) -> int:
    """Pages beside the tail slot that one step's new rows of a layer can need."""
    return min(touched_pages_max(n_tokens, cache.page_tokens), cache.n_pages) - 1


def smallest_stream_bytes(cache: CacheShape, span_step: int = 1) -> int:
    """The least ring that lets one span be copied while another is read."""
    return 2 * span_step * cache.largest_page_bytes


def fixed_bytes(cache: CacheShape, *, state_bytes: int, workspace_bytes: int, n_tokens: int, span_step: int = 1) -> int:
    """Arena bytes of a streaming phase before its first resident page and with the smallest ring."""
    fresh_bytes = fresh_slots_for(n_tokens, cache) * cache.largest_page_bytes
    return state_bytes + cache.row_bytes + fresh_bytes + smallest_stream_bytes(cache, span_step) + workspace_bytes


def fully_resident_bytes(cache: CacheShape, *, state_bytes: int, workspace_bytes: int, tail_bytes: int = 0) -> int:
    """Arena bytes of a phase in which every page has its own place and nothing streams."""
    return align_up(state_bytes + tail_bytes + cache.total_bytes, REGION_ALIGNMENT) + workspace_bytes


def plan_fully_resident(
    phase: Phase,
    cache: CacheShape,
    *,
    arena_bytes: int,
    state_bytes: int,
    workspace_bytes: int,
    tail_bytes: int = 0,
) -> Layout:
    """The layout of a phase that streams nothing: no ring. Needs ``fully_resident_bytes``.

    ``tail_bytes`` is above 0 when the other phase of the plan streams, so that resident pages lie at the same
    offsets in both.
    """
    return Layout(
        phase=phase,
        cache=cache,
        arena_bytes=arena_bytes,
        state_bytes=state_bytes,
        tail_bytes=tail_bytes,
        resident_page_bytes=cache.total_bytes,
        resident_pages=(cache.n_pages,) * cache.n_layers,
        fresh_slots=0,
        stream_bytes=0,
        span_pages=(0,) * cache.n_layers,
        workspace_bytes=workspace_bytes,
    )


def plan_streaming(
    phase: Phase,
    cache: CacheShape,
    ring: RingPolicy,
    *,
    arena_bytes: int,
    state_bytes: int,
    workspace_bytes: int,
    n_tokens: int,
) -> Layout:
    """The layout of a phase whose arena cannot hold every page. Needs at least ``fixed_bytes``.

    The ring takes the device's part of what is left beside the fixed regions, between its smallest size and the
    device's target; the rest becomes resident pages. Both grow with the arena, so a larger arena never streams more.
    """
    fresh_slots = fresh_slots_for(n_tokens, cache)
    fixed = state_bytes + cache.row_bytes + fresh_slots * cache.largest_page_bytes + workspace_bytes
    room = arena_bytes - fixed
    smallest = smallest_stream_bytes(cache, ring.span_step)
    wanted = max(smallest, min(ring.target_bytes, room // ring.room_divisor))
    stream_bytes = min(wanted, cache.total_bytes) // REGION_ALIGNMENT * REGION_ALIGNMENT
    resident_pages, resident_page_bytes = count_resident_pages(cache, room - stream_bytes)
    return Layout(
        phase=phase,
        cache=cache,
        arena_bytes=arena_bytes,
        state_bytes=state_bytes,
        tail_bytes=cache.row_bytes,
        resident_page_bytes=resident_page_bytes,
        resident_pages=resident_pages,
        fresh_slots=fresh_slots,
        stream_bytes=stream_bytes,
        span_pages=tuple(
            max(1, min(ring.span_bytes, stream_bytes // 2) // page_bytes // ring.span_step) * ring.span_step
            for page_bytes in cache.page_bytes
        ),
        workspace_bytes=workspace_bytes,
        span_step=ring.span_step,
    )


def count_resident_pages(cache: CacheShape, n_bytes: int) -> tuple[tuple[int, ...], int]:
    """Resident pages per layer that fit ``n_bytes`` in (page, layer) order, and the bytes they take."""
    if cache.row_bytes == 0:
        return (), 0
    rows = min(n_bytes // cache.row_bytes, cache.n_pages)
    counts = [rows] * cache.n_layers
    used = rows * cache.row_bytes
    if rows < cache.n_pages:
        for layer, page_bytes in enumerate(cache.page_bytes):
            if used + page_bytes > n_bytes:
                break
            counts[layer] += 1
            used += page_bytes
    return tuple(counts), used


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive streamed pages of one layer that one copy brings into the ring."""

    layer: int
    page_begin: int
    page_end: int
    arena_offset: int
    n_bytes: int
    read_idx: int = 0
    """Which reading of the layer it is for."""


def build_schedule(layout: Layout, n_sealed_pages: int) -> tuple[Span, ...]:
    """Every span of one step in the order attention reads them; offsets restart at the ring's begin each step.

    A layer streams its sealed pages from R on. A span never wraps round the end of the ring, and ends at a multiple of
    ``span_step`` pages unless it is the layer's last.
    """
    spans: list[Span] = []
    cursor = 0
    for layer, read_idx in _readings(layout.cache):
        page_bytes = layout.cache.page_bytes[layer]
        page_end = layout.resident_pages[layer]
        while page_end < n_sealed_pages:
            page_begin = page_end
            cut = page_begin // layout.span_step * layout.span_step
            page_end = min(cut + layout.span_pages[layer], n_sealed_pages)
            n_bytes = (page_end - page_begin) * page_bytes
            if cursor + n_bytes > layout.stream_bytes:
                cursor = 0
            spans.append(
                Span(
                    layer=layer,
                    page_begin=page_begin,
                    page_end=page_end,
                    arena_offset=layout.stream_offset + cursor,
                    n_bytes=n_bytes,
                    read_idx=read_idx,
                )
            )
            cursor += n_bytes
    return tuple(spans)


def _readings(cache: CacheShape) -> list[tuple[int, int]]:
    """Every (layer, reading of it) of a step, in order."""
    return [(layer, read_idx) for layer in range(cache.n_layers) for read_idx in range(cache.n_reads(layer))]


def streamed_bytes_of_step(layout: Layout, n_past: int) -> int:
    """Bytes that one step beginning at position ``n_past`` must stream: sealed pages beyond R, for every reading."""
    n_sealed = n_past // layout.cache.page_tokens
    return sum(
        max(0, n_sealed - layout.resident_pages[layer]) * layout.cache.page_bytes[layer]
        for layer, _ in _readings(layout.cache)
    )


def split_ubatches(n_tokens: int, n_batch: int, n_ubatch: int) -> tuple[int, ...]:
    """Micro-batch sizes of a prompt: cut into batches first, each batch into micro-batches, as llama.cpp does."""
    sizes: list[int] = []
    for batch_begin in range(0, n_tokens, n_batch):
        batch_tokens = min(n_batch, n_tokens - batch_begin)
        full, rest = divmod(batch_tokens, n_ubatch)
        sizes.extend([n_ubatch] * full + ([rest] if rest else []))
    return tuple(sizes)


def streamed_bytes_of_run(
    prefill: Layout, decode: Layout, *, ubatches: Sequence[int], n_decode_steps: int, n_past: int = 0
) -> int:
    """Bytes streamed by a prompt cut into ``ubatches`` and then ``n_decode_steps`` steps of one token."""
    total = 0
    for n_tokens in ubatches:
        total += streamed_bytes_of_step(prefill, n_past)
        n_past += n_tokens
    for _ in range(n_decode_steps):
        total += streamed_bytes_of_step(decode, n_past)
        n_past += 1
    return total
