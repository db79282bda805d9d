"""Every reason a configuration is refused or remarked on, as one table of rules. Pure: no file, no device, no clock.

Whether a run *fits* is ``plan``'s subject. A rule that needs the model's shape says nothing while there is none.
"""

from __future__ import annotations

from enum import Enum

from kvs_core import cache_rules, cuda_scratch, rope_rules
from kvs_core.config import ALL_GPU_LAYERS, DEFAULT_BATCH_TOKENS, ArenaMode, FlashAttention, RunConfig
from kvs_core.cuda_support import CPU_HINT, missing_on_cuda
from kvs_core.devices import find_device_problem
from kvs_core.errors import Problem
from kvs_core.kv_layer_types import types_by_layer
from kvs_core.latent_rules import latent_groups, latent_rows, latent_types
from kvs_core.model_shape import LayerCache, ModelShape
from kvs_core.units import MIB
from kvs_core.validation_rule import Rule, Severity

PAGE_TOKENS_MIN = 16
PAGE_TOKENS_MAX = 4096


def validate(config: RunConfig, shape: ModelShape | None = None) -> list[Problem]:
    """All refusals of a configuration at once; empty when it may be planned.

    Without a ``shape`` only the rules that need no model are judged, so that a command can be refused before
    the model file is opened.
    """
    return _apply(config, shape, Severity.REFUSE)


def find_warnings(config: RunConfig, shape: ModelShape | None = None) -> list[Problem]:
    """What the user should know although the run goes on: settings without effect, contexts beyond training."""
    return _apply(config, shape, Severity.WARN)


def _apply(config: RunConfig, shape: ModelShape | None, severity: Severity) -> list[Problem]:
    problems = []
    for rule in RULES:
        reason = rule.find(config, shape) if rule.severity is severity else None
        if reason is not None:
            problems.append(
                Problem(field=rule.field, value=_show_value(config, rule.field), reason=reason, hint=rule.hint)
            )
    return problems


def _show_value(config: RunConfig, field: str) -> str:
    value: object = config
    for name in field.split("."):
        value = getattr(value, name)
    if isinstance(value, Enum):
        return str(value.value)
    if field == "arena":
        return f"{config.arena.n_bytes // MIB}" if config.arena.mode is ArenaMode.FIXED else config.arena.mode.value
    if field == "n_gpu_layers" and value == ALL_GPU_LAYERS:
        return "all"
    if field == "layer_types":
        return ",".join(map(str, config.layer_types))
    if isinstance(value, bool):
        return "" if value else "off"
    return "" if value is None else str(value)


def _wants_cuda(config: RunConfig) -> bool:
    return config.device.startswith("cuda")


def _has_arena(config: RunConfig) -> bool:
    return config.arena.mode is not ArenaMode.OFF


# Rules that need only the configuration.


def _flash_attention_off(config: RunConfig, shape: ModelShape | None) -> str | None:
    if config.flash_attention is not FlashAttention.OFF:
        return None
    return "there is only fused attention here, which never builds the score matrix"


def _quantised_v_needs_flash_attention(config: RunConfig, shape: ModelShape | None) -> str | None:
    if config.flash_attention is not FlashAttention.OFF or not config.type_v.is_quantised:
        return None
    return "a quantised V cache cannot be read with flash attention off (-fa off)"


def _several_sequences(config: RunConfig, shape: ModelShape | None) -> str | None:
    if config.n_parallel == 1:
        return None
    if config.n_parallel < 1:
        return "at least one sequence is needed"
    return "several sequences are not supported yet, with or without an arena"


def _kv_outside_the_device(config: RunConfig, shape: ModelShape | None) -> str | None:
    if config.kv_offload or not _wants_cuda(config):
        return None
    return "attention runs on the device, so the KV cache cannot be kept off it"


def _store_without_arena(config: RunConfig, shape: ModelShape | None) -> str | None:
    if config.store_path is None or _has_arena(config):
        return None
    return "a host store exists only when the KV cache is streamed, and no arena was asked for"


def _store_on_cuda(config: RunConfig, shape: ModelShape | None) -> str | None:
    if config.store_path is None or not _wants_cuda(config):
        return None
    return "on a GPU the host store is page-locked memory; a file works on the CPU only"


def _empty_arena(config: RunConfig, shape: ModelShape | None) -> str | None:
    if config.arena.mode is not ArenaMode.FIXED or config.arena.n_bytes > 0:
        return None
    return "an arena of a fixed size needs at least one byte"


def _unknown_device(config: RunConfig, shape: ModelShape | None) -> str | None:
    return find_device_problem(config.device)


def _cuda_page_size(config: RunConfig, shape: ModelShape | None) -> str | None:
    if not _wants_cuda(config) or _page_size(config, shape) is not None:
        return None
    return cuda_scratch.find_page_problem(config.page_tokens)


def _batch_size(config: RunConfig, shape: ModelShape | None) -> str | None:
    return None if config.n_batch is None or config.n_batch >= 1 else "a batch holds at least one token"


def _ubatch_size(config: RunConfig, shape: ModelShape | None) -> str | None:
    if config.n_ubatch is None:
        return None
    if config.n_ubatch < 1:
        return "a micro-batch holds at least one token"
    n_batch = config.n_batch or DEFAULT_BATCH_TOKENS
    if config.n_ubatch > n_batch:
        return f"larger than the batch it is cut from (-b {n_batch})"
    return None


def _context_size(config: RunConfig, shape: ModelShape | None) -> str | None:
    return "a context cannot be negative" if config.n_ctx is not None and config.n_ctx < 0 else None


def _thread_count(config: RunConfig, shape: ModelShape | None) -> str | None:
    return "at least one thread is needed" if config.n_threads is not None and config.n_threads < 1 else None


def _page_size(config: RunConfig, shape: ModelShape | None) -> str | None:
    n = config.page_tokens
    if PAGE_TOKENS_MIN <= n <= PAGE_TOKENS_MAX and n & (n - 1) == 0:
        return None
    return f"a page holds a power of two of tokens, {PAGE_TOKENS_MIN} to {PAGE_TOKENS_MAX}"


# Rules that need the model's shape.


def _partial_offload(config: RunConfig, shape: ModelShape | None) -> str | None:
    n = config.n_gpu_layers
    if n is None or shape is None or n >= shape.n_layer or (n <= 0 and not _wants_cuda(config)):
        return None
    return f"a model runs on one device as a whole, and this one has {shape.n_layer} layers"


def _swa_full_with_arena(config: RunConfig, shape: ModelShape | None) -> str | None:
    if not config.swa_full or not _has_arena(config) or (shape is not None and not _has_windows(shape)):
        return None
    return "a window layer's cache stays in the arena and is never streamed, so it cannot be full size"


def _cuda_heads(config: RunConfig, shape: ModelShape | None) -> str | None:
    if shape is None or not _wants_cuda(config):
        return None
    types = types_by_layer(shape, config.type_k, config.type_v, config.layer_types)
    for layer_idx, (type_k, type_v) in types.items():
        layer = shape.layers[layer_idx]
        problem = cuda_scratch.find_head_problem(
            type_k.cached_head_dim(layer.head_dim_k),
            type_v.cached_head_dim(layer.head_dim_v),
            n_head=layer.n_head,
            n_head_kv=layer.n_head_kv,
            v_in_k=layer.cache is LayerCache.LATENT_KV,
            in_window=layer.cache is LayerCache.WINDOW_KV,
        )
        if problem is not None:
            return f"layer {layer_idx} has {problem}"
    return None


def _cpu_model_on_cuda(config: RunConfig, shape: ModelShape | None) -> str | None:
    return missing_on_cuda(shape) if shape is not None and _wants_cuda(config) else None


def _has_windows(shape: ModelShape) -> bool:
    return any(layer.cache is LayerCache.WINDOW_KV for layer in shape.layers)


# Remarks.


def _kv_offload_on_cpu(config: RunConfig, shape: ModelShape | None) -> str | None:
    if config.kv_offload or _wants_cuda(config):
        return None
    return "changes nothing on the CPU: the KV cache is in host memory already"


def _gpu_layers_on_cpu(config: RunConfig, shape: ModelShape | None) -> str | None:
    if not config.n_gpu_layers or _wants_cuda(config):
        return None
    return "changes nothing: the whole model runs on the CPU"


def _swa_full_without_windows(config: RunConfig, shape: ModelShape | None) -> str | None:
    if not config.swa_full or shape is None or _has_windows(shape):
        return None
    return "changes nothing: no layer of this model has a sliding window"


_YARN_HINT = "add --rope-scaling yarn or leave the --yarn-* settings out"

RULES: tuple[Rule, ...] = (
    Rule(
        name="flash attention off",
        field="flash_attention",
        find=_flash_attention_off,
        hint="leave -fa out or use -fa on",
    ),
    Rule(
        name="quantised V without flash attention",
        field="type_v",
        find=_quantised_v_needs_flash_attention,
        hint="use -fa on, or -ctv f16",
    ),
    Rule(name="several sequences", field="n_parallel", find=_several_sequences, hint="use -np 1"),
    Rule(
        name="KV kept off the GPU",
        field="kv_offload",
        find=_kv_outside_the_device,
        hint="leave -nkvo out and bound the device memory with --kv-stream-arena-mib",
    ),
    Rule(
        name="full-size window cache with an arena",
        field="swa_full",
        find=_swa_full_with_arena,
        hint="leave --swa-full or --kv-stream-arena-mib out",
    ),
    Rule(
        name="partial offload",
        field="n_gpu_layers",
        find=_partial_offload,
        hint="use -ngl all with a GPU, or --device cpu without -ngl",
    ),
    Rule(name="unknown device", field="device", find=_unknown_device, hint="use --device auto, cpu or cuda:N"),
    Rule(
        name="layer types beyond the model",
        field="layer_types",
        find=cache_rules.layer_types_beyond_the_model,
        hint="layers are counted from 0, without those that have no KV cache",
    ),
    Rule(
        name="types of single layers",
        field="layer_types",
        find=cache_rules.types_of_single_layers,
        hint="give that layer other types, or leave it out",
    ),
    Rule(name="page size on a GPU", field="page_tokens", find=_cuda_page_size, hint="use 64 or more, or --device cpu"),
    Rule(name="heads on a GPU", field="device", find=_cuda_heads, hint="use --device cpu"),
    Rule(name="CPU model on a GPU", field="device", find=_cpu_model_on_cuda, hint=CPU_HINT),
    Rule(
        name="store without an arena",
        field="store_path",
        find=_store_without_arena,
        hint="add --kv-stream-arena-mib N, or leave --kv-stream-store out",
    ),
    Rule(name="store file on a GPU", field="store_path", find=_store_on_cuda, hint="leave --kv-stream-store out"),
    Rule(name="empty arena", field="arena", find=_empty_arena, hint="use 0 to switch streaming off"),
    Rule(name="batch size", field="n_batch", find=_batch_size),
    Rule(name="ubatch size", field="n_ubatch", find=_ubatch_size, hint="lower -ub or raise -b"),
    Rule(name="context size", field="n_ctx", find=_context_size, hint="use 0 for the training length"),
    Rule(name="thread count", field="n_threads", find=_thread_count),
    Rule(name="page size", field="page_tokens", find=_page_size),
    Rule(
        name="types of a latent cache",
        field="type_v",
        find=latent_types(),
        hint="give -ctk and -ctv the same type",
    ),
    Rule(
        name="rows of a latent cache",
        field="type_k",
        find=latent_rows(),
        hint="use -ctk f16 -ctv f16, which need a multiple of 16",
    ),
    Rule(name="groups of a latent cache", field="type_k", find=latent_groups(), hint="use -ctk q8_0 -ctv q8_0"),
    Rule(name="two rope scales", field="rope.scale", find=rope_rules.two_scales, hint="give one of the two"),
    Rule(
        name="rope scale without scaling",
        field="rope.scaling_type",
        find=rope_rules.scale_without_scaling,
        hint="use --rope-scaling linear or yarn, or leave the scale out",
    ),
    Rule(name="rope scale", field="rope.scale", find=rope_rules.number_above("scale")),
    Rule(name="rope frequency scale", field="rope.freq_scale", find=rope_rules.number_above("freq_scale")),
    Rule(name="rope frequency base", field="rope.freq_base", find=rope_rules.number_above("freq_base", low=1)),
    Rule(name="YaRN fast turns", field="rope.yarn_beta_fast", find=rope_rules.number_above("yarn_beta_fast")),
    Rule(name="YaRN slow turns", field="rope.yarn_beta_slow", find=rope_rules.number_above("yarn_beta_slow")),
    Rule(name="KV offload on the CPU", field="kv_offload", find=_kv_offload_on_cpu, severity=Severity.WARN),
    Rule(name="rotation of nothing", field="kv_rotate", find=cache_rules.rotation_of_nothing, severity=Severity.WARN),
    Rule(
        name="turbo keys of many heads",
        field="type_k",
        find=cache_rules.turbo_keys_of_many_heads(),
        hint="-ctk q8_0 is safer; values may stay turbo",
        severity=Severity.WARN,
    ),
    Rule(
        name="turbo keys of many heads in single layers",
        field="layer_types",
        find=cache_rules.turbo_keys_of_many_heads(single=True),
        hint="q8_0 keys are safer; values may stay turbo",
        severity=Severity.WARN,
    ),
    Rule(name="GPU layers on the CPU", field="n_gpu_layers", find=_gpu_layers_on_cpu, severity=Severity.WARN),
    Rule(
        name="full-size window cache without windows",
        field="swa_full",
        find=_swa_full_without_windows,
        severity=Severity.WARN,
    ),
    Rule(
        name="context beyond training",
        field="n_ctx",
        find=rope_rules.beyond_training,
        hint="stretch positions with --rope-scaling yarn --rope-scale FACTOR",
        severity=Severity.WARN,
    ),
    Rule(
        name="scaling without a scale",
        field="rope.scaling_type",
        find=rope_rules.scaling_without_scale,
        hint="add --rope-scale FACTOR",
        severity=Severity.WARN,
    ),
    Rule(
        name="YaRN settings without YaRN",
        field="rope.scaling_type",
        find=rope_rules.yarn_settings_without_yarn,
        hint=_YARN_HINT,
        severity=Severity.WARN,
    ),
)
"""All rules in the order they are reported. A test holds one configuration for each of them."""
