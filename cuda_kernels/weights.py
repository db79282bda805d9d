"""How weight matrices lie in device memory: GGUF blocks as they are where they load well, fields in planes elsewhere.

Blocks of 17, 18, 34, 84, 110, 136 or 210 bytes and their like would force byte loads; splitting them once, when the
model is loaded, gives every field its own plane of the same total size. Q6_K keeps everything but d together. Blocks of
144 and 176 bytes are nine and eleven 16-byte loads. Where decoding then takes fewer instructions, bits change places
within a block.

    Q8_0 in the file   | d q32 | d q32 | ...      on the device   | q32 q32 ... | d d ... |

No arithmetic on weights lives here (``weight_units``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numba import cuda
from numba.cuda import int64, types, uint16, uint32

from cuda_kernels.launch import Kernel, check_array, kernel_builder
from cuda_kernels.weight_units import LEVEL_NUMBERS
from kvs_core.errors import KernelArgumentError
from kvs_core.units import align_up, ceil_div

PLANE_ALIGNMENT = 256
MAX_PLANES = 4
MAX_MATRICES = 3
"""Matrices of one launch of a product."""

_T = GGMLQuantizationType


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockField:
    """Bytes ``begin`` to ``begin + n_bytes - 1`` of every block, which form one plane."""

    begin: int
    n_bytes: int


def _fields(*spans: tuple[int, int]) -> tuple[BlockField, ...]:
    return tuple(BlockField(begin=begin, n_bytes=n_bytes) for begin, n_bytes in spans)


# Quants first, because their plane is read with 16-byte loads; then high bits, scales of groups, scale of the block.
_PLANES = {
    _T.Q4_0: _fields((2, 16), (0, 2)),
    _T.Q4_1: _fields((4, 16), (0, 4)),
    _T.Q5_0: _fields((6, 16), (2, 4), (0, 2)),
    _T.Q5_1: _fields((8, 16), (4, 4), (0, 4)),
    _T.Q8_0: _fields((2, 32), (0, 2)),
    _T.Q4_K: _fields((0, 144)),
    _T.Q5_K: _fields((0, 176)),
    _T.Q6_K: _fields((0, 208), (208, 2)),
    _T.Q2_K: _fields((16, 64), (0, 16), (80, 4)),
    _T.Q3_K: _fields((32, 64), (0, 32), (96, 12), (108, 2)),
    _T.IQ4_NL: _fields((2, 16), (0, 2)),
    _T.IQ4_XS: _fields((8, 128), (0, 8)),
    _T.MXFP4: _fields((1, 16), (0, 1)),
    _T.F16: _fields((0, 2)),
    _T.BF16: _fields((0, 2)),
    _T.F32: _fields((0, 4)),
}
FAST_TYPES = tuple(_PLANES)
"""Weight types that the kernels read directly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGeometry:
    """A matrix of ``n_rows`` rows of ``n_cols`` weights (GGUF order: a row is one output) in device memory."""

    weight_type: GGMLQuantizationType
    n_rows: int
    n_cols: int

    @property
    def block_elements(self) -> int:
        return int(GGML_QUANT_SIZES[self.weight_type][0])

    @property
    def block_bytes(self) -> int:
        return int(GGML_QUANT_SIZES[self.weight_type][1])

    @property
    def row_blocks(self) -> int:
        return self.n_cols // self.block_elements

    @property
    def fields(self) -> tuple[BlockField, ...]:
        return _PLANES[self.weight_type]

    @property
    def is_split(self) -> bool:
        """Whether the fields of blocks lie in planes."""
        return len(self.fields) > 1

    @property
    def unit(self) -> Any:
        """Element type of the arrays that blocks are split through: what every field begins and ends at."""
        return np.uint8 if self.block_bytes % 2 else np.uint16

    @property
    def is_rearranged(self) -> bool:
        """Whether bits change places within a block."""
        return self.weight_type in (_T.Q4_K, _T.Q5_K, _T.Q6_K, _T.Q2_K, _T.Q3_K, _T.Q5_0, _T.Q5_1, *LEVEL_NUMBERS)

    @property
    def is_as_in_file(self) -> bool:
        """Whether rows are copied to the device as they are."""
        return not self.is_split and not self.is_rearranged

    @property
    def plane_offsets(self) -> tuple[int, ...]:
        """Where each plane starts."""
        offsets = [0]
        for field in self.fields[:-1]:
            offsets.append(align_up(offsets[-1] + self.n_rows * self.row_blocks * field.n_bytes, PLANE_ALIGNMENT))
        return tuple(offsets)

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole matrix; planes can be copied 16 bytes at a time, beyond their end, too."""
        n_bytes = self.plane_offsets[-1] + self.n_rows * self.row_strides[-1]
        return align_up(n_bytes, 16) if self.is_split else n_bytes

    @property
    def row_strides(self) -> tuple[int, ...]:
        """Bytes from one row to the next in each plane."""
        return tuple(self.row_blocks * field.n_bytes for field in self.fields)

    def plane_arguments(self, base: int) -> tuple[list[int], list[int]]:
        """Address and row stride of each plane of a matrix at ``base``, filled up to ``MAX_PLANES``."""
        n_unused = MAX_PLANES - len(self.fields)
        planes = [base + offset for offset in self.plane_offsets]
        return planes + [base] * n_unused, [*self.row_strides, *[0] * n_unused]

    def check(self) -> None:
        """Raise KernelArgumentError unless the kernels read this type and row length."""
        if self.weight_type not in _PLANES:
            raise KernelArgumentError(f"weights of type {self.weight_type.name} have no kernel")
        multiple = max(self.block_elements, 32)
        if self.n_cols % multiple:
            raise KernelArgumentError(
                f"rows of {self.n_cols} weights of type {self.weight_type.name}, needs a multiple of {multiple}"
            )


@kernel_builder
def build_split_planes_kernel(fields: tuple[BlockField, ...], block_bytes: int) -> Kernel:
    """Two bytes a thread where every field starts and ends at an even byte, else one."""
    unit = 1 if block_bytes % 2 else 2
    n_units = block_bytes // unit
    begins = tuple(field.begin // unit for field in fields)
    sizes = tuple(field.n_bytes // unit for field in fields)
    n_fields = len(fields)

    def split_planes_kernel(blocks, matrix, starts, first_block, n_blocks):
        i = cuda.grid(1)
        if i >= n_blocks * n_units:
            return
        block = i // n_units
        unit = i % n_units

        value = blocks[i]
        for f in range(n_fields):
            within = unit - begins[f]
            if within >= 0 and within < sizes[f]:
                matrix[starts[f] + (first_block + block) * sizes[f] + within] = value

    units = types.Array(types.uint8 if unit == 1 else types.uint16, 1, "C")
    offsets = types.UniTuple(types.int64, n_fields)
    return Kernel(split_planes_kernel, (units, units, offsets, types.int64, types.int64), n_threads=256)


@kernel_builder
def build_rearrange_kernel(block_bytes: int) -> Kernel:
    """A thread moves the quants of one sub-block of Q4_K or Q5_K, the first of a block its scales, too."""
    block_words = block_bytes // 4
    quants_at = block_words - 32
    has_fifth_bits = quants_at > 4

    def rearrange_kernel(blocks, matrix, first_block, n_blocks):
        i = cuda.grid(1)
        if i >= n_blocks * 8:
            return
        block = i // 8
        part = i % 8
        source = block * block_words
        target = (first_block + block) * block_words

        nibble = 4 * (part & 1)
        for k in range(4):
            at = source + quants_at + 8 * (part >> 1) + k
            low = (int64(blocks[at]) >> nibble) & 0x0F0F0F0F
            high = (int64(blocks[at + 4]) >> nibble) & 0x0F0F0F0F
            matrix[target + quants_at + 4 * part + k] = uint32(low | (high << 4))
        if has_fifth_bits:
            bits = int64(0)
            for k in range(8):
                bits |= ((int64(blocks[source + 4 + k]) >> part) & 0x01010101) << k
            matrix[target + 4 + part] = uint32(bits)
        if part == 0:
            scales, mins, tops = int64(blocks[source + 1]), int64(blocks[source + 2]), int64(blocks[source + 3])
            packed, digits = int64(0), int64(0)
            for j in range(4):
                at = 8 * j
                minimum = (mins >> at) & 0x3F
                packed |= ((scales >> at) & 0x3F | (minimum >> 4) << 6) << at
                digits |= (minimum & 0xF) << (4 * j)
            matrix[target] = blocks[source]
            matrix[target + 1] = uint32(packed)
            packed = int64(0)
            for j in range(4):
                at = 8 * j
                scale = (tops >> at) & 0xF | ((scales >> (at + 6)) & 3) << 4
                minimum = (tops >> (at + 4)) & 0xF | ((mins >> (at + 6)) & 3) << 4
                packed |= (scale | (minimum >> 4) << 6) << at
                digits |= (minimum & 0xF) << (4 * j + 16)
            matrix[target + 2] = uint32(packed)
            matrix[target + 3] = uint32(digits)

    words = types.Array(types.uint32, 1, "C")
    return Kernel(rearrange_kernel, (words, words, types.int64, types.int64), n_threads=256)


@kernel_builder
def build_rearrange_q6_k_kernel() -> Kernel:
    """A thread moves one sub-block of 32 weights, two bytes at a time, the first of a block d, too.

    ``d_at``: where the plane of d begins.
    """

    def rearrange_q6_k_kernel(blocks, matrix, d_at, first_block, n_blocks):
        i = cuda.grid(1)
        if i >= n_blocks * 8:
            return
        block = i // 8
        part = i % 8
        source = block * 105
        target = (first_block + block) * 104

        nibbles_at, nibble = source + 32 * (part >> 2) + 16 * (part & 1), 2 * (part & 2)
        pairs_at, pair = source + 64 + 16 * (part >> 2), 2 * (part & 3)
        for k in range(4):
            word = int64(0)
            for j in range(2):
                at = nibbles_at + 2 * k + j
                low = (int64(blocks[at]) >> nibble) & 0x0F0F
                high = (int64(blocks[at + 8]) >> nibble) & 0x0F0F
                word |= (low | high << 4) << (16 * j)
            word = word << 2 | word >> 30
            matrix[target + 40 + 8 * part + 2 * k] = uint16(word & 0xFFFF)
            matrix[target + 40 + 8 * part + 2 * k + 1] = uint16((word >> 16) & 0xFFFF)
        for group in range(2):
            word = int64(0)
            for j in range(8):
                top = ((int64(blocks[pairs_at + 8 * group + j]) >> pair) & 0x0303) ^ 0x0202
                word |= top << (16 * (j & 1) + 2 * (j >> 1))
            matrix[target + 8 + 4 * part + 2 * group] = uint16(word & 0xFFFF)
            matrix[target + 8 + 4 * part + 2 * group + 1] = uint16(word >> 16)
        matrix[target + part] = uint16(int64(blocks[source + 96 + part]) ^ 0x8080)
        if part == 0:
            matrix[d_at + first_block + block] = blocks[source + 104]

    halves = types.Array(types.uint16, 1, "C")
    return Kernel(rearrange_q6_k_kernel, (halves, halves, *[types.int64] * 3), n_threads=256)


@kernel_builder
def build_rearrange_q2_k_kernel() -> Kernel:
    """A thread moves a unit of 64 weights: its quants and scales, the first of a block d and that of minima, too.

    ``scales_at``, ``d_at``: where these planes begin.
    """

    def rearrange_q2_k_kernel(blocks, matrix, scales_at, d_at, first_block, n_blocks):
        i = cuda.grid(1)
        if i >= n_blocks * 4:
            return
        block = i // 4
        part = i % 4
        source = block * 21
        target = (first_block + block) * 4 + part

        scales = int64(0)
        for k in range(4):
            pair = 8 * (k >> 1) + 2 * part + (k & 1)
            scales |= ((int64(blocks[source + (pair >> 2)]) >> (8 * (pair & 3))) & 0xFF) << (8 * k)
            word = int64(0)
            for j in range(4):
                word |= ((int64(blocks[source + 4 + 4 * k + j]) >> (2 * part)) & 0x03030303) << (2 * j)
            matrix[4 * target + k] = uint32(word)
        matrix[scales_at + target] = uint32(scales)
        if part == 0:
            matrix[d_at + first_block + block] = blocks[source + 20]

    words = types.Array(types.uint32, 1, "C")
    return Kernel(rearrange_q2_k_kernel, (words, words, *[types.int64] * 4), n_threads=256)


@kernel_builder
def build_rearrange_q3_k_kernel() -> Kernel:
    """A thread moves a unit of 64 weights, two bytes at a time, the first of a block its scales and d, too.

    ``others_at``, ``scales_at``, ``d_at``: where these planes begin.
    """

    def rearrange_q3_k_kernel(blocks, matrix, others_at, scales_at, d_at, first_block, n_blocks):
        i = cuda.grid(1)
        if i >= n_blocks * 4:
            return
        block = i // 4
        part = i % 4
        source = block * 55
        target = (first_block + block) * 4 + part

        for half in range(2):
            for pair in range(2):
                a, b, c = int64(0), int64(0), int64(0)
                for k in range(8):
                    low = int64(blocks[source + 16 + 16 * half + 2 * k + pair]) >> (2 * part)
                    high = int64(blocks[source + 2 * k + pair]) >> (4 * half + part)
                    three = (low & 0x0303 | (high & 0x0101) << 2) ^ 0x0404
                    if k < 2:
                        a |= three << (5 - 3 * k)
                    elif k < 4:
                        b |= three << (5 - 3 * (k - 2))
                    elif k < 6:
                        c |= three << (5 - 3 * (k - 4))
                    else:
                        upper = (three >> 1) & 0x0303
                        if k == 6:
                            a |= upper
                        else:
                            b |= upper
                        c |= (three & 0x0101) << (k - 6)
                matrix[8 * target + 4 * half + pair] = uint16(a)
                matrix[8 * target + 4 * half + 2 + pair] = uint16(b)
                matrix[others_at + 4 * target + 2 * half + pair] = uint16(c)
        if part == 0:
            nibbles, pairs = int64(0), int64(0)
            # scales of place p, i of 4: sub-block 8 (i >> 1) + 2 p + (i & 1)
            for p in range(4):
                for i in range(4):
                    k = 2 * p + (i & 1)
                    low = int64(blocks[source + 48 + (k >> 1)]) >> (8 * (k & 1) + 4 * (i >> 1))
                    high = int64(blocks[source + 52 + ((k & 3) >> 1)]) >> (8 * (k & 1) + 4 * (i >> 1) + 2 * (k >> 2))
                    nibbles |= (low & 15) << (32 * (p >> 1) + 8 * i + 4 * (p & 1))
                    pairs |= (high & 3) << (8 * i + 2 * p)
            at = scales_at + 6 * (first_block + block)
            for w in range(2):
                word = (nibbles >> (32 * w)) & 0xFFFFFFFF
                word = word << 2 | word >> 30
                matrix[at + 2 * w] = uint16(word & 0xFFFF)
                matrix[at + 2 * w + 1] = uint16((word >> 16) & 0xFFFF)
            matrix[at + 4] = uint16(pairs & 0xFFFF)
            matrix[at + 5] = uint16(pairs >> 16)
            matrix[d_at + first_block + block] = blocks[source + 54]

    halves = types.Array(types.uint16, 1, "C")
    return Kernel(rearrange_q3_k_kernel, (halves, halves, *[types.int64] * 5), n_threads=256)


@kernel_builder
def build_rearrange_bits_kernel(block_bytes: int) -> Kernel:
    """A thread puts the fifth bits of a block of Q5_0 or Q5_1 where ``weight_units`` has them, two bytes at a time."""
    block_halves = block_bytes // 2
    bits_in_block = block_halves - 10  # 16 bytes of nibbles are behind them

    def rearrange_bits_kernel(blocks, matrix, bits_at, first_block, n_blocks):
        i = cuda.grid(1)
        if i >= n_blocks:
            return
        source = i * block_halves + bits_in_block
        target = bits_at + 2 * (first_block + i)

        word = int64(0)
        for half in range(2):
            bits = int64(blocks[source + half])
            for j in range(16):
                word |= ((bits >> j) & 1) << (8 * (j & 3) + 4 * half + (j >> 2))
        matrix[target] = uint16(word & 0xFFFF)
        matrix[target + 1] = uint16(word >> 16)

    halves = types.Array(types.uint16, 1, "C")
    return Kernel(rearrange_bits_kernel, (halves, halves, *[types.int64] * 3), n_threads=256)


@kernel_builder
def build_number_levels_kernel(numbers: tuple[int, ...]) -> Kernel:
    """A thread turns four bytes of nibbles as in the file into the numbers of four weights and of the four 16 further.

    ``numbers``: of the level that each nibble of the file stands for.
    """
    table_low = sum(number << 4 * i for i, number in enumerate(numbers[:8]))
    table_high = sum(number << 4 * i for i, number in enumerate(numbers[8:]))

    def number_levels_kernel(matrix, first_word, n_words):
        i = cuda.grid(1)
        if i >= n_words:
            return
        word = int64(matrix[first_word + i])
        found = int64(0)
        for j in range(8):
            digit = (word >> 4 * j) & 15
            table = int64(table_low) if digit < 8 else int64(table_high)
            found |= ((table >> 4 * (digit & 7)) & 15) << (4 * (j >> 1) + 16 * (j & 1))
        matrix[first_word + i] = uint32(found)

    words = types.Array(types.uint32, 1, "C")
    return Kernel(number_levels_kernel, (words, types.int64, types.int64), n_threads=256)


def lay_out(blocks: Any, matrix: Any, *, geometry: WeightGeometry, first_row: int, stream: Any) -> None:
    """Put rows as they are in the file into the device layout.

    blocks   geometry.unit [bytes of n rows]     rows ``first_row`` and following, GGUF blocks
    matrix   geometry.unit [geometry.n_bytes]    the whole matrix; both lengths in bytes
    Raises   KernelArgumentError if sizes disagree or the layout is the file's (copy instead).
    """
    geometry.check()
    if geometry.is_as_in_file:
        raise KernelArgumentError(f"weights of type {geometry.weight_type.name} keep the file's layout: copy them")
    unit_bytes = np.dtype(geometry.unit).itemsize
    check_array("blocks", blocks, geometry.unit, (None,))
    check_array("matrix", matrix, geometry.unit, (geometry.n_bytes // unit_bytes,))
    row_units = geometry.row_blocks * geometry.block_bytes // unit_bytes
    n_rows, rest = divmod(blocks.shape[0], row_units)
    if rest or first_row + n_rows > geometry.n_rows:
        raise KernelArgumentError(
            f"blocks: {blocks.shape[0] * unit_bytes} bytes from row {first_row}, needs whole rows of "
            f"{row_units * unit_bytes} bytes "
            f"within {geometry.n_rows}"
        )
    n_blocks = n_rows * geometry.row_blocks
    first_block = first_row * geometry.row_blocks
    starts = tuple(offset // unit_bytes for offset in geometry.plane_offsets)
    if geometry.weight_type is _T.Q6_K:
        kernel = build_rearrange_q6_k_kernel()
        grid = (ceil_div(8 * n_blocks, kernel.n_threads),)
        kernel.launch(grid, stream, blocks, matrix, starts[1], first_block, n_blocks)
        return
    if geometry.weight_type is _T.Q2_K:
        kernel = build_rearrange_q2_k_kernel()
        grid = (ceil_div(4 * n_blocks, kernel.n_threads),)
        words = (blocks.view(np.uint32), matrix.view(np.uint32))
        kernel.launch(grid, stream, *words, *(start // 2 for start in starts[1:]), first_block, n_blocks)
        return
    if geometry.weight_type is _T.Q3_K:
        kernel = build_rearrange_q3_k_kernel()
        grid = (ceil_div(4 * n_blocks, kernel.n_threads),)
        kernel.launch(grid, stream, blocks, matrix, *starts[1:], first_block, n_blocks)
        return
    if not geometry.is_split:
        kernel = build_rearrange_kernel(geometry.block_bytes)
        arrays = (blocks.view(np.uint32), matrix.view(np.uint32))
        kernel.launch((ceil_div(8 * n_blocks, kernel.n_threads),), stream, *arrays, first_block, n_blocks)
        return
    kernel = build_split_planes_kernel(geometry.fields, geometry.block_bytes)
    grid = (ceil_div(blocks.shape[0], kernel.n_threads),)
    kernel.launch(grid, stream, blocks, matrix, starts, first_block, n_blocks)
    if geometry.weight_type in LEVEL_NUMBERS:
        kernel = build_number_levels_kernel(LEVEL_NUMBERS[geometry.weight_type])
        block_words = geometry.fields[0].n_bytes // 4
        grid = (ceil_div(n_blocks * block_words, kernel.n_threads),)
        kernel.launch(grid, stream, matrix.view(np.uint32), first_block * block_words, n_blocks * block_words)
    elif geometry.is_rearranged:
        kernel = build_rearrange_bits_kernel(geometry.block_bytes)
        grid = (ceil_div(n_blocks, kernel.n_threads),)
        kernel.launch(grid, stream, blocks, matrix, starts[1], first_block, n_blocks)
