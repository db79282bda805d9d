"""Loading matrices: fast types stay in place, others become F16, and rows unpack exactly."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from numba import njit
from numpy.typing import NDArray

from kvs_core.cpu import fast_types, weight_blocks
from kvs_core.cpu.simd import HAS_LOOK_UP, store_f32x16
from kvs_core.cpu.weights import FAST_WEIGHT_TYPES, CpuWeight, embed_rows, load_weight
from kvs_core.errors import KernelArgumentError, UnsupportedError
from tests.kernels.weight_samples import random_weight_bytes
from tests.oracles import rows

SEED = 99
TYPES = sorted(FAST_WEIGHT_TYPES, key=lambda weight_type: weight_type.name)
SLOW_TYPES = [GGMLQuantizationType[name] for name in ("IQ2_S", "IQ3_S", "TQ1_0", "TQ2_0")]


def embed(weight: CpuWeight, token_ids: list[int]) -> NDArray[np.float32]:
    out = np.full((len(token_ids), weight.n_in), np.nan, dtype=np.float32)
    embed_rows(weight, np.array(token_ids, dtype=np.int32), out)
    return out


def test_the_planner_knows_the_same_fast_types() -> None:
    assert {weight_type.name for weight_type in FAST_WEIGHT_TYPES} == fast_types.FAST_WEIGHT_TYPES


@pytest.mark.parametrize("weight_type", TYPES, ids=lambda weight_type: weight_type.name)
def test_rows_of_fast_types_unpack_to_the_exact_values(weight_type: GGMLQuantizationType) -> None:
    packed = random_weight_bytes(np.random.default_rng(SEED), weight_type, 50, 768)
    weight = load_weight(weight_type, n_out=50, n_in=768, data=packed)
    token_ids = [49, 0, 7, 7, *range(50)]
    np.testing.assert_array_equal(embed(weight, token_ids), rows.unpack(packed, weight_type, 50)[token_ids])
    assert np.shares_memory(weight.data, packed)
    assert not weight.is_expanded
    assert weight.n_bytes == packed.size


@pytest.mark.parametrize("n_in", [1, 31, 45])
def test_float_rows_of_any_length_unpack(n_in: int) -> None:
    for name in ("F32", "F16", "BF16"):
        weight_type = GGMLQuantizationType[name]
        packed = random_weight_bytes(np.random.default_rng(SEED), weight_type, 5, n_in)
        weight = load_weight(weight_type, n_out=5, n_in=n_in, data=packed)
        np.testing.assert_array_equal(embed(weight, [4, 1]), rows.unpack(packed, weight_type, 5)[[4, 1]])


@pytest.mark.skipif(not HAS_LOOK_UP, reason="this processor has no table look-up: only the portable code exists")
@pytest.mark.parametrize("name", sorted(weight_blocks.LOOK_UP_LOADERS))
def test_table_look_up_and_portable_code_unpack_alike(name: str) -> None:
    kind = weight_blocks.BLOCK_KINDS[name]
    packed = random_weight_bytes(np.random.default_rng(SEED), GGMLQuantizationType[name], 1, 2048)

    def unpack_with(loader: object) -> NDArray[np.float32]:
        load = njit(loader)

        @njit
        def unpack(kind: object, data: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
            for index in range(out.size // 32):
                first, second = load(kind, data, 0, index)
                store_f32x16(out, 32 * index, first)
                store_f32x16(out, 32 * index + 16, second)

        out = np.empty(2048, dtype=np.float32)
        unpack(kind, packed, out)
        return out

    portable = unpack_with(weight_blocks.LOADERS[name])
    np.testing.assert_array_equal(unpack_with(weight_blocks.LOOK_UP_LOADERS[name]), portable)
    np.testing.assert_array_equal(portable, rows.unpack(packed, GGMLQuantizationType[name], 1)[0])


@pytest.mark.parametrize("weight_type", SLOW_TYPES, ids=lambda weight_type: weight_type.name)
def test_other_types_are_expanded_to_f16(weight_type: GGMLQuantizationType) -> None:
    packed = random_weight_bytes(np.random.default_rng(SEED), weight_type, 9, 512)
    weight = load_weight(weight_type, n_out=9, n_in=512, data=packed)
    expected = rows.unpack(packed, weight_type, 9).astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(embed(weight, list(range(9))), expected)
    assert weight.is_expanded
    assert (weight.type, weight.source_type) == (GGMLQuantizationType.F16, weight_type)
    assert weight.n_bytes == 9 * 1024


def test_expanding_in_several_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = random_weight_bytes(np.random.default_rng(SEED), GGMLQuantizationType.TQ2_0, 9, 512)
    whole = load_weight(GGMLQuantizationType.TQ2_0, n_out=9, n_in=512, data=packed)
    monkeypatch.setattr("kvs_core.cpu.weights._EXPAND_CHUNK_WEIGHTS", 1024)
    chunked = load_weight(GGMLQuantizationType.TQ2_0, n_out=9, n_in=512, data=packed)
    np.testing.assert_array_equal(chunked.data, whole.data)


@pytest.mark.parametrize(("scale", "largest"), [(2400.0, "74400"), (np.inf, "inf"), (np.nan, "nan")])
def test_expanding_values_beyond_f16_is_refused(scale: float, largest: str) -> None:
    packed = np.zeros((2, 110), dtype=np.uint8)  # IQ3_S: grid point 0 stands for 1, a scale of 15 for 31
    packed[:, -4:] = 0xFF
    packed[:, :2] = np.array([2000.0], dtype=np.float16).view(np.uint8)
    load_weight(GGMLQuantizationType.IQ3_S, n_out=2, n_in=256, data=packed)
    packed[1, :2] = np.array([scale], dtype=np.float16).view(np.uint8)
    with pytest.raises(UnsupportedError, match=f"IQ3_S reach {largest}, beyond the F16"):
        load_weight(GGMLQuantizationType.IQ3_S, n_out=2, n_in=256, data=packed)


def test_types_that_nothing_can_read_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="weights of type Q8_K cannot be read"):
        load_weight(GGMLQuantizationType.Q8_K, n_out=1, n_in=256, data=bytes(292))


@pytest.mark.parametrize(
    ("n_out", "n_in", "n_bytes", "message"),
    [
        (2, 48, 60, "columns must be a multiple of 32"),
        (2, 64, 79, "79 bytes, needs 80"),
        (2, 64, 81, "81 bytes, needs 80"),
        (0, 64, 0, "0 rows"),
    ],
)
def test_bytes_that_do_not_make_the_matrix_are_refused(n_out: int, n_in: int, n_bytes: int, message: str) -> None:
    load_weight(GGMLQuantizationType.Q4_1, n_out=2, n_in=64, data=bytes(80))
    with pytest.raises(KernelArgumentError, match=message):
        load_weight(GGMLQuantizationType.Q4_1, n_out=n_out, n_in=n_in, data=bytes(n_bytes))


def test_embedding_refuses_what_does_not_fit() -> None:
    weight = load_weight(GGMLQuantizationType.Q4_1, n_out=2, n_in=64, data=bytes(80))
    out = np.empty((2, 64), dtype=np.float32)
    good = np.array([0, 1], dtype=np.int32)
    embed_rows(weight, good, out)
    for bad_ids in (good.astype(np.int64), good[None]):
        with pytest.raises(KernelArgumentError, match="token_ids must be"):
            embed_rows(weight, bad_ids, out)
    for out_of_range in ([0, 2], [-1, 0]):
        with pytest.raises(KernelArgumentError, match="embedding of 2 rows"):
            embed_rows(weight, np.array(out_of_range, dtype=np.int32), out)
    for bad_out in (out[:1], out.astype(np.float64), np.empty((2, 128), dtype=np.float32)[:, ::2]):
        with pytest.raises(KernelArgumentError, match="out must be"):
            embed_rows(weight, good, bad_out)


def test_rows_outside_the_matrix_are_refused() -> None:
    weight = load_weight(GGMLQuantizationType.Q4_1, n_out=2, n_in=64, data=bytes(80))
    assert weight.rows(1, 2).n_out == 1
    for begin, end in ((1, 1), (0, 3), (-1, 1)):
        with pytest.raises(KernelArgumentError, match="weight with 2 rows"):
            weight.rows(begin, end)
