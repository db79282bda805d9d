"""The device layout of weight matrices, cut out of the file's blocks by numpy."""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType

from cuda_kernels.weight_units import LEVEL_NUMBERS
from cuda_kernels.weights import WeightGeometry


def laid_out_on_host(geometry: WeightGeometry, blocks: np.ndarray) -> np.ndarray:
    """uint8 [geometry.n_bytes]; ``blocks`` uint8 [n_rows, bytes of a row] as in the file."""
    matrix = np.zeros(geometry.n_bytes, np.uint8)
    by_block = blocks.reshape(-1, geometry.block_bytes)
    if geometry.weight_type in (GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q5_K):
        by_block = _rearranged(by_block)
    elif geometry.weight_type is GGMLQuantizationType.Q6_K:
        by_block = _rearranged_q6_k(by_block)
    elif geometry.weight_type is GGMLQuantizationType.Q2_K:
        by_block = _rearranged_q2_k(by_block)
    elif geometry.weight_type is GGMLQuantizationType.Q3_K:
        by_block = _rearranged_q3_k(by_block)
    elif geometry.weight_type in LEVEL_NUMBERS:
        by_block = _numbered(by_block, geometry)
    elif geometry.is_rearranged:
        by_block = _rearranged_bits(by_block)
    for field, offset in zip(geometry.fields, geometry.plane_offsets, strict=True):
        plane = by_block[:, field.begin : field.begin + field.n_bytes].reshape(-1)
        matrix[offset : offset + plane.size] = plane
    return matrix


def _rearranged(blocks: np.ndarray) -> np.ndarray:
    """Blocks of Q4_K or Q5_K by sub-blocks of 32 weights."""
    n_blocks, n_bytes = blocks.shape
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    nibbles = blocks[:, n_bytes - 128 :].reshape(n_blocks, 4, 1, 32)
    quants = np.concatenate([nibbles & 15, nibbles >> 4], axis=2).reshape(n_blocks, 8, 2, 16)
    parts = [blocks[:, :4], scales | (mins >> 4) << 6, (mins[:, ::2] & 15) | (mins[:, 1::2] & 15) << 4]
    if n_bytes == 176:
        by_weight = np.unpackbits(blocks[:, 16:48], axis=1, bitorder="little").reshape(n_blocks, 32, 8)
        by_sub_block = by_weight.transpose(0, 2, 1)  # [block, sub-block, weight]
        by_byte = by_sub_block.reshape(n_blocks, 8, 2, 4, 4).transpose(0, 1, 4, 2, 3)  # byte, half, word
        parts.append(np.packbits(by_byte.reshape(n_blocks, 256), axis=1, bitorder="little"))
    parts.append((quants[:, :, 0] | quants[:, :, 1] << 4).reshape(n_blocks, 128))
    return np.concatenate(parts, axis=1)


def _rearranged_q6_k(blocks: np.ndarray) -> np.ndarray:
    """Blocks by sub-blocks of 32 weights: scales without their sign, bit pairs, nibbles."""
    n_blocks = len(blocks)
    ql, qh = blocks[:, :128].reshape(n_blocks, 2, 1, 64), blocks[:, 128:192].reshape(n_blocks, 2, 1, 32)
    low = np.concatenate([ql & 15, ql >> 4], axis=2).reshape(n_blocks, 8, 2, 16)  # of sub-block and group
    high = (qh >> np.arange(0, 8, 2, dtype=np.uint8).reshape(4, 1) & 3).reshape(
        n_blocks, 8, 2, 4, 4
    ) ^ 2  # and word, byte
    pairs = np.zeros((n_blocks, 8, 2, 4), np.uint8)
    for k in range(4):
        pairs |= high[:, :, :, k] << np.uint8(2 * k)
    words = (low[:, :, 0] | low[:, :, 1] << 4).reshape(n_blocks, -1).view(np.uint32)
    words = words << 2 | words >> 30
    scales = blocks[:, 192:208] ^ 0x80
    return np.concatenate([scales, pairs.reshape(n_blocks, 64), words.view(np.uint8), blocks[:, 208:]], axis=1)


def _by_pair(of_sub_blocks: np.ndarray) -> np.ndarray:
    """What 16 groups of 16 weights have, [block, group, ..] -> [block, place, 4 groups of a unit, ..]."""
    pairs = of_sub_blocks.reshape(len(of_sub_blocks), 2, 4, 2, *of_sub_blocks.shape[2:])  # upper or lower, place
    return pairs.swapaxes(1, 2).reshape(len(of_sub_blocks), 4, 4, *of_sub_blocks.shape[2:])


def _pairs_of_bits(quants: np.ndarray) -> np.ndarray:
    """64 bytes of a block -> numbers below 4, [block, 16 groups, word, byte]."""
    halves = quants.reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8).reshape(4, 1) & 3
    return halves.reshape(-1, 16, 4, 4)


def _rearranged_q2_k(blocks: np.ndarray) -> np.ndarray:
    """Scales and minima, bit pairs, both by units of 64 weights; d and that of the minima."""
    by_unit = _by_pair(_pairs_of_bits(blocks[:, 16:80]))
    words = sum(by_unit[:, :, :, k] << np.uint8(2 * k) for k in range(4))
    scales = _by_pair(blocks[:, :16])
    return np.concatenate([scales.reshape(-1, 16), words.reshape(-1, 64), blocks[:, 80:]], axis=1)


def _rearranged_q3_k(blocks: np.ndarray) -> np.ndarray:
    """By units of 64 weights: what is left of triples of bits, the others, scales; d."""
    n_blocks = len(blocks)
    high = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8).reshape(8, 1) & 1
    low = _pairs_of_bits(blocks[:, 32:96])
    three = _by_pair((low | high.reshape(n_blocks, 16, 4, 4) << 2) ^ 4).reshape(n_blocks, 4, 2, 8, 4)
    quads = [three[:, :, :, k] for k in range(8)]
    a, b, c = (quads[2 * i] << 5 | quads[2 * i + 1] << 2 for i in range(3))
    a, b, c = a | quads[6] >> 1, b | quads[7] >> 1, c | quads[6] & 1 | (quads[7] & 1) << 1
    packed = blocks[:, 96:108]
    low_scales = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    high_scales = np.concatenate([packed[:, 8:] >> np.uint8(2 * i) & 3 for i in range(4)], axis=1)
    low_scales, high_scales = _by_pair(low_scales), _by_pair(high_scales)
    nibbles = np.ascontiguousarray(low_scales[:, ::2] | low_scales[:, 1::2] << 4).reshape(n_blocks, 8).view(np.uint32)
    nibbles = (nibbles << 2 | nibbles >> 30).view(np.uint8)
    pairs = sum(high_scales[:, p] << np.uint8(2 * p) for p in range(4))
    others, quants = c.reshape(n_blocks, 32), np.stack([a, b], axis=3).reshape(n_blocks, 64)
    return np.concatenate([others, quants, nibbles, pairs, blocks[:, 108:]], axis=1)


def _rearranged_bits(blocks: np.ndarray) -> np.ndarray:
    """Blocks of Q5_0 or Q5_1: bit k of byte b is of byte b of word k of the low nibbles, bit 4 + k of the high ones."""
    at = blocks.shape[1] - 20
    by_weight = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little").reshape(
        -1, 2, 4, 4
    )  # half, word, byte
    by_byte = by_weight.transpose(0, 3, 1, 2).reshape(-1, 32)
    moved = blocks.copy()
    moved[:, at : at + 4] = np.packbits(by_byte, axis=1, bitorder="little")
    return moved


def _numbered(blocks: np.ndarray, geometry: WeightGeometry) -> np.ndarray:
    """Numbers of levels instead of the nibbles of the file: four weights, then the four 16 further, in every word."""
    field = geometry.fields[0]
    place = slice(field.begin, field.begin + field.n_bytes)
    nibbles = blocks[:, place].reshape(-1, 4)
    numbers = np.array(LEVEL_NUMBERS[geometry.weight_type], np.uint8)[
        np.concatenate([nibbles & 15, nibbles >> 4], axis=1)
    ]
    moved = blocks.copy()
    moved[:, place] = (numbers[:, ::2] | numbers[:, 1::2] << 4).reshape(len(blocks), -1)
    return moved


def _scales_and_mins(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight numbers of six bits each: four whole, then four whose upper bits lie above the first."""
    first, second, low = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, low & 15 | first >> 6 << 4], axis=1)
    mins = np.concatenate([second & 63, low >> 4 | second >> 6 << 4], axis=1)
    return scales, mins
