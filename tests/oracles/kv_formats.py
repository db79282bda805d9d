"""Rows of every KV type in plain numpy: a page region's planes as GGML's blocks, and what the blocks stand for.

Shares no code with the kernels; the ``gguf`` package unpacks GGML's types.
"""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt

from kvs_core.kv_types import KvType, RegionGeometry

Bytes = npt.NDArray[np.uint8]


def read_blocks(region_bytes: Bytes, region: RegionGeometry, row: int) -> Bytes:
    """One row of one head as GGML lays it out: block after block, each scale first, then high bits, then quants.

    ``region_bytes`` starts where the head's region starts. Unquantised rows are their bytes.
    """
    planes = (
        (region.scale_offset, region.scale_row_bytes),
        (region.high_offset, region.high_row_bytes),
        (0, region.row_bytes),
    )
    n_blocks = region.head_dim // region.kv_type.block_elements if region.kv_type.is_quantised else 1
    if region.kv_type.is_turbo:
        n_blocks = region.head_dim // turbo_group(region.head_dim)
    parts = [region_bytes[begin + row * n_bytes :][:n_bytes].reshape(n_blocks, -1) for begin, n_bytes in planes]
    return np.concatenate(parts, axis=1).reshape(-1)


def read_row(region_bytes: Bytes, region: RegionGeometry, row: int) -> npt.NDArray[np.float64]:
    """The values of one row of one head, float64 [head_dim]."""
    blocks = read_blocks(region_bytes, region, row)
    if region.kv_type.is_turbo:
        n_blocks = region.head_dim // turbo_group(region.head_dim)
        return unpack_turbo(blocks.reshape(n_blocks, -1), region.kv_type)
    with np.errstate(invalid="ignore"):  # a block that was not finite has a scale of NaN
        return gguf.quants.dequantize(blocks, ggml_type(region.kv_type)).astype(np.float64)


TURBO_LEVELS = {
    KvType.TURBO2: (0.039994, 0.133462),
    KvType.TURBO3: (0.021460, 0.065717, 0.117832, 0.190685),
    KvType.TURBO4: (0.011353, 0.034311, 0.058069, 0.083317, 0.111065, 0.143047, 0.182907, 0.241556),
}
"""Positive levels, for elements of variance 1 / 128."""


def turbo_group(head_dim: int) -> int:
    return 64 if head_dim % 128 else 128


def turbo_levels(kv_type: KvType) -> npt.NDArray[np.float64]:
    positive = np.array(TURBO_LEVELS[kv_type])
    return np.concatenate([-positive[::-1], positive])


def unpack_turbo(blocks: Bytes, kv_type: KvType) -> npt.NDArray[np.float64]:
    """Values of uint8 [n_blocks, n_bytes], still rotated: a half as scale, then 2 or 4 bits an element; the third bits
    of turbo3 come before its other two, as ``read_blocks`` puts planes."""
    scales = blocks[:, :2].copy().view("<f2").astype(np.float64)
    rest = blocks[:, 2:]
    if kv_type is KvType.TURBO3:
        high, rest = np.split(rest, [rest.shape[1] // 3], axis=1)
    n_bits = 4 if kv_type is KvType.TURBO4 else 2
    bits = np.unpackbits(rest, axis=1, bitorder="little").reshape(len(blocks), -1, n_bits)
    indices = bits @ (1 << np.arange(n_bits))
    if kv_type is KvType.TURBO3:
        indices = indices + 4 * np.unpackbits(high, axis=1, bitorder="little")
    with np.errstate(invalid="ignore"):
        return (turbo_levels(kv_type)[indices] * scales).reshape(-1)


def ggml_type(kv_type: KvType) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[kv_type.name]


def quantise(rows: npt.NDArray[np.float32], kv_type: KvType) -> Bytes:
    """Blocks of float32 [n_rows, head_dim] as a reference quantiser makes them: uint8 [n_rows, n_bytes]."""
    if kv_type is KvType.IQ4_NL:
        return np.stack([np.concatenate([_quantise_iq4_nl(block) for block in row.reshape(-1, 32)]) for row in rows])
    return gguf.quants.quantize(rows, ggml_type(kv_type)).view(np.uint8).reshape(len(rows), -1)


def _quantise_iq4_nl(block: npt.NDArray[np.float32]) -> Bytes:
    """GGML's reference for 32 values: nearest levels for the scale that maps the furthest value to the lowest level,
    then the scale of least squares for those levels, each value weighted by its square, all in float32."""
    levels = np.array(gguf.quants.IQ4_NL.kvalues, dtype=np.float32)
    furthest = block[np.abs(block).argmax()]
    scale = np.float32(0.0)
    indices = np.zeros(32, dtype=np.uint8)
    if abs(furthest) >= np.float32(1e-15):
        inverse = np.float32(1.0) / (furthest / levels[0])
        # At equal distance the higher level is taken.
        distances = np.abs(np.float64(block * inverse)[:, None] - levels[::-1].astype(np.float64))
        indices = (15 - distances.argmin(axis=1)).astype(np.uint8)
        along = square = np.float32(0.0)
        for value, level in zip(block, levels[indices], strict=True):
            weighted = value * value * level
            along += weighted * value
            square += weighted * level
        scale = along / square
    quants = indices[:16] | indices[16:] << np.uint8(4)
    return np.concatenate([np.float16([scale]).view(np.uint8), quants])


def hadamard(size: int) -> npt.NDArray[np.float64]:
    """The normalised Walsh-Hadamard matrix: +-1 by the parity of the bits that row and column share."""
    index = np.arange(size)
    shared = index[:, None] & index
    parity = np.zeros((size, size), dtype=np.int64)
    for bit in range(size.bit_length()):
        parity ^= shared >> bit & 1
    return (1.0 - 2.0 * parity) / np.sqrt(size)
