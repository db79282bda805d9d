"""Where the prompt comes from and what it turns into: text, then tokens. No session here."""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvs_cli.console import Console, is_terminal
from kvs_cli.options import CommandOptions, PromptOptions
from kvs_core.chat_template import choose_template, render_chat
from kvs_core.errors import ConfigError, FileAccessError, Problem
from kvs_core.file_creation import explain_os_error, suggest_other_file
from kvs_core.prompt_text import decode_prompt_bytes
from kvs_core.tokenizer import Tokenizer

STANDARD_INPUT = "standard input"
_HOW_TO_PROMPT = "give one with -p TEXT or -f FILE, or pipe it in"
_HOW_TO_ESCAPE = "\\xHH is one byte: give all bytes of a UTF-8 character, or keep backslashes with --no-escape"
_BYTE_ORDER_MARK = "\ufeff"
_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|([nrt'\"\\]))")
_ESCAPED = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"'": b"'", b'"': b'"', b"\\": b"\\"}

Message = Mapping[str, str]


def read_prompt(options: PromptOptions) -> str:
    """The prompt's text, escapes resolved.

    Only ``-p ''`` asks for an empty prompt; an empty file or an empty standard input is refused as a mistake.
    Raises ConfigError for an absent, empty or undecodable prompt, FileAccessError for an unreadable file.
    """
    if options.prompt is not None:
        data, source = options.prompt.encode("utf-8"), "-p"
    elif options.prompt_file is not None:
        data, source = _drop_newline(read_file(options.prompt_file, "prompt file")), f"-f {options.prompt_file}"
    elif is_terminal(sys.stdin):
        raise _refused(STANDARD_INPUT, "", "is a terminal, and no prompt was given", _HOW_TO_PROMPT)
    else:
        data, source = _drop_newline(read_standard_input()), STANDARD_INPUT
    if not data and options.prompt is None:
        raise _refused(source, "", "holds no prompt: it is empty", _HOW_TO_PROMPT)
    text = decode_prompt_bytes(data, source)
    return _with_escapes_resolved(text, source) if options.escape else text


def read_standard_input() -> bytes:
    """All bytes up to its end. Raises FileAccessError with the reason."""
    try:
        return sys.stdin.buffer.read()
    except OSError as error:
        raise FileAccessError(f"{STANDARD_INPUT}: {error.strerror}") from error


def read_file(path: Path, what: str) -> bytes:
    """All bytes of a file the user named. Raises FileAccessError with the reason."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileAccessError(
            f"{what} {path}: {explain_os_error(path, error)}", hint=_read_hint(path, error)
        ) from error


def _read_hint(path: Path, error: OSError) -> str | None:
    if error.errno == errno.ENOENT and str(path) == "-":
        return "no file name means standard input: it is read when neither -p nor -f is given"
    return suggest_other_file(path, error)


def resolve_escapes(data: bytes) -> bytes:
    r"""Replace \n, \r, \t, \', \", \\ and \xHH; any other backslash stays, as in llama.cpp."""

    def resolve(match: re.Match[bytes]) -> bytes:
        return bytes([int(match[1], 16)]) if match[1] else _ESCAPED[match[2]]

    return _ESCAPE.sub(resolve, data)


def _with_escapes_resolved(text: str, source: str) -> str:
    """Raises ConfigError when the bytes of ``\\xHH`` do not make characters."""
    return decode_prompt_bytes(
        resolve_escapes(text.encode("utf-8")), f"{source}, its escapes resolved", advice=_HOW_TO_ESCAPE
    )


def resolve_stop_texts(options: CommandOptions) -> CommandOptions:
    """The same options with the escapes of ``-r`` resolved; refused when ``\\xHH`` bytes do not make characters."""
    if not options.prompt.escape:
        return options
    texts = [_with_escapes_resolved(text, "-r") for text in options.output.stop_texts]
    return replace(options, output=replace(options.output, stop_texts=tuple(texts)))


def encode_raw(tokenizer: Tokenizer, text: str, console: Console) -> list[int]:
    """Tokens of a raw completion. BOS is added as the file says, even to a text that begins with it, with a warning."""
    tokens = tokenizer.encode(text, add_special=True, parse_special=True)
    if tokenizer.has_double_bos(tokens):
        console.warning("the prompt begins with BOS, and the model's file asks to add one: there are two now")
    if not tokens:
        raise _refused("-p", "''", "is empty, and this model has no BOS token to start from", _HOW_TO_PROMPT)
    return tokens


def choose_chat_template(options: PromptOptions, metadata: Mapping[str, Any]) -> str:
    """The Jinja text of ``--chat-template-file``, ``--chat-template`` or the model."""
    if options.chat_template_file is not None:
        data = read_file(options.chat_template_file, "chat template")
        return decode_prompt_bytes(data, f"--chat-template-file {options.chat_template_file}")
    return choose_template(metadata, option=options.chat_template)


def first_messages(options: PromptOptions, prompt: str) -> list[Message]:
    """System message, if any, and the user's first one."""
    system = [] if options.system_prompt is None else [{"role": "system", "content": options.system_prompt}]
    return [*system, {"role": "user", "content": prompt}]


def encode_chat(tokenizer: Tokenizer, template: str, messages: Sequence[Message]) -> list[int]:
    """Tokens of a conversation that waits for the model's next answer."""
    texts = [
        "" if token_id is None else tokenizer.token_text(token_id) for token_id in (tokenizer.bos_id, tokenizer.eos_id)
    ]
    rendered = render_chat(template, messages, add_generation_prompt=True, bos_text=texts[0], eos_text=texts[1])
    tokens = tokenizer.encode_rendered(rendered)
    leaves_all_out = not rendered.strip() and any(message["content"].strip() for message in messages)
    if leaves_all_out or not tokens:
        raise _refused("--chat", "", "the template made an empty prompt", "check --chat-template")
    return tokens


def has_prompt(options: PromptOptions) -> bool:
    """Whether the command line itself gives a prompt."""
    return options.prompt is not None or options.prompt_file is not None


def uses_template(options: PromptOptions) -> bool:
    return options.chat or options.conversation


def encode_prompt(
    options: PromptOptions, console: Console, tokenizer: Tokenizer, metadata: Mapping[str, Any], prompt: str
) -> list[int]:
    """Tokens of a prompt: a raw completion, or the first turn of a conversation."""
    if uses_template(options):
        template = choose_chat_template(options, metadata)
        tokens = encode_chat(tokenizer, template, first_messages(options, prompt))
    else:
        tokens = encode_raw(tokenizer, prompt, console)
    if prompt.startswith(_BYTE_ORDER_MARK):
        console.warning("the prompt begins with a byte-order mark (U+FEFF), which counts as text: save it without one")
    console.detail(f"prompt: {len(tokens)} tokens: {' '.join(map(str, tokens))}")
    return tokens


def check_prompt_length(n_tokens: int, n_ctx: int) -> None:
    """Refuse a prompt that the context cannot hold; it is never cut."""
    if n_tokens > n_ctx:
        reason = f"{n_tokens} tokens are more than the context of {n_ctx} tokens holds"
        raise _refused("the prompt", "", reason, "raise -c or shorten the prompt")


def _drop_newline(data: bytes) -> bytes:
    return data[:-1] if data.endswith(b"\n") else data


def _refused(field: str, value: str, reason: str, hint: str) -> ConfigError:
    return ConfigError([Problem(field=field, value=value, reason=reason, hint=hint)])
