"""Checks that launchers make before a kernel runs; cheap, because they run for every layer of every step."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvs_core.errors import KernelArgumentError
from kvs_core.kv_types import PageGeometry, RegionGeometry

FLOAT32 = np.dtype(np.float32)
INT32 = np.dtype(np.int32)
INT64 = np.dtype(np.int64)
UINT8 = np.dtype(np.uint8)

_PAGE_TOKENS_MIN = 16


def check_array(
    name: str,
    array: npt.NDArray[np.generic],
    dtype: np.dtype[np.generic],
    shape: tuple[int | None, ...],
) -> None:
    """Raise KernelArgumentError unless ``array`` is C-contiguous with this dtype and shape; None allows any length."""
    if array.dtype == dtype and array.flags.c_contiguous and _fits(array.shape, shape):
        return
    wanted_shape = "[" + ", ".join("any" if length is None else str(length) for length in shape) + "]"
    contiguity = "" if array.flags.c_contiguous else ", not contiguous"
    raise KernelArgumentError(
        f"{name} is {array.dtype} {list(array.shape)}{contiguity}; needed: contiguous {dtype} {wanted_shape}"
    )


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    if shape == wanted:
        return True
    if len(shape) != len(wanted):
        return False
    return all(length is None or length == seen for length, seen in zip(wanted, shape, strict=True))


@lru_cache(maxsize=64)
def check_geometry(geometry: PageGeometry) -> None:
    """Raise KernelArgumentError for head sizes and page sizes that the kernels cannot cut into vectors and tiles."""
    page_tokens = geometry.page_tokens
    if page_tokens < _PAGE_TOKENS_MIN or page_tokens & (page_tokens - 1):
        raise KernelArgumentError(f"a page has {page_tokens} tokens; needed: a power of two from {_PAGE_TOKENS_MIN}")
    if geometry.n_head_kv < 1:
        raise KernelArgumentError(f"a page has {geometry.n_head_kv} K/V heads; needed: at least 1")
    _check_region("K", geometry.k_region)
    _check_region("V", geometry.v_region)
    if geometry.v_in_k and (geometry.type_k is not geometry.type_v or geometry.head_dim_v > geometry.head_dim_k):
        raise KernelArgumentError(
            f"V {geometry.type_v.value} of {geometry.head_dim_v} cannot be the first part of K {geometry.type_k.value} "
            f"of {geometry.head_dim_k}"
        )


def _check_region(side: str, region: RegionGeometry) -> None:
    multiple = region.kv_type.row_step
    if region.head_dim < multiple or region.head_dim % multiple:
        raise KernelArgumentError(
            f"{side} has head size {region.head_dim}; {region.kv_type.value} needs a multiple of {multiple}"
        )


def check_page_arguments(arena: npt.NDArray[np.uint8], page_offsets: npt.NDArray[np.int64]) -> None:
    check_array("arena", arena, UINT8, (None,))
    check_array("page_offsets", page_offsets, INT64, (None,))
