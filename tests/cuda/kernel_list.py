"""Every kernel of ``cuda_kernels``, specialised for what models need; built lazily, because building is not free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from cuda_kernels import (
    activation,
    attention_decode,
    attention_prefill,
    convolution,
    delta_net,
    dequant,
    elementwise,
    gated_matvec,
    matvec,
    merge,
    norm,
    page_copy,
    quantise,
    rope,
    rotate_store,
    sampling_reduce,
    store,
    weights,
)
from cuda_kernels.attention_prefill_wgmma import build_attention_prefill_wgmma_kernel
from kvs_core.cuda_scratch import CUDA_KV_TYPES, WGMMA_CAPABILITY
from kvs_core.kv_types import KvType, PageGeometry
from kvs_core.recurrent_shape import RecurrentShape

HEAD_DIMS = (64, 80, 96, 128, 192, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One specialisation of a kernel.

    turn    sum of the indices of what it is specialised for: neighbours in any one of them have different turns,
            so that turns modulo a small number spread over every type and size
    only    the one device generation that the kernel is for
    """

    name: str
    build: Callable[[], Any]
    turn: int = 0
    only: tuple[int, int] | None = None

    @property
    def family(self) -> str:
        return self.name.partition("-")[0]


def page_of(type_k: KvType, type_v: KvType, head_dim: int) -> PageGeometry:
    return PageGeometry(
        page_tokens=256, n_head_kv=8, head_dim_k=head_dim, head_dim_v=head_dim, type_k=type_k, type_v=type_v
    )


def attention_entries() -> list[Entry]:
    """Both uses of every pair of types and head size."""
    entries = []
    pairs = list(product(CUDA_KV_TYPES, CUDA_KV_TYPES))
    for (pair_idx, (type_k, type_v)), (dim_idx, head_dim) in product(enumerate(pairs), enumerate(HEAD_DIMS)):
        if head_dim % type_k.block_elements or head_dim % type_v.block_elements:
            continue
        page = page_of(type_k, type_v, head_dim)
        case = f"{type_k.value}-{type_v.value}-{head_dim}"
        decode = partial(attention_decode.decode_kernel, page, 6)
        turn = pair_idx + dim_idx
        entries.append(Entry(name=f"attention_decode-{case}", build=decode, turn=turn))
        prefill = partial(attention_prefill.build_attention_prefill_kernel, page, 6)
        entries.append(Entry(name=f"attention_prefill-{case}", build=prefill, turn=turn))
    return entries


def generation_entries() -> list[Entry]:
    """Kernels for devices of compute capability 9.0 alone."""
    entries = []
    for type_k, type_v, head_dim in product((KvType.F16, KvType.Q8_0), (KvType.F16, KvType.Q8_0), (64, 128, 256)):
        build = partial(build_attention_prefill_wgmma_kernel, page_of(type_k, type_v, head_dim), 6)
        name = f"attention_prefill_wgmma-{type_k.value}-{type_v.value}-{head_dim}"
        entries.append(Entry(name=name, build=build, only=WGMMA_CAPABILITY))
    return entries


def other_entries() -> list[Entry]:
    """Everything that is not attention."""
    entries = []
    for type_idx, weight_type in enumerate(weights.FAST_TYPES):
        for n_vectors in range(1, matvec.MAX_VECTORS + 1):
            is_added = n_vectors % 2 == 0
            n_rows = matvec.count_warp_rows(weight_type, n_vectors)
            n_blocks = matvec.count_min_blocks(weight_type, n_vectors, 14336)
            build = partial(matvec.build_matvec_kernel, weight_type, n_vectors, n_rows, is_added, n_blocks)
            name = f"matvec-{weight_type.name}-{n_vectors}"
            entries.append(Entry(name=name, build=build, turn=type_idx + n_vectors))
            n_rows = gated_matvec.count_warp_rows(n_vectors)
            build = partial(gated_matvec.build_gated_matvec_kernel, weight_type, n_vectors, n_rows)
            name = f"gated_matvec-{weight_type.name}-{n_vectors}"
            entries.append(Entry(name=name, build=build, turn=type_idx + n_vectors))
        for output_idx, output in enumerate(dequant.OutputType):
            build = partial(dequant.build_dequantise_rows_kernel, weight_type, output)
            name = f"dequantise_rows-{weight_type.name}-{output.name}"
            entries.append(Entry(name=name, build=build, turn=type_idx + output_idx))
        geometry = weights.WeightGeometry(weight_type=weight_type, n_rows=1, n_cols=256)
        if geometry.is_split:
            build = partial(weights.build_split_planes_kernel, geometry.fields, geometry.block_bytes)
            entries.append(Entry(name=f"split_planes-{weight_type.name}", build=build, turn=type_idx))
    for kv_type in CUDA_KV_TYPES:
        page = page_of(kv_type, kv_type, 128)
        build = partial(store.build_store_rows_kernel, page.v_region, page.n_head_kv, page.v_offset)
        entries.append(Entry(name=f"store_rows-{kv_type.value}", build=build))
        entries.append(Entry(name=f"copy_rows-{kv_type.value}", build=partial(page_copy.build_copy_rows_kernel, page)))
        for pairing in rope.RopePairing:
            build = partial(rotate_store.build_rotate_store_kernel, page, 32, 64, pairing)
            entries.append(Entry(name=f"rotate_store-{kv_type.value}-{pairing.value}", build=build))
    for dim_idx, head_dim in enumerate(HEAD_DIMS):
        build = partial(merge.build_merge_partials_kernel, 32, head_dim)
        entries.append(Entry(name=f"merge_partials-{head_dim}", build=build, turn=dim_idx))
    for pairing in rope.RopePairing:
        entries.append(Entry(name=f"rope-{pairing.value}", build=partial(rope.build_rope_kernel, pairing)))
    for kind in activation.Activation:
        for output in dequant.OutputType:
            build = partial(activation.build_gated_activation_kernel, kind, output)
            entries.append(Entry(name=f"gated_activation-{kind.value}-{output.name}", build=build))
    for output in dequant.OutputType:
        entries.append(Entry(name=f"rms_norm-{output.name}", build=partial(norm.build_rms_norm_kernel, output)))
    singles = (
        elementwise.build_write_step_kernel,
        quantise.build_quantise_kernel,
        quantise.build_norm_quantise_kernel,
        activation.build_to_half_kernel,
        elementwise.build_log_position_kernel,
        page_copy.build_copy_pages_kernel,
        sampling_reduce.build_row_summary_kernel,
        sampling_reduce.build_top_k_kernel,
        elementwise.build_split_groups_kernel,
        elementwise.build_sigmoid_mul_kernel,
        convolution.build_keep_inputs_kernel,
        delta_net.build_delta_gates_kernel,
    )
    for build_kernel in singles:
        entries.append(Entry(name=build_kernel.__name__.removeprefix("build_"), build=build_kernel))
    return entries


def recurrent_entries() -> list[Entry]:
    """Kernels of recurrent layers: heads as models have them, and the smallest."""
    entries = []
    for head_dim, groups_values in ((128, False), (32, True)):
        sizes = RecurrentShape(n_head_k=16, n_head_v=48, head_dim=head_dim, n_taps=4, groups_values=groups_values)
        for name, build in (
            ("delta_net_step", partial(delta_net.step_kernel, sizes)),
            ("delta_net_prompt", partial(delta_net.prompt_kernel, sizes)),
            ("short_convolution", partial(convolution.build_short_convolution_kernel, sizes)),
            ("norm_gate", partial(delta_net.build_norm_gate_kernel, head_dim)),
        ):
            entries.append(Entry(name=f"{name}-{head_dim}", build=build))
    return entries


def every_entry() -> list[Entry]:
    return attention_entries() + generation_entries() + recurrent_entries() + other_entries()
