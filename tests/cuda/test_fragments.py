"""Fragments of the CUDA kernels carried out by numpy: layouts and decoding, without a device."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")

import gguf
from gguf import GGMLQuantizationType

from cuda_kernels.decode_tiles import KeyTile, ValueTile, split_row
from cuda_kernels.weight_units import UNIT_FORMATS, Unit
from cuda_kernels.weights import WeightGeometry
from kvs_core.kv_types import KvType, PageGeometry
from scripts.cuda_checks.paged import make_cache
from scripts.cuda_checks.weights import exact_weights, random_blocks
from tests.cuda.host_layout import laid_out_on_host
from tests.cuda.numpy_emitter import LANES, NumpyEmitter

LANE_WORDS = LANES.astype(np.uint32)


@pytest.mark.parametrize("weight_type", UNIT_FORMATS, ids=lambda weight_type: weight_type.name)
def test_units_decode_to_the_reference_weights(weight_type: GGMLQuantizationType) -> None:
    rng = np.random.default_rng(7)
    geometry = WeightGeometry(weight_type=weight_type, n_rows=3, n_cols=2048)
    blocks = random_blocks(geometry, rng)
    expected = exact_weights(geometry, blocks)
    emit = NumpyEmitter(laid_out_on_host(geometry, blocks))
    unit_format = UNIT_FORMATS[weight_type]

    decoded = np.full((geometry.n_rows, geometry.n_cols), np.nan, np.float32)
    for row in range(geometry.n_rows):
        rows = [
            np.full(32, offset + row * stride, np.int64)
            for offset, stride in zip(geometry.plane_offsets, geometry.row_strides, strict=True)
        ]
        for step in range(geometry.n_cols // unit_format.elements // 32):
            unit = Unit.of(emit, emit.word(step), LANE_WORDS)
            words = unit_format.load(emit, rows, unit)
            assert len(words) == unit_format.n_words
            for group in unit_format.decode(emit, words, unit):
                for i in range(16):
                    quant = emit.int_to_float(emit.signed_byte(group.quants[i // 4], i % 4))
                    shift = np.float32(0.0) if group.shift is None else group.shift
                    decoded[row, group.first + group.further + i] = emit.fma(group.scale, quant, shift)
    np.testing.assert_allclose(decoded, expected, rtol=1e-6, atol=1e-6 * float(np.abs(expected).max()))


def test_byte_products_are_exact_at_their_largest() -> None:
    emit = NumpyEmitter(np.zeros(4, np.uint8))
    a = [emit.word(0x80808080)] * 4  # -128 in every byte
    b = [emit.word(0x81818181)] * 4  # -127
    assert set(emit.dot_bytes(a, b)) == {np.float32(16 * 128 * 127)}


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("kv_type", [KvType.F16, KvType.Q8_0])
@pytest.mark.parametrize("n_lanes", [4, 8])
def test_a_row_is_cut_into_loads_that_cover_it(head_dim: int, kv_type: KvType, n_lanes: int) -> None:
    if head_dim % kv_type.block_elements:
        pytest.skip("a head size that the type cannot hold")
    element_bytes = 2 if kv_type is KvType.F16 else 1
    chunks = split_row(head_dim, element_bytes, n_lanes)
    covered = [dim for chunk in chunks for dim in range(chunk.first_dim, chunk.first_dim + n_lanes * chunk.lane_dims)]
    assert covered == list(range(head_dim))


def test_a_row_that_lanes_cannot_share_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be shared by 8 lanes"):
        split_row(72, 2, 8)


TILE_CASES = [(kv_type, head_dim) for kv_type in (KvType.F16, KvType.Q8_0) for head_dim in (64, 80, 96, 128, 192, 256)]


@pytest.mark.parametrize(
    ("kv_type", "head_dim"), [case for case in TILE_CASES if case[1] % case[0].block_elements == 0]
)
def test_decode_tiles_multiply_as_attention_does(kv_type: KvType, head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    page = PageGeometry(
        page_tokens=64, n_head_kv=1, head_dim_k=head_dim, head_dim_v=head_dim, type_k=kv_type, type_v=kv_type
    )
    cache = make_cache(page, 64, rng)
    queries = rng.standard_normal((8, head_dim)).astype(np.float32)
    at_queries = -(-page.page_bytes // 16) * 16
    memory = np.zeros(at_queries + queries.nbytes, np.uint8)
    memory[: page.page_bytes] = cache.data[0]
    memory[at_queries:] = queries.view(np.uint8).reshape(-1)
    k_tile, v_tile = KeyTile(page.k_region), ValueTile(page.v_region)
    emit = NumpyEmitter(memory, np.zeros(k_tile.query_bytes, np.uint8))
    g, t = LANES // 4, (LANES % 4).astype(np.uint32)
    first_key = 16

    query = k_tile._load_query(emit, (at_queries + g * queries.itemsize * head_dim).astype(np.int64), t, emit.word(1))
    k_tile._store_query(emit, LANE_WORDS * 16, query)
    slots = (first_key + g).astype(np.int64)
    region = page.k_region
    rows, scale_rows = slots * region.row_bytes, region.scale_offset + slots * region.scale_row_bytes
    keys = k_tile._load(emit, rows, scale_rows, t)
    scores = k_tile._scores(emit, LANE_WORDS * 16, keys, t)
    expected = queries.astype(np.float16).astype(np.float64) @ cache.k[first_key : first_key + 16, 0].T
    got = np.zeros((8, 16))
    for i, key in enumerate((2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9)):
        got[g, key] = scores[i]
    tolerance = 2e-3 * float(np.abs(expected).max())  # q8_0 keys are rounded to float16
    np.testing.assert_allclose(got, expected, atol=tolerance)

    weights = rng.random((8, 16)).astype(np.float16)
    slots = (first_key + 2 * t).astype(np.int64)
    region = page.v_region
    rows = page.v_offset + slots * region.row_bytes
    scale_rows = page.v_offset + region.scale_offset + slots * region.scale_row_bytes
    values = v_tile._load(emit, rows, scale_rows, g.astype(np.uint32))
    pairs = [emit.pack_half2(weights[g, 2 * t + j], weights[g, 2 * t + j + 1]) for j in (0, 8)]
    sums = v_tile._accumulate(emit, v_tile._zeros(emit), *pairs, values)
    expected = weights.astype(np.float64) @ cache.v[first_key : first_key + 16, 0]
    got = np.full((8, head_dim), np.nan)
    for group in range(v_tile.n_groups):
        dim = v_tile._first_dim(emit, emit.word(group), g.astype(np.uint32))
        for i in range(4):
            got[2 * t + i % 2, dim + i // 2] = sums[4 * group + i]
    np.testing.assert_allclose(got, expected, atol=2e-3 * float(np.abs(expected).max()))


def test_gguf_knows_every_type_that_has_units() -> None:
    assert {gguf.GGML_QUANT_SIZES[weight_type][0] for weight_type in UNIT_FORMATS} == {32, 256}
