"""The operation set that model files are written in and every backend implements."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvs_core.kv_rotation import Rotation
from kvs_core.kv_types import PageGeometry
from kvs_core.policy import Layout
from kvs_core.workspace import Workspace

DeviceArray = Any
"""A float32 array of the backend's own kind, tokens first; model files only pass it on."""


class Operations(Protocol):
    """One step at a time: ``begin_step``, then what the model's forward pass calls, then ``to_host``.

    Results always go to arrays of the workspace, so nothing is allocated. Weights are named without ``.weight``; a
    ``.bias`` of the same name is added by ``matmul``.
    """

    def bind(self, layout: Layout, workspace: Workspace) -> None:
        """Make the arrays of a phase's workspace the ones that ``buffer`` returns."""
        ...

    def begin_step(self, tokens: Sequence[int], first_pos: int) -> None:
        """A step of ``len(tokens)`` tokens begins whose first position is ``first_pos``."""
        ...

    def run_step(self, forward: Callable[[], None]) -> bool:
        """Call ``forward`` for the step that began; False if an earlier one of its kind is to be replayed instead."""
        ...

    def end_part(self) -> None:
        """Within ``forward``: the caller goes on to ask the cache for something before the next operation."""
        ...

    def replay_part(self) -> None:
        """What ``forward`` asked for between two calls of ``end_part`` is asked for again, in a replayed step.

        The caller replays every part, in order, and asks the cache in between for what it asked then.
        """
        ...

    def buffer(self, name: str, width: int) -> DeviceArray:
        """A workspace array as float32 [n_tokens, width]; ``width`` may be below what the plan set aside."""
        ...

    def rows(self, name: str, begin: int, end: int, width: int) -> DeviceArray:
        """Rows ``[begin, end)`` of a workspace array of that width."""
        ...

    def embed(self, weight: str, out: DeviceArray) -> None:
        """Embedding rows of the step's tokens."""
        ...

    def rms_norm(self, x: DeviceArray, weight: str, out: DeviceArray) -> None:
        """``out = x / sqrt(mean(x^2) + eps) * weight`` for each row."""
        ...

    def matmul(self, weights: Sequence[str], x: DeviceArray, outs: Sequence[DeviceArray]) -> None:
        """``out = x @ weight^T + bias`` for each of several weights that share the input."""
        ...

    def gated_matmul(self, weights: tuple[str, str], x: DeviceArray, gate: DeviceArray, up: DeviceArray) -> None:
        """``matmul`` of both weights, then ``silu_mul``.

        ``gate`` is for the ``matmul_add`` that follows and nothing else; what ``up`` holds is the backend's business.
        """
        ...

    def matmul_add(self, weight: str, x: DeviceArray, residual: DeviceArray, product: DeviceArray) -> None:
        """``residual = residual + (x @ weight^T + bias)``; ``product`` may be used, as wide as ``residual``."""
        ...

    def rope(self, x: DeviceArray, n_head: int) -> None:
        """Rotate ``n_head`` heads of each row by the row's position, in place."""
        ...

    def rotate_heads(self, x: DeviceArray, rotation: Rotation, *, inverse: bool = False) -> None:
        """Multiply each ``rotation.size`` elements of each row by the rotation's matrix or its inverse, in place."""
        ...

    def silu_mul(self, gate: DeviceArray, up: DeviceArray) -> None:
        """``gate = silu(gate) * up`` in place."""
        ...

    def add(self, x: DeviceArray, y: DeviceArray) -> None:
        """``x = x + y`` in place."""
        ...

    def store_rows(
        self, layer: int, geometry: PageGeometry, offsets: array[int], k: DeviceArray, v: DeviceArray
    ) -> None:
        """Write the step's K and V rows of one KV layer into its pages, quantised to the page's types."""
        ...

    def rotate_store(
        self,
        layer: int,
        geometry: PageGeometry,
        offsets: array[int],
        q: DeviceArray,
        k: DeviceArray,
        v: DeviceArray,
    ) -> None:
        """``rope`` of ``q`` and ``k``, then ``store_rows``; what ``k`` holds afterwards is the backend's business."""
        ...

    def begin_attention(self, n_head: int, head_dim_v: int, out: DeviceArray) -> None:
        """Reset the running attention of the step's tokens; its result will go to ``out``."""
        ...

    def attend_span(
        self,
        layer: int,
        geometry: PageGeometry,
        offsets: array[int],
        page_begin: int,
        page_end: int,
        q: DeviceArray,
        scale: float,
    ) -> None:
        """Fold pages ``[page_begin, page_end)`` into the running attention; causal by position.

        Ranges follow each other from page 0 to the page of the step's last token, which ends the attention.
        """
        ...

    def finish_attention(self) -> None:
        """``out`` of ``begin_attention`` = sum / weight; a token that saw no key gets zeros."""
        ...

    def to_host(self, x: DeviceArray) -> NDArray[np.float32]:
        """The values of ``x`` as a host array, valid until the next operation."""
        ...

    def close(self) -> None:
        """Free what belongs to this session alone; its arena is closed afterwards."""
        ...

    def synchronise(self) -> None:
        """Return once everything asked for has been computed, so that the caller may read a clock."""
        ...
