"""Writing fresh K and V rows into pages; how a row becomes bytes is in ``kv_rows.py``."""

# mypy: disable-error-code="no-untyped-call, untyped-decorator"
# The kernel is compiled by Numba and cannot be typed for Python.

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvs_core.cpu.arguments import FLOAT32, check_array, check_geometry, check_page_arguments
from kvs_core.cpu.attention_steps import find_bad_page
from kvs_core.cpu.kernel_cache import cached_njit
from kvs_core.cpu.kv_rows import layout_numbers, page_layout, store_row
from kvs_core.errors import KernelArgumentError
from kvs_core.kv_types import PageGeometry

_NO_VALUES = np.empty((0, 0, 0), dtype=np.float32)


def store_kv(
    arena: npt.NDArray[np.uint8],
    geometry: PageGeometry,
    page_offsets: npt.NDArray[np.int64],
    begin_pos: int,
    k: npt.NDArray[np.float32],
    v: npt.NDArray[np.float32] | None,
) -> None:
    """Write the rows of positions ``begin_pos ..`` into their pages, in the types of ``geometry``.

    arena           uint8 [n_bytes]
    page_offsets    int64 [n_pages]   byte of the arena where each logical page starts; only the pages written to
                                      are looked at
    k, v            float32 [n_tokens, n_head_kv, head_dim_k or head_dim_v]; no ``v`` where values are part of the keys
    Rounding        f16 and bf16 to nearest even; quantised types as GGML's reference quantisers round.
    Raises          KernelArgumentError; nothing is written then.
    """
    check_geometry(geometry)
    check_page_arguments(arena, page_offsets)
    check_array("k", k, FLOAT32, (None, geometry.n_head_kv, geometry.head_dim_k))
    if (v is None) != geometry.v_in_k:
        raise KernelArgumentError("values are given, or missing, other than the page says")
    values = _NO_VALUES if v is None else v
    if not geometry.v_in_k:
        check_array("v", values, FLOAT32, (k.shape[0], geometry.n_head_kv, geometry.head_dim_v))
    end_pos = begin_pos + k.shape[0]
    if begin_pos < 0 or end_pos > page_offsets.size * geometry.page_tokens:
        raise KernelArgumentError(
            f"positions {begin_pos}..{end_pos} do not lie in the {page_offsets.size} pages with an offset"
        )
    bad_page = store_kv_kernel(arena, layout_numbers(geometry), page_offsets, begin_pos, k, values)
    if bad_page >= 0:
        raise KernelArgumentError(
            f"page {bad_page} at byte {page_offsets[bad_page]} with {geometry.page_bytes} bytes "
            f"lies outside the arena of {arena.size} bytes"
        )


@cached_njit(error_model="numpy")
def store_kv_kernel(arena: Any, numbers: Any, page_offsets: Any, begin_pos: Any, k: Any, v: Any) -> Any:
    """Returns -1, or the first page that is needed but lies outside the arena; nothing is written then."""
    layout = page_layout(numbers)
    n_tokens = k.shape[0]
    end_pos = begin_pos + n_tokens
    bad_page = find_bad_page(layout, arena, page_offsets, begin_pos // layout.page_tokens, end_pos, page_offsets.size)
    if bad_page >= 0:
        return bad_page

    for token in range(n_tokens):
        pos = begin_pos + token
        page_at = page_offsets[pos // layout.page_tokens]
        row = pos % layout.page_tokens
        for head_kv_idx in range(layout.n_head_kv):
            at = token * layout.n_head_kv + head_kv_idx
            store_row(layout.k, k, at * layout.k.head_dim, arena, page_at, head_kv_idx, row)
            if not layout.v_in_k:
                store_row(layout.v, v, at * layout.v.head_dim, arena, page_at, head_kv_idx, row)
    return -1
