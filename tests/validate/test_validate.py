"""Every rule of ``kvs_core.validate``: one changed field of a valid case trips exactly that rule (R4, U22 to U27)."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvs_core.config import (
    ArenaMode,
    ArenaRequest,
    FlashAttention,
    RopeOverrides,
    RunConfig,
)
from kvs_core.expert_shape import ExpertShape
from kvs_core.kv_layer_types import parse_layer_types
from kvs_core.kv_types import KvType
from kvs_core.latent_shape import LatentShape
from kvs_core.model_shape import LayerCache, LayerShape, ModelShape, RopeKind, RopeScaling, RopeShape
from kvs_core.units import MIB
from kvs_core.validate import RULES, Severity, find_warnings, validate
from tests.plan.shapes import LARGE_RECURRENT, make_hybrid_shape

N_LAYER = 2
N_CTX_TRAIN = 512
ARENA = ArenaRequest(mode=ArenaMode.FIXED, n_bytes=64 * MIB)
VALID = RunConfig(model_path=Path("model.gguf"), n_ctx=N_CTX_TRAIN, arena=ARENA)


def make_shape(
    *, head_dim: int = 64, n_head: int = 4, cache: LayerCache = LayerCache.FULL_KV, factor: float = 0.0
) -> ModelShape:
    layers = tuple(
        LayerShape(
            layer_idx=layer_idx,
            cache=cache,
            n_head=n_head,
            n_head_kv=2,
            head_dim_k=head_dim,
            head_dim_v=head_dim,
            n_ff=512,
        )
        for layer_idx in range(N_LAYER)
    )
    rope = RopeShape(
        kind=RopeKind.NORM,
        n_rot=head_dim,
        freq_base=10000.0,
        scaling=RopeScaling.LINEAR,
        factor=factor,
        n_ctx_orig=N_CTX_TRAIN,
        attn_factor=1.0,
        has_factors=False,
    )
    return ModelShape(
        architecture="llama",
        name="",
        n_embd=4 * head_dim,
        n_vocab=320,
        n_ctx_train=N_CTX_TRAIN,
        rms_eps=1e-5,
        layers=layers,
        rope=rope,
        tied_output=True,
        tensors_bytes=1000,
        weight_types=(),
        file_path="model.gguf",
    )


def with_experts(shape: ModelShape, n_expert: int) -> ModelShape:
    experts = ExpertShape(n_expert=n_expert, n_used=2, n_ff=512, normalises=True)
    return replace(shape, layers=tuple(replace(layer, n_ff=0, experts=experts) for layer in shape.layers))


def latent_shape(*, head_dim_k: int, head_dim_v: int) -> ModelShape:
    shape = make_shape(head_dim=head_dim_k, n_head=2, cache=LayerCache.LATENT_KV)
    return replace(shape, layers=tuple(replace(layer, head_dim_v=head_dim_v, n_head_kv=1) for layer in shape.layers))


def with_query_rank(q_rank: int) -> ModelShape:
    shape = latent_shape(head_dim_k=576, head_dim_v=512)
    latent = LatentShape(q_rank=q_rank, kv_rank=512, n_rot=64, key_dim=192, value_dim=128)
    layers = tuple(replace(layer, latent=latent) for layer in shape.layers)
    return replace(shape, architecture="deepseek2", layers=layers)


SHAPE = make_shape()


@dataclass(frozen=True, kw_only=True)
class Case:
    """``VALID`` with ``changes``, on ``shape``, breaks the rule ``rule``, which says ``reason``."""

    rule: str
    changes: dict[str, Any]
    reason: str
    shape: ModelShape | None = SHAPE
    also: tuple[str, ...] = ()  # rules that the same field breaks as well


def rope(**values: Any) -> dict[str, Any]:
    return {"rope": RopeOverrides(**values)}


CASES = (
    Case(
        rule="flash attention off",
        changes={"flash_attention": FlashAttention.OFF},
        reason="flash_attention off: there is only fused attention",
        shape=None,
    ),
    Case(
        rule="quantised V without flash attention",
        changes={"flash_attention": FlashAttention.OFF, "type_v": KvType.Q8_0},
        reason=r"type_v q8_0: a quantised V cache cannot be read with flash attention off \(-fa off\)",
        also=("flash attention off",),
    ),
    Case(rule="several sequences", changes={"n_parallel": 2}, reason="n_parallel 2: several sequences", shape=None),
    Case(rule="several sequences", changes={"n_parallel": 0}, reason="n_parallel 0: at least one sequence"),
    Case(
        rule="KV kept off the GPU",
        changes={"device": "cuda", "kv_offload": False},
        reason="kv_offload off: attention runs on the device",
    ),
    Case(
        rule="page size on a GPU",
        changes={"device": "cuda:GPU-12", "page_tokens": 32},
        reason="page_tokens 32: CUDA attention needs a multiple of 64",
        shape=None,
    ),
    Case(
        rule="turbo keys of many heads",
        changes={"type_k": KvType.TURBO4},
        reason="type_k turbo4: 6 query heads share each K head where keys are turbo",
        shape=make_shape(n_head=12),
    ),
    Case(
        rule="turbo keys of many heads in single layers",
        changes={"layer_types": parse_layer_types("first1:turbo3/")},
        reason="layer_types first1:turbo3/: 6 query heads share each K head where keys are turbo",
        shape=make_shape(n_head=12),
    ),
    Case(
        rule="layer types beyond the model",
        changes={"layer_types": parse_layer_types("0-1:q8_0,last3:q4_0")},
        reason="layer_types first2:q8_0/q8_0,last3:q4_0/q4_0: needs 3 layers that cache keys and values; "
        "this model has 2",
    ),
    Case(
        rule="types of single layers",
        changes={"layer_types": parse_layer_types("1:q8_0")},
        shape=latent_shape(head_dim_k=128, head_dim_v=80),
        reason="layer_types 1:q8_0/q8_0: the head size 80 of the latent cache of layer 1 is not a multiple of 32",
    ),
    Case(
        rule="types of single layers",
        changes={"layer_types": parse_layer_types("last1:/q8_0")},
        shape=make_shape(cache=LayerCache.LATENT_KV),
        reason="layer_types last1:/q8_0: the latent cache of layer 1 .*; keys are f16, values q8_0",
    ),
    Case(
        rule="types of single layers",
        changes={"layer_types": parse_layer_types("1:turbo4")},
        shape=latent_shape(head_dim_k=128, head_dim_v=64),
        reason="layer_types 1:turbo4/turbo4: the 64 values of layer 1 are no whole groups of 128 elements of the keys",
    ),
    Case(
        rule="rotation of nothing",
        changes={"kv_rotate": False, "type_v": KvType.BF16},
        reason="kv_rotate off: changes nothing: only quantised keys and values are rotated",
    ),
    Case(
        rule="rotation of nothing",
        changes={"kv_rotate": False, "type_k": KvType.TURBO4, "type_v": KvType.Q5_1},
        shape=make_shape(head_dim=72),
        reason="kv_rotate off: changes nothing: turbo types are always rotated, other types never where 64 does not",
    ),
    Case(
        rule="heads on a GPU",
        changes={"device": "cuda:1"},
        reason="device cuda:1: layer 0 has head size 48: CUDA attention has 64, 80",
        shape=make_shape(head_dim=48),
    ),
    Case(
        rule="heads on a GPU",
        changes={"device": "cuda"},
        reason="device cuda: layer 0 has 34 heads over 2 K/V heads: CUDA attention needs a whole ratio of 1 to 16",
        shape=make_shape(n_head=34),
    ),
    Case(
        rule="heads on a GPU",
        changes={"device": "cuda"},
        reason="device cuda: layer 0 has latent rows of 160 with 96 values: CUDA attention needs multiples of 64",
        shape=latent_shape(head_dim_k=160, head_dim_v=96),
    ),
    Case(
        rule="heads on a GPU",
        changes={"device": "cuda"},
        reason="device cuda: layer 0 has latent rows of 640 with 512 values: CUDA attention has up to 576 with 512",
        shape=latent_shape(head_dim_k=640, head_dim_v=512),
    ),
    Case(
        rule="heads on a GPU",
        changes={"device": "cuda"},
        reason="device cuda: layer 0 has a window and heads of 512: CUDA attention has windows up to 256",
        shape=make_shape(head_dim=512, cache=LayerCache.WINDOW_KV),
    ),
    Case(
        rule="full-size window cache with an arena",
        changes={"swa_full": True},
        reason="swa_full: a window layer's cache stays in the arena",
        shape=make_shape(cache=LayerCache.WINDOW_KV),
    ),
    Case(
        rule="full-size window cache with an arena",
        changes={"swa_full": True},
        reason="swa_full: a window layer's cache stays in the arena",
        shape=None,
    ),
    Case(
        rule="partial offload",
        changes={"n_gpu_layers": 1},
        reason="n_gpu_layers 1: a model runs on one device as a whole, and this one has 2 layers",
        also=("GPU layers on the CPU",),
    ),
    Case(
        rule="partial offload",
        changes={"n_gpu_layers": 0, "device": "cuda:0"},
        reason="n_gpu_layers 0: a model runs on one device as a whole",
    ),
    Case(rule="unknown device", changes={"device": "tpu"}, reason="device tpu: not a device; allowed: auto, cpu, cuda"),
    Case(
        rule="CPU model on a GPU",
        changes={"device": "cuda"},
        reason="device cuda: layer 0 takes 2 of 513 experts; a GPU takes up to 32 of 512",
        shape=with_experts(make_shape(), n_expert=513),
    ),
    Case(
        rule="CPU model on a GPU",
        changes={"device": "cuda"},
        reason="device cuda: architecture other has operations that run on the CPU only so far",
        shape=replace(make_shape(), architecture="other"),
    ),
    Case(
        rule="CPU model on a GPU",
        changes={"device": "cuda"},
        reason="device cuda: recurrent heads of 48 elements: CUDA has multiples of 32",
        shape=make_hybrid_shape(replace(LARGE_RECURRENT, head_dim=48)),
    ),
    Case(
        rule="CPU model on a GPU",
        changes={"device": "cuda"},
        reason="device cuda: convolutions of 33 taps: CUDA has up to 32",
        shape=make_hybrid_shape(replace(LARGE_RECURRENT, n_taps=33)),
    ),
    Case(
        rule="CPU model on a GPU",
        changes={"device": "cuda"},
        reason="device cuda: weight matrices with rows of 80 weights: CUDA has multiples of 32",
        shape=with_query_rank(80),
    ),
    Case(rule="unknown device", changes={"device": "cpu:0"}, reason="device cpu:0: not a device"),
    Case(rule="unknown device", changes={"device": "cuda:"}, reason="device cuda:: not a device"),
    Case(
        rule="store without an arena",
        changes={"store_path": Path("kv.store"), "arena": ArenaRequest()},
        reason="store_path kv.store: a host store exists only when",
        shape=None,
    ),
    Case(
        rule="store file on a GPU",
        changes={"store_path": Path("kv.store"), "device": "cuda"},
        reason="store_path kv.store: on a GPU the host store is page-locked memory",
    ),
    Case(
        rule="empty arena",
        changes={"arena": ArenaRequest(mode=ArenaMode.FIXED, n_bytes=0)},
        reason="arena 0: an arena of a fixed size needs at least one byte",
    ),
    Case(rule="batch size", changes={"n_batch": 0}, reason="n_batch 0: a batch holds at least one token"),
    Case(rule="ubatch size", changes={"n_ubatch": 0}, reason="n_ubatch 0: a micro-batch holds at least one token"),
    Case(
        rule="ubatch size",
        changes={"n_ubatch": 2049},
        reason=r"n_ubatch 2049: larger than the batch it is cut from \(-b 2048\)",
        shape=None,
    ),
    Case(rule="context size", changes={"n_ctx": -1}, reason="n_ctx -1: a context cannot be negative"),
    Case(rule="thread count", changes={"n_threads": 0}, reason="n_threads 0: at least one thread"),
    Case(rule="page size", changes={"page_tokens": 8}, reason="page_tokens 8: a page holds a power of two of tokens"),
    Case(rule="page size", changes={"page_tokens": 100}, reason="page_tokens 100: a page holds a power of two"),
    Case(rule="page size", changes={"page_tokens": 8192}, reason="page_tokens 8192: .* 16 to 4096"),
    Case(
        rule="types of a latent cache",
        changes={"type_v": KvType.Q8_0},
        shape=make_shape(cache=LayerCache.LATENT_KV),
        reason="type_v q8_0: the latent cache of layer 0 has its values inside its keys, .*; keys are f16",
    ),
    Case(
        rule="groups of a latent cache",
        changes={"type_k": KvType.TURBO4, "type_v": KvType.TURBO4},
        shape=latent_shape(head_dim_k=128, head_dim_v=64),
        reason="type_k turbo4: the 64 values of layer 0 are no whole groups of 128 elements of the keys",
    ),
    Case(
        rule="rows of a latent cache",
        changes={"type_k": KvType.Q8_0, "type_v": KvType.Q8_0},
        shape=latent_shape(head_dim_k=128, head_dim_v=80),
        reason="type_k q8_0: the head size 80 of the latent cache of layer 0 is not a multiple of 32, which q8_0 needs",
    ),
    Case(
        rule="two rope scales",
        changes=rope(scale=4.0, freq_scale=0.25),
        reason="rope.scale 4.0: says the same as --rope-freq-scale 0.25",
    ),
    Case(
        rule="rope scale without scaling",
        changes=rope(scaling_type=RopeScaling.NONE, scale=4.0),
        reason="rope.scaling_type none: contradicts a scale of 4",
    ),
    Case(rule="rope scale", changes=rope(scale=0.0), reason="rope.scale 0.0: has to be above 0"),
    Case(rule="rope scale", changes=rope(scale=float("nan")), reason="rope.scale nan: has to be above 0"),
    Case(rule="rope frequency scale", changes=rope(freq_scale=-1.0), reason="rope.freq_scale -1.0: has to be above 0"),
    Case(rule="rope frequency base", changes=rope(freq_base=1.0), reason="rope.freq_base 1.0: has to be above 1"),
    Case(
        rule="YaRN fast turns",
        changes=rope(scaling_type=RopeScaling.YARN, scale=4.0, yarn_beta_fast=0.0),
        reason="rope.yarn_beta_fast 0.0: has to be above 0",
    ),
    Case(
        rule="YaRN slow turns",
        changes=rope(scaling_type=RopeScaling.YARN, scale=4.0, yarn_beta_slow=0.0),
        reason="rope.yarn_beta_slow 0.0: has to be above 0",
    ),
    Case(
        rule="KV offload on the CPU",
        changes={"kv_offload": False},
        reason="kv_offload off: changes nothing on the CPU: the KV cache is in host memory already",
        shape=None,
    ),
    Case(
        rule="GPU layers on the CPU",
        changes={"n_gpu_layers": 99},
        reason="n_gpu_layers 99: changes nothing: the whole model runs on the CPU",
    ),
    Case(
        rule="full-size window cache without windows",
        changes={"swa_full": True},
        reason="swa_full: changes nothing: no layer of this model has a sliding window",
    ),
    Case(
        rule="context beyond training",
        changes={"n_ctx": 513},
        reason="n_ctx 513: beyond the training length of 512 tokens; the text",
    ),
    Case(
        rule="context beyond training",
        changes={"n_ctx": 2049, **rope(scale=4.0)},
        reason=r"n_ctx 2049: beyond the training length of 512 tokens \(2048 with the scale given\)",
    ),
    Case(
        rule="scaling without a scale",
        changes=rope(scaling_type=RopeScaling.YARN),
        reason="rope.scaling_type yarn: changes nothing without a scale",
    ),
    Case(
        rule="YaRN settings without YaRN",
        changes=rope(yarn_beta_fast=16.0),
        reason="rope.scaling_type: the YaRN settings change nothing without YaRN scaling",
    ),
    Case(
        rule="YaRN settings without YaRN",
        changes=rope(scaling_type=RopeScaling.LINEAR, scale=2.0, yarn_orig_ctx=256),
        reason="rope.scaling_type linear: the YaRN settings change nothing",
    ),
)


def broken_rules(config: RunConfig, shape: ModelShape | None) -> set[str]:
    return {rule.name for rule in RULES if rule.find(config, shape) is not None}


def test_the_valid_case_breaks_no_rule() -> None:
    assert broken_rules(VALID, SHAPE) == set()
    assert broken_rules(VALID, None) == set()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{'-'.join(case.changes)}")
def test_changed_fields_break_their_rule_and_no_other(case: Case) -> None:
    config = replace(VALID, **case.changes)
    assert broken_rules(config, case.shape) == {case.rule, *case.also}
    rule = next(rule for rule in RULES if rule.name == case.rule)
    find = validate if rule.severity is Severity.REFUSE else find_warnings
    problem = next(problem for problem in find(config, case.shape) if problem.field == rule.field)
    assert re.match(case.reason, str(problem))
    assert problem.hint == rule.hint


def test_every_rule_has_a_case() -> None:
    assert {case.rule for case in CASES} == {rule.name for rule in RULES}
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize(
    "changes",
    [
        {"n_gpu_layers": N_LAYER, "device": "cuda"},
        {"n_gpu_layers": 0},
        {"kv_offload": False, "arena": ArenaRequest(), "device": "cpu"},
        {"device": "cuda:12"},
        {"n_ctx": 2048, **rope(scale=4.0)},
        {"n_ctx": 2048, **rope(freq_scale=0.25)},
        {"n_ctx": 0},
        {"n_ctx": None},
        {"n_ubatch": 2048},
        {"page_tokens": 16},
        {"page_tokens": 4096},
        {"type_k": KvType.Q8_0, "type_v": KvType.Q8_0},
        {"type_k": KvType.TURBO4, "type_v": KvType.TURBO2},
        rope(scaling_type=RopeScaling.YARN, scale=4.0, yarn_orig_ctx=512),
    ],
)
def test_legitimate_settings_are_not_refused(changes: dict[str, Any]) -> None:
    assert validate(replace(VALID, **changes), SHAPE) == []


def test_query_ranks_of_whole_steps_run_on_a_gpu() -> None:
    assert validate(replace(VALID, device="cuda", type_k=KvType.F16), with_query_rank(96)) == []


def test_all_problems_are_reported_at_once() -> None:
    config = replace(VALID, n_parallel=2, flash_attention=FlashAttention.OFF, page_tokens=100, n_ubatch=5000)
    fields = [problem.field for problem in validate(config, SHAPE)]
    assert fields == ["flash_attention", "n_parallel", "n_ubatch", "page_tokens"]


def test_without_an_arena_window_caches_may_be_full_size() -> None:
    windows = make_shape(cache=LayerCache.WINDOW_KV)
    config = replace(VALID, swa_full=True, arena=ArenaRequest())
    assert broken_rules(config, windows) == set()


@pytest.mark.parametrize(
    ("n_head", "layer_types", "n_warnings"),
    [(10, "all:turbo4/", 0), (12, "all:turbo4/", 1), (12, "all:/turbo4", 0), (12, "all:q8_0", 0)],
)
def test_turbo_keys_are_warned_about_where_six_heads_share_one(n_head: int, layer_types: str, n_warnings: int) -> None:
    config = replace(VALID, layer_types=parse_layer_types(layer_types))
    assert len(find_warnings(config, make_shape(n_head=n_head))) == n_warnings


def test_layers_of_quantised_types_are_rotated_though_the_others_are_floats() -> None:
    config = replace(VALID, kv_rotate=False)
    assert len(find_warnings(config, SHAPE)) == 1
    assert find_warnings(replace(config, layer_types=parse_layer_types("first1:q8_0")), SHAPE) == []
    assert len(find_warnings(replace(config, layer_types=parse_layer_types("first1:turbo4")), SHAPE)) == 1


@pytest.mark.parametrize("head_dim", [8, 40, 80, 96, 100])
def test_every_type_takes_heads_of_any_size(head_dim: int) -> None:
    for kv_type in KvType:
        assert validate(replace(VALID, type_k=kv_type, type_v=kv_type), make_shape(head_dim=head_dim)) == []


def test_a_model_that_brings_its_scale_needs_none() -> None:
    config = replace(VALID, **rope(scaling_type=RopeScaling.YARN))
    assert find_warnings(config, make_shape(factor=4.0)) == []


def test_a_page_size_that_no_device_takes_is_reported_once() -> None:
    problems = validate(replace(VALID, device="cuda", page_tokens=100), SHAPE)
    assert [problem.reason for problem in problems] == ["a page holds a power of two of tokens, 16 to 4096"]
