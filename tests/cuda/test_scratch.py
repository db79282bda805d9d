"""The planner repeats sizes of the CUDA kernels, because it must not import them: they have to agree."""

from __future__ import annotations

import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")

from cuda_kernels import attention_prefill_wide, expert_matvec, expert_prefill, routing
from cuda_kernels.attention_common import HEAD_DIMS
from cuda_kernels.attention_prefill import PrefillShape
from cuda_kernels.attention_prefill_wgmma import BLOCK_ROWS, WgmmaShape
from cuda_kernels.merge import state_floats
from cuda_kernels.partitions import partition_bounds
from cuda_kernels.wide_tiles import N_THREADS, WideFragments
from kvs_core import cuda_scratch, cuda_support, ubatch_choice
from kvs_core.cuda_scratch import LARGE_BEGIN, MIDDLE_BEGIN, large_begin_of
from kvs_core.errors import UnsupportedError
from kvs_core.kv_types import KvType, PageGeometry
from kvs_core.phase import Phase
from kvs_core.units import ceil_div


def geometry_of(
    head_dim: int, kv_type: KvType = KvType.F16, n_head_kv: int = 2, page_tokens: int = 256
) -> PageGeometry:
    return PageGeometry(
        page_tokens=page_tokens,
        n_head_kv=n_head_kv,
        head_dim_k=head_dim,
        head_dim_v=head_dim,
        type_k=kv_type,
        type_v=kv_type,
    )


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("n_tokens", [1, 7, 64, 1000])
@pytest.mark.parametrize("ratio", [1, 3, 16])
def test_state_sizes(head_dim: int, n_tokens: int, ratio: int) -> None:
    page = geometry_of(head_dim)
    if cuda_scratch.is_wide(page):
        fragments, block_rows = (
            WideFragments(page, attention_prefill_wide.N_ROW_TILES),
            attention_prefill_wide.BLOCK_ROWS,
        )
        block_floats = N_THREADS * fragments.n_sums + 32 * (fragments.n_state - fragments.n_sums)
    else:
        portable = PrefillShape(page=page)
        block_rows, block_floats = portable.block_rows, portable.state_floats
    needed = 2 * ceil_div(n_tokens * ratio, block_rows) * block_floats
    if head_dim in (64, 128, 192, 256):
        needed = max(needed, 2 * ceil_div(n_tokens * ratio, BLOCK_ROWS) * WgmmaShape(page=page).state_floats)
    n_floats = cuda_scratch.prefill_state_floats(page, 2 * ratio, n_tokens)
    assert needed <= n_floats <= needed + 2 * 128 // block_rows * block_floats
    assert cuda_scratch.fold_state_floats(page, 2 * ratio, n_tokens) == n_tokens * state_floats(2 * ratio, head_dim)


@pytest.mark.parametrize(
    ("capability", "kv_type", "head_dim", "name"),
    [
        ((9, 0), KvType.F16, 128, cuda_scratch.WGMMA),
        ((9, 0), KvType.Q8_0, 256, cuda_scratch.WGMMA),
        ((9, 0), KvType.TURBO3, 64, cuda_scratch.WGMMA),
        ((9, 0), KvType.BF16, 256, cuda_scratch.WGMMA),
        ((9, 0), KvType.F32, 128, cuda_scratch.MMA),
        ((9, 0), KvType.TURBO4, 192, cuda_scratch.MMA),
        ((9, 0), KvType.F16, 96, cuda_scratch.MMA),
        ((8, 9), KvType.F16, 128, cuda_scratch.MMA),
        ((12, 0), KvType.F16, 128, cuda_scratch.MMA),
        (None, KvType.F16, 128, cuda_scratch.MMA),
    ],
)
def test_the_device_and_the_page_layout_choose_the_prefill_kernel(
    capability: tuple[int, int] | None, kv_type: KvType, head_dim: int, name: str
) -> None:
    assert cuda_scratch.prefill_kernel_name(geometry_of(head_dim, kv_type), capability) == name


@pytest.mark.parametrize("large_begin", [LARGE_BEGIN, LARGE_BEGIN // 2, LARGE_BEGIN // 4, MIDDLE_BEGIN])
def test_partition_sizes(large_begin: int) -> None:
    begin = index = 0
    while begin < 300_000:
        begin, end = partition_bounds(index, large_begin)
        assert cuda_scratch.partition_keys(end, large_begin) == end - begin
        index, begin = index + 1, end


def test_no_span_cuts_a_partition() -> None:
    geometries = [geometry_of(128, kv_type, n_head_kv=8) for kv_type in (KvType.F16, KvType.TURBO4)]
    for n_ctx in (256, 16384, 16385, 65536, 65537, 131072, 1 << 20):
        for page_tokens in (64, 128, 256, 2048):
            step = cuda_scratch.span_step_pages(n_ctx, page_tokens, geometries) * page_tokens
            for geometry in geometries:
                index, large_begin = 0, large_begin_of(geometry)
                while (bounds := partition_bounds(index, large_begin))[0] < n_ctx:
                    assert page_tokens >= bounds[1] - bounds[0] or step % (bounds[1] - bounds[0]) == 0
                    index += 1


def test_numbers_of_experts() -> None:
    assert cuda_support.MAX_EXPERTS == routing.MAX_EXPERTS
    assert ubatch_choice.EXPERT_TILE_PAIRS == expert_prefill.MANY_PAIRS
    assert cuda_support.MAX_EXPERTS_USED == routing.MAX_USED == expert_matvec.MAX_USED


def test_regions_do_not_overlap_within_a_user() -> None:
    scratch = cuda_scratch.plan_cuda_scratch(
        Phase.DECODE,
        matmul_inputs=(576, 1536),
        expert_inputs=4 * 768,
        largest_matrix_rows=49152,
        attention=[(geometry_of(64, n_head_kv=3), 9)],
        n_tokens=8,
        n_outputs=8,
        n_pages=33,
    )
    assert scratch.tokens >= scratch.page_table + 8 * 33
    assert scratch.partials >= scratch.attention_state + 4 * 8 * state_floats(9, 64)
    assert scratch.max_sum >= scratch.partials + 4 * cuda_scratch.PARTIAL_ROWS * 9 * 64
    assert scratch.scales >= scratch.activations + 8 * 4 * 768
    assert scratch.n_bytes >= max(scratch.max_sum + 8 * cuda_scratch.PARTIAL_ROWS * 9, scratch.scales + 8 * 192 * 8)


@pytest.mark.parametrize(
    ("page", "n_head"), [(geometry_of(64, page_tokens=32), 4), (geometry_of(112), 4), (geometry_of(64), 34)]
)
def test_refusals(page: PageGeometry, n_head: int) -> None:
    with pytest.raises(UnsupportedError):
        cuda_scratch.check_geometry(page, n_head)
