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
    dequant,
    elementwise,
    matvec,
    merge,
    norm,
    page_copy,
    rope,
    sampling_reduce,
    store,
    weights,
)
from kvs_core.kv_types import KvType, PageGeometry

HEAD_DIMS = (64, 80, 96, 128, 192, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One specialisation of a kernel."""

    name: str
    build: Callable[[], Any]


def page_of(type_k: KvType, type_v: KvType, head_dim: int) -> PageGeometry:
    return PageGeometry(
        page_tokens=256, n_head_kv=8, head_dim_k=head_dim, head_dim_v=head_dim, type_k=type_k, type_v=type_v
    )


def attention_entries() -> list[Entry]:
    """Both uses of every pair of types and head size."""
    entries = []
    for type_k, type_v, head_dim in product(KvType, KvType, HEAD_DIMS):
        if head_dim % type_k.block_elements or head_dim % type_v.block_elements:
            continue
        page = page_of(type_k, type_v, head_dim)
        case = f"{type_k.value}-{type_v.value}-{head_dim}"
        decode = partial(attention_decode.decode_kernel, page, 6)
        entries.append(Entry(name=f"attention_decode-{case}", build=lambda decode=decode: decode()[0]))
        prefill = partial(attention_prefill.build_attention_prefill_kernel, page, 6)
        entries.append(Entry(name=f"attention_prefill-{case}", build=prefill))
    return entries


def other_entries() -> list[Entry]:
    """Everything that is not attention."""
    entries = []
    for weight_type in weights.FAST_TYPES:
        for n_vectors in range(1, matvec.MAX_VECTORS + 1):
            n_rows = matvec.count_warp_rows(weight_type, n_vectors)
            build = partial(matvec.build_matvec_kernel, weight_type, n_vectors, n_rows)
            entries.append(Entry(name=f"matvec-{weight_type.name}-{n_vectors}", build=build))
        for output in dequant.OutputType:
            build = partial(dequant.build_dequantise_rows_kernel, weight_type, output)
            entries.append(Entry(name=f"dequantise_rows-{weight_type.name}-{output.name}", build=build))
        geometry = weights.WeightGeometry(weight_type=weight_type, n_rows=1, n_cols=256)
        if geometry.is_split:
            build = partial(weights.build_split_planes_kernel, geometry.fields, geometry.block_bytes)
            entries.append(Entry(name=f"split_planes-{weight_type.name}", build=build))
    for kv_type in KvType:
        page = page_of(kv_type, kv_type, 128)
        build = partial(store.build_store_rows_kernel, page.v_region, page.n_head_kv, page.v_offset)
        entries.append(Entry(name=f"store_rows-{kv_type.value}", build=build))
        entries.append(Entry(name=f"copy_rows-{kv_type.value}", build=partial(page_copy.build_copy_rows_kernel, page)))
    for head_dim in HEAD_DIMS:
        build = partial(merge.build_merge_partials_kernel, 32, head_dim)
        entries.append(Entry(name=f"merge_partials-{head_dim}", build=build))
    for pairing in rope.RopePairing:
        entries.append(Entry(name=f"rope-{pairing.value}", build=partial(rope.build_rope_kernel, pairing)))
    for kind in activation.Activation:
        build = partial(activation.build_gated_activation_kernel, kind)
        entries.append(Entry(name=f"gated_activation-{kind.value}", build=build))
    singles = (
        matvec.build_quantise_activations_kernel,
        activation.build_to_half_kernel,
        elementwise.build_log_position_kernel,
        norm.build_rms_norm_kernel,
        norm.build_add_rms_norm_kernel,
        page_copy.build_copy_pages_kernel,
        sampling_reduce.build_row_summary_kernel,
        sampling_reduce.build_top_k_kernel,
    )
    for build_kernel in singles:
        entries.append(Entry(name=build_kernel.__name__.removeprefix("build_"), build=build_kernel))
    return entries
