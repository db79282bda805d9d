"""A streamed decode step in miniature, its launches and copies issued in three ways: what does recording gain?

A layer is a number of small launches, which stand for its norms and products, and attention over spans that come
from locked host memory through a ring of eight slots; a fold ends it. In every way the copy of span i + 8, the next
step's first ones included, begins when attention over span i is done, so the link is never idle for want of orders.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np
from cuda.bindings import driver
from numba import cuda

from cuda_kernels.attention_decode import attention_decode
from cuda_kernels.copy_engine import CudaCopyEngine
from cuda_kernels.device import DeviceMemory, Event
from cuda_kernels.locked_store import LockedStore
from cuda_kernels.merge import merge_partials, state_floats
from cuda_kernels.norm import rms_norm
from cuda_kernels.partitions import count_partitions
from kvs_core.cuda_scratch import large_begin_of
from kvs_core.host_store import RamStore
from kvs_core.kv_types import PageGeometry
from kvs_core.units import MIB
from scripts.cuda_checks.attention import poisoned
from scripts.cuda_checks.paged import make_cache
from scripts.cuda_checks.timing import captured, checked, raw_stream

N_LAYER, SLOTS, SMALL_LAUNCHES, N_EMBD = 32, 8, 20, 4096
GQA_RATIO = 4
DISTINCT_PAGES = 64
STEPS = 9
WAIT_EXTERNAL = int(driver.CUevent_wait_flags.CU_EVENT_WAIT_EXTERNAL)
RECORD_EXTERNAL = int(driver.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """``spans`` spans of ``span_pages`` pages a layer, all of them streamed; SLOTS is a multiple of ``spans``."""

    page: PageGeometry
    spans: int
    span_pages: int

    @property
    def span_bytes(self) -> int:
        return self.span_pages * self.page.page_bytes

    @property
    def span_keys(self) -> int:
        return self.span_pages * self.page.page_tokens

    @property
    def n_spans(self) -> int:
        return N_LAYER * self.spans

    @property
    def step_bytes(self) -> int:
        return self.n_spans * self.span_bytes


class StreamedStep:
    """The arrays of a step and its launches; ``outputs`` is float32 [n_layer, n_head, head_dim] on the host.

    The ring's slots follow each other, and a layer's spans lie in ``spans`` of them: layers that begin at the same slot
    share a page table.
    """

    def __init__(self, shape: Shape, stream: Any, closing: ExitStack) -> None:
        page = shape.page
        self.shape, self.stream, self.raw = shape, stream, raw_stream(stream)
        rng = np.random.default_rng(6)
        self.ring = DeviceMemory(SLOTS * shape.span_bytes, "the ring")
        closing.callback(self.ring.close)
        store = RamStore(shape.step_bytes)
        closing.callback(store.close)
        data = make_cache(page, DISTINCT_PAGES * page.page_tokens, rng).data.reshape(-1)
        host = np.frombuffer((ctypes.c_uint8 * store.n_bytes).from_address(store.address), np.uint8)
        for begin in range(0, host.size, data.size):
            part = host[begin : begin + data.size]
            part[:] = np.roll(data, begin // data.size * page.page_bytes)[: part.size]
        del host
        self.store = LockedStore(store, [0], report=print)
        self.engine = CudaCopyEngine(self.ring, self.store, self.raw)
        closing.callback(self.engine.close)  # closes the locked store, too

        n_head, head_dim = page.n_head_kv * GQA_RATIO, page.head_dim_k
        n_keys, self.large_begin = shape.spans * shape.span_keys, large_begin_of(page)
        self.n_head, self.head_dim = n_head, head_dim
        self.n_partitions = count_partitions(n_keys, self.large_begin)
        self.q = cuda.to_device(rng.standard_normal((1, n_head, head_dim), dtype=np.float32))
        self.positions = cuda.to_device(np.array([n_keys - 1], np.int32))
        self.partials = poisoned((self.n_partitions, 1, n_head, head_dim))
        self.max_sum = poisoned((self.n_partitions, 1, n_head, 2))
        edges = [count_partitions(shape.span_keys * n, self.large_begin) for n in range(shape.spans + 1)]
        self.first_partitions = edges[:-1]
        self.parts = [
            (self.partials[first:last], self.max_sum[first:last]) for first, last in pairwise(edges)
        ]  # made once: a view costs as much as a launch
        self.state = poisoned((state_floats(n_head, head_dim),))
        self.outs = [poisoned((1, n_head, head_dim)) for _ in range(N_LAYER)]
        self.x, self.weight = (cuda.to_device(rng.standard_normal(n, dtype=np.float32)) for n in (N_EMBD, N_EMBD))
        self.x = self.x.reshape(1, N_EMBD)
        self.normed = poisoned((1, N_EMBD))
        self.tables = [
            cuda.to_device(
                self.ring.address
                + first_slot * shape.span_bytes
                + page.page_bytes * np.arange(shape.spans * shape.span_pages, dtype=np.int64)
            )
            for first_slot in range(0, SLOTS, shape.spans)
        ]

    def begin_layer(self) -> None:
        for _ in range(SMALL_LAUNCHES):
            rms_norm(self.x, self.weight, self.normed, eps=1e-5, stream=self.stream)

    def attend(self, span: int) -> None:
        layer, index = divmod(span, self.shape.spans)
        partials, max_sum = self.parts[index]
        attention_decode(
            self.q,
            self.tables[layer % len(self.tables)],
            self.positions,
            partials,
            max_sum,
            page=self.shape.page,
            first_partition=self.first_partitions[index],
            scale=self.head_dim**-0.5,
            stream=self.stream,
        )

    def fold(self, layer: int) -> None:
        merge_partials(
            self.partials,
            self.max_sum,
            self.positions,
            self.state,
            self.outs[layer],
            n_head=self.n_head,
            head_dim=self.head_dim,
            first_partition=0,
            large_begin=self.large_begin,
            is_first=True,
            is_last=True,
            stream=self.stream,
        )

    def layer(self, layer: int, before: Callable[[int], None], after: Callable[[int], None]) -> None:
        """The launches of a layer, with ``before`` and ``after`` around attention over each of its spans."""
        self.begin_layer()
        for span in range(layer * self.shape.spans, (layer + 1) * self.shape.spans):
            before(span)
            self.attend(span)
            after(span)
        self.fold(layer)

    def copy(self, span: int, copy_stream: Any) -> None:
        """Copy a span of this step, or of the next, into its slot."""
        target = self.ring.address + span % SLOTS * self.shape.span_bytes
        offset = span % self.shape.n_spans * self.shape.span_bytes
        for address, begin, size in self.store.pieces(offset, self.shape.span_bytes):
            checked(driver.cuMemcpyHtoDAsync(target + begin, address, size, copy_stream))

    def fetch(self, span: int) -> int:
        return self.engine.fetch(
            store_offset=span % self.shape.n_spans * self.shape.span_bytes,
            arena_offset=span % SLOTS * self.shape.span_bytes,
            n_bytes=self.shape.span_bytes,
        )

    def outputs(self) -> np.ndarray:
        return np.stack([out.copy_to_host()[0] for out in self.outs])


def time_steps(step: Callable[[], None], synchronise: Callable[[], None]) -> float:
    """Median seconds of a step, to the moment when the host knows that it is over; two go before."""
    seconds = []
    for _ in range(STEPS + 2):
        started = perf_counter()
        step()
        synchronise()
        seconds.append(perf_counter() - started)
    return float(np.median(seconds[2:]))


def launched_one_by_one(work: StreamedStep) -> float:
    """The product's way: launches one by one, copies by the copy engine."""
    tickets = {span: work.fetch(span) for span in range(SLOTS)}

    def wait(span: int) -> None:
        ticket = tickets.pop(span)
        work.engine.wait(ticket)
        work.engine.bytes_of(ticket)

    def fetch_next(span: int) -> None:
        following = (span + SLOTS) % work.shape.n_spans
        tickets[following] = work.fetch(following)

    def step() -> None:
        for layer in range(N_LAYER):
            work.layer(layer, wait, fetch_next)

    seconds = time_steps(step, work.stream.synchronize)
    work.engine.finish_all()
    return seconds


def recorded_by_layer(work: StreamedStep) -> float:
    """A graph a layer with external event waits and records inside, copies outside.

    A graph may read an external event as it was when the graph was launched. So a layer's copies are asked for before
    its graph is launched, which rules out one graph a step: the ring's slots are used again within a step, and a copy
    can be asked for only behind the launch that frees its slot. Every span has events of its own.
    """
    with ExitStack() as closing:
        copy_stream = checked(driver.cuStreamCreate(int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))
        closing.callback(lambda: checked(driver.cuStreamDestroy(copy_stream)))
        arrived, free = ([Event() for _ in range(work.shape.n_spans)] for _ in range(2))
        for event in (*arrived, *free):
            closing.callback(event.close)

        def wait(span: int) -> None:
            checked(driver.cuStreamWaitEvent(work.raw, arrived[span].handle, WAIT_EXTERNAL))

        def release(span: int) -> None:
            checked(driver.cuEventRecordWithFlags(free[span].handle, work.raw, RECORD_EXTERNAL))

        graphs = [
            closing.enter_context(captured(work.stream, lambda layer=layer: work.layer(layer, wait, release)))
            for layer in range(N_LAYER)
        ]

        def copy(span: int) -> None:
            work.copy(span, copy_stream)
            arrived[span % work.shape.n_spans].record(copy_stream)

        for span in range(SLOTS):
            copy(span)

        def step() -> None:
            for layer, graph in enumerate(graphs):
                checked(driver.cuGraphLaunch(graph, work.raw))
                for span in range(layer * work.shape.spans, (layer + 1) * work.shape.spans):
                    free[span].hold(copy_stream)
                    copy(span + SLOTS)

        seconds = time_steps(step, work.stream.synchronize)
        checked(driver.cuStreamSynchronize(copy_stream))
    return seconds


def recorded_with_copies(work: StreamedStep) -> float:
    """One graph a step, copies inside it on a forked stream; the last eight bring the next step's first spans."""
    with ExitStack() as closing:
        copy_stream = checked(driver.cuStreamCreate(int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))
        closing.callback(lambda: checked(driver.cuStreamDestroy(copy_stream)))
        arrived, free = ([Event() for _ in range(work.shape.n_spans)] for _ in range(2))
        for event in (*arrived, *free):
            closing.callback(event.close)

        def wait(span: int) -> None:
            if span >= SLOTS:  # earlier ones came with the step before
                arrived[span].hold(work.raw)

        def copy_next(span: int) -> None:
            free[span].record(work.raw)
            free[span].hold(copy_stream)
            work.copy(span + SLOTS, copy_stream)
            arrived[(span + SLOTS) % work.shape.n_spans].record(copy_stream)

        def step() -> None:
            for layer in range(N_LAYER):
                work.layer(layer, wait, copy_next)
            arrived[SLOTS - 1].hold(work.raw)  # joins the forked stream: its last copy is this one

        for span in range(SLOTS):
            work.copy(span, copy_stream)
        checked(driver.cuStreamSynchronize(copy_stream))
        with captured(work.stream, step) as graph:
            seconds = time_steps(lambda: checked(driver.cuGraphLaunch(graph, work.raw)), work.stream.synchronize)
    return seconds


WAYS: dict[str, Callable[[StreamedStep], float]] = {
    "launched one by one, copies beside": launched_one_by_one,
    "a graph a layer, copies outside": recorded_by_layer,
    "a graph a step, copies inside": recorded_with_copies,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WayMeasured:
    """``same`` says whether every layer's output has the bits of the first way's."""

    name: str
    seconds: float
    same: bool


def measure_ways(shape: Shape, stream: Any) -> list[WayMeasured]:
    results: list[WayMeasured] = []
    with ExitStack() as closing:
        work = StreamedStep(shape, stream, closing)
        reference: np.ndarray | None = None
        for name, way in WAYS.items():
            seconds = way(work)
            outputs = work.outputs()
            reference = outputs if reference is None else reference
            same = outputs.tobytes() == reference.tobytes() and bool(np.isfinite(outputs).all())
            results.append(WayMeasured(name=name, seconds=seconds, same=same))
    return results


def describe_shape(shape: Shape) -> str:
    return (
        f"{N_LAYER} layers, each {SMALL_LAUNCHES} small launches and {shape.spans} spans of "
        f"{shape.span_bytes / MIB:.0f} MiB: {shape.step_bytes / MIB:.0f} MiB a step"
    )
