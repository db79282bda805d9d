"""Scratch of one phase inside the arena: named arrays at fixed offsets. Integers only; backends make the views.

Arrays whose lifetimes never meet share bytes: attention, feed-forward and output arrays form alternative groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from kvs_core.units import align_up

ARRAY_ALIGNMENT = 256

_ITEM_BYTES = {"float32": 4, "int32": 4, "uint8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """A named array: element type ("float32", "int32" or "uint8") and shape, rows (tokens or outputs) first."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def n_bytes(self) -> int:
        return prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedArray:
    """An array and its byte offset from the start of the workspace."""

    spec: ArraySpec
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Every array of a phase; ``n_bytes`` is what the arena must set aside."""

    arrays: tuple[PlacedArray, ...]
    n_bytes: int


def plan_workspace(lasting: Sequence[ArraySpec], alternatives: Sequence[Sequence[ArraySpec]]) -> Workspace:
    """Place ``lasting`` arrays one after another, then every alternative group over the same bytes."""
    placed: list[PlacedArray] = []
    base = _place(placed, lasting, 0)
    end = max((_place(placed, group, base) for group in alternatives), default=base)
    return Workspace(arrays=tuple(placed), n_bytes=end)


def _place(placed: list[PlacedArray], specs: Sequence[ArraySpec], offset: int) -> int:
    for spec in specs:
        placed.append(PlacedArray(spec=spec, offset=offset))
        offset = align_up(offset + spec.n_bytes, ARRAY_ALIGNMENT)
    return offset
