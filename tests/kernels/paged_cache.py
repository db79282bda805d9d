"""A K/V cache in shuffled pages for kernel tests: whatever is not a stored row holds bytes that read as NaN."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvs_core.cpu.store import store_kv
from kvs_core.kv_types import KvType, PageGeometry
from kvs_core.units import ceil_div

NAN_BYTE = 0xFF


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedCache:
    """``n_kv`` rows of random K and V, stored through ``store_kv``."""

    geometry: PageGeometry
    arena: npt.NDArray[np.uint8]
    page_offsets: npt.NDArray[np.int64]
    n_kv: int

    @property
    def n_pages(self) -> int:
        return ceil_div(self.n_kv, self.geometry.page_tokens)


def geometry_of(
    *,
    page_tokens: int = 32,
    n_head_kv: int = 2,
    head_dim_k: int = 64,
    head_dim_v: int | None = None,
    type_k: str = "f16",
    type_v: str | None = None,
    v_in_k: bool = False,
) -> PageGeometry:
    return PageGeometry(
        page_tokens=page_tokens,
        n_head_kv=n_head_kv,
        head_dim_k=head_dim_k,
        head_dim_v=head_dim_v or head_dim_k,
        type_k=KvType(type_k),
        type_v=KvType(type_v or type_k),
        v_in_k=v_in_k,
    )


def random_rows(
    rng: np.random.Generator, geometry: PageGeometry, n_tokens: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32] | None]:
    """K and V; no V where it is a part of K."""
    k = rng.standard_normal((n_tokens, geometry.n_head_kv, geometry.head_dim_k), dtype=np.float32)
    if geometry.v_in_k:
        return k, None
    return k, rng.standard_normal((n_tokens, geometry.n_head_kv, geometry.head_dim_v), dtype=np.float32)


def empty_pages(
    rng: np.random.Generator, geometry: PageGeometry, n_pages: int, filler: int = NAN_BYTE
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """An arena with more slots than pages, and the shuffled slots of the pages; one entry more that names none."""
    n_slots = n_pages + 3
    arena = np.full(n_slots * geometry.page_bytes, filler, dtype=np.uint8)
    offsets = np.full(n_pages + 1, -1, dtype=np.int64)
    offsets[:n_pages] = rng.permutation(n_slots)[:n_pages] * geometry.page_bytes
    return arena, offsets


def random_cache(rng: np.random.Generator, geometry: PageGeometry, n_kv: int, filler: int = NAN_BYTE) -> PagedCache:
    arena, offsets = empty_pages(rng, geometry, ceil_div(n_kv, geometry.page_tokens), filler)
    store_kv(arena, geometry, offsets, 0, *random_rows(rng, geometry, n_kv))
    return PagedCache(geometry=geometry, arena=arena, page_offsets=offsets, n_kv=n_kv)
