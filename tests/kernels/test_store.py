"""Storing K and V rows: the bytes of every type, where they go, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest

from kvs_core.cpu.store import store_kv
from kvs_core.errors import KernelArgumentError
from kvs_core.kv_types import KvType, PageGeometry
from tests.kernels.paged_cache import NAN_BYTE, empty_pages, geometry_of, random_rows
from tests.oracles.attention import read_kv
from tests.oracles.kv_formats import ggml_type, quantise, read_blocks

SEED = 20260


QUANTISED = [kv_type for kv_type in KvType if kv_type.is_quantised]
GGML_TYPES = [kv_type for kv_type in KvType if not kv_type.is_turbo]


@pytest.mark.parametrize("head_dim", [32, 64, 96, 256])
@pytest.mark.parametrize("kv_type", GGML_TYPES)
def test_rows_have_the_bytes_of_the_reference_quantiser(kv_type: KvType, head_dim: int) -> None:
    rng = np.random.default_rng(SEED)
    geometry = geometry_of(n_head_kv=1, head_dim_k=head_dim, type_k=kv_type.value)
    k, v = random_rows(rng, geometry, 75)
    k *= 10.0 ** rng.uniform(-3.0, 3.0, (75, 1, 1)).astype(np.float32)
    v[:20] = np.round(2.0 * v[:20]) + 0.0  # ties between levels, several largest elements; no negative zero
    arena, offsets = empty_pages(rng, geometry, 3)
    store_kv(arena, geometry, offsets, 0, k, v)

    for rows, region, begin in ((k, geometry.k_region, 0), (v, geometry.v_region, geometry.v_offset)):
        expected = quantise(rows[:, 0], kv_type)
        for pos in range(75):
            page = arena[offsets[pos // 32] + begin :]
            np.testing.assert_array_equal(read_blocks(page, region, pos % 32), expected[pos], err_msg=f"row {pos}")


@pytest.mark.parametrize(("type_k", "type_v"), [("f32", "q5_1"), ("q4_0", "f32"), ("q8_0", "bf16")])
def test_keys_and_values_of_different_types_go_to_their_own_regions(type_k: str, type_v: str) -> None:
    rng = np.random.default_rng(SEED)
    geometry = geometry_of(type_k=type_k, type_v=type_v)
    k, v = random_rows(rng, geometry, 75)
    arena, offsets = empty_pages(rng, geometry, 3)
    store_kv(arena, geometry, offsets, 0, k, v)

    stored_k, stored_v = read_kv(arena, geometry, offsets, 75)

    for stored, rows, kv_type in ((stored_k, k, geometry.type_k), (stored_v, v, geometry.type_v)):
        expected = gguf.quants.dequantize(quantise(rows.reshape(-1, 64), kv_type), ggml_type(kv_type))
        np.testing.assert_array_equal(stored, expected.reshape(rows.shape))


@pytest.mark.parametrize(("begin_pos", "n_tokens"), [(0, 1), (31, 1), (31, 2), (32, 32), (5, 70)])
@pytest.mark.parametrize(("type_k", "type_v"), [("q5_1", "f16"), ("turbo3", "turbo4"), ("turbo2", "q8_0")])
def test_only_the_named_rows_change(begin_pos: int, n_tokens: int, type_k: str, type_v: str) -> None:
    rng = np.random.default_rng(SEED)
    geometry = geometry_of(type_k=type_k, type_v=type_v)
    arena, offsets = empty_pages(rng, geometry, 3)
    store_kv(arena, geometry, offsets, begin_pos, *random_rows(rng, geometry, n_tokens))

    is_finite = np.isfinite(np.concatenate(read_kv(arena, geometry, offsets, 96), axis=-1)).all(axis=-1)
    changed = int((arena != NAN_BYTE).sum())

    expected = np.zeros(96, dtype=bool)
    expected[begin_pos : begin_pos + n_tokens] = True
    np.testing.assert_array_equal(is_finite, np.repeat(expected[:, None], geometry.n_head_kv, axis=1))
    row_bytes = sum(r.row_bytes + r.high_row_bytes + r.scale_row_bytes for r in (geometry.k_region, geometry.v_region))
    assert changed <= n_tokens * geometry.n_head_kv * row_bytes


@pytest.mark.parametrize(
    ("type_k", "type_v"),
    [("q8_0", "f16"), ("q5_0", "q4_1"), ("iq4_nl", "bf16"), ("turbo4", "turbo3"), ("turbo2", "q5_1")],
)
def test_rows_stored_one_by_one_have_the_bytes_of_one_call(type_k: str, type_v: str) -> None:
    rng = np.random.default_rng(SEED)
    geometry = geometry_of(type_k=type_k, type_v=type_v)
    arena, offsets = empty_pages(rng, geometry, 2)
    single = arena.copy()
    k, v = random_rows(rng, geometry, 40)
    store_kv(arena, geometry, offsets, 0, k, v)
    for pos in range(40):
        store_kv(single, geometry, offsets, pos, k[pos : pos + 1], v[pos : pos + 1])

    np.testing.assert_array_equal(single, arena)


def test_q8_0_rounds_halves_away_from_zero() -> None:
    geometry = geometry_of(n_head_kv=1, head_dim_k=32, type_k="q8_0")
    row = np.zeros((1, 1, 32), dtype=np.float32)
    row[0, 0, :8] = [127.0, 0.5, -0.5, 1.5, -2.5, 0.49999997, -0.49999997, 126.5]
    arena, offsets = empty_pages(np.random.default_rng(SEED), geometry, 1)
    store_kv(arena, geometry, offsets, 0, row, row)

    quants = arena[offsets[0] :][:8].view(np.int8)

    np.testing.assert_array_equal(quants, [127, 1, -1, 2, -3, 0, 0, 127])


@pytest.mark.parametrize("kv_type", QUANTISED)
@pytest.mark.parametrize("value", [0.0, 1e-38, -1e-42])
def test_blocks_below_the_range_of_half_become_zero(value: float, kv_type: KvType) -> None:
    geometry = geometry_of(n_head_kv=1, head_dim_k=kv_type.block_elements, type_k=kv_type.value)
    row = np.full((1, 1, kv_type.block_elements), value, dtype=np.float32)
    arena, offsets = empty_pages(np.random.default_rng(SEED), geometry, 1)
    store_kv(arena, geometry, offsets, 0, row, row)

    k, v = read_kv(arena, geometry, offsets, 1)

    assert not k.any()
    assert not v.any()


@pytest.mark.parametrize("kv_type", GGML_TYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_stays_visible(kv_type: KvType, value: float) -> None:
    rng = np.random.default_rng(SEED)
    geometry = geometry_of(type_k=kv_type.value)
    arena, offsets = empty_pages(rng, geometry, 1)
    k, v = random_rows(rng, geometry, 2)
    k[1, 0, 40] = value
    store_kv(arena, geometry, offsets, 0, k, v)

    stored, _ = read_kv(arena, geometry, offsets, 2)

    assert not np.isfinite(stored[1, 0, 40])
    assert np.isfinite(stored[0]).all()
    assert np.isfinite(stored[1, 1]).all()


# ---------------------------------------------------------------------------------------------------------
# Refusals: one valid call with one thing changed


def valid_call(geometry: PageGeometry) -> dict[str, object]:
    rng = np.random.default_rng(SEED)
    arena, offsets = empty_pages(rng, geometry, 2)
    k, v = random_rows(rng, geometry, 40)
    return {"arena": arena, "geometry": geometry, "page_offsets": offsets, "begin_pos": 0, "k": k, "v": v}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda call: {"k": call["k"].astype(np.float64)}, "k is float64"),
        (lambda call: {"k": call["k"][:, :, ::2]}, "k is float32"),
        (lambda call: {"v": call["v"][:39]}, "v is float32"),
        (lambda call: {"v": np.asfortranarray(call["v"])}, "not contiguous"),
        (lambda call: {"arena": call["arena"].view(np.int8)}, "arena is int8"),
        (lambda call: {"page_offsets": call["page_offsets"].astype(np.int32)}, "page_offsets is int32"),
        (lambda call: {"page_offsets": call["page_offsets"][:1]}, "positions 0..40"),
        (lambda call: {"begin_pos": -1}, "positions -1..39"),
        (lambda call: {"begin_pos": 25}, "page 2 at byte -1"),
        (lambda call: {"arena": call["arena"][: int(call["page_offsets"].max()) + 1]}, "outside the arena"),
        (lambda call: {"geometry": replace(call["geometry"], page_tokens=24)}, "24 tokens"),
        (lambda call: {"geometry": replace(call["geometry"], head_dim_k=72)}, "head size 72"),
        (lambda call: {"geometry": replace(call["geometry"], head_dim_v=80, type_v=KvType.Q8_0)}, "multiple of 32"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(change, message: str) -> None:
    call = valid_call(geometry_of())
    store_kv(**valid_call(geometry_of()))
    call |= change(call)

    with pytest.raises(KernelArgumentError, match=message):
        store_kv(**call)

    assert (call["arena"].view(np.uint8) == NAN_BYTE).all()
