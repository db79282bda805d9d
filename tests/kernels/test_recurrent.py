"""The short convolution and the gated delta net, against float64 and whatever way tokens are cut into steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvs_core.cpu.recurrent import LayerState, delta_net, short_convolution
from kvs_core.cpu.threads import ALONE, ThreadTeam
from kvs_core.errors import KernelArgumentError
from kvs_core.recurrent_shape import RecurrentShape
from tests.kernels.compare import assert_as_good_as_plain
from tests.kernels.recurrent_inputs import EPS, SEED, Floats, Inputs, by_formula, random_inputs
from tests.oracles import delta_net as oracle

SIZES = RecurrentShape(n_head_k=2, n_head_v=4, head_dim=32, n_taps=4, groups_values=False)
SHAPES = [
    SIZES,
    replace(SIZES, groups_values=True, n_head_v=6),
    RecurrentShape(n_head_k=1, n_head_v=1, head_dim=128, n_taps=2, groups_values=False),
    RecurrentShape(n_head_k=3, n_head_v=3, head_dim=16, n_taps=5, groups_values=True),
]


def show(sizes: RecurrentShape) -> str:
    return f"{sizes.n_head_v}-of-{sizes.n_head_k}x{sizes.head_dim}"


@pytest.fixture(scope="module")
def team() -> Iterator[ThreadTeam]:
    with ThreadTeam(2) as team:
        yield team


def empty_state(sizes: RecurrentShape) -> LayerState:
    """Full of NaN: nothing of it may be seen at position 0."""
    return LayerState(
        recurrent=sizes,
        inputs=np.full(sizes.conv_shape, np.nan, np.float32),
        matrices=np.full(sizes.state_shape, np.nan, np.float32),
    )


def run(
    inputs: Inputs, state: LayerState, steps: Sequence[int], team: ThreadTeam = ALONE
) -> tuple[list[Floats], Floats]:
    """Heads of each step, [n_head, n_tokens, head_dim], and the outputs of all tokens, cut into ``steps``."""
    sizes = state.recurrent
    heads_of_steps, outs, begin = [], [], 0
    for n_tokens in steps:
        rows = slice(begin, begin + n_tokens)
        heads = np.full((sizes.n_head, n_tokens, sizes.head_dim), np.nan, np.float32)
        out = np.full((n_tokens, sizes.n_inner), np.nan, np.float32)
        short_convolution(inputs.x[rows], inputs.taps, state, begin, heads, team)
        heads_of_steps.append(heads.copy())
        delta_net(
            heads,
            inputs.beta[rows].copy(),
            inputs.decay[rows].copy(),
            bias=inputs.bias,
            rate=inputs.rate,
            eps=EPS,
            state=state,
            first_pos=begin,
            out=out,
            team=team,
        )
        outs.append(out)
        begin += n_tokens
    return heads_of_steps, np.concatenate(outs)


@pytest.mark.parametrize("n_tokens", [1, 3, 40])
@pytest.mark.parametrize("sizes", SHAPES, ids=show)
def test_a_convolution_is_as_exact_as_float32(sizes: RecurrentShape, n_tokens: int, team: ThreadTeam) -> None:
    inputs = random_inputs(sizes, n_tokens)
    state = empty_state(sizes)
    (heads,), _ = run(inputs, state, [n_tokens], team)
    result = heads.transpose(1, 0, 2).reshape(n_tokens, sizes.n_channels)
    plain = oracle.short_convolution(inputs.x, inputs.taps, dtype=np.float32)
    assert_as_good_as_plain(result, oracle.short_convolution(inputs.x, inputs.taps), plain, times=2.0)
    earlier = np.concatenate([np.zeros(sizes.conv_shape, np.float32), inputs.x])
    np.testing.assert_array_equal(state.inputs, earlier[-(sizes.n_taps - 1) :])


@pytest.mark.parametrize("n_tokens", [1, 2, 17, 130])
@pytest.mark.parametrize("sizes", SHAPES, ids=show)
def test_a_delta_net_is_as_exact_as_float32(sizes: RecurrentShape, n_tokens: int, team: ThreadTeam) -> None:
    inputs = random_inputs(sizes, n_tokens)
    state = empty_state(sizes)
    _, out = run(inputs, state, [n_tokens], team)
    exact, exact_matrices = by_formula(inputs, sizes, np.float64)
    plain, plain_matrices = by_formula(inputs, sizes, np.float32)
    # The heads that go in are float32 already: a convolution's rounding comes on top of that of plain float32.
    assert_as_good_as_plain(out, exact, plain, times=4.0)
    groups = state.matrices.transpose(0, 2, 1, 3).reshape(exact_matrices.shape)
    assert_as_good_as_plain(groups, exact_matrices, plain_matrices, times=4.0)


@pytest.mark.parametrize("steps", [[1] * 77, [5, 1, 1, 64, 6], [64, 13], [2, 75]], ids=str)
@pytest.mark.parametrize("sizes", SHAPES[:2], ids=show)
def test_how_tokens_are_cut_into_steps_changes_no_bit(
    sizes: RecurrentShape, steps: list[int], team: ThreadTeam
) -> None:
    inputs = random_inputs(sizes, 77)
    whole, cut = empty_state(sizes), empty_state(sizes)
    _, at_once = run(inputs, whole, [77])
    _, in_steps = run(inputs, cut, steps, team)
    np.testing.assert_array_equal(in_steps, at_once)
    np.testing.assert_array_equal(cut.inputs, whole.inputs)
    np.testing.assert_array_equal(cut.matrices, whole.matrices)


def test_a_step_at_position_0_forgets_what_was_before() -> None:
    inputs = random_inputs(SIZES, 20)
    state = empty_state(SIZES)
    _, first = run(inputs, state, [20])
    _, second = run(inputs, state, [20])
    np.testing.assert_array_equal(first, second)


def test_keys_of_no_length_and_gates_out_of_range_stay_finite() -> None:
    inputs = random_inputs(SIZES, 6)
    extremes = np.array([[-1e4, -90.0, 0.0, 25.0, 90.0, 1e4]], np.float32).T
    inputs = replace(inputs, x=np.zeros_like(inputs.x), beta=extremes.repeat(4, 1), decay=extremes.repeat(4, 1))
    _, out = run(inputs, empty_state(SIZES), [6])
    np.testing.assert_array_equal(out, 0.0)
    inputs = replace(inputs, x=random_inputs(SIZES, 6).x)
    _, out = run(inputs, empty_state(SIZES), [6])
    assert np.isfinite(out).all()
    assert np.abs(out).max() > 0


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_the_rule_in_chunks_of_tokens_is_the_rule(chunk: int) -> None:
    """What kernels made of matrix products have to compute, for the oracle's sake."""
    rng = np.random.default_rng(SEED)
    q, k = (oracle.unit_heads(rng.standard_normal((100, 24)), EPS) for _ in range(2))
    v, share = rng.standard_normal((100, 24)), rng.random(100)
    log_kept = -np.exp(2 * rng.standard_normal(100))
    out, matrix = oracle.delta_rule(q, k, v, share, log_kept)
    out_of_chunks, matrix_of_chunks = oracle.chunked_delta_rule(q, k, v, share, log_kept, chunk=chunk)
    np.testing.assert_allclose(out_of_chunks, out, atol=1e-12)
    np.testing.assert_allclose(matrix_of_chunks, matrix, atol=1e-12)


def test_what_does_not_fit_together_is_refused() -> None:
    inputs, state = random_inputs(SIZES, 3), empty_state(SIZES)
    heads = np.zeros((SIZES.n_head, 3, SIZES.head_dim), np.float32)
    out = np.zeros((3, SIZES.n_inner), np.float32)

    def run_delta(**changed: object) -> None:
        arguments = {"heads": heads, "beta": inputs.beta, "decay": inputs.decay, "bias": inputs.bias, "out": out}
        arguments |= {"rate": inputs.rate, "eps": EPS, "state": state, "first_pos": 0} | changed
        delta_net(**arguments)  # type: ignore[arg-type]

    for name, array, wrong in (("x", inputs.x[:, :-1], "x is"), ("taps", inputs.taps[1:], "taps is")):
        arguments = {"x": inputs.x, "taps": inputs.taps} | {name: array}
        with pytest.raises(KernelArgumentError, match=wrong):
            short_convolution(arguments["x"], arguments["taps"], state, 0, heads)
    with pytest.raises(KernelArgumentError, match="heads is"):
        short_convolution(inputs.x, inputs.taps, state, 0, heads[1:])
    with pytest.raises(KernelArgumentError, match="share memory"):
        short_convolution(inputs.x, inputs.taps, state, 0, inputs.x.reshape(heads.shape))
    with pytest.raises(KernelArgumentError, match="inputs is"):
        short_convolution(inputs.x, inputs.taps, replace(state, inputs=state.inputs[1:]), 0, heads)
    for name, wrong_array in (
        ("heads", heads[:, :2].copy()),
        ("beta", inputs.beta[:, 1:].copy()),
        ("decay", inputs.decay[:2]),
        ("bias", inputs.bias[1:]),
        ("rate", inputs.rate.astype(np.float64)),
        ("out", out[:, 1:].copy()),
    ):
        with pytest.raises(KernelArgumentError, match=f"{'heads' if name == 'beta' else name} is|{name} is"):
            run_delta(**{name: wrong_array})
    with pytest.raises(KernelArgumentError, match="matrices is"):
        run_delta(state=replace(state, matrices=state.matrices[1:]))
    with pytest.raises(KernelArgumentError, match="a multiple of 16 needed"):
        run_delta(state=replace(state, recurrent=replace(SIZES, head_dim=24)))
