"""How the keys of decode attention are cut into partitions: by absolute position only. Plain integers, no device.

A partition is reduced by one block and leaves one partial; the fold consumes partials in order. Because the cuts
depend on nothing but the position, the same keys give the same bits in every launch, arena and step length.
The functions are plain enough to be compiled into kernels as they are.

    keys     0 ............ 16K ............ large begin ............
    size     256            512              1024
    window   128 at any depth

Layers with a window are cut evenly, so that their cost does not depend on the depth. Their partitions are counted
within a step: number 0 is the first that the step's first token sees.
"""

from __future__ import annotations

from kvs_core.cuda_scratch import MIDDLE_BEGIN

# Where partitions of 1024 keys begin depends on the cache: ``kvs_core.cuda_scratch.large_begin_of``.
# 512 keys cost least where the context is long; 256 keep the device busy where it is short; 1024 bounds the
# number of partials beyond (H200, head sizes 128 and 256, f16 and q8_0; measure again on a much smaller device).
SMALL_KEYS, MIDDLE_KEYS, LARGE_KEYS = 256, 512, 1024
N_SMALL = MIDDLE_BEGIN // SMALL_KEYS
WINDOW_KEYS = 128


def partition_bounds(index: int, large_begin: int) -> tuple[int, int]:
    """Half-open key range of partition ``index``."""
    n_middle = (large_begin - MIDDLE_BEGIN) // MIDDLE_KEYS
    if index < N_SMALL:
        begin, size = index * SMALL_KEYS, SMALL_KEYS
    elif index < N_SMALL + n_middle:
        begin, size = MIDDLE_BEGIN + (index - N_SMALL) * MIDDLE_KEYS, MIDDLE_KEYS
    else:
        begin, size = large_begin + (index - N_SMALL - n_middle) * LARGE_KEYS, LARGE_KEYS
    return begin, begin + size


def count_partitions(n_keys: int, large_begin: int) -> int:
    """Partitions that hold keys 0 to ``n_keys - 1``."""
    n_middle = (large_begin - MIDDLE_BEGIN) // MIDDLE_KEYS
    if n_keys <= MIDDLE_BEGIN:
        count = (n_keys + SMALL_KEYS - 1) // SMALL_KEYS
    elif n_keys <= large_begin:
        count = N_SMALL + (n_keys - MIDDLE_BEGIN + MIDDLE_KEYS - 1) // MIDDLE_KEYS
    else:
        count = N_SMALL + n_middle + (n_keys - large_begin + LARGE_KEYS - 1) // LARGE_KEYS
    return count


def first_window_partition(first_position: int, window: int) -> int:
    """Partitions of a window layer before the one in which a token at ``first_position`` sees its first key."""
    return max(first_position + 1 - window, 0) // WINDOW_KEYS


def most_window_partitions(window: int, n_tokens: int) -> int:
    """Partitions that the tokens of a step see at most: the first window may begin at the end of one."""
    return (window + n_tokens - 3) // WINDOW_KEYS + 2
