"""Which small kernels on rows a session launches: norms, factors, caps and gates. A part of ``needed_kernels``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from cuda_kernels.activation import Activation, build_gated_activation_kernel
from cuda_kernels.add_normed import build_add_normed_kernel, build_add_normed_pair_kernel
from cuda_kernels.dequant import OutputType, build_dequantise_rows_kernel
from cuda_kernels.head_norms import build_norm_heads_kernel
from cuda_kernels.launch import Kernel
from cuda_kernels.needed_products import HAS_POST_NORMS
from cuda_kernels.norm import build_rms_norm_kernel
from cuda_kernels.quantise import QUANT_BLOCK
from cuda_kernels.scaling import (
    build_scale_kernel,
    build_softcap_kernel,
    build_softplus_gate_kernel,
    build_take_columns_kernel,
)
from cuda_kernels.weights import WeightGeometry
from kvs_core.model_shape import ModelShape

_HEAD_NORMS, _LATENT_NORM = (".attn_q_norm", ".attn_k_norm", "per_layer_proj_norm"), ".attn_kv_a_norm"
_OWN_EMBEDDING = "per_layer_token_embd"
_LAYER_SCALE = ".layer_output_scale"


def row_kernels(
    shape: ModelShape, products: Mapping[str, WeightGeometry], vectors: Collection[str]
) -> Iterator[Kernel]:
    """``vectors``: names of the weights that are no matrices."""
    if shape.n_embd % QUANT_BLOCK or any(name.endswith((*_HEAD_NORMS, _LATENT_NORM)) for name in vectors):
        yield build_rms_norm_kernel(OutputType.F32)
    if any(name.endswith(_HEAD_NORMS) for name in vectors):
        yield build_norm_heads_kernel()
    if shape.architecture in HAS_POST_NORMS:
        yield build_scale_kernel()
        yield build_add_normed_kernel(False)
    if shape.architecture == "gemma4":
        is_scaled = any(name.endswith(_LAYER_SCALE) for name in vectors)
        if any(layer.experts is not None for layer in shape.layers):
            yield build_add_normed_pair_kernel(is_scaled)
        elif is_scaled:
            yield build_add_normed_kernel(True)
    if shape.logit_softcap:
        yield build_softcap_kernel()
    if shape.architecture == "gemma4":
        yield build_rms_norm_kernel(OutputType.F32, False)
    if _OWN_EMBEDDING in products:
        yield build_dequantise_rows_kernel(products[_OWN_EMBEDDING].weight_type, OutputType.F32)
        yield build_take_columns_kernel()
        yield build_gated_activation_kernel(Activation.GELU_TANH, OutputType.F32)
    if shape.architecture == "laguna":
        yield build_softplus_gate_kernel()
