"""Which rotation rows go through before they are quantised. Plain values, no arrays, no devices.

Quantised rows lose less when no element stands out, and an orthogonal matrix spreads one over all: keys and queries
are rotated alike, which leaves their products as they are; values are rotated, and the attention's output is rotated
back. Unquantised rows are never rotated. TurboQuant's types change signs as well, so that no input is spared.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvs_core.kv_types import PageGeometry, RegionGeometry

_SMALLEST_SIZE = 64


def _signs(mask: str) -> tuple[int, ...]:
    """One sign for each bit, lowest first: -1 where it is set."""
    bits = int.from_bytes(bytes.fromhex(mask), "little")
    return tuple(-1 if bits >> idx & 1 else 1 for idx in range(8 * len(bytes.fromhex(mask))))


TURBO_SIGNS = (_signs("59036ae44959f842bb3bc6a4a950f249"), _signs("90eeac16dc8f623f7a35a5b76265a5be"))
"""The published sign vectors of TurboQuant's types, 128 elements each; groups of 64 use the first half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """The normalised Walsh-Hadamard matrix of ``size`` rows, a power of two, on each ``size`` elements of a head.

    The matrix is symmetric and its own inverse. ``is_signed``: elements change signs by ``TURBO_SIGNS[0]`` before and
    by ``TURBO_SIGNS[1]`` after it; the other way round in the inverse.
    """

    size: int
    is_signed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRotations:
    """What a layer's queries and keys, and its values, go through; None: nothing."""

    keys: Rotation | None
    values: Rotation | None


def choose_rotations(geometry: PageGeometry, *, plain_types: bool) -> HeadRotations | None:
    """The rotations of a layer with quantised keys or values; None when it has none.

    Turbo types need theirs; other quantised types are rotated if ``plain_types``. Sizes of those are llama.cpp's: for
    keys the largest matrix that divides the head, for values 64, with which it found less loss; heads that are no
    multiple of 64 are left alone. Values that are the first part of the keys share a matrix that divides both.
    """
    if geometry.v_in_k:
        common_size = _largest_power_in(geometry.head_dim_k | geometry.head_dim_v)
        both = _choose(geometry.k_region, common_size, plain_types=plain_types)
        return None if both is None else HeadRotations(keys=both, values=both)
    key_size = _largest_power_in(geometry.head_dim_k)
    keys = _choose(geometry.k_region, key_size, plain_types=plain_types)
    values = _choose(geometry.v_region, _SMALLEST_SIZE, plain_types=plain_types)
    return None if keys is values is None else HeadRotations(keys=keys, values=values)


def _largest_power_in(n: int) -> int:
    """The largest power of two that divides ``n``."""
    return n & -n


def _choose(region: RegionGeometry, plain_size: int, *, plain_types: bool) -> Rotation | None:
    if region.kv_type.is_turbo:
        return Rotation(size=region.group_elements, is_signed=True)
    if (
        plain_types
        and region.kv_type.is_quantised
        and plain_size >= _SMALLEST_SIZE
        and region.head_dim % plain_size == 0
    ):
        return Rotation(size=plain_size)
    return None
