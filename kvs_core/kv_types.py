"""KV-cache types and the byte layout of one page. No arrays, no devices: integers only.

A page holds ``page_tokens`` consecutive positions of one layer of one sequence::

    | K of head 0 | K of head 1 | ... | V of head 0 | V of head 1 | ... |

A latent cache has no V regions: the values are the first elements of the rows of K.

    one region (one head), n blocks a row:
        f32, f16, bf16    rows      [page_tokens, head_dim]
        q8_0              quants    int8  [page_tokens, head_dim]                 scales  half [page_tokens, n]
        q4_0, iq4_nl      quants    16 bytes a block                              scales  half [page_tokens, n]
        q4_1              quants    16 bytes a block                              scales  half [page_tokens, n, 2]
        q5_0              quants    16 bytes a block   high bits  4 bytes a block  scales  half [page_tokens, n]
        q5_1              quants    16 bytes a block   high bits  4 bytes a block  scales  half [page_tokens, n, 2]
        turbo4            quants    4 bits an element                             scales  half [page_tokens, n]
        turbo3            quants    2 bits an element  high bits  1 bit an element scales  half [page_tokens, n]
        turbo2            quants    2 bits an element                             scales  half [page_tokens, n]

A quantised region keeps its quants, its high bits and its scales (and minima) as planes, so that kernels load aligned
vectors; inside a plane a block's bytes are those of GGML's block, and the bytes per page are those of the interleaved
blocks. A turbo scale belongs to 128 elements, of heads that are no multiple of that to 64; element i is at the i-th
bits of its row's quants. Heads are padded with zeros to whole blocks, of unquantised types to multiples of 16, so
``head_dim`` is here the elements that a row has in the cache. Regions and planes start at multiples of 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvs_core.units import align_up

PLANE_ALIGNMENT = 16
KERNEL_ELEMENTS = 16
"""Kernels take a cached row this many elements at a time."""
PAGE_ALIGNMENT = 256


class KvType(Enum):
    """A type that K or V rows can be cached in; the value is llama.cpp's spelling."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"
    Q5_1 = "q5_1"
    Q5_0 = "q5_0"
    Q4_1 = "q4_1"
    Q4_0 = "q4_0"
    IQ4_NL = "iq4_nl"
    TURBO4 = "turbo4"
    TURBO3 = "turbo3"
    TURBO2 = "turbo2"

    @property
    def block_elements(self) -> int:
        """What is encoded together; see ``RegionGeometry.group_elements`` for what shares a scale."""
        return _FORMATS[self].block_elements

    @property
    def row_step(self) -> int:
        """A cached row is a multiple of it: whole blocks, and as many elements as kernels take together."""
        return max(self.block_elements, KERNEL_ELEMENTS)

    def cached_head_dim(self, head_dim: int) -> int:
        """Elements that a head of ``head_dim`` has in the cache, zeros at the end where ``row_step`` asks for them."""
        return align_up(head_dim, self.row_step)

    @property
    def quant_bytes_per_block(self) -> int:
        """Bytes of one block in the quants plane (the whole block for unquantised types)."""
        return _FORMATS[self].quant_bytes

    @property
    def high_bytes_per_block(self) -> int:
        """Bytes of one block in the plane of high bits; 0 for types without one."""
        return _FORMATS[self].high_bytes

    @property
    def scale_bytes_per_block(self) -> int:
        """Bytes of one block in the scales plane; 0 for unquantised types."""
        return _FORMATS[self].scale_bytes

    @property
    def is_quantised(self) -> bool:
        return self.scale_bytes_per_block > 0

    @property
    def is_turbo(self) -> bool:
        """Rows of this type are always rotated, with TurboQuant's signs."""
        return self in (KvType.TURBO4, KvType.TURBO3, KvType.TURBO2)


@dataclass(frozen=True, slots=True)
class _Format:
    block_elements: int
    quant_bytes: int
    high_bytes: int = 0
    scale_bytes: int = 0


_FORMATS = {
    KvType.F32: _Format(1, quant_bytes=4),
    KvType.F16: _Format(1, quant_bytes=2),
    KvType.BF16: _Format(1, quant_bytes=2),
    KvType.Q8_0: _Format(32, quant_bytes=32, scale_bytes=2),
    KvType.Q5_1: _Format(32, quant_bytes=16, high_bytes=4, scale_bytes=4),
    KvType.Q5_0: _Format(32, quant_bytes=16, high_bytes=4, scale_bytes=2),
    KvType.Q4_1: _Format(32, quant_bytes=16, scale_bytes=4),
    KvType.Q4_0: _Format(32, quant_bytes=16, scale_bytes=2),
    KvType.IQ4_NL: _Format(32, quant_bytes=16, scale_bytes=2),
    KvType.TURBO4: _Format(64, quant_bytes=32, scale_bytes=2),
    KvType.TURBO3: _Format(64, quant_bytes=16, high_bytes=8, scale_bytes=2),
    KvType.TURBO2: _Format(64, quant_bytes=16, scale_bytes=2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionGeometry:
    """One head's K (or V) rows inside a page; all numbers are bytes from the start of the region.

    head_dim   ``KvType.cached_head_dim`` of the model's head
    """

    kv_type: KvType
    head_dim: int
    page_tokens: int

    @property
    def group_elements(self) -> int:
        """Elements that share one scale."""
        block = self.kv_type.block_elements
        return 2 * block if self.kv_type.is_turbo and self.head_dim % (2 * block) == 0 else block

    @property
    def row_bytes(self) -> int:
        """Bytes from one position to the next in the quants plane."""
        return self.head_dim // self.kv_type.block_elements * self.kv_type.quant_bytes_per_block

    @property
    def high_row_bytes(self) -> int:
        """Bytes from one position to the next in the plane of high bits."""
        return self.head_dim // self.kv_type.block_elements * self.kv_type.high_bytes_per_block

    @property
    def scale_row_bytes(self) -> int:
        """Bytes from one position to the next in the scales plane."""
        return self.head_dim // self.group_elements * self.kv_type.scale_bytes_per_block

    @property
    def high_offset(self) -> int:
        """Where the plane of high bits starts."""
        return align_up(self.page_tokens * self.row_bytes, PLANE_ALIGNMENT)

    @property
    def scale_offset(self) -> int:
        """Where the scales plane starts."""
        return align_up(self.high_offset + self.page_tokens * self.high_row_bytes, PLANE_ALIGNMENT)

    @property
    def n_bytes(self) -> int:
        return align_up(self.scale_offset + self.page_tokens * self.scale_row_bytes, PLANE_ALIGNMENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageGeometry:
    """Byte layout of a page of one layer. Layers with equal ``page_bytes`` form a page class.

    head_dim_k, head_dim_v   elements of a row in the cache, see ``KvType.cached_head_dim``
    v_in_k   a latent cache: values are the first ``head_dim_v`` elements of each row of K, of the same type
    """

    page_tokens: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    type_k: KvType
    type_v: KvType
    v_in_k: bool = False

    @property
    def k_region(self) -> RegionGeometry:
        return RegionGeometry(kv_type=self.type_k, head_dim=self.head_dim_k, page_tokens=self.page_tokens)

    @property
    def v_region(self) -> RegionGeometry:
        """One head's values; what they would take where ``v_in_k`` leaves them out."""
        return RegionGeometry(kv_type=self.type_v, head_dim=self.head_dim_v, page_tokens=self.page_tokens)

    @property
    def v_offset(self) -> int:
        """Where V of head 0 starts; K of head h starts at ``h * k_region.n_bytes``."""
        return self.n_head_kv * self.k_region.n_bytes

    @property
    def payload_bytes(self) -> int:
        """Bytes that hold keys and values, without the padding to ``PAGE_ALIGNMENT``."""
        return self.v_offset + (0 if self.v_in_k else self.n_head_kv * self.v_region.n_bytes)

    @property
    def page_bytes(self) -> int:
        return align_up(self.payload_bytes, PAGE_ALIGNMENT)
