"""The page table driven by integers: scripted cases, then random runs with every invariant checked."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core import policy
from kvs_core.errors import IntegrityError, StateError
from kvs_core.pages import NOT_ON_DEVICE, PageState, PageTable
from kvs_core.phase import Phase
from kvs_core.policy import CacheShape, Layout, RingPolicy

PAGE_TOKENS = 16
RING = RingPolicy(target_bytes=4096, span_bytes=2048, room_divisor=4)


def make_layout(cache: CacheShape, arena_bytes: int, phase: Phase = Phase.PREFILL, n_tokens: int = 40) -> Layout:
    return policy.plan_streaming(
        phase, cache, RING, arena_bytes=arena_bytes, state_bytes=0, workspace_bytes=0, n_tokens=n_tokens
    )


def make_cache(n_pages: int = 12, page_bytes: tuple[int, ...] = (512, 768)) -> CacheShape:
    return CacheShape(page_tokens=PAGE_TOKENS, page_bytes=page_bytes, n_pages=n_pages)


def step(table: PageTable, n_tokens: int) -> None:
    """What the cache does for one step of every layer, with seals confirmed at once."""
    for layer in range(2):
        table.begin_rows(layer, n_tokens)
        seals, _ = table.end_rows(layer, n_tokens)
        for seal in seals:
            table.confirm_sealed(seal.page_id)
    table.check_integrity()


def test_rows_beyond_the_resident_pages_start_in_the_tail_slot_and_go_on_in_fresh_slots() -> None:
    cache = make_cache()
    layout = make_layout(cache, policy.fixed_bytes(cache, state_bytes=0, workspace_bytes=0, n_tokens=40))
    assert layout.resident_pages == (0, 0)
    table = PageTable(cache, layout, sealing=True)
    table.begin_rows(0, 40)
    assert list(table.offsets(0))[:3] == [
        layout.tail_slot_offset(0),
        layout.fresh_slot_offset(0),
        layout.fresh_slot_offset(1),
    ]
    seals, moves = table.end_rows(0, 40)
    assert [seal.page_id.page for seal in seals] == [0, 1]
    assert [(move.source_offset, move.target_offset) for move in moves] == [
        (layout.fresh_slot_offset(1), layout.tail_slot_offset(0))
    ]


def test_a_full_resident_page_is_sealed_and_keeps_its_place() -> None:
    cache = make_cache()
    layout = make_layout(cache, 20_000)
    assert layout.resident_pages[0] >= 1
    table = PageTable(cache, layout, sealing=True)
    step(table, PAGE_TOKENS)
    assert table.state(0, 0) is PageState.SEALED
    assert table.offsets(0)[0] == layout.resident_slot_offset(0, 0)


def test_without_a_store_full_pages_stay_the_truth_in_their_places() -> None:
    cache = make_cache()
    layout = policy.plan_fully_resident(
        Phase.PREFILL, cache, arena_bytes=cache.total_bytes, state_bytes=0, workspace_bytes=0
    )
    table = PageTable(cache, layout, sealing=False)
    for _ in range(4):
        step(table, 24)
    assert table.state(0, 0) is PageState.GROWING
    assert table.n_resident_pages() == 2 * 6


@pytest.mark.parametrize("n_tokens", [1, 3, 8])
def test_rows_of_all_layers_at_once_leave_the_table_as_layer_by_layer(n_tokens: int) -> None:
    cache = make_cache()
    layout = policy.plan_fully_resident(
        Phase.DECODE, cache, arena_bytes=cache.total_bytes, state_bytes=0, workspace_bytes=0
    )
    apart, together = (PageTable(cache, layout, sealing=False) for _ in range(2))
    for _ in range(2 * PAGE_TOKENS):
        if apart.n_tokens(0) + n_tokens > cache.n_pages * PAGE_TOKENS:
            break
        step(apart, n_tokens)
        together.add_rows(n_tokens)
        together.check_integrity()
        for layer in range(2):
            assert together.n_tokens(layer) == apart.n_tokens(layer)
            assert together.offsets(layer) == apart.offsets(layer)
    assert apart.n_tokens(0) > PAGE_TOKENS
    with pytest.raises(StateError, match="do not fit"):
        together.add_rows(cache.n_pages * PAGE_TOKENS)


def test_rows_of_all_layers_at_once_are_for_caches_without_a_store() -> None:
    cache = make_cache()
    table = PageTable(cache, make_layout(cache, 20_000), sealing=True)
    with pytest.raises(StateError, match="sealed"):
        table.add_rows(1)


def test_switching_to_a_roomier_phase_fills_sealed_pages_and_moves_the_growing_one() -> None:
    cache = make_cache()
    small = make_layout(cache, policy.fixed_bytes(cache, state_bytes=0, workspace_bytes=0, n_tokens=40))
    table = PageTable(cache, small, sealing=True)
    step(table, 40)
    roomy = make_layout(cache, small.arena_bytes + 4 * cache.row_bytes, Phase.DECODE, n_tokens=1)
    assert roomy.resident_pages >= (3, 3)
    moves, fills = table.switch_layout(roomy)
    table.check_integrity()
    assert sorted((fill.page_id.layer, fill.page_id.page) for fill in fills) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [(move.page_id.layer, move.page_id.page) for move in moves] == [(0, 2), (1, 2)]
    back_moves, back_fills = table.switch_layout(small)
    table.check_integrity()
    assert not back_fills
    assert {move.target_offset for move in back_moves} == {small.tail_slot_offset(0), small.tail_slot_offset(1)}


def test_a_page_still_being_sealed_refuses_a_phase_switch() -> None:
    cache = make_cache()
    small = make_layout(cache, policy.fixed_bytes(cache, state_bytes=0, workspace_bytes=0, n_tokens=40))
    table = PageTable(cache, small, sealing=True)
    table.begin_rows(0, PAGE_TOKENS)
    table.end_rows(0, PAGE_TOKENS)
    with pytest.raises(StateError, match="still being sealed"):
        table.switch_layout(make_layout(cache, small.arena_bytes + 4 * cache.row_bytes, Phase.DECODE, n_tokens=1))


def test_more_rows_than_the_context_holds_are_refused() -> None:
    cache = make_cache(n_pages=2)
    table = PageTable(cache, make_layout(cache, 20_000), sealing=True)
    with pytest.raises(StateError, match="33 positions do not fit the 2 pages"):
        table.begin_rows(0, 33)


def test_a_page_that_is_not_sealed_cannot_come_through_the_ring() -> None:
    cache = make_cache()
    table = PageTable(
        cache,
        make_layout(cache, policy.fixed_bytes(cache, state_bytes=0, workspace_bytes=0, n_tokens=40)),
        sealing=True,
    )
    table.begin_rows(0, PAGE_TOKENS)
    table.end_rows(0, PAGE_TOKENS)
    span = policy.Span(layer=0, page_begin=0, page_end=1, arena_offset=0, n_bytes=512)
    with pytest.raises(IntegrityError, match="streams but is not sealed"):
        table.enter_ring(span)


@settings(max_examples=60)
@given(
    extra=st.integers(0, 12_000),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 40)), min_size=1, max_size=14),
)
def test_random_runs_keep_every_invariant(extra: int, steps: list[tuple[bool, int]]) -> None:
    cache = make_cache()
    base = policy.fixed_bytes(cache, state_bytes=0, workspace_bytes=0, n_tokens=40) + extra
    layouts = {
        Phase.PREFILL: make_layout(cache, base),
        Phase.DECODE: make_layout(cache, base, Phase.DECODE, n_tokens=8),
    }
    table = PageTable(cache, layouts[Phase.PREFILL], sealing=True)
    n_past = 0
    for is_decode, wanted in steps:
        phase = Phase.DECODE if is_decode else Phase.PREFILL
        n_tokens = min(wanted, 8) if is_decode else wanted
        if n_past + n_tokens > cache.n_pages * PAGE_TOKENS:
            break
        if table.layout.phase is not phase:
            table.switch_layout(layouts[phase])
            table.check_integrity()
        step(table, n_tokens)
        n_past += n_tokens
        for layer in range(2):
            for page in range(n_past // PAGE_TOKENS):
                if page >= table.layout.resident_pages[layer]:
                    assert table.offsets(layer)[page] == NOT_ON_DEVICE
    table.clear()
    table.check_integrity()
    assert table.n_resident_pages() == 0
