"""Mixture of experts: routing, order of pairs, products in decode and prefill, against float64 and single steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numba import cuda

from cuda_kernels.activation import HALF_GROWTH, HALF_SHRINK, Activation
from cuda_kernels.expert_decode import expert_gated, expert_sum
from cuda_kernels.expert_matvec import ExpertMatrix, GatedPair
from cuda_kernels.expert_prefill import FEW_PAIRS, MANY_PAIRS, expert_gated_tiles, expert_products
from cuda_kernels.quantise import quantise
from cuda_kernels.routing import (
    PairOrder,
    RoutingRule,
    combine,
    count_tiles,
    order_pairs,
    route,
)
from cuda_kernels.row_units import takes_float_activations
from cuda_kernels.weights import FAST_TYPES, WeightGeometry
from scripts.cuda_checks.attention import poisoned
from scripts.cuda_checks.report import Check, Outcome, close, same_bits
from scripts.cuda_checks.weights import exact_weights, random_blocks, upload

_T = GGMLQuantizationType
N_TOKENS = 8
LEAST_SUM = 6.103515625e-5

RULES = {
    "softmax": (RoutingRule(normalises=False), False),
    "softmax normalised": (RoutingRule(), False),
    "sigmoid bias": (RoutingRule(by_sigmoid=True, weight_scale=2.5), True),
    "sigmoid groups": (RoutingRule(by_sigmoid=True, weight_scale=2.5, n_groups=8, n_groups_used=4), True),
    "softmax groups": (RoutingRule(normalises=False, weight_scale=16.0, n_groups=4, n_groups_used=2), False),
}


def route_exactly(
    logits: np.ndarray, n_used: int, rule: RoutingRule, bias: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Ids and float64 weights. What is ordered by weight is rounded to float32 first, as the choice is by rounded
    numbers."""
    x = logits.astype(np.float64)
    if rule.by_sigmoid:
        likely = 1.0 / (1.0 + np.exp(-x))
    else:
        likely = np.exp(x - x.max(axis=1, keepdims=True))
        likely /= likely.sum(axis=1, keepdims=True)
    scores = logits
    if rule.by_sigmoid or bias is not None or rule.n_groups > 1:
        likely = likely.astype(np.float32).astype(np.float64)
        scores = likely.astype(np.float32) + (np.float32(0.0) if bias is None else bias)
    if rule.n_groups > 1:
        grouped = scores.reshape(len(x), rule.n_groups, -1)
        best = np.sort(grouped, axis=-1)[..., -2:]
        kept = np.argsort(-(best[..., 1] + best[..., 0]), axis=1, kind="stable")[:, : rule.n_groups_used]
        allowed = np.zeros((len(x), rule.n_groups), bool)
        np.put_along_axis(allowed, kept, True, axis=1)
        scores = np.where(np.repeat(allowed, grouped.shape[-1], axis=1), scores, -np.inf)
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :n_used]
    weights = np.take_along_axis(likely, ids, axis=1)
    if rule.normalises:
        weights /= np.maximum(weights.sum(axis=1, keepdims=True), LEAST_SUM)
    return ids.astype(np.int32), weights * rule.weight_scale


def check_route(name: str, n_expert: int, n_used: int, n_tokens: int) -> Iterator[Outcome]:
    rule, has_bias = RULES[name]
    rng = np.random.default_rng(n_expert + n_tokens)
    logits = np.round(rng.standard_normal((n_tokens, n_expert)) * 8).astype(np.float32) / np.float32(4)  # many ties
    logits[0] = 0.0
    if n_tokens > 1:
        logits[1] = rng.standard_normal(n_expert).astype(np.float32) * 30
    bias = rng.standard_normal(n_expert).astype(np.float32) if has_bias else None
    d_ids, d_weights = poisoned((n_tokens, n_used), np.int32), poisoned((n_tokens, n_used))
    d_bias = None if bias is None else cuda.to_device(bias)
    route(cuda.to_device(logits), d_ids, d_weights, rule=rule, bias=d_bias, stream=0)
    ids, exact = route_exactly(logits, n_used, rule, bias)
    label = f"{n_used} of {n_expert} x {n_tokens}"
    yield same_bits(f"{label}: choice", d_ids.copy_to_host(), ids)
    off = np.abs(d_weights.copy_to_host() - exact) / np.maximum(exact, 1e-30)
    yield Outcome(what=f"{label}: weights", error=float(off.max()), bound=2.0**-23)
    scales = rng.random(n_expert).astype(np.float32)
    before = d_weights.copy_to_host()
    d_scaled = poisoned((n_tokens, n_used))
    d_scales = cuda.to_device(scales)
    route(cuda.to_device(logits), d_ids, d_scaled, rule=rule, bias=d_bias, scales=d_scales, stream=0)
    yield same_bits(f"{label}: scaled", d_scaled.copy_to_host(), before * scales[ids])


def make_order(n_tokens: int, n_used: int, n_expert: int, tile_pairs: int) -> PairOrder:
    n_pairs = n_tokens * n_used
    return PairOrder(
        counts=poisoned((n_expert,), np.int32),
        rows=poisoned((n_tokens, n_used), np.int32),
        tokens=poisoned((n_pairs,), np.int32),
        begins=poisoned((n_expert + 1,), np.int32),
        tiles=poisoned((2 + 2 * count_tiles(n_pairs, n_expert, tile_pairs),), np.int32),
        tile_pairs=tile_pairs,
    )


def random_ids(rng: np.random.Generator, n_tokens: int, n_used: int, n_expert: int) -> np.ndarray:
    """Some experts are much liked, others taken by nobody."""
    likes = rng.standard_normal(n_expert) * 2
    scores = likes + rng.standard_normal((n_tokens, n_expert))
    return np.argsort(-scores, axis=1)[:, :n_used].astype(np.int32)


def check_order(n_tokens: int, n_used: int, n_expert: int, tile_pairs: int) -> Iterator[Outcome]:
    rng = np.random.default_rng(n_tokens)
    ids = random_ids(rng, n_tokens, n_used, n_expert)
    order = make_order(n_tokens, n_used, n_expert, tile_pairs)
    order_pairs(cuda.to_device(ids), order, stream=0)
    flat = ids.reshape(-1)
    sequence = np.argsort(flat, kind="stable")
    rows = np.empty(flat.size, np.int32)
    rows[sequence] = np.arange(flat.size, dtype=np.int32)
    begins = np.searchsorted(flat[sequence], np.arange(n_expert + 1)).astype(np.int32)
    label = f"{n_tokens} x {n_used} of {n_expert}"
    yield same_bits(f"{label}: rows", order.rows.copy_to_host(), rows.reshape(ids.shape))
    yield same_bits(f"{label}: tokens", order.tokens.copy_to_host(), (sequence // n_used).astype(np.int32))
    yield same_bits(f"{label}: begins", order.begins.copy_to_host(), begins)
    tiles = [(e, first) for e in range(n_expert) for first in range(begins[e], begins[e + 1], tile_pairs)]
    got = order.tiles.copy_to_host()
    yield Outcome(what=f"{label}: number of tiles", error=float(abs(got[0] - len(tiles))), bound=0.0)
    listed = got[2 : 2 + 2 * len(tiles)].reshape(-1, 2)
    yield same_bits(f"{label}: tiles", listed, np.array(tiles, np.int32).reshape(-1, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Random experts on the host and on the device."""

    pair: GatedPair
    down: ExpertMatrix
    gate_rows: np.ndarray  # float32 [n_expert, n_ff, n_in]
    up_rows: np.ndarray
    down_rows: np.ndarray  # float32 [n_expert, n_out, n_ff]
    gate_bias: np.ndarray  # zeros where there is none
    up_bias: np.ndarray
    down_bias: np.ndarray


def make_experts(
    rng: np.random.Generator,
    weight_type: GGMLQuantizationType,
    sizes: tuple[int, int, int],
    *,
    down_type: GGMLQuantizationType | None = None,
    has_bias: bool = False,
    is_fused: bool = False,
) -> Experts:
    """sizes: experts, inputs and outputs of a layer, width of an expert. Matrices are scaled to ordinary results."""
    n_expert, n_in, n_ff = sizes

    def matrix(kind: GGMLQuantizationType, n_rows: int, n_cols: int, bias: np.ndarray | None) -> Any:
        geometry = WeightGeometry(weight_type=kind, n_rows=n_expert * n_rows, n_cols=n_cols)
        blocks = random_blocks(geometry, rng)
        d_bias = None if bias is None else cuda.to_device(bias)
        held = ExpertMatrix(matrix=upload(geometry, blocks), geometry=geometry, n_expert=n_expert, bias=d_bias)
        return held, exact_weights(geometry, blocks).reshape(n_expert, n_rows, n_cols)

    biases = [rng.standard_normal((n_expert, n), dtype=np.float32) * has_bias for n in (n_ff, n_ff, n_in)]
    given = biases if has_bias else [None] * 3
    down, down_rows = matrix(down_type or weight_type, n_in, n_ff, given[2])
    if is_fused:
        both, rows = matrix(weight_type, 2 * n_ff, n_in, None)
        gate_rows, up_rows = rows[:, :n_ff], rows[:, n_ff:]
        pair = GatedPair(gate=both, up=None)
    else:
        gate, gate_rows = matrix(weight_type, n_ff, n_in, given[0])
        up, up_rows = matrix(weight_type, n_ff, n_in, given[1])
        pair = GatedPair(gate=gate, up=up)
    return Experts(
        pair=pair,
        down=down,
        gate_rows=gate_rows,
        up_rows=up_rows,
        down_rows=down_rows,
        gate_bias=biases[0],
        up_bias=biases[1],
        down_bias=biases[2],
    )


def activate(activation: Activation, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """In the precision of ``gate``."""
    one, kind = gate.dtype.type(1.0), gate.dtype.type
    with np.errstate(over="ignore"):
        if activation is Activation.SILU:
            return np.asarray(gate / (one + np.exp(-gate)) * up)
        if activation is Activation.CLAMPED_SWIGLU:
            g, u = np.minimum(gate, kind(7.0)), np.clip(up, kind(-7.0), kind(7.0))
            return np.asarray(g / (one + np.exp(-kind(1.702) * g)) * (u + one))
        inner = kind(np.sqrt(2.0 / np.pi)) * gate * (one + kind(0.044715) * gate * gate)
        return np.asarray(kind(0.5) * gate * (one + np.tanh(inner)) * up)


def as_read(weight_type: GGMLQuantizationType, d_x: Any) -> tuple[Any, Any, np.ndarray]:
    """Vectors and scales for products with this type, and what they stand for in float64."""
    if takes_float_activations(weight_type):
        return d_x, None, d_x.copy_to_host().astype(np.float64)
    n_rows, n_cols = d_x.shape
    quants, scales = poisoned((n_rows, n_cols), np.int8), poisoned((n_rows, n_cols // 16, 2))
    quantise(d_x, quants, scales, stream=0)
    by_group = quants.copy_to_host().astype(np.float64).reshape(n_rows, -1, 16)
    return quants, scales, (by_group * scales.copy_to_host()[..., :1]).reshape(n_rows, n_cols)


def gated_reference(experts: Experts, ids: np.ndarray, used: np.ndarray, activation: Activation) -> np.ndarray:
    """[pairs, n_ff] in the precision of ``used``, by rows of tokens."""
    rows = []
    for token, expert in ((t, e) for t in range(len(ids)) for e in ids[t]):
        x, kind = used[token], used.dtype
        gate = experts.gate_rows[expert].astype(kind) @ x + experts.gate_bias[expert].astype(kind)
        up = experts.up_rows[expert].astype(kind) @ x + experts.up_bias[expert].astype(kind)
        rows.append(activate(activation, gate, up))
    return np.array(rows)


def sum_reference(experts: Experts, ids: np.ndarray, mixture: np.ndarray, used: np.ndarray) -> np.ndarray:
    out = np.zeros((len(ids), experts.down_rows.shape[1]), used.dtype)
    for token in range(len(ids)):
        for slot, expert in enumerate(ids[token]):
            row = used[token * ids.shape[1] + slot]
            product = experts.down_rows[expert].astype(used.dtype) @ row + experts.down_bias[expert].astype(used.dtype)
            out[token] += mixture[token, slot].astype(used.dtype) * product
    return out


def scaled_input(experts: Experts, rng: np.random.Generator, n_tokens: int) -> np.ndarray:
    """Tokens whose gates reach about 8."""
    n_in = experts.gate_rows.shape[2]
    x = rng.standard_normal((n_tokens, n_in), dtype=np.float32)
    largest = max(float(np.abs(x @ rows.T).max()) for rows in experts.gate_rows)
    return x * np.float32(8.0 / largest)


_MATRICES = ("gate_rows", "up_rows", "down_rows")


def check_decode(
    weight_type: GGMLQuantizationType, activation: Activation, *, has_bias: bool = False, is_fused: bool = False
) -> Iterator[Outcome]:
    rng = np.random.default_rng(int(weight_type))
    n_expert, n_used = 6, 3
    experts = make_experts(rng, weight_type, (n_expert, 512, 768), has_bias=has_bias, is_fused=is_fused)
    ids = random_ids(rng, N_TOKENS, n_used, n_expert)
    x = scaled_input(experts, rng, N_TOKENS)
    vectors, scales, used = as_read(weight_type, cuda.to_device(x))
    d_ids = cuda.to_device(ids)

    def gated(n_tokens: int) -> Any:
        d_out = poisoned((n_tokens * n_used, 768))
        some = None if scales is None else scales[:n_tokens]
        expert_gated(experts.pair, d_ids[:n_tokens], vectors[:n_tokens], some, d_out, activation=activation, stream=0)
        return d_out

    d_hidden = gated(N_TOKENS)
    hidden = d_hidden.copy_to_host()
    exact = gated_reference(experts, ids, used, activation)
    plain = gated_reference(experts, ids, used.astype(np.float32), activation)
    yield close(f"gated {activation.value}", hidden, exact, plain, times=8.0)
    for n_tokens in (1, 3):
        expected = hidden[: n_tokens * n_used]
        yield same_bits(f"gated x {n_tokens}: bits of 8", gated(n_tokens).copy_to_host(), expected)

    mixture = rng.random((N_TOKENS, n_used), dtype=np.float32)
    d_mixture = cuda.to_device(mixture)
    vectors, scales, used = as_read(weight_type, d_hidden)

    def summed(n_tokens: int) -> np.ndarray:
        n_pairs = n_tokens * n_used
        d_out = poisoned((n_tokens, 512))
        some = None if scales is None else scales[:n_pairs]
        expert_sum(experts.down, d_ids[:n_tokens], d_mixture[:n_tokens], vectors[:n_pairs], some, d_out, stream=0)
        return np.asarray(d_out.copy_to_host())

    got = summed(N_TOKENS)
    exact = sum_reference(experts, ids, mixture, used)
    plain = sum_reference(experts, ids, mixture, used.astype(np.float32))
    yield close("weighted sum", got, exact, plain, times=8.0)
    for n_tokens in (1, 3):
        yield same_bits(f"weighted sum x {n_tokens}: bits of 8", summed(n_tokens), got[:n_tokens])


def check_prefill(
    weight_type: GGMLQuantizationType,
    activation: Activation,
    tile_pairs: int,
    *,
    has_bias: bool = False,
    is_fused: bool = False,
) -> Iterator[Outcome]:
    """Operands are float16 in the oracle, too: what is left is how they are added."""
    rng = np.random.default_rng(int(weight_type) + tile_pairs)
    n_expert, n_used, n_tokens = 6, 3, 150
    n_in, n_ff = (512, 768) if GGML_QUANT_SIZES[weight_type][0] == 256 else (480, 160)
    experts = make_experts(rng, weight_type, (n_expert, n_in, n_ff), has_bias=has_bias, is_fused=is_fused)
    ids = random_ids(rng, n_tokens, n_used, n_expert)
    order = make_order(n_tokens, n_used, n_expert, tile_pairs)
    order_pairs(cuda.to_device(ids), order, stream=0)
    places = order.rows.copy_to_host().reshape(-1)
    halves = replace(experts, **{name: getattr(experts, name).astype(np.float16) for name in _MATRICES})
    x = scaled_input(experts, rng, n_tokens).astype(np.float16)

    d_hidden = poisoned((n_tokens * n_used, n_ff), np.float16)
    expert_gated_tiles(experts.pair, order, cuda.to_device(x), d_hidden, activation=activation, stream=0)
    hidden = d_hidden.copy_to_host()
    exact = gated_reference(halves, ids, x.astype(np.float64), activation)
    shrink = np.float32(HALF_SHRINK)
    plain = (gated_reference(halves, ids, x.astype(np.float32), activation) * shrink).astype(np.float16)
    yield close(f"gated {activation.value}", hidden[places], exact * HALF_SHRINK, plain, times=2.0)

    d_out = poisoned((n_tokens * n_used, n_in))
    expert_products(experts.down, order, d_hidden, d_out, stream=0)
    flat = ids.reshape(-1, 1)
    ones = np.ones(flat.shape, np.float32)
    grown = hidden[places].astype(np.float64) * HALF_GROWTH
    exact = sum_reference(halves, flat, ones, grown)
    plain = sum_reference(halves, flat, ones, grown.astype(np.float32))
    yield close("products", d_out.copy_to_host()[places], exact, plain, times=8.0)


def check_combine() -> Iterator[Outcome]:
    rng = np.random.default_rng(1)
    ids = random_ids(rng, 37, 3, 9)
    order = make_order(37, 3, 9, 64)
    order_pairs(cuda.to_device(ids), order, stream=0)
    pairs, weights = rng.standard_normal((111, 320), dtype=np.float32), rng.random((37, 3), dtype=np.float32)
    d_out = poisoned((37, 320))
    combine(cuda.to_device(pairs), order, cuda.to_device(weights), d_out, stream=0)
    rows = order.rows.copy_to_host()
    exact = np.einsum("ts,tsc->tc", weights.astype(np.float64), pairs[rows].astype(np.float64))
    plain = np.einsum("ts,tsc->tc", weights, pairs[rows])
    yield close("37 tokens", d_out.copy_to_host(), exact, plain, times=4.0)


def checks() -> Iterator[Check]:
    for name in RULES:
        for n_expert, n_used, n_tokens in ((128, 8, 33), (32, 4, 1), (512, 10, 5)):
            yield Check(
                family="experts",
                case=f"route {name}",
                run=lambda name=name, sizes=(n_expert, n_used, n_tokens): check_route(name, *sizes),
            )
    for sizes in ((1, 2, 8, 64), (37, 3, 9, 64), (700, 8, 128, 64), (4096, 8, 128, 128)):
        yield Check(family="experts", case="order", run=lambda sizes=sizes: check_order(*sizes))
    yield Check(family="experts", case="combine", run=check_combine)
    for weight_type in FAST_TYPES:
        yield Check(
            family="experts",
            case=f"decode {weight_type.name}",
            run=lambda kind=weight_type: check_decode(kind, Activation.SILU),
        )
    yield Check(
        family="experts",
        case="decode MXFP4 biases",
        run=lambda: check_decode(_T.MXFP4, Activation.CLAMPED_SWIGLU, has_bias=True),
    )
    yield Check(
        family="experts",
        case="decode Q4_K fused",
        run=lambda: check_decode(_T.Q4_K, Activation.GELU_TANH, is_fused=True),
    )
    for i, weight_type in enumerate(FAST_TYPES):
        yield Check(
            family="experts",
            case=f"prefill {weight_type.name}",
            run=lambda kind=weight_type, i=i: check_prefill(kind, Activation.SILU, (FEW_PAIRS, MANY_PAIRS)[i % 2]),
        )
    yield Check(
        family="experts",
        case="prefill MXFP4 biases",
        run=lambda: check_prefill(_T.MXFP4, Activation.CLAMPED_SWIGLU, MANY_PAIRS, has_bias=True),
    )
    yield Check(
        family="experts",
        case="prefill Q4_K fused",
        run=lambda: check_prefill(_T.Q4_K, Activation.GELU_TANH, FEW_PAIRS, is_fused=True),
    )
