"""What surrounds products that stream their weights: sizes of rings, and where weights lie."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")

from gguf import GGMLQuantizationType as Q

from cuda_kernels.attention_prefill_wgmma import SHARED_LIMIT_90
from cuda_kernels.device_weights import WEIGHT_ALIGNMENT, _place
from cuda_kernels.weight_ring import STREAMED_TYPES, WeightRing, gated_ring, product_ring
from cuda_kernels.weights import WeightGeometry
from kvs_core.model_file import open_model
from tests.fixtures.tiny_models import TinyModel, write_model

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


def test_weights_lie_in_the_order_in_which_a_step_uses_them(tmp_path: Path) -> None:
    with open_model(write_model(tmp_path / "model.gguf", TinyModel(weight_type=Q.Q4_K, n_embd=256, n_ff=512))) as file:
        _, places, end = _place(file)
        n_layers = 1 + max(int(name.split(".")[1]) for name in places if name.startswith("blk."))
    own = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
    expected = [
        "token_embd.weight",
        *(f"blk.{layer}.{name}.weight" for layer in range(n_layers) for name in own),
    ]
    assert sorted(places, key=places.__getitem__)[: len(expected)] == expected
    assert set(places) - set(expected) == {"output_norm.weight", "output.weight"}
    assert all(place % WEIGHT_ALIGNMENT == 0 for place in [*places.values(), end])
