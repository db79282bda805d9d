"""Every kernel of ``cuda_kernels``, specialised for what models need; built lazily, because building is not free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gguf import GGMLQuantizationType

from cuda_kernels import (
    activation,
    add_normed,
    attention_decode,
    attention_prefill,
    convolution,
    delta_gates,
    delta_net,
    dequant,
    elementwise,
    expert_matvec,
    expert_prefill,
    expert_ring,
    expert_stream,
    gated_matvec,
    head_matvec,
    head_norms,
    matvec,
    matvec_stream,
    matvec_team,
    merge,
    norm,
    page_copy,
    quantise,
    rope,
    rotate_heads,
    rotate_store,
    routing,
    sampling_reduce,
    scaling,
    sigmoid_gate,
    store,
    team_tiles,
    weight_ring,
    weight_units,
    weights,
)
from cuda_kernels.attention_decode_columns import has_columns
from cuda_kernels.attention_prefill_wgmma import build_attention_prefill_wgmma_kernel
from cuda_kernels.attention_prefill_wide import build_attention_prefill_wide_kernel
from cuda_kernels.vector_input import VectorInput
from kvs_core.cuda_scratch import WGMMA_CAPABILITY
from kvs_core.kv_rotation import Rotation, choose_rotations
from kvs_core.kv_types import KvType, PageGeometry
from kvs_core.recurrent_shape import RecurrentShape

LOW_BIT_TYPES = tuple(GGMLQuantizationType[name] for name in ("Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4"))
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
WIDE_DIM, LATENT_DIMS = 512, (576, 512)
GATES = (activation.Activation.SILU, activation.Activation.GELU_TANH)
"""What gate and up end in where they are one product."""
N_GENERATIONS = 5  # of devices that kernels are compiled for (`scripts.cuda_checks.assemble`)

Case = tuple[KvType, KvType, tuple[int, int]]
"""Types of keys and of values, and head sizes of both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One specialisation of a kernel.

    turn    sum of the indices of what it is specialised for: neighbours in any one of them have different turns,
            so that turns modulo a small number spread over every type and size
    only    the one device generation that the kernel is for
    in_tests    False: only ``scripts.compile_cuda`` compiles it; others of its family and of its weight type are tested
    """

    name: str
    build: Callable[[], Any]
    turn: int = 0
    only: tuple[int, int] | None = None
    in_tests: bool = True

    @property
    def family(self) -> str:
        return self.name.partition("-")[0]


def page_of(type_k: KvType, type_v: KvType, head_dim: int) -> PageGeometry:
    return PageGeometry(
        page_tokens=256, n_head_kv=8, head_dim_k=head_dim, head_dim_v=head_dim, type_k=type_k, type_v=type_v
    )


def decode_entries() -> list[Entry]:
    """Decode attention: the cases of prefill attention, and every type in both places with the usual head sizes."""
    cases = prefill_cases()
    cases += [(kv_type, kv_type, (head_dim, head_dim)) for kv_type in KvType for head_dim in (128, 256)]
    cases = list(dict.fromkeys(cases))
    entries = []
    for (type_k, type_v, head_dims), turn in zip(cases, choose_turns(cases, N_GENERATIONS), strict=True):
        page = replace(page_of(type_k, type_v, head_dims[0]), head_dim_v=head_dims[1])
        name = f"attention_decode-{type_k.value}-{type_v.value}-{'_'.join(map(str, dict.fromkeys(head_dims)))}"
        entries.append(Entry(name=name, build=partial(attention_decode.decode_kernel, page, 6, 1), turn=turn))
        if type_v.is_turbo:  # few query rows
            build = partial(attention_decode.decode_kernel, page, 4, 1)
            entries.append(Entry(name=name.replace("decode", "decode_narrow", 1), build=build, turn=turn))
    return entries


def prefill_cases() -> list[Case]:
    """Every type as keys and as values, with three head sizes where it fits so many; heads that were padded."""
    cases = []
    for type_idx, type_k in enumerate(KvType):
        head_dims = [head_dim for head_dim in HEAD_DIMS if head_dim % type_k.block_elements == 0]
        for i in range(3):
            head_dim = head_dims[(type_idx + 5 * i) % len(head_dims)]
            fitting = [kv_type for kv_type in KvType if head_dim % kv_type.block_elements == 0]
            type_v = fitting[(fitting.index(type_k) + 6 * i) % len(fitting)]
            cases.append((type_k, type_v, (head_dim, head_dim)))
    padded = [(KvType.TURBO4, KvType.F16, (128, 80)), (KvType.BF16, KvType.TURBO3, (80, 128))]
    return list(dict.fromkeys(cases + padded))


def choose_turns(cases: Sequence[Case], n_turns: int) -> list[int]:
    """A turn for every case; cases that share a type or a head size get different ones while there are any left.

    Types count more, because fewer cases share one; cases of one type of values choose one after the other.
    """
    weights = (3, 3, 1)
    used: Counter[Any] = Counter()
    turns = [0] * len(cases)
    for case_idx in sorted(range(len(cases)), key=lambda case_idx: str(cases[case_idx][1])):
        shared = list(enumerate(cases[case_idx]))
        turn = min(
            range(n_turns), key=lambda turn: (sum(weights[part[0]] * used[part, turn] for part in shared), used[turn])
        )
        used.update([turn, *((part, turn) for part in shared)])
        turns[case_idx] = turn
    return turns


def prefill_entries() -> list[Entry]:
    """Prefill attention for every device."""
    entries = []
    cases = prefill_cases()
    for (type_k, type_v, head_dims), turn in zip(cases, choose_turns(cases, N_GENERATIONS), strict=True):
        page = replace(page_of(type_k, type_v, head_dims[0]), head_dim_v=head_dims[1])
        build = partial(attention_prefill.build_attention_prefill_kernel, page, 6, 0.0, False)
        name = f"attention_prefill-{type_k.value}-{type_v.value}-{'_'.join(map(str, dict.fromkeys(head_dims)))}"
        entries.append(Entry(name=name, build=build, turn=turn))
    return entries


def wide_entries() -> list[Entry]:
    """Attention of heads of 512 and of latent caches: every type as keys, as values and as both."""
    types, entries = list(KvType), []
    for i, kv_type in enumerate(types):
        type_v = types[(i + 5) % len(types)]
        pages = [(page_of(kv_type, type_v, WIDE_DIM), f"{kv_type.value}-{type_v.value}-{WIDE_DIM}", 8)]
        if i % 2 == 0:
            pages.append((page_of(kv_type, kv_type, WIDE_DIM), f"{kv_type.value}-{kv_type.value}-{WIDE_DIM}", 8))
        latent = replace(page_of(kv_type, kv_type, LATENT_DIMS[0]), n_head_kv=1, head_dim_v=LATENT_DIMS[1], v_in_k=True)
        pages.append((latent, f"{kv_type.value}-{kv_type.value}-latent", (128, 16)[i % 2]))
        for page_idx, (page, name, ratio) in enumerate(pages):
            turn = i + 2 * page_idx
            build = partial(attention_decode.decode_kernel, page, ratio, 1)
            family = "columns" if has_columns(page) else "wide"
            entries.append(Entry(name=f"attention_decode_{family}-{name}", build=build, turn=turn))
            build = partial(build_attention_prefill_wide_kernel, page, ratio)
            entries.append(Entry(name=f"attention_prefill_wide-{name}", build=build, turn=turn + 1))
    return entries


def generation_entries() -> list[Entry]:
    """Prefill attention for devices of compute capability 9.0 alone: every type as keys and as values."""
    types, head_dims = [kv_type for kv_type in KvType if kv_type is not KvType.F32], (64, 128, 256)
    cases = [(KvType.F16, KvType.F16, head_dim) for head_dim in head_dims]
    cases += [(KvType.Q8_0, KvType.Q8_0, head_dim) for head_dim in head_dims]
    cases += [(type_k, types[(i + 4) % len(types)], head_dims[i % 3]) for i, type_k in enumerate(types)]
    entries = []
    for type_k, type_v, head_dim in cases:
        build = partial(build_attention_prefill_wgmma_kernel, page_of(type_k, type_v, head_dim), 6, 0.0, False)
        name = f"attention_prefill_wgmma-{type_k.value}-{type_v.value}-{head_dim}"
        entries.append(Entry(name=name, build=build, only=WGMMA_CAPABILITY))
    return [*entries, *streaming_entries()]


def rule_entries() -> list[Entry]:
    """Attention under a window, a cap on scores and with sinks, at the head sizes of models that have them."""
    entries = []
    cases = [(KvType.F16, 256), (KvType.Q8_0, 128), (KvType.TURBO3, 128), (KvType.F32, 256), (KvType.Q4_0, 64)]
    for turn, (kv_type, head_dim) in enumerate(cases):
        page = page_of(kv_type, kv_type, head_dim)
        what = f"{kv_type.value}-{kv_type.value}-{head_dim}"
        for in_window, softcap in ((True, 0.0), (True, 50.0), (False, 50.0)):
            name = f"attention_decode{'_window' * in_window}{'_capped' * bool(softcap)}-{what}"
            build = partial(attention_decode.decode_kernel, page, 6, 1, in_window=in_window, softcap=softcap)
            entries.append(Entry(name=name, build=build, turn=turn))
        for softcap, has_sinks in ((50.0, False), (0.0, True)):
            kind = "capped" if softcap else "sinks"
            build = partial(attention_prefill.build_attention_prefill_kernel, page, 6, softcap, has_sinks)
            entries.append(Entry(name=f"attention_prefill_{kind}-{what}", build=build, turn=turn))
            if kv_type is not KvType.F32:
                build = partial(build_attention_prefill_wgmma_kernel, page, 6, softcap, has_sinks)
                name = f"attention_prefill_wgmma_{kind}-{what}"
                entries.append(Entry(name=name, build=build, only=WGMMA_CAPABILITY))
    for in_window, has_sinks in ((True, False), (False, True), (True, True)):
        name = f"merge_partials{'_window' * in_window}{'_sinks' * has_sinks}-64"
        build = partial(merge.build_merge_partials_kernel, 32, 64, in_window, has_sinks)
        entries.append(Entry(name=name, build=build))
    return entries


def streaming_entries() -> list[Entry]:
    """Products that stream their weights: each input with each type, and every number of vectors with one of them."""
    cases = [(weight_type, 1, kind) for weight_type in weight_ring.STREAMED_TYPES for kind in VectorInput]
    for n_vectors in range(2, matvec.MAX_VECTORS + 1):
        weight_type = weight_ring.STREAMED_TYPES[n_vectors % len(weight_ring.STREAMED_TYPES)]
        cases.append((weight_type, n_vectors, VectorInput.QUANTS))
    entries = []
    for index, (weight_type, n_vectors, kind) in enumerate(cases):
        ring_of = weight_ring.gated_ring if index % 2 else weight_ring.product_ring
        ring = ring_of(weight_type, n_vectors, 4096, 14336)
        gate = GATES[index // 2 % 2]
        build = partial(matvec_stream.build_stream_matvec_kernel, ring, n_vectors, index % 4 == 0, kind, gate)
        name = f"stream_matvec-{weight_type.name}-{n_vectors}-{kind.value}{'-gated' * (index % 2)}"
        entries.append(Entry(name=name, build=build, only=matvec_stream.STREAM_CAPABILITY))
    return entries


def team_entries() -> list[Entry]:
    """Of several vectors with weights of two and three bits."""
    entries = []
    cases = [(weight_type, n) for weight_type in team_tiles.TEAM_TYPES for n in (2, 4, 5, 8)]
    for turn, (weight_type, n_vectors) in enumerate(cases):
        for kind in (None, GATES[turn % 2]):
            is_added = kind is None and turn % 2 == 0
            arguments = (weight_type, n_vectors, 1792, is_added, 3, kind)
            name = f"team_matvec-{weight_type.name}-{n_vectors}{'-gated' * (kind is not None)}"
            build = partial(matvec_team.build_team_matvec_kernel, *arguments)
            in_tests = n_vectors in (4, 8) and (kind is None) == (turn % 4 < 2)
            entries.append(Entry(name=name, build=build, turn=turn + (kind is None), in_tests=in_tests))
    return entries


def other_entries() -> list[Entry]:
    """Everything that is not attention."""
    entries = team_entries()
    for type_idx, weight_type in enumerate(weights.FAST_TYPES):
        for n_vectors in range(1, matvec.MAX_VECTORS + 1):
            is_added = n_vectors % 2 == 0
            n_rows = matvec.count_warp_rows(weight_type, n_vectors, 14336)
            n_blocks = matvec.count_min_blocks(weight_type, n_vectors, 14336)
            build = partial(matvec.build_matvec_kernel, weight_type, n_vectors, n_rows, is_added, n_blocks)
            name = f"matvec-{weight_type.name}-{n_vectors}"
            is_often_used = weight_type not in LOW_BIT_TYPES
            in_tests = is_often_used or n_vectors == 1 or (n_vectors == 4 and type_idx % 2 == 0)
            entries.append(Entry(name=name, build=build, turn=type_idx + n_vectors, in_tests=in_tests))
            n_rows = gated_matvec.count_warp_rows(weight_type, n_vectors)
            kind = GATES[(type_idx + n_vectors) % len(GATES)]
            build = partial(gated_matvec.build_gated_matvec_kernel, weight_type, n_vectors, n_rows, kind)
            name = f"gated_matvec-{weight_type.name}-{n_vectors}"
            in_tests = is_often_used or n_vectors == 1
            entries.append(Entry(name=name, build=build, turn=type_idx + n_vectors, in_tests=in_tests))
        for output_idx, output in enumerate(dequant.OutputType):
            build = partial(dequant.build_dequantise_rows_kernel, weight_type, output)
            name = f"dequantise_rows-{weight_type.name}-{output.name}"
            entries.append(Entry(name=name, build=build, turn=type_idx + output_idx))
        geometry = weights.WeightGeometry(weight_type=weight_type, n_rows=1, n_cols=256)
        if geometry.is_rearranged:
            if weight_type is GGMLQuantizationType.Q6_K:
                build = weights.build_rearrange_q6_k_kernel
            elif weight_type is GGMLQuantizationType.Q2_K:
                build = weights.build_rearrange_q2_k_kernel
            elif weight_type is GGMLQuantizationType.Q3_K:
                build = weights.build_rearrange_q3_k_kernel
            elif weight_type in weight_units.LEVEL_NUMBERS:
                build = partial(weights.build_number_levels_kernel, weight_units.LEVEL_NUMBERS[weight_type])
            elif geometry.is_split:
                build = partial(weights.build_rearrange_bits_kernel, geometry.block_bytes)
            else:
                build = partial(weights.build_rearrange_kernel, geometry.block_bytes)
            entries.append(Entry(name=f"rearrange-{weight_type.name}", build=build, turn=type_idx))
        if geometry.is_split and weight_type.name not in ("Q2_K", "Q3_K", "Q6_K"):
            build = partial(weights.build_split_planes_kernel, geometry.fields, geometry.block_bytes)
            entries.append(Entry(name=f"split_planes-{weight_type.name}", build=build, turn=type_idx))
    for type_idx, kv_type in enumerate(KvType):
        page = page_of(kv_type, kv_type, 128)
        build = partial(store.build_store_rows_kernel, page.v_region, page.n_head_kv, page.v_offset)
        entries.append(Entry(name=f"store_rows-{kv_type.value}", build=build, turn=type_idx))
        rotations = choose_rotations(page, plain_types=type_idx % 2 == 0)
        pairing = (rope.RopePairing.ADJACENT, rope.RopePairing.HALVES)[type_idx // 2 % 2]
        build = partial(rotate_store.rotate_store_kernel, page, 32, 64, pairing, rotations)
        entries.append(Entry(name=f"rotate_store-{kv_type.value}-{pairing.value}", build=build, turn=type_idx))
    for rotation in (Rotation(size=64), Rotation(size=256), Rotation(size=128, is_signed=True)):
        build = partial(rotate_heads.build_rotate_heads_kernel, rotation, rotation.is_signed, rotation.is_signed)
        entries.append(Entry(name=f"rotate_heads-{rotation.size}", build=build))
    for dim_idx, head_dim in enumerate((*HEAD_DIMS, WIDE_DIM)):
        build = partial(merge.build_merge_partials_kernel, 32, head_dim, False, False)
        entries.append(Entry(name=f"merge_partials-{head_dim}", build=build, turn=dim_idx))
    for pairing in rope.RopePairing:
        entries.append(Entry(name=f"rope-{pairing.value}", build=partial(rope.build_rope_kernel, pairing)))
    for kind_idx, kind in enumerate(head_matvec.HeadInput):
        build = partial(head_matvec.build_take_heads_kernel, kind)
        entries.append(Entry(name=f"take_heads-{kind.value}", build=build, turn=kind_idx))
    for type_idx, weight_type in enumerate(weights.FAST_TYPES):
        n_vectors = (1, 8, 2)[type_idx % 3]
        build = partial(_head_matvec_kernel, weight_type, n_vectors)
        entries.append(Entry(name=f"head_matvec-{weight_type.name}-{n_vectors}", build=build, turn=type_idx))
    for kind in activation.Activation:
        for output in dequant.OutputType:
            build = partial(activation.build_gated_activation_kernel, kind, output)
            entries.append(Entry(name=f"gated_activation-{kind.value}-{output.name}", build=build))
    for output in dequant.OutputType:
        entries.append(Entry(name=f"rms_norm-{output.name}", build=partial(norm.build_rms_norm_kernel, output)))
    entries.append(
        Entry(name="rms_norm-unweighted", build=partial(norm.build_rms_norm_kernel, dequant.OutputType.F32, False))
    )
    for is_scaled in (False, True):
        for build_kernel in (add_normed.build_add_normed_kernel, add_normed.build_add_normed_pair_kernel):
            name = build_kernel.__name__.removeprefix("build_").removesuffix("_kernel")
            entries.append(Entry(name=f"{name}-{is_scaled}", build=partial(build_kernel, is_scaled)))
    singles = (
        elementwise.build_write_step_kernel,
        elementwise.build_resize_heads_kernel,
        quantise.build_quantise_kernel,
        quantise.build_norm_quantise_kernel,
        activation.build_to_half_kernel,
        elementwise.build_log_position_kernel,
        page_copy.build_copy_pages_kernel,
        sampling_reduce.build_row_summary_kernel,
        sampling_reduce.build_top_k_kernel,
        elementwise.build_split_groups_kernel,
        elementwise.build_sigmoid_mul_kernel,
        head_norms.build_norm_heads_kernel,
        scaling.build_scale_kernel,
        scaling.build_softcap_kernel,
        scaling.build_softplus_gate_kernel,
        scaling.build_take_columns_kernel,
        convolution.build_keep_inputs_kernel,
        delta_gates.build_delta_gates_kernel,
    )
    for build_kernel in singles:
        entries.append(Entry(name=build_kernel.__name__.removeprefix("build_"), build=build_kernel))
    return entries


def _head_matvec_kernel(weight_type: GGMLQuantizationType, n_vectors: int) -> Any:
    return head_matvec.head_matvec_launch(weight_type, n_vectors, 16 * 512, 512)[0]


def expert_entries() -> list[Entry]:
    """Products of experts; biases and activations in turn, as no type is bound to one."""
    entries = []
    kinds = list(activation.Activation)
    for i, weight_type in enumerate(weights.FAST_TYPES):
        build = partial(
            expert_matvec.build_expert_gated_kernel,
            weight_type,
            kinds[i % len(kinds)],
            expert_matvec.GATED_WARP_ROWS,
            i % 2 == 1,
        )
        entries.append(
            Entry(name=f"expert_gated-{weight_type.name}", build=build, turn=i, in_tests=i in (1, 3, 5, 7, 9))
        )
        build = partial(
            expert_matvec.build_expert_sum_kernel, weight_type, 8, expert_matvec.count_sum_rows(weight_type)
        )
        entries.append(Entry(name=f"expert_sum-{weight_type.name}", build=build, turn=i, in_tests=i in (0, 2, 4, 6, 8)))
        for tile_idx, tile_pairs in enumerate((expert_prefill.FEW_PAIRS, expert_prefill.MANY_PAIRS)):
            for kind in (kinds[i % len(kinds)], None):
                build = partial(
                    expert_prefill.build_expert_tiles_kernel, weight_type, tile_pairs, kind, (i + tile_idx) % 2 == 1
                )
                use = "gated" if kind else "products"
                name = f"expert_tiles-{weight_type.name}-{tile_pairs}-{use}"
                is_its_turn = i in (0, 2, 4, 6, 10) and tile_idx == i // 2 % 2 and bool(kind) == bool(i // 4 % 2)
                entries.append(Entry(name=name, build=build, turn=i + tile_idx, in_tests=is_its_turn))
    entries += expert_stream_entries()
    singles = (
        routing.build_route_kernel,
        routing.build_count_experts_kernel,
        routing.build_combine_kernel,
        sigmoid_gate.build_sigmoid_gate_kernel,
        elementwise.build_add_kernel,
    )
    for build_kernel in singles:
        entries.append(Entry(name=build_kernel.__name__.removeprefix("build_"), build=build_kernel))
    entries.append(Entry(name="order_pairs", build=partial(routing.build_order_pairs_kernel, 64)))
    return entries


def expert_stream_entries() -> list[Entry]:
    """Experts that stream: one token with its choice, several without; biases and activations in turn."""
    entries = []
    kinds = list(activation.Activation)
    streamed = [weight_type for weight_type in weights.FAST_TYPES if expert_ring.can_be_ringed(weight_type)]
    for i, weight_type in enumerate(streamed):
        for n_tokens, n_expert in ((1, 128), (8, 0)):
            chosen = expert_stream.Chosen(n_used=8, n_expert=n_expert)
            gated = expert_stream.gated_expert_ring(weight_type, 2048, 768, n_tokens, 8)
            summed = expert_stream.sum_expert_ring(weight_type, 768, 2048, 8, n_tokens == 1)
            builds = {
                "gated": partial(
                    expert_stream.build_stream_gated_kernel, gated, kinds[i % len(kinds)], i % 2 == 1, chosen
                ),
                "sum": partial(expert_stream.build_stream_sum_kernel, summed, chosen),
            }
            for j, (use, build) in enumerate(builds.items()):
                name = f"stream_{use}-{weight_type.name}-{n_tokens}"
                in_tests = (i + j + n_tokens) % 3 == 0
                entries.append(Entry(name=name, build=build, only=matvec_stream.STREAM_CAPABILITY, in_tests=in_tests))
    return entries


def recurrent_entries() -> list[Entry]:
    """Kernels of recurrent layers, heads as models have them."""
    sizes = RecurrentShape(n_head_k=16, n_head_v=48, head_dim=128, n_taps=4, groups_values=False)
    return [
        Entry(name="delta_net_step-128", build=partial(delta_net.step_kernel, sizes)),
        Entry(name="delta_net_prompt-128", build=partial(delta_net.prompt_kernel, sizes)),
        Entry(name="short_convolution-128", build=partial(convolution.build_short_convolution_kernel, sizes)),
        Entry(name="norm_gate-128", build=partial(delta_gates.build_norm_gate_kernel, sizes.head_dim)),
    ]


def every_entry() -> list[Entry]:
    attention = decode_entries() + prefill_entries() + rule_entries() + wide_entries()
    return attention + generation_entries() + recurrent_entries() + other_entries() + expert_entries()
