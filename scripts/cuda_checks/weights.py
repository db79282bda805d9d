"""Weight types: layout, matrix-vector products, dequantisation, embedding rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numba import cuda

from cuda_kernels.dequant import dequantise_rows, embed_rows
from cuda_kernels.matvec import Product, matvec
from cuda_kernels.quantise import quantise
from cuda_kernels.row_units import takes_float_activations
from cuda_kernels.weights import FAST_TYPES, WeightGeometry, lay_out
from scripts.cuda_checks.attention import poisoned
from scripts.cuda_checks.report import Check, Outcome, close, same_bits

SHAPES = ((7, 256), (130, 768), (33, 5120))
SHAPE_OF_BLOCKS_OF_32 = (5, 576)


def random_blocks(geometry: WeightGeometry, rng: np.random.Generator) -> np.ndarray:
    """Random rows in the file's layout, uint8 [n_rows, bytes of a row]: random bits with scales of ordinary size."""
    weight_type = geometry.weight_type
    if takes_float_activations(weight_type):
        values = rng.standard_normal((geometry.n_rows, geometry.n_cols), dtype=np.float32)
        if weight_type is GGMLQuantizationType.F32:
            return values.view(np.uint8)
        if weight_type is GGMLQuantizationType.F16:
            return values.astype(np.float16).view(np.uint8)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    shape = (geometry.n_rows, geometry.row_blocks, geometry.block_bytes)
    blocks = rng.integers(0, 256, shape, dtype=np.uint8)
    if weight_type is GGMLQuantizationType.MXFP4:
        blocks[..., 0] = rng.integers(118, 124, shape[:2])
        return blocks.reshape(geometry.n_rows, -1)
    n_scales = 2 if weight_type.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K", "Q2_K") else 1
    at = {"Q6_K": 208, "Q2_K": 80, "Q3_K": 108}.get(weight_type.name, 0)
    scales = (rng.random((*shape[:2], n_scales)) * 0.02 + 0.001).astype(np.float16)
    blocks[..., at : at + 2 * n_scales] = scales.view(np.uint8)
    return blocks.reshape(geometry.n_rows, -1)


def exact_weights(geometry: WeightGeometry, blocks: np.ndarray) -> np.ndarray:
    """float32 [n_rows, n_cols] by the reference dequantisation of the gguf package."""
    values = gguf.quants.dequantize(blocks, geometry.weight_type)
    return np.asarray(values, np.float32).reshape(geometry.n_rows, geometry.n_cols)


def upload(geometry: WeightGeometry, blocks: np.ndarray) -> Any:
    """The matrix in its device layout, in two parts as a loader would send it."""
    if geometry.is_as_in_file:
        return cuda.to_device(blocks.reshape(-1))
    d_matrix = poisoned((geometry.n_bytes // np.dtype(geometry.unit).itemsize,), geometry.unit)
    cut = geometry.n_rows // 2
    for first_row, part in ((0, blocks[:cut]), (cut, blocks[cut:])):
        d_part = cuda.to_device(part.reshape(-1).view(geometry.unit))
        lay_out(d_part, d_matrix, geometry=geometry, first_row=first_row, stream=0)
    return d_matrix.view(np.uint8)


def check_weights(weight_type: GGMLQuantizationType, n_rows: int, n_cols: int, seed: int) -> Iterator[Outcome]:
    rng = np.random.default_rng(seed)
    geometry = WeightGeometry(weight_type=weight_type, n_rows=n_rows, n_cols=n_cols)
    blocks = random_blocks(geometry, rng)
    weights = exact_weights(geometry, blocks)
    d_matrix = upload(geometry, blocks)
    label = f"{n_rows}x{n_cols}"

    d_half = poisoned((n_rows - 1, n_cols), np.float16)
    dequantise_rows(d_matrix, d_half, geometry=geometry, first_row=1, stream=0)
    exact = weights[1:].astype(np.float64)
    yield close(f"{label} to f16", d_half.copy_to_host(), exact, weights[1:].astype(np.float16), times=1.01)

    ids = rng.integers(0, n_rows, 9).astype(np.int32)
    d_rows = poisoned((9, n_cols))
    embed_rows(d_matrix, cuda.to_device(ids), d_rows, geometry=geometry, stream=0)
    yield close(f"{label} rows by id", d_rows.copy_to_host(), weights[ids].astype(np.float64), weights[ids], times=1.0)

    x = rng.standard_normal((8, n_cols), dtype=np.float32)
    x[3] = 0.0
    d_x, d_scales, used = cuda.to_device(x), None, x.astype(np.float64)
    if not takes_float_activations(weight_type):
        d_quants, d_scales = poisoned((8, n_cols), np.int8), poisoned((8, n_cols // 16, 2))
        quantise(d_x, d_quants, d_scales, stream=0)
        quants, scales = d_quants.copy_to_host().astype(np.float64), d_scales.copy_to_host()
        by_block = quants.reshape(8, -1, 16)
        used = (by_block * scales[..., :1].astype(np.float64)).reshape(8, n_cols)
        step = np.repeat(np.abs(x).reshape(8, -1, 32).max(axis=-1) / 127.0, 32, axis=-1)
        off = np.abs(used - x) - 0.5001 * step - 1e-6
        yield Outcome(what=f"{label} activations off by more than half a step", error=float((off > 0).sum()), bound=0.0)
        yield same_bits(f"{label} activation sums", scales[..., 1], by_block.sum(axis=-1).astype(np.float32))
        d_x = d_quants
    exact = used @ weights.astype(np.float64).T
    plain = used.astype(np.float32) @ weights.T
    outputs = {}
    for n_vectors in range(1, 9):
        d_out = poisoned((n_vectors, n_rows))
        some_scales = None if d_scales is None else d_scales[:n_vectors]
        product = Product(matrix=d_matrix, geometry=geometry, out=d_out)
        matvec([product], d_x[:n_vectors], some_scales, is_added=False, stream=0)
        outputs[n_vectors] = d_out.copy_to_host()
    live = [v for v in range(8) if v != 3]
    yield close(f"{label} x 8 vectors", outputs[8][live], exact[live], plain[live], times=8.0)
    yield same_bits(f"{label}: zero vector", outputs[8][3], np.zeros(n_rows, np.float32))
    for n_vectors in range(1, 8):
        yield same_bits(f"{label} x {n_vectors}: bits of 8", outputs[n_vectors], outputs[8][:n_vectors])


def checks() -> Iterator[Check]:
    for i, weight_type in enumerate(FAST_TYPES):

        def run(weight_type: GGMLQuantizationType = weight_type, i: int = i) -> Iterator[Outcome]:
            block_elements = gguf.GGML_QUANT_SIZES[weight_type][0]
            shapes = SHAPES if block_elements == 256 else (*SHAPES, SHAPE_OF_BLOCKS_OF_32)
            for n_rows, n_cols in shapes:
                yield from check_weights(weight_type, n_rows, n_cols, seed=i)

        yield Check(family="weights", case=weight_type.name, run=run)
