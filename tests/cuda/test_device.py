"""A part of ``scripts/check_cuda.py`` on a real device; the script itself runs everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")

from gguf import GGMLQuantizationType
from numba import cuda

from kvs_core.kv_types import KvType, PageGeometry
from scripts.cuda_checks import attention, rows, streamed, weights
from scripts.cuda_checks.report import Outcome

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda.is_available(), reason="no CUDA device or no driver"),
]

F16 = PageGeometry(page_tokens=256, n_head_kv=2, head_dim_k=128, head_dim_v=128, type_k=KvType.F16, type_v=KvType.F16)
MIXED = replace(F16, type_k=KvType.Q8_0, type_v=KvType.F32, head_dim_k=64, head_dim_v=64)
TURBO = replace(F16, type_k=KvType.TURBO4, type_v=KvType.BF16)
BITS = replace(F16, type_k=KvType.TURBO3, type_v=KvType.Q5_1, head_dim_k=64, page_tokens=64)
CASES: dict[str, Callable[[], Iterator[Outcome]]] = {
    "decode f16": lambda: attention.check_decode(F16, 4, 1313, seed=1, window=None),
    "decode q8_0 and f32, window": lambda: attention.check_decode(MIXED, 6, 777, seed=2, window=300),
    "decode f16, window, cap and sinks": lambda: attention.check_decode(
        F16, 4, 1313, seed=11, window=300, softcap=4.0, has_sinks=True
    ),
    "prefill f16, window, cap and sinks": lambda: attention.check_prefill(
        F16, 4, 700, 37, seed=12, window=300, softcap=4.0, has_sinks=True
    ),
    "prefill f16": lambda: attention.check_prefill(F16, 4, 700, 37, seed=3, window=None),
    "prefill q8_0 and f32, window": lambda: attention.check_prefill(MIXED, 6, 0, 300, seed=4, window=100),
    "prefill turbo4 and bf16": lambda: attention.check_prefill(TURBO, 5, 256, 70, seed=9, window=None),
    "prefill turbo3 and q5_1, window": lambda: attention.check_prefill(BITS, 2, 0, 300, seed=10, window=100),
    "store": lambda: attention.check_store(MIXED, 700, 17, seed=5),
    "copies": lambda: attention.check_copies(MIXED, seed=6),
    "weights Q4_K": lambda: weights.check_weights(GGMLQuantizationType.Q4_K, 33, 768, seed=7),
    "weights Q8_0": lambda: weights.check_weights(GGMLQuantizationType.Q8_0, 5, 576, seed=8),
    "streamed Q5_K": lambda: streamed.check_streamed(GGMLQuantizationType.Q5_K, 130, 1280, 4),
    "norm": lambda: rows.check_norm(4, 576),
    "logits": lambda: rows.check_logits(49152, 40),
}


@pytest.mark.parametrize("case", CASES)
def test_kernels_agree_with_their_oracles(case: str) -> None:
    failed = [outcome for outcome in CASES[case]() if not outcome.passed]
    assert not failed
