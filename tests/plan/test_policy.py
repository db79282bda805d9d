"""Layouts, ring schedules and byte predictions: pure integers."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvs_core import policy
from kvs_core.phase import Phase
from kvs_core.policy import CacheShape, Layout, RingPolicy

RING = RingPolicy(target_bytes=64 * 1024, span_bytes=16 * 1024, room_divisor=4)

caches = st.builds(
    CacheShape,
    page_tokens=st.sampled_from([16, 64, 256]),
    page_bytes=st.lists(st.sampled_from([256, 1024, 2304, 4096]), min_size=1, max_size=6).map(tuple),
    n_pages=st.integers(1, 60),
)


def layout_of(cache: CacheShape, extra: int, n_tokens: int = 512) -> Layout:
    arena = policy.fixed_bytes(cache, state_bytes=512, workspace_bytes=1024, n_tokens=n_tokens) + extra
    return policy.plan_streaming(
        Phase.PREFILL, cache, RING, arena_bytes=arena, state_bytes=512, workspace_bytes=1024, n_tokens=n_tokens
    )


@given(cache=caches, extra=st.integers(0, 500_000))
def test_regions_are_disjoint_and_add_up_to_the_arena(cache: CacheShape, extra: int) -> None:
    layout = layout_of(cache, extra)
    assert layout.unused_bytes >= 0
    used = layout.state_bytes + layout.resident_bytes + layout.ring_bytes + layout.workspace_bytes
    assert used + layout.unused_bytes == layout.arena_bytes
    assert layout.tail_offset == layout.state_bytes
    assert layout.resident_offset == layout.tail_offset + layout.tail_bytes
    assert layout.fresh_offset >= layout.resident_offset + layout.resident_page_bytes
    assert layout.stream_offset == layout.fresh_offset + layout.fresh_bytes
    assert layout.workspace_offset + layout.workspace_bytes <= layout.arena_bytes
    assert max(layout.resident_pages) - min(layout.resident_pages) <= 1


@given(cache=caches, extra=st.integers(0, 300_000), n_past=st.integers(0, 20_000), data=st.data())
def test_a_layer_that_several_attend_to_is_scheduled_and_counted_once_for_each(
    cache: CacheShape, extra: int, n_past: int, data: st.DataObject
) -> None:
    reads = tuple(data.draw(st.integers(1, 4)) for _ in cache.page_bytes)
    once, often = layout_of(cache, extra), layout_of(replace(cache, reads=reads), extra)
    n_past = min(n_past, cache.n_pages * cache.page_tokens)
    n_sealed = n_past // cache.page_tokens
    spans = policy.build_schedule(often, n_sealed)
    order = [(span.layer, span.read_idx) for span in spans]
    assert order == sorted(order)
    for layer, resident in enumerate(often.resident_pages):
        for read_idx in range(reads[layer]):
            mine = [span for span in spans if (span.layer, span.read_idx) == (layer, read_idx)]
            pages = [page for span in mine for page in range(span.page_begin, span.page_end)]
            assert pages == list(range(resident, n_sealed))
    assert sum(span.n_bytes for span in spans) == policy.streamed_bytes_of_step(often, n_past)
    assert policy.streamed_bytes_of_step(once, n_past) <= policy.streamed_bytes_of_step(often, n_past)


@given(cache=caches, extra=st.integers(0, 300_000), n_past=st.integers(0, 20_000))
def test_the_schedule_reads_every_streamed_page_once_in_order(cache: CacheShape, extra: int, n_past: int) -> None:
    layout = layout_of(cache, extra)
    n_past = min(n_past, cache.n_pages * cache.page_tokens)
    n_sealed = n_past // cache.page_tokens
    spans = policy.build_schedule(layout, n_sealed)
    for layer, resident in enumerate(layout.resident_pages):
        pages = [page for span in spans if span.layer == layer for page in range(span.page_begin, span.page_end)]
        assert pages == list(range(resident, n_sealed))
    assert [span.layer for span in spans] == sorted(span.layer for span in spans)
    for span in spans:
        assert layout.stream_offset <= span.arena_offset
        assert span.arena_offset + span.n_bytes <= layout.stream_offset + layout.stream_bytes
    assert sum(span.n_bytes for span in spans) == policy.streamed_bytes_of_step(layout, n_past)


@given(cache=caches, extra=st.integers(0, 200_000), more=st.integers(0, 200_000))
def test_a_larger_arena_never_streams_more(cache: CacheShape, extra: int, more: int) -> None:
    small, large = layout_of(cache, extra), layout_of(cache, extra + more)
    n_past = cache.n_pages * cache.page_tokens
    assert policy.streamed_bytes_of_step(large, n_past) <= policy.streamed_bytes_of_step(small, n_past)
    assert all(b >= a for a, b in zip(small.resident_pages, large.resident_pages, strict=True))


@given(n_tokens=st.integers(1, 600), begin=st.integers(0, 600), page_tokens=st.sampled_from([16, 64, 256]))
def test_touched_pages_never_exceed_the_bound(n_tokens: int, begin: int, page_tokens: int) -> None:
    touched = (begin + n_tokens - 1) // page_tokens - begin // page_tokens + 1
    assert touched <= policy.touched_pages_max(n_tokens, page_tokens)


def test_ubatches_are_cut_inside_batches() -> None:
    assert policy.split_ubatches(2000, 2048, 512) == (512, 512, 512, 464)
    assert policy.split_ubatches(2500, 1000, 512) == (512, 488, 512, 488, 500)
    assert policy.split_ubatches(0, 2048, 512) == ()


def test_streamed_bytes_of_a_run_by_hand() -> None:
    cache = CacheShape(page_tokens=16, page_bytes=(256,), n_pages=8)
    layout = policy.plan_streaming(
        Phase.PREFILL, cache, RING, arena_bytes=256 * 7, state_bytes=0, workspace_bytes=0, n_tokens=32
    )
    # tail 1 page, fresh 2 pages, ring 2 pages, so 2 pages are resident
    assert layout.resident_pages == (2,)
    # steps begin at 0, 32, 64: 0, 2, 4 pages sealed, 0, 0, 2 stream; decode from 96 on: 6 sealed, 4 stream
    assert policy.streamed_bytes_of_run(layout, layout, ubatches=(32, 32, 32), n_decode_steps=3) == 256 * (2 + 3 * 4)


@given(cache=caches, step=st.sampled_from([1, 2, 4]), extra=st.integers(0, 500_000), n_sealed=st.integers(0, 60))
def test_spans_end_at_multiples_of_the_step_and_fit_the_ring(
    cache: CacheShape, step: int, extra: int, n_sealed: int
) -> None:
    ring = replace(RING, span_step=step)
    arena = policy.fixed_bytes(cache, state_bytes=0, workspace_bytes=1024, n_tokens=64, span_step=step) + extra
    layout = policy.plan_streaming(
        Phase.DECODE, cache, ring, arena_bytes=arena, state_bytes=0, workspace_bytes=1024, n_tokens=64
    )
    assert layout.unused_bytes >= 0
    n_sealed = min(n_sealed, cache.n_pages)
    read = dict(enumerate(layout.resident_pages))
    for span in policy.build_schedule(layout, n_sealed):
        assert span.page_begin == read[span.layer]
        assert span.page_end == n_sealed or span.page_end % step == 0
        assert layout.stream_offset <= span.arena_offset
        assert span.arena_offset + span.n_bytes <= layout.stream_offset + layout.stream_bytes
        read[span.layer] = span.page_end
    assert all(end >= n_sealed for end in read.values())
