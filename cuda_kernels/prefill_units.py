"""How prefill attention cuts rows of every cache type into units, which one thread expands to float16.

A unit is a thread's part of each plane of the region, read from the page or from a copy of it in shared memory. What
the bytes mean is in ``kv_units``; where units go, in ``prefill_copies`` and ``panel_copies``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cuda_kernels.emit import Emitter, Value
from cuda_kernels.kv_units import expand
from kvs_core.kv_types import KvType, RegionGeometry

_ELEMENTS = {KvType.F32: 8, KvType.F16: 8, KvType.BF16: 8, KvType.Q8_0: 16}
"""Of a unit; 32 for other types."""
_PANEL_ELEMENTS = 64  # 128 bytes of float16: all banks
_NEIGHBOURS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """One plane of a region, cut into the parts of units.

    row_bytes    from one row to the next
    n_bytes      of a unit's part: 2, 4, 8 or 16, or a multiple of 16
    n_sharing    neighbouring units of a row that share a part
    """

    offset: int
    row_bytes: int
    n_bytes: int
    n_sharing: int

    @property
    def n_words(self) -> int:
        return max(1, self.n_bytes // 4)

    def row_offset(self, emit: Emitter, row: Value, unit: Value) -> Value:
        """Bytes from the plane's start to a unit's part."""
        part = emit.divide(unit, self.n_sharing) if self.n_sharing > 1 else unit
        return emit.add(emit.multiply(row, self.row_bytes), emit.multiply(part, self.n_bytes))


class RegionUnits:
    """The units of a region's rows: ``n_elements`` neighbouring elements, a power of two.

    ``planes``: quants, high bits where the type has them, scales where it has them; the words of a unit are those of
    its part of each, one after the other.
    """

    def __init__(self, region: RegionGeometry, n_elements: int | None = None) -> None:
        kv_type, head_dim = region.kv_type, region.head_dim
        self.n_elements = n_elements or _ELEMENTS.get(kv_type, 32)
        self.row_units = head_dim // self.n_elements
        self.kv_type, self.head_dim = kv_type, head_dim
        planes = [(0, region.row_bytes, region.row_bytes // self.row_units, 1)]
        if region.high_row_bytes:
            planes.append((region.high_offset, region.high_row_bytes, region.high_row_bytes // self.row_units, 1))
        if region.scale_row_bytes:
            n_sharing = max(1, region.group_elements // self.n_elements)
            planes.append((region.scale_offset, region.scale_row_bytes, kv_type.scale_bytes_per_block, n_sharing))
        self.planes = [Plane(offset=o, row_bytes=r, n_bytes=n, n_sharing=s) for o, r, n, s in planes]

    @property
    def n_words(self) -> int:
        """Of all parts of a unit."""
        return sum(plane.n_words for plane in self.planes)

    def halves(self, emit: Emitter, words: Sequence[Value]) -> list[Value]:
        """Words of a unit to float16 pairs in order."""
        n_quants = self.planes[0].n_words
        high = words[n_quants] if len(self.planes) == 3 else None
        scale = words[-1] if self.kv_type.is_quantised else None
        return expand(emit, self.kv_type, words[:n_quants], high, scale)

    def find(self, emit: Emitter, index: Value) -> tuple[Value, Value]:
        """Row, and unit in it, of unit ``index`` of a tile, as threads take them.

        Eight neighbouring threads store into eight different groups of four banks. Rows of a multiple of 64 elements
        swap their 16-byte pieces by row number: eight threads take the units of 128 bytes of as many rows as that
        needs. In other rows neighbours take neighbours.
        """
        n_panels, rest = divmod(self.head_dim, _PANEL_ELEMENTS)
        if rest:
            return emit.divide(index, self.row_units), emit.remainder(index, self.row_units)
        panel_units = _PANEL_ELEMENTS // self.n_elements
        n_rows = _NEIGHBOURS // panel_units
        group = emit.divide(index, _NEIGHBOURS)
        low_row = emit.bit_and(emit.divide(index, panel_units), n_rows - 1)
        row = emit.add(emit.multiply(emit.divide(group, n_panels), n_rows), low_row)
        low_unit = emit.bit_and(index, panel_units - 1)
        return row, emit.add(emit.multiply(emit.remainder(group, n_panels), panel_units), low_unit)
