"""Steps that work on a part of each head or row: a matrix for each head, the norm of a part, the rotation of a part."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from kvs_core.cpu.elementwise import rms_norm, rms_norm_first, rope, softplus_gate
from kvs_core.cpu.head_matmul import matmul_heads
from kvs_core.cpu.matmul import CpuScratch
from kvs_core.cpu.scratch import matmul_scratch_bytes
from kvs_core.cpu.threads import ThreadTeam
from kvs_core.cpu.weights import load_weight
from kvs_core.errors import KernelArgumentError
from kvs_core.model_shape import RopeKind
from tests.kernels.compare import assert_as_good_as_plain
from tests.kernels.weight_samples import random_weight_bytes
from tests.oracles import rows

SEED = 20261
Floats = NDArray[np.float32]


@pytest.fixture(scope="module")
def team() -> Iterator[ThreadTeam]:
    with ThreadTeam(2) as team:
        yield team


def normal(*shape: int) -> Floats:
    return np.random.default_rng([SEED, *shape]).standard_normal(shape).astype(np.float32)


def product_of(weight_name: str, x: Floats, n_out: int, n_in: int, team: ThreadTeam) -> tuple[Floats, Floats]:
    """What matmul_heads makes of ``x``, in arrays full of nonsense, and the matrices it took."""
    n_tokens, n_head, width = x.shape
    weight_type = GGMLQuantizationType[weight_name]
    packed = random_weight_bytes(np.random.default_rng(SEED), weight_type, n_head * n_out, n_in)
    weight = load_weight(weight_type, n_out=n_head * n_out, n_in=n_in, data=packed)
    out = np.full((n_tokens, n_head, n_out + width - n_in), np.nan, dtype=np.float32)
    inputs, outputs = (np.full(n_tokens * n_head * n, np.nan, dtype=np.float32) for n in (n_in, n_out))
    buffer = np.full(matmul_scratch_bytes(n_in, team.n_threads) // 4, np.nan, dtype=np.float32)
    matmul_heads(weight, x, out, inputs, outputs, CpuScratch(buffer=buffer, team=team))
    return out, rows.unpack(packed, weight_type, n_head * n_out).reshape(n_head, n_out, n_in)


@pytest.mark.parametrize("weight_name", ["F32", "Q8_0"])
@pytest.mark.parametrize(
    ("n_tokens", "width", "n_in", "n_out"), [(1, 192, 128, 96), (7, 64, 64, 48), (70, 96, 32, 160)]
)
def test_each_head_is_multiplied_with_its_matrix_and_the_rest_of_it_follows(
    weight_name: str, n_tokens: int, width: int, n_in: int, n_out: int, team: ThreadTeam
) -> None:
    x = normal(n_tokens, 3, width)
    out, matrices = product_of(weight_name, x, n_out, n_in, team)
    for head_idx, matrix in enumerate(matrices):
        part = np.ascontiguousarray(x[:, head_idx, :n_in])
        exact, plain = rows.matmul(part, matrix), rows.matmul(part, matrix, dtype=np.float32)
        assert_as_good_as_plain(np.ascontiguousarray(out[:, head_idx, :n_out]), exact, plain, times=8.0)
    np.testing.assert_array_equal(out[:, :, n_out:], x[:, :, n_in:])


def test_a_row_has_the_bits_of_the_row_alone(team: ThreadTeam) -> None:
    x = normal(9, 3, 64)
    together, _ = product_of("F32", x, 48, 64, team)
    for token in range(9):
        alone, _ = product_of("F32", x[token : token + 1].copy(), 48, 64, team)
        np.testing.assert_array_equal(alone[0], together[token])


def test_heads_that_do_not_fit_their_matrices_are_refused(team: ThreadTeam) -> None:
    with pytest.raises(KernelArgumentError, match="3 heads of 32"):
        product_of("F32", normal(2, 3, 32), 48, 64, team)


@pytest.mark.parametrize(("n_rows", "width", "n"), [(1, 576, 512), (33, 100, 37), (5, 64, 64)])
def test_the_norm_of_the_first_elements_is_that_of_them_alone(
    n_rows: int, width: int, n: int, team: ThreadTeam
) -> None:
    x, weight = normal(n_rows, width), normal(n)
    wanted = np.empty((n_rows, n), dtype=np.float32)
    rms_norm(np.ascontiguousarray(x[:, :n]), weight, 1e-5, wanted)
    seen = x.copy()
    rms_norm_first(seen, weight, 1e-5, team)
    np.testing.assert_array_equal(seen[:, :n], wanted)
    np.testing.assert_array_equal(seen[:, n:], x[:, n:])
    with pytest.raises(KernelArgumentError, match="or more"):
        rms_norm_first(seen, normal(width + 1), 1e-5, team)


@pytest.mark.parametrize(("n_rows", "n_gates", "n"), [(1, 8, 512), (33, 96, 96), (70, 3, 192)])
def test_each_softplus_gate_is_for_its_own_elements(n_rows: int, n_gates: int, n: int, team: ThreadTeam) -> None:
    gate, x = 4 * normal(n_rows, n_gates), normal(n_rows, n)
    gate[0, 0], gate[-1, -1] = 90.0, -90.0
    factors = np.repeat(np.log1p(np.exp(gate.astype(np.float64))), n // n_gates, axis=1)
    seen = x.copy()
    softplus_gate(gate, seen, team)
    np.testing.assert_allclose(seen, x * factors, rtol=3e-7, atol=1e-38)
    with pytest.raises(KernelArgumentError, match="as many elements for each gate"):
        softplus_gate(gate, normal(n_rows, n + 1), team)


@pytest.mark.parametrize("kind", RopeKind)
@pytest.mark.parametrize(("begin", "n_pairs", "head_dim"), [(128, 32, 192), (5, 9, 40), (0, 16, 64)])
def test_a_rotation_from_an_element_on_is_that_of_the_part_alone(
    kind: RopeKind, begin: int, n_pairs: int, head_dim: int, team: ThreadTeam
) -> None:
    x, freqs = normal(11, 3, head_dim), np.linspace(1.0, 0.01, n_pairs, dtype=np.float32)
    end = begin + 2 * n_pairs
    part = np.ascontiguousarray(x[:, :, begin:end])
    rope(part, 70, freqs, 1.25, kind)
    seen = x.copy()
    rope(seen, 70, freqs, 1.25, kind, team, begin=begin)
    np.testing.assert_array_equal(seen[:, :, begin:end], part)
    np.testing.assert_array_equal(seen[:, :, :begin], x[:, :, :begin])
    np.testing.assert_array_equal(seen[:, :, end:], x[:, :, end:])
    with pytest.raises(KernelArgumentError, match="head_dim >="):
        rope(seen, 70, freqs, 1.25, kind, team, begin=head_dim - 1)
