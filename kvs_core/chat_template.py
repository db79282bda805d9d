"""Chat templates: which Jinja text to use, and rendering messages with it in a sandbox.

Tokenising the result is ``Tokenizer.encode_rendered``, which also settles the BOS that most templates write.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvs_core.errors import ConfigError, Problem

TEMPLATE_KEY = "tokenizer.chat_template"

# Templates that go by a name, for models whose file has none.
NAMED_TEMPLATES: dict[str, str] = {
    "chatml": (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama3": (
        "{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
        "{{ message.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "gemma": (
        # No system role: its text goes in front of the first user turn.
        "{% set pending = namespace(text='') %}{% for message in messages %}"
        "{% if message.role == 'system' %}{% set pending.text = message.content | trim + '\n\n' %}{% else %}"
        "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
        "{% if message.role == 'user' %}{{ pending.text }}{% set pending.text = '' %}{% endif %}"
        "{{ message.content | trim }}<end_of_turn>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
}

# A template is a program out of a downloaded file. These bounds are far above what honest ones need (the longest known
# render in milliseconds) and keep a hostile one from hanging the run or filling the memory.
TIME_LIMIT_S = 10.0
_CHARACTERS = 1 << 26
_MEMORY_BYTES = 1 << 29  # twice what the longest text allowed can take
_REPEATED_ITEMS = 1 << 20
_POWER_BITS = 4096


def choose_template(metadata: Mapping[str, Any], *, option: str | None = None) -> str:
    """The Jinja text to render with.

    ``option`` is what the user gave: a name out of ``NAMED_TEMPLATES`` or Jinja text; None takes the model's own.
    Raises ConfigError when the model has none, or when the option is neither a known name nor a template.
    """
    names = ", ".join(NAMED_TEMPLATES)
    if option is not None:
        if option in NAMED_TEMPLATES:
            return NAMED_TEMPLATES[option]
        if "{{" in option or "{%" in option:
            return option
        raise ConfigError(
            [
                Problem(
                    field="--chat-template",
                    value=repr(option),
                    reason=f"neither a known name ({names}) nor Jinja text",
                    hint="--chat-template-file reads a template from a file",
                )
            ]
        )
    template = metadata.get(TEMPLATE_KEY)
    if not isinstance(template, str) or not template:
        raise ConfigError(
            f"the model file has no chat template ({TEMPLATE_KEY})",
            hint=f"name one with --chat-template ({names}) or give one with --chat-template-file",
        )
    return template


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    bos_text: str = "",
    eos_text: str = "",
    now: datetime | None = None,
    time_limit_s: float = TIME_LIMIT_S,
) -> str:
    """Render messages (``role`` and ``content``) with a Jinja template.

    The environment is the one templates are written for: block lines leave no white space, ``raise_exception``,
    ``strftime_now`` (``now`` fixes its time) and a ``tojson`` that keeps characters as they are.
    Raises ConfigError, with one line, for a template that does not parse, refuses the messages, or goes out of bounds.
    """
    environment = _Environment(time_limit_s)
    moment = now or datetime.now()
    environment.globals["strftime_now"] = moment.strftime
    try:
        with _bounded_memory(_MEMORY_BYTES):
            program = _compile(environment, template)
            pieces, length = [], 0
            for piece in program.generate(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                bos_token=bos_text,
                eos_token=eos_text,
                tools=None,
                documents=None,
            ):
                length += len(piece)
                if length > _CHARACTERS:
                    raise SecurityError(f"its text is longer than {_CHARACTERS} characters")
                pieces.append(piece)
    except TemplateSyntaxError as error:
        raise _failure(f"line {error.lineno} does not parse: {error.message}") from error
    except _RefusalError as error:
        raise _failure(f"it refuses these messages: {error}") from error
    except MemoryError as error:
        raise _failure(f"rendering failed: it needs more than {_MEMORY_BYTES} bytes of memory") from error
    except Exception as error:  # whatever a foreign program does wrong, it is the template's error
        name = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        raise _failure(f"rendering failed: {name}{error}") from error
    return "".join(pieces)


@contextmanager
def _bounded_memory(n_bytes: int) -> Iterator[None]:
    """Let the process grow by at most ``n_bytes`` meanwhile.

    One call into native code (padding a number to a billion digits) asks no clock, but it has to ask for its memory.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    in_use = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5]) * resource.getpagesize()
    bound = in_use + n_bytes if soft == resource.RLIM_INFINITY else min(soft, in_use + n_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _failure(reason: str) -> ConfigError:
    return ConfigError(
        [Problem(field="chat template", value="", reason=" ".join(reason.split()))],
        hint="choose another one with --chat-template or --chat-template-file",
    )


class _RefusalError(TemplateError):
    """The template called ``raise_exception``."""


def _raise_exception(message: str) -> NoReturn:
    raise _RefusalError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationTag(Extension):
    """``{% generation %}`` marks what a model is trained to say; for rendering it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - the attribute jinja2 defines

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with a clock: every loop round and macro call asks whether time is left."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, time_limit_s: float) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag])
        self._time_limit_s = time_limit_s
        self._deadline = time.monotonic() + time_limit_s
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception

    def tick(self) -> None:
        if time.monotonic() > self._deadline:
            raise SecurityError(f"it takes longer than {self._time_limit_s:g} seconds")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse products that would be huge from a few characters of template."""
        if operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _POWER_BITS:
                raise SecurityError("a power is too large")
        else:
            for items, count in ((left, right), (right, left)):
                repeats = isinstance(items, (str, list, tuple)) and isinstance(count, int)
                if repeats and len(items) * count > _REPEATED_ITEMS:
                    raise SecurityError("a repeated text or list is too long")
        return super().call_binop(context, operator, left, right)


def _compile(environment: _Environment, template: str) -> Template:
    tree = environment.parse(template)
    bodies = [block.body for block in tree.find_all(nodes.For)]
    bodies += [block.body for block in tree.find_all(nodes.Macro)]
    bodies += [block.body for block in tree.find_all(nodes.CallBlock)]
    for body in bodies:
        tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        body.insert(0, nodes.ExprStmt(tick, lineno=1))
    tree.set_environment(environment)
    return Template.from_code(environment, environment.compile(tree), environment.make_globals(None))
