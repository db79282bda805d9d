"""Where every page of a sequence is and in which state. Plain integers: no arrays, streams or events.

``PageTable`` decides and returns work as values; ``kv_cache`` performs the work and confirms it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import Enum

from kvs_core.errors import IntegrityError, StateError
from kvs_core.policy import CacheShape, Layout, Span


class PageState(Enum):
    """Life of a page.

    ABSENT   holds no rows yet
    GROWING  the device place is the truth; rows may still be added
    SEALING  full; the copy into the host store is under way
    SEALED   full; the host store is the truth and a device place, if any, is a copy
    """

    ABSENT = "absent"
    GROWING = "growing"
    SEALING = "sealing"
    SEALED = "sealed"


_LEGAL = {
    (PageState.ABSENT, PageState.GROWING),
    (PageState.GROWING, PageState.SEALING),
    (PageState.SEALING, PageState.SEALED),
}

NOT_ON_DEVICE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PageId:
    """A page's identity: which sequence, which KV layer (counted over layers that have KV), which page."""

    sequence: int
    layer: int
    page: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """Copy a full page from the arena into the host store, then confirm with ``confirm_sealed``."""

    page_id: PageId
    arena_offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Copy a growing page to another place in the arena, after the seals returned with it."""

    page_id: PageId
    source_offset: int
    target_offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """Copy a sealed page from the host store to the resident place it has in a new layout."""

    page_id: PageId
    arena_offset: int
    n_bytes: int


class PageTable:
    """States and device places of the pages of one sequence.

    ``sealing`` says whether there is a host store: without one, full pages simply stay GROWING in their places.
    """

    def __init__(self, cache: CacheShape, layout: Layout, *, sealing: bool, sequence: int = 0) -> None:
        self.sequence = sequence
        self.layout = layout
        self._cache = cache
        self._sealing = sealing
        self._states = [[PageState.ABSENT] * cache.n_pages for _ in range(cache.n_layers)]
        self._offsets = [array("q", [NOT_ON_DEVICE] * cache.n_pages) for _ in range(cache.n_layers)]
        self._n_tokens = [0] * cache.n_layers

    def offsets(self, layer: int) -> array[int]:
        """Arena offset of each page of a layer, NOT_ON_DEVICE where there is none; one live int64 buffer."""
        return self._offsets[layer]

    def state(self, layer: int, page: int) -> PageState:
        return self._states[layer][page]

    def n_tokens(self, layer: int) -> int:
        """Rows the layer holds."""
        return self._n_tokens[layer]

    def begin_rows(self, layer: int, n_tokens: int) -> None:
        """Give every page that the next ``n_tokens`` rows of a layer touch a place on the device.

        The first touched page beyond R uses the tail slot, the following ones the fresh slots in order.
        """
        begin_pos = self._n_tokens[layer]
        end_pos = begin_pos + n_tokens
        page_tokens = self._cache.page_tokens
        if end_pos > self._cache.n_pages * page_tokens:
            raise StateError(f"{end_pos} positions do not fit the {self._cache.n_pages} pages of a layer")
        resident = self.layout.resident_pages[layer]
        n_placed = 0
        for page in range(begin_pos // page_tokens, (end_pos - 1) // page_tokens + 1):
            if page < resident:
                place = self.layout.resident_slot_offset(layer, page)
            else:
                place = self._tail_or_fresh(layer, n_placed)
                n_placed += 1
            if self._states[layer][page] is PageState.ABSENT:
                self._enter(layer, page, PageState.GROWING)
                self._offsets[layer][page] = place
            elif self._offsets[layer][page] != place:
                raise IntegrityError(
                    f"growing page {page} of KV layer {layer} lies at {self._offsets[layer][page]}, not {place}"
                )
        self._n_tokens[layer] = end_pos

    def add_rows(self, n_tokens: int) -> None:
        """``begin_rows`` and ``end_rows`` of every layer between steps, where there is no host store."""
        if self._sealing:
            raise StateError("full pages would have to be sealed layer by layer")
        n_before = self._n_tokens[0] if self._n_tokens else 0
        if 0 < n_before % self._cache.page_tokens <= self._cache.page_tokens - n_tokens:
            self._n_tokens = [n_before + n_tokens] * len(self._n_tokens)  # the growing page has its place already
            return
        for layer in range(self._cache.n_layers):
            self.begin_rows(layer, n_tokens)

    def end_rows(self, layer: int, n_tokens: int) -> tuple[list[Seal], list[Move]]:
        """After attention of a step that added ``n_tokens`` rows: seal full pages, put the growing one in its place."""
        if not self._sealing:
            return [], []
        end_pos = self._n_tokens[layer]
        page_tokens = self._cache.page_tokens
        resident = self.layout.resident_pages[layer]
        page_bytes = self._cache.page_bytes[layer]
        seals: list[Seal] = []
        moves: list[Move] = []
        for page in range((end_pos - n_tokens) // page_tokens, (end_pos - 1) // page_tokens + 1):
            offset = self._offsets[layer][page]
            page_id = PageId(sequence=self.sequence, layer=layer, page=page)
            if end_pos >= (page + 1) * page_tokens:
                self._enter(layer, page, PageState.SEALING)
                seals.append(Seal(page_id=page_id, arena_offset=offset, n_bytes=page_bytes))
                if page >= resident:
                    self._offsets[layer][page] = NOT_ON_DEVICE
            elif page >= resident and offset != self.layout.tail_slot_offset(layer):
                target = self.layout.tail_slot_offset(layer)
                moves.append(Move(page_id=page_id, source_offset=offset, target_offset=target, n_bytes=page_bytes))
                self._offsets[layer][page] = target
        return seals, moves

    def confirm_sealed(self, page_id: PageId) -> None:
        """The copy of a ``Seal`` into the host store is complete."""
        self._enter(page_id.layer, page_id.page, PageState.SEALED)

    def enter_ring(self, span: Span) -> None:
        """The pages of a span are in the ring and may be read."""
        page_bytes = self._cache.page_bytes[span.layer]
        for page in range(span.page_begin, span.page_end):
            if self._states[span.layer][page] is not PageState.SEALED:
                raise IntegrityError(f"page {page} of KV layer {span.layer} streams but is not sealed")
            self._offsets[span.layer][page] = span.arena_offset + (page - span.page_begin) * page_bytes

    def leave_ring(self, span: Span) -> None:
        """The pages of a span have been read; their ring bytes may be reused."""
        for page in range(span.page_begin, span.page_end):
            self._offsets[span.layer][page] = NOT_ON_DEVICE

    def switch_layout(self, layout: Layout) -> tuple[list[Move], list[Fill]]:
        """Adopt another phase's layout: moves first, then fills. Pages that lose their place are forgotten."""
        moves: list[Move] = []
        fills: list[Fill] = []
        for layer in range(self._cache.n_layers):
            page_bytes = self._cache.page_bytes[layer]
            before, after = self.layout.resident_pages[layer], layout.resident_pages[layer]
            for page in range(min(before, after), max(before, after)):
                page_id = PageId(sequence=self.sequence, layer=layer, page=page)
                state = self._states[layer][page]
                if state is PageState.ABSENT:
                    break
                if state is PageState.SEALING:
                    raise StateError(f"page {page} of KV layer {layer} is still being sealed at a phase switch")
                place = layout.resident_slot_offset(layer, page) if page < after else layout.tail_slot_offset(layer)
                if state is PageState.GROWING:
                    source = self._offsets[layer][page]
                    moves.append(Move(page_id=page_id, source_offset=source, target_offset=place, n_bytes=page_bytes))
                    self._offsets[layer][page] = place
                elif page < after:
                    fills.append(Fill(page_id=page_id, arena_offset=place, n_bytes=page_bytes))
                    self._offsets[layer][page] = place
                else:
                    self._offsets[layer][page] = NOT_ON_DEVICE
        self.layout = layout
        return moves, fills

    def clear(self) -> None:
        """Forget every page of the sequence."""
        for layer in range(self._cache.n_layers):
            for page in range(self._cache.n_pages):
                if self._states[layer][page] is PageState.ABSENT:
                    break
                self._states[layer][page] = PageState.ABSENT
                self._offsets[layer][page] = NOT_ON_DEVICE
            self._n_tokens[layer] = 0

    def n_resident_pages(self) -> int:
        """Pages that have a place of their own on the device now, growing ones included."""
        return sum(offset != NOT_ON_DEVICE for offsets in self._offsets for offset in offsets)

    def check_integrity(self) -> None:
        """Between steps: every page in the state its rows imply, at its place, and no two at one place."""
        for layer, states in enumerate(self._states):
            taken: dict[int, int] = {}
            for page, state in enumerate(states):
                self._check_page(layer, page, state)
                offset = self._offsets[layer][page]
                if offset != NOT_ON_DEVICE and taken.setdefault(offset, page) != page:
                    raise IntegrityError(f"pages {taken[offset]} and {page} of KV layer {layer} share {offset}")

    def _check_page(self, layer: int, page: int, state: PageState) -> None:
        page_tokens = self._cache.page_tokens
        n_tokens = self._n_tokens[layer]
        resident = page < self.layout.resident_pages[layer]
        if page * page_tokens >= n_tokens:
            expected, places = {PageState.ABSENT}, {NOT_ON_DEVICE}
        else:
            full = (page + 1) * page_tokens <= n_tokens
            own = self.layout.resident_slot_offset(layer, page) if resident else self.layout.tail_slot_offset(layer)
            if full and self._sealing:
                expected = {PageState.SEALING, PageState.SEALED}
                places = {own} if resident else {NOT_ON_DEVICE}
            else:
                expected, places = {PageState.GROWING}, {own}
        if state not in expected or self._offsets[layer][page] not in places:
            raise IntegrityError(
                f"page {page} of KV layer {layer} is {state.value} at {self._offsets[layer][page]}; "
                f"with {n_tokens} rows it should be {'/'.join(sorted(s.value for s in expected))} at {sorted(places)}"
            )

    def _tail_or_fresh(self, layer: int, n_placed: int) -> int:
        if n_placed == 0:
            return self.layout.tail_slot_offset(layer)
        if n_placed > self.layout.fresh_slots:
            raise IntegrityError(
                f"a step needs {n_placed} fresh slots, "
                f"the {self.layout.phase.value} layout has {self.layout.fresh_slots}"
            )
        return self.layout.fresh_slot_offset(n_placed - 1)

    def _enter(self, layer: int, page: int, state: PageState) -> None:
        before = self._states[layer][page]
        if (before, state) not in _LEGAL:
            raise IntegrityError(f"page {page} of KV layer {layer}: {before.value} cannot become {state.value}")
        self._states[layer][page] = state
