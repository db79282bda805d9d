"""The one table of flags: llama.cpp's spellings, meanings and defaults where it has the flag. No parsing here."""

from __future__ import annotations

import math

from kvs_cli.flags import RUN, VALIDATE, Flag, FlagTable, Section
from kvs_cli.foreign_flags import FOREIGN_FLAGS
from kvs_cli.readers import (
    ALL_GPU_LAYERS,
    integer,
    one_of,
    read_arena,
    read_device,
    read_flash_attention,
    read_kv_type,
    read_mib,
    read_path,
    read_sampler_letters,
    read_samplers,
    read_seed,
    read_switch,
    read_text,
    real,
)
from kvs_core.config import (
    DEFAULT_BATCH_TOKENS,
    DEFAULT_PAGE_TOKENS,
    DEFAULT_UBATCH_TOKENS,
    RopeScalingType,
    SamplingConfig,
)
from kvs_core.kv_types import KvType

_KV_TYPES = ", ".join(kv_type.value for kv_type in KvType)
_SCALINGS = ", ".join(scaling.value for scaling in RopeScalingType)
_SAMPLING = SamplingConfig()
_GENERATING = (RUN, VALIDATE)
_UP_TO_INT32 = integer(1)
_FROM_MODEL = {"-1": None, "-1.0": None}
_AUTO_LAYERS = {"auto": None, "-1": None, "all": ALL_GPU_LAYERS, "-2": ALL_GPU_LAYERS}

_GENERAL = (
    Flag(
        dest="help",
        spellings=("-h", "--help"),
        section=Section.GENERAL,
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
        help="Print one JSON document on standard output, also for errors, and no text.",
    ),
    Flag(
        dest="verbose",
        spellings=("-v", "--verbose", "--log-verbose"),
        section=Section.GENERAL,
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
)

_INPUT = (
    Flag(
        dest="prompt",
        spellings=("-p", "--prompt"),
        metavar="TEXT",
        read=read_text,
        section=Section.INPUT,
        commands=_GENERATING,
        help="Prompt. An empty one starts from the model's BOS token.",
    ),
    Flag(
        dest="prompt_file",
        spellings=("-f", "--file"),
        metavar="FILE",
        read=read_path,
        section=Section.INPUT,
        commands=_GENERATING,
        help="Read the prompt from a UTF-8 file, without one newline at its end. "
        "With neither -p nor -f the prompt comes from standard input.",
    ),
    Flag(
        dest="n_predict",
        spellings=("-n", "--predict", "--n-predict"),
        metavar="N",
        read=integer(-2),
        section=Section.INPUT,
        commands=_GENERATING,
        help="Tokens to generate; -1 (default) and -2: until the model ends or the context is full.",
    ),
    Flag(
        dest="stop_texts",
        spellings=("-r", "--reverse-prompt"),
        metavar="TEXT",
        read=read_text,
        repeats=True,
        section=Section.INPUT,
        commands=_GENERATING,
        help="Stop where TEXT appears in the output; may be given several times.",
    ),
    Flag(
        dest="escape",
        spellings=("-e", "--escape"),
        negative=("--no-escape",),
        section=Section.INPUT,
        commands=_GENERATING,
        help=r"Turn \n, \r, \t, \', \", \\ and \xHH in the prompt, the system prompt and -r into characters (default).",
    ),
    Flag(
        dest="display_prompt",
        spellings=("--display-prompt",),
        negative=("--no-display-prompt",),
        section=Section.INPUT,
        commands=_GENERATING,
        help="Print the prompt before the generated text (default, except with --chat and --json).",
    ),
    Flag(
        dest="ignore_eos",
        spellings=("--ignore-eos",),
        section=Section.INPUT,
        commands=_GENERATING,
        help="Never choose an end-of-generation token.",
    ),
    Flag(
        dest="pre_tokenizer",
        spellings=("--pre-tokenizer",),
        metavar="NAME",
        read=read_text,
        section=Section.INPUT,
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
        help="Context in tokens; 0: the training length. Left out: the largest up to the training length that fits.",
    ),
    Flag(
        dest="fit",
        spellings=("-fit", "--fit"),
        metavar="on|off",
        read=read_switch,
        bare="on",
        section=Section.CONTEXT,
        help="Without -c, choose the largest context that fits (on, default) or the training length (off).",
    ),
    Flag(
        dest="n_batch",
        spellings=("-b", "--batch-size"),
        metavar="N",
        read=_UP_TO_INT32,
        section=Section.CONTEXT,
        help=f"Tokens of a batch (default {DEFAULT_BATCH_TOKENS}).",
    ),
    Flag(
        dest="n_ubatch",
        spellings=("-ub", "--ubatch-size"),
        metavar="N",
        read=_UP_TO_INT32,
        section=Section.CONTEXT,
        help=f"Tokens run at once; at most -b (default {DEFAULT_UBATCH_TOKENS} on the CPU).",
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
        metavar="FILE",
        read=read_path,
        section=Section.STREAMING,
        help="Keep the host's pages in FILE instead of memory; CPU only.",
    ),
    Flag(
        dest="page_tokens",
        spellings=("--kv-page-tokens",),
        metavar="N",
        read=_UP_TO_INT32,
        section=Section.STREAMING,
        help=f"Tokens of a page, a power of two (default {DEFAULT_PAGE_TOKENS}).",
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
        help="auto, cpu, cuda or cuda:N (default auto: a GPU when there is one).",
    ),
    Flag(
        dest="n_threads",
        spellings=("-t", "--threads"),
        metavar="N",
        read=integer(1, 4096, named={"-1": None}),
        section=Section.DEVICE,
        help="CPU threads; -1 (default): one per core.",
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
        help="Plan for a device with N MiB of free memory instead of the one present.",
    ),
)

_SAMPLERS = (
    Flag(
        dest="seed",
        spellings=("-s", "--seed"),
        metavar="N",
        read=read_seed,
        section=Section.SAMPLING,
        commands=_GENERATING,
        help="Seed, 0 to 4294967294; -1 (default): draw one and report it.",
    ),
    Flag(
        dest="temperature",
        spellings=("--temp", "--temperature"),
        metavar="T",
        read=real(0.0, math.inf),
        section=Section.SAMPLING,
        commands=_GENERATING,
        help=f"Temperature; 0: always the best token, the lowest id among equals (default {_SAMPLING.temperature}).",
    ),
    Flag(
        dest="top_k",
        spellings=("--top-k",),
        metavar="N",
        read=integer(-1),
        section=Section.SAMPLING,
        commands=_GENERATING,
        help=f"Keep the N best tokens; 0 or -1: off (default {_SAMPLING.top_k}).",
    ),
    Flag(
        dest="top_p",
        spellings=("--top-p",),
        metavar="P",
        read=real(0.0, 1.0),
        section=Section.SAMPLING,
        commands=_GENERATING,
        help=f"Keep the best tokens that together reach probability P; 1: off (default {_SAMPLING.top_p}).",
    ),
    Flag(
        dest="min_p",
        spellings=("--min-p",),
        metavar="P",
        read=real(0.0, 1.0),
        section=Section.SAMPLING,
        commands=_GENERATING,
        help=f"Keep tokens at least P times as likely as the best; 0: off (default {_SAMPLING.min_p}).",
    ),
    Flag(
        dest="repeat_penalty",
        spellings=("--repeat-penalty",),
        metavar="X",
        read=real(1e-6, 1e6),
        section=Section.SAMPLING,
        commands=_GENERATING,
        help=f"Make recent tokens less likely by this factor; 1: off (default {_SAMPLING.repeat_penalty:g}).",
    ),
    Flag(
        dest="repeat_last_n",
        spellings=("--repeat-last-n",),
        metavar="N",
        read=integer(-1),
        section=Section.SAMPLING,
        commands=_GENERATING,
        help=f"How many tokens are recent; 0: off, -1: the whole context (default {_SAMPLING.repeat_last_n}).",
    ),
    Flag(
        dest="samplers",
        spellings=("--samplers",),
        metavar="NAMES",
        read=read_samplers,
        section=Section.SAMPLING,
        commands=_GENERATING,
        help=f"Samplers in their order; one left out is off (default {';'.join(_SAMPLING.samplers)}).",
    ),
    Flag(
        dest="samplers",
        spellings=("--sampler-seq", "--sampling-seq"),
        metavar="LETTERS",
        read=read_sampler_letters,
        section=Section.SAMPLING,
        commands=_GENERATING,
        help="The same by one letter each (default ekpmt).",
    ),
)

_CHAT = (
    Flag(
        dest="chat",
        spellings=("--chat",),
        section=Section.CHAT,
        commands=_GENERATING,
        help="Put the prompt into the model's chat template as one user message.",
    ),
    Flag(
        dest="conversation",
        spellings=("-cnv", "--conversation"),
        negative=("-no-cnv", "--no-conversation"),
        section=Section.CHAT,
        commands=_GENERATING,
        help="Converse; only when standard input is a terminal, otherwise one turn as with --chat.",
    ),
    Flag(
        dest="system_prompt",
        spellings=("-sys", "--system-prompt"),
        metavar="TEXT",
        read=read_text,
        section=Section.CHAT,
        commands=_GENERATING,
        help="System message; needs --chat or -cnv.",
    ),
    Flag(
        dest="chat_template",
        spellings=("--chat-template",),
        metavar="JINJA",
        read=read_text,
        section=Section.CHAT,
        commands=_GENERATING,
        help="Jinja text to use instead of the model's template; llama.cpp's built-in names are not known here.",
    ),
    Flag(
        dest="chat_template_file",
        spellings=("--chat-template-file",),
        metavar="FILE",
        read=read_path,
        section=Section.CHAT,
        commands=_GENERATING,
        help="The same from a file.",
    ),
)

_ROPE = (
    Flag(
        dest="rope.scaling_type",
        spellings=("--rope-scaling",),
        metavar="TYPE",
        read=one_of(RopeScalingType),
        section=Section.ROPE,
        help=f"How positions are stretched: {_SCALINGS} (default: as the model says).",
    ),
    Flag(
        dest="rope.scale",
        spellings=("--rope-scale",),
        metavar="X",
        read=real(0.0, math.inf, above=True),
        section=Section.ROPE,
        help="Stretch positions by X; linear unless --rope-scaling or the model says otherwise.",
    ),
    Flag(
        dest="rope.freq_base",
        spellings=("--rope-freq-base",),
        metavar="X",
        read=real(0.0, math.inf, above=True),
        section=Section.ROPE,
        help="Base of the rotation frequencies (default: the model's).",
    ),
    Flag(
        dest="rope.freq_scale",
        spellings=("--rope-freq-scale",),
        metavar="X",
        read=real(0.0, math.inf, above=True),
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
        read=real(0.0, math.inf, named=_FROM_MODEL),
        section=Section.ROPE,
        help="YaRN: factor on the attention magnitude; -1 (default): as the model says.",
    ),
    Flag(
        dest="rope.yarn_beta_slow",
        spellings=("--yarn-beta-slow",),
        metavar="X",
        read=real(0.0, math.inf, named=_FROM_MODEL),
        section=Section.ROPE,
        help="YaRN: rotations below which a dimension is stretched; -1 (default): as the model says.",
    ),
    Flag(
        dest="rope.yarn_beta_fast",
        spellings=("--yarn-beta-fast",),
        metavar="X",
        read=real(0.0, math.inf, named=_FROM_MODEL),
        section=Section.ROPE,
        help="YaRN: rotations above which a dimension is kept; -1 (default): as the model says.",
    ),
)

FLAGS = FlagTable(
    own=_GENERAL + _INPUT + _CONTEXT + _STREAMING + _DEVICE + _SAMPLERS + _CHAT + _ROPE,
    foreign=FOREIGN_FLAGS,
)
