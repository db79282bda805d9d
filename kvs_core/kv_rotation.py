"""Which rotation rows go through before they are quantised. Plain values, no arrays, no devices.

Quantised rows lose less when no element stands out, and an orthogonal matrix spreads one over all: keys and queries
are rotated alike, which leaves their products as they are; values are rotated, and the attention's output is rotated
back. Unquantised rows are never rotated.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvs_core.kv_types import KvType, PageGeometry

_SMALLEST_SIZE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """The normalised Walsh-Hadamard matrix of ``size`` rows, a power of two, on each ``size`` elements of a head.

    The matrix is symmetric and its own inverse.
    """

    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRotations:
    """What a layer's queries and keys, and its values, go through; None: nothing."""

    keys: Rotation | None
    values: Rotation | None


def choose_rotations(geometry: PageGeometry) -> HeadRotations | None:
    """The rotations of a layer with quantised keys or values; None when it has none.

    Sizes are llama.cpp's: for keys the largest matrix that divides the head, for values 64, with which it found less
    loss; heads that are no multiple of 64 are left alone.
    """
    keys = values = None
    if _can_rotate(geometry.type_k, geometry.head_dim_k):
        keys = Rotation(size=geometry.head_dim_k & -geometry.head_dim_k)
    if _can_rotate(geometry.type_v, geometry.head_dim_v):
        values = Rotation(size=_SMALLEST_SIZE)
    return None if keys is values is None else HeadRotations(keys=keys, values=values)


def _can_rotate(kv_type: KvType, head_dim: int) -> bool:
    return kv_type.is_quantised and head_dim % _SMALLEST_SIZE == 0
