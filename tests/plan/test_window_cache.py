"""Window buffers: how large they are, where their pages lie, and what steps see of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.phase import Phase
from kvs_core.plan import plan_run, with_arena
from kvs_core.plan_json import plan_to_json
from kvs_core.units import MIB
from kvs_core.window_cache import WindowLayer, count_slots
from tests.kernels.paged_cache import geometry_of
from tests.plan.shapes import make_budget, make_config, make_window_shape


@pytest.mark.parametrize(
    ("n_swa", "n_tokens", "n_slots"),
    # 1023 positions can touch 5 pages of 256, 258 of them 3, 257 of them 2, one of them 1
    [(512, 512, 5), (258, 1, 3), (257, 1, 2), (1, 1, 1), (1, 258, 3), (4096, 512, 19)],
)
def test_slots_of_a_window_by_hand(n_swa: int, n_tokens: int, n_slots: int) -> None:
    assert count_slots(n_swa, n_tokens, 256, 1000) == n_slots


@settings(max_examples=200)
@given(
    n_swa=st.integers(1, 200),
    n_ubatch=st.integers(1, 100),
    first_pos=st.integers(0, 1500),
    n_tokens=st.integers(1, 100),
)
def test_pages_that_a_step_needs_have_places_of_their_own(
    n_swa: int, n_ubatch: int, first_pos: int, n_tokens: int
) -> None:
    geometry = geometry_of(page_tokens=16)
    n_slots = count_slots(n_swa, n_ubatch, 16, 100)
    layer = WindowLayer(layer_idx=0, geometry=geometry, n_swa=n_swa, n_slots=n_slots, n_pages=100, arena_offset=4096)
    n_tokens = min(n_tokens, n_ubatch)
    begin, end = layer.pages_seen(first_pos, n_tokens)

    assert begin * 16 <= max(0, first_pos - n_swa + 1) < (begin + 1) * 16
    assert (end - 1) * 16 <= first_pos + n_tokens - 1 < end * 16
    places = list(layer.page_offsets()[begin:end])
    assert len(set(places)) == end - begin
    assert all(4096 <= place <= 4096 + layer.n_bytes - geometry.page_bytes for place in places)


def test_window_state_does_not_grow_with_the_context_and_is_counted_in_both_phases() -> None:
    shape = make_window_shape()
    states = set()
    for n_ctx in (4096, 65536):
        config = make_config(n_ctx=n_ctx)
        minimum = plan_run(config, shape, make_budget()).minimum_arena_bytes
        for plan in (
            plan_run(config, shape, make_budget()),
            plan_run(with_arena(config, minimum), shape, make_budget()),
        ):
            states |= {plan.layout(phase).state_bytes for phase in Phase}
            for phase in Phase:
                layout = plan.layout(phase)
                used = layout.resident_bytes + layout.ring_bytes + layout.state_bytes + layout.workspace_bytes
                assert used + layout.unused_bytes == plan.arena_bytes
            assert plan.cache.n_layers == 10
            assert plan_to_json(plan)["window_layers"] == 20
            assert plan_to_json(plan)["window_bytes"] == plan.window_bytes
    # 20 layers x 5 pages x 256 positions x 3 heads x 64 x (K and V) x 2 bytes
    assert states == {20 * 5 * 256 * 3 * 64 * 2 * 2}


def test_full_size_windows_hold_the_context() -> None:
    plan = plan_run(make_config(n_ctx=8192, swa_full=True), make_window_shape(), make_budget())
    assert {layer.n_slots for layer in plan.window_layers} == {32}


def test_a_window_beyond_the_context_takes_no_more_than_the_context() -> None:
    plan = plan_run(make_config(n_ctx=1024), make_window_shape(n_swa=4096), make_budget())
    assert {layer.n_slots for layer in plan.window_layers} == {4}
    assert plan.window_bytes < 20 * 5 * MIB
