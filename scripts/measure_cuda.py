"""Measure the CUDA kernels on one card: results are checked first, then timed beside the driver's own copy.

    python -m scripts.measure_cuda [--only PART ...] [--types TYPE ...] [--commit HASH]

Parts: decode, prefill, wide, matvec, copies, graphs; --types chooses the cache types of the first two. Launches are
captured in a graph and rotate over several sets of inputs, so that the second-level cache does not hold them; the copy
is timed eagerly (captured, it is slower). Percentages are of the copy's rate, bytes read plus written; in graphs, of
the link's.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pynvml
from gguf import GGMLQuantizationType
from numba import cuda

from cuda_kernels.attention_decode import attention_decode
from cuda_kernels.attention_prefill import attention_prefill, count_state_floats
from cuda_kernels.launch import address_of, device_capability, keep_kernels
from cuda_kernels.matvec import Product, matvec
from cuda_kernels.merge import merge_partials, state_floats
from cuda_kernels.page_copy import copy_pages
from cuda_kernels.partitions import count_partitions
from cuda_kernels.quantise import quantise
from cuda_kernels.row_units import takes_float_activations
from cuda_kernels.weights import FAST_TYPES, WeightGeometry
from kvs_cli.environment import cache_root
from kvs_core.cuda_scratch import MMA, large_begin_of, prefill_kernel_name
from kvs_core.kernel_files import KernelFiles
from kvs_core.kv_types import KvType, PageGeometry
from scripts.cuda_checks.attention import TIMES, latent_page, poisoned
from scripts.cuda_checks.graph_copies import Shape, describe_shape, measure_ways
from scripts.cuda_checks.paged import PagedCache, ScoreRule, attend, attend_plain, make_cache
from scripts.cuda_checks.report import close
from scripts.cuda_checks.timing import (
    copy_gigabytes_per_second,
    graph_microseconds,
    host_copy_gigabytes_per_second,
)
from scripts.cuda_checks.weights import exact_weights, random_blocks, upload

PARTS = ("decode", "prefill", "wide", "matvec", "copies", "graphs")
DECODE_TYPES = (KvType.F16, KvType.Q8_0, KvType.Q4_0, KvType.TURBO4, KvType.TURBO3, KvType.F32)
PREFILL_ROWS = (
    *((kv_type, 32 * 1024) for kv_type in (KvType.F16, KvType.BF16, KvType.Q8_0, KvType.F32)),
    *((kv_type, 128 * 1024) for kv_type in (KvType.Q8_0, KvType.Q4_0, KvType.TURBO4, KvType.TURBO3)),
)
"""Types of keys and values, and how many keys."""
DISTINCT_PAGES = 64
"""Pages of random data; longer caches repeat them at other addresses."""


LATENT_HEADS = (128, 16)
"""DeepSeek V3 and V2-Lite."""


class Report:
    """Prints one line a measurement and remembers whether every result was right."""

    def __init__(self, copy_gb_s: float) -> None:
        self.copy_gb_s = copy_gb_s
        self.all_passed = True

    def check(self, what: str, got: np.ndarray, exact: np.ndarray, plain: np.ndarray, times: float) -> None:
        outcome = close(what, got, exact, plain, times=times)
        self.all_passed &= outcome.passed
        verdict = "ok  " if outcome.passed else "FAIL"
        print(f"{verdict} {what:52} error {outcome.error:.1e}, allowed {outcome.bound:.1e}", flush=True)

    def bytes_moved(self, what: str, microseconds: float, n_bytes: int) -> None:
        rate = n_bytes / microseconds / 1e3
        print(
            f"     {what:52} {microseconds:9.1f} us {rate:7.0f} GB/s {100 * rate / self.copy_gb_s:6.1f} % of copy",
            flush=True,
        )

    def operations(self, what: str, microseconds: float, n_operations: float) -> None:
        print(f"     {what:52} {microseconds:9.1f} us {n_operations / microseconds / 1e6:7.0f} TFLOP/s", flush=True)


class LongCache:
    """``n_keys`` keys in ``n_sets`` caches of the same pages at different random addresses."""

    def __init__(self, page: PageGeometry, n_keys: int, n_sets: int, rng: np.random.Generator) -> None:
        distinct = make_cache(page, DISTINCT_PAGES * page.page_tokens, rng)
        n_pages = n_keys // page.page_tokens
        repeats = n_pages // DISTINCT_PAGES
        self.page, self.n_keys = page, n_keys
        self.cache = PagedCache(
            page=page,
            data=distinct.data,
            k=np.tile(distinct.k[:, :1].astype(np.float32), (repeats, 1, 1)),
            v=np.tile(distinct.v[:, :1].astype(np.float32), (repeats, 1, 1)),
        )
        self.buffers, self.pages = [], []
        for _ in range(n_sets):
            buffer = cuda.device_array(n_pages * page.page_bytes, np.uint8)
            slots = rng.permutation(n_pages).astype(np.int64)
            place = np.empty((n_pages, page.page_bytes), np.uint8)
            place[slots] = np.tile(distinct.data, (repeats, 1))
            buffer.copy_to_device(place.reshape(-1))
            self.buffers.append(buffer)
            self.pages.append(cuda.to_device(slots * page.page_bytes + address_of(buffer)))

    def first_head(self) -> PagedCache:
        """KV head 0 alone, for the oracle."""
        one = replace(self.page, n_head_kv=1)
        return PagedCache(page=one, data=self.cache.data, k=self.cache.k, v=self.cache.v)


def geometry(kv_type: KvType, head_dim: int, n_head_kv: int) -> PageGeometry:
    return PageGeometry(
        page_tokens=256,
        n_head_kv=n_head_kv,
        head_dim_k=head_dim,
        head_dim_v=head_dim,
        type_k=kv_type,
        type_v=kv_type,
    )


_GLOBAL_HEADS = (512, 2)
"""Size and number of the KV heads of layers without a window in Gemma 4 26B-A4B, which have 8 query heads each."""
WIDE_DECODE = (
    *((geometry(kv_type, *_GLOBAL_HEADS), 8) for kv_type in (KvType.F16, KvType.Q8_0, KvType.Q4_0, KvType.TURBO4)),
    *((latent_page(kv_type, 576, 512), n) for kv_type in (KvType.F16, KvType.Q8_0) for n in LATENT_HEADS),
)
WIDE_PREFILL = (
    *((geometry(kv_type, *_GLOBAL_HEADS), 8) for kv_type in (KvType.F16, KvType.Q8_0)),
    *((latent_page(kv_type, 576, 512), LATENT_HEADS[0]) for kv_type in (KvType.F16, KvType.Q8_0)),
)


def head_dims_of(page: PageGeometry) -> str:
    both = dict.fromkeys((page.head_dim_k, page.head_dim_v))
    return "/".join(map(str, both))


def measure_decode(report: Report, stream: Any, page: PageGeometry, ratio: int) -> None:
    rng = np.random.default_rng(1)
    kv_type, head_dim, n_keys, n_sets = page.type_k, page.head_dim_v, 128 * 1024, 3
    long_cache = LongCache(page, n_keys, n_sets, rng)
    n_head, scale = page.n_head_kv * ratio, page.head_dim_k**-0.5
    large_begin = large_begin_of(page)
    n_partitions = count_partitions(n_keys, large_begin)
    q = rng.standard_normal((1, n_head, page.head_dim_k), dtype=np.float32)
    positions = np.array([n_keys - 1], np.int32)
    d_q, d_positions = cuda.to_device(q), cuda.to_device(positions)
    d_partials = poisoned((n_partitions, 1, n_head, head_dim))
    d_max_sum = poisoned((n_partitions, 1, n_head, 2))
    d_state, d_out = poisoned((state_floats(n_head, head_dim),)), poisoned((1, n_head, head_dim))

    def attend_set(pages: Any, on: Any) -> None:
        attention_decode(
            d_q, pages, d_positions, d_partials, d_max_sum, page=page, first_partition=0, scale=scale, stream=on
        )

    def fold(on: Any) -> None:
        merge_partials(
            d_partials,
            d_max_sum,
            d_positions,
            d_state,
            d_out,
            n_head=n_head,
            head_dim=head_dim,
            first_partition=0,
            large_begin=large_begin,
            is_first=True,
            is_last=True,
            stream=on,
        )

    def both(pages: Any, on: Any) -> None:
        attend_set(pages, on)
        fold(on)

    name = f"decode {kv_type.value} head {head_dims_of(page)} GQA {ratio}, {n_keys} keys"
    both(long_cache.pages[0], stream)
    stream.synchronize()
    one, rule = long_cache.first_head(), ScoreRule(scale=scale)
    exact = attend(q[:, :ratio], one, positions, rule)
    half = kv_type is not KvType.F32
    plain = attend_plain(q[:, :ratio], one, positions, rule, half=half)
    report.check(name, d_out.copy_to_host()[:, :ratio], exact, plain, TIMES)
    n_bytes = n_keys // page.page_tokens * page.payload_bytes
    sets = [long_cache.pages[i % n_sets] for i in range(12)]
    launches = [partial(attend_set, pages) for pages in sets]
    elapsed = graph_microseconds(launches, stream, overlapped=True)
    report.bytes_moved("attention", elapsed, n_bytes)
    if page.v_in_k:
        report.operations("attention", elapsed, 2.0 * n_head * (page.head_dim_k + head_dim) * n_keys)
    launches = [partial(both, pages) for pages in sets]
    report.bytes_moved("attention and fold", graph_microseconds(launches, stream, overlapped=True), n_bytes)


def measure_prefill(report: Report, stream: Any, page: PageGeometry, ratio: int, n_keys: int) -> None:
    """The portable kernel and the device's own."""
    for name in dict.fromkeys((MMA, prefill_kernel_name(page, device_capability()))):
        measure_prefill_kernel(report, stream, page, ratio, n_keys, name)


def measure_prefill_kernel(
    report: Report, stream: Any, page: PageGeometry, ratio: int, n_keys: int, kernel_name: str
) -> None:
    rng = np.random.default_rng(2)
    n_tokens, n_head = 2048, page.n_head_kv * ratio
    long_cache = LongCache(page, n_keys, 1, rng)
    scale = page.head_dim_k**-0.5
    q = rng.standard_normal((n_tokens, n_head, page.head_dim_k), dtype=np.float32)
    d_q, d_out = cuda.to_device(q), poisoned((n_tokens, n_head, page.head_dim_v))
    d_state = poisoned((count_state_floats(page, n_tokens, ratio),))

    def launch(on: Any) -> None:
        attention_prefill(
            d_q,
            long_cache.pages[0],
            d_state,
            d_out,
            page=page,
            first_position=n_keys - n_tokens,
            key_begin=0,
            key_end=n_keys,
            is_first=True,
            is_last=True,
            scale=scale,
            kernel_name=kernel_name,
            stream=on,
        )

    kernel = f"{kernel_name.split()[0]} {page.type_k.value}"
    name = f"prefill {kernel} head {head_dims_of(page)} GQA {ratio}, {n_tokens} x {n_keys}"
    launch(stream)
    stream.synchronize()
    some = np.array([0, 1, 777, n_tokens - 1])
    positions = (n_keys - n_tokens + some).astype(np.int32)
    one, rule = long_cache.first_head(), ScoreRule(scale=scale)
    exact = attend(q[some][:, :ratio], one, positions, rule)
    plain = attend_plain(q[some][:, :ratio], one, positions, rule, half=True)
    report.check(name, d_out.copy_to_host()[some][:, :ratio], exact, plain, TIMES)
    n_pairs = sum(range(n_keys - n_tokens + 1, n_keys + 1))
    elapsed = graph_microseconds([launch] * 3, stream)
    report.operations("causal, queries last", elapsed, 2.0 * n_head * (page.head_dim_k + page.head_dim_v) * n_pairs)


def measure_matvec(report: Report, stream: Any, weight_type: GGMLQuantizationType) -> None:
    rng = np.random.default_rng(3)
    matrix = WeightGeometry(weight_type=weight_type, n_rows=17408, n_cols=5120)
    few = WeightGeometry(weight_type=weight_type, n_rows=272, n_cols=5120)
    blocks = random_blocks(few, rng)
    n_sets = max(3, 400_000_000 // matrix.n_bytes)
    matrices = [upload(matrix, np.tile(blocks, (64, 1))) for _ in range(n_sets)]
    x = rng.standard_normal((8, matrix.n_cols), dtype=np.float32)
    d_x, d_scales, used = cuda.to_device(x), None, x
    if not takes_float_activations(weight_type):
        d_quants, d_scales = poisoned((8, matrix.n_cols), np.int8), poisoned((8, matrix.n_cols // 16, 2))
        quantise(d_x, d_quants, d_scales, stream=stream)
        stream.synchronize()
        by_group = d_quants.copy_to_host().astype(np.float32).reshape(8, -1, 16)
        used = (by_group * d_scales.copy_to_host()[..., :1]).reshape(8, -1)
        d_x = d_quants
    weights = np.tile(exact_weights(few, blocks), (64, 1))
    for n_vectors in (1, 2, 4, 8):
        d_out = poisoned((n_vectors, matrix.n_rows))
        scales = None if d_scales is None else d_scales[:n_vectors]
        vectors = d_x[:n_vectors]

        def launch(d_matrix: Any, on: Any, vectors: Any = vectors, scales: Any = scales, d_out: Any = d_out) -> None:
            product = Product(matrix=d_matrix, geometry=matrix, out=d_out)
            matvec([product], vectors, scales, is_added=False, stream=on)

        launch(matrices[-1], stream)
        stream.synchronize()
        exact = used[:n_vectors].astype(np.float64) @ weights.astype(np.float64).T
        plain = used[:n_vectors].astype(np.float32) @ weights.T
        name = f"matvec {weight_type.name} 17408x5120, {n_vectors} vectors"
        report.check(name, d_out.copy_to_host(), exact, plain, 8.0)
        launches = [partial(launch, matrices[i % n_sets]) for i in range(2 * n_sets)]
        for what, overlapped in (("as in a recorded step", True), ("launches that wait for each other", False)):
            report.bytes_moved(what, graph_microseconds(launches, stream, overlapped=overlapped), matrix.n_bytes)


def measure_copies(report: Report, stream: Any) -> None:
    total = 512 * 2**20
    d_source, d_target = (cuda.device_array(total, np.uint8) for _ in range(2))
    host = cuda.mapped_array(total, np.uint8)
    host[:] = np.random.default_rng(4).integers(0, 256, total, dtype=np.uint8)
    d_source.copy_to_device(np.array(host))
    for page_bytes in (64 * 2**10, 272 * 2**10, 2**20):
        n_pages = total // page_bytes
        offsets = page_bytes * np.random.default_rng(5).permutation(n_pages).astype(np.int64)
        targets = cuda.to_device(address_of(d_target) + offsets)
        for place, base, blocks in (("device", address_of(d_source), 4), ("mapped host", address_of(host), 1)):
            sources = cuda.to_device(base + offsets)

            copy = partial(copy_pages, sources, targets, page_bytes=page_bytes, blocks_per_page=blocks)
            elapsed = graph_microseconds([lambda on, copy=copy: copy(stream=on)], stream)
            moved = n_pages * page_bytes * (2 if place == "device" else 1)
            report.bytes_moved(f"{n_pages} pages of {page_bytes >> 10} KiB from {place}", elapsed, moved)
    same = bool(np.array_equal(d_target.copy_to_host()[: n_pages * page_bytes], host[: n_pages * page_bytes]))
    report.all_passed &= same
    print(f"{'ok  ' if same else 'FAIL'} copied bytes")


def measure_graphs(report: Report, stream: Any) -> None:
    """A streamed decode step in miniature, launched one by one and recorded."""
    link = 1e9 * host_copy_gigabytes_per_second(stream)
    page = geometry(KvType.F16, 128, 8)
    for spans, span_pages in ((4, 16), (1, 16), (1, 4)):
        shape = Shape(page=page, spans=spans, span_pages=span_pages)
        print(f"     {describe_shape(shape)}; link {link / 1e9:.1f} GB/s")
        for way in measure_ways(shape, stream):
            report.all_passed &= way.same
            rate = shape.step_bytes / way.seconds
            print(
                f"{'ok  ' if way.same else 'FAIL'} {way.name:52} {1e3 * way.seconds:9.2f} ms {rate / 1e9:7.1f} GB/s "
                f"{100 * rate / link:6.1f} % of link",
                flush=True,
            )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    names = [kv_type.value for kv_type in KvType]
    parser.add_argument("--types", nargs="+", choices=names, default=names, metavar="TYPE", help="of the cache")
    parser.add_argument("--commit", default="unknown", help="printed with the results")
    arguments = parser.parse_args(argv)

    pynvml.nvmlInit()
    keep_kernels(KernelFiles(cache_root(os.environ), report=print))
    device = cuda.get_current_device()
    name = device.name.decode() if isinstance(device.name, bytes) else device.name
    stream = cuda.stream()
    copy_gb_s = copy_gigabytes_per_second(stream)
    print(f"{name}, driver {pynvml.nvmlSystemGetDriverVersion()}, commit {arguments.commit}")
    print(f"driver's device-to-device copy, eager, 2 GiB: {copy_gb_s:.0f} GB/s read plus written", flush=True)
    report = Report(copy_gb_s)
    shapes = ((128, 8, 4), (256, 4, 6))
    parts: list[tuple[str, Callable[[], None]]] = []
    wanted = {KvType(name) for name in arguments.types}
    for kv_type in DECODE_TYPES:
        for head_dim, n_head_kv, ratio in shapes if kv_type in wanted else ():
            page = geometry(kv_type, head_dim, n_head_kv)
            parts.append(("decode", partial(measure_decode, report, stream, page, ratio)))
    for kv_type, n_keys in (row for row in PREFILL_ROWS if row[0] in wanted):
        for head_dim, n_head_kv, ratio in shapes:
            page = geometry(kv_type, head_dim, n_head_kv)
            parts.append(("prefill", partial(measure_prefill, report, stream, page, ratio, n_keys)))
    parts += [("wide", partial(measure_decode, report, stream, *row)) for row in WIDE_DECODE]
    parts += [("wide", partial(measure_prefill, report, stream, *row, 32 * 1024)) for row in WIDE_PREFILL]
    parts += [("matvec", partial(measure_matvec, report, stream, weight_type)) for weight_type in FAST_TYPES]
    parts.append(("copies", partial(measure_copies, report, stream)))
    parts.append(("graphs", partial(measure_graphs, report, stream)))
    for part, measure in parts:
        if part in arguments.only:
            measure()
    return 0 if report.all_passed else 1


if __name__ == "__main__":
    sys.exit(main())
