"""Partitions of decode attention: plain integers."""

from __future__ import annotations

import pytest

from cuda_kernels.partitions import (
    LARGE_KEYS,
    MIDDLE_KEYS,
    SMALL_KEYS,
    WINDOW_KEYS,
    count_partitions,
    first_window_partition,
    most_window_partitions,
    partition_bounds,
)
from kvs_core.cuda_scratch import LARGE_BEGIN, MIDDLE_BEGIN, large_begin_of
from kvs_core.kv_types import KvType, PageGeometry


@pytest.mark.parametrize("large_begin", [LARGE_BEGIN, 64 * 1024, 32 * 1024, MIDDLE_BEGIN])
def test_partitions_tile_the_keys_without_gaps(large_begin: int) -> None:
    end = 0
    for index in range(count_partitions(300_000, large_begin)):
        begin, next_end = partition_bounds(index, large_begin)
        assert begin == end
        end = next_end
    assert end >= 300_000


@pytest.mark.parametrize(
    ("n_keys", "expected", "expected_earlier"),
    [
        (0, 0, 0),
        (1, 1, 1),
        (SMALL_KEYS, 1, 1),
        (SMALL_KEYS + 1, 2, 2),
        (MIDDLE_BEGIN, 64, 64),
        (MIDDLE_BEGIN + 1, 65, 65),
        (MIDDLE_BEGIN + MIDDLE_KEYS + 1, 66, 66),
        (64 * 1024, 160, 160),
        (64 * 1024 + MIDDLE_KEYS + 1, 162, 161),
        (LARGE_BEGIN, 288, 224),
        (LARGE_BEGIN + LARGE_KEYS, 289, 225),
        (LARGE_BEGIN + LARGE_KEYS + 1, 290, 226),
    ],
)
def test_count_is_that_of_the_partitions_that_hold_the_keys(n_keys: int, expected: int, expected_earlier: int) -> None:
    assert count_partitions(n_keys, LARGE_BEGIN) == expected
    assert count_partitions(n_keys, 64 * 1024) == expected_earlier


@pytest.mark.parametrize("large_begin", [LARGE_BEGIN, 64 * 1024, 32 * 1024, MIDDLE_BEGIN])
@pytest.mark.parametrize(
    "n_keys", [1, 255, 256, 257, 16383, 16384, 16385, 65535, 65537, 131071, 131072, 131073, 1_000_000]
)
def test_the_last_counted_partition_holds_the_last_key(n_keys: int, large_begin: int) -> None:
    begin, end = partition_bounds(count_partitions(n_keys, large_begin) - 1, large_begin)
    assert begin <= n_keys - 1 < end


@pytest.mark.parametrize(
    ("type_k", "type_v", "n_head_kv", "expected"),
    [
        (KvType.TURBO3, KvType.TURBO4, 2, LARGE_BEGIN),
        (KvType.TURBO4, KvType.TURBO4, 4, LARGE_BEGIN // 2),
        (KvType.TURBO4, KvType.TURBO3, 8, LARGE_BEGIN // 4),
        (KvType.Q4_0, KvType.TURBO3, 8, LARGE_BEGIN // 2),
        (KvType.Q4_1, KvType.Q4_0, 8, LARGE_BEGIN),
        (KvType.Q8_0, KvType.TURBO4, 8, LARGE_BEGIN),
        (KvType.F16, KvType.F16, 8, LARGE_BEGIN),
    ],
)
def test_caches_of_few_bits_have_large_partitions_earlier(
    type_k: KvType, type_v: KvType, n_head_kv: int, expected: int
) -> None:
    page = PageGeometry(
        page_tokens=256, n_head_kv=n_head_kv, head_dim_k=128, head_dim_v=128, type_k=type_k, type_v=type_v
    )
    assert large_begin_of(page) == expected


@pytest.mark.parametrize("window", [1, 2, 37, 128, WINDOW_KEYS - 1, WINDOW_KEYS, WINDOW_KEYS + 1, 512, 1024])
@pytest.mark.parametrize("n_tokens", [1, 2, 4, 8])
def test_window_layers_launch_what_some_step_needs_and_no_more(window: int, n_tokens: int) -> None:
    counts = set()
    for first_position in range(4 * WINDOW_KEYS + window):
        first = first_window_partition(first_position, window)
        assert first * WINDOW_KEYS <= max(0, first_position + 1 - window) < (first + 1) * WINDOW_KEYS
        counts.add((first_position + n_tokens - 1) // WINDOW_KEYS + 1 - first)
    assert max(counts) == most_window_partitions(window, n_tokens)
