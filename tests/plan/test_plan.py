"""Plans as arithmetic: identities, monotony, refusals with figures, and sizes past 2**31."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.config import ArenaMode, ArenaRequest, RunConfig
from kvs_core.device_budget import DeviceBudget, DeviceKind
from kvs_core.errors import PlanError
from kvs_core.expert_shape import ExpertShape
from kvs_core.kv_rotation import Rotation
from kvs_core.kv_types import KvType
from kvs_core.phase import Phase
from kvs_core.plan import RunPlan, plan_run, with_arena
from kvs_core.plan_json import plan_to_json
from kvs_core.plan_memory import check_after_warm_up
from kvs_core.units import GIB, MIB, align_up, show_size
from tests.plan.shapes import make_budget, make_config, make_shape

SHAPE = make_shape()
BUDGET = make_budget()


def plan_with(arena_mib: int, **fields: object) -> RunPlan:
    fields.setdefault("n_ctx", 8192)
    return plan_run(with_arena(make_config(**fields), arena_mib * MIB), SHAPE, BUDGET)


def assert_adds_up(plan: RunPlan) -> None:
    for phase in Phase:
        layout = plan.layout(phase)
        used = layout.resident_bytes + layout.ring_bytes + layout.state_bytes + layout.workspace_bytes
        assert layout.unused_bytes >= 0
        assert used + layout.unused_bytes == layout.arena_bytes == plan.arena_bytes
        assert layout.workspace_bytes == plan.workspace(phase).n_bytes
        n_resident = (min(count, plan.cache.n_pages) for count in layout.resident_pages)
        page_bytes = sum(count * size for count, size in zip(n_resident, plan.cache.page_bytes, strict=True))
        assert layout.resident_bytes == layout.tail_bytes + page_bytes
        assert layout.tail_bytes in (0, plan.cache.row_bytes)
        assert layout.tail_offset + layout.resident_bytes <= layout.fresh_offset
        assert layout.fresh_offset + layout.ring_bytes <= layout.workspace_offset
        assert layout.workspace_offset + layout.workspace_bytes <= layout.arena_bytes


def test_page_bytes_of_smollm2_by_hand() -> None:
    # 256 positions x 3 heads x 64 x (K and V) x 2 bytes
    assert plan_with(0).cache.page_bytes == (256 * 3 * 64 * 2 * 2,) * 30
    # q8_0: one byte a value and one half per 32 values
    assert plan_with(0, type_k=KvType.Q8_0, type_v=KvType.Q8_0).cache.page_bytes[0] == 256 * 3 * 2 * (64 + 4)


@pytest.mark.parametrize(("head_dim", "of_floats", "of_blocks"), [(40, 48, 64), (64, 64, 64), (80, 80, 96)])
def test_heads_are_padded_to_what_a_type_needs(head_dim: int, of_floats: int, of_blocks: int) -> None:
    config = make_config(n_ctx=512, type_k=KvType.F16, type_v=KvType.Q8_0)
    plan = plan_run(config, make_shape(head_dim=head_dim), BUDGET)
    geometry = plan.kv_layers[0].geometry
    assert (geometry.head_dim_k, geometry.head_dim_v) == (of_floats, of_blocks)
    assert plan.cache.page_bytes[0] == align_up(256 * 3 * (2 * of_floats + of_blocks + of_blocks // 16), 256)
    (kernel,) = plan.kernels().values()
    assert (f"heads padded from {head_dim}/{head_dim}" in kernel) is (head_dim < of_blocks)


@pytest.mark.parametrize(
    ("head_dim", "cached", "group"), [(48, 64, 64), (64, 64, 64), (80, 128, 128), (96, 128, 128), (160, 192, 64)]
)
def test_turbo_heads_are_padded_to_a_multiple_of_64(head_dim: int, cached: int, group: int) -> None:
    shape = make_shape(head_dim=head_dim)
    config = make_config(n_ctx=512, type_k=KvType.F16, type_v=KvType.TURBO4)
    plan = plan_run(config, shape, BUDGET)

    geometry = plan.kv_layers[0].geometry
    assert (geometry.head_dim_k, geometry.head_dim_v) == (head_dim, cached)
    assert geometry.v_region.group_elements == group
    payload = 256 * 3 * (2 * head_dim + cached // 2 + 2 * cached // group)
    assert plan.cache.page_bytes == (align_up(payload, 256),) * 30
    rotations = plan.rotations()[0]
    assert rotations.keys is None
    assert rotations.values == Rotation(size=group, is_signed=True)

    arrays = {array.spec.name: array.spec.shape for array in plan.prefill_workspace.arrays}
    assert arrays["attended"] == (512, 9 * head_dim)
    assert arrays["attention_acc"] == (512, 9 * cached)
    padded = {"v_padded": (512, 3 * cached), "attended_padded": (512, 9 * cached)} if cached != head_dim else {}
    assert {name: shape for name, shape in arrays.items() if name.endswith("_padded")} == padded
    assert plan.kernels() == {
        f"f16/turbo4 {head_dim}/{head_dim}": f"cpu: paged attention, f16/turbo4 {head_dim}/{cached} read from the page"
        + (f", heads padded from {head_dim}/{head_dim}" if padded else "")
    }


@settings(max_examples=40)
@given(extra_mib=st.integers(0, 400), n_ctx=st.integers(1, 20_000), n_ubatch=st.sampled_from([1, 32, 512]))
def test_every_region_is_counted_in_both_phases(extra_mib: int, n_ctx: int, n_ubatch: int) -> None:
    fields = {"n_ctx": n_ctx, "n_ubatch": n_ubatch}
    minimum = plan_with(0, **fields).minimum_arena_bytes // MIB
    plan = plan_with(minimum + extra_mib, **fields)
    assert_adds_up(plan)
    assert plan.arena_bytes <= plan.arena_requested_bytes
    assert plan.decode.resident_offset == plan.prefill.resident_offset
    assert plan.decode.tail_offset == plan.prefill.tail_offset


def test_the_smallest_arena_works_and_one_mib_less_is_refused_with_its_figure() -> None:
    minimum = plan_with(0).minimum_arena_bytes // MIB
    assert_adds_up(plan_with(minimum))
    with pytest.raises(
        PlanError, match=rf"arena {minimum - 1} MiB is too small .*-ub 512: needs {minimum} MiB"
    ) as info:
        plan_with(minimum - 1)
    assert f"--kv-stream-arena-mib {minimum}" in str(info.value.hint)
    assert info.value.required_bytes == minimum * MIB


def test_more_arena_never_streams_more() -> None:
    minimum = plan_with(0).minimum_arena_bytes // MIB
    streamed = [plan_with(mib).streamed_bytes_of_run(6000, 100) for mib in range(minimum, minimum + 260, 7)]
    assert streamed == sorted(streamed, reverse=True)
    assert streamed[0] > 0
    assert streamed[-1] == 0


def test_decode_has_at_least_the_resident_pages_of_prefill() -> None:
    plan = plan_with(plan_with(0).minimum_arena_bytes // MIB + 10)
    assert all(b >= a for a, b in zip(plan.prefill.resident_pages, plan.decode.resident_pages, strict=True))
    assert sum(plan.decode.resident_pages) > sum(plan.prefill.resident_pages)


def test_an_arena_larger_than_useful_is_capped_and_the_rest_reported() -> None:
    plan = plan_with(4096)
    assert plan.arena_bytes == plan.useful_arena_bytes < plan.arena_requested_bytes
    assert not plan.streams
    assert plan.store_bytes == 0


def test_without_an_arena_there_is_no_store_and_nothing_streams() -> None:
    plan = plan_with(0)
    assert_adds_up(plan)
    assert (plan.streams, plan.store_bytes, plan.arena_requested_bytes) == (False, 0, 0)
    assert plan.streamed_bytes_of_run(8000, 100) == 0


def test_process_memory_counts_what_no_file_backs(tmp_path: Path) -> None:
    streamed = plan_with(64)
    own_bytes = streamed.process_bytes - streamed.arena_bytes - streamed.store_bytes
    assert 50 * MIB < own_bytes < 200 * MIB

    stored = plan_run(replace(streamed.config, store_path=tmp_path), SHAPE, BUDGET)
    assert stored.process_bytes == own_bytes + stored.arena_bytes
    off = plan_with(0)
    assert off.process_bytes == own_bytes + off.arena_bytes
    expanded = replace(SHAPE, weight_types=(replace(SHAPE.weight_types[0], type_name="IQ2_S"),))
    assert plan_run(streamed.config, expanded, BUDGET).process_bytes == streamed.process_bytes + 2 * 134_000_000
    on_card = plan_run(plan_with(96).config, SHAPE, replace(BUDGET, kind=DeviceKind.CUDA))
    logits_bytes = 4 * 32 * SHAPE.n_vocab
    assert on_card.process_bytes == own_bytes + on_card.host_context_bytes + on_card.store_bytes + logits_bytes
    assert on_card.host_context_bytes > streamed.host_context_bytes == 0
    assert on_card.context_bytes > streamed.context_bytes == 0


def test_auto_takes_what_is_free_up_to_the_useful_size() -> None:
    config = replace(make_config(n_ctx=8192), arena=ArenaRequest(mode=ArenaMode.AUTO))
    roomy = plan_run(config, SHAPE, BUDGET)
    assert roomy.arena_bytes == roomy.useful_arena_bytes
    # weights 94, margin 256, store 180 and 100 MiB for the arena
    tight = plan_run(config, SHAPE, make_budget(free_bytes=(94 + 256 + 180 + 100) * MIB))
    assert 90 * MIB <= tight.arena_bytes <= 100 * MIB
    assert tight.streams


def on_card(free_bytes: int, *, host_free_bytes: int = 64 * GIB) -> DeviceBudget:
    return replace(BUDGET, kind=DeviceKind.CUDA, free_bytes=free_bytes, host_free_bytes=host_free_bytes)


@pytest.mark.parametrize("mode", [ArenaMode.AUTO, ArenaMode.OFF])
@pytest.mark.parametrize("free_mib", [800, 900, 950, 8192])
def test_weights_arena_and_constant_of_a_gpu_never_exceed_what_is_free(mode: ArenaMode, free_mib: int) -> None:
    n_ctx = 700_000 if mode is ArenaMode.AUTO else None
    plan = plan_run(replace(make_config(n_ctx=n_ctx), arena=ArenaRequest(mode=mode)), SHAPE, on_card(free_mib * MIB))
    assert plan.device_bytes + plan.context_bytes + 64 * MIB <= free_mib * MIB
    assert plan.streams is (mode is ArenaMode.AUTO)


def test_the_arena_bounds_the_page_tables_of_the_host_store_on_a_gpu() -> None:
    """2 MiB a GiB of locked host memory, whole tables; so device memory does not depend on the context."""
    plans = [
        plan_run(
            replace(make_config(n_ctx=n_ctx), arena=ArenaRequest(mode=ArenaMode.FIXED, n_bytes=200 * MIB)),
            SHAPE,
            on_card(8 * GIB),
        )
        for n_ctx in (32_768, 262_144, 700_000)
    ]
    for plan in plans:
        assert plan.table_bytes == -(-plan.store_bytes // (512 * 4096)) * 4096 > 0
        assert plan.arena_bytes + plan.table_bytes == plan.arena_requested_bytes == 200 * MIB
        assert plan.prefill.arena_bytes == plan.decode.arena_bytes == plan.arena_bytes
    assert len({plan.device_bytes for plan in plans}) == 1
    assert plans[-1].table_bytes >= 20 * MIB


def test_the_smallest_arena_named_on_a_gpu_works_and_one_less_does_not() -> None:
    config = replace(make_config(n_ctx=700_000), arena=ArenaRequest(mode=ArenaMode.FIXED, n_bytes=MIB))
    with pytest.raises(PlanError) as refused:
        plan_run(config, SHAPE, on_card(8 * GIB))
    minimum = refused.value.required_bytes
    smallest = plan_run(with_arena(config, minimum), SHAPE, on_card(8 * GIB))
    assert smallest.minimum_arena_bytes == minimum
    assert smallest.table_bytes > 0
    with pytest.raises(PlanError, match="is too small for"):
        plan_run(with_arena(config, minimum - MIB), SHAPE, on_card(8 * GIB))


def test_an_arena_that_holds_everything_on_a_gpu_has_no_store_and_no_tables_of_it() -> None:
    streamed = plan_run(
        replace(make_config(n_ctx=32_768), arena=ArenaRequest(mode=ArenaMode.FIXED, n_bytes=200 * MIB)),
        SHAPE,
        on_card(8 * GIB),
    )
    useful = streamed.useful_arena_bytes
    whole = plan_run(with_arena(streamed.config, useful), SHAPE, on_card(8 * GIB))
    assert (whole.streams, whole.table_bytes, whole.arena_bytes) == (False, 0, useful)
    almost = plan_run(with_arena(streamed.config, useful - MIB), SHAPE, on_card(8 * GIB))
    assert almost.streams
    assert almost.arena_bytes + almost.table_bytes == useful - MIB


def test_auto_on_a_gpu_without_room_names_sizes_that_are_not_negative() -> None:
    config = replace(make_config(n_ctx=8192), arena=ArenaRequest(mode=ArenaMode.AUTO))
    with pytest.raises(
        PlanError, match=r"^arena auto: it needs at least 57 MiB beside the 69\d\.\d\d MiB for "
    ) as info:
        plan_run(config, SHAPE, on_card(100 * MIB))
    assert "-" not in str(info.value)
    assert plan_run(config, SHAPE, on_card(info.value.required_bytes + MIB)).streams


def test_what_helps_a_gpu_that_is_too_small_depends_on_what_is_too_large() -> None:
    def hint(config: RunConfig, free_mib: int) -> str:
        with pytest.raises(PlanError) as info:
            plan_run(config, SHAPE, on_card(free_mib * MIB))
        return str(info.value.hint)

    plain = make_config(n_ctx=8192)
    assert hint(plain, 100).startswith("lower -ub, use a model file with smaller weights")
    assert hint(plain, 800).startswith("give --kv-stream-arena-mib auto")
    assert hint(with_arena(plain, 200 * MIB), 800) == "lower --kv-stream-arena-mib, or use auto"


def test_a_gpu_run_needs_host_memory_for_the_store_and_for_the_process() -> None:
    config = with_arena(make_config(n_ctx=32768), 64 * MIB)
    plan = plan_run(config, SHAPE, on_card(8 * GIB))
    assert plan.store_bytes == 720 * MIB
    plan_run(config, SHAPE, on_card(8 * GIB, host_free_bytes=plan.process_bytes))
    with pytest.raises(PlanError, match=r"-c 32768 needs .* of host memory, 720\.00 MiB of it for the host store"):
        plan_run(config, SHAPE, on_card(8 * GIB, host_free_bytes=plan.process_bytes - 1))


def test_context_left_open_is_the_largest_that_fits() -> None:
    assert plan_run(make_config(), SHAPE, BUDGET).n_ctx == 8192
    small = make_budget(free_bytes=480 * MIB)
    plan = plan_run(make_config(), SHAPE, small)
    assert 0 < plan.n_ctx < 8192
    assert plan.n_ctx % 256 == 0
    with pytest.raises(PlanError):
        plan_run(make_config(n_ctx=plan.n_ctx + 256), SHAPE, small)
    with pytest.raises(PlanError):
        plan_run(make_config(fit=False), SHAPE, small)


def test_a_context_beyond_host_memory_is_refused_with_the_figures() -> None:
    with pytest.raises(PlanError, match=r"-c 10000000 needs .* GiB of memory .* GiB are free") as info:
        plan_with(256, n_ctx=10_000_000)
    assert info.value.required_bytes > info.value.available_bytes
    assert info.value.hint == (
        "lower the context (-c), use a smaller KV type, or keep the host store in a file with --kv-stream-store PATH"
    )
    with pytest.raises(PlanError) as without_arena:
        plan_run(make_config(n_ctx=10_000_000), SHAPE, BUDGET)
    assert str(without_arena.value.hint).endswith("or give an arena and --kv-stream-store PATH")
    with_file = replace(with_arena(make_config(n_ctx=8192), 256 * MIB), store_path=Path("store"))
    with pytest.raises(PlanError) as beside_a_file:
        plan_run(with_file, SHAPE, make_budget(free_bytes=300 * MIB))
    assert str(beside_a_file.value.hint).endswith("or use a smaller arena (--kv-stream-arena-mib)")


def test_sizes_beyond_two_to_the_31_are_exact() -> None:
    shape = make_shape(n_layer=32, n_embd=4096, n_head=32, n_head_kv=8, head_dim=128, n_ff=14336)
    plan = plan_run(with_arena(make_config(n_ctx=131072), 2 * GIB), shape, make_budget(free_bytes=64 * GIB))
    assert plan.kv_bytes == 131072 * 32 * 8 * 128 * 2 * 2
    assert plan.store_offset(31, 511) == plan.kv_bytes - plan.cache.page_bytes[31]
    assert plan.streamed_bytes_of_step(Phase.DECODE, 131071) > 2**31


def test_the_same_inputs_give_the_same_plan() -> None:
    assert plan_with(64) == plan_with(64)
    assert plan_to_json(plan_with(64)) == plan_to_json(plan_with(64))


def test_json_carries_the_documented_keys() -> None:
    document = json.loads(json.dumps(plan_to_json(plan_with(64))))
    assert document["minimum_arena_mib"] == plan_with(64).minimum_arena_bytes // MIB
    for phase in ("prefill", "decode"):
        region = document["arena"][phase]
        keys = ("resident_bytes", "ring_bytes", "workspace_bytes", "state_bytes", "unused_bytes")
        assert sum(region[key] for key in keys) == 64 * MIB


def test_free_memory_is_looked_at_again_after_the_warm_up() -> None:
    card = replace(BUDGET, kind=DeviceKind.CUDA, name="card")
    plan = plan_run(plan_with(96).config, SHAPE, card)
    check_after_warm_up(plan, replace(card, free_bytes=64 * MIB))
    with pytest.raises(PlanError, match=r"after the warm-up 63\.00 MiB are free on card") as caught:
        check_after_warm_up(plan, replace(card, free_bytes=63 * MIB))
    assert show_size(card.free_bytes - 63 * MIB) in str(caught.value)
    assert show_size(plan.weights_bytes) in str(caught.value)
    assert caught.value.available_bytes == card.free_bytes
    check_after_warm_up(plan_with(96), replace(BUDGET, free_bytes=0))


def test_weights_take_the_memory_that_the_backend_holds_them_in() -> None:
    """Q3_K stays as it is; IQ3_S becomes F16, as neither backend has a kernel for it."""
    config = plan_with(96).config
    for name, n_bytes in (("Q3_K", SHAPE.tensors_bytes), ("IQ3_S", 2 * 134_000_000)):
        shape = replace(SHAPE, weight_types=(replace(SHAPE.weight_types[0], type_name=name),))
        for kind in DeviceKind:
            assert plan_run(config, shape, replace(BUDGET, kind=kind)).weights_bytes == n_bytes


def test_the_workspace_has_a_row_for_every_pair_of_token_and_expert() -> None:
    experts = ExpertShape(n_expert=64, n_used=6, n_ff=1024, normalises=True)
    shape = replace(SHAPE, layers=tuple(replace(layer, n_ff=0, experts=experts) for layer in SHAPE.layers))
    config = plan_with(0, n_ubatch=100).config
    arrays = {placed.spec.name: placed.spec for placed in plan_run(config, shape, BUDGET).prefill_workspace.arrays}
    assert arrays["router"].shape == (100, 64)
    assert arrays["expert_ids"].n_bytes == arrays["expert_weights"].n_bytes == 4 * 600
    assert arrays["expert_io"].shape == (600, SHAPE.n_embd)
    assert arrays["expert_gate"].shape == arrays["expert_up"].shape == (600, 1024)
    assert arrays["gate"].n_bytes == 0
    assert "branch" not in arrays
