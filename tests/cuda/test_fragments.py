"""Fragments of the CUDA kernels carried out by numpy: layouts and decoding, without a device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")

import gguf
from gguf import GGMLQuantizationType

from cuda_kernels.decode_codes import split_row, table_of, word_elements
from cuda_kernels.decode_tiles import N_SHARES, TILE_KEYS, KeyTile, are_keys_apart
from cuda_kernels.decode_values import ValueTile
from cuda_kernels.unit_formats import Unit, UnitFormat
from cuda_kernels.weight_units import PAIR_FORMATS, UNIT_FORMATS
from cuda_kernels.weights import WeightGeometry
from kvs_core.kv_types import KvType, PageGeometry, RegionGeometry
from scripts.cuda_checks.paged import make_cache
from scripts.cuda_checks.weights import exact_weights, random_blocks
from tests.cuda.host_layout import laid_out_on_host
from tests.cuda.numpy_emitter import LANES, NumpyEmitter

LANE_WORDS = LANES.astype(np.uint32)


@pytest.mark.parametrize(
    ("weight_type", "formats"),
    [(weight_type, formats) for formats in (UNIT_FORMATS, PAIR_FORMATS) for weight_type in formats],
    ids=lambda given: given.name if isinstance(given, GGMLQuantizationType) else "",
)
def test_units_decode_to_the_reference_weights(
    weight_type: GGMLQuantizationType, formats: dict[GGMLQuantizationType, UnitFormat]
) -> None:
    rng = np.random.default_rng(7)
    geometry = WeightGeometry(weight_type=weight_type, n_rows=3, n_cols=2048)
    blocks = random_blocks(geometry, rng)
    expected = exact_weights(geometry, blocks)
    emit = NumpyEmitter(laid_out_on_host(geometry, blocks))
    unit_format = formats[weight_type]

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
                    if group.summands is not None:
                        two = group.summands[i // 4 * 2 : i // 4 * 2 + 2]
                        added = [emit.int_to_float(emit.signed_byte(word, i % 4)) for word in two]
                        np.testing.assert_array_equal(added[0] + added[1], quant)
                    shift = np.float32(0.0) if group.shift is None else group.shift
                    decoded[row, group.first + group.further + i] = emit.fma(group.scale, quant, shift)
    np.testing.assert_allclose(decoded, expected, rtol=1e-6, atol=1e-6 * float(np.abs(expected).max()))


def test_byte_products_are_exact_at_their_largest() -> None:
    emit = NumpyEmitter(np.zeros(4, np.uint8))
    a = [emit.word(0x80808080)] * 4  # -128 in every byte
    b = [emit.word(0x81818181)] * 4  # -127
    assert set(emit.dot_bytes(a, b)) == {np.float32(16 * 128 * 127)}


def region_of(kv_type: KvType, head_dim: int) -> RegionGeometry:
    return RegionGeometry(kv_type=kv_type, head_dim=head_dim, page_tokens=64)


HEAD_DIMS = (64, 80, 96, 128, 192, 256)
REGIONS = [
    (kv_type, head_dim) for kv_type in KvType for head_dim in HEAD_DIMS if head_dim % kv_type.block_elements == 0
]


def is_shared(kv_type: KvType, head_dim: int, n_lanes: int) -> bool:
    return kv_type.is_turbo or head_dim % (n_lanes * word_elements(kv_type)) == 0


@pytest.mark.parametrize(("kv_type", "head_dim"), REGIONS)
@pytest.mark.parametrize("n_lanes", [4, 8])
def test_a_row_is_cut_into_loads_that_cover_it(kv_type: KvType, head_dim: int, n_lanes: int) -> None:
    region = region_of(kv_type, head_dim)
    if not is_shared(kv_type, head_dim, n_lanes):
        with pytest.raises(ValueError, match=f"cannot be shared by {n_lanes} lanes"):
            split_row(region, n_lanes)
        return
    chunks = split_row(region, n_lanes)
    covered = [dim for chunk in chunks for dim in range(chunk.first_dim, chunk.first_dim + n_lanes * chunk.lane_dims)]
    assert covered == list(range(head_dim))
    assert sum(chunk.n_words * chunk.word_bytes for chunk in chunks) * n_lanes == region.row_bytes


def tile_cases() -> Iterator[tuple[KvType, int, int]]:
    """Every type and head size that fragments take, tiles of 16 and of 32 keys in turn."""
    for i, (kv_type, head_dim) in enumerate(REGIONS):
        if kv_type is not KvType.F32 and is_shared(kv_type, head_dim, 8):
            yield kv_type, head_dim, 1 + i % 2
            if kv_type in (KvType.TURBO3, KvType.Q5_1, KvType.Q8_0) and head_dim == 128:
                yield kv_type, head_dim, 2 - i % 2


@pytest.mark.parametrize(("kv_type", "head_dim", "n_subs"), list(tile_cases()))
def test_decode_tiles_multiply_as_attention_does(kv_type: KvType, head_dim: int, n_subs: int) -> None:
    rng = np.random.default_rng(head_dim)
    page = PageGeometry(
        page_tokens=64, n_head_kv=1, head_dim_k=head_dim, head_dim_v=head_dim, type_k=kv_type, type_v=kv_type
    )
    n_keys = TILE_KEYS * n_subs
    cache = make_cache(page, 64, rng)
    queries = rng.standard_normal((8, head_dim)).astype(np.float32)
    at_queries = -(-page.page_bytes // 16) * 16
    memory = np.zeros(at_queries + queries.nbytes, np.uint8)
    memory[: page.page_bytes] = cache.data[0]
    memory[at_queries:] = queries.view(np.uint8).reshape(-1)
    k_tile = KeyTile(page.k_region, n_subs, are_apart=are_keys_apart(page.v_region))
    v_tile = ValueTile(page.v_region, n_subs)
    table = table_of(kv_type, 32)
    at_table = k_tile.query_bytes
    emit = NumpyEmitter(memory, np.zeros(at_table + (table.n_bytes if table else 0), np.uint8))
    if table:
        table._fill(emit, emit.word(at_table), LANE_WORDS)
    column = LANE_WORDS * np.uint32(4) + np.uint32(at_table)
    g, t = LANES // 4, (LANES % 4).astype(np.uint32)
    row_of_key = row_of_keys(k_tile, emit, n_keys)
    first_key = 64 - n_keys
    slot = np.full(32, first_key, np.uint32)
    shown = slice(first_key, first_key + n_keys)

    row = (at_queries + g * queries.itemsize * head_dim).astype(np.int64)
    if n_subs == 1 and k_tile.can_share_query:
        for warp in range(N_SHARES):
            k_tile._share_query(emit, LANE_WORDS * 16, row, t, emit.word(1), emit.word(warp))
    else:
        k_tile._store_query(emit, LANE_WORDS * 16, k_tile._load_query(emit, row, t, emit.word(1)))
    keys = k_tile._load(emit, np.zeros(32, np.int64), slot, LANE_WORDS)
    scores = k_tile._scores(emit, LANE_WORDS * 16, keys, LANE_WORDS, column)
    expected = queries.astype(np.float16).astype(np.float64) @ cache.k[shown, 0].T
    got = np.full((8, n_keys), np.nan)
    for i in range(len(scores)):
        got[2 * t + i % 2, row_of_key[TILE_KEYS * (i // 4) + g + 8 * (i % 4 // 2)]] = scores[i]
    tolerance = 2e-3 * float(np.abs(expected).max())  # elements, or levels, are rounded to float16
    np.testing.assert_allclose(got, expected, atol=tolerance)

    weights = rng.random((8, n_keys)).astype(np.float16)
    values = v_tile._load(emit, np.full(32, page.v_offset, np.int64), slot, LANE_WORDS)
    pairs = [emit.pack_half2(*(weights[g, row_of_key[j + 2 * t + i]] for i in range(2))) for j in range(0, n_keys, 8)]
    sums = v_tile._accumulate(emit, v_tile._zeros(emit), pairs, values, LANE_WORDS, column)
    np.testing.assert_allclose(
        outputs_of(v_tile, emit, sums),
        weights.astype(np.float64) @ cache.v[shown, 0],
        atol=2e-3 * float(np.abs(weights.astype(np.float64) @ np.abs(cache.v[shown, 0])).max()),
    )

    # rows that hold NaN (scales of 0xff bytes) are silenced by their key, seen from 3 keys in to 2 before the end
    low, high = emit.word(first_key + 3), emit.word(first_key + n_keys - 2)
    memory[page.v_offset : page.page_bytes] = 0xFF
    hidden = v_tile._load(emit, np.full(32, page.v_offset, np.int64), slot, LANE_WORDS)
    first = (first_key + v_tile._first_row(emit, t)).astype(np.uint32)
    mixed = v_tile._keep(emit, hidden, first, emit.word(0), emit.word(0))
    sums = v_tile._accumulate(emit, v_tile._zeros(emit), pairs, mixed, LANE_WORDS, column)
    assert not np.any(np.stack(sums))
    kept = v_tile._keep(emit, values, first, low, high)
    sums = v_tile._accumulate(emit, v_tile._zeros(emit), pairs, kept, LANE_WORDS, column)
    inside = np.zeros((1, n_keys))
    inside[:, 3:-2] = 1
    expected = (weights * inside) @ cache.v[shown, 0]
    np.testing.assert_allclose(outputs_of(v_tile, emit, sums), expected, atol=2e-3 * n_keys)


@pytest.mark.parametrize(
    ("kv_type", "head_dim"), [(kv_type, head_dim) for kv_type, head_dim in REGIONS if kv_type.is_turbo]
)
def test_four_rows_of_turbo_values_take_eight_columns(kv_type: KvType, head_dim: int) -> None:
    """Columns 4 to 7 are rows 0 to 3 again, for the odd dimensions: the numbers are those of eight columns."""
    rng = np.random.default_rng(head_dim)
    page = PageGeometry(
        page_tokens=64, n_head_kv=1, head_dim_k=head_dim, head_dim_v=head_dim, type_k=kv_type, type_v=kv_type
    )
    memory = make_cache(page, 64, rng).data[0]
    table = table_of(kv_type, 32)
    assert table is not None
    emit = NumpyEmitter(memory, np.zeros(table.n_bytes, np.uint8))
    table._fill(emit, emit.word(0), LANE_WORDS)
    g, t = LANES // 4, LANES % 4
    weights = rng.random((8, 2 * TILE_KEYS)).astype(np.float16)
    weights[4:] = weights[:4]
    pairs = [emit.pack_half2(weights[g, j + 2 * t], weights[g, j + 2 * t + 1]) for j in range(0, 2 * TILE_KEYS, 8)]

    wide, narrow = (ValueTile(page.v_region, 2, is_narrow=is_narrow) for is_narrow in (False, True))
    slot, region_at = np.full(32, 32, np.uint32), np.full(32, page.v_offset, np.int64)
    values = wide._load(emit, region_at, slot, LANE_WORDS)
    sums = wide._accumulate(emit, wide._zeros(emit), pairs, values, LANE_WORDS, LANE_WORDS * np.uint32(4))
    expected = outputs_of(wide, emit, sums)[:4]
    sums = narrow._accumulate(emit, narrow._zeros(emit), pairs, values, LANE_WORDS, LANE_WORDS * np.uint32(4))
    got = np.full((4, head_dim), np.nan)
    for group in range(narrow.n_groups):
        dim = narrow._first_dim(emit, emit.word(group), g.astype(np.uint32)) + t // 2
        for i in range(4):
            got[2 * t % 4 + i % 2, dim + 2 * (i // 2)] = sums[4 * group + i]
    np.testing.assert_array_equal(got, expected)


def row_of_keys(k_tile: KeyTile, emit: NumpyEmitter, n_keys: int) -> np.ndarray:
    """Row of a tile by the number that a key has in the products."""
    rows = k_tile._row_of(emit, np.arange(8, dtype=np.uint32)).astype(np.int64)
    return np.concatenate([rows + first for first in range(0, n_keys, 8)])


def outputs_of(v_tile: ValueTile, emit: NumpyEmitter, sums: list[np.ndarray]) -> np.ndarray:
    """The accumulator as float32 [8, head_dim]."""
    g, t = (LANES // 4).astype(np.uint32), LANES % 4
    got = np.full((8, v_tile.region.head_dim), np.nan)
    for group in range(v_tile.n_groups):
        dim = v_tile._first_dim(emit, emit.word(group), g)
        for i in range(4):
            got[2 * t + i % 2, dim + i // 2] = sums[4 * group + i]
    return got


def test_gguf_knows_every_type_that_has_units() -> None:
    assert {gguf.GGML_QUANT_SIZES[weight_type][0] for weight_type in UNIT_FORMATS} == {32, 256}
