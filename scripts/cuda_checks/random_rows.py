"""Random rows of every cache type: bytes of their planes, and the float64 numbers that those bytes stand for.

Quantised rows are random bits, of which every pattern is legal, under random scales; what they stand for is unpacked by
``gguf`` and by the oracle of the tests. No kernel and no encoder of the product is involved.
"""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np

from kvs_core.kv_types import KvType, RegionGeometry
from tests.oracles.kv_formats import ggml_type, unpack_turbo

SPREADS = {
    KvType.Q8_0: 74.0,
    KvType.Q5_1: 9.2,
    KvType.Q5_0: 9.2,
    KvType.Q4_1: 4.6,
    KvType.Q4_0: 4.6,
    KvType.IQ4_NL: 66.0,
    KvType.TURBO4: 0.12,
    KvType.TURBO3: 0.11,
    KvType.TURBO2: 0.1,
}
"""Standard deviation of random levels: elements are about as large as those of a normal distribution."""
_MIDDLES = {KvType.Q5_1: 15.5, KvType.Q4_1: 7.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRows:
    """Planes uint8 [n_keys, n_head, bytes of a row]; ``exact`` float64 [n_keys, n_head, head_dim]."""

    quants: np.ndarray
    high: np.ndarray
    scales: np.ndarray
    exact: np.ndarray


def random_rows(region: RegionGeometry, n_keys: int, n_head: int, rng: np.random.Generator) -> EncodedRows:
    """Rows of a quantised type."""
    shape = (n_keys, n_head)
    n_groups = region.head_dim // region.group_elements
    quants = rng.integers(0, 256, (*shape, region.row_bytes), dtype=np.uint8)
    high = rng.integers(0, 256, (*shape, region.high_row_bytes), dtype=np.uint8)
    sizes = rng.uniform(0.3, 1.5, (*shape, n_groups)) * rng.choice([-1.0, 1.0], (*shape, n_groups))
    sizes[rng.random(sizes.shape) < 0.02] = 0.0  # blocks of zeros
    steps = (sizes / SPREADS[region.kv_type]).astype(np.float16)
    if region.kv_type in _MIDDLES:
        least = (rng.standard_normal(steps.shape) / 4 - _MIDDLES[region.kv_type] * steps).astype(np.float16)
        steps = np.stack([steps, least], axis=-1)
    scales = np.ascontiguousarray(steps).view(np.uint8).reshape(*shape, region.scale_row_bytes)
    return EncodedRows(quants=quants, high=high, scales=scales, exact=_unpack(region, quants, high, scales))


def bf16_rows(rows: np.ndarray) -> EncodedRows:
    """float32 rows rounded to nearest, halves to even."""
    bits = rows.astype(np.float32).view(np.uint32)
    kept = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)) >> np.uint32(16)
    none = np.zeros((*rows.shape[:-1], 0), np.uint8)
    exact = (kept << np.uint32(16)).view(np.float32).astype(np.float64)
    return EncodedRows(quants=kept.astype(np.uint16).view(np.uint8), high=none, scales=none, exact=exact)


def _unpack(region: RegionGeometry, quants: np.ndarray, high: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Planes put together to GGML's blocks, which the references know."""
    n_blocks = quants.shape[0] * quants.shape[1] * (region.head_dim // region.group_elements)
    planes = (scales, high, quants)
    blocks = np.concatenate([plane.reshape(n_blocks, plane.size // n_blocks) for plane in planes], axis=1)
    if region.kv_type.is_turbo:
        exact = unpack_turbo(blocks, region.kv_type)
    else:
        exact = gguf.quants.dequantize(blocks.reshape(-1), ggml_type(region.kv_type)).astype(np.float64)
    return exact.reshape(*quants.shape[:2], region.head_dim)
