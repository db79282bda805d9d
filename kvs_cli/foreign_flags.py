"""Flags of llama.cpp that this toolkit knows but does not have, in groups that share one reason.

A group lists its flags in one string: words are flags, ``|`` joins spellings of the same flag, a final ``=`` says
that a value follows. A flag that lands here later moves to flag_table.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvs_cli.flags import ForeignFlag, ForeignStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    flags: str
    reason: str
    hint: str | None = None
    status: ForeignStatus = ForeignStatus.REFUSED


_ALREADY_SO = (
    _Group(flags="--no-context-shift", reason="contexts are never shifted", status=ForeignStatus.ALREADY_SO),
    _Group(flags="--jinja", reason="chat templates always run as Jinja", status=ForeignStatus.ALREADY_SO),
    _Group(flags="--no-warmup", reason="only a GPU warms up, and has to", status=ForeignStatus.ALREADY_SO),
    _Group(flags="--mmap", reason="weights are always mapped from the file", status=ForeignStatus.ALREADY_SO),
    _Group(
        flags="-nr|--no-repack",
        reason="on the CPU weights stay as in the file, and a GPU has one layout of its own",
        status=ForeignStatus.ALREADY_SO,
    ),
    _Group(flags="--offline", reason="nothing is ever downloaded", status=ForeignStatus.ALREADY_SO),
    _Group(flags="--no-mmproj|--no-mmproj-auto", reason="there is no image input", status=ForeignStatus.ALREADY_SO),
    _Group(
        flags="-no-kvu|--no-kv-unified -kvu|--kv-unified -nocb|--no-cont-batching --no-cache-prompt"
        " --no-cache-idle-slots",
        reason="there is one sequence",
        status=ForeignStatus.ALREADY_SO,
    ),
    _Group(
        flags="--perf --show-timings --simple-io --no-log-prefix --no-log-timestamps --no-log-jsonl",
        reason="this is how messages are written anyway",
        status=ForeignStatus.ALREADY_SO,
    ),
)

_REFUSED = (
    _Group(
        flags="--context-shift --keep=",
        reason="shifting a full context is not supported yet",
        hint="raise -c; generation stops when the context is full",
    ),
    _Group(
        flags="--prompt-cache= --prompt-cache-all --prompt-cache-ro --slot-save-path=",
        reason="saving and loading the state of a run is not supported yet",
    ),
    _Group(
        flags="-sm|--split-mode= -ts|--tensor-split= -mg|--main-gpu= --rpc=",
        reason="a run uses one device",
        hint="choose it with --device cuda:N",
    ),
    _Group(
        flags="--lora= --lora-scaled= --lora-init-without-apply --control-vector= --control-vector-scaled="
        " --control-vector-layer-range=",
        reason="adapters and control vectors are not supported",
        hint="merge the adapter into the model first",
    ),
    _Group(
        flags="-mm|--mmproj= -mmu|--mmproj-url= --mmproj-auto --mmproj-offload --no-mmproj-offload"
        " -mmdev|--mmproj-device= --image|--audio|--video= --image-min-tokens= --image-max-tokens="
        " --mtmd-batch-max-tokens= --video-fps= --video-timestamp-interval= --video-ffmpeg-dir= --media-path=",
        reason="only text goes in; images, sound and video are not supported",
    ),
    _Group(
        flags="--grammar= --grammar-file= -j|--json-schema= -jf|--json-schema-file=",
        reason="grammars are not supported",
    ),
    _Group(
        flags="--spec-type= --spec-chain= --spec-draft-n-max= --spec-draft-n-min= --spec-draft-p-split|--draft-p-split="
        " --spec-draft-p-min|--draft-p-min= --draft|--draft-n|--draft-max= --draft-min|--draft-n-min= --spec-default"
        " --spec-draft-model|-md|--model-draft= --spec-draft-hf|-hfd|-hfrd|--hf-repo-draft="
        " --spec-draft-threads|-td|--threads-draft= --spec-draft-threads-batch|-tbd|--threads-batch-draft="
        " --spec-draft-cpu-mask|-Cd|--cpu-mask-draft= --spec-draft-cpu-range|-Crd|--cpu-range-draft="
        " --spec-draft-cpu-strict|--cpu-strict-draft= --spec-draft-prio|--prio-draft= --spec-draft-poll|--poll-draft="
        " --spec-draft-cpu-mask-batch|-Cbd|--cpu-mask-batch-draft= --spec-draft-poll-batch|--poll-batch-draft="
        " --spec-draft-cpu-range-batch|-Crbd|--cpu-range-batch-draft="
        " --spec-draft-cpu-strict-batch|--cpu-strict-batch-draft= --spec-draft-prio-batch|--prio-batch-draft="
        " --spec-draft-type-k|-ctkd|--cache-type-k-draft= --spec-draft-type-v|-ctvd|--cache-type-v-draft="
        " --spec-draft-override-tensor|-otd|--override-tensor-draft= --spec-draft-cpu-moe|-cmoed|--cpu-moe-draft"
        " --spec-draft-n-cpu-moe|--spec-draft-ncmoe|-ncmoed|--n-cpu-moe-draft="
        " --spec-draft-backend-sampling --no-spec-draft-backend-sampling --spec-synth-len= --spec-synth-rates="
        " --spec-draft-device|-devd|--device-draft= --spec-draft-ngl|-ngld|--gpu-layers-draft|--n-gpu-layers-draft="
        " --spec-ngram-mod-n-min= --spec-ngram-mod-n-max= --spec-ngram-mod-n-match= --spec-ngram-size-n="
        " --spec-ngram-size-m= --spec-ngram-min-hits= --spec-ngram-simple-size-n= --spec-ngram-simple-size-m="
        " --spec-ngram-simple-min-hits= --spec-ngram-map-k-size-n= --spec-ngram-map-k-size-m="
        " --spec-ngram-map-k-min-hits= --spec-ngram-map-k4v-size-n= --spec-ngram-map-k4v-size-m="
        " --spec-ngram-map-k4v-min-hits= -lcs|--lookup-cache-static= -lcd|--lookup-cache-dynamic= --mtp --eagle3"
        " --dflash",
        reason="speculative decoding is not supported yet",
    ),
    _Group(
        flags="-cmoe|--cpu-moe -ncmoe|--n-cpu-moe= -ncffn|--n-cpu-ffn= -ot|--override-tensor= --op-offload"
        " --no-op-offload --no-host --repack",
        reason="a model runs on one device as a whole; tensors are not placed one by one",
    ),
    _Group(
        flags="-fitp|--fit-print= -fitt|--fit-target= -fitc|--fit-ctx=",
        reason="fitting chooses the context and nothing else",
        hint="give -c yourself, or look at the plan with kvs validate",
    ),
    _Group(
        flags="--top-nsigma|--top-n-sigma= --xtc-probability= --xtc-threshold= --typical|--typical-p="
        " --presence-penalty= --frequency-penalty= --dry-multiplier= --dry-base= --dry-allowed-length="
        " --dry-penalty-last-n= --dry-sequence-breaker= --adaptive-target= --adaptive-decay= --dynatemp-range="
        " --dynatemp-exp= --mirostat= --mirostat-lr= --mirostat-ent= -l|--logit-bias= -bs|--backend-sampling"
        " --tfs= --penalize-nl",
        reason="this sampler is not supported",
        hint="there are --temp, --top-k, --top-p, --min-p and --repeat-penalty",
    ),
    _Group(
        flags="-tb|--threads-batch=",
        reason="the prompt and the generated text run on the same threads",
        hint="use -t",
    ),
    _Group(
        flags="-C|--cpu-mask= -Cr|--cpu-range= --cpu-strict= --prio= --poll= -Cb|--cpu-mask-batch="
        " -Crb|--cpu-range-batch= --cpu-strict-batch= --prio-batch= --poll-batch= --numa=",
        reason="threads are not placed or prioritised here",
        hint="use taskset, nice or numactl",
    ),
    _Group(
        flags="-lm|--load-mode= -lzm|--lazy-mode= --no-mmap --mlock --direct-io --no-direct-io -dio -ndio",
        reason="weights are always mapped from the file",
    ),
    _Group(
        flags="--override-kv=",
        reason="metadata of the file is not overridden one by one",
        hint="--pre-tokenizer replaces tokenizer.ggml.pre",
    ),
    _Group(
        flags="-mu|--model-url= -hf|-hfr|--hf-repo= -hff|--hf-file= -hft|--hf-token= -dr|--docker-repo=",
        reason="nothing is downloaded",
        hint="fetch the file first and pass it with -m",
    ),
    _Group(
        flags="-i|--interactive -if|--interactive-first -mli|--multiline-input --in-prefix-bos --in-prefix="
        " --in-suffix= -st|--single-turn",
        reason="there is no interactive mode besides -cnv",
        hint="use -cnv in a terminal, or --chat for one turn",
    ),
    _Group(
        flags="--no-jinja --chat-template-kwargs= --reasoning-format= -rea|--reasoning= --reasoning-effort="
        " --reasoning-budget= --reasoning-budget-message= --reasoning-preserve --no-reasoning-preserve"
        " --skip-chat-parsing --no-skip-chat-parsing --prefill-assistant --no-prefill-assistant",
        reason="templates run as they are; reasoning is not treated apart",
    ),
    _Group(flags="-sysf|--system-prompt-file=", reason="not supported", hint="use -sys with the text"),
    _Group(flags="-bf|--binary-file=", reason="a prompt is UTF-8 text", hint="use -f"),
    _Group(flags="-sp|--special", reason="special tokens are not printed", hint="-v shows token ids"),
    _Group(
        flags="-co|--color= --log-colors= --log-disable --log-jsonl --log-prefix --log-timestamps --log-prompts-dir="
        " -lv|--verbosity|--log-verbosity= --verbose-prompt -ptc|--print-token-count= --no-perf --no-show-timings",
        reason="messages have one form",
        hint="redirect standard error, or use -v or --log-file",
    ),
    _Group(
        flags="-gan|--grp-attn-n= -gaw|--grp-attn-w=",
        reason="self-extend is not supported",
        hint="use --rope-scaling yarn",
    ),
    _Group(
        flags="-dt|--defrag-thold= -cram|--cache-ram= -ctxcp|--ctx-checkpoints|--swa-checkpoints="
        " -cms|--checkpoint-min-step= --warmup --check-tensors",
        reason="there is nothing of this kind to set",
    ),
    _Group(
        flags="--ppl-output-type= --all-logits --hellaswag --hellaswag-tasks= --winogrande --winogrande-tasks="
        " --multiple-choice --multiple-choice-tasks=",
        reason="belongs to llama-perplexity and is not supported",
    ),
    _Group(
        flags="--host= --port= --path= --api-key= --api-key-file= --api-prefix= --ssl-key-file= --ssl-cert-file="
        " -to|--timeout= --threads-http= --metrics --props --slots --no-slots --embedding|--embeddings"
        " --rerank|--reranking --cache-prompt --cache-reuse= -sps|--slot-prompt-similarity= --cache-idle-slots"
        " -cb|--cont-batching --kv-unified-per-slot= --ui|--webui --no-ui|--no-webui -a|--alias= --tags= --tools="
        " --server-base= --reuse-port --sse-ping-interval= --models-dir= --models-preset= --models-max="
        " --models-autoload --no-models-autoload -ag|--agent -no-ag|--no-agent --sleep-idle-seconds= --spm-infill"
        " --ui-config|--webui-config= --ui-config-file|--webui-config-file= --ui-mcp-proxy|--webui-mcp-proxy"
        " --no-ui-mcp-proxy|--no-webui-mcp-proxy --cors-origins= --cors-methods= --cors-headers= --cors-credentials"
        " --no-cors-credentials --tools-runtime= --mcp-servers-config= --mcp-servers-json=",
        reason="belongs to llama-server; there is no server here",
    ),
    _Group(
        flags="--pooling= --attention= --embd-normalize= --embd-output-format= --embd-separator= --cls-separator=",
        reason="embeddings are not computed here",
    ),
    _Group(
        flags="--list-devices -cl|--cache-list --completion-bash --usage --license|--licenses",
        reason="not a command of this toolkit",
        hint="kvs --help lists what there is",
    ),
    _Group(flags="--version", reason="stands alone", hint="kvs --version"),
)


def _parse(group: _Group) -> list[ForeignFlag]:
    flags = []
    for word in group.flags.split():
        spellings = tuple(word.removesuffix("=").split("|"))
        flags.append(
            ForeignFlag(
                spellings=spellings,
                takes_value=word.endswith("="),
                status=group.status,
                reason=group.reason,
                hint=group.hint,
            )
        )
    return flags


FOREIGN_FLAGS: tuple[ForeignFlag, ...] = tuple(flag for group in _ALREADY_SO + _REFUSED for flag in _parse(group))
"""Every flag of llama.cpp's common set (of late 2026) that flag_table.py does not have."""
