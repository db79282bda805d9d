"""The micro-batch that a GPU's plan chooses: from model, cache types, context and device, never from the arena."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_cli.console import Console
from kvs_cli.evaluation import plan_sides
from kvs_cli.opening import announce_plan
from kvs_cli.render import render_plan
from kvs_core.config import ArenaMode, ArenaRequest
from kvs_core.device_budget import DeviceBudget, DeviceKind
from kvs_core.errors import PlanError
from kvs_core.expert_shape import ExpertShape
from kvs_core.kv_types import KvType, PageGeometry
from kvs_core.model_shape import ModelShape
from kvs_core.phase import Phase
from kvs_core.plan import RunPlan, plan_run, with_arena
from kvs_core.ubatch_choice import choose_ubatch_tokens, tokens_that_hide_copies
from kvs_core.units import GIB, MIB
from tests.plan.shapes import make_budget, make_config, make_shape

N_CTX = 131072
SHAPE = make_shape(n_layer=32, n_embd=4096, n_head=32, n_head_kv=8, head_dim=128, n_ff=14336)
ONE_TO_ONE = make_shape(n_layer=32, n_embd=4096, n_head=32, n_head_kv=32, head_dim=128, n_ff=11008)
WIDE = make_shape(n_layer=80, n_embd=8192, n_head=64, n_head_kv=8, head_dim=128, n_ff=28672)
H200, A100, RTX_3090, RTX_4090, RTX_5090 = (9, 0), (8, 0), (8, 6), (8, 9), (12, 0)


def card(capability: tuple[int, int] | None = H200, total_bytes: int = 139 * GIB) -> DeviceBudget:
    """All its memory free, and more than enough on the host."""
    budget = make_budget(free_bytes=total_bytes)
    return replace(budget, kind=DeviceKind.CUDA, compute_capability=capability, host_free_bytes=1024 * GIB)


def plan_on(budget: DeviceBudget, shape: ModelShape = SHAPE, arena_mib: int = 2048, **fields: Any) -> RunPlan:
    config = make_config(**{"n_ctx": N_CTX, **fields})
    return plan_run(with_arena(config, arena_mib * MIB), shape, budget)


def page(n_head_kv: int = 8, head_dim: int = 128, kv_type: KvType = KvType.F16) -> PageGeometry:
    return PageGeometry(
        page_tokens=256,
        n_head_kv=n_head_kv,
        head_dim_k=head_dim,
        head_dim_v=head_dim,
        type_k=kv_type,
        type_v=kv_type,
    )


def test_every_arena_runs_the_same_micro_batch() -> None:
    off = plan_on(card(), arena_mib=0)
    assert (off.n_ubatch, off.n_batch) == (4096, 4096)
    minimum = off.minimum_arena_bytes // MIB
    for arena_mib in (minimum, minimum + 1, 1024, 2048, 8192, 100_000):
        plan = plan_on(card(), arena_mib=arena_mib)
        assert (plan.n_ubatch, plan.n_batch) == (4096, 4096)
        assert plan.prefill_workspace == off.prefill_workspace
    auto = replace(off.config, arena=ArenaRequest(mode=ArenaMode.AUTO))
    for free_bytes in (6 * GIB, 12 * GIB, 139 * GIB):
        assert plan_run(auto, SHAPE, replace(card(), free_bytes=free_bytes)).n_ubatch == 4096


def test_an_arena_too_small_for_the_choice_is_refused_with_both_ways_out() -> None:
    minimum = plan_on(card()).minimum_arena_bytes // MIB
    with pytest.raises(
        PlanError, match=rf"^arena {minimum - 1} MiB is too small for prefill with -ub 4096: needs {minimum} MiB"
    ) as info:
        plan_on(card(), arena_mib=minimum - 1)
    assert info.value.hint == f"use --kv-stream-arena-mib {minimum} or more, or lower -ub"
    assert plan_on(card(), arena_mib=minimum).streams
    assert plan_on(card(), arena_mib=minimum - 1, n_ubatch=2048).streams


@pytest.mark.parametrize(
    ("capability", "f16", "q8_0"),
    [(H200, 4096, 2048), (A100, 2048, 1024), (RTX_5090, 1024, 512), (RTX_4090, 1024, 512), (RTX_3090, 512, 512)],
)
def test_the_choices_of_the_documentation(capability: tuple[int, int], f16: int, q8_0: int) -> None:
    budget = card(capability, 80 * GIB)
    assert plan_on(budget).n_ubatch == f16
    assert plan_on(budget, type_k=KvType.Q8_0, type_v=KvType.Q8_0).n_ubatch == q8_0


def test_the_rule_by_hand() -> None:
    # f16, 8 K/V heads of 128: 4096 bytes a position take 74.5 ns at 55 GB/s; a token does 2 * 32 * 256 operations with
    # each, 25.0 ps at 655 TFLOP/s
    assert tokens_that_hide_copies([(page(), 32)], H200) == 2978
    assert tokens_that_hide_copies([(page(), 32)] * 3, H200) == 2978
    assert tokens_that_hide_copies([(page(), 32)], (10, 0)) == 1719  # the mma kernel: there is no wgmma
    assert tokens_that_hide_copies([(page(head_dim=80), 32)], H200) == 1719  # nor for this head size
    assert tokens_that_hide_copies([(page(), 32)], (12, 1)) == tokens_that_hide_copies([(page(), 32)], RTX_5090)
    for nothing in (None, (7, 5)):
        assert tokens_that_hide_copies([(page(), 32)], nothing) == 0
    assert tokens_that_hide_copies([], H200) == 0


def test_experts_want_full_tiles() -> None:
    def choose(n_expert: int, n_used: int, capability: tuple[int, int] | None = H200) -> int:
        experts = ExpertShape(n_expert=n_expert, n_used=n_used, n_ff=704, normalises=True)
        attention = [(page(2, 256, KvType.Q8_0), 32)]  # whose copies 512 tokens hide
        return choose_ubatch_tokens(attention, [experts], card(capability), workspace_bytes=lambda n: n)

    assert [choose(*sizes) for sizes in ((8, 2), (32, 4), (128, 8), (256, 8), (512, 8))] == [
        512,
        1024,
        2048,
        4096,
        4096,
    ]
    assert choose(128, 8, None) == 512


@given(
    capability=st.sampled_from([H200, A100, RTX_3090, RTX_4090, RTX_5090, (10, 3)]),
    kv_type=st.sampled_from([KvType.F32, KvType.F16, KvType.Q8_0]),
    n_head_kv=st.sampled_from([1, 2, 8]),
    ratio=st.sampled_from([1, 2, 4, 6, 16]),
    gib=st.integers(2, 200),
    kib=st.integers(1, 1000),
)
def test_more_to_hide_never_lowers_the_choice_and_less_memory_never_raises_it(
    capability: tuple[int, int], kv_type: KvType, n_head_kv: int, ratio: int, gib: int, kib: int
) -> None:
    def choose(kv_type: KvType = kv_type, ratio: int = ratio, gib: int = gib, kib: int = kib) -> int:
        attention = [(page(n_head_kv, kv_type=kv_type), n_head_kv * ratio)]
        return choose_ubatch_tokens(
            attention, [], card(capability, gib * GIB), workspace_bytes=lambda n: 48 * MIB + n * kib * 1024
        )

    chosen = choose()
    assert chosen in (512, 1024, 2048, 4096)
    assert choose(kv_type=KvType.F32) >= choose(kv_type=KvType.F16) >= choose(kv_type=KvType.Q8_0)
    assert choose(ratio=1) >= chosen >= choose(ratio=16)
    assert choose(gib=200) >= chosen >= choose(gib=2)
    assert choose(kib=1) >= chosen >= choose(kib=1000)
    if chosen > 512:
        assert 48 * MIB + chosen * kib * 1024 <= min(GIB, gib * GIB // 32)


@pytest.mark.parametrize("shape", [SHAPE, ONE_TO_ONE, WIDE, make_shape()], ids=["8B", "1:1", "wide", "small"])
@pytest.mark.parametrize("gib", [8, 24, 80, 139])
def test_the_workspace_stays_a_small_part_of_the_device(shape: ModelShape, gib: int) -> None:
    plan = plan_run(make_config(n_ctx=4096), shape, replace(card(H200, gib * GIB), free_bytes=512 * GIB))
    least = plan_run(make_config(n_ctx=4096, n_ubatch=512), shape, replace(card(), free_bytes=512 * GIB))
    room = min(GIB, gib * GIB // 32) + MIB  # the page tables are not weighed
    assert plan.prefill_workspace.n_bytes <= max(room, least.prefill_workspace.n_bytes)
    assert plan.minimum_arena_bytes <= 1200 * MIB


def test_the_context_only_cuts_the_choice() -> None:
    for n_ctx, n_ubatch in ((100, 100), (1000, 1000), (3000, 3000), (4096, 4096), (262144, 4096)):
        plan = plan_on(card(), arena_mib=0, n_ctx=n_ctx)
        assert plan.n_ubatch == n_ubatch
        assert plan.n_batch == min(n_ctx, 4096)
    assert plan_on(card(), arena_mib=0, n_ctx=100).decode.workspace_bytes > 0


def test_what_is_given_is_taken() -> None:
    assert plan_on(card(), n_ubatch=512).n_ubatch == 512
    assert plan_on(card(), n_ubatch=512).n_batch == 2048
    assert plan_on(card(), n_batch=1000).n_ubatch == 1000  # cut out of the batch, as ever
    assert plan_on(card(), n_batch=1000).n_batch == 1000
    assert plan_on(card(), n_batch=8192).n_batch == 8192
    assert plan_on(card(), n_batch=8192).n_ubatch == 4096


def test_the_cpu_keeps_its_default() -> None:
    plan = plan_run(make_config(n_ctx=8192), SHAPE, make_budget(free_bytes=64 * GIB))
    assert (plan.n_ubatch, plan.n_batch, plan.chose_ubatch) == (512, 2048, False)


def test_the_same_card_with_less_free_memory_chooses_the_same() -> None:
    free = [plan_on(replace(card(), free_bytes=size)).n_ubatch for size in (8 * GIB, 60 * GIB)]
    assert free == [4096, 4096]


def test_a_context_left_open_is_still_the_largest_that_fits() -> None:
    budget = replace(card(), free_bytes=5 * GIB)
    shape = replace(SHAPE, n_ctx_train=1 << 20)
    plan = plan_run(make_config(), shape, budget)
    assert 0 < plan.n_ctx < 1 << 20
    with pytest.raises(PlanError):
        plan_run(make_config(n_ctx=plan.n_ctx + 256), shape, budget)


def test_two_sides_take_the_smaller_choice() -> None:
    configs = [make_config(n_ctx=8192, type_k=kv_type, type_v=kv_type) for kv_type in (KvType.F16, KvType.Q8_0)]
    model: Any = SimpleNamespace(shape=SHAPE)
    assert [plan.n_ubatch for plan in plan_sides(model, configs, card())] == [2048, 2048]


def test_the_choice_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    def said(budget: DeviceBudget, **fields: Any) -> str:
        plan = plan_run(make_config(n_ctx=8192, **fields), SHAPE, budget)
        with Console() as console:
            announce_plan(plan, console)
        return capsys.readouterr().err + render_plan(plan)

    chosen = said(card())
    assert "micro-batch: 4096 tokens (chosen for this model, cache and device; -ub sets another)" in chosen
    assert "4096, run 4096 at a time (chosen; -ub sets another)" in chosen
    assert "micro-batch: 512 tokens (a real device may choose more; -ub sets another)" in said(card(None))
    for nothing_chosen in (said(card(), n_ubatch=512), said(make_budget(free_bytes=64 * GIB))):
        assert "micro-batch" not in nothing_chosen
        assert "2048, run 512 at a time\n" in nothing_chosen


def test_phases_of_a_chosen_micro_batch_add_up() -> None:
    plan = plan_on(card(), arena_mib=1024)
    for phase in Phase:
        layout = plan.layout(phase)
        used = layout.resident_bytes + layout.ring_bytes + layout.state_bytes + layout.workspace_bytes
        assert used + layout.unused_bytes == plan.arena_bytes
