"""Partitions of decode attention: plain integers."""

from __future__ import annotations

import pytest

from cuda_kernels.partitions import (
    LARGE_BEGIN,
    LARGE_KEYS,
    MIDDLE_BEGIN,
    MIDDLE_KEYS,
    SMALL_KEYS,
    WINDOW_KEYS,
    count_partitions,
    first_window_partition,
    most_window_partitions,
    partition_bounds,
)


def test_partitions_tile_the_keys_without_gaps() -> None:
    end = 0
    for index in range(count_partitions(300_000)):
        begin, next_end = partition_bounds(index)
        assert begin == end
        end = next_end
    assert end >= 300_000


@pytest.mark.parametrize(
    ("n_keys", "expected"),
    [
        (0, 0),
        (1, 1),
        (SMALL_KEYS, 1),
        (SMALL_KEYS + 1, 2),
        (MIDDLE_BEGIN, 64),
        (MIDDLE_BEGIN + 1, 65),
        (MIDDLE_BEGIN + MIDDLE_KEYS + 1, 66),
        (LARGE_BEGIN, 288),
        (LARGE_BEGIN + LARGE_KEYS, 289),
        (LARGE_BEGIN + LARGE_KEYS + 1, 290),
    ],
)
def test_count_is_that_of_the_partitions_that_hold_the_keys(n_keys: int, expected: int) -> None:
    assert count_partitions(n_keys) == expected


@pytest.mark.parametrize("n_keys", [1, 255, 256, 257, 16383, 16384, 16385, 131071, 131072, 131073, 1_000_000])
def test_the_last_counted_partition_holds_the_last_key(n_keys: int) -> None:
    begin, end = partition_bounds(count_partitions(n_keys) - 1)
    assert begin <= n_keys - 1 < end


@pytest.mark.parametrize("window", [1, 2, 37, 128, WINDOW_KEYS - 1, WINDOW_KEYS, WINDOW_KEYS + 1, 512, 1024])
@pytest.mark.parametrize("n_tokens", [1, 2, 4, 8])
def test_window_layers_launch_what_some_step_needs_and_no_more(window: int, n_tokens: int) -> None:
    counts = set()
    for first_position in range(4 * WINDOW_KEYS + window):
        first = first_window_partition(first_position, window)
        assert first * WINDOW_KEYS <= max(0, first_position + 1 - window) < (first + 1) * WINDOW_KEYS
        counts.add((first_position + n_tokens - 1) // WINDOW_KEYS + 1 - first)
    assert max(counts) == most_window_partitions(window, n_tokens)
