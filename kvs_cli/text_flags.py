"""Flags about text: prompt, output, sampling, chat. Flags about the model and its memory are in flag_table.py."""

from __future__ import annotations

import math

from kvs_cli.flags import RUN, VALIDATE, Flag, Section
from kvs_cli.readers import (
    integer,
    read_path,
    read_sampler_letters,
    read_samplers,
    read_seed,
    read_stop_text,
    read_text,
    real,
)
from kvs_core.config import SamplingConfig

_SAMPLING = SamplingConfig()
_GENERATING = (RUN, VALIDATE)

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
        read=read_stop_text,
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
        help=r"Turn \n, \r, \t, \', \", \\ and \xHH in the prompt and in -r into characters (default).",
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
        metavar="TEMPLATE",
        read=read_text,
        section=Section.CHAT,
        commands=_GENERATING,
        help="Template instead of the model's: chatml, llama3, gemma, or Jinja text.",
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

TEXT_FLAGS: tuple[Flag, ...] = _INPUT + _SAMPLERS + _CHAT
