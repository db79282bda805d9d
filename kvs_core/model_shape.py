"""The shape of a model: its sizes, and what each layer caches. Values only.

Reading them from a file is in model_reader.py, which architectures there are in architectures.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvs_core.expert_shape import ExpertShape
from kvs_core.latent_shape import LatentShape
from kvs_core.recurrent_shape import RecurrentShape

_F16_BYTES = 2


class LayerCache(Enum):
    """What one layer keeps of the tokens it has seen."""

    FULL_KV = "full"
    WINDOW_KV = "window"
    LATENT_KV = "latent"
    RECURRENT = "recurrent"
    NONE = "none"


class RopeKind(Enum):
    """Which elements rotate together: NORM pairs (2i, 2i + 1), NEOX pairs (i, i + n_rot / 2)."""

    NORM = "norm"
    NEOX = "neox"


class RopeScaling(Enum):
    """How positions are stretched beyond the training length; the value is llama.cpp's spelling."""

    NONE = "none"
    LINEAR = "linear"
    YARN = "yarn"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Sizes of one layer.

    head_dim_k   size of a query or key head; head_dim_v that of a value head
    n_ff         width of the feed-forward that every token takes, a shared expert included; 0 for none
    experts      of which every token takes a few; None in a dense layer
    n_swa        WINDOW_KV layers: a token sees the last ``n_swa`` positions, its own included; 0 elsewhere
    kv_from      a layer without keys and values of its own: the earlier layer whose it attends to; None elsewhere
    n_own_embd   width of the embedding that every token has for this layer alone; 0 for none
    latent       LATENT_KV layers: the sizes before and after the cache; head sizes are those of the cached row
    recurrent    of RECURRENT layers, which have no attention heads; None elsewhere
    """

    layer_idx: int
    cache: LayerCache
    n_head: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    n_ff: int
    experts: ExpertShape | None = None
    n_swa: int = 0
    latent: LatentShape | None = None
    kv_from: int | None = None
    n_own_embd: int = 0
    recurrent: RecurrentShape | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeShape:
    """Rotary embedding as the model file asks for it; flags of a run may override it.

    n_rot        leading elements of a head that rotate
    scaling      a file that says nothing counts as LINEAR without a factor, as in llama.cpp, so that a factor given
                 by a flag takes effect
    factor       how many times the context was stretched; 0 means unset
    n_ctx_orig   context length before stretching
    attn_factor  multiplies cos and sin
    has_factors  the tensor rope_freqs.weight divides each frequency
    yarn_*       of no effect unless scaling is YARN; files of most architectures cannot set them
    yarn_log_multiplier   how much of YaRN's growth of cos and sin the model was trained without; 0 for none
    scores_grow           that much of the growth goes, squared, to the scores instead of to cos and sin
    """

    kind: RopeKind
    n_rot: int
    freq_base: float
    scaling: RopeScaling
    factor: float
    n_ctx_orig: int
    attn_factor: float
    has_factors: bool
    yarn_ext_factor: float = 1.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_log_multiplier: float = 0.0
    scores_grow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTotal:
    """All tensors of one type together; ``type_name`` as the gguf package spells it, such as ``Q4_K``."""

    type_name: str
    n_tensors: int
    n_elements: int
    n_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Everything planning needs to know of a model.

    name           general.name, fit to print on one line; empty if the file has none
    n_ctx_train    context length of training
    tied_output    the file has no output.weight: logits use token_embd.weight, which is held once
    tensors_bytes  weights as stored in the file, all types together
    weight_types   the same by type, in order of first appearance
    temperature_scale   queries grow by this times the logarithm of the number of ``rope.n_ctx_orig`` begun; 0 for none
    rope_in_window   of the window layers, which flags of a run do not reach; None where there are none
    attention_softcap, logit_softcap   caps of scores and of logits; 0 for none
    """

    architecture: str
    name: str
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    rms_eps: float
    layers: tuple[LayerShape, ...]
    rope: RopeShape
    tied_output: bool
    tensors_bytes: int
    weight_types: tuple[WeightTotal, ...]
    file_path: str
    temperature_scale: float = 0.0
    rope_in_window: RopeShape | None = None
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0

    @property
    def n_layer(self) -> int:
        return len(self.layers)

    def slow_types(self, fast_types: frozenset[str]) -> tuple[WeightTotal, ...]:
        """Weights of types without a fast kernel; the backend holds these as F16."""
        return tuple(total for total in self.weight_types if total.type_name not in fast_types)

    def expanded_bytes(self, fast_types: frozenset[str]) -> int:
        """Bytes that the weights of ``slow_types`` take once they are F16."""
        return sum(total.n_elements * _F16_BYTES for total in self.slow_types(fast_types))

    @property
    def expert_inputs(self) -> int:
        """Numbers that a token's experts hand to their last products, all together; 0 without experts."""
        experts = (layer.experts for layer in self.layers)
        return max((one.n_used * one.n_ff for one in experts if one is not None), default=0)

    def loaded_bytes(self, fast_types: frozenset[str]) -> int:
        """Bytes that all weights take in memory: fast types as stored, the others as F16."""
        stored = sum(total.n_bytes for total in self.slow_types(fast_types))
        return self.tensors_bytes - stored + self.expanded_bytes(fast_types)
