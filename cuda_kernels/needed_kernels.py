"""Which kernels a session launches, known before its first step: what is compiled together when it opens.

A kernel that is missing here still works; it is compiled in the step that first needs it. A test compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from numba.cuda import types

from cuda_kernels.activation import Activation, build_gated_activation_kernel, build_to_half_kernel
from cuda_kernels.attention_decode import decode_kernel
from cuda_kernels.attention_prefill import build_attention_prefill_kernel
from cuda_kernels.dequant import OutputType, build_dequantise_rows_kernel
from cuda_kernels.device_weights import DeviceMatrix
from cuda_kernels.elementwise import build_add_kernel, build_count_kernel
from cuda_kernels.launch import Kernel
from cuda_kernels.matvec import (
    build_matvec_kernel,
    build_quantise_activations_kernel,
    count_warp_rows,
    takes_float_activations,
)
from cuda_kernels.merge import build_merge_partials_kernel
from cuda_kernels.norm import build_rms_norm_kernel
from cuda_kernels.rope import RopePairing, build_rope_kernel
from cuda_kernels.store import build_store_rows_kernel
from cuda_kernels.weights import WeightGeometry
from kvs_core.kv_types import PageGeometry
from kvs_core.plan import RunPlan

_EMBEDDING, _OUTPUT = "token_embd", "output"


def needed_kernels(plan: RunPlan, matrices: Mapping[str, DeviceMatrix], pairing: RopePairing) -> list[Kernel]:
    """Every kernel of prefill and of decode steps of one token, each once."""
    layers = {(layer.geometry, plan.shape.layers[layer.layer_idx].n_head) for layer in plan.kv_layers}
    products = {name: matrix.geometry for name, matrix in matrices.items()}
    embedding = products[_EMBEDDING]
    if _OUTPUT in products:
        del products[_EMBEDDING]
    found = [
        build_count_kernel(types.int32),
        build_count_kernel(types.int64),
        build_dequantise_rows_kernel(embedding.weight_type, OutputType.F32),
        build_rms_norm_kernel(),
        build_add_kernel(),
        build_rope_kernel(pairing),
        build_gated_activation_kernel(Activation.SILU),
        build_to_half_kernel(),
    ]
    for geometry in products.values():
        found += _product_kernels(geometry)
    for page, n_head in layers:
        found += _attention_kernels(page, n_head)
    return list(dict.fromkeys(found))


def _product_kernels(geometry: WeightGeometry) -> Iterator[Kernel]:
    weight_type = geometry.weight_type
    yield build_dequantise_rows_kernel(weight_type, OutputType.F16)
    yield build_matvec_kernel(weight_type, 1, min(count_warp_rows(weight_type, 1), geometry.n_rows))
    if not takes_float_activations(weight_type):
        yield build_quantise_activations_kernel()


def _attention_kernels(page: PageGeometry, n_head: int) -> Iterator[Kernel]:
    gqa_ratio = n_head // page.n_head_kv
    yield build_store_rows_kernel(page.k_region, page.n_head_kv, 0)
    yield build_store_rows_kernel(page.v_region, page.n_head_kv, page.v_offset)
    yield build_attention_prefill_kernel(page, gqa_ratio)
    yield decode_kernel(page, gqa_ratio)[0]
    yield build_merge_partials_kernel(n_head, page.head_dim_v)
