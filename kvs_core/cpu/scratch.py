"""Sizes of the matrix products' scratch memory. Integers only: no numpy, no Numba, so that planning can import it."""

from __future__ import annotations

from kvs_core.units import KIB, align_up, ceil_div

SCRATCH_ALIGNMENT = 64  # a cache line: threads must not share one

# Steps of up to this many tokens are decode steps: each token gets the bits of a step of one.
DECODE_TOKENS_MAX = 8

ROW_GROUP = 4  # weight rows multiplied at once; a tile holds whole groups
MIN_MATMUL_INPUTS = 16  # one vector

# A tile is a block of weight rows expanded to float32: up to MAX_TILE_ROWS rows of up to MAX_TILE_INPUTS inputs, with
# which up to MAX_TILE_TOKENS tokens are multiplied. Four rows and six tokens of 1024 inputs, 40 KiB, share the
# first-level cache for one inner product; the tile (128 KiB) and its tokens (up to 384 KiB) share the second.
# Measured on one Zen 5 core, 512 tokens, 576 x 1536: 146 GFLOP/s in one block of inputs, 186 in two of 768.
MAX_TILE_ROWS = 32
MAX_TILE_INPUTS = 1024
MAX_TILE_TOKENS = 96
# With few tokens the expansion is most of the work, so a tile stays within half of a first-level cache.
DECODE_TILE_BYTES = 24 * KIB


def tile_inputs(n_in: int) -> int:
    """Inputs per block: ``n_in`` cut into equal blocks of whole vectors, at most MAX_TILE_INPUTS each."""
    return align_up(ceil_div(n_in, ceil_div(n_in, MAX_TILE_INPUTS)), 32)


def tile_row_floats(n_in: int) -> int:
    """Distance between two rows of a tile, in float32: a block of inputs, plus one vector so that rows do not collide
    in the cache when their length is a power of two."""
    return tile_inputs(n_in) + 16


def decode_tile_rows(n_in: int) -> int:
    """Rows of a tile for few tokens: a multiple of ROW_GROUP, at least one group."""
    rows = DECODE_TILE_BYTES // (4 * tile_row_floats(n_in)) // ROW_GROUP * ROW_GROUP
    return max(ROW_GROUP, min(MAX_TILE_ROWS, rows))


def tile_floats(n_in: int) -> int:
    """Floats of a thread's tile."""
    return MAX_TILE_ROWS * tile_row_floats(n_in)


def sum_floats(n_in: int) -> int:
    """Floats of a thread's unfinished sums, 16 lanes each; none when all inputs are one block."""
    return 0 if n_in <= tile_inputs(n_in) else MAX_TILE_ROWS * MAX_TILE_TOKENS * 16


def thread_scratch_floats(n_in: int) -> int:
    """Floats of one thread: | tile | unfinished sums |."""
    return align_up(tile_floats(n_in) + sum_floats(n_in), SCRATCH_ALIGNMENT // 4)


def matmul_scratch_bytes(n_in: int, n_threads: int) -> int:
    """Scratch for ``matmul`` on rows of ``n_in`` inputs, for any number of rows, tokens and weights."""
    return 4 * n_threads * thread_scratch_floats(n_in)
