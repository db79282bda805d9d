"""What a user asked for, as values. Parsing text is ``kvs_cli``'s work; what fits is ``plan``'s."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from kvs_core.kv_layer_types import LayerTypes
from kvs_core.kv_types import KvType
from kvs_core.model_shape import RopeScaling

DEFAULT_BATCH_TOKENS = 2048
DEFAULT_UBATCH_TOKENS = 512
DEFAULT_PAGE_TOKENS = 256
ALL_GPU_LAYERS = 2**31 - 1
"""What ``-ngl all`` means: more layers than any model has."""

DECODE_TOKENS_MAX = 8
"""Longest step that reduces every token exactly as a step of one does (decode, later verification)."""


class FlashAttention(Enum):
    """``-fa``; there is only fused attention, so AUTO means on and OFF is refused."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class ArenaMode(Enum):
    """Whether the arena is off, of a given size, or as large as the device allows."""

    OFF = "off"
    FIXED = "fixed"
    AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaRequest:
    """``--kv-stream-arena-mib``; ``n_bytes`` counts only for FIXED."""

    mode: ArenaMode = ArenaMode.OFF
    n_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeOverrides:
    """Command-line changes to the model's RoPE; None keeps what the file says."""

    scaling_type: RopeScaling | None = None
    scale: float | None = None
    freq_base: float | None = None
    freq_scale: float | None = None
    yarn_orig_ctx: int | None = None
    yarn_ext_factor: float | None = None
    yarn_attn_factor: float | None = None
    yarn_beta_fast: float | None = None
    yarn_beta_slow: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything that decides a plan. Sizes in bytes or tokens; None means "choose for me"."""

    model_path: Path
    n_ctx: int | None = None  # None: the largest that fits up to the training length; 0: the training length
    n_batch: int | None = None  # None: DEFAULT_BATCH_TOKENS, more where a larger micro-batch is chosen
    n_ubatch: int | None = None
    n_threads: int | None = None
    type_k: KvType = KvType.F16
    type_v: KvType = KvType.F16
    layer_types: tuple[LayerTypes, ...] = ()  # later ones win; other layers have type_k and type_v
    kv_rotate: bool = True  # rotate rows before they are quantised
    flash_attention: FlashAttention = FlashAttention.AUTO
    arena: ArenaRequest = field(default_factory=ArenaRequest)
    store_path: Path | None = None
    page_tokens: int = DEFAULT_PAGE_TOKENS
    device: str = "auto"
    device_memory_bytes: int | None = None  # an assumed device, for planning only
    n_gpu_layers: int | None = None  # ALL_GPU_LAYERS: every one, however many there are
    n_parallel: int = 1
    kv_offload: bool = True
    swa_full: bool = False
    fit: bool = True
    paranoid: bool = False
    rope: RopeOverrides = field(default_factory=RopeOverrides)
    pre_tokenizer: str | None = None  # overrides tokenizer.ggml.pre


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How logits become a token; defaults are llama.cpp's. ``seed`` None draws one and reports it."""

    seed: int | None = None
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    samplers: tuple[str, ...] = ("penalties", "top_k", "top_p", "min_p", "temperature")
    ignore_eos: bool = False
