"""Launchers of experts refuse what their kernels do not take, before anything reaches a device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")

from gguf import GGMLQuantizationType as Q

from cuda_kernels import expert_decode
from cuda_kernels.activation import Activation
from cuda_kernels.expert_decode import Router, chooses_in_place, expert_gated, expert_sum, sum_takes_floats
from cuda_kernels.expert_matvec import ExpertMatrix, GatedPair, count_parts
from cuda_kernels.expert_prefill import FEW_PAIRS, MANY_PAIRS, expert_gated_tiles, expert_products, tile_pairs_for
from cuda_kernels.routing import PairOrder, RoutingRule, combine, count_tiles, order_pairs, route
from cuda_kernels.weights import WeightGeometry
from kvs_core.errors import KernelArgumentError
from tests.cuda.test_launchers import DeviceStub

N_EXPERT, N_USED, N_TOKENS, N_IN, N_FF = 6, 2, 3, 256, 64
N_PAIRS = N_TOKENS * N_USED
IDS, MIXTURE = DeviceStub((N_TOKENS, N_USED), np.int32), DeviceStub((N_TOKENS, N_USED))


def matrix(n_rows: int, n_cols: int, weight_type: Q = Q.Q8_0) -> ExpertMatrix:
    geometry = WeightGeometry(weight_type=weight_type, n_rows=N_EXPERT * n_rows, n_cols=n_cols)
    return ExpertMatrix(matrix=DeviceStub((geometry.n_bytes,), np.uint8), geometry=geometry, n_expert=N_EXPERT)


PAIR = GatedPair(gate=matrix(N_FF, N_IN), up=matrix(N_FF, N_IN))
DOWN = matrix(N_IN, N_FF)
ORDER = PairOrder(
    counts=DeviceStub((N_EXPERT,), np.int32),
    rows=IDS,
    tokens=DeviceStub((N_PAIRS,), np.int32),
    begins=DeviceStub((N_EXPERT + 1,), np.int32),
    tiles=DeviceStub((2 + 2 * count_tiles(N_PAIRS, N_EXPERT, FEW_PAIRS),), np.int32),
    tile_pairs=FEW_PAIRS,
)


def gated_arguments() -> dict[str, Any]:
    return {
        "weights": PAIR,
        "ids": IDS,
        "vectors": DeviceStub((N_TOKENS, N_IN), np.int8),
        "scales": DeviceStub((N_TOKENS, N_IN // 16, 2)),
        "out": DeviceStub((N_PAIRS, N_FF)),
        "activation": Activation.SILU,
        "stream": 0,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": None}, "scales go with quantised weights, not Q8_0"),
        ({"vectors": DeviceStub((N_TOKENS, N_IN))}, "vectors: dtype float32, needs int8"),
        ({"vectors": DeviceStub((N_PAIRS, N_IN), np.int8)}, "vectors: shape"),
        ({"ids": DeviceStub((N_TOKENS, 33), np.int32)}, "33 experts a token, needs 1 to 32"),
        ({"out": DeviceStub((N_TOKENS, N_FF))}, "out: shape"),
        ({"weights": GatedPair(gate=PAIR.gate, up=matrix(N_FF, N_IN, Q.Q4_0))}, "gate and up differ"),
        ({"weights": GatedPair(gate=replace(PAIR.gate, n_expert=5), up=None)}, "384 rows of 5 experts"),
        ({"weights": GatedPair(gate=matrix(63, N_IN), up=None)}, "gate and up in one: 63 rows, needs an even number"),
    ],
)
def test_gated_products_of_a_step_refuse(change: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelArgumentError, match=message):
        expert_gated(**{**gated_arguments(), **change})


@pytest.mark.parametrize(
    ("streams", "router", "message"),
    [
        (False, Router(logits=DeviceStub((N_TOKENS, N_EXPERT))), "do not choose in place: route first"),
        (True, Router(logits=DeviceStub((N_TOKENS, N_EXPERT + 1))), r"logits: shape \[3, 7\], needs \[3, 6\]"),
        (
            True,
            Router(logits=DeviceStub((N_TOKENS, N_EXPERT)), scales=DeviceStub((N_USED,))),
            r"scales of experts: shape \[2\], needs \[6\]",
        ),
    ],
)
def test_products_choose_by_logits_that_fit_where_they_can(
    monkeypatch: pytest.MonkeyPatch, streams: bool, router: Router, message: str
) -> None:
    monkeypatch.setattr(expert_decode, "can_stream", lambda: streams)
    with pytest.raises(KernelArgumentError, match=message):
        expert_gated(**gated_arguments(), router=router)
    vectors, scales = DeviceStub((N_PAIRS, N_FF), np.int8), DeviceStub((N_PAIRS, N_FF // 16, 2))
    with pytest.raises(KernelArgumentError, match=message):
        expert_sum(DOWN, IDS, MIXTURE, vectors, scales, DeviceStub((N_TOKENS, N_IN)), stream=0, router=router)


def test_only_the_softmax_over_all_experts_with_weights_divided_by_their_sum_is_chosen_in_place() -> None:
    plain = RoutingRule(weight_scale=2.0)
    assert chooses_in_place(plain, has_bias=False)
    assert not chooses_in_place(plain, has_bias=True)
    for other in ({"by_sigmoid": True}, {"normalises": False}, {"n_groups": 2, "n_groups_used": 1}):
        assert not chooses_in_place(replace(plain, **other), has_bias=False)


def test_only_a_sum_for_one_token_takes_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_decode, "can_stream", lambda: True)
    assert sum_takes_floats(DOWN.geometry, N_IN, 1, N_USED)
    assert not sum_takes_floats(DOWN.geometry, N_IN, 2, N_USED)
    with pytest.raises(KernelArgumentError, match="scales go with quantised weights, not Q8_0"):
        expert_sum(DOWN, IDS, MIXTURE, DeviceStub((N_PAIRS, N_FF)), None, DeviceStub((N_TOKENS, N_IN)), stream=0)


def test_a_sum_takes_a_vector_for_every_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_decode, "can_stream", lambda: False)
    vectors, scales = DeviceStub((N_TOKENS, N_FF), np.int8), DeviceStub((N_TOKENS, N_FF // 16, 2))
    with pytest.raises(KernelArgumentError, match=r"vectors: shape \[3, 64\], needs \[6, 64\]"):
        expert_sum(DOWN, IDS, MIXTURE, vectors, scales, DeviceStub((N_TOKENS, N_IN)), stream=0)


def test_tiles_refuse_arrays_of_another_kind() -> None:
    halves, out = DeviceStub((N_TOKENS, N_IN), np.float16), DeviceStub((N_PAIRS, N_FF))
    with pytest.raises(KernelArgumentError, match="out: dtype float32, needs float16"):
        expert_gated_tiles(PAIR, ORDER, halves, out, activation=Activation.SILU, stream=0)
    inputs, out = DeviceStub((N_TOKENS, N_FF), np.float16), DeviceStub((N_PAIRS, N_IN))
    with pytest.raises(KernelArgumentError, match=r"inputs: shape \[3, 64\], needs \[6, 64\]"):
        expert_products(DOWN, ORDER, inputs, out, stream=0)
    inputs, out, odd = DeviceStub((N_PAIRS, N_FF), np.float16), DeviceStub((N_PAIRS, 33)), matrix(33, N_FF)
    with pytest.raises(KernelArgumentError, match="experts of 33 rows: needs an even number"):
        expert_products(odd, ORDER, inputs, out, stream=0)


@pytest.mark.parametrize(
    ("n_expert", "n_used", "rule", "message"),
    [
        (513, 2, RoutingRule(), "2 of 513 experts, the kernel takes up to 32 of 512"),
        (64, 33, RoutingRule(), "33 of 64 experts"),
        (4, 5, RoutingRule(), "5 of 4 experts"),
        (64, 2, RoutingRule(n_groups=3), "1 of 3 groups of 64 experts for 2"),
        (64, 9, RoutingRule(n_groups=8, n_groups_used=1), "1 of 8 groups of 64 experts for 9"),
    ],
)
def test_routing_refuses(n_expert: int, n_used: int, rule: RoutingRule, message: str) -> None:
    ids, weights = DeviceStub((N_TOKENS, n_used), np.int32), DeviceStub((N_TOKENS, n_used))
    with pytest.raises(KernelArgumentError, match=message):
        route(DeviceStub((N_TOKENS, n_expert)), ids, weights, rule=rule, stream=0)


def test_order_and_sum_of_pairs_refuse() -> None:
    with pytest.raises(KernelArgumentError, match="tiles: shape"):
        order_pairs(IDS, replace(ORDER, tile_pairs=1, tiles=DeviceStub((4,), np.int32)), stream=0)
    with pytest.raises(KernelArgumentError, match="30 columns, needs a multiple of 4"):
        combine(DeviceStub((N_PAIRS, 30)), ORDER, MIXTURE, DeviceStub((N_TOKENS, 30)), stream=0)


def test_tiles_cover_every_pair_however_they_are_spread() -> None:
    """At most one tile of an expert is not full, and no tile is empty."""
    rng = np.random.default_rng(1)
    for n_pairs, n_expert, tile_pairs in ((1, 128, 64), (40, 8, 64), (1000, 128, 64), (32768, 128, 128)):
        counts = np.bincount(rng.integers(0, n_expert, n_pairs), minlength=n_expert)
        for spread in (counts, np.array([n_pairs] + [0] * (n_expert - 1))):
            assert np.sum(-(-spread // tile_pairs)) <= count_tiles(n_pairs, n_expert, tile_pairs)


def test_tiles_and_parts_grow_with_the_work() -> None:
    assert (tile_pairs_for(8 * 512, 128), tile_pairs_for(8 * 4096, 128)) == (FEW_PAIRS, MANY_PAIRS)
    assert [count_parts(n_warps) for n_warps in (1, 3168, 3169, 1 << 20)] == [1, 1, 2, 8]
