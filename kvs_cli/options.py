"""Matched arguments to the values a command runs with, and every refusal that needs no model. Nothing is opened."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from kvs_cli.arguments import Arguments
from kvs_cli.evaluation_flags import DEFAULT_EVALUATION_CTX
from kvs_cli.evaluation_options import (
    EvaluationOptions,
    compares_files,
    find_evaluation_problems,
    give_store_to_base,
)
from kvs_cli.flag_table import FLAGS
from kvs_cli.flags import KL_DIVERGENCE, PERPLEXITY
from kvs_core.config import RopeOverrides, RunConfig, SamplingConfig
from kvs_core.errors import Problem
from kvs_core.model_shape import ModelShape
from kvs_core.validate import find_warnings, validate

_ROPE_PREFIX = "rope."
_SAMPLER_OF_SETTING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "penalties",
    "repeat_last_n": "penalties",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """Where the prompt comes from and how it becomes the model's input."""

    prompt: str | None = None
    prompt_file: Path | None = None
    escape: bool = True
    chat: bool = False
    conversation: bool = False
    system_prompt: str | None = None
    chat_template: str | None = None
    chat_template_file: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """What is printed and when generation ends; ``display_prompt`` None follows the kind of prompt."""

    n_predict: int = -1
    stop_texts: tuple[str, ...] = ()
    display_prompt: bool | None = None
    json: bool = False
    verbose: bool = False
    log_file: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOptions:
    """Everything a command needs, plus what was wrong and what is worth saying."""

    config: RunConfig
    sampling: SamplingConfig
    prompt: PromptOptions
    output: OutputOptions
    evaluation: EvaluationOptions
    arguments: Arguments
    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]


def build_options(arguments: Arguments) -> CommandOptions:
    """Typed options; ``problems`` then lists all of them: unreadable words, refused flags, contradictions, rules."""
    problems = list(arguments.problems)
    needs_model = not compares_files(arguments)
    if (
        needs_model
        and not arguments.is_given("model_path")
        and not any(problem.field in _MODEL_SPELLINGS for problem in problems)
    ):
        problems.append(Problem(field="-m", value="", reason="is missing", hint="pass a GGUF file: -m model.gguf"))
    config = _fill(RunConfig(model_path=Path()), arguments)
    rope = _fill(RopeOverrides(), arguments, prefix=_ROPE_PREFIX)
    config = replace(config, rope=rope)
    if arguments.command in (PERPLEXITY, KL_DIVERGENCE) and config.n_ctx is None:
        config = replace(config, n_ctx=DEFAULT_EVALUATION_CTX)
    config, evaluation = give_store_to_base(config, _fill(EvaluationOptions(), arguments))
    problems += find_evaluation_problems(arguments)
    problems += _find_contradictions(arguments)
    problems += [name_flags(problem) for problem in validate(config)]
    return CommandOptions(
        config=config,
        sampling=_fill(SamplingConfig(), arguments),
        prompt=_fill(PromptOptions(), arguments),
        output=_fill(OutputOptions(), arguments),
        evaluation=evaluation,
        arguments=arguments,
        problems=tuple(problems),
        warnings=tuple(_find_idle_samplers(arguments)),
    )


def name_flags(problem: Problem) -> Problem:
    """The same problem under the flag a user would change instead of the configuration's field."""
    negative = FLAGS.negative_of(problem.field)
    if problem.value == "off" and negative is not None:
        return replace(problem, field=negative, value="")
    return replace(problem, field=FLAGS.spelling_of(problem.field))


def find_model_warnings(config: RunConfig, shape: ModelShape) -> list[Problem]:
    """``find_warnings`` under flag names."""
    return [name_flags(problem) for problem in find_warnings(config, shape)]


_MODEL_SPELLINGS = ("-m", "--model", "KVS_MODEL")


def _fill(defaults: Any, arguments: Arguments, *, prefix: str = "") -> Any:
    """``defaults`` with every field replaced that the command line or a variable gave."""
    given = {
        field.name: arguments.get(prefix + field.name)
        for field in fields(defaults)
        if arguments.is_given(prefix + field.name)
    }
    return replace(defaults, **given)


def _find_contradictions(arguments: Arguments) -> list[Problem]:
    problems = []
    for one, other, reason, hint in (
        ("prompt", "prompt_file", "also gives the prompt", "give one of the two"),
        ("chat_template", "chat_template_file", "also gives the template", "give one of the two"),
    ):
        if arguments.is_given(one) and arguments.is_given(other):
            problems.append(_problem(arguments, one, f"{_shown(arguments, other)} {reason}", hint))
    wants_template = arguments.get("chat") or arguments.get("conversation")
    for dest in ("system_prompt", "chat_template", "chat_template_file"):
        if arguments.is_given(dest) and not wants_template:
            problems.append(
                _problem(arguments, dest, "has no place in a raw completion", "add --chat, or -cnv in a terminal")
            )
    if arguments.get("conversation") and arguments.get("json"):
        problems.append(_problem(arguments, "conversation", "cannot answer in one JSON document", "use --chat"))
    return problems


def find_overwritten_input(options: CommandOptions) -> Problem | None:
    """A ``--log-file`` that would replace something the command is about to read."""
    log_file = options.output.log_file
    if log_file is None:
        return None
    for dest, path in (
        ("model_path", options.config.model_path),
        ("prompt_file", options.prompt.prompt_file),
        ("chat_template_file", options.prompt.chat_template_file),
        ("base_file", options.evaluation.base_file),
        ("file_base", options.evaluation.file_base),
        ("file_other", options.evaluation.file_other),
    ):
        if path is not None and _is_same_file(path, log_file):
            reason = f"is the file of {FLAGS.spelling_of(dest)}, which it would overwrite"
            return _problem(options.arguments, "log_file", reason, "choose another --log-file")
    return None


def _is_same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # one of them is not there, so nothing can be lost
        return False


def _find_idle_samplers(arguments: Arguments) -> list[Problem]:
    """Sampler settings that were given although ``--samplers`` leaves their sampler out."""
    samplers = arguments.get("samplers")
    if not isinstance(samplers, tuple):
        return []
    return [
        _problem(arguments, dest, f"changes nothing: the samplers in use leave {sampler} out", None)
        for dest, sampler in _SAMPLER_OF_SETTING.items()
        if arguments.is_given(dest) and sampler not in samplers
    ]


def _shown(arguments: Arguments, dest: str) -> str:
    origin = arguments.settings[dest].origin
    return origin.removeprefix("variable ")


def _problem(arguments: Arguments, dest: str, reason: str, hint: str | None) -> Problem:
    return Problem(field=_shown(arguments, dest), value="", reason=reason, hint=hint)


def describe_settings(options: CommandOptions) -> list[str]:
    """The configuration in effect, one line per value: its flag, the value and where it came from."""
    lines = []
    defaults: dict[str, object] = {}
    for values, prefix in (
        (options.config, ""),
        (options.config.rope, _ROPE_PREFIX),
        (options.sampling, ""),
        (options.prompt, ""),
        (options.output, ""),
        (options.evaluation, ""),
    ):
        defaults |= {prefix + field.name: getattr(values, field.name) for field in fields(values)}
    for flag in FLAGS.of_command(options.arguments.command):
        setting = options.arguments.settings.get(flag.dest)
        if setting is not None and flag.dest in defaults:
            lines.append(f"{flag.spellings[0]} = {_show(setting.text)} (from {setting.origin})")
        elif defaults.get(flag.dest) is not None:
            lines.append(f"{flag.spellings[0]} = {_show_default(defaults[flag.dest])} (default)")
        defaults.pop(flag.dest, None)
    return lines


def _show(text: str) -> str:
    return repr(text) if not text or any(char.isspace() or not char.isprintable() for char in text) else text


def _show_default(value: object) -> str:
    value = getattr(value, "mode", value)  # an ArenaRequest shows its mode
    value = getattr(value, "value", value)  # an enum shows its spelling
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ";".join(map(str, value))
    return _show(os.fspath(value) if isinstance(value, Path) else str(value))
