"""The one scratch array of a CPU step, shared by all kernels in turn. Integers only: the planner imports this file."""

from __future__ import annotations

from collections.abc import Iterable

from kvs_core.cpu.attention_scratch import decode_scratch_bytes, prefill_scratch_bytes
from kvs_core.cpu.scratch import matmul_scratch_bytes
from kvs_core.kv_types import PageGeometry
from kvs_core.phase import Phase


def step_scratch_bytes(
    phase: Phase,
    *,
    matmul_inputs: Iterable[int],
    attention: Iterable[tuple[PageGeometry, int]],
    n_tokens: int,
    n_threads: int,
) -> int:
    """Bytes that the largest kernel of a step needs.

    matmul_inputs   row lengths of the weights
    attention       (page geometry, query heads) of each KV layer
    """
    size = prefill_scratch_bytes if phase is Phase.PREFILL else decode_scratch_bytes
    needs = [matmul_scratch_bytes(n_in, n_threads) for n_in in set(matmul_inputs)]
    needs += [
        size(geometry, n_head=n_head, n_tokens=n_tokens, n_threads=n_threads) for geometry, n_head in set(attention)
    ]
    return max(needs, default=0)
