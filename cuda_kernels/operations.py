"""The operation set on a CUDA device: arrays of the arena's workspace handed to kernels on one stream. No kernels.

Small steps on rows are in ``row_operations``, products in ``product_operations``, attention in
``attention_operations``, recurrent layers in ``recurrent_operations``; here are steps and all the rest.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cuda.bindings import driver
from numpy.typing import NDArray

from cuda_kernels import launch_list
from cuda_kernels.attention_operations import AttentionOperations
from cuda_kernels.dequant import embed_rows
from cuda_kernels.device import DeviceMemory, PinnedBuffer, checked
from cuda_kernels.device_weights import DeviceMatrix
from cuda_kernels.elementwise import (
    MAX_STEP_TOKENS,
    resize_heads,
    scale_by_log_position,
    write_sequence,
    write_step,
)
from cuda_kernels.head_operations import HeadOperations
from cuda_kernels.launch import call_launch
from cuda_kernels.launch_list import KeptSteps
from cuda_kernels.norm import rms_norm
from cuda_kernels.products import LtProducts
from cuda_kernels.quantise import QUANT_BLOCK
from cuda_kernels.recording import Recordings
from cuda_kernels.recurrent_operations import RecurrentOperations
from cuda_kernels.rope import RopePairing, rope
from cuda_kernels.rotate_heads import rotate_heads
from cuda_kernels.rotate_store import rotate_store
from cuda_kernels.step_arrays import Rows, WaitingNorm
from cuda_kernels.store import store_rows
from kvs_core.errors import KernelArgumentError
from kvs_core.kv_rotation import HeadRotations, Rotation
from kvs_core.kv_types import PageGeometry
from kvs_core.phase import Phase
from kvs_core.plan import OUTPUT_TILE_ROWS, RunPlan, cuda_scratch_of
from kvs_core.policy import Layout
from kvs_core.workspace import Workspace

_KEPT_BYTES_MAX = 5_000_000_000
"""Steps that stream more are launched one by one. On an H200, 65536 tokens of the 8B shape: steps of 4.4 GB took 83 ms
with kept launches and 89 without, steps of 6.7 GB 123.6 and 122.4, of 7.7 GB 143.9 and 142.1 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRope:
    """``frequencies`` float64 [n_pairs] on the device, radians a position."""

    frequencies: Any
    magnitude: float
    pairing: RopePairing


class CudaOperations(AttentionOperations, RecurrentOperations, HeadOperations):
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
        taps: Mapping[str, Any],
        rope: DeviceRope,
        rope_in_window: DeviceRope,
        products: LtProducts,
        stream: Any,
        overlaps: bool,
    ) -> None:
        super().__init__(plan, arena, stream)
        self._matrices = matrices
        self._vectors = vectors
        self._taps = taps
        self._rope = rope
        self._rope_in_window = rope_in_window
        self._products = products
        self._offsets: dict[str, int] = {}
        self._attention = None
        self._has_fixed_pages = not plan.streams
        self._recordings = Recordings(self._raw_stream, overlaps=overlaps)
        self._loaded_steps: set[int] = set()
        self._kept_steps = KeptSteps(call_launch)
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
        self._write_window_tables()
        if self._has_fixed_pages:
            self._write_fixed_tables(layout)

    def begin_step(self, tokens: Sequence[int], first_pos: int) -> None:
        n_vocab, lowest, highest = self._plan.shape.n_vocab, min(tokens), max(tokens)
        if lowest < 0 or highest >= n_vocab:
            raise KernelArgumentError(f"token ids {lowest}..{highest} for an embedding of {n_vocab} rows")
        self._n_tokens = len(tokens)
        self._first_pos = first_pos
        self._held, self._waiting, self._waiting_heads = None, None, []
        if self._n_tokens <= MAX_STEP_TOKENS:
            write_step(self._token_ids(), self._positions(), ids=tokens, first_pos=first_pos, stream=self._stream)
            return
        ids = np.asarray(tokens, dtype=np.int32)
        target = self._arena.address + self._scratch_at + self._regions.tokens
        # ordinary memory: the driver has taken the bytes when the call returns
        checked(driver.cuMemcpyHtoDAsync(target, ids.ctypes.data, ids.nbytes, self._raw_stream), "copying tokens")
        write_sequence(self._positions(), begin=0, count=len(ids), first=first_pos, step=1, stream=self._stream)

    @property
    def replays_steps(self) -> bool:
        return True

    def run_step(self, forward: Callable[[], None]) -> bool:
        def step() -> None:
            forward()
            self._finish_waiting()

        return self._run_step(step)

    def _run_step(self, forward: Callable[[], None]) -> bool:
        if self._phase is not Phase.DECODE:
            forward()
            return True
        if not self._has_fixed_pages:
            return self._run_streamed_step(forward)
        key = (self._n_tokens, self._recorded_keys(self._first_pos + self._n_tokens))
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
        key = (self._n_tokens, page, self._recorded_keys(end))
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

    def rms_norm(self, x: Rows, weight: str, out: Rows, *, factor: float = 1.0) -> None:
        self._finish_waiting()
        may_wait = factor == 1.0 and x != out  # in place blocks of the product would read what one has written
        if self._phase is Phase.DECODE and x.width % QUANT_BLOCK == 0 and may_wait:
            self._waiting = WaitingNorm(x=x, weight=weight, out=out)  # a product comes next
            return
        arrays = (self._matrix(x), self._vectors[weight], self._matrix(out))
        if self._phase is Phase.PREFILL and 2 * x.n_rows * x.width <= self._regions.tile - self._regions.activations:
            rms_norm(*arrays, half=self._halves(out), factor=factor, eps=self._eps, stream=self._stream)
            self._held, self._is_shrunk = out, False
            return
        rms_norm(*arrays, factor=factor, eps=self._eps, stream=self._stream)

    def rope(self, x: Rows, n_head: int, *, in_window: bool = False, begin: int = 0) -> None:
        table = self._rope_in_window if in_window else self._rope
        heads = self._heads(x, n_head, x.width // n_head)
        rope(
            heads,
            self._positions(),
            table.frequencies,
            pairing=table.pairing,
            attention_factor=table.magnitude,
            begin=begin,
            stream=self._stream,
        )

    def scale_by_log_position(self, x: Rows, scale: float, n_step: int) -> None:
        scale_by_log_position(self._matrix(x), self._positions(), scale=scale, n_step=n_step, stream=self._stream)

    def resize_heads(self, x: Rows, n_head: int, out: Rows) -> None:
        n_rows = x.n_rows * n_head
        before, after = (self._matrix(Rows(rows.offset, n_rows, rows.width // n_head)) for rows in (x, out))
        resize_heads(before, after, stream=self._stream)

    def rotate_heads(self, x: Rows, rotation: Rotation, *, inverse: bool = False) -> None:
        if not (inverse and self._phase is Phase.DECODE and self._is_input(x)):
            rotate_heads(self._matrix(x), rotation, inverse=inverse, stream=self._stream)
            return
        quants, scales = self._quantised(x)  # the end of attention: a product comes next
        arrays = {"quants": quants, "scales": scales}
        rotate_heads(self._matrix(x), rotation, inverse=True, **arrays, stream=self._stream)
        self._held = x

    def store_rows(self, layer: int, geometry: PageGeometry, offsets: array[int], k: Rows, v: Rows | None) -> None:
        self._write_tail_table(layer, geometry, offsets)
        store_rows(
            self._heads(k, geometry.n_head_kv, geometry.head_dim_k),
            None if v is None else self._heads(v, geometry.n_head_kv, geometry.head_dim_v),
            self._page_table(layer),
            self._positions(),
            page=geometry,
            stream=self._stream,
        )

    def rotate_store(
        self,
        layer: int,
        geometry: PageGeometry,
        offsets: array[int],
        q: Rows,
        k: Rows,
        v: Rows,
        *,
        in_window: bool = False,
        rotations: HeadRotations | None = None,
    ) -> None:
        table = self._rope_in_window if in_window else self._rope
        n_head, n_head_kv = q.width // geometry.head_dim_k, geometry.n_head_kv
        self._write_tail_table(layer, geometry, offsets)
        rotate_store(
            self._heads(q, n_head, geometry.head_dim_k),
            self._heads(k, n_head_kv, geometry.head_dim_k),
            self._heads(v, n_head_kv, geometry.head_dim_v),
            self._page_table(layer),
            self._positions(),
            table.frequencies,
            page=geometry,
            pairing=table.pairing,
            attention_factor=table.magnitude,
            rotations=rotations,
            stream=self._stream,
        )

    def to_host(self, x: Rows) -> NDArray[np.float32]:
        self._finish_waiting()
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
