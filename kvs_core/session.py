"""A run's effects: one model, one sequence, one plan. Everything it allocates is allocated when it opens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from time import perf_counter
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvs_core.attention_rule import AttentionRule
from kvs_core.backend import Backend, CopyEngine
from kvs_core.errors import StateError
from kvs_core.host_store import HostStore, open_store
from kvs_core.kv_cache import KvCache, StreamCounters
from kvs_core.kv_rotation import Rotation
from kvs_core.kv_types import PageGeometry
from kvs_core.model_shape import LayerShape
from kvs_core.models import model_of
from kvs_core.operations import DeviceArray
from kvs_core.phase import Phase
from kvs_core.plan import OUTPUT_TILE_ROWS, RunPlan
from kvs_core.rope_settings import resolve_rope, score_growth

LogitsRows = tuple[int, NDArray[np.float32]]
"""Index of the first row within the tokens of the call, and float32 [n_rows, n_vocab]; valid until the next item."""


class Session:
    """Runs prefill and decode steps of one sequence exactly as the plan says.

    The backend must have loaded the model's weights. A step that raises leaves the cache unusable until ``clear``;
    the session and the process stay usable. ``close`` may be called twice.
    """

    def __init__(self, plan: RunPlan, backend: Backend) -> None:
        self.plan = plan
        self.counters = StreamCounters()
        self.copy_rate: float | None = None
        self._model = model_of(plan.shape)
        self._step_tokens = 0
        self._step_logits: dict[int, DeviceArray] = {}  # of decode steps by their tokens, where steps are replayed
        self._failed = False
        self._is_closed = False
        self._closing = ExitStack()
        try:
            if plan.streams:
                self.copy_rate = backend.measure_copy_rate()  # takes memory that the arena will need
            self.arena = backend.open_arena(plan.arena_bytes)
            self._closing.callback(self.arena.close)
            self.store: HostStore | None = None
            self.engine: CopyEngine | None = None
            if plan.streams:
                self.store = open_store(plan.store_bytes, plan.config.store_path)
                self._closing.callback(self.store.close)
                self.engine = backend.open_copy_engine(plan, self.arena, self.store)
                self._closing.callback(self.engine.close)
            self._ops = backend.operations(plan, self.arena)
            self._closing.callback(self._ops.close)
            self._cache = KvCache(plan, self.engine, self.counters)
            self._layer_of = {layer.layer_idx: index for index, layer in enumerate(plan.kv_layers)}
            self._last_reader = plan.last_readers()
            self._rotations = plan.rotations()
            self._score_growth = score_growth(resolve_rope(plan.shape.rope, plan.config.rope))
            self._windows = {
                layer.layer_idx: (plan.cache.n_layers + index, layer, layer.page_offsets())
                for index, layer in enumerate(plan.window_layers)
            }
            self._bind(Phase.PREFILL)
        except BaseException:
            self._closing.close()
            raise
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0

    @property
    def n_past(self) -> int:
        """Positions cached so far."""
        return self._cache.n_past

    @property
    def n_vocab(self) -> int:
        return self.plan.shape.n_vocab

    @property
    def n_ctx(self) -> int:
        return self.plan.n_ctx

    @property
    def streaming_counters(self) -> StreamCounters | None:
        """The counters of a session that was asked to stream; None with the arena off."""
        return self.counters if self.plan.arena_requested_bytes else None

    def prefill(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append a prompt in micro-batches; returns the logits of its last token, float32 [n_vocab]."""
        last: NDArray[np.float32] | None = None
        for _, rows in self.prefill_rows(tokens, output_begin=len(tokens) - 1):
            last = rows[-1].copy()
        if last is None:
            raise StateError("a prompt of no tokens has no logits")
        return last

    def prefill_rows(self, tokens: Sequence[int], *, output_begin: int) -> Iterator[LogitsRows]:
        """Append tokens in micro-batches and yield logits of those from index ``output_begin`` on, tile by tile.

        Nothing is computed before the first item is asked for; the iterator must be exhausted before another step.
        """
        self._check_room(len(tokens))
        begin = 0
        sizes = self.plan.ubatches(len(tokens))
        for index, n_tokens in enumerate(sizes):
            chunk = tokens[begin : begin + n_tokens]
            started = perf_counter()
            self._step(Phase.PREFILL, chunk, next_phase=Phase.PREFILL if index + 1 < len(sizes) else None)
            self._ops.synchronise()
            self.prefill_seconds += perf_counter() - started
            yield from self._outputs(begin, max(0, output_begin - begin), n_tokens)
            begin += n_tokens

    def decode(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append tokens in the decode layout; logits of each, float32 [n_tokens, n_vocab].

        Raises StateError for none, or more than ``n_decode_tokens`` of the plan: at most DECODE_TOKENS_MAX.
        """
        if not 1 <= len(tokens) <= self.plan.n_decode_tokens:
            raise StateError(f"a decode step takes 1 to {self.plan.n_decode_tokens} tokens, not {len(tokens)}")
        self._check_room(len(tokens))
        started = perf_counter()
        self._step(Phase.DECODE, tokens, next_phase=Phase.DECODE if self.n_past + len(tokens) < self.n_ctx else None)
        logits = self._step_logits[len(tokens)] if self._ops.replays_steps else self._logits(0, len(tokens))
        rows = self._ops.to_host(logits).copy()
        self.decode_seconds += perf_counter() - started
        return rows

    def warm_up(self) -> None:
        """Run a micro-batch and two tokens and forget them: kernels of both phases are loaded, one step is recorded.

        Nothing that can be seen later changes: logits, counters and times begin as in a new session.
        """
        n_tokens = min(self.plan.n_ubatch, self.n_ctx - 2)
        if n_tokens < 1:
            return  # a context too short for both phases
        self.prefill([0] * n_tokens)
        for _ in range(2):
            self.decode([0])
        self.clear()
        self._cache.enter_phase(Phase.PREFILL)
        self._bind(Phase.PREFILL)
        self.counters.reset()
        self.prefill_seconds = self.decode_seconds = 0.0

    def clear(self) -> None:
        """Forget the sequence; the next step begins at position 0."""
        self._check_open()
        self._cache.clear()
        self._failed = False

    def close(self) -> None:
        self._is_closed = True
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise StateError("the session is closed")

    def _check_room(self, n_tokens: int) -> None:
        self._check_open()
        if self._failed:
            raise StateError("an earlier step failed; clear the session first")
        if self.n_past + n_tokens > self.n_ctx:
            raise StateError(f"{self.n_past} + {n_tokens} positions exceed the context of {self.n_ctx}")

    def _bind(self, phase: Phase) -> None:
        self._ops.bind(self.plan.layout(phase), self.plan.workspace(phase))

    def _step(self, phase: Phase, tokens: Sequence[int], *, next_phase: Phase | None) -> None:
        self._check_open()
        self._failed = True
        if phase is not self._cache.phase:
            self._cache.enter_phase(phase)
            self._bind(phase)
        self._step_tokens = len(tokens)
        self._ops.begin_step(tokens, self.n_past)
        self._cache.begin_step(len(tokens))
        if not self._ops.run_step(self._forward):
            self._cache.replay_layers(self._ops.replay_part)
        self._cache.end_step(next_phase)
        self._failed = False

    def _forward(self) -> None:
        self._model.forward(self.plan.shape, self._ops, self._attend)
        if self._cache.phase is Phase.DECODE and self._ops.replays_steps:
            self._step_logits[self._step_tokens] = self._logits(0, self._step_tokens)

    def _attend(
        self,
        layer_idx: int,
        q: DeviceArray,
        k: DeviceArray | None,
        v: DeviceArray | None,
        out: DeviceArray,
        *,
        scale: float,
        rotates: bool = False,
        softcap: float = 0.0,
        sinks: str | None = None,
    ) -> None:
        layer = self.plan.shape.layers[layer_idx]
        source_idx = layer_idx if layer.kv_from is None else layer.kv_from
        rule = AttentionRule(scale=scale * self._score_growth, n_swa=layer.n_swa, softcap=softcap)
        rotations = self._rotations.get(source_idx)
        geometry = self._geometry_of(source_idx)
        in_window = source_idx in self._windows
        attended = out
        keeps_heads = (geometry.head_dim_k, geometry.head_dim_v) == (layer.head_dim_k, layer.head_dim_v)
        stores_rotated = k is not None and keeps_heads  # a store turns and rotates heads of the cache's sizes
        if rotates and not stores_rotated:
            self._ops.rope(q, layer.n_head, in_window=in_window)
            if k is not None:
                self._ops.rope(k, layer.n_head_kv, in_window=in_window)
            rotates = False
        if not keeps_heads:
            q, k, v, attended = self._pad_heads(layer, geometry, q, k, v, out)
        if rotations is not None and not rotates:
            self._rotate_heads(rotations.keys, q)
            self._rotate_heads(rotations.keys, k)
            self._rotate_heads(rotations.values, v)
        self._ops.begin_attention(layer.n_head, self._geometry_of(source_idx).head_dim_v, attended, sinks)
        if in_window:
            self._attend_window(source_idx, q, k, v, rule, rotates)
        else:
            self._attend_pages(layer_idx, source_idx, q, k, v, rule, rotates)
        self._ops.finish_attention()
        if rotations is not None:
            self._rotate_heads(rotations.values, attended, inverse=True)
        if attended is not out:
            self._ops.resize_heads(attended, layer.n_head, out)

    def _pad_heads(
        self,
        layer: LayerShape,
        geometry: PageGeometry,
        q: DeviceArray,
        k: DeviceArray | None,
        v: DeviceArray | None,
        out: DeviceArray,
    ) -> tuple[DeviceArray, DeviceArray | None, DeviceArray | None, DeviceArray]:
        """The four arrays at the head sizes of the cache: copies with zeros where these are larger.

        Zeros change no product of a query and a key, and the values' zeros are left out of the result at the end.
        """
        if geometry.head_dim_k != layer.head_dim_k:
            q = self._pad("q_padded", q, layer.n_head, geometry.head_dim_k)
            k = self._pad("k_padded", k, layer.n_head_kv, geometry.head_dim_k)
        if geometry.head_dim_v != layer.head_dim_v:
            v = self._pad("v_padded", v, layer.n_head_kv, geometry.head_dim_v)
            out = self._ops.buffer("attended_padded", layer.n_head * geometry.head_dim_v)
        return q, k, v, out

    def _pad(self, name: str, x: DeviceArray | None, n_head: int, head_dim: int) -> DeviceArray | None:
        if x is None:
            return None
        padded = self._ops.buffer(name, n_head * head_dim)
        self._ops.resize_heads(x, n_head, padded)
        return padded

    def _geometry_of(self, layer_idx: int) -> PageGeometry:
        if layer_idx in self._windows:
            return self._windows[layer_idx][1].geometry
        return self.plan.kv_layers[self._layer_of[layer_idx]].geometry

    def _attend_window(
        self,
        source_idx: int,
        q: DeviceArray,
        k: DeviceArray | None,
        v: DeviceArray | None,
        rule: AttentionRule,
        rotates: bool,
    ) -> None:
        """The buffer of the layer ``source_idx`` holds all that the step sees, so one range of pages does."""
        layer, window, offsets = self._windows[source_idx]
        page_begin, page_end = window.pages_seen(self.n_past, self._step_tokens)
        ops = self._ops
        if rotates:
            rotations = self._rotations.get(source_idx)
            ops.rotate_store(layer, window.geometry, offsets, q, k, v, in_window=True, rotations=rotations)
        elif k is not None:
            ops.store_rows(layer, window.geometry, offsets, k, v)
        ops.attend_span(layer, window.geometry, offsets, page_begin, page_end, q, rule)

    def _attend_pages(
        self,
        layer_idx: int,
        source_idx: int,
        q: DeviceArray,
        k: DeviceArray | None,
        v: DeviceArray | None,
        rule: AttentionRule,
        rotates: bool,
    ) -> None:
        """Pages of the layer ``source_idx`` stay where they are until the last layer that attends to them is done."""
        layer = self._layer_of[source_idx]
        geometry = self.plan.kv_layers[layer].geometry
        ops, cache = self._ops, self._cache
        offsets = cache.offsets(layer)
        if k is not None:
            ops.end_part()
            cache.begin_layer(layer)
        if rotates:
            ops.rotate_store(layer, geometry, offsets, q, k, v, rotations=self._rotations.get(source_idx))
        elif k is not None:
            ops.store_rows(layer, geometry, offsets, k, v)
        ops.end_part()
        for page_begin, page_end in cache.spans(layer):
            ops.attend_span(layer, geometry, offsets, page_begin, page_end, q, rule)
            ops.end_part()
        if layer_idx == self._last_reader[layer]:
            cache.end_layer(layer)

    def _rotate_heads(self, rotation: Rotation | None, x: DeviceArray | None, *, inverse: bool = False) -> None:
        if rotation is not None and x is not None:
            self._ops.rotate_heads(x, rotation, inverse=inverse)

    def _outputs(self, first_row: int, row_begin: int, row_end: int) -> Iterator[LogitsRows]:
        tile_rows = OUTPUT_TILE_ROWS[self._cache.phase]
        for begin in range(row_begin, row_end, tile_rows):
            end = min(begin + tile_rows, row_end)
            yield first_row + begin, self._ops.to_host(self._logits(begin, end))

    def _logits(self, row_begin: int, row_end: int) -> DeviceArray:
        return self._model.logits(self.plan.shape, self._ops, row_begin, row_end)
