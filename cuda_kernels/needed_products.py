"""Which kernels multiply with the weights of a session, experts included. A part of ``needed_kernels``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from gguf import GGMLQuantizationType

from cuda_kernels.activation import Activation, build_gated_activation_kernel
from cuda_kernels.dequant import OutputType, build_dequantise_rows_kernel
from cuda_kernels.elementwise import build_add_kernel
from cuda_kernels.expert_decode import chooses_in_place, one_token_gated_kernel, one_token_sum_kernel, sum_takes_floats
from cuda_kernels.expert_operations import routing_rule, session_tile_pairs
from cuda_kernels.expert_prefill import build_expert_tiles_kernel
from cuda_kernels.expert_stream import Chosen
from cuda_kernels.gated_matvec import gated_kernel, gated_takes_floats
from cuda_kernels.head_matvec import HeadInput, build_take_heads_kernel, head_matvec_launch
from cuda_kernels.launch import Kernel
from cuda_kernels.matvec import product_kernel, takes_floats
from cuda_kernels.product_operations import ROUTER
from cuda_kernels.quantise import QUANT_BLOCK, build_norm_quantise_kernel, build_quantise_kernel
from cuda_kernels.routing import (
    build_combine_kernel,
    build_count_experts_kernel,
    build_order_pairs_kernel,
    build_route_kernel,
)
from cuda_kernels.row_units import takes_float_activations
from cuda_kernels.vector_input import VectorInput
from cuda_kernels.weights import WeightGeometry
from kvs_core.plan import RunPlan

HAS_POST_NORMS = frozenset({"gemma2", "gemma3", "gemma4"})
"""Architectures whose blocks end with a norm, so that no product is added to the residual."""
_ADDS_SHARED = frozenset({"deepseek2", "laguna"})
"""Architectures that add the shared expert as it is."""
_EXPERT_ACTIVATIONS = {"gemma4": Activation.GELU_TANH, "gpt-oss": Activation.CLAMPED_SWIGLU}

_OWN_EMBEDDING = "per_layer_token_embd"
_ATTENTION_OUTPUT, _DELTA_OUTPUT, _DOWN = "attn_output", "ssm_out", "ffn_down"
_PAIRS = {"ffn_gate": "ffn_up", "ffn_gate_shexp": "ffn_up_shexp"}
_SHARED, _EXPERTS, _EXPERT_DOWN = "_shexp", "_exps", "ffn_down_exps"
_HEADS = (".attn_k_b", ".attn_v_b")
"""Matrices of each head, one after another."""
_BIAS = ".bias"
_TOGETHER = (("attn_q", "attn_k", "attn_v"), ("attn_qkv", "attn_gate"), ("ssm_beta", "ssm_alpha"))
_SECOND = ("ssm_ba", "ssm_beta", "ssm_alpha")
"""Another product has read the same norm before."""
_PLAIN = (_ATTENTION_OUTPUT, _DELTA_OUTPUT, _DOWN, _DOWN + _SHARED, "inp_gate", "proj", "per_layer_model_proj")
"""Products whose input no norm made."""
_MORE_SECOND = {"laguna": ("attn_gate",), "deepseek2": ("attn_q_a", "attn_q")}
_MORE_PLAIN = {"gemma4": ("ffn_gate_inp",), "deepseek2": ("attn_q_b",)}
"""There a factor follows the norm, or a norm in place comes before the product."""


class _Family:
    """What depends on the architecture."""

    def __init__(self, plan: RunPlan, *, leaves_quants: bool) -> None:
        name = plan.shape.architecture
        self.activation = Activation.GELU_TANH if name in HAS_POST_NORMS else Activation.SILU
        self.expert_activation = _EXPERT_ACTIVATIONS.get(name, Activation.SILU)
        self.added = () if name in HAS_POST_NORMS else (_ATTENTION_OUTPUT, _DELTA_OUTPUT, _DOWN)
        self.added += (_DOWN + _SHARED,) if name in _ADDS_SHARED else ()
        self.second = _SECOND + _MORE_SECOND.get(name, ())
        self.plain = _PLAIN + _MORE_PLAIN.get(name, ())
        # elsewhere a gate follows attention, or a product with matrices of heads
        self.leaves_quants = leaves_quants and not plan.recurrent_layers and name not in ("laguna", "deepseek2")


def product_kernels(
    plan: RunPlan, products: Mapping[str, WeightGeometry], vectors: Collection[str], *, leaves_quants: bool
) -> Iterator[Kernel]:
    """``leaves_quants``: whether the end of attention can quantise its result."""
    family = _Family(plan, leaves_quants=leaves_quants)
    own_names = {name.rpartition(".")[2] for name in products}
    if not own_names.isdisjoint(_PAIRS):
        yield build_gated_activation_kernel(family.activation, OutputType.F16)
    adds_experts = not own_names.isdisjoint((_EXPERT_DOWN,)) and plan.shape.architecture not in HAS_POST_NORMS
    has_biases = any(name.endswith(_BIAS) and name.removesuffix(_BIAS) in products for name in vectors)
    if adds_experts or has_biases or _OWN_EMBEDDING in products:
        yield build_add_kernel()
    for name, geometry in products.items():
        if name == _OWN_EMBEDDING:
            continue
        if name.endswith(_EXPERTS):
            yield from _expert_kernels(name, geometry, plan, family, name + _BIAS in vectors)
            continue
        if name.endswith(_HEADS):
            layer = plan.shape.layers[int(name.split(".")[1])]
            yield from _head_kernels(geometry, layer.n_head)
            continue
        if not (name.endswith(ROUTER) and geometry.weight_type is GGMLQuantizationType.F32):
            yield build_dequantise_rows_kernel(geometry.weight_type, OutputType.F16)
        yield from _decode_product(name, products, family)


def _head_kernels(geometry: WeightGeometry, n_head: int) -> Iterator[Kernel]:
    """What a product with a matrix for each head needs."""
    yield build_dequantise_rows_kernel(geometry.weight_type, OutputType.F16)
    yield build_take_heads_kernel(HeadInput.HALVES)
    yield build_take_heads_kernel(HeadInput.of(geometry.weight_type))
    yield head_matvec_launch(geometry.weight_type, 1, geometry.n_rows, geometry.n_rows // n_head)[0]


def _decode_product(name: str, products: Mapping[str, WeightGeometry], family: _Family) -> Iterator[Kernel]:
    """What ``operations.CudaOperations`` launches for one weight in a step of one token."""
    block, _, own = name.rpartition(".")
    geometry = products[name]
    weight_type, n_cols = geometry.weight_type, geometry.n_cols
    pair = next(((gate, up) for gate, up in _PAIRS.items() if own in (gate, up)), None)
    if pair is not None and products[f"{block}.{pair[0]}"] == products[f"{block}.{pair[1]}"]:
        is_normed = gated_takes_floats(weight_type, 1, geometry.n_rows, n_cols)
        kind = VectorInput.NORMED if is_normed else VectorInput.QUANTS
        if is_normed and own.endswith(_SHARED):
            kind = VectorInput.FLOATS  # the norm was done for the experts before
        yield gated_kernel(weight_type, 1, geometry.n_rows, n_cols, family.activation, kind=kind).kernel
        if not is_normed and n_cols % QUANT_BLOCK == 0:
            yield build_norm_quantise_kernel()
        return
    together = _together(block, own, products)
    rows = [one.n_rows for one in together if one.weight_type is weight_type]
    is_quantised = own == _DELTA_OUTPUT or (own == _ATTENTION_OUTPUT and family.leaves_quants)
    kind = VectorInput.QUANTS
    if not is_quantised and len(rows) == len(together) and takes_floats(weight_type, 1, rows, n_cols):
        kind = VectorInput.FLOATS if own in family.plain + family.second else VectorInput.NORMED
    yield product_kernel(weight_type, 1, rows, n_cols, is_added=own in family.added, kind=kind).kernel
    if kind is not VectorInput.QUANTS:
        return
    if own not in family.plain + family.second and n_cols % QUANT_BLOCK == 0:
        yield build_norm_quantise_kernel()
    if own in family.plain and not is_quantised and not takes_float_activations(weight_type):
        yield build_quantise_kernel()


def _together(block: str, own: str, products: Mapping[str, WeightGeometry]) -> list[WeightGeometry]:
    """Matrices of one launch, this one among them; where values have none, that of the keys counts twice."""
    for names in _TOGETHER:
        if own in names and f"{block}.{names[0]}" in products:
            found = [products[f"{block}.{name}"] for name in names if f"{block}.{name}" in products]
            return found + found[1:] if names[-1] == "attn_v" and len(found) == 2 else found
    return [products[f"{block}.{own}" if block else own]]


def _expert_kernels(
    name: str, geometry: WeightGeometry, plan: RunPlan, family: _Family, has_bias: bool
) -> Iterator[Kernel]:
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
    activation = family.expert_activation
    yield one_token_gated_kernel(geometry, experts.n_ff, activation, has_bias=has_bias, chosen=chosen)
    yield build_expert_tiles_kernel(weight_type, tile_pairs, activation, has_bias)
