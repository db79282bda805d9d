"""Flags of ``kvs perplexity`` and ``kvs kl-divergence``; those they share with other commands are in flag_table.py."""

from __future__ import annotations

import math
from pathlib import Path

from kvs_cli.flags import KL_DIVERGENCE, PERPLEXITY, Flag, Section
from kvs_cli.readers import integer, one_of, read_arena, read_kv_type, read_path, read_text, real
from kvs_core.evaluate.choices import LogitsFormat

DEFAULT_EVALUATION_CTX = 512
"""llama-perplexity's."""

_EVALUATING = (PERPLEXITY, KL_DIVERGENCE)
_FORMATS = ", ".join(kind.value for kind in LogitsFormat)


def read_percentage(text: str) -> float:
    """A percentage as it is printed, as a share. 0 to 1 is refused: it is a share written by mistake."""
    value = real(0.0, 100.0)(text)
    assert isinstance(value, float)
    if value <= 1.0:
        raise ValueError(f"{text} is a percentage, as printed: 99.9, not 0.999; allowed: above 1 to 100")
    return value / 100.0


def read_chunk_count(text: str) -> int:
    """-1 for all, or at least 1."""
    value = integer(-1)(text)
    if value == 0:
        raise ValueError("0 is out of range; allowed: -1 (all) and numbers from 1")
    assert isinstance(value, int)
    return value


def read_plot_path(text: str) -> Path:
    """A path whose suffix says which kind of picture is wanted."""
    path = read_path(text)
    assert isinstance(path, Path)
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ValueError(f"{text!r} does not end in .png, .svg or .pdf")
    return path


EVALUATION_FLAGS = (
    Flag(
        dest="prompt_file",
        spellings=("-f", "--file"),
        metavar="FILE",
        read=read_path,
        section=Section.EVALUATION,
        commands=_EVALUATING,
        help="The text, UTF-8, without one newline at its end; nothing else of it is changed. Without -f and -p it "
        "comes from standard input; --kl-divergence has it in the base file.",
    ),
    Flag(
        dest="prompt",
        spellings=("-p", "--prompt"),
        metavar="TEXT",
        read=read_text,
        section=Section.EVALUATION,
        commands=_EVALUATING,
        help="The text itself.",
    ),
    Flag(
        dest="n_ctx",
        spellings=("-c", "--ctx-size"),
        metavar="N",
        read=integer(3),
        section=Section.EVALUATION,
        commands=_EVALUATING,
        help=f"Tokens of a chunk (default {DEFAULT_EVALUATION_CTX}, or that of the base file); the second half of each "
        "is scored. The text needs twice as many tokens.",
    ),
    Flag(
        dest="n_chunks",
        spellings=("--chunks",),
        metavar="N",
        read=read_chunk_count,
        section=Section.EVALUATION,
        commands=_EVALUATING,
        help="Take only the first N chunks; -1 (default): all. More than there are is refused.",
    ),
    Flag(
        dest="ppl_stride",
        spellings=("--ppl-stride",),
        metavar="N",
        read=integer(0),
        section=Section.EVALUATION,
        commands=(PERPLEXITY,),
        help="Windows that advance by N tokens and score their last N, as llama-perplexity; 0 (default): off.",
    ),
    Flag(
        dest="base_file",
        spellings=("--kl-divergence-base", "--save-all-logits"),
        metavar="FILE",
        read=read_path,
        section=Section.EVALUATION,
        commands=(PERPLEXITY,),
        help="Save the logits as a base for comparisons; with --kl-divergence, compare with FILE, whose text and "
        "context are used.",
    ),
    Flag(
        dest="compares",
        spellings=("--kl-divergence",),
        section=Section.EVALUATION,
        commands=(PERPLEXITY,),
        help="Compare with the base file instead of writing it.",
    ),
    Flag(
        dest="kld_format",
        spellings=("--kld-format",),
        metavar="FORMAT",
        read=one_of(LogitsFormat),
        section=Section.EVALUATION,
        commands=(PERPLEXITY,),
        help=f"Format of the base file that is written: {_FORMATS} (default llama, which llama-perplexity reads; kvs "
        "takes less than a third and proves identity). When reading it is recognised.",
    ),
    Flag(
        dest="base_type_k",
        spellings=("--base-ctk", "--base-cache-type-k"),
        metavar="TYPE",
        read=read_kv_type,
        section=Section.EVALUATION,
        commands=(KL_DIVERGENCE,),
        help="Type of cached keys on the base side (default: that of -ctk); --kv-layer-types then holds for the "
        "measured side alone.",
    ),
    Flag(
        dest="base_type_v",
        spellings=("--base-ctv", "--base-cache-type-v"),
        metavar="TYPE",
        read=read_kv_type,
        section=Section.EVALUATION,
        commands=(KL_DIVERGENCE,),
        help="Type of cached values on the base side (default: that of -ctv); --kv-layer-types then holds for the "
        "measured side alone.",
    ),
    Flag(
        dest="base_arena",
        spellings=("--base-kv-stream-arena-mib", "--base-kv-stream-stage-mib"),
        metavar="N|auto",
        read=read_arena,
        section=Section.EVALUATION,
        commands=(KL_DIVERGENCE,),
        help="Arena of the base side; 0: off (default: that of the measured side).",
    ),
    Flag(
        dest="file_base",
        spellings=("--base",),
        metavar="FILE",
        read=read_path,
        section=Section.EVALUATION,
        commands=(KL_DIVERGENCE,),
        help="Compare two saved files, this one as the base; no model is run.",
    ),
    Flag(
        dest="file_other",
        spellings=("--other",),
        metavar="FILE",
        read=read_path,
        section=Section.EVALUATION,
        commands=(KL_DIVERGENCE,),
        help="The file that --base is compared with.",
    ),
    Flag(
        dest="max_kld",
        spellings=("--max-kld",),
        metavar="X",
        read=real(0.0, math.inf),
        section=Section.EVALUATION,
        commands=_EVALUATING,
        help="Exit with 1 when the KL divergence of any row is above X.",
    ),
    Flag(
        dest="max_mean_kld",
        spellings=("--max-mean-kld",),
        metavar="X",
        read=real(0.0, math.inf),
        section=Section.EVALUATION,
        commands=_EVALUATING,
        help="Exit with 1 when the mean KL divergence is above X.",
    ),
    Flag(
        dest="min_same_top",
        spellings=("--min-same-top",),
        metavar="PERCENT",
        read=read_percentage,
        section=Section.EVALUATION,
        commands=_EVALUATING,
        help="Exit with 1 when the most probable token is the same in fewer than PERCENT of the rows.",
    ),
    Flag(
        dest="plot",
        spellings=("--plot",),
        metavar="FILE",
        read=read_plot_path,
        section=Section.EVALUATION,
        commands=_EVALUATING,
        help="Draw the KL divergence by position and its distribution (.png, .svg or .pdf); needs the extra plot.",
    ),
    Flag(
        dest="resumes",
        spellings=("--resume",),
        negative=("--no-resume",),
        section=Section.EVALUATION,
        commands=_EVALUATING,
        help="Keep finished chunks, and go on from those of an interrupted run of the same command (default).",
    ),
)
