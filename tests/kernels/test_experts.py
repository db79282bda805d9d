"""Mixture-of-experts steps: the experts chosen, the order of pairs, and products with each expert's own tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from kvs_core.cpu.experts import Routing, expert_matmul, from_experts, route, sigmoid_gate, to_experts
from kvs_core.cpu.matmul import CpuScratch, matmul
from kvs_core.cpu.scratch import matmul_scratch_bytes
from kvs_core.cpu.threads import ThreadTeam
from kvs_core.cpu.weights import CpuWeight, load_weight
from kvs_core.errors import KernelArgumentError
from kvs_core.expert_shape import ExpertShape
from tests.kernels.compare import assert_as_good_as_plain
from tests.kernels.weight_samples import random_weight_bytes
from tests.oracles import rows

Floats = NDArray[np.float32]
SEED = 815


@pytest.fixture(scope="module")
def team() -> Iterator[ThreadTeam]:
    with ThreadTeam(2) as team:
        yield team


def normal(*shape: int) -> Floats:
    return np.random.default_rng([SEED, *shape]).standard_normal(shape).astype(np.float32)


def routed(logits: Floats, n_used: int, team: ThreadTeam, *, normalises: bool = True) -> Routing:
    """Routing of these logits, in arrays full of nonsense."""
    n_tokens, n_expert = logits.shape
    return route(
        logits,
        ExpertShape(n_expert=n_expert, n_used=n_used, n_ff=1, normalises=normalises),
        ids=np.full((n_tokens, n_used), -7, dtype=np.int32),
        weights=np.full((n_tokens, n_used), np.nan, dtype=np.float32),
        rows=np.full((n_tokens, n_used), -7, dtype=np.int32),
        begins=np.full(n_expert + 1, -7, dtype=np.int32),
        taken=np.full(n_expert, -7, dtype=np.int32),
        team=team,
    )


@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize(("n_tokens", "n_expert", "n_used"), [(1, 8, 2), (1, 1, 1), (3, 5, 5), (77, 128, 8)])
def test_the_likeliest_experts_are_chosen(
    n_tokens: int, n_expert: int, n_used: int, normalises: bool, team: ThreadTeam
) -> None:
    logits = 3 * normal(n_tokens, n_expert)
    routing = routed(logits, n_used, team, normalises=normalises)

    ids = np.argsort(-logits, axis=1, kind="stable")[:, :n_used]
    likely = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    weights = np.take_along_axis(likely / likely.sum(axis=1, keepdims=True), ids, axis=1)
    if normalises:
        weights /= weights.sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(routing.ids, ids)
    np.testing.assert_allclose(routing.weights, weights, rtol=1e-6)


def test_pairs_are_ordered_by_expert_and_then_by_token(team: ThreadTeam) -> None:
    routing = routed(normal(50, 9), 3, team)
    pairs = [(int(expert), token) for token, ids in enumerate(routing.ids) for expert in ids]
    places = {pair: int(row) for pair, row in zip(pairs, routing.rows.ravel(), strict=True)}
    assert [places[pair] for pair in sorted(pairs)] == list(range(150))
    counts = np.bincount(routing.ids.ravel(), minlength=9)
    np.testing.assert_array_equal(routing.begins, np.concatenate([[0], counts.cumsum()]))
    np.testing.assert_array_equal(routing.taken, np.flatnonzero(counts))


def test_equal_logits_prefer_the_lower_index_and_nan_stays_in_range(team: ThreadTeam) -> None:
    logits = np.zeros((3, 6), dtype=np.float32)
    logits[1, 3] = logits[1, 5] = 1.0
    logits[2] = np.nan
    routing = routed(logits, 3, team)
    np.testing.assert_array_equal(routing.ids, [[0, 1, 2], [3, 5, 0], [0, 1, 2]])
    assert np.isnan(routing.weights[2]).all()


def test_experts_that_no_token_takes_are_left_out(team: ThreadTeam) -> None:
    logits = np.zeros((4, 100), dtype=np.float32)
    logits[:, [17, 63]] = 5.0
    routing = routed(logits, 2, team)
    np.testing.assert_array_equal(routing.taken, [17, 63])


def scratch_for(n_in: int, team: ThreadTeam) -> CpuScratch:
    buffer = np.full(matmul_scratch_bytes(n_in, team.n_threads) // 4, np.nan, dtype=np.float32)
    return CpuScratch(buffer=buffer, team=team)


def expert_weight(name: str, n_expert: int, n_out: int, n_in: int, seed: int = 0) -> tuple[CpuWeight, Floats]:
    rng = np.random.default_rng([SEED, seed, n_expert, n_out, n_in])
    packed = random_weight_bytes(rng, GGMLQuantizationType[name], n_expert * n_out, n_in)
    weight = load_weight(GGMLQuantizationType[name], n_out=n_expert * n_out, n_in=n_in, data=packed)
    return weight, rows.unpack(packed, GGMLQuantizationType[name], n_expert * n_out).reshape(n_expert, n_out, n_in)


@pytest.mark.parametrize("names", [("F32", "F32"), ("F32", "Q8_0")])
@pytest.mark.parametrize("n_tokens", [1, 2, 8, 60])
def test_each_pair_is_multiplied_with_its_expert(names: tuple[str, str], n_tokens: int, team: ThreadTeam) -> None:
    """As good as float32, and the bits of the token alone times the expert alone."""
    n_expert, n_used, n_out, n_in = 6, 2, 37, 64
    routing = routed(normal(n_tokens, n_expert), n_used, team)
    samples = [expert_weight(name, n_expert, n_out, n_in, seed) for seed, name in enumerate(names)]
    x = normal(n_tokens, n_in)
    pairs = np.full((n_tokens * n_used, n_in), np.nan, dtype=np.float32)
    to_experts(x, routing, pairs, team)
    outs = [np.full((n_tokens * n_used, n_out), np.nan, dtype=np.float32) for _ in names]
    expert_matmul([weight for weight, _ in samples], routing, pairs, outs, scratch_for(n_in, team))

    for (weight, unpacked), out in zip(samples, outs, strict=True):
        for token in range(n_tokens):
            for expert, row in zip(routing.ids[token], routing.rows[token], strict=True):
                one = x[token : token + 1]
                exact, plain = rows.matmul(one, unpacked[expert]), rows.matmul(one, unpacked[expert], dtype=np.float32)
                assert_as_good_as_plain(out[row : row + 1], exact, plain, times=8.0)  # 37 results: plain may be lucky
                alone = np.empty((1, n_out), dtype=np.float32)
                begin = int(expert) * n_out
                matmul(weight.rows(begin, begin + n_out), one, alone, scratch_for(n_in, team))
                np.testing.assert_array_equal(out[row], alone[0])


@pytest.mark.parametrize("n_tokens", [1, 60])
def test_a_matrix_with_two_outputs_is_two_matrices(n_tokens: int, team: ThreadTeam) -> None:
    """The bits of what is in one apart from each other."""
    n_expert, n_out, n_in = 6, 37, 64
    routing = routed(normal(n_tokens, n_expert), 2, team)
    both, _ = expert_weight("Q8_0", n_expert, 2 * n_out, n_in)
    parts = both.data.reshape(n_expert, 2, n_out, -1)
    halves = [
        load_weight(both.type, n_out=n_expert * n_out, n_in=n_in, data=np.ascontiguousarray(parts[:, i]))
        for i in range(2)
    ]
    pairs = normal(2 * n_tokens, n_in)
    outs, expected = ([np.full((2 * n_tokens, n_out), np.nan, dtype=np.float32) for _ in range(2)] for _ in range(2))
    expert_matmul([both], routing, pairs, outs, scratch_for(n_in, team))
    expert_matmul(halves, routing, pairs, expected, scratch_for(n_in, team))
    np.testing.assert_array_equal(outs, expected)


def test_only_the_experts_taken_are_read(team: ThreadTeam) -> None:
    """The others hold NaN, which would spread."""
    logits = np.full((5, 16), -1.0, dtype=np.float32)
    logits[:, [2, 11]] = 1.0
    routing = routed(logits, 2, team)
    weight, _ = expert_weight("F32", 16, 8, 32)
    values = weight.data.copy().view(np.float32).reshape(16, 8, 32)
    values[np.setdiff1d(np.arange(16), [2, 11])] = np.nan
    poisoned = load_weight(GGMLQuantizationType.F32, n_out=128, n_in=32, data=values)
    pairs = normal(10, 32)
    out, expected = (np.empty((10, 8), dtype=np.float32) for _ in range(2))
    expert_matmul([poisoned], routing, pairs, [out], scratch_for(32, team))
    expert_matmul([weight], routing, pairs, [expected], scratch_for(32, team))
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("n", [1, 16, 45])
def test_pairs_are_summed_with_their_weights(n: int, team: ThreadTeam) -> None:
    routing = routed(normal(9, 7), 3, team)
    pairs = normal(27, n)
    out = np.full((9, n), np.nan, dtype=np.float32)
    from_experts(pairs, routing, out, team)
    picked, weights = pairs[routing.rows], routing.weights[:, :, None]
    exact = (picked.astype(np.float64) * weights).sum(axis=1)
    assert_as_good_as_plain(out, exact, (picked * weights).sum(axis=1), times=4.0)


@pytest.mark.parametrize(("n_in", "n_out"), [(1, 1), (32, 16), (100, 33)])
def test_sigmoid_gate(n_in: int, n_out: int, team: ThreadTeam) -> None:
    x, weight, y = normal(9, n_in), normal(n_in), normal(9, n_out)
    out = y.copy()
    sigmoid_gate(x, weight, out, team)
    exact = y / (1.0 + np.exp(-(x.astype(np.float64) @ weight)))[:, None]
    plain = y / (np.float32(1.0) + np.exp(-(x @ weight)))[:, None]
    assert_as_good_as_plain(out, exact, plain, times=4.0)


def test_what_does_not_fit_together_is_refused(team: ThreadTeam) -> None:
    routing = routed(normal(4, 6), 2, team)
    weight, _ = expert_weight("F32", 6, 8, 32)
    pairs, out = normal(8, 32), np.empty((8, 8), dtype=np.float32)
    scratch = scratch_for(32, team)
    expert_matmul([weight], routing, pairs, [out], scratch)

    with pytest.raises(KernelArgumentError, match="at least as many logits"):
        routed(normal(4, 2), 3, team)
    with pytest.raises(KernelArgumentError, match="pairs is float32"):
        expert_matmul([weight], routing, pairs[:7], [out], scratch)
    with pytest.raises(KernelArgumentError, match="out is float32"):
        expert_matmul([weight], routing, pairs, [out[:, :7]], scratch)
    with pytest.raises(KernelArgumentError, match="expert weights of 47 rows, 32 columns for 6 experts"):
        expert_matmul([weight.rows(0, 47)], routing, pairs, [out], scratch)
    with pytest.raises(KernelArgumentError, match="out is float32"):
        expert_matmul([weight], routing, pairs, [out, out], scratch)
    with pytest.raises(KernelArgumentError, match="1 weights with 3 outputs"):
        expert_matmul([weight], routing, pairs, [out, out, out], scratch)
    with pytest.raises(KernelArgumentError, match="x is float32"):
        to_experts(normal(3, 32), routing, pairs, team)
    with pytest.raises(KernelArgumentError, match="pairs is float32"):
        from_experts(pairs, routing, np.empty((4, 31), dtype=np.float32), team)
    with pytest.raises(KernelArgumentError, match="x is float32"):
        sigmoid_gate(normal(4, 31), normal(32), normal(4, 8), team)
