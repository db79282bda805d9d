"""``--kv-layer-types``: what a SPEC says, and plans whose layers have pages of different sizes."""

from __future__ import annotations

import pytest

from kvs_core.kv_layer_types import MODES, parse_layer_types, types_by_layer
from kvs_core.kv_types import KvType
from kvs_core.phase import Phase
from kvs_core.plan import plan_run, with_arena
from kvs_core.units import MIB
from tests.plan.shapes import make_budget, make_config, make_shape

N_LAYER = 30


def types_of(spec: str, type_k: str = "turbo4", type_v: str = "turbo3") -> list[str]:
    types = types_by_layer(make_shape(), KvType(type_k), KvType(type_v), parse_layer_types(spec))
    assert list(types) == list(range(N_LAYER))
    return [f"{k.value}/{v.value}" for k, v in types.values()]


def expected(changes: dict[int, str], rest: str = "turbo4/turbo3") -> list[str]:
    return [changes.get(layer, rest) for layer in range(N_LAYER)]


@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        ("first2:q8_0", dict.fromkeys((0, 1), "q8_0/q8_0")),
        ("last2:q8_0", dict.fromkeys((28, 29), "q8_0/q8_0")),
        ("3:/f16", {3: "turbo4/f16"}),
        ("3-5:q5_1/", dict.fromkeys((3, 4, 5), "q5_1/turbo3")),
        ("29:f16/q4_0,0-0:bf16", {29: "f16/q4_0", 0: "bf16/bf16"}),
        ("first3:q8_0,1:/f32", {0: "q8_0/q8_0", 1: "q8_0/f32", 2: "q8_0/q8_0"}),
        ("1", dict.fromkeys((0, 1, 2, 3, 26, 27, 28, 29), "q8_0/q8_0")),
        ("2", dict.fromkeys(range(22, 30), "q8_0/q8_0")),
    ],
)
def test_a_spec_names_layers_and_types(spec: str, changes: dict[int, str]) -> None:
    assert types_of(spec) == expected(changes)


@pytest.mark.parametrize("spec", ["first2:q8_0/q8_0,last3:/turbo4", "all:f16/,7:/f32,4-6:q5_1/q4_0,first1:bf16/bf16"])
def test_a_rule_is_shown_as_it_can_be_written(spec: str) -> None:
    assert ",".join(map(str, parse_layer_types(spec))) == spec


def test_modes_for_values_set_the_other_layers_too() -> None:
    assert types_of("7") == expected(dict.fromkeys((0, 1, 28, 29), "turbo4/q8_0"), "turbo4/turbo2")
    assert types_of("5") == expected(dict.fromkeys((0, 1, 28, 29), "turbo4/turbo4"), "turbo4/turbo2")
    assert types_of("6") == expected(dict.fromkeys(range(22, 30), "turbo4/turbo4"), "turbo4/turbo2")
    assert set(MODES) == {"1", "2", "5", "6", "7"}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "'' is not WHERE:TYPES"),
        ("3", r"'3' is not WHERE:TYPES.*modes 1, 2, 5, 6, 7"),
        ("first:q8_0", "'first:q8_0' is not WHERE:TYPES"),
        ("first0:q8_0", "is not WHERE:TYPES"),
        ("first2=q8_0", "is not WHERE:TYPES"),
        ("\u0663:q8_0", "is not WHERE:TYPES"),
        ("first2:q8_0,", "'' is not WHERE:TYPES"),
        ("5-3:q8_0", "'5-3' names no layer"),
        ("all:/", "'all:/' names no type"),
        ("all:", "'all:' names no type"),
        ("all:q8", "'q8' is not one of f32, f16"),
        ("all:q8_0/q4_0/f16", "'q4_0/f16' is not one of"),
    ],
)
def test_what_is_no_spec_is_refused_with_the_part_that_is_not(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_layer_types(spec)


@pytest.mark.parametrize("arena_mib", [0, 60, 75, 100])
def test_pages_of_different_sizes_share_the_arena(arena_mib: int) -> None:
    config = make_config(
        n_ctx=8192,
        type_k=KvType.TURBO4,
        type_v=KvType.TURBO4,
        layer_types=parse_layer_types("first2:f16,last1:q8_0/f32"),
    )
    plan = plan_run(with_arena(config, arena_mib * MIB), make_shape(), make_budget())

    turbo, half, mixed = 256 * 3 * 2 * (32 + 2), 256 * 3 * 2 * 128, 256 * 3 * (64 + 4 + 256)
    assert plan.cache.page_bytes == (half,) * 2 + (turbo,) * 27 + (mixed,)
    assert plan.kv_bytes == 32 * (2 * half + 27 * turbo + mixed)
    assert plan.layers_of_types() == {"f16/f16": 2, "turbo4/turbo4": 27, "q8_0/f32": 1}
    for phase in Phase:
        layout = plan.layout(phase)
        used = layout.resident_bytes + layout.ring_bytes + layout.state_bytes + layout.workspace_bytes
        assert used + layout.unused_bytes == layout.arena_bytes == plan.arena_bytes
        assert layout.unused_bytes >= 0
