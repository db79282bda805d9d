"""How many tokens a GPU runs at once when ``-ub`` is not given. Pure: model, cache types, context, device; no arena.

A micro-batch brings every streamed page into the arena once and attends to it with all its tokens, so the copies hide
behind attention when

    bytes of a position / link rate  <=  2 * tokens * heads * (K and V elements of a head) / attention rate

summed over the layers with pages. Where a token takes a few of many experts, the products of experts want more: tiles
of 128 pairs of a token and an expert, so that weights are decoded seldom. The choice is the smallest power of two for
which both hold, as far as the prefill workspace, which grows with it, stays small. It must not know the arena: then
logits would depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kvs_core.config import DEFAULT_UBATCH_TOKENS
from kvs_core.cuda_scratch import WGMMA, prefill_kernel_name
from kvs_core.device_budget import DeviceBudget
from kvs_core.expert_shape import ExpertShape
from kvs_core.kv_types import PageGeometry
from kvs_core.units import MIB, ceil_div

LARGEST_UBATCH_TOKENS = 4096
"""Enough for f16 and four query heads to a K/V head on the fastest card below; not measured beyond."""
LARGEST_WORKSPACE_BYTES = 1024 * MIB
"""A streaming arena holds the workspace, so this keeps arenas of little more than 1 GiB possible on any card."""
DEVICE_SHARE = 32
"""The workspace takes at most one part in this many of the device's memory."""

# Operations a second of prefill attention with mma, and bytes a second that the host link brings, by the least compute
# capability. (9, 0) is measured: one H200, head size 128, f16 (scripts/measure_cuda.py; 8B shape, 131072 tokens, 2 GiB:
# -ub 2048 took 1.09 to 1.12 times the time without an arena, -ub 4096 1.04 to 1.06). The others are not: 60 % of what
# the data sheet says of float16 with float32 sums (A100 312, RTX 3090 71, RTX 4090 165, RTX 5090 210 TFLOP/s), and
# PCIe 4 at half the rate of PCIe 5. Measure again with scripts/measure_cuda_session.py --ub on such a card.
_RATES = (
    ((8, 0), 187e12, 27e9),
    ((8, 6), 43e12, 27e9),
    ((8, 9), 99e12, 27e9),
    ((9, 0), 378e12, 55e9),
    ((12, 0), 126e12, 55e9),
)
_WGMMA_RATE = 655e12

EXPERT_TILE_PAIRS = 128
"""Pairs of the larger tile of the kernels of experts; repeated here because planning must not import CUDA."""


def choose_ubatch_tokens(
    attention: Sequence[tuple[PageGeometry, int]],
    experts: Sequence[ExpertShape],
    budget: DeviceBudget,
    *,
    workspace_bytes: Callable[[int], int],
) -> int:
    """A power of two from ``DEFAULT_UBATCH_TOKENS`` to ``LARGEST_UBATCH_TOKENS``; the caller cuts it to the context.

    attention         (page geometry, query heads) of each layer with pages
    experts           of each layer that has some
    workspace_bytes   the prefill workspace of so many tokens, whatever the context
    """
    room = min(budget.total_bytes // DEVICE_SHARE, LARGEST_WORKSPACE_BYTES)
    wanted = tokens_that_hide_copies(attention, budget.compute_capability)
    if wanted:
        wanted = max(wanted, *map(tokens_that_fill_tiles, experts), 0)
    wanted = min(wanted, LARGEST_UBATCH_TOKENS)
    chosen = DEFAULT_UBATCH_TOKENS
    while chosen < wanted and workspace_bytes(2 * chosen) <= room:
        chosen *= 2
    return chosen


def tokens_that_hide_copies(
    attention: Sequence[tuple[PageGeometry, int]], compute_capability: tuple[int, int] | None
) -> int:
    """Tokens whose attention to a page takes as long as its copy; 0 for devices of which no rate is known."""
    known = [rates for rates in _RATES if compute_capability is not None and rates[0] <= compute_capability]
    if not known:
        return 0
    _, mma_rate, link_rate = known[-1]
    copy_seconds = sum(_position_bytes(geometry) for geometry, _ in attention) / link_rate
    token_seconds = 0.0
    for geometry, n_head in attention:
        uses_wgmma = prefill_kernel_name(geometry, compute_capability) == WGMMA
        n_operations = 2 * n_head * (geometry.head_dim_k + geometry.head_dim_v)
        token_seconds += n_operations / (_WGMMA_RATE if uses_wgmma else mma_rate)
    return math.ceil(copy_seconds / token_seconds) if attention else 0


def tokens_that_fill_tiles(experts: ExpertShape) -> int:
    """Tokens of which an expert gets as many as its largest tile holds, when all experts are liked alike."""
    return ceil_div(EXPERT_TILE_PAIRS * experts.n_expert, experts.n_used)


def _position_bytes(geometry: PageGeometry) -> float:
    return geometry.payload_bytes / geometry.page_tokens
