"""Rows encoded by the kernels' intrinsics, carried out by numpy, have the bytes that the CPU backend stores."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")

from cuda_kernels.kv_encode import BLOCK_ELEMENTS, RowEncoder
from kvs_core.cpu.store import store_kv
from kvs_core.kv_types import KvType, PageGeometry
from tests.cuda.numpy_emitter import LANES, NumpyEmitter

LANE_WORDS = LANES.astype(np.uint32)
N_ROWS = 16
HEAD_DIMS = (64, 80, 128)
CASES = [(kv_type, head_dim) for kv_type in KvType for head_dim in HEAD_DIMS if head_dim % kv_type.block_elements == 0]


def awkward_rows(head_dim: int) -> np.ndarray:
    """float32 [N_ROWS, 1, head_dim] of many magnitudes, with ties, zeros, tiny numbers and what is not finite."""
    rng = np.random.default_rng(head_dim)
    rows = rng.standard_normal((N_ROWS, 1, head_dim), dtype=np.float32)
    rows *= 10.0 ** rng.uniform(-3.0, 3.0, (N_ROWS, 1, 1)).astype(np.float32)
    rows[:4] = np.round(2.0 * rng.standard_normal((4, 1, head_dim))) + 0.0
    rows[4] = 0.0
    rows[5, 0, 32:] = 0.0
    rows[6] = np.float32(1e-32)
    rows[7] = np.abs(rows[7])
    rows[8, 0, 3] = np.inf
    rows[9] *= np.float32(1e-6)
    return rows


@pytest.mark.parametrize(("kv_type", "head_dim"), CASES)
def test_rows_have_the_bytes_of_the_cpu(kv_type: KvType, head_dim: int) -> None:
    page = PageGeometry(
        page_tokens=N_ROWS, n_head_kv=1, head_dim_k=head_dim, head_dim_v=head_dim, type_k=kv_type, type_v=kv_type
    )
    rows = awkward_rows(head_dim)
    expected = np.full(page.page_bytes, 0xFF, np.uint8)
    store_kv(expected, page, np.zeros(1, np.int64), 0, rows, rows)

    emit = NumpyEmitter(np.full(page.page_bytes, 0xFF, np.uint8))
    region = page.k_region
    encoder = RowEncoder(region)
    group_elements = BLOCK_ELEMENTS * encoder.group_blocks
    n_groups = -(-head_dim // group_elements)
    for slot in range(N_ROWS):
        padded = np.zeros(n_groups * group_elements, np.float32)
        padded[:head_dim] = rows[slot, 0]
        by_group = padded.reshape(n_groups, encoder.group_blocks, 32)
        for group in range(n_groups):
            at, row = np.zeros(32, np.int64), np.full(32, slot, np.int64)
            with np.errstate(invalid="ignore", over="ignore"):
                encoder._encode(emit, at, row, emit.word(group), LANE_WORDS, list(by_group[group]))
    np.testing.assert_array_equal(emit.memory[: region.n_bytes], expected[: region.n_bytes])


@pytest.mark.parametrize("kv_type", [KvType.F32, KvType.F16, KvType.BF16, KvType.TURBO3])
def test_nan_stays_nan(kv_type: KvType) -> None:
    page = PageGeometry(page_tokens=1, n_head_kv=1, head_dim_k=64, head_dim_v=64, type_k=kv_type, type_v=kv_type)
    emit = NumpyEmitter(np.zeros(page.page_bytes, np.uint8))
    encoder = RowEncoder(page.k_region)
    values = [np.full(32, np.nan, np.float32)] * encoder.group_blocks
    at = np.zeros(32, np.int64)
    with np.errstate(invalid="ignore"):
        encoder._encode(emit, at, at, emit.word(0), LANE_WORDS, values)
    if kv_type is KvType.BF16:
        stored = (emit.memory[:64].view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif kv_type.is_turbo:
        stored = emit.memory[page.k_region.scale_offset :][:2].view(np.float16)
    else:
        stored = emit.memory[: 32 * page.k_region.row_bytes // 64].view(kv_type.value.replace("f", "float"))
    assert np.all(np.isnan(stored))
