"""The one table of flags: llama.cpp's spellings, meanings and defaults where it has the flag. No parsing here."""

from __future__ import annotations

import math

from kvs_cli.evaluation_flags import EVALUATION_FLAGS
from kvs_cli.flags import EVERY_COMMAND, RUN, VALIDATE, Flag, FlagTable, Section
from kvs_cli.foreign_flags import FOREIGN_FLAGS
from kvs_cli.readers import (
    integer,
    one_of,
    read_arena,
    read_device,
    read_flash_attention,
    read_kv_type,
    read_layer_types,
    read_mib,
    read_path,
    read_switch,
    read_text,
    real,
)
from kvs_cli.text_flags import TEXT_FLAGS
from kvs_core.config import (
    ALL_GPU_LAYERS,
    DEFAULT_BATCH_TOKENS,
    DEFAULT_PAGE_TOKENS,
    DEFAULT_UBATCH_TOKENS,
)
from kvs_core.kv_types import KvType
from kvs_core.model_shape import RopeScaling
from kvs_core.validate import PAGE_TOKENS_MAX, PAGE_TOKENS_MIN

_KV_TYPES = ", ".join(kv_type.value for kv_type in KvType)
_SCALINGS = ", ".join(scaling.value for scaling in RopeScaling)
_UP_TO_INT32 = integer(1)
_FROM_MODEL = {"-1": None, "-1.0": None}
_STRETCH = real(1e-6, 1e6)  # beyond, angles leave what float32 can tell apart
_TURNS = real(0.0, math.inf, above=True, named=_FROM_MODEL)
MAX_THREADS = 512  # as in llama.cpp
_AUTO_LAYERS = {"auto": None, "-1": None, "all": ALL_GPU_LAYERS, "-2": ALL_GPU_LAYERS}

_GENERAL = (
    Flag(
        dest="help",
        spellings=("-h", "--help"),
        section=Section.GENERAL,
        commands=EVERY_COMMAND,
        help="Show this help and exit.",
    ),
    Flag(
        dest="model_path",
        spellings=("-m", "--model"),
        metavar="FILE",
        read=read_path,
        section=Section.GENERAL,
        help="GGUF model; of a split model the first part. Required, here or in KVS_MODEL.",
    ),
    Flag(
        dest="json",
        spellings=("--json",),
        section=Section.GENERAL,
        commands=EVERY_COMMAND,
        help="Print one JSON document on standard output, also for errors, and no text.",
    ),
    Flag(
        dest="verbose",
        spellings=("-v", "--verbose", "--log-verbose"),
        section=Section.GENERAL,
        commands=EVERY_COMMAND,
        help="Say more on standard error: the configuration in effect and where each value came from, token ids.",
    ),
    Flag(
        dest="log_file",
        spellings=("--log-file",),
        metavar="FILE",
        read=read_path,
        section=Section.GENERAL,
        help="Also write every message of standard error to FILE.",
    ),
    Flag(
        dest="pre_tokenizer",
        spellings=("--pre-tokenizer",),
        metavar="NAME",
        read=read_text,
        section=Section.GENERAL,
        help="Split text by the rules NAME (for example llama-bpe) instead of the file's tokenizer.ggml.pre.",
    ),
)

_CONTEXT = (
    Flag(
        dest="n_ctx",
        spellings=("-c", "--ctx-size"),
        metavar="N",
        read=integer(0),
        section=Section.CONTEXT,
        commands=(RUN, VALIDATE),
        help="Context in tokens; 0: the training length. Left out: the largest up to the training length that fits.",
    ),
    Flag(
        dest="fit",
        spellings=("-fit", "--fit"),
        metavar="on|off",
        read=read_switch,
        bare="on",
        section=Section.CONTEXT,
        commands=(RUN, VALIDATE),
        help="Without -c, choose the largest context that fits (on, default) or the training length (off).",
    ),
    Flag(
        dest="n_batch",
        spellings=("-b", "--batch-size"),
        metavar="N",
        read=_UP_TO_INT32,
        section=Section.CONTEXT,
        help=f"Tokens of a batch (default {DEFAULT_BATCH_TOKENS}, or a larger micro-batch that a GPU chooses).",
    ),
    Flag(
        dest="n_ubatch",
        spellings=("-ub", "--ubatch-size"),
        metavar="N",
        read=_UP_TO_INT32,
        section=Section.CONTEXT,
        help=f"Tokens run at once; at most -b (default {DEFAULT_UBATCH_TOKENS} on the CPU, chosen on a GPU).",
    ),
    Flag(
        dest="type_k",
        spellings=("-ctk", "--cache-type-k"),
        metavar="TYPE",
        read=read_kv_type,
        section=Section.CONTEXT,
        help=f"Type of cached keys: {_KV_TYPES}, in lower case (default f16).",
    ),
    Flag(
        dest="type_v",
        spellings=("-ctv", "--cache-type-v"),
        metavar="TYPE",
        read=read_kv_type,
        section=Section.CONTEXT,
        help=f"Type of cached values: {_KV_TYPES}, in lower case (default f16).",
    ),
    Flag(
        dest="layer_types",
        spellings=("--kv-layer-types",),
        metavar="SPEC",
        read=read_layer_types,
        section=Section.CONTEXT,
        help="Types of single layers with a KV cache: WHERE:K/V[,...], WHERE one of all, firstN, lastN, I, I-J; "
        "or mode 1, 2, 5, 6 or 7.",
    ),
    Flag(
        dest="kv_rotate",
        spellings=("--kv-rotate",),
        negative=("--no-kv-rotate",),
        section=Section.CONTEXT,
        help="Rotate keys and values before they are quantised, as llama.cpp does (default).",
    ),
    Flag(
        dest="flash_attention",
        spellings=("-fa", "--flash-attn"),
        metavar="on|off|auto",
        read=read_flash_attention,
        bare="on",
        section=Section.CONTEXT,
        help="Fused attention. There is no other kind: auto (default) means on, and off is refused.",
    ),
    Flag(
        dest="n_parallel",
        spellings=("-np", "--parallel"),
        metavar="N",
        read=_UP_TO_INT32,
        section=Section.CONTEXT,
        help="Sequences at a time; only 1 is supported yet (default 1).",
    ),
    Flag(
        dest="swa_full",
        spellings=("--swa-full",),
        section=Section.CONTEXT,
        help="Keep sliding-window caches at full size; not with an arena.",
    ),
    Flag(
        dest="kv_offload",
        spellings=("-kvo", "--kv-offload"),
        negative=("-nkvo", "--no-kv-offload"),
        section=Section.CONTEXT,
        help="Keep the KV cache on the device (default). Off is so on the CPU and refused on a GPU.",
    ),
)

_STREAMING = (
    Flag(
        dest="arena",
        spellings=("--kv-stream-arena-mib", "--kv-stream-stage-mib"),
        metavar="N|auto",
        read=read_arena,
        section=Section.STREAMING,
        help="Bound KV pages and workspace on the device to one allocation of N MiB and stream the other pages from "
        "the host; auto: as large as the device allows; 0 (default): off.",
    ),
    Flag(
        dest="store_path",
        spellings=("--kv-stream-store",),
        metavar="PATH",
        read=read_path,
        section=Section.STREAMING,
        help="Keep the host's pages in a new file PATH, or in one without a name in the folder PATH, instead of "
        "memory; CPU only.",
    ),
    Flag(
        dest="page_tokens",
        spellings=("--kv-page-tokens",),
        metavar="N",
        read=_UP_TO_INT32,
        section=Section.STREAMING,
        help=f"Tokens of a page, a power of two from {PAGE_TOKENS_MIN} to {PAGE_TOKENS_MAX}, on a GPU from 64 "
        f"(default {DEFAULT_PAGE_TOKENS}).",
    ),
    Flag(
        dest="paranoid",
        spellings=("--paranoid",),
        section=Section.STREAMING,
        help="Check every invariant after each step and fill released memory with NaN; slow.",
    ),
)

_DEVICE = (
    Flag(
        dest="device",
        spellings=("-dev", "--device"),
        metavar="DEVICE",
        read=read_device,
        section=Section.DEVICE,
        commands=EVERY_COMMAND,
        help="auto, cpu, cuda, cuda:N or cuda:GPU-UUID (default auto: a GPU when there is one).",
    ),
    Flag(
        dest="n_threads",
        spellings=("-t", "--threads"),
        metavar="N",
        read=integer(1, MAX_THREADS, named={"-1": None}),
        section=Section.DEVICE,
        help="CPU threads; -1 (default): one for each core the run may use.",
    ),
    Flag(
        dest="n_gpu_layers",
        spellings=("-ngl", "--gpu-layers", "--n-gpu-layers"),
        metavar="N|auto|all",
        read=integer(0, named=_AUTO_LAYERS),
        section=Section.DEVICE,
        help="Layers on the GPU; a model runs on one device as a whole, so a part is refused (default auto).",
    ),
    Flag(
        dest="device_memory_bytes",
        spellings=("--device-memory-mib",),
        metavar="N",
        read=read_mib,
        section=Section.DEVICE,
        commands=(VALIDATE,),
        help="Plan for a device with N MiB of free memory instead of the one present: "
        "a GPU, unless --device cpu is given.",
    ),
)

_ROPE = (
    Flag(
        dest="rope.scaling_type",
        spellings=("--rope-scaling",),
        metavar="TYPE",
        read=one_of(RopeScaling),
        section=Section.ROPE,
        help=f"How positions are stretched: {_SCALINGS} (default: as the model says).",
    ),
    Flag(
        dest="rope.scale",
        spellings=("--rope-scale",),
        metavar="X",
        read=_STRETCH,
        section=Section.ROPE,
        help="Stretch positions by X; linear unless --rope-scaling or the model says otherwise.",
    ),
    Flag(
        dest="rope.freq_base",
        spellings=("--rope-freq-base",),
        metavar="X",
        read=real(1.0, math.inf, above=True),
        section=Section.ROPE,
        help="Base of the rotation frequencies (default: the model's).",
    ),
    Flag(
        dest="rope.freq_scale",
        spellings=("--rope-freq-scale",),
        metavar="X",
        read=_STRETCH,
        section=Section.ROPE,
        help="Inverse of --rope-scale; give one of the two.",
    ),
    Flag(
        dest="rope.yarn_orig_ctx",
        spellings=("--yarn-orig-ctx",),
        metavar="N",
        read=integer(1, named={"0": None}),
        section=Section.ROPE,
        help="YaRN: context the model was trained on; 0 (default): as the model says.",
    ),
    Flag(
        dest="rope.yarn_ext_factor",
        spellings=("--yarn-ext-factor",),
        metavar="X",
        read=real(0.0, 1.0, named=_FROM_MODEL),
        section=Section.ROPE,
        help="YaRN: mix of extrapolation, 0 to 1; -1 (default): as the model says.",
    ),
    Flag(
        dest="rope.yarn_attn_factor",
        spellings=("--yarn-attn-factor",),
        metavar="X",
        read=real(0.0, 1e6, named=_FROM_MODEL),
        section=Section.ROPE,
        help="YaRN: factor on the attention magnitude; -1 (default): as the model says.",
    ),
    Flag(
        dest="rope.yarn_beta_slow",
        spellings=("--yarn-beta-slow",),
        metavar="X",
        read=_TURNS,
        section=Section.ROPE,
        help="YaRN: rotations below which a dimension is stretched; -1 (default): as the model says.",
    ),
    Flag(
        dest="rope.yarn_beta_fast",
        spellings=("--yarn-beta-fast",),
        metavar="X",
        read=_TURNS,
        section=Section.ROPE,
        help="YaRN: rotations above which a dimension is kept; -1 (default): as the model says.",
    ),
)

FLAGS = FlagTable(
    own=_GENERAL + _CONTEXT + _STREAMING + _DEVICE + _ROPE + TEXT_FLAGS + EVALUATION_FLAGS, foreign=FOREIGN_FLAGS
)
