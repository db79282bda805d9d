"""Decode attention with its fold, prefill attention, and the stores and copies of pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from numba import cuda

from cuda_kernels.attention_decode import attention_decode
from cuda_kernels.attention_decode_mma import has_fragments
from cuda_kernels.attention_prefill import attention_prefill, count_state_floats
from cuda_kernels.launch import address_of, device_capability
from cuda_kernels.merge import merge_partials, state_floats
from cuda_kernels.page_copy import copy_pages
from cuda_kernels.partitions import count_partitions, most_window_partitions
from cuda_kernels.store import store_rows
from kvs_core.cpu.store import store_kv
from kvs_core.cuda_scratch import MMA, is_wide, large_begin_of, prefill_kernel_name
from kvs_core.kv_types import KvType, PageGeometry
from scripts.cuda_checks.paged import (
    PagedCache,
    ScoreRule,
    attend,
    attend_plain,
    encode_plain,
    fill_regions,
    make_cache,
    place_pages,
)
from scripts.cuda_checks.report import Check, Outcome, close, same_bits

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
WIDE_DIM = 512
LATENT_ROWS = ((576, 512), (128, 64), (576, 512), (192, 128))
LATENT_RATIOS = (16, 128, 128, 20)
RATIOS = (1, 4, 6, 16, 2, 8, 3, 5)
TYPES = (KvType.F16, KvType.Q8_0, KvType.F32)
PADDED = (
    ((KvType.TURBO4, 128), (KvType.F16, 80)),
    ((KvType.BF16, 80), (KvType.TURBO3, 128)),
    ((KvType.TURBO2, 128), (KvType.Q5_0, 96)),
    ((KvType.Q8_0, 96), (KvType.TURBO4, 128)),
    ((KvType.TURBO3, 64), (KvType.Q4_1, 128)),
)
"""Types and head sizes of keys and of values where only the heads of turbo types were padded, and another pair."""
UNUSED_PAGES = 16
"""Entries of the page table beyond the last page, holding an address that nobody may follow."""

TIMES = 4.0
"""Kernels may be this many times as far from the oracle as plain arithmetic of the same precision."""


def covering_geometries() -> Iterator[tuple[PageGeometry, int]]:
    """Every type as keys and as values with every head size it fits, and the usual pairs with all of them."""
    for dim_idx, head_dim in enumerate(HEAD_DIMS):
        fitting = [kv_type for kv_type in KvType if head_dim % kv_type.block_elements == 0]
        pairs = [(type_k, fitting[(i + 2 * dim_idx) % len(fitting)]) for i, type_k in enumerate(fitting)]
        pairs += [(kv_type, kv_type) for kv_type in TYPES if kv_type in fitting]
        for i, (type_k, type_v) in enumerate(dict.fromkeys(pairs), dim_idx):
            yield _two_heads((type_k, head_dim), (type_v, head_dim), i), RATIOS[i % len(RATIOS)]
    for i, (keys, values) in enumerate(PADDED):
        yield _two_heads(keys, values, i), RATIOS[i % len(RATIOS)]


def wide_geometries() -> Iterator[tuple[PageGeometry, int]]:
    """Every type as keys and as values of heads of 512, in pairs with itself and another, and in latent caches."""
    types = list(KvType)
    for i, kv_type in enumerate(types):
        keys, values = (kv_type, WIDE_DIM), (types[(i + 5) % len(types)], WIDE_DIM)
        yield _two_heads(keys, values, i), RATIOS[(i + 1) % len(RATIOS)]
        if kv_type in (*TYPES, KvType.Q4_0, KvType.TURBO4):
            yield _two_heads(keys, keys, i), RATIOS[(i + 3) % len(RATIOS)]
        yield latent_page(kv_type, *LATENT_ROWS[i % 4], page_tokens=(256, 64, 128)[i % 3]), LATENT_RATIOS[i % 4]


def latent_page(kv_type: KvType, head_dim_k: int, head_dim_v: int, *, page_tokens: int = 256) -> PageGeometry:
    return PageGeometry(
        page_tokens=page_tokens,
        n_head_kv=1,
        head_dim_k=head_dim_k,
        head_dim_v=head_dim_v,
        type_k=kv_type,
        type_v=kv_type,
        v_in_k=True,
    )


def decode_geometries() -> Iterator[tuple[PageGeometry, int]]:
    """Those, and every type in both places with the usual head sizes."""
    found = dict(covering_geometries())
    for i, (kv_type, head_dim) in enumerate(product(KvType, (128, 256))):
        found.setdefault(_two_heads((kv_type, head_dim), (kv_type, head_dim), i), RATIOS[(i + i // 8) % len(RATIOS)])
    yield from found.items()


def every_pair(head_dims: Sequence[int]) -> Iterator[tuple[PageGeometry, int]]:
    """All pairs of types that fit these head sizes."""
    for i, (head_dim, type_k, type_v) in enumerate(product(head_dims, KvType, KvType)):
        if head_dim % type_k.block_elements == head_dim % type_v.block_elements == 0:
            yield _two_heads((type_k, head_dim), (type_v, head_dim), i), RATIOS[i % len(RATIOS)]


def _two_heads(keys: tuple[KvType, int], values: tuple[KvType, int], i: int) -> PageGeometry:
    (type_k, head_dim_k), (type_v, head_dim_v) = keys, values
    return PageGeometry(
        page_tokens=(64, 256, 192)[i % 3],
        n_head_kv=2,
        head_dim_k=head_dim_k,
        head_dim_v=head_dim_v,
        type_k=type_k,
        type_v=type_v,
    )


def describe(page: PageGeometry, ratio: int) -> str:
    head_dim = str(page.head_dim_k) if page.head_dim_k == page.head_dim_v else f"{page.head_dim_k}/{page.head_dim_v}"
    types = page.type_k.value if page.v_in_k else f"{page.type_k.value}/{page.type_v.value}"
    return f"{types} d{head_dim} gqa{ratio} page{page.page_tokens}"


class DeviceCache:
    """Pages in device memory, in random order; those before ``first_page`` have no address that may be followed."""

    def __init__(self, cache: PagedCache, rng: np.random.Generator, first_page: int = 0) -> None:
        flat, offsets = place_pages(cache.data, rng)
        self.cache = cache
        self.d_data = cuda.to_device(flat)
        addresses = offsets + address_of(self.d_data)
        addresses[:first_page] = -1
        self.d_pages = cuda.to_device(np.concatenate([addresses, np.full(UNUSED_PAGES, -1, np.int64)]))


def poisoned(shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
    """A device array of 0xff bytes: NaN in every float type."""
    n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return cuda.to_device(np.full(n_bytes, 0xFF, np.uint8).view(dtype).reshape(shape))


def sinks_on_device(rule: ScoreRule) -> Any:
    return None if rule.sinks is None else cuda.to_device(rule.sinks)


def run_decode(
    device: DeviceCache, q: np.ndarray, positions: np.ndarray, rule: ScoreRule, groups: list[int]
) -> np.ndarray:
    """Attention and fold, ``groups`` partitions a launch."""
    page = device.cache.page
    n_tokens, n_head, _ = q.shape
    d_q, d_positions, d_sinks = cuda.to_device(q), cuda.to_device(positions), sinks_on_device(rule)
    d_state = poisoned((n_tokens * state_floats(n_head, page.head_dim_v),))
    d_out = poisoned((n_tokens, n_head, page.head_dim_v))
    first = 0
    for i, n_partitions in enumerate(groups):
        d_partials = poisoned((n_partitions, n_tokens, n_head, page.head_dim_v))
        d_max_sum = poisoned((n_partitions, n_tokens, n_head, 2))
        attention_decode(
            d_q,
            device.d_pages,
            d_positions,
            d_partials,
            d_max_sum,
            page=page,
            first_partition=first,
            scale=rule.scale,
            window=rule.window,
            softcap=rule.softcap,
            stream=0,
        )
        merge_partials(
            d_partials,
            d_max_sum,
            d_positions,
            d_state,
            d_out,
            n_head=n_head,
            head_dim=page.head_dim_v,
            first_partition=first,
            large_begin=large_begin_of(page),
            is_first=i == 0,
            is_last=i == len(groups) - 1,
            window=rule.window,
            sinks=d_sinks,
            stream=0,
        )
        first += n_partitions
    return np.asarray(d_out.copy_to_host())


def make_rule(
    page: PageGeometry, ratio: int, rng: np.random.Generator, window: int | None, softcap: float, has_sinks: bool
) -> ScoreRule:
    sinks = 2.0 * rng.standard_normal(page.n_head_kv * ratio, dtype=np.float32) if has_sinks else None
    return ScoreRule(scale=page.head_dim_k**-0.5, window=window, softcap=softcap, sinks=sinks)


def check_decode(
    page: PageGeometry,
    ratio: int,
    n_keys: int,
    seed: int,
    window: int | None,
    *,
    softcap: float = 0.0,
    has_sinks: bool = False,
) -> Iterator[Outcome]:
    """One token and several, one launch and many: close to the oracle, and the same bits."""
    rng = np.random.default_rng(seed)
    cache = make_cache(page, n_keys, rng)
    n_tokens = min(8, n_keys)
    q = 2.0 * rng.standard_normal((n_tokens, page.n_head_kv * ratio, page.head_dim_k), dtype=np.float32)
    positions = np.arange(n_keys - n_tokens, n_keys, dtype=np.int32)
    rule = make_rule(page, ratio, rng, window, softcap, has_sinks)
    device = DeviceCache(cache, rng, rule.first_page(int(positions[0]), page.page_tokens))
    n_partitions = (
        count_partitions(n_keys, large_begin_of(page)) if window is None else most_window_partitions(window, n_tokens)
    )

    together = run_decode(device, q, positions, rule, [n_partitions])
    exact = attend(q, cache, positions, rule)
    plain = attend_plain(q, cache, positions, rule, half=has_fragments(page))
    label = f"{n_keys} keys{rule}"
    yield close(f"{label}, {n_tokens} tokens", together, exact, plain, times=TIMES)

    alone = np.concatenate(
        [run_decode(device, q[i : i + 1], positions[i : i + 1], rule, [n_partitions + 2]) for i in (0, n_tokens - 1)]
    )
    yield same_bits(f"{label}: steps of one", together[[0, n_tokens - 1]], alone)
    groups = [1, *[3] * (n_partitions // 3), 2]
    apart = run_decode(device, q, positions, rule, groups)
    yield same_bits(f"{label}: {len(groups)} launches", apart, together)


def run_prefill(
    device: DeviceCache,
    q: np.ndarray,
    first_position: int,
    rule: ScoreRule,
    kernel_name: str,
    ends: list[int],
) -> np.ndarray:
    """Attention over spans that end at ``ends``; the first begins with the page that is seen first."""
    page = device.cache.page
    n_tokens, n_head, _ = q.shape
    d_q, d_sinks = cuda.to_device(q), sinks_on_device(rule)
    d_state = poisoned((count_state_floats(page, n_tokens, n_head // page.n_head_kv),))
    d_out = poisoned((n_tokens, n_head, page.head_dim_v))
    begin = rule.first_page(first_position, page.page_tokens) * page.page_tokens
    for i, end in enumerate(ends):
        attention_prefill(
            d_q,
            device.d_pages,
            d_state,
            d_out,
            page=page,
            first_position=first_position,
            key_begin=begin,
            key_end=end,
            is_first=i == 0,
            is_last=i == len(ends) - 1,
            scale=rule.scale,
            window=rule.window,
            softcap=rule.softcap,
            sinks=d_sinks,
            kernel_name=kernel_name,
            stream=0,
        )
        begin = end
    return np.asarray(d_out.copy_to_host())


def check_prefill(
    page: PageGeometry,
    ratio: int,
    first_position: int,
    n_tokens: int,
    seed: int,
    window: int | None,
    names: Sequence[str] = (),
    *,
    softcap: float = 0.0,
    has_sinks: bool = False,
) -> Iterator[Outcome]:
    """One span and many: close to the oracle, the same bits; by default the portable kernel and the device's own."""
    rng = np.random.default_rng(seed)
    cache = make_cache(page, first_position + n_tokens, rng)
    rule = make_rule(page, ratio, rng, window, softcap, has_sinks)
    yield from _compare_prefill(cache, rng, ratio, first_position, n_tokens, rule, names)


def check_values_beyond_half(kv_type: KvType, seed: int) -> Iterator[Outcome]:
    """Values that float16 cannot hold count as its largest number."""
    rng = np.random.default_rng(seed)
    page, n_keys = _two_heads((KvType.F16, 128), (kv_type, 128), 1), 300
    cache = make_cache(page, n_keys, rng)
    values = cache.v.astype(np.float32)
    values[5, 0, 3], values[200, 1, 100], values[7, 1, :8] = 1e6, 3e38, -7e4
    rows = encode_plain(values, kv_type)
    fill_regions(cache.data, rows, page.v_region, page.v_offset)
    largest = float(np.finfo(np.float16).max)
    cache = replace(cache, v=rows.exact.clip(-largest, largest))
    yield from _compare_prefill(cache, rng, 3, 0, n_keys, make_rule(page, 3, rng, None, 0.0, False), ())


def _compare_prefill(
    cache: PagedCache,
    rng: np.random.Generator,
    ratio: int,
    first_position: int,
    n_tokens: int,
    rule: ScoreRule,
    names: Sequence[str],
) -> Iterator[Outcome]:
    page, n_keys = cache.page, first_position + n_tokens
    first_page = rule.first_page(first_position, page.page_tokens)
    device = DeviceCache(cache, rng, first_page)
    q = 2.0 * rng.standard_normal((n_tokens, page.n_head_kv * ratio, page.head_dim_k), dtype=np.float32)
    positions = np.arange(first_position, n_keys, dtype=np.int32)

    exact = attend(q, cache, positions, rule)
    plain = attend_plain(q, cache, positions, rule, half=True)
    ends = [*range((first_page + 1) * page.page_tokens, n_keys, page.page_tokens), n_keys]
    for name in dict.fromkeys(names or (MMA, prefill_kernel_name(page, device_capability()))):
        kernel = partial(run_prefill, device, q, first_position, rule, name)
        label = f"{name.split()[0]} {n_tokens} x {n_keys}{rule}"
        whole = kernel([n_keys])
        yield close(label, whole, exact, plain, times=TIMES)
        yield same_bits(f"{label}: {len(ends)} spans", kernel(ends), whole)


def check_store(page: PageGeometry, n_keys: int, n_tokens: int, seed: int) -> Iterator[Outcome]:
    """New rows at scattered positions: exactly the bytes that the CPU backend stores, and no other byte touched."""
    rng = np.random.default_rng(seed)
    cache = make_cache(page, n_keys, rng)
    device = DeviceCache(cache, rng)
    positions = rng.permutation(n_keys)[:n_tokens].astype(np.int32)
    k = rng.standard_normal((n_tokens, page.n_head_kv, page.head_dim_k), dtype=np.float32)
    v = rng.standard_normal((n_tokens, page.n_head_kv, page.head_dim_v), dtype=np.float32)
    for rows in (k,) if page.v_in_k else (k, v):
        rows[0, 0] = 0.0  # a block of zeros has scale 0
        rows[1] *= np.float32(1e-3)
        rows[2] = np.round(2.0 * rows[2])  # ties
        rows[3, 0, 5] = np.inf  # becomes NaN and stays visible

    d_v = None if page.v_in_k else cuda.to_device(v)
    store_rows(cuda.to_device(k), d_v, device.d_pages, cuda.to_device(positions), page=page, stream=0)
    expected = cache.data.copy()
    flat, offsets = expected.reshape(-1), page.page_bytes * np.arange(expected.shape[0], dtype=np.int64)
    for token, position in enumerate(positions):
        values = None if page.v_in_k else v[token : token + 1]
        store_kv(flat, page, offsets, int(position), k[token : token + 1], values)
    yield same_bits(f"{n_tokens} rows", read_pages(device), expected)


def read_pages(device: DeviceCache) -> np.ndarray:
    """The pages in logical order."""
    flat = device.d_data.copy_to_host()
    offsets = device.d_pages.copy_to_host()[:-UNUSED_PAGES] - address_of(device.d_data)
    n_bytes = device.cache.data.shape[1]
    return np.stack([flat[offset : offset + n_bytes] for offset in offsets])


def check_copies(page: PageGeometry, seed: int) -> Iterator[Outcome]:
    """Whole pages from the device and from mapped host memory."""
    rng = np.random.default_rng(seed)
    cache = make_cache(page, 5 * page.page_tokens, rng)
    device = DeviceCache(cache, rng)
    d_target = poisoned((5 * page.page_bytes,), np.uint8)
    targets = cuda.to_device(address_of(d_target) + page.page_bytes * np.arange(5, dtype=np.int64))
    copy_pages(device.d_pages[:5], targets, page_bytes=page.page_bytes, blocks_per_page=3, stream=0)
    yield same_bits("pages", d_target.copy_to_host(), cache.data.reshape(-1))

    host = cuda.mapped_array(5 * page.page_bytes, np.uint8)
    host[:] = cache.data.reshape(-1)
    d_target = poisoned((5 * page.page_bytes,), np.uint8)
    targets = cuda.to_device(address_of(d_target) + page.page_bytes * np.arange(5, dtype=np.int64))
    sources = cuda.to_device(address_of(host) + page.page_bytes * np.arange(5, dtype=np.int64))
    copy_pages(sources, targets, page_bytes=page.page_bytes, blocks_per_page=64, stream=0)
    yield same_bits("pages from mapped host memory", d_target.copy_to_host(), cache.data.reshape(-1))


def pair_checks(head_dims: Sequence[int]) -> Iterator[Check]:
    """Decode and prefill of every pair of types, by the kernels that this device runs; some minutes a head size."""
    for i, (page, ratio) in enumerate(every_pair(head_dims)):

        def decode(page: PageGeometry = page, ratio: int = ratio, i: int = i) -> Iterator[Outcome]:
            yield from check_decode(page, ratio, 600 + i, seed=i, window=None)

        def prefill(page: PageGeometry = page, ratio: int = ratio, i: int = i) -> Iterator[Outcome]:
            name = prefill_kernel_name(page, device_capability())
            yield from check_prefill(page, ratio, 200 + i, 70, i, None if i % 3 else 100, names=(name,))

        yield Check(family="decode", case=describe(page, ratio), run=decode)
        yield Check(family="prefill", case=describe(page, ratio), run=prefill)


def checks() -> Iterator[Check]:
    """Lengths at the edges of pages and partitions, types and head sizes of ``covering_geometries``."""
    lengths = (1, 63, 64, 255, 256, 257, 1000, 700)
    for i, (page, ratio) in enumerate([*decode_geometries(), *wide_geometries()]):

        def decode(page: PageGeometry = page, ratio: int = ratio, i: int = i) -> Iterator[Outcome]:
            yield from check_decode(page, ratio, lengths[i % len(lengths)], seed=i, window=None)
            window = None if i % 2 or is_wide(page) else 300
            yield from check_decode(page, ratio, 1313, seed=1000 + i, window=window)

        yield Check(family="decode", case=describe(page, ratio), run=decode)

    for i, (page, ratio) in enumerate([*covering_geometries(), *wide_geometries()]):
        if page.page_tokens == 192:  # the CPU backend, which is asked for the bytes, takes powers of two
            page = replace(page, page_tokens=128)

        def store(page: PageGeometry = page, i: int = i) -> Iterator[Outcome]:
            yield from check_store(page, 3 * page.page_tokens, 17, seed=i)
            if i % 8 == 0:
                yield from check_copies(page, seed=i)

        yield Check(family="store", case=describe(page, ratio), run=store)

    for i, (page, ratio) in enumerate([*covering_geometries(), *wide_geometries()]):

        def prefill(page: PageGeometry = page, ratio: int = ratio, i: int = i) -> Iterator[Outcome]:
            yield from check_prefill(page, ratio, lengths[-1 - i % len(lengths)] - 1, 1 + 37 * (i % 7), i, None)
            yield from check_prefill(page, ratio, 0, 300, 1000 + i, None if i % 2 or is_wide(page) else 100)

        yield Check(family="prefill", case=describe(page, ratio), run=prefill)

    for seed, kv_type in enumerate((KvType.BF16, KvType.F32)):
        run = partial(check_values_beyond_half, kv_type, seed)
        yield Check(family="prefill", case=f"f16/{kv_type.value} d128 beyond float16", run=run)

    # the second and third partition size
    pages = [replace(_two_heads((kv_type, 64), (kv_type, 64), 1), n_head_kv=1) for kv_type in (*TYPES, KvType.TURBO3)]
    for page in (*pages, latent_page(KvType.F16, 128, 64)):

        def long_decode(page: PageGeometry = page) -> Iterator[Outcome]:
            for n_keys in (16 * 1024 + 1, 17000, 128 * 1024 + 700):
                yield from check_decode(page, 4, n_keys, seed=n_keys, window=None)

        yield Check(family="decode", case=describe(page, 4) + " long", run=long_decode)

    # the third size begins earlier in caches of few bits
    page = replace(_two_heads((KvType.Q4_0, 64), (KvType.TURBO4, 64), 1), n_head_kv=4)
    run = partial(check_decode, page, 4, 64 * 1024 + 700, seed=64, window=None)
    yield Check(family="decode", case=describe(page, 4) + " long", run=run)
