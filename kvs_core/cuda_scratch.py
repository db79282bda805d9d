"""The one scratch array of a CUDA step: named regions at fixed offsets. Integers only: the planner imports this file.

    | page tables, tokens, positions | attention  or  matrix products |

Attention and products alternate, so they share bytes; in decode the end of attention leaves the quantised input of the
next product, so there the second follows the first. Sizes follow from the model, the context and the longest step,
never from the arena: the same kernels with the same workspace run for every arena, which is what keeps their bits.

The kernels' own sizes are repeated here because planning must not import CUDA code; a test compares them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvs_core.errors import UnsupportedError
from kvs_core.kv_types import KvType, PageGeometry
from kvs_core.phase import Phase
from kvs_core.units import MIB, align_up, ceil_div

REGION_ALIGNMENT = 256

PARTIAL_ROWS = 512
"""Partials of one token that decode attention leaves before they are folded: bounded, whatever the context."""
_PARTIAL_BYTES = 64 * MIB  # fewer rows where heads are many and wide
LT_WORKSPACE_BYTES = 16 * MIB
"""What cuBLASLt may use: part of how it chooses an algorithm, hence one number for every arena and layer."""
TILE_BYTES = 32 * MIB
"""Weights that are expanded to float16 at a time for a product of many tokens."""
LEAST_TILE_ROWS = 64  # results start at aligned addresses

MIDDLE_BEGIN, LARGE_BEGIN = 16 * 1024, 128 * 1024
"""From which key on partitions of decode attention have 512 and 1024 keys instead of 256."""
_LOW_BITS, _LOW_BIT_HEADS, _LOW_BIT_LARGE_BEGIN = 5, 4, 64 * 1024
"""Caches of fewer bits an element have partitions of 1024 keys earlier: what a partition costs once is a larger part
there (H200, q4_0, turbo4 and turbo3 at 131072 keys: 3 to 4 us of a layer, fold included). Fewer K/V heads would leave
multiprocessors without work."""
_TURBO_HEADS, _TURBO_LARGE_BEGIN = 8, 32 * 1024
"""Turbo caches of many K/V heads still earlier (H200, 8 heads of 128, turbo4, fold included: 51.3 instead of 53.1 us at
131072 keys, 24.6 instead of 25.3 at 49152)."""

_HEAD_DIMS = (64, 80, 96, 128, 192, 256, 512)
_WIDE_STEP, _LARGEST_HEAD, _LARGEST_LATENT, _LARGEST_LATENT_ROW = 64, 256, 512, 576
_PAGE_TOKENS_STEP = 64
_LARGEST_RATIO, _LARGEST_LATENT_RATIO = 16, 128
_SLAB_DIMS, _SLAB_FLOATS = 32, 34  # the fold keeps maximum, sum and 32 elements a block
_PREFILL_ROWS = 128
_WGMMA_TYPES = set(KvType) - {KvType.F32}
_WGMMA_HEAD_DIMS = {64, 128, 256}
WGMMA_CAPABILITY = (9, 0)
MMA, WGMMA = "mma", "wgmma (sm_90)"
_QUANT_GROUP = 16


def large_begin_of(geometry: PageGeometry) -> int:
    """From which key on the partitions of a cache have 1024 keys."""
    regions = (geometry.k_region, geometry.v_region)
    is_low_bit = all(8 * region.n_bytes < _LOW_BITS * region.page_tokens * region.head_dim for region in regions)
    if not is_low_bit or geometry.n_head_kv < _LOW_BIT_HEADS or is_wide(geometry):
        return LARGE_BEGIN
    are_turbo = all(region.kv_type.is_turbo for region in regions)
    return _TURBO_LARGE_BEGIN if are_turbo and geometry.n_head_kv >= _TURBO_HEADS else _LOW_BIT_LARGE_BEGIN


def partition_keys(n_ctx: int, large_begin: int) -> int:
    """Keys of the largest partition of decode attention within a context."""
    return 256 if n_ctx <= MIDDLE_BEGIN else 512 if n_ctx <= large_begin else 1024


def span_step_pages(n_ctx: int, page_tokens: int, geometries: Iterable[PageGeometry]) -> int:
    """Pages that streamed spans are cut at multiples of: a partition is reduced by one launch, so no cut splits one."""
    large_begin = min(map(large_begin_of, geometries), default=LARGE_BEGIN)
    return max(1, partition_keys(n_ctx, large_begin) // page_tokens)


def partial_rows(n_head: int, head_dim_v: int) -> int:
    """Partials of one token that are held before they are folded, in layers of these heads; no bit depends on it."""
    return min(PARTIAL_ROWS, _PARTIAL_BYTES // (4 * n_head * head_dim_v))


def is_wide(geometry: PageGeometry) -> bool:
    """Whether pages need the attention kernels of wide heads: heads beyond 256, and latent caches of any size."""
    return geometry.v_in_k or max(geometry.head_dim_k, geometry.head_dim_v) > _LARGEST_HEAD


def prefill_kernel_name(geometry: PageGeometry, compute_capability: tuple[int, int] | None) -> str:
    """Which prefill attention a device runs: by its capability (None: not known), cache types and head sizes alone.

    The two kernels add in different orders, so bits differ between devices; nothing here depends on the arena.
    """
    types_fit = {geometry.type_k, geometry.type_v} <= _WGMMA_TYPES
    heads_fit = {geometry.head_dim_k, geometry.head_dim_v} <= _WGMMA_HEAD_DIMS and not geometry.v_in_k
    return WGMMA if compute_capability == WGMMA_CAPABILITY and types_fit and heads_fit else MMA


def prefill_state_floats(geometry: PageGeometry, n_head: int, n_tokens: int) -> int:
    """float32 numbers that prefill attention carries from span to span: sums, and eight numbers a row for the softmax.

    All kernels need the same for 128 rows, whether these are one block, two or four.
    """
    n_blocks = ceil_div(n_tokens * (n_head // geometry.n_head_kv), _PREFILL_ROWS)
    return geometry.n_head_kv * n_blocks * _PREFILL_ROWS * (geometry.head_dim_v + 8)


def fold_state_floats(geometry: PageGeometry, n_head: int, n_tokens: int) -> int:
    """float32 numbers that the fold of decode partials carries from group to group."""
    return n_tokens * n_head * ceil_div(geometry.head_dim_v, _SLAB_DIMS) * _SLAB_FLOATS


def tile_rows(n_in: int) -> int:
    """Rows of a weight tile: a power of two, so that blocks of the product fill a device evenly."""
    return 1 << max(LEAST_TILE_ROWS, TILE_BYTES // (2 * n_in)).bit_length() - 1


def find_page_problem(page_tokens: int) -> str | None:
    """Why pages of this many tokens have no CUDA kernel; None when they have."""
    return f"CUDA attention needs a multiple of {_PAGE_TOKENS_STEP}" if page_tokens % _PAGE_TOKENS_STEP else None


def find_head_problem(
    head_dim_k: int,
    head_dim_v: int,
    *,
    n_head: int,
    n_head_kv: int,
    v_in_k: bool = False,
    in_window: bool = False,
) -> str | None:
    """What about a layer's heads has no CUDA kernel; None when everything has.

    ``v_in_k``: a latent cache; ``in_window``: a layer with a window.
    """
    if in_window and max(head_dim_k, head_dim_v) > _LARGEST_HEAD:
        return f"a window and heads of {max(head_dim_k, head_dim_v)}: CUDA attention has windows up to {_LARGEST_HEAD}"
    if v_in_k:
        return _find_latent_problem(head_dim_k, head_dim_v, n_head=n_head, n_head_kv=n_head_kv)
    for head_dim in (head_dim_k, head_dim_v):
        if head_dim not in _HEAD_DIMS:
            return f"head size {head_dim}: CUDA attention has {', '.join(map(str, _HEAD_DIMS))}"
    ratio, rest = divmod(n_head, n_head_kv)
    if rest or ratio > _LARGEST_RATIO:
        return f"{n_head} heads over {n_head_kv} K/V heads: CUDA attention needs a whole ratio of 1 to {_LARGEST_RATIO}"
    return None


def _find_latent_problem(head_dim_k: int, head_dim_v: int, *, n_head: int, n_head_kv: int) -> str | None:
    if head_dim_k % _WIDE_STEP or head_dim_v % _WIDE_STEP:
        return f"latent rows of {head_dim_k} with {head_dim_v} values: CUDA attention needs multiples of {_WIDE_STEP}"
    if head_dim_k > _LARGEST_LATENT_ROW or head_dim_v > _LARGEST_LATENT:
        return (
            f"latent rows of {head_dim_k} with {head_dim_v} values: CUDA attention has up to {_LARGEST_LATENT_ROW} "
            f"with {_LARGEST_LATENT}"
        )
    if n_head_kv != 1 or n_head > _LARGEST_LATENT_RATIO:
        return f"{n_head} heads over a latent cache: CUDA attention has up to {_LARGEST_LATENT_RATIO}"
    return None


def check_geometry(geometry: PageGeometry, n_head: int, *, in_window: bool = False) -> None:
    """Raise UnsupportedError for pages and heads without a CUDA kernel."""
    problem = find_page_problem(geometry.page_tokens)
    if problem is not None:
        raise UnsupportedError(
            f"pages of {geometry.page_tokens} tokens: {problem}",
            hint=f"use --kv-page-tokens {_PAGE_TOKENS_STEP} or more, or --device cpu",
        )
    problem = find_head_problem(
        geometry.head_dim_k,
        geometry.head_dim_v,
        n_head=n_head,
        n_head_kv=geometry.n_head_kv,
        v_in_k=geometry.v_in_k,
        in_window=in_window,
    )
    if problem is not None:
        raise UnsupportedError(problem, hint="use --device cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaScratch:
    """Byte offsets of every region from the start of the scratch array; in prefill those of the two users overlap."""

    page_table: int  # int64 [n_layers, n_pages]: device addresses of the pages of each KV layer
    tokens: int  # int32 [n_tokens]
    positions: int  # int32 [n_tokens]
    attention_state: int  # float32: prefill state, or state of the fold
    partials: int  # float32 [partial_rows * n_head * head_dim_v], decode only
    max_sum: int  # float32 [partial_rows * n_head * 2], decode only
    activations: int  # prefill: float16 [rows, n_in]; decode: int8 [rows, n_in]
    scales: int  # float32 [rows, n_in / 16, 2], decode only
    tile: int  # float16, prefill only
    lt_workspace: int  # prefill only
    n_bytes: int


class _Regions:
    """Places one region after another."""

    def __init__(self, begin: int) -> None:
        self.end = begin

    def add(self, n_bytes: int) -> int:
        offset = self.end
        self.end = align_up(offset + n_bytes, REGION_ALIGNMENT)
        return offset


def plan_cuda_scratch(
    phase: Phase,
    *,
    matmul_inputs: Sequence[int],
    expert_inputs: int,
    largest_matrix_rows: int,
    attention: Sequence[tuple[PageGeometry, int]],
    n_tokens: int,
    n_outputs: int,
    n_pages: int,
) -> CudaScratch:
    """Regions for steps of up to ``n_tokens`` tokens.

    matmul_inputs   row lengths of the weights
    expert_inputs   numbers that a token's experts hand to their last products, all together; 0 without experts
    attention       (page geometry, query heads) of each KV layer
    n_outputs       rows of logits made at a time
    """
    is_prefill = phase is Phase.PREFILL
    common = _Regions(0)
    page_table = common.add(8 * n_pages * len(attention))
    tokens, positions = common.add(4 * n_tokens), common.add(4 * n_tokens)

    attending = _Regions(common.end)
    count_state = prefill_state_floats if is_prefill else fold_state_floats
    floats = max((count_state(geometry, n_head, n_tokens) for geometry, n_head in attention), default=0)
    rows = [] if is_prefill else [(partial_rows(n, g.head_dim_v) * n, g.head_dim_v) for g, n in attention]
    attention_state = attending.add(4 * floats)
    partials = attending.add(max((4 * n_rows * head_dim_v for n_rows, head_dim_v in rows), default=0))
    max_sum = attending.add(max((8 * n_rows for n_rows, _ in rows), default=0))

    multiplying = _Regions(common.end if is_prefill else attending.end)
    n_rows, n_in = max(n_tokens, n_outputs), max(matmul_inputs)
    n_quants = max(n_rows * n_in, n_tokens * expert_inputs)
    activations = multiplying.add(2 * n_rows * n_in if is_prefill else n_quants)
    scales = multiplying.add(0 if is_prefill else ceil_div(n_quants, _QUANT_GROUP) * 8)
    tile_bytes = max(min(tile_rows(size), largest_matrix_rows) * size * 2 for size in matmul_inputs)
    tile = multiplying.add(tile_bytes if is_prefill else 0)
    lt_workspace = multiplying.add(LT_WORKSPACE_BYTES if is_prefill else 0)
    return CudaScratch(
        page_table=page_table,
        tokens=tokens,
        positions=positions,
        attention_state=attention_state,
        partials=partials,
        max_sum=max_sum,
        activations=activations,
        scales=scales,
        tile=tile,
        lt_workspace=lt_workspace,
        n_bytes=max(attending.end, multiplying.end),
    )
