"""Which kernels a session launches, known before its first step: what is compiled together when it opens.

A kernel that is missing here still works; it is compiled in the step that first needs it. A test compares.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from gguf import GGMLQuantizationType
from numba.cuda import types

from cuda_kernels.activation import Activation, build_gated_activation_kernel, build_to_half_kernel
from cuda_kernels.attention_decode import decode_kernel
from cuda_kernels.attention_prefill import prefill_kernel
from cuda_kernels.convolution import RUN_TOKENS, build_keep_inputs_kernel, build_short_convolution_kernel
from cuda_kernels.delta_gates import build_delta_gates_kernel, build_norm_gate_kernel
from cuda_kernels.delta_net import prompt_kernel, step_kernel
from cuda_kernels.dequant import OutputType, build_dequantise_rows_kernel
from cuda_kernels.device_weights import DeviceMatrix
from cuda_kernels.elementwise import (
    build_add_kernel,
    build_count_kernel,
    build_log_position_kernel,
    build_resize_heads_kernel,
    build_sigmoid_mul_kernel,
    build_split_groups_kernel,
    build_write_step_kernel,
)
from cuda_kernels.expert_decode import chooses_in_place, one_token_gated_kernel, one_token_sum_kernel, sum_takes_floats
from cuda_kernels.expert_operations import routing_rule, session_tile_pairs
from cuda_kernels.expert_prefill import build_expert_tiles_kernel
from cuda_kernels.expert_stream import Chosen
from cuda_kernels.gated_matvec import gated_kernel, gated_takes_floats
from cuda_kernels.launch import Kernel, device_capability
from cuda_kernels.matvec import product_kernel, takes_floats
from cuda_kernels.merge import build_merge_partials_kernel
from cuda_kernels.norm import build_rms_norm_kernel
from cuda_kernels.product_operations import ROUTER
from cuda_kernels.quantise import QUANT_BLOCK, build_norm_quantise_kernel, build_quantise_kernel
from cuda_kernels.rope import RopePairing, build_rope_kernel
from cuda_kernels.rotate_heads import build_rotate_heads_kernel
from cuda_kernels.rotate_store import rotate_store_kernel
from cuda_kernels.routing import (
    build_combine_kernel,
    build_count_experts_kernel,
    build_order_pairs_kernel,
    build_route_kernel,
)
from cuda_kernels.row_units import takes_float_activations
from cuda_kernels.sigmoid_gate import build_sigmoid_gate_kernel
from cuda_kernels.store import build_store_rows_kernel
from cuda_kernels.vector_input import VectorInput
from cuda_kernels.weights import WeightGeometry
from kvs_core.cuda_scratch import prefill_kernel_name
from kvs_core.kv_rotation import HeadRotations
from kvs_core.kv_types import PageGeometry
from kvs_core.plan import KvLayer, RunPlan
from kvs_core.window_cache import WindowLayer

_EMBEDDING, _OUTPUT = "token_embd", "output"
_ATTENTION_OUTPUT, _DELTA_OUTPUT, _DOWN = "attn_output", "ssm_out", "ffn_down"
_ADDED = (_ATTENTION_OUTPUT, _DELTA_OUTPUT, _DOWN)
_PAIRS = {"ffn_gate": "ffn_up", "ffn_gate_shexp": "ffn_up_shexp"}
_SHARED = "_shexp"
_EXPERTS, _EXPERT_DOWN, _SHARED_GATE = "_exps", "ffn_down_exps", ".ffn_gate_inp_shexp"
_BIAS, _HEAD_NORMS = ".bias", (".attn_q_norm", ".attn_k_norm")
_TOGETHER = (("attn_q", "attn_k", "attn_v"), ("attn_qkv", "attn_gate"), ("ssm_beta", "ssm_alpha"))
_SECOND = ("ssm_ba", "ssm_beta", "ssm_alpha")
"""Another product has read the same norm before."""


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
    own_names = {name.rpartition(".")[2] for name in products}
    if not own_names.isdisjoint(_PAIRS):
        found.append(build_gated_activation_kernel(Activation.SILU, OutputType.F16))
    has_experts = any(layer.experts is not None for layer in plan.shape.layers)
    if has_experts or any(name.endswith(_BIAS) and name.removesuffix(_BIAS) in products for name in vectors):
        found.append(build_add_kernel())
    if any(name.endswith(_SHARED_GATE) for name in vectors):
        found.append(build_sigmoid_gate_kernel())
    if plan.shape.n_embd % QUANT_BLOCK or any(name.endswith(_HEAD_NORMS) for name in vectors):
        found.append(build_rms_norm_kernel(OutputType.F32))
    found += _recurrent_kernels(plan)
    leaves_quants = not plan.recurrent_layers  # there a gate follows attention
    leaves_quants &= all(
        layer.page.head_dim_v % QUANT_BLOCK == 0 and layer.n_out == layer.n_head * layer.page.head_dim_v
        for layer in layers
    )
    for name, geometry in products.items():
        if name.endswith(_EXPERTS):
            found += _expert_kernels(name, geometry, plan, name + _BIAS in vectors)
            continue
        if not (name.endswith(ROUTER) and geometry.weight_type is GGMLQuantizationType.F32):
            found.append(build_dequantise_rows_kernel(geometry.weight_type, OutputType.F16))
        found += _decode_product(name, products, leaves_quants=leaves_quants)
    for layer in layers:
        found += _attention_kernels(layer)
        if plan.shape.temperature_scale:
            found.append(build_log_position_kernel())
        if plan.shape.temperature_scale or layer.is_padded:
            found += _separate_store_kernels(layer, pairing)
        else:
            turned = n_pairs[layer.in_window]
            found.append(rotate_store_kernel(layer.page, layer.n_head, turned, pairing, layer.rotations))
    return list(dict.fromkeys(found))


def _decode_product(name: str, products: Mapping[str, WeightGeometry], *, leaves_quants: bool) -> Iterator[Kernel]:
    """What ``operations.CudaOperations`` launches for one weight in a step of one token.

    ``leaves_quants``: whether the end of attention quantises its result, as the delta net always does.
    """
    block, _, own = name.rpartition(".")
    geometry = products[name]
    weight_type, n_cols = geometry.weight_type, geometry.n_cols
    pair = next(((gate, up) for gate, up in _PAIRS.items() if own in (gate, up)), None)
    if pair is not None and products[f"{block}.{pair[0]}"] == products[f"{block}.{pair[1]}"]:
        is_normed = gated_takes_floats(weight_type, 1, geometry.n_rows, n_cols)
        kind = VectorInput.NORMED if is_normed else VectorInput.QUANTS
        if is_normed and own.endswith(_SHARED):
            kind = VectorInput.FLOATS  # the norm was done for the experts before
        yield gated_kernel(weight_type, 1, geometry.n_rows, n_cols, kind=kind).kernel
        if not is_normed and n_cols % QUANT_BLOCK == 0:
            yield build_norm_quantise_kernel()
        return
    names = next((names for names in _TOGETHER if own in names), (own,))
    together = [products[f"{block}.{other}"] for other in names] if block else [geometry]
    rows = [one.n_rows for one in together if one.weight_type is weight_type]
    is_quantised = own == _DELTA_OUTPUT or (own == _ATTENTION_OUTPUT and leaves_quants)
    kind = VectorInput.QUANTS
    if not is_quantised and len(rows) == len(together) and takes_floats(weight_type, 1, rows, n_cols):
        kind = VectorInput.FLOATS if own in (*_ADDED, *_SECOND, _DOWN + _SHARED) else VectorInput.NORMED
    yield product_kernel(weight_type, 1, rows, n_cols, is_added=own in _ADDED, kind=kind).kernel
    if kind is not VectorInput.QUANTS:
        return
    if own not in _ADDED + _SECOND and n_cols % QUANT_BLOCK == 0:
        yield build_norm_quantise_kernel()
    if own in _ADDED and not is_quantised and not takes_float_activations(weight_type):
        yield build_quantise_kernel()


def _expert_kernels(name: str, geometry: WeightGeometry, plan: RunPlan, has_bias: bool) -> Iterator[Kernel]:
    """What the matrices of a layer's experts of one name need, and the routing before them."""
    experts = plan.shape.layers[int(name.split(".")[1])].experts
    assert experts is not None
    weight_type, tile_pairs = geometry.weight_type, session_tile_pairs(plan, experts)
    n_rows, n_used = geometry.n_rows // experts.n_expert, experts.n_used
    chooses = chooses_in_place(routing_rule(experts), has_bias=False)  # only other rules have one
    chosen = Chosen(n_used=n_used, n_expert=experts.n_expert if chooses else 0)
    yield build_route_kernel()
    yield build_count_experts_kernel()
    yield build_order_pairs_kernel(tile_pairs)
    yield build_combine_kernel()
    if name.endswith(_EXPERT_DOWN):
        yield one_token_sum_kernel(geometry, n_rows, chosen)
        yield build_expert_tiles_kernel(weight_type, tile_pairs, None, has_bias)
        if not takes_float_activations(weight_type) and not sum_takes_floats(geometry, n_rows, 1, n_used):
            yield build_quantise_kernel()
        return
    yield one_token_gated_kernel(geometry, experts.n_ff, Activation.SILU, has_bias=has_bias, chosen=chosen)
    yield build_expert_tiles_kernel(weight_type, tile_pairs, Activation.SILU, has_bias)


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
    """What the kernels of a layer's attention depend on. ``n_out``: the attention's result, elements of a row."""

    page: PageGeometry
    n_head: int
    is_padded: bool
    n_out: int
    rotations: HeadRotations | None
    in_window: bool
    softcap: float
    has_sinks: bool

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
    yield build_store_rows_kernel(page.v_region, page.n_head_kv, page.v_offset)


def _attention_kernels(layer: _CachedLayer) -> Iterator[Kernel]:
    page, gqa_ratio = layer.page, layer.n_head // layer.page.n_head_kv
    name = prefill_kernel_name(page, device_capability())
    yield prefill_kernel(page, gqa_ratio, name, softcap=layer.softcap, has_sinks=layer.has_sinks)[0]
    yield decode_kernel(page, gqa_ratio, in_window=layer.in_window, softcap=layer.softcap)
    yield build_merge_partials_kernel(layer.n_head, page.head_dim_v, layer.in_window, layer.has_sinks)
    if layer.rotations is not None and layer.rotations.values is not None:
        yield build_rotate_heads_kernel(layer.rotations.values, True, False)
        if not layer.is_padded and layer.n_out % QUANT_BLOCK == 0:
            yield build_rotate_heads_kernel(layer.rotations.values, True, True)
