"""Products with quantised weights: right, the same bits however they are computed, and refused when shapes disagree."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from kvs_core.cpu.matmul import CpuScratch, matmul, matmul_together
from kvs_core.cpu.scratch import DECODE_TOKENS_MAX, matmul_scratch_bytes
from kvs_core.cpu.threads import ThreadTeam
from kvs_core.cpu.weights import FAST_WEIGHT_TYPES, CpuWeight, load_weight
from kvs_core.errors import KernelArgumentError
from tests.kernels.compare import assert_as_good_as_plain
from tests.kernels.weight_samples import random_weight_bytes
from tests.oracles import rows

SEED = 4711
# Compiling a product takes seconds. The types left out differ from others in how blocks unpack, which test_weights
# checks to the last bit for every type.
UNPACKED_ONLY = {"Q2_K", "IQ4_NL", "IQ4_XS"}
TYPES = sorted(
    (weight_type for weight_type in FAST_WEIGHT_TYPES if weight_type.name not in UNPACKED_ONLY),
    key=lambda weight_type: weight_type.name,
)
TOKENS = (1, 2, 3, 7, 8, 9, 17, 64)

# 16 chains of n_in / 16 additions instead of numpy's blocked sums: measured at most 1.3 times numpy's error.
TIMES_PLAIN_ERROR = 3.0


@pytest.fixture(scope="module")
def team() -> Iterator[ThreadTeam]:
    with ThreadTeam(2) as team:
        yield team


def scratch_for(n_in: int, team: ThreadTeam) -> CpuScratch:
    """Scratch full of NaN, so that a read of what was not written shows."""
    buffer = np.full(matmul_scratch_bytes(n_in, team.n_threads) // 4, np.nan, dtype=np.float32)
    return CpuScratch(buffer=buffer, team=team)


def product(weight: CpuWeight, x: NDArray[np.float32], team: ThreadTeam) -> NDArray[np.float32]:
    out = np.full((len(x), weight.n_out), np.nan, dtype=np.float32)
    matmul(weight, x, out, scratch_for(weight.n_in, team))
    return out


def sample(weight_type: GGMLQuantizationType, n_out: int, n_in: int) -> tuple[CpuWeight, NDArray[np.float32]]:
    rng = np.random.default_rng([SEED, n_out, n_in])
    packed = random_weight_bytes(rng, weight_type, n_out, n_in)
    return load_weight(weight_type, n_out=n_out, n_in=n_in, data=packed), rows.unpack(packed, weight_type, n_out)


def activations(n_tokens: int, n_in: int) -> NDArray[np.float32]:
    return np.random.default_rng([SEED, n_tokens, n_in]).standard_normal((n_tokens, n_in)).astype(np.float32)


@pytest.mark.parametrize("weight_type", TYPES, ids=lambda weight_type: weight_type.name)
def test_every_type_and_number_of_tokens_is_as_good_as_float32(
    weight_type: GGMLQuantizationType, team: ThreadTeam
) -> None:
    for n_out, n_in in ((37, 256), (65, 1536)):
        weight, unpacked = sample(weight_type, n_out, n_in)
        for n_tokens in TOKENS:
            x = activations(n_tokens, n_in)
            exact = rows.matmul(x, unpacked)
            plain = rows.matmul(x, unpacked, dtype=np.float32)
            assert_as_good_as_plain(product(weight, x, team), exact, plain, times=TIMES_PLAIN_ERROR)


@pytest.mark.parametrize("weight_type", TYPES, ids=lambda weight_type: weight_type.name)
def test_a_token_has_the_same_bits_alone_and_among_others(weight_type: GGMLQuantizationType, team: ThreadTeam) -> None:
    weight, _ = sample(weight_type, 37, 512)
    x = activations(64, 512)
    alone = np.concatenate([product(weight, x[idx : idx + 1], team) for idx in range(len(x))])
    assert DECODE_TOKENS_MAX == 8
    for n_tokens in TOKENS:
        np.testing.assert_array_equal(product(weight, x[:n_tokens], team), alone[:n_tokens])


@pytest.mark.parametrize("n_threads", [1, 2, 3, 5])
def test_the_number_of_threads_changes_no_bit(n_threads: int, team: ThreadTeam) -> None:
    weight, _ = sample(GGMLQuantizationType.Q4_1, 129, 288)
    with ThreadTeam(n_threads) as other:
        for n_tokens in (1, 5, 50):
            x = activations(n_tokens, 288)
            np.testing.assert_array_equal(product(weight, x, other), product(weight, x, team))


@pytest.mark.parametrize("n_in", [16, 17, 31, 33, 48, 63, 100, 1025, 2049, 3073])
@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_float_weights_may_have_any_number_of_inputs(name: str, n_in: int, team: ThreadTeam) -> None:
    weight, unpacked = sample(GGMLQuantizationType[name], 7, n_in)
    x = activations(101, n_in)
    result = product(weight, x, team)
    plain = rows.matmul(x, unpacked, dtype=np.float32)
    assert_as_good_as_plain(result, rows.matmul(x, unpacked), plain, times=TIMES_PLAIN_ERROR)
    for n_tokens in (1, 8, 97):
        np.testing.assert_array_equal(product(weight, x[:n_tokens], team), result[:n_tokens])


@pytest.mark.parametrize(("n_out", "n_in"), [(1, 32), (2, 4096), (3, 32), (4, 64), (35, 8192), (1000, 32)])
def test_awkward_shapes(n_out: int, n_in: int, team: ThreadTeam) -> None:
    weight, unpacked = sample(GGMLQuantizationType.Q8_0, n_out, n_in)
    for n_tokens in (1, 4, 200):
        x = activations(n_tokens, n_in)
        plain = rows.matmul(x, unpacked, dtype=np.float32)
        assert_as_good_as_plain(product(weight, x, team), rows.matmul(x, unpacked), plain, times=TIMES_PLAIN_ERROR)


@pytest.mark.parametrize(
    "names", [["Q4_1"] * 3, ["Q4_1", "Q4_1", "Q8_0"], ["Q8_0", "Q4_1", "Q8_0", "Q8_0", "Q8_0", "Q8_0"]]
)
@pytest.mark.parametrize("n_tokens", [1, 6, 40])
def test_weights_together_give_the_bits_of_weights_apart(names: list[str], n_tokens: int, team: ThreadTeam) -> None:
    shapes = [64, 21, 9, 1, 33, 50]
    weights = [sample(GGMLQuantizationType[name], n_out, 256)[0] for name, n_out in zip(names, shapes, strict=False)]
    x = activations(n_tokens, 256)
    outs = [np.full((n_tokens, weight.n_out), np.nan, dtype=np.float32) for weight in weights]
    matmul_together(weights, x, outs, scratch_for(256, team))
    for weight, out in zip(weights, outs, strict=True):
        np.testing.assert_array_equal(out, product(weight, x, team))


def test_rows_of_a_weight_give_those_columns_of_the_product(team: ThreadTeam) -> None:
    weight, _ = sample(GGMLQuantizationType.Q5_1, 40, 64)
    x = activations(3, 64)
    np.testing.assert_array_equal(product(weight.rows(8, 29), x, team), product(weight, x, team)[:, 8:29])


def test_no_tokens_are_no_work(team: ThreadTeam) -> None:
    weight, _ = sample(GGMLQuantizationType.Q4_1, 8, 64)
    assert product(weight, np.empty((0, 64), dtype=np.float32), team).shape == (0, 8)


def test_a_nan_stays_with_its_token(team: ThreadTeam) -> None:
    weight, _ = sample(GGMLQuantizationType.Q4_1, 8, 64)
    x = activations(9, 64)
    clean = product(weight, x, team)
    x[4, 17] = np.nan
    result = product(weight, x, team)
    assert np.isnan(result[4]).all()
    np.testing.assert_array_equal(np.delete(result, 4, axis=0), np.delete(clean, 4, axis=0))


def test_what_does_not_fit_together_is_refused(team: ThreadTeam) -> None:
    weight, _ = sample(GGMLQuantizationType.Q4_1, 8, 64)
    scratch = scratch_for(64, team)
    x = activations(2, 64)
    out = np.empty((2, 8), dtype=np.float32)
    matmul(weight, x, out, scratch)

    for bad_x in (x[:, :32], x.astype(np.float64), np.asfortranarray(activations(3, 64))[:2], x[0]):
        with pytest.raises(KernelArgumentError, match="x must be"):
            matmul(weight, bad_x, out, scratch)
    for bad_out in (
        out[:1],
        out.astype(np.float64),
        np.empty((2, 9), dtype=np.float32),
        np.empty((2, 16), np.float32)[:, ::2],
    ):
        with pytest.raises(KernelArgumentError, match="out must be"):
            matmul(weight, x, bad_out, scratch)
    for bad_buffer in (scratch.buffer[:-1], scratch.buffer.astype(np.float64), scratch.buffer[None]):
        with pytest.raises(KernelArgumentError, match="scratch must be"):
            matmul(weight, x, out, CpuScratch(buffer=bad_buffer, team=team))
    with pytest.raises(KernelArgumentError, match="1 weights with 2 outputs"):
        matmul_together([weight], x, [out, out], scratch)


def test_fewer_than_16_inputs_are_refused(team: ThreadTeam) -> None:
    weight, _ = sample(GGMLQuantizationType.F32, 4, 15)
    with pytest.raises(KernelArgumentError, match="15 columns: matmul needs at least 16"):
        product(weight, activations(1, 15), team)
