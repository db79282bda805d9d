"""Arrays of one step on a CUDA device: views of the arena's workspace, and what the operation before left for the next.

The operations on them are in ``operations``, ``product_operations`` and ``attention_operations``. No kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuda_kernels.device import DeviceMemory, raw_stream
from cuda_kernels.head_norms import Heads
from kvs_core.cuda_scratch import CudaScratch
from kvs_core.phase import Phase
from kvs_core.plan import RunPlan, cuda_scratch_of


@dataclass(frozen=True, slots=True)
class Rows:
    """float32 [n_rows, width] at a byte of the arena: what model files pass from one operation to the next."""

    offset: int
    n_rows: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingNorm:
    """A norm that was asked for and not begun: a product of its result may do it on the way."""

    x: Rows
    weight: str
    out: Rows


class StepArrays(ABC):
    """One stream, one arena and where the phase's workspace lies in it; operations of every kind share these."""

    def __init__(self, plan: RunPlan, arena: DeviceMemory, stream: Any) -> None:
        self._plan = plan
        self._arena = arena
        self._stream = stream
        self._raw_stream = raw_stream(stream)
        self._phase = Phase.PREFILL
        self._scratch_at = 0
        self._regions: CudaScratch = cuda_scratch_of(plan, Phase.PREFILL)
        self._eps = plan.shape.rms_eps
        self._n_tokens = 0
        self._first_pos = 0
        self._is_recording = False
        self._held: Rows | None = None  # what the operation before left as a product reads it: quantised, or float16
        self._is_shrunk = False  # the float16 form of ``_held`` is times HALF_SHRINK
        self._waiting: WaitingNorm | None = None
        self._waiting_heads: list[Heads] = []

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
        self._finish_waiting()
        self._held = None
        return self._arena.view(x.offset, shape, np.float32)

    def _finish_waiting(self) -> None:
        """Begin the norms that wait, before anything else reads or writes arrays."""
        heads, self._waiting_heads = self._waiting_heads, []
        if heads:
            self._norm_waiting_heads(heads)
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._normalise(waiting)

    @abstractmethod
    def _normalise(self, norm: WaitingNorm) -> None:
        """Do a norm by itself."""

    @abstractmethod
    def _norm_waiting_heads(self, heads: Sequence[Heads]) -> None:
        """Do norms of heads."""
