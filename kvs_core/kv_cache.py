"""The KV cache of one sequence at work: performs what the page table and the schedule decide.

It knows pages, spans and copies, nothing about models. One layer of one step goes::

    begin_layer   places for the new rows; waits until the places' previous bytes are sealed
    (caller stores its K and V rows)
    spans         page ranges in logical order, each ready to be read; a streamed one is released after its turn.
                  Once for every layer of the model that attends to these pages
    end_layer     full pages are sealed into the host store, the growing page goes to its slot
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields

from kvs_core.backend import CopyEngine
from kvs_core.errors import StateError
from kvs_core.pages import NOT_ON_DEVICE, PageTable, Seal
from kvs_core.phase import Phase
from kvs_core.plan import RunPlan
from kvs_core.policy import Span, build_schedule


@dataclass(slots=True, kw_only=True)
class StreamCounters:
    """What a session streamed. ``bytes_streamed`` must equal ``predicted_bytes_streamed``, always."""

    pages_resident: int = 0  # pages with a place of their own on the device at the end of the last step
    pages_streamed: int = 0  # pages that came through the ring and were read by attention
    bytes_streamed: int = 0  # bytes of those pages, as the copy engine counted them
    predicted_bytes_streamed: int = 0  # the plan's figure for the same steps
    pages_sealed: int = 0  # full pages copied into the host store
    bytes_sealed: int = 0
    bytes_filled: int = 0  # bytes copied to newly resident places at phase switches
    prefill_steps: int = 0
    decode_steps: int = 0
    decode_steps_in_decode_layout: int = 0
    phase_switches: int = 0

    def reset(self) -> None:
        """Back to nothing, in place: whoever holds the counters sees it."""
        for counter in fields(self):
            setattr(self, counter.name, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepKey:
    """What a schedule depends on; a prepared schedule is used only by the step it was made for."""

    phase: Phase
    n_past: int


@dataclass(slots=True, kw_only=True)
class _Ring:
    """Spans still to be fetched, and spans in the ring that have not been read yet with their copy tickets."""

    queue: deque[Span] = field(default_factory=deque)
    flying: deque[tuple[Span, int]] = field(default_factory=deque)


class KvCache:
    """Pages of one sequence in one arena.

    Why reuse of device bytes is safe. Ring: a span is fetched only when every span whose bytes it overlaps has left
    ``flying``, and a span leaves only after attention over it was asked for; ``CopyEngine.fetch`` orders the copy
    behind that compute. Tail and fresh slots: ``begin_layer`` waits for every seal of earlier layers and steps before
    new rows are written. A streamed page is read from the store only after its seal, because the engine performs
    copies in the order they were asked for.
    """

    def __init__(self, plan: RunPlan, engine: CopyEngine | None, counters: StreamCounters) -> None:
        self._plan = plan
        self._engine = engine
        self._counters = counters
        self._phase = Phase.PREFILL
        self._table = PageTable(plan.cache, plan.prefill, sealing=plan.streams)
        self._ring = _Ring()
        self._prepared: _StepKey | None = None
        self._n_past = 0
        self._step_tokens = 0
        self._sealing: list[tuple[int, Seal]] = []
        self._counted: tuple[Phase, int, int] | None = None

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def n_past(self) -> int:
        """Positions cached so far."""
        return self._n_past

    def offsets(self, layer: int) -> array[int]:
        """Arena offset of each page of a KV layer; a live int64 buffer."""
        return self._table.offsets(layer)

    def enter_phase(self, phase: Phase) -> None:
        """Adopt the layout of a phase: growing pages move, newly resident pages are filled from the store."""
        if phase is self._phase:
            return
        self._drain()
        moves, fills = self._table.switch_layout(self._plan.layout(phase))
        self._phase = phase
        self._counters.phase_switches += 1
        engine = self._engine
        if engine is None:
            return
        for move in moves:
            engine.move(source_offset=move.source_offset, target_offset=move.target_offset, n_bytes=move.n_bytes)
        if self._plan.config.paranoid:
            layout = self._table.layout
            engine.poison(arena_offset=layout.fresh_offset, n_bytes=layout.arena_bytes - layout.fresh_offset)
        tickets = [
            engine.fetch(
                store_offset=self._plan.store_offset(fill.page_id.layer, fill.page_id.page),
                arena_offset=fill.arena_offset,
                n_bytes=fill.n_bytes,
            )
            for fill in fills
        ]
        for ticket in tickets:
            engine.wait(ticket)
            self._counters.bytes_filled += engine.bytes_of(ticket)

    def begin_step(self, n_tokens: int) -> None:
        """A step of ``n_tokens`` rows in the current phase begins; its spans start to flow."""
        key = _StepKey(phase=self._phase, n_past=self._n_past)
        if self._engine is not None and self._prepared != key:
            self._drain()
            self._ring.queue.extend(self._schedule(key))
            self._pump()
        self._prepared = None
        self._step_tokens = n_tokens
        if self._engine is not None:
            self._counters.predicted_bytes_streamed += self._plan.streamed_bytes_of_step(self._phase, self._n_past)
        if self._phase is Phase.PREFILL:
            self._counters.prefill_steps += 1
        else:
            self._counters.decode_steps += 1
            self._counters.decode_steps_in_decode_layout += self._table.layout.phase is Phase.DECODE

    def begin_layer(self, layer: int) -> None:
        """Places for the step's rows of a layer exist and may be written."""
        self._settle_seals()
        self._table.begin_rows(layer, self._step_tokens)

    def spans(self, layer: int) -> Iterator[tuple[int, int]]:
        """Page ranges of a layer in logical order; the caller reads each before asking for the next.

        Resident pages may be read until the layer ends, streamed ones until the next range. The last range ends with
        the pages that the step's own rows lie in: every range costs a call, and a partition of keys that begins in
        a streamed page finds its end there.
        """
        n_pages = -(-(self._n_past + self._step_tokens) // self._plan.cache.page_tokens)
        n_sealed = self._n_past // self._plan.cache.page_tokens
        resident_end = min(self._table.layout.resident_pages[layer], n_pages)
        if self._engine is None or n_sealed <= resident_end:
            yield 0, n_pages
            return
        if resident_end:
            yield 0, resident_end
        for page_begin, page_end in self._streamed(layer, self._engine):
            yield page_begin, n_pages if page_end == n_sealed else page_end

    def end_layer(self, layer: int) -> None:
        """The step's attention over a layer was asked for: seal full pages, move the growing one to its slot."""
        seals, moves = self._table.end_rows(layer, self._step_tokens)
        engine = self._engine
        if engine is None:
            return
        for seal in seals:
            ticket = engine.seal(
                arena_offset=seal.arena_offset,
                store_offset=self._plan.store_offset(layer, seal.page_id.page),
                n_bytes=seal.n_bytes,
            )
            self._sealing.append((ticket, seal))
            self._counters.pages_sealed += 1
            self._counters.bytes_sealed += seal.n_bytes
        for move in moves:
            self._settle_seals()
            engine.move(source_offset=move.source_offset, target_offset=move.target_offset, n_bytes=move.n_bytes)
            if self._plan.config.paranoid:
                engine.poison(arena_offset=move.source_offset, n_bytes=move.n_bytes)

    def replay_layers(self, next_part: Callable[[], None]) -> None:
        """A step whose launches are made again: account for its rows, and ask for its copies at the same places.

        ``next_part`` asks for what a step asks for before, between and after these places (``Session``). Without a
        host store there are none, and the backend has replayed the whole step.
        """
        if self._engine is None:
            self._table.add_rows(self._step_tokens)
            return
        next_part()
        for layer in range(self._plan.cache.n_layers):
            self.begin_layer(layer)
            for _ in range(self._plan.cache.n_reads(layer)):
                next_part()
                for _ in self.spans(layer):
                    next_part()
            self.end_layer(layer)
            next_part()

    def end_step(self, next_phase: Phase | None) -> None:
        """Every layer is done. When the next step's phase is known, its first spans start to flow already."""
        self._n_past += self._step_tokens
        self._step_tokens = 0
        if self._engine is not None and next_phase is self._phase:
            self._settle_seals()
            self._prepared = _StepKey(phase=self._phase, n_past=self._n_past)
            self._ring.queue.extend(self._schedule(self._prepared))
            self._pump()
        page_tokens = self._plan.cache.page_tokens
        counted = (self._phase, self._n_past // page_tokens, -(-self._n_past // page_tokens))
        if counted != self._counted:  # what the number depends on; counting looks at every page
            self._counters.pages_resident = self._table.n_resident_pages()
            self._counted = counted
        if self._plan.config.paranoid:
            self._settle_seals()
            self._table.check_integrity()

    def clear(self) -> None:
        """Forget every position, also after a step that failed half-way."""
        if self._engine is not None:
            self._engine.finish_all()
        self._prepared = None
        self._counted = None
        self._sealing.clear()
        self._ring.queue.clear()
        self._ring.flying.clear()
        self._table.clear()
        self._n_past = 0
        self._step_tokens = 0

    def _schedule(self, key: _StepKey) -> tuple[Span, ...]:
        return build_schedule(self._plan.layout(key.phase), key.n_past // self._plan.cache.page_tokens)

    def _streamed(self, layer: int, engine: CopyEngine) -> Iterator[tuple[int, int]]:
        ring = self._ring
        read_idx: int | None = None
        while True:
            self._pump()
            if not ring.flying:
                return
            span, ticket = ring.flying[0]
            if span.layer != layer or read_idx not in (None, span.read_idx):
                return
            read_idx = span.read_idx
            engine.wait(ticket)
            self._table.enter_ring(span)
            yield span.page_begin, span.page_end
            self._table.leave_ring(span)
            if self._plan.config.paranoid:
                engine.poison(arena_offset=span.arena_offset, n_bytes=span.n_bytes)
            self._counters.pages_streamed += span.page_end - span.page_begin
            self._counters.bytes_streamed += engine.bytes_of(ticket)
            ring.flying.popleft()

    def _pump(self) -> None:
        """Fetch as far ahead as the ring allows: the next span may not overlap one that is still to be read."""
        ring = self._ring
        if self._engine is None:
            raise StateError("there is no host store to stream from")
        while ring.queue:
            span = ring.queue[0]
            end = span.arena_offset + span.n_bytes
            if any(s.arena_offset < end and span.arena_offset < s.arena_offset + s.n_bytes for s, _ in ring.flying):
                return
            ticket = self._engine.fetch(
                store_offset=self._plan.store_offset(span.layer, span.page_begin),
                arena_offset=span.arena_offset,
                n_bytes=span.n_bytes,
            )
            ring.flying.append((span, ticket))
            ring.queue.popleft()

    def _settle_seals(self) -> None:
        """Compute asked for from now on runs after every seal asked for so far."""
        engine = self._engine
        if engine is None:
            return
        for ticket, seal in self._sealing:
            engine.wait(ticket)
            self._table.confirm_sealed(seal.page_id)
            place = self._table.offsets(seal.page_id.layer)[seal.page_id.page]
            if self._plan.config.paranoid and place == NOT_ON_DEVICE:
                engine.poison(arena_offset=seal.arena_offset, n_bytes=seal.n_bytes)
        self._sealing.clear()

    def _drain(self) -> None:
        """Nothing is left in flight: a prepared schedule that will not be used, and pending seals."""
        self._prepared = None
        self._settle_seals()
        self._ring.queue.clear()
        while self._ring.flying:
            _, ticket = self._ring.flying.popleft()
            if self._engine is not None:
                self._engine.wait(ticket)
                self._engine.bytes_of(ticket)
