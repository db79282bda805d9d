"""Kernels of a decode step that do several things at once: against float64, each token against a step of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from numba import cuda

from cuda_kernels.activation import Activation
from cuda_kernels.elementwise import write_step
from cuda_kernels.gated_matvec import gated_matvec
from cuda_kernels.launch import address_of
from cuda_kernels.matvec import Product, matvec
from cuda_kernels.merge import merge_partials, state_floats
from cuda_kernels.quantise import norm_quantise, quantise
from cuda_kernels.rope import RopePairing, rope
from cuda_kernels.rotate_heads import rotate_heads
from cuda_kernels.rotate_store import rotate_store
from cuda_kernels.row_units import takes_float_activations
from cuda_kernels.store import store_rows
from cuda_kernels.weights import WeightGeometry
from kvs_core.cpu import rotation as cpu_rotation
from kvs_core.cuda_scratch import LARGE_BEGIN
from kvs_core.kv_rotation import Rotation, choose_rotations
from kvs_core.kv_types import KvType, PageGeometry
from scripts.cuda_checks.attention import poisoned
from scripts.cuda_checks.experts import activate
from scripts.cuda_checks.report import Check, Outcome, close, same_bits
from scripts.cuda_checks.weights import exact_weights, random_blocks, upload

_T = GGMLQuantizationType
N_TOKENS = 8
STORED_TYPES = (
    *((kv_type, kv_type) for kv_type in (KvType.F16, KvType.F32, KvType.Q8_0, KvType.Q4_0, KvType.TURBO3)),
    (KvType.Q8_0, KvType.TURBO4),
    (KvType.TURBO2, KvType.F16),
    (KvType.BF16, KvType.IQ4_NL),
    (KvType.Q5_1, KvType.Q4_1),
)
STORED_HEADS = ((128, 128), (64, 64), (96, 48), (256, 64))


class Inputs:
    """Eight vectors, as a product with some weight type reads them, on the host (float64) and on the device."""

    def __init__(self, weight_type: GGMLQuantizationType, n_cols: int, rng: np.random.Generator) -> None:
        x = rng.standard_normal((N_TOKENS, n_cols), dtype=np.float32)
        self.vectors, self.scales, self.used = cuda.to_device(x), None, x.astype(np.float64)
        if not takes_float_activations(weight_type):
            quants, self.scales = quantised(self.vectors)
            self.vectors = quants
            by_group = quants.copy_to_host().astype(np.float64).reshape(N_TOKENS, -1, 16)
            self.used = (by_group * self.scales.copy_to_host()[..., :1]).reshape(N_TOKENS, n_cols)

    def first(self, n_vectors: int) -> tuple[Any, Any]:
        return self.vectors[:n_vectors], None if self.scales is None else self.scales[:n_vectors]


def quantised(d_x: Any) -> tuple[Any, Any]:
    n_rows, n_cols = d_x.shape
    quants, scales = poisoned((n_rows, n_cols), np.int8), poisoned((n_rows, n_cols // 16, 2))
    quantise(d_x, quants, scales, stream=0)
    return quants, scales


def check_products(weight_type: GGMLQuantizationType, n_cols: int) -> Iterator[Outcome]:
    """Three matrices in one launch, with a bias, stored and added."""
    rng = np.random.default_rng(n_cols)
    inputs = Inputs(weight_type, n_cols, rng)
    products, exacts, plains, befores = [], [], [], []
    for i, n_rows in enumerate((130, 33, 70)):
        geometry = WeightGeometry(weight_type=weight_type, n_rows=n_rows, n_cols=n_cols)
        blocks = random_blocks(geometry, rng)
        weights = exact_weights(geometry, blocks)
        bias = rng.standard_normal(n_rows, dtype=np.float32) if i == 1 else None
        before = rng.standard_normal((N_TOKENS, n_rows), dtype=np.float32)
        offset = 0.0 if bias is None else bias
        exacts.append(inputs.used @ weights.astype(np.float64).T + offset)
        plains.append(inputs.used.astype(np.float32) @ weights.T + np.float32(offset))
        befores.append(before)
        d_bias = None if bias is None else cuda.to_device(bias)
        products.append(Product(matrix=upload(geometry, blocks), geometry=geometry, out=None, bias=d_bias))

    def run(n_vectors: int, n_matrices: int, *, is_added: bool) -> list[np.ndarray]:
        some = [
            replace(
                product,
                out=cuda.to_device(before[:n_vectors]) if is_added else poisoned((n_vectors, product.geometry.n_rows)),
            )
            for product, before in zip(products[:n_matrices], befores, strict=False)
        ]
        matvec(some, *inputs.first(n_vectors), is_added=is_added, stream=0)
        return [product.out.copy_to_host() for product in some]

    all_eight = run(8, 3, is_added=False)
    for i in range(3):
        yield close(f"matrix {i} of 3 x 8 vectors", all_eight[i], exacts[i], plains[i], times=8.0)
    for n_vectors, n_matrices in ((1, 3), (4, 2), (3, 1)):
        for i, got in enumerate(run(n_vectors, n_matrices, is_added=False)):
            yield same_bits(f"matrix {i} of {n_matrices} x {n_vectors}: bits of 8", got, all_eight[i][:n_vectors])
    for n_vectors in (1, 4):
        for i, got in enumerate(run(n_vectors, 3, is_added=True)):
            expected = befores[i][:n_vectors] + all_eight[i][:n_vectors]
            yield same_bits(f"matrix {i} added x {n_vectors}", got, expected)


def check_gated(
    weight_type: GGMLQuantizationType, n_rows: int, n_cols: int, activation: Activation = Activation.SILU
) -> Iterator[Outcome]:
    rng = np.random.default_rng(n_cols + 1)
    inputs = Inputs(weight_type, n_cols, rng)
    geometry = WeightGeometry(weight_type=weight_type, n_rows=n_rows, n_cols=n_cols)
    blocks = [random_blocks(geometry, rng) for _ in range(2)]
    gate, up = (exact_weights(geometry, part) for part in blocks)
    scale = np.float32(8.0 / np.abs(inputs.used @ gate.T.astype(np.float64)).max())
    d_gate, d_up = (upload(geometry, part) for part in blocks)

    def reference(used: np.ndarray) -> np.ndarray:
        return activate(activation, used @ gate.T.astype(used.dtype), used @ up.T.astype(used.dtype))

    inputs.used *= scale
    if inputs.scales is None:
        inputs.vectors = cuda.to_device(inputs.used.astype(np.float32))
        inputs.used = inputs.used.astype(np.float32).astype(np.float64)
    else:
        scales = inputs.scales.copy_to_host()
        scales[..., 0] *= scale
        inputs.scales = cuda.to_device(scales)
    outputs = {}
    for n_vectors in (8, 1, 4):
        d_out = poisoned((n_vectors, n_rows))
        vectors = inputs.first(n_vectors)
        gated_matvec(d_gate, d_up, *vectors, d_out, geometry=geometry, activation=activation, stream=0)
        outputs[n_vectors] = d_out.copy_to_host()
        yield same_bits(f"{n_rows}x{n_cols} x {n_vectors}: bits of 8", outputs[n_vectors], outputs[8][:n_vectors])
    yield close(
        f"{n_rows}x{n_cols} x 8 vectors",
        outputs[8],
        reference(inputs.used),
        reference(inputs.used.astype(np.float32)),
        times=8.0,
    )


def check_norm_quantise(n_cols: int) -> Iterator[Outcome]:
    rng = np.random.default_rng(n_cols + 2)
    x, weight = rng.standard_normal((4, n_cols), dtype=np.float32), rng.standard_normal(n_cols, dtype=np.float32)
    x[1] *= np.float32(1e30)  # its squares are beyond float32
    x[2] = 0.0
    d_x, d_weight = cuda.to_device(x), cuda.to_device(weight)
    d_normed = poisoned(x.shape)
    quants, scales = poisoned(x.shape, np.int8), poisoned((4, n_cols // 16, 2))
    norm_quantise(d_x, d_weight, d_normed, quants, scales, eps=1e-5, stream=0)
    wide = x.astype(np.float64)
    exact = wide / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + 1e-5) * weight
    factor = 1.0 / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)
    plain = x * factor.astype(np.float32) * weight
    yield close(f"norm {n_cols}", d_normed.copy_to_host(), exact, plain, times=8.0)
    own_quants, own_scales = quantised(d_normed)
    yield same_bits(f"quants {n_cols}", quants.copy_to_host(), own_quants.copy_to_host())
    yield same_bits(f"scales {n_cols}", scales.copy_to_host(), own_scales.copy_to_host())
    one = [poisoned((1, n_cols)), poisoned((1, n_cols), np.int8), poisoned((1, n_cols // 16, 2))]
    norm_quantise(cuda.to_device(x[3:]), d_weight, *one, eps=1e-5, stream=0)
    for what, got, of_four in zip(("norm", "quants", "scales"), one, (d_normed, quants, scales), strict=True):
        yield same_bits(f"{what} {n_cols}: one row of many", got.copy_to_host()[0], of_four.copy_to_host()[3])


def check_rotate_store(
    types: tuple[KvType, KvType], pairing: RopePairing, head_dim: int, n_rot: int, rotates: bool
) -> Iterator[Outcome]:
    """Against ``rope``, ``rotate_heads`` and ``store``, which have oracles of their own."""
    rng = np.random.default_rng(head_dim + n_rot)
    type_k, type_v = types
    page = PageGeometry(
        page_tokens=64, n_head_kv=2, head_dim_k=head_dim, head_dim_v=head_dim, type_k=type_k, type_v=type_v
    )
    rotations = choose_rotations(page, plain_types=rotates)
    positions = np.array([3, 62, 63, 64, 65], np.int32)
    n_tokens, n_head, factor = len(positions), 6, 1.25
    q, k, v = (rng.standard_normal((n_tokens, n, head_dim), dtype=np.float32) for n in (n_head, 2, 2))
    d_positions = cuda.to_device(positions)
    frequencies = cuda.to_device(10000.0 ** (-np.arange(0, n_rot, 2) / n_rot))

    def pages_of() -> tuple[Any, Any]:
        buffer = cuda.to_device(np.zeros(2 * page.page_bytes, np.uint8))
        return buffer, cuda.to_device(address_of(buffer) + page.page_bytes * np.arange(2, dtype=np.int64))

    d_q, d_k, d_v = (cuda.to_device(array) for array in (q, k, v))
    expected, d_pages = pages_of()
    for rows in (d_q, d_k):
        rope(rows, d_positions, frequencies, pairing=pairing, attention_factor=factor, stream=0)
    if rotations is not None:
        for rows, rotation in ((d_q, rotations.keys), (d_k, rotations.keys), (d_v, rotations.values)):
            if rotation is not None:
                rotate_heads(rows.reshape(n_tokens, -1), rotation, stream=0)
    store_rows(d_k, d_v, d_pages, d_positions, page=page, stream=0)
    turned, stored = d_q.copy_to_host(), expected.copy_to_host()

    def run(begin: int, end: int, pages: Any) -> np.ndarray:
        arrays = [cuda.to_device(np.ascontiguousarray(array[begin:end])) for array in (q, k, v)]
        rotate_store(
            *arrays,
            pages,
            cuda.to_device(positions[begin:end]),
            frequencies,
            page=page,
            pairing=pairing,
            attention_factor=factor,
            rotations=rotations,
            stream=0,
        )
        return np.asarray(arrays[0].copy_to_host())

    together, d_pages = pages_of()
    label = f"{type_k.value}/{type_v.value} {pairing.value} {n_rot} of {head_dim}{', rotated' if rotations else ''}"
    got = run(0, n_tokens, d_pages)
    yield close(f"{label}: queries", got, turned.astype(np.float64), turned * np.float32(1 + 1e-6), times=4.0)
    n_other = int((together.copy_to_host() != stored).sum())  # contraction may move a rounding by one unit
    yield Outcome(what=f"{label}: share of page bytes that differ", error=n_other / stored.size, bound=2e-3)
    alone, d_pages = pages_of()
    queries = np.concatenate([run(i, i + 1, d_pages) for i in range(n_tokens)])
    yield same_bits(f"{label}: queries one by one", queries, got)
    yield same_bits(f"{label}: pages one by one", alone.copy_to_host(), together.copy_to_host())


def check_rotate_heads(rotation: Rotation) -> Iterator[Outcome]:
    """The bits of the CPU backend, there and back, and the quantised form of the result."""
    x = np.random.default_rng(rotation.size).standard_normal((3, 5 * rotation.size), dtype=np.float32)
    label = f"{rotation.size}{' with signs' if rotation.is_signed else ''}"
    for inverse in (False, True):
        expected, d_x = x.copy(), cuda.to_device(x)
        cpu_rotation.rotate_heads(expected, rotation, inverse=inverse)
        rotate_heads(d_x, rotation, inverse=inverse, stream=0)
        yield same_bits(f"{label}, {'back' if inverse else 'there'}", d_x.copy_to_host(), expected)
    d_x, quants, scales = cuda.to_device(x), poisoned(x.shape, np.int8), poisoned((3, x.shape[1] // 16, 2))
    rotate_heads(d_x, rotation, inverse=True, quants=quants, scales=scales, stream=0)
    own_quants, own_scales = quantised(d_x)
    yield same_bits(f"{label}: quants", quants.copy_to_host(), own_quants.copy_to_host())
    yield same_bits(f"{label}: scales", scales.copy_to_host(), own_scales.copy_to_host())


def check_quantised_fold(n_tokens: int, n_head: int, head_dim: int) -> Iterator[Outcome]:
    rng = np.random.default_rng(head_dim)
    n_partitions = 5
    partials = rng.standard_normal((n_partitions, n_tokens, n_head, head_dim), dtype=np.float32)
    max_sum = rng.random((n_partitions, n_tokens, n_head, 2), dtype=np.float32) + np.float32(0.5)
    positions = np.full(n_tokens, n_partitions * 256 - 1, np.int32)
    width = n_head * head_dim
    d_out, quants = poisoned((n_tokens, n_head, head_dim)), poisoned((n_tokens, width), np.int8)
    scales = poisoned((n_tokens, width // 16, 2))
    merge_partials(
        cuda.to_device(partials),
        cuda.to_device(max_sum),
        cuda.to_device(positions),
        poisoned((n_tokens * state_floats(n_head, head_dim),)),
        d_out,
        n_head=n_head,
        head_dim=head_dim,
        first_partition=0,
        large_begin=LARGE_BEGIN,
        is_first=True,
        is_last=True,
        quants=quants,
        scales=scales,
        stream=0,
    )
    own_quants, own_scales = quantised(cuda.to_device(d_out.copy_to_host().reshape(n_tokens, width)))
    yield same_bits(f"fold {head_dim}: quants", quants.copy_to_host(), own_quants.copy_to_host())
    yield same_bits(f"fold {head_dim}: scales", scales.copy_to_host(), own_scales.copy_to_host())


def check_write_step(n_tokens: int) -> Iterator[Outcome]:
    ids = [7, 0, 2**31 - 1, 5, 5, 1, 2, 3][:n_tokens]
    d_tokens, d_positions = poisoned((n_tokens,), np.int32), poisoned((n_tokens,), np.int32)
    write_step(d_tokens, d_positions, ids=ids, first_pos=131071, stream=0)
    yield same_bits(f"ids of {n_tokens} tokens", d_tokens.copy_to_host(), np.array(ids, np.int32))
    positions = 131071 + np.arange(n_tokens, dtype=np.int32)
    yield same_bits(f"positions of {n_tokens} tokens", d_positions.copy_to_host(), positions)


def checks() -> Iterator[Check]:
    def check(case: str, run: Callable[[], Iterator[Outcome]]) -> Check:
        return Check(family="fused", case=case, run=run)

    for weight_type in (_T.Q4_K, _T.Q5_K, _T.Q6_K, _T.Q8_0, _T.F16):
        yield check(f"products {weight_type.name}", lambda t=weight_type: check_products(t, 1280))
        yield check(f"gated {weight_type.name}", lambda t=weight_type: check_gated(t, 67, 1280))
        gelu = partial(check_gated, weight_type, 67, 1280, Activation.GELU_TANH)
        yield check(f"gated {weight_type.name} gelu", gelu)
    yield check("gated Q5_0", lambda: check_gated(_T.Q5_0, 5, 576))
    for n_cols in (32, 576, 4096, 14336):
        yield check(f"norm and quantise {n_cols}", lambda n=n_cols: check_norm_quantise(n))
    for i, ((type_k, type_v), (head_dim, n_rot)) in enumerate(product(STORED_TYPES, STORED_HEADS)):
        if any(head_dim % kv_type.block_elements for kv_type in (type_k, type_v)):
            continue
        pairing = (RopePairing.HALVES, RopePairing.ADJACENT)[i // 2 % 2]
        yield check(
            "rotate and store",
            partial(check_rotate_store, (type_k, type_v), pairing, head_dim, n_rot, i % 3 > 0),
        )
    for size, is_signed in ((64, False), (256, False), (64, True), (128, True)):
        yield check("rotate heads", partial(check_rotate_heads, Rotation(size=size, is_signed=is_signed)))
    for n_tokens, n_head, head_dim in ((1, 32, 128), (4, 9, 64)):
        yield check("token ids", lambda t=n_tokens: check_write_step(t))
        yield check("quantised fold", lambda t=n_tokens, h=n_head, d=head_dim: check_quantised_fold(t, h, d))
