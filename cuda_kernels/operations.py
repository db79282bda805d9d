"""The operation set on a CUDA device: arrays of the arena's workspace handed to kernels on one stream. No kernels."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cuda.bindings import driver
from numpy.typing import NDArray

from cuda_kernels import launch_list
from cuda_kernels.activation import Activation, gated_activation, to_half
from cuda_kernels.attention_decode import attention_decode
from cuda_kernels.attention_prefill import attention_prefill, count_state_floats
from cuda_kernels.dequant import dequantise_rows, embed_rows
from cuda_kernels.device import DeviceMemory, PinnedBuffer, checked, raw_stream
from cuda_kernels.device_weights import DeviceMatrix
from cuda_kernels.elementwise import (
    MAX_STEP_TOKENS,
    add_in_place,
    scale_by_log_position,
    write_sequence,
    write_step,
)
from cuda_kernels.gated_matvec import gated_matvec
from cuda_kernels.launch import call_launch
from cuda_kernels.launch_list import KeptSteps
from cuda_kernels.matvec import MAX_MATRICES, Product, matvec
from cuda_kernels.merge import merge_partials, state_floats
from cuda_kernels.norm import rms_norm
from cuda_kernels.partitions import count_partitions, partition_bounds
from cuda_kernels.products import LtProducts
from cuda_kernels.quantise import QUANT_BLOCK, norm_quantise, quantise
from cuda_kernels.recording import Recordings
from cuda_kernels.rope import RopePairing, rope
from cuda_kernels.rotate_store import rotate_store
from cuda_kernels.row_units import takes_float_activations
from cuda_kernels.store import store_rows
from cuda_kernels.weight_units import GROUP_ELEMENTS
from kvs_core.attention_rule import AttentionRule
from kvs_core.cuda_scratch import PARTIAL_ROWS, CudaScratch, tile_rows
from kvs_core.errors import KernelArgumentError, StateError
from kvs_core.kv_types import PageGeometry
from kvs_core.phase import Phase
from kvs_core.plan import OUTPUT_TILE_ROWS, RunPlan, cuda_scratch_of
from kvs_core.policy import Layout
from kvs_core.units import align_up, ceil_div
from kvs_core.workspace import Workspace

_KEPT_BYTES_MAX = 5_000_000_000
"""Steps that stream more are launched one by one. On an H200, 65536 tokens of the 8B shape: steps of 4.4 GB took 83 ms
with kept launches and 89 without, steps of 6.7 GB 123.6 and 122.4, of 7.7 GB 143.9 and 142.1 ms."""
_RECORDED_PARTITIONS = 16
"""Recorded steps cover a multiple of this many partitions, so that one recording serves thousands of tokens."""


@dataclass(frozen=True, slots=True)
class Rows:
    """float32 [n_rows, width] at a byte of the arena: what model files pass from one operation to the next."""

    offset: int
    n_rows: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRope:
    """``frequencies`` float64 [n_pairs] on the device, radians a position."""

    frequencies: Any
    magnitude: float
    pairing: RopePairing


@dataclass(slots=True, kw_only=True)
class _Attention:
    """The running attention of one layer: where the result goes, how far the keys are reduced and folded."""

    n_head: int
    head_dim_v: int
    out: Rows
    n_partitions: int = 0  # reduced so far
    group_begin: int = 0  # first of those that are not folded yet
    is_folded: bool = False  # the fold carries state already
    is_done: bool = False


class CudaOperations:
    """The operations of ``kvs_core.operations.Operations`` that models in ``cuda_support`` need, over one arena.

    Kernels run in the order of the calls, on one stream; nothing waits on the host but ``to_host`` and ``synchronise``.
    Kernels are chosen by phase: prefill multiplies float16 tiles on tensor cores, decode reads quantised weights.

    Without streaming every page has its address from the start: the page tables are written once, and decode steps are
    recorded and replayed. A recording depends on the number of tokens and of partitions only. With streaming, decode
    steps within one page differ in nothing but their copies: the launches of the first are kept and made again, part
    by part, as the pages arrive.
    """

    def __init__(
        self,
        plan: RunPlan,
        arena: DeviceMemory,
        *,
        matrices: Mapping[str, DeviceMatrix],
        vectors: Mapping[str, Any],
        rope: DeviceRope,
        products: LtProducts,
        stream: Any,
        overlaps: bool,
    ) -> None:
        self._plan = plan
        self._arena = arena
        self._matrices = matrices
        self._vectors = vectors
        self._rope = rope
        self._products = products
        self._stream = stream
        self._raw_stream = raw_stream(stream)
        self._eps = plan.shape.rms_eps
        self._phase = Phase.PREFILL
        self._offsets: dict[str, int] = {}
        self._scratch_at = 0
        self._regions: CudaScratch = cuda_scratch_of(plan, Phase.PREFILL)
        self._n_tokens = 0
        self._first_pos = 0
        self._attention: _Attention | None = None
        self._has_fixed_pages = not plan.streams
        self._recordings = Recordings(self._raw_stream, overlaps=overlaps)
        self._loaded_steps: set[int] = set()
        self._kept_steps = KeptSteps(call_launch)
        self._is_recording = False
        self._held: Rows | None = None  # what the operation before left as a product reads it: quantised, or float16
        self._host = PinnedBuffer(4 * max(OUTPUT_TILE_ROWS.values()) * plan.shape.n_vocab)

    def close(self) -> None:
        self.synchronise()
        self._recordings.close()
        self._host.close()

    def bind(self, layout: Layout, workspace: Workspace) -> None:
        self._phase = layout.phase
        self._offsets = {placed.spec.name: layout.workspace_offset + placed.offset for placed in workspace.arrays}
        self._scratch_at = self._offsets["scratch"]
        self._regions = cuda_scratch_of(self._plan, layout.phase)
        self._arena.forget_views()
        self._kept_steps.forget()
        if self._has_fixed_pages:
            self._write_fixed_tables(layout)

    def begin_step(self, tokens: Sequence[int], first_pos: int) -> None:
        n_vocab, lowest, highest = self._plan.shape.n_vocab, min(tokens), max(tokens)
        if lowest < 0 or highest >= n_vocab:
            raise KernelArgumentError(f"token ids {lowest}..{highest} for an embedding of {n_vocab} rows")
        self._n_tokens = len(tokens)
        self._first_pos = first_pos
        self._held = None
        if self._n_tokens <= MAX_STEP_TOKENS:
            write_step(self._token_ids(), self._positions(), ids=tokens, first_pos=first_pos, stream=self._stream)
            return
        ids = np.asarray(tokens, dtype=np.int32)
        target = self._arena.address + self._scratch_at + self._regions.tokens
        # ordinary memory: the driver has taken the bytes when the call returns
        checked(driver.cuMemcpyHtoDAsync(target, ids.ctypes.data, ids.nbytes, self._raw_stream), "copying tokens")
        write_sequence(self._positions(), begin=0, count=len(ids), first=first_pos, step=1, stream=self._stream)

    def run_step(self, forward: Callable[[], None]) -> bool:
        if self._phase is not Phase.DECODE:
            forward()
            return True
        if not self._has_fixed_pages:
            return self._run_streamed_step(forward)
        key = (self._n_tokens, self._count_recorded_partitions(self._first_pos + self._n_tokens))
        if self._recordings.replay(key):
            return False
        if self._n_tokens not in self._loaded_steps:
            forward()  # compiles and loads kernels, which cannot be recorded
            self._loaded_steps.add(self._n_tokens)
            return True
        self._is_recording = True
        try:
            self._recordings.record(key, forward)
        finally:
            self._is_recording = False
        self._recordings.replay(key)
        return True

    def end_part(self) -> None:
        if launch_list.kept_in is not None:
            launch_list.kept_in.end_part()

    def replay_part(self) -> None:
        if self._has_fixed_pages:
            return  # replayed whole
        self._kept_steps.replay_part()

    def _run_streamed_step(self, forward: Callable[[], None]) -> bool:
        """Steps within a page find every page where the one before had it: spans, places and tables are the same.

        So the launches of the first such step are kept. The copies are asked for anew by every step. Where copies take
        longer than asking for every launch does, nothing is gained, and a host far ahead makes the copy engine wait
        for an event before each span: the link then carries 2 % less. Such steps are launched one by one.
        """
        page_tokens = self._plan.cache.page_tokens
        end = self._first_pos + self._n_tokens
        page = self._first_pos // page_tokens
        streamed_bytes = self._plan.streamed_bytes_of_step(self._phase, self._first_pos)
        if self._first_pos % page_tokens == 0 or end // page_tokens != page or streamed_bytes > _KEPT_BYTES_MAX:
            forward()
            return True
        key = (self._n_tokens, page, self._count_recorded_partitions(end))
        if self._kept_steps.begin(key, self._first_pos, end):
            return False
        self._is_recording = True
        try:
            self._kept_steps.keep(key, end, forward)
        finally:
            self._is_recording = False
        return True

    def buffer(self, name: str, width: int) -> Rows:
        return Rows(self._offsets[name], self._n_tokens, width)

    def rows(self, name: str, begin: int, end: int, width: int) -> Rows:
        return Rows(self._offsets[name] + 4 * begin * width, end - begin, width)

    def embed(self, weight: str, out: Rows) -> None:
        matrix = self._matrices[weight]
        embed_rows(matrix.data, self._token_ids(), self._matrix(out), geometry=matrix.geometry, stream=self._stream)

    def rms_norm(self, x: Rows, weight: str, out: Rows) -> None:
        arrays = (self._matrix(x), self._vectors[weight], self._matrix(out))
        if self._phase is Phase.PREFILL and 2 * x.n_rows * x.width <= self._regions.tile - self._regions.activations:
            rms_norm(*arrays, half=self._halves(out), eps=self._eps, stream=self._stream)
            self._held = out
            return
        if self._phase is Phase.PREFILL or x.width % QUANT_BLOCK:
            rms_norm(*arrays, eps=self._eps, stream=self._stream)
            return
        norm_quantise(*arrays, *self._quantised(out), eps=self._eps, stream=self._stream)  # a product comes next
        self._held = out

    def norm_heads(self, x: Rows, weight: str, n_head: int) -> None:
        heads = self._matrix(Rows(x.offset, x.n_rows * n_head, x.width // n_head))
        rms_norm(heads, self._vectors[weight], heads, eps=self._eps, stream=self._stream)

    def matmul(self, weights: Sequence[str], x: Rows, outs: Sequence[Rows]) -> None:
        if self._phase is Phase.DECODE:
            self._multiply_few(weights, x, outs, is_added=False)
            return
        self._multiply_tiles([self._matrices[name] for name in weights], x, outs)
        for name, out in zip(weights, outs, strict=True):
            bias = self._vectors.get(name + ".bias")
            if bias is not None:
                add_in_place(self._vector(out), bias, stream=self._stream)

    def gated_matmul(self, weights: tuple[str, str], x: Rows, gate: Rows, up: Rows) -> None:
        gate_matrix, up_matrix = (self._matrices[name] for name in weights)
        geometry = gate_matrix.geometry
        has_bias = any(name + ".bias" in self._vectors for name in weights)
        if self._phase is Phase.PREFILL:
            self.matmul(weights, x, (gate, up))
            half = self._halves(gate)
            arrays = (self._matrix(gate), self._matrix(up), half)
            gated_activation(*arrays, activation=Activation.SILU, stream=self._stream)
            self._held = gate
            return
        if has_bias or geometry != up_matrix.geometry:
            self.matmul(weights, x, (gate, up))
            self.silu_mul(gate, up)
            return
        matrices = (gate_matrix.data, up_matrix.data)
        inputs = self._input_of(geometry.weight_type, x)
        gated_matvec(*matrices, *inputs, self._matrix(gate), geometry=geometry, stream=self._stream)

    def matmul_add(self, weight: str, x: Rows, residual: Rows, product: Rows) -> None:
        if self._phase is Phase.DECODE:
            self._multiply_few((weight,), x, (residual,), is_added=True)
            return
        self._multiply_tiles([self._matrices[weight]], x, (residual,), is_added=True)
        bias = self._vectors.get(weight + ".bias")
        if bias is not None:
            add_in_place(self._vector(residual), bias, stream=self._stream)

    def rope(self, x: Rows, n_head: int) -> None:
        heads = self._heads(x, n_head, x.width // n_head)
        rope(
            heads,
            self._positions(),
            self._rope.frequencies,
            pairing=self._rope.pairing,
            attention_factor=self._rope.magnitude,
            stream=self._stream,
        )

    def scale_by_log_position(self, x: Rows, scale: float, n_step: int) -> None:
        scale_by_log_position(self._matrix(x), self._positions(), scale=scale, n_step=n_step, stream=self._stream)

    def silu_mul(self, gate: Rows, up: Rows) -> None:
        array = self._matrix(gate)
        gated_activation(array, self._matrix(up), array, activation=Activation.SILU, stream=self._stream)

    def add(self, x: Rows, y: Rows) -> None:
        add_in_place(self._vector(x), self._vector(y), stream=self._stream)

    def store_rows(self, layer: int, geometry: PageGeometry, offsets: array[int], k: Rows, v: Rows) -> None:
        self._write_tail_table(layer, geometry, offsets)
        store_rows(
            self._heads(k, geometry.n_head_kv, geometry.head_dim_k),
            self._heads(v, geometry.n_head_kv, geometry.head_dim_v),
            self._page_table(layer),
            self._positions(),
            page=geometry,
            stream=self._stream,
        )

    def rotate_store(self, layer: int, geometry: PageGeometry, offsets: array[int], q: Rows, k: Rows, v: Rows) -> None:
        n_head, n_head_kv = q.width // geometry.head_dim_k, geometry.n_head_kv
        self._write_tail_table(layer, geometry, offsets)
        rotate_store(
            self._heads(q, n_head, geometry.head_dim_k),
            self._heads(k, n_head_kv, geometry.head_dim_k),
            self._heads(v, n_head_kv, geometry.head_dim_v),
            self._page_table(layer),
            self._positions(),
            self._rope.frequencies,
            page=geometry,
            pairing=self._rope.pairing,
            attention_factor=self._rope.magnitude,
            stream=self._stream,
        )

    def begin_attention(self, n_head: int, head_dim_v: int, out: Rows) -> None:
        self._attention = _Attention(n_head=n_head, head_dim_v=head_dim_v, out=out)

    def attend_span(
        self,
        layer: int,
        geometry: PageGeometry,
        offsets: array[int],
        page_begin: int,
        page_end: int,
        q: Rows,
        rule: AttentionRule,
    ) -> None:
        self._write_page_table(layer, offsets, page_begin, page_end)
        running = self._running()
        n_keys = self._first_pos + self._n_tokens
        key_end = min(page_end * geometry.page_tokens, n_keys)
        running.is_done = key_end == n_keys
        attend = self._attend_prefill if self._phase is Phase.PREFILL else self._attend_decode
        attend(self._page_table(layer), geometry, page_begin * geometry.page_tokens, key_end, q, rule.scale, running)

    def finish_attention(self, sinks: None = None) -> None:
        if not self._running().is_done:
            raise StateError("attention ended before the newest keys")
        self._attention = None

    def to_host(self, x: Rows) -> NDArray[np.float32]:
        n_bytes = 4 * x.n_rows * x.width
        source = self._arena.address + x.offset
        checked(
            driver.cuMemcpyDtoHAsync(self._host.address, source, n_bytes, self._raw_stream),
            "copying results to the host",
        )
        self.synchronise()
        return self._host.array[:n_bytes].view(np.float32).reshape(x.n_rows, x.width)

    def synchronise(self) -> None:
        checked(driver.cuStreamSynchronize(self._raw_stream), "a step")

    # -- products

    def _multiply_few(self, weights: Sequence[str], x: Rows, outs: Sequence[Rows], *, is_added: bool) -> None:
        """Products of a few tokens; neighbours of one type are one launch."""
        of_type: dict[Any, list[tuple[str, Rows]]] = {}
        for name, out in zip(weights, outs, strict=True):
            of_type.setdefault(self._matrices[name].geometry.weight_type, []).append((name, out))
        inputs = {weight_type: self._input_of(weight_type, x) for weight_type in of_type}
        for weight_type, together in of_type.items():
            for begin in range(0, len(together), MAX_MATRICES):
                products = [self._product(name, out) for name, out in together[begin : begin + MAX_MATRICES]]
                matvec(products, *inputs[weight_type], is_added=is_added, stream=self._stream)

    def _product(self, name: str, out: Rows) -> Product:
        matrix = self._matrices[name]
        return Product(
            matrix=matrix.data,
            geometry=matrix.geometry,
            bias=self._vectors.get(name + ".bias"),
            out=self._matrix(out),
        )

    def _input_of(self, weight_type: Any, x: Rows) -> tuple[Any, Any]:
        """Vectors and scales that products with this weight type read."""
        if takes_float_activations(weight_type):
            return self._matrix(x), None
        quants, scales = self._quantised(x)
        if self._held != x:
            quantise(self._matrix(x), quants, scales, stream=self._stream)
            self._held = x
        return quants, scales

    def _quantised(self, x: Rows) -> tuple[Any, Any]:
        """Where the quantised form of ``x`` goes: one place for all."""
        quants = self._region(self._regions.activations, (x.n_rows, x.width), np.int8)
        return quants, self._region(self._regions.scales, (x.n_rows, x.width // GROUP_ELEMENTS, 2), np.float32)

    def _halves(self, x: Rows) -> Any:
        """Where the float16 form of ``x`` goes: one place for all."""
        return self._region(self._regions.activations, (x.n_rows, x.width), np.float16)

    def _multiply_tiles(
        self, matrices: Sequence[DeviceMatrix], x: Rows, outs: Sequence[Rows], *, is_added: bool = False
    ) -> None:
        if self._held != x:
            to_half(self._matrix(x), self._halves(x), stream=self._stream)
        base = self._arena.address
        scratch = base + self._scratch_at
        for matrix, out in zip(matrices, outs, strict=True):
            geometry = matrix.geometry
            step = tile_rows(x.width)
            for first_row in range(0, geometry.n_rows, step):
                n_rows = min(step, geometry.n_rows - first_row)
                tile = self._region(self._regions.tile, (n_rows, x.width), np.float16)
                dequantise_rows(matrix.data, tile, geometry=geometry, first_row=first_row, stream=self._stream)
                self._products.multiply(
                    weights=scratch + self._regions.tile,
                    inputs=scratch + self._regions.activations,
                    out=base + out.offset + 4 * first_row,
                    n_rows=n_rows,
                    n_tokens=x.n_rows,
                    n_in=x.width,
                    out_stride=geometry.n_rows,
                    workspace=scratch + self._regions.lt_workspace,
                    stream=int(self._raw_stream),
                    is_added=is_added,
                )
        self._held = None

    # -- attention

    def _attend_prefill(
        self,
        pages: Any,
        geometry: PageGeometry,
        key_begin: int,
        key_end: int,
        q: Rows,
        scale: float,
        running: _Attention,
    ) -> None:
        n_floats = count_state_floats(geometry, self._n_tokens, running.n_head // geometry.n_head_kv)
        attention_prefill(
            self._heads(q, running.n_head, geometry.head_dim_k),
            pages,
            self._region(self._regions.attention_state, (n_floats,), np.float32),
            self._heads(running.out, running.n_head, running.head_dim_v),
            page=geometry,
            first_position=self._first_pos,
            key_begin=key_begin,
            key_end=key_end,
            is_first=key_begin == 0,
            is_last=running.is_done,
            scale=scale,
            stream=self._stream,
        )

    def _attend_decode(
        self,
        pages: Any,
        geometry: PageGeometry,
        _: int,
        key_end: int,
        q: Rows,
        scale: float,
        running: _Attention,
    ) -> None:
        """Reduce the partitions that are complete now; a cut one waits for the pages of the next span."""
        rounds_up = self._is_recording and running.is_done
        n_complete = self._count_recorded_partitions(key_end) if rounds_up else count_partitions(key_end)
        if not running.is_done and partition_bounds(n_complete - 1)[1] > key_end:
            n_complete -= 1
        capacity = PARTIAL_ROWS // self._n_tokens
        while running.n_partitions < n_complete:
            n_held = running.n_partitions - running.group_begin
            if n_held == capacity:
                self._fold(running, is_last=False)
                n_held = 0
            n_new = min(n_complete - running.n_partitions, capacity - n_held)
            partials, max_sum = self._partials(running, n_held, n_new)
            attention_decode(
                self._heads(q, running.n_head, geometry.head_dim_k),
                pages,
                self._positions(),
                partials,
                max_sum,
                page=geometry,
                first_partition=running.n_partitions,
                scale=scale,
                stream=self._stream,
            )
            running.n_partitions += n_new
        if running.is_done:
            self._fold(running, is_last=True)

    def _count_recorded_partitions(self, key_end: int) -> int:
        """Partitions that a recorded step launches: rounded up, since those without keys change no bit."""
        cache = self._plan.cache
        most = count_partitions(cache.n_pages * cache.page_tokens)
        return min(align_up(count_partitions(key_end), _RECORDED_PARTITIONS), most)

    def _partials(self, running: _Attention, begin: int, count: int) -> tuple[Any, Any]:
        rows = self._n_tokens * running.n_head
        shape = (count, self._n_tokens, running.n_head)
        partials_at = self._regions.partials + 4 * begin * rows * running.head_dim_v
        max_sum_at = self._regions.max_sum + 8 * begin * rows
        return (
            self._region(partials_at, (*shape, running.head_dim_v), np.float32),
            self._region(max_sum_at, (*shape, 2), np.float32),
        )

    def _fold(self, running: _Attention, *, is_last: bool) -> None:
        partials, max_sum = self._partials(running, 0, running.n_partitions - running.group_begin)
        n_floats = self._n_tokens * state_floats(running.n_head, running.head_dim_v)
        is_quantised = is_last and running.head_dim_v % QUANT_BLOCK == 0
        quants, scales = self._quantised(running.out) if is_quantised else (None, None)
        merge_partials(
            partials,
            max_sum,
            self._positions(),
            self._region(self._regions.attention_state, (n_floats,), np.float32),
            self._heads(running.out, running.n_head, running.head_dim_v),
            n_head=running.n_head,
            head_dim=running.head_dim_v,
            first_partition=running.group_begin,
            is_first=not running.is_folded,
            is_last=is_last,
            quants=quants,
            scales=scales,
            stream=self._stream,
        )
        if is_quantised:
            self._held = running.out
        running.group_begin = running.n_partitions
        running.is_folded = True

    def _running(self) -> _Attention:
        if self._attention is None:
            raise StateError("attention was not begun")
        return self._attention

    # -- arrays

    def _write_fixed_tables(self, layout: Layout) -> None:
        """Every page of a layout without streaming lies at its own place."""
        for layer in range(layout.cache.n_layers):
            write_sequence(
                self._page_table(layer),
                begin=0,
                count=layout.cache.n_pages,
                first=self._arena.address + layout.resident_slot_offset(layer, 0),
                step=layout.cache.row_bytes,
                stream=self._stream,
            )

    def _write_page_table(self, layer: int, offsets: array[int], page_begin: int, page_end: int) -> None:
        """Device addresses of some pages, written by kernels from numbers: copies would queue behind the stream's."""
        if self._has_fixed_pages:
            return
        places = np.frombuffer(offsets, dtype=np.int64)[page_begin:page_end]
        for begin, count, first, step in _runs(places):
            write_sequence(
                self._page_table(layer),
                begin=page_begin + begin,
                count=count,
                first=self._arena.address + first,
                step=step,
                stream=self._stream,
            )

    def _write_tail_table(self, layer: int, geometry: PageGeometry, offsets: array[int]) -> None:
        """The pages that the step's own rows go to."""
        page_begin = self._first_pos // geometry.page_tokens
        page_end = ceil_div(self._first_pos + self._n_tokens, geometry.page_tokens)
        self._write_page_table(layer, offsets, page_begin, page_end)

    def _page_table(self, layer: int) -> Any:
        n_pages = self._plan.cache.n_pages
        return self._region(self._regions.page_table + 8 * layer * n_pages, (n_pages,), np.int64)

    def _token_ids(self) -> Any:
        return self._region(self._regions.tokens, (self._n_tokens,), np.int32)

    def _positions(self) -> Any:
        return self._region(self._regions.positions, (self._n_tokens,), np.int32)

    def _region(self, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
        return self._arena.view(self._scratch_at + offset, shape, dtype)

    def _matrix(self, x: Rows) -> Any:
        return self._floats(x, (x.n_rows, x.width))

    def _vector(self, x: Rows) -> Any:
        return self._floats(x, (x.n_rows * x.width,))

    def _heads(self, x: Rows, n_head: int, head_dim: int) -> Any:
        return self._floats(x, (x.n_rows, n_head, head_dim))

    def _floats(self, x: Rows, shape: tuple[int, ...]) -> Any:
        """The array for an operation that may change it: the quantised form made before counts no longer."""
        self._held = None
        return self._arena.view(x.offset, shape, np.float32)


def _runs(places: NDArray[np.int64]) -> Iterator[tuple[int, int, int, int]]:
    """(begin, count, first, step) of the stretches of equal distance that ``places`` consists of."""
    begin = 0
    while begin < len(places):
        first = int(places[begin])
        if begin + 1 == len(places):
            yield begin, 1, first, 0
            return
        step = int(places[begin + 1]) - first
        breaks = np.flatnonzero(np.diff(places[begin:]) != step)
        count = int(breaks[0]) + 1 if len(breaks) else len(places) - begin
        yield begin, count, first, step
        begin += count
