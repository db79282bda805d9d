"""Sizes of the rings of products that stream their weights."""

from __future__ import annotations

import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")

from gguf import GGMLQuantizationType as Q

from cuda_kernels.launch import SHARED_LIMIT_90
from cuda_kernels.weight_ring import STREAMED_TYPES, WeightRing, gated_ring, product_ring
from cuda_kernels.weights import WeightGeometry

RESERVED = 1024  # bytes of shared memory that every block costs beside its own


def rings(n_cols: int) -> list[tuple[int, WeightRing]]:
    """With the number of vectors."""
    found = [
        (n_vectors, ring_of(weight_type, n_vectors, n_cols, 4096))
        for ring_of in (product_ring, gated_ring)
        for weight_type in STREAMED_TYPES
        for n_vectors in range(1, 9)
    ]
    return [(n_vectors, ring) for n_vectors, ring in found if ring is not None]


@pytest.mark.parametrize("n_cols", [256, 2816, 4096, 5120, 14336, 28672])
def test_places_hold_rows_without_a_gap_and_fit_the_shared_memory(n_cols: int) -> None:
    assert rings(n_cols)
    for n_vectors, ring in rings(n_cols):
        stride = WeightGeometry(weight_type=ring.weight_type, n_rows=1, n_cols=n_cols).row_strides[0]
        assert (ring.n_chunks - 1) * ring.row_bytes + ring.last_bytes == stride
        assert 0 < ring.last_bytes <= ring.row_bytes
        assert ring.place_bytes % 16 == ring.row_bytes % 16 == ring.last_bytes % 16 == 0
        assert ring.place_bytes == ring.n_matrices * ring.n_rows * ring.row_bytes
        assert ring.n_blocks * (ring.n_bytes + RESERVED) <= SHARED_LIMIT_90 + RESERVED
        if ring.vector_bytes:
            assert ring.vector_bytes >= n_vectors * (n_cols + n_cols // 16 * 8)


def test_other_types_and_too_few_rows_do_not_stream() -> None:
    assert product_ring(Q.Q8_0, 1, 4096, 4096) is None
    assert gated_ring(Q.Q6_K, 1, 4096, 4096) is None
    assert product_ring(Q.Q4_K, 1, 4096, 1) is None
    assert product_ring(Q.Q4_K, 4, 4096, 3) is None
