"""Pages of random keys and values, as bytes and as the float64 numbers that those bytes stand for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvs_core.kv_types import KvType, PageGeometry, RegionGeometry
from kvs_core.units import ceil_div
from scripts.cuda_checks.random_rows import EncodedRows, bf16_rows, random_rows


def quantise_q8_0(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 quants and float16 scales of blocks of 32, nearest, halves away from zero."""
    blocks = rows.astype(np.float32).reshape(*rows.shape[:-1], -1, 32)
    scale = np.abs(blocks).max(axis=-1) / np.float32(127.0)
    with np.errstate(divide="ignore"):
        inverse = np.where(scale > 0, np.float32(1.0) / scale, np.float32(0.0)).astype(np.float32)
    scaled = blocks * inverse[..., None]
    whole = np.trunc(scaled)
    quants = whole + np.where(np.abs(scaled - whole) >= 0.5, np.sign(scaled), 0)
    return quants.astype(np.int8).reshape(rows.shape), scale.astype(np.float16)


def encode_rows(rows: np.ndarray, kv_type: KvType) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes of the quants plane and of the scales plane by row, and the exact values."""
    if kv_type is KvType.F32:
        stored = rows.astype(np.float32)
        return stored.view(np.uint8), np.zeros((*rows.shape[:-1], 0), np.uint8), stored.astype(np.float64)
    if kv_type is KvType.F16:
        half = rows.astype(np.float16)
        return half.view(np.uint8), np.zeros((*rows.shape[:-1], 0), np.uint8), half.astype(np.float64)
    quants, scales = quantise_q8_0(rows)
    exact = quants.astype(np.float64) * np.repeat(scales.astype(np.float64), 32, axis=-1)
    return quants.view(np.uint8), scales.view(np.uint8), exact


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedCache:
    """``data`` uint8 [n_pages, page_bytes]; ``k``, ``v`` float64 [n_keys, n_head_kv, head_dim]."""

    page: PageGeometry
    data: np.ndarray
    k: np.ndarray
    v: np.ndarray


def make_cache(page: PageGeometry, n_keys: int, rng: np.random.Generator) -> PagedCache:
    """Random rows; every byte that holds no key is 0xff, which reads as NaN in f32, f16 and in scales."""
    data = np.full((ceil_div(n_keys, page.page_tokens), page.page_bytes), 0xFF, np.uint8)
    exact = []
    regions = [(page.k_region, 0)] if page.v_in_k else [(page.k_region, 0), (page.v_region, page.v_offset)]
    for region, first_region in regions:
        rows = make_rows(region, n_keys, page.n_head_kv, rng)
        fill_regions(data, rows, region, first_region)
        exact.append(rows.exact)
    return PagedCache(page=page, data=data, k=exact[0], v=exact[-1][..., : page.head_dim_v])


def make_rows(region: RegionGeometry, n_keys: int, n_head: int, rng: np.random.Generator) -> EncodedRows:
    """Normally distributed elements; those of most quantised types are random bits of about that size."""
    if region.kv_type.is_quantised and region.kv_type is not KvType.Q8_0:
        return random_rows(region, n_keys, n_head, rng)
    return encode_plain(rng.standard_normal((n_keys, n_head, region.head_dim), dtype=np.float32), region.kv_type)


def encode_plain(rows: np.ndarray, kv_type: KvType) -> EncodedRows:
    """float32 rows [n_keys, n_head, head_dim] as f32, f16, bf16 or q8_0."""
    if kv_type is KvType.BF16:
        return bf16_rows(rows)
    quants, scales, exact = encode_rows(rows, kv_type)
    return EncodedRows(quants=quants, high=scales[..., :0], scales=scales, exact=exact)


def fill_regions(data: np.ndarray, rows: EncodedRows, region: RegionGeometry, first_region: int) -> None:
    """Write rows into their planes."""
    n_keys, n_head = rows.exact.shape[:2]
    planes = ((rows.quants, 0), (rows.high, region.high_offset), (rows.scales, region.scale_offset))
    for page_idx in range(data.shape[0]):
        begin = page_idx * region.page_tokens
        n_rows = min(n_keys - begin, region.page_tokens)
        for head in range(n_head):
            at = first_region + head * region.n_bytes
            for plane, offset in planes:
                flat = plane[begin : begin + n_rows, head].reshape(-1)
                data[page_idx, at + offset : at + offset + flat.size] = flat


def place_pages(data: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The pages in random order, as one buffer, and the offset of every page in it."""
    order = rng.permutation(data.shape[0])
    shuffled = np.empty_like(data)
    shuffled[order] = data
    return shuffled.reshape(-1), order.astype(np.int64) * data.shape[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRule:
    """How queries and keys become scores, as in ``kvs_core.attention_rule``; ``sinks`` float32 [n_head] or None."""

    scale: float
    window: int | None = None
    softcap: float = 0.0
    sinks: np.ndarray | None = None

    def first_page(self, first_position: int, page_tokens: int) -> int:
        """The page of the first key that a token at ``first_position`` sees."""
        return 0 if self.window is None else max(0, first_position + 1 - self.window) // page_tokens

    def __str__(self) -> str:
        window = "" if self.window is None else f", window {self.window}"
        return window + f", cap {self.softcap:g}" * bool(self.softcap) + ", sinks" * (self.sinks is not None)


def attend(q: np.ndarray, cache: PagedCache, positions: np.ndarray, rule: ScoreRule) -> np.ndarray:
    """Exact attention in float64: [n_tokens, n_head, head_dim_v]."""
    return _attend(q, cache, positions, rule, np.float64, None)


def attend_plain(q: np.ndarray, cache: PagedCache, positions: np.ndarray, rule: ScoreRule, *, half: bool) -> np.ndarray:
    """The same in float32, with operands of both products rounded to float16 if ``half``."""
    return _attend(q, cache, positions, rule, np.float32, np.float16 if half else None)


def _attend(q, cache, positions, rule, dtype, operand):  # type: ignore[no-untyped-def]
    def rounded(x: np.ndarray) -> np.ndarray:
        return (x if operand is None else x.astype(operand)).astype(dtype)

    n_tokens, n_head, _ = q.shape
    ratio = n_head // cache.page.n_head_kv
    out = np.zeros((n_tokens, n_head, cache.page.head_dim_v), np.float64)
    for head_kv in range(cache.page.n_head_kv):
        k, v = rounded(cache.k[:, head_kv]), rounded(cache.v[:, head_kv])
        heads = slice(head_kv * ratio, (head_kv + 1) * ratio)
        for token in range(n_tokens):
            end = int(positions[token]) + 1
            begin = 0 if rule.window is None else max(0, end - rule.window)
            scores = (rounded(q[token, heads]) @ k[begin:end].T) * dtype(rule.scale)
            if rule.softcap:
                scores = dtype(rule.softcap) * np.tanh(scores / dtype(rule.softcap))
            sinks = np.full((ratio, 1), -np.inf, dtype) if rule.sinks is None else rule.sinks[heads, None].astype(dtype)
            largest = np.maximum(scores.max(axis=-1, keepdims=True), sinks)
            weights = np.exp(scores - largest)
            total = weights.sum(axis=-1, keepdims=True) + np.exp(sinks - largest)
            out[token, heads] = (rounded(weights) @ v[begin:end]) / total
    return out
