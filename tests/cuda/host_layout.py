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
