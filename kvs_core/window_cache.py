"""Window layers: where the last positions of a sliding window lie in the arena's state. Plain integers, no arrays.

A window layer keeps its pages in a buffer of a few page slots that neither grows with the context nor streams. Page
``p`` of the sequence always lies in slot ``p % n_slots``, so attention walks absolute positions and a new page
overwrites one that no token of any later step can see.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvs_core.kv_types import PageGeometry
from kvs_core.policy import touched_pages_max
from kvs_core.units import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowLayer:
    """The buffer of one layer; ``arena_offset`` is where slot 0 lies in every phase.

    n_swa     a token sees the last ``n_swa`` positions, its own included
    n_slots   pages the buffer holds
    n_pages   pages that the whole context has
    """

    layer_idx: int
    geometry: PageGeometry
    n_swa: int
    n_slots: int
    n_pages: int
    arena_offset: int

    @property
    def n_bytes(self) -> int:
        return self.n_slots * self.geometry.page_bytes

    def page_offsets(self) -> array[int]:
        """Arena offset of the slot of every page of the sequence, int64 [n_pages]."""
        slots = (page % self.n_slots for page in range(self.n_pages))
        return array("q", (self.arena_offset + slot * self.geometry.page_bytes for slot in slots))

    def pages_seen(self, first_pos: int, n_tokens: int) -> tuple[int, int]:
        """The range of pages that a step of ``n_tokens`` from position ``first_pos`` on stores to or sees."""
        first_seen = max(0, first_pos + 1 - self.n_swa)
        page_tokens = self.geometry.page_tokens
        return first_seen // page_tokens, ceil_div(first_pos + n_tokens, page_tokens)


def place_windows(
    layers: Sequence[tuple[int, PageGeometry, int]], *, n_ubatch: int, n_pages: int, is_full_size: bool
) -> tuple[WindowLayer, ...]:
    """The buffers of all window layers, one after another from the arena's beginning.

    layers         (index in the model, geometry of a page, n_swa)
    n_ubatch       tokens of the longest step
    is_full_size   room for the whole context, of ``n_pages``, in each
    """
    placed: list[WindowLayer] = []
    for layer_idx, geometry, n_swa in layers:
        n_slots = n_pages if is_full_size else count_slots(n_swa, n_ubatch, geometry.page_tokens, n_pages)
        placed.append(
            WindowLayer(
                layer_idx=layer_idx,
                geometry=geometry,
                n_swa=n_swa,
                n_slots=n_slots,
                n_pages=n_pages,
                arena_offset=placed[-1].arena_offset + placed[-1].n_bytes if placed else 0,
            )
        )
    return tuple(placed)


def count_slots(n_swa: int, n_tokens: int, page_tokens: int, n_pages: int) -> int:
    """Pages that steps of up to ``n_tokens`` can see or store to at once, of a context of ``n_pages``."""
    return min(touched_pages_max(n_swa - 1 + n_tokens, page_tokens), n_pages)
