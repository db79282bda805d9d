"""What recurrent layers remember: how large it is, where it lies, and that it is counted in both phases."""

from __future__ import annotations

from dataclasses import replace

from kvs_core.model_shape import LayerCache
from kvs_core.phase import Phase
from kvs_core.plan import plan_run, with_arena
from kvs_core.plan_json import plan_to_json
from kvs_core.recurrent_shape import RecurrentShape
from kvs_core.recurrent_state import place_recurrent
from tests.plan.shapes import LARGE_RECURRENT, make_budget, make_config, make_hybrid_shape, make_shape

SMALL = RecurrentShape(n_head_k=1, n_head_v=1, head_dim=16, n_taps=2, groups_values=False)


def test_bytes_of_a_layer_by_hand() -> None:
    (layer,) = place_recurrent([(0, LARGE_RECURRENT)], begin=0)
    assert layer.conv_bytes == 3 * (2 * 16 + 48) * 128 * 4 == 122_880
    assert layer.state_bytes == 48 * 128 * 128 * 4 == 3_145_728
    assert (layer.arena_offset, layer.state_offset, layer.n_bytes) == (0, 122_880, 122_880 + 3_145_728)


def test_states_lie_one_after_another_on_the_arenas_grid() -> None:
    layers = place_recurrent([(0, SMALL), (1, LARGE_RECURRENT), (5, SMALL)], begin=1000)
    end = 1024
    for layer in layers:
        assert layer.arena_offset == end
        assert layer.state_offset >= layer.arena_offset + layer.conv_bytes
        end = layer.arena_offset + layer.n_bytes
        assert end >= layer.state_offset + layer.state_bytes
        assert layer.arena_offset % 256 == layer.state_offset % 256 == end % 256 == 0
    assert [layer.layer_idx for layer in layers] == [0, 1, 5]


def test_state_does_not_grow_with_the_context_and_is_counted_in_both_phases() -> None:
    shape = make_hybrid_shape()
    states = set()
    for n_ctx in (4096, 65536):
        config = make_config(n_ctx=n_ctx)
        minimum = plan_run(config, shape, make_budget()).minimum_arena_bytes
        for plan in (
            plan_run(config, shape, make_budget()),
            plan_run(with_arena(config, minimum), shape, make_budget()),
        ):
            for phase in Phase:
                layout = plan.layout(phase)
                used = layout.resident_bytes + layout.ring_bytes + layout.state_bytes + layout.workspace_bytes
                assert used + layout.unused_bytes == plan.arena_bytes
                states.add(layout.state_bytes)
            assert plan.cache.n_layers == 10
            assert plan_to_json(plan)["recurrent_layers"] == 20
            assert plan_to_json(plan)["recurrent_bytes"] == plan.recurrent_bytes
    assert states == {20 * (122_880 + 3_145_728)}


def test_state_lies_behind_window_buffers() -> None:
    shape = make_hybrid_shape(SMALL)
    layers = (
        replace(layer, cache=LayerCache.WINDOW_KV, n_swa=512) if layer.layer_idx in (2, 5) else layer
        for layer in shape.layers
    )
    plan = plan_run(make_config(n_ctx=4096), replace(shape, layers=tuple(layers)), make_budget())
    assert plan.recurrent_layers[0].arena_offset == plan.window_bytes > 0
    assert plan.prefill.state_bytes == plan.decode.state_bytes == plan.window_bytes + plan.recurrent_bytes


def test_a_model_without_recurrent_layers_pays_nothing() -> None:
    plan = plan_run(make_config(n_ctx=4096), make_shape(), make_budget())
    assert (plan.recurrent_layers, plan.recurrent_bytes, plan.prefill.state_bytes) == ((), 0, 0)
