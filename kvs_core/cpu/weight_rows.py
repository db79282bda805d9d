"""Unpacking whole rows of weights to float32, for embeddings and for the tiles of ``matmul``."""

# mypy: ignore-errors
# Bodies are compiled by Numba and work on vector values.

from __future__ import annotations

import numpy as np
from numba import njit
from numba.extending import overload

from kvs_core.cpu.kernel_cache import cached_njit
from kvs_core.cpu.simd import load_bf16, load_f16, load_f32, store_f32, store_f32x16
from kvs_core.cpu.weight_blocks import load_weights_32


def _load_one_weight(kind, data, row_begin, index):
    """Weight ``index`` of a row of plain floats; rows of blocks have no loose weights and give 0."""
    raise NotImplementedError("only callable from a kernel")


@overload(_load_one_weight)
def _overload_load_one_weight(kind, data, row_begin, index):
    if kind.kind_name == "F32":
        return lambda kind, data, row_begin, index: load_f32(data, row_begin + 4 * index)
    if kind.kind_name == "F16":
        return lambda kind, data, row_begin, index: load_f16(data, row_begin + 2 * index)
    if kind.kind_name == "BF16":
        return lambda kind, data, row_begin, index: load_bf16(data, row_begin + 2 * index)
    return lambda kind, data, row_begin, index: np.float32(0.0)


@njit(nogil=True)
def unpack_row(kind, data, row_begin, begin, end, out, out_begin):
    """Write the weights ``begin`` to ``end`` of the row at byte ``row_begin`` to the float32 array ``out``.

    ``begin`` is a multiple of 32, and so is ``end`` unless it is the end of a row of plain floats.
    """
    whole_end = begin + (end - begin) // 32 * 32
    for index in range(begin // 32, whole_end // 32):
        first, second = load_weights_32(kind, data, row_begin, index)
        store_f32x16(out, out_begin + 32 * index - begin, first)
        store_f32x16(out, out_begin + 32 * index - begin + 16, second)
    for index in range(whole_end, end):
        store_f32(out, out_begin + index - begin, _load_one_weight(kind, data, row_begin, index))


@cached_njit()
def embed_rows_kernel(kind, data, token_ids, out):
    """Unpack row ``token_ids[i]`` to ``out[i]``; a few microseconds for hundreds of tokens, so one thread."""
    row_bytes = data.shape[1]
    n_in = out.shape[1]
    for token_idx in range(token_ids.size):
        unpack_row(kind, data, np.int64(token_ids[token_idx]) * row_bytes, 0, n_in, out, token_idx * n_in)
