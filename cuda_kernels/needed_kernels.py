"""Which kernels a session launches, known before its first step: what is compiled together when it opens.

Those of products are in ``needed_products``, small ones on rows in ``needed_rows``. A kernel that is missing still
works; it is compiled in the step that first needs it. A test compares.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from numba.cuda import types

from cuda_kernels.activation import build_to_half_kernel
from cuda_kernels.attention_decode import MAX_TOKENS, decode_kernel
from cuda_kernels.attention_prefill import prefill_kernel
from cuda_kernels.convolution import RUN_TOKENS, build_keep_inputs_kernel, build_short_convolution_kernel
from cuda_kernels.delta_gates import build_delta_gates_kernel, build_norm_gate_kernel
from cuda_kernels.delta_net import prompt_kernel, step_kernel
from cuda_kernels.dequant import OutputType, build_dequantise_rows_kernel
from cuda_kernels.device_weights import DeviceMatrix
from cuda_kernels.elementwise import (
    build_count_kernel,
    build_log_position_kernel,
    build_resize_heads_kernel,
    build_sigmoid_mul_kernel,
    build_split_groups_kernel,
    build_write_step_kernel,
)
from cuda_kernels.launch import Kernel, device_capability
from cuda_kernels.merge import build_merge_partials_kernel
from cuda_kernels.needed_products import product_kernels
from cuda_kernels.needed_rows import row_kernels
from cuda_kernels.norm import build_rms_norm_kernel
from cuda_kernels.quantise import QUANT_BLOCK
from cuda_kernels.rope import RopePairing, build_rope_kernel
from cuda_kernels.rotate_heads import build_rotate_heads_kernel
from cuda_kernels.rotate_store import rotate_store_kernel
from cuda_kernels.sigmoid_gate import build_sigmoid_gate_kernel
from cuda_kernels.store import build_store_rows_kernel
from kvs_core.cached_layers import KvLayer
from kvs_core.cuda_scratch import prefill_kernel_name
from kvs_core.kv_rotation import HeadRotations
from kvs_core.kv_types import PageGeometry
from kvs_core.plan import RunPlan
from kvs_core.window_cache import WindowLayer

_EMBEDDING, _OUTPUT = "token_embd", "output"
_SHARED_GATE = ".ffn_gate_inp_shexp"


def needed_kernels(
    plan: RunPlan,
    matrices: Mapping[str, DeviceMatrix],
    vectors: Collection[str],
    pairing: RopePairing,
    n_pairs: Mapping[bool, int],
) -> list[Kernel]:
    """Every kernel of prefill and of decode steps of one token, each once.

    vectors   names of the weights that are no matrices
    n_pairs   that RoPE turns in layers without a window (False) and with one (True)
    """
    layers = {_CachedLayer.of(plan, layer, vectors) for layer in (*plan.kv_layers, *plan.window_layers)}
    products = {name: matrix.geometry for name, matrix in matrices.items()}
    embedding = products[_EMBEDDING]
    if _OUTPUT in products:
        del products[_EMBEDDING]
    found = [
        build_count_kernel(types.int32),
        build_count_kernel(types.int64),
        build_write_step_kernel(),
        build_dequantise_rows_kernel(embedding.weight_type, OutputType.F32),
        build_rms_norm_kernel(OutputType.F16),
        build_to_half_kernel(),
    ]
    if any(name.endswith(_SHARED_GATE) for name in vectors):
        found.append(build_sigmoid_gate_kernel())
    found += row_kernels(plan.shape, products, vectors)
    found += _recurrent_kernels(plan)
    leaves_quants = all(
        layer.page.head_dim_v % QUANT_BLOCK == 0 and layer.n_out == layer.n_head * layer.page.head_dim_v
        for layer in layers
    )
    found += product_kernels(plan, products, vectors, leaves_quants=leaves_quants)
    for layer in layers:
        found += _attention_kernels(layer)
        if plan.shape.temperature_scale:
            found.append(build_log_position_kernel())
        if plan.shape.temperature_scale or layer.is_padded or layer.page.v_in_k:
            found += _separate_store_kernels(layer, pairing)
        else:
            turned = n_pairs[layer.in_window]
            found.append(rotate_store_kernel(layer.page, layer.n_head, turned, pairing, layer.rotations))
        if layer.is_shared:
            found += _query_kernels(layer, pairing)
    return list(dict.fromkeys(found))


def _recurrent_kernels(plan: RunPlan) -> Iterator[Kernel]:
    """Those of layers with a state, and of the gates of hybrid models."""
    for sizes in {layer.recurrent for layer in plan.recurrent_layers}:
        yield build_short_convolution_kernel(sizes)
        if plan.n_ubatch > RUN_TOKENS:
            yield build_keep_inputs_kernel()
        yield build_delta_gates_kernel()
        yield prompt_kernel(sizes)
        yield build_norm_gate_kernel(sizes.head_dim)
        yield step_kernel(sizes)
        yield build_split_groups_kernel()
        yield build_sigmoid_mul_kernel()


@dataclass(frozen=True, slots=True, kw_only=True)
class _CachedLayer:
    """What the kernels of a layer's attention depend on.

    n_out       elements of a row of the attention's result
    is_shared   layers without keys of their own read its pages, too
    """

    page: PageGeometry
    n_head: int
    is_padded: bool
    n_out: int
    rotations: HeadRotations | None
    in_window: bool
    softcap: float
    has_sinks: bool
    is_shared: bool

    @classmethod
    def of(cls, plan: RunPlan, layer: KvLayer | WindowLayer, vectors: Collection[str]) -> _CachedLayer:
        shape, page = plan.shape.layers[layer.layer_idx], layer.geometry
        return cls(
            page=page,
            n_head=shape.n_head,
            is_padded=(page.head_dim_k, page.head_dim_v) != (shape.head_dim_k, shape.head_dim_v),
            n_out=shape.n_head * shape.head_dim_v,
            rotations=plan.rotations().get(layer.layer_idx),
            in_window=isinstance(layer, WindowLayer),
            softcap=plan.shape.attention_softcap,
            has_sinks=f"blk.{layer.layer_idx}.attn_sinks" in vectors,
            is_shared=any(one.kv_from == layer.layer_idx for one in plan.shape.layers),
        )


def _separate_store_kernels(layer: _CachedLayer, pairing: RopePairing) -> Iterator[Kernel]:
    """RoPE, rotation and storing, where something stands between them."""
    page, rotations = layer.page, layer.rotations
    yield build_rope_kernel(pairing)
    if layer.is_padded:
        yield build_resize_heads_kernel()
    if rotations is not None:
        for rotation in {rotations.keys, rotations.values} - {None}:
            yield build_rotate_heads_kernel(rotation, False, False)
    yield build_store_rows_kernel(page.k_region, page.n_head_kv, 0)
    if not page.v_in_k:
        yield build_store_rows_kernel(page.v_region, page.n_head_kv, page.v_offset)


def _query_kernels(layer: _CachedLayer, pairing: RopePairing) -> Iterator[Kernel]:
    """RoPE and rotation of queries alone."""
    yield build_rope_kernel(pairing)
    if layer.rotations is not None and layer.rotations.keys is not None:
        yield build_rotate_heads_kernel(layer.rotations.keys, False, False)


def _attention_kernels(layer: _CachedLayer) -> Iterator[Kernel]:
    page, gqa_ratio = layer.page, layer.n_head // layer.page.n_head_kv
    name = prefill_kernel_name(page, device_capability())
    yield prefill_kernel(page, gqa_ratio, name, softcap=layer.softcap, has_sinks=layer.has_sinks)[0]
    for n_tokens in (1, MAX_TOKENS):  # one kernel or two
        yield decode_kernel(page, gqa_ratio, n_tokens, in_window=layer.in_window, softcap=layer.softcap)
    yield build_merge_partials_kernel(layer.n_head, page.head_dim_v, layer.in_window, layer.has_sinks)
    if layer.rotations is not None and layer.rotations.values is not None:
        yield build_rotate_heads_kernel(layer.rotations.values, True, False)
        if not layer.is_padded and not layer.page.v_in_k and layer.n_out % QUANT_BLOCK == 0:
            yield build_rotate_heads_kernel(layer.rotations.values, True, True)
