"""Recurrent layers: where what they remember lies in the arena's state. Plain integers, no arrays.

It is float32 whatever types the KV cache has, neither grows with the context nor streams, and holds all positions so
far at once: it cannot be cut back to an earlier one. A step at position 0 takes it for empty, whatever it holds, so
forgetting a sequence touches no bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from kvs_core.policy import REGION_ALIGNMENT
from kvs_core.recurrent_shape import RecurrentShape
from kvs_core.units import align_up

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentLayer:
    """One layer's | inputs of the convolution | matrices of the delta net |, at the same place in every phase."""

    layer_idx: int
    recurrent: RecurrentShape
    arena_offset: int

    @property
    def conv_bytes(self) -> int:
        return _FLOAT_BYTES * prod(self.recurrent.conv_shape)

    @property
    def state_bytes(self) -> int:
        return _FLOAT_BYTES * prod(self.recurrent.state_shape)

    @property
    def state_offset(self) -> int:
        """Arena offset of the matrices."""
        return align_up(self.arena_offset + self.conv_bytes, REGION_ALIGNMENT)

    @property
    def n_bytes(self) -> int:
        """Bytes of both, and what aligns them."""
        return align_up(self.state_offset + self.state_bytes, REGION_ALIGNMENT) - self.arena_offset


def place_recurrent(layers: Sequence[tuple[int, RecurrentShape]], *, begin: int) -> tuple[RecurrentLayer, ...]:
    """The states of all recurrent layers, (index in the model, sizes) each, one after another from ``begin`` on."""
    placed: list[RecurrentLayer] = []
    offset = align_up(begin, REGION_ALIGNMENT)
    for layer_idx, recurrent in layers:
        placed.append(RecurrentLayer(layer_idx=layer_idx, recurrent=recurrent, arena_offset=offset))
        offset += placed[-1].n_bytes
    return tuple(placed)
