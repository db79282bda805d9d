"""Routing by sigmoid, with a bias on the choice, and among groups of experts first."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from kvs_core.cpu.experts import NO_BIAS, Routing, route
from kvs_core.cpu.threads import ThreadTeam
from kvs_core.errors import KernelArgumentError
from kvs_core.expert_shape import ExpertShape, Gating

SEED = 20261
Floats = NDArray[np.float32]


@pytest.fixture(scope="module")
def team() -> Iterator[ThreadTeam]:
    with ThreadTeam(2) as team:
        yield team


def routed(logits: Floats, experts: ExpertShape, team: ThreadTeam, bias: Floats = NO_BIAS) -> Routing:
    n_tokens, n_expert = logits.shape
    return route(
        logits.copy(),
        experts,
        bias=bias,
        ids=np.full((n_tokens, experts.n_used), -7, dtype=np.int32),
        weights=np.full((n_tokens, experts.n_used), np.nan, dtype=np.float32),
        rows=np.full((n_tokens, experts.n_used), -7, dtype=np.int32),
        begins=np.full(n_expert + 1, -7, dtype=np.int32),
        taken=np.full(n_expert, -7, dtype=np.int32),
        team=team,
    )


def expected(logits: Floats, experts: ExpertShape, bias: Floats) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Experts and weights in float64, group by group."""
    exact = logits.astype(np.float64)
    if experts.gating is Gating.SIGMOID:
        likely = 1.0 / (1.0 + np.exp(-exact))
    else:
        likely = np.exp(exact - exact.max(axis=1, keepdims=True))
        likely /= likely.sum(axis=1, keepdims=True)
    scores = likely + (bias if bias.size else 0.0)
    grouped = scores.reshape(len(scores), experts.n_groups, -1)
    if experts.n_groups > 1:
        best_two = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
        used = np.argsort(-best_two, axis=1, kind="stable")[:, : experts.n_groups_used]
        is_used = np.zeros(best_two.shape, dtype=bool)
        np.put_along_axis(is_used, used, True, axis=1)
        scores = np.where(is_used[:, :, None], grouped, -np.inf).reshape(scores.shape)
    ids = np.argsort(-scores, axis=1, kind="stable")[:, : experts.n_used]
    weights = np.take_along_axis(likely, ids, axis=1)
    if experts.normalises:
        weights /= weights.sum(axis=1, keepdims=True)
    return ids, weights * experts.weight_scale


@pytest.mark.parametrize("gating", Gating)
@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("n_expert", "n_used", "n_groups", "n_groups_used"), [(256, 8, 8, 4), (12, 3, 4, 2), (64, 6, 1, 1), (6, 6, 3, 3)]
)
def test_experts_and_weights_are_those_of_the_formulas(
    gating: Gating,
    normalises: bool,
    has_bias: bool,
    n_expert: int,
    n_used: int,
    n_groups: int,
    n_groups_used: int,
    team: ThreadTeam,
) -> None:
    rng = np.random.default_rng([SEED, n_expert])
    logits = rng.standard_normal((45, n_expert), dtype=np.float32)
    bias = rng.standard_normal(n_expert, dtype=np.float32) if has_bias else NO_BIAS
    experts = ExpertShape(
        n_expert=n_expert,
        n_used=n_used,
        n_ff=1,
        normalises=normalises,
        gating=gating,
        weight_scale=2.5,
        n_groups=n_groups,
        n_groups_used=n_groups_used,
    )
    routing = routed(logits, experts, team, bias)
    ids, weights = expected(logits, experts, bias)
    np.testing.assert_array_equal(routing.ids, ids)
    np.testing.assert_allclose(routing.weights, weights, rtol=1e-6)


def test_among_equals_the_lower_group_and_the_lower_expert_come_first_and_nan_stays_in_range(team: ThreadTeam) -> None:
    experts = ExpertShape(
        n_expert=8, n_used=3, n_ff=1, normalises=True, gating=Gating.SIGMOID, n_groups=4, n_groups_used=2
    )
    logits = np.zeros((2, 8), dtype=np.float32)
    logits[1] = np.nan
    routing = routed(logits, experts, team)
    np.testing.assert_array_equal(routing.ids[0], [0, 1, 2])
    np.testing.assert_allclose(routing.weights[0], 1 / 3, rtol=1e-6)
    assert ((routing.ids[1] >= 0) & (routing.ids[1] < 8)).all()
    assert np.isnan(routing.weights[1]).all()


@pytest.mark.parametrize(("n_groups", "n_groups_used"), [(5, 2), (4, 1)])
def test_groups_that_cannot_hold_the_experts_of_a_token_are_refused(
    n_groups: int, n_groups_used: int, team: ThreadTeam
) -> None:
    experts = ExpertShape(n_expert=8, n_used=3, n_ff=1, normalises=True, n_groups=n_groups, n_groups_used=n_groups_used)
    with pytest.raises(KernelArgumentError, match="groups of 8 experts"):
        routed(np.zeros((2, 8), dtype=np.float32), experts, team)
