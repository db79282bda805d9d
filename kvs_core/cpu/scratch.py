"""Sizes of the CPU kernels' scratch memory. Integers only: no numpy, no Numba, so that planning can import it."""

from __future__ import annotations

from kvs_core.units import KIB, align_up

SCRATCH_ALIGNMENT = 64  # a cache line: threads must not share one

ROW_GROUP = 4  # weight rows multiplied at once; a tile holds whole groups
MIN_MATMUL_INPUTS = 16  # one vector
DECODE_TOKENS_MAX = (
    8  # steps of up to this many tokens are decode steps: they give each token the bits of a step of one
)

# A tile of weight rows, expanded to float32, is read once per token group. Half of a typical 512 KiB
# second-level cache leaves room for the token rows beside it; measured on a 1 MiB cache, where 64 and 256 KiB
# were within 3 %.
TILE_BYTES = 128 * KIB
# With few tokens the expansion is most of the work, so a tile stays within half of a first-level cache.
DECODE_TILE_BYTES = 24 * KIB
MAX_TILE_ROWS = 32


def tile_row_floats(n_in: int) -> int:
    """Distance between two rows of a tile, in float32: whole vectors, plus one so that rows do not collide in
    the cache when ``n_in`` is a power of two."""
    return align_up(n_in, 16) + 16


def max_tile_rows(n_in: int, tile_bytes: int) -> int:
    """Rows of a tile of about ``tile_bytes``: a multiple of ROW_GROUP, at least one group."""
    rows = tile_bytes // (4 * tile_row_floats(n_in)) // ROW_GROUP * ROW_GROUP
    return max(ROW_GROUP, min(MAX_TILE_ROWS, rows))


def tile_bytes_per_thread(n_in: int) -> int:
    """Bytes of the largest tile one thread fills."""
    return align_up(4 * tile_row_floats(n_in) * max_tile_rows(n_in, TILE_BYTES), SCRATCH_ALIGNMENT)


def matmul_scratch_bytes(n_in: int, n_threads: int) -> int:
    """Scratch for ``matmul`` on rows of ``n_in`` inputs, for any number of rows, tokens and weights.

    | tile of thread 0 | tile of thread 1 | ... |
    """
    return n_threads * tile_bytes_per_thread(n_in)
