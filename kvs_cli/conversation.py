"""``kvs run -cnv``: questions from a terminal, answers on standard output, one growing context."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from kvs_cli.console import Console, is_terminal
from kvs_cli.exits import SignalReceived
from kvs_cli.generate import StopReason
from kvs_cli.opening import OpenedModel
from kvs_cli.options import CommandOptions
from kvs_cli.prompt import check_prompt_length, encode_chat, first_messages
from kvs_cli.render import error_lines
from kvs_cli.run import make_generation, print_pieces
from kvs_cli.signals import interrupt_as_request
from kvs_core.errors import ConfigError, Problem
from kvs_core.prompt_text import decode_prompt_bytes
from kvs_core.sampling import Sampler
from kvs_core.session import Session

PROMPT_MARK = "> "
TERMINAL_LINE_BYTES = 4095  # of a longer line a terminal passes on these, and its end, and drops the others
_QUESTION = "the question"


def ask(mark: str) -> str:
    """A line from the terminal, UTF-8 whatever the locale; the mark stays out of a standard output that goes elsewhere.

    Raises EOFError, SignalReceived, and ConfigError for a line that is no valid text or may have been cut.
    """
    shown_on = sys.stdout if is_terminal(sys.stdout) else sys.stderr
    print(mark, end="", file=shown_on, flush=True)
    try:
        line = sys.stdin.buffer.readline()
        if not line:
            raise EOFError
    except (EOFError, SignalReceived):
        print(file=shown_on, flush=True)  # what comes next begins a line
        raise
    return _read_question(line.removesuffix(b"\n"))


def _read_question(line: bytes) -> str:
    if len(line) == TERMINAL_LINE_BYTES:
        reason = f"has {len(line)} bytes, as many as a terminal passes on of one line: the rest may be missing"
        hint = "ask a longer question from a file: -f FILE gives the first one"
        raise ConfigError([Problem(field=_QUESTION, value="", reason=reason, hint=hint)])
    return decode_prompt_bytes(line, _QUESTION, advice="set the terminal to UTF-8")


def converse(
    options: CommandOptions,
    console: Console,
    model: OpenedModel,
    session: Session,
    sampler: Sampler,
    template: str,
    *,
    first_text: str | None,
    read_line: Callable[[str], str] = ask,
) -> float:
    """Answer until the end of input (Ctrl-D), or until the context is full; returns the seconds that the model ran.

    Ctrl-C stops an answer, what was written of it being part of the conversation; between answers, or a second time
    in one, it ends the run. ``template`` is the chat template's Jinja text. A question that cannot be put, because it
    is too long or no valid text, is refused alone; the next one may be fine.
    """
    messages = first_messages(options.prompt, "")[:-1]
    cached: list[int] = []
    seconds = 0.0
    console.info("conversation: an empty line is skipped, Ctrl-C stops an answer, Ctrl-D ends it")
    for text in _questions(first_text, read_line, console):
        messages.append({"role": "user", "content": text})
        try:
            tokens = encode_chat(model.tokenizer, template, messages)
            check_prompt_length(len(tokens), session.n_ctx)
        except ConfigError as error:
            console.errors(error_lines(error))
            messages.pop()
            continue
        fresh = _without_cached(tokens, cached, session)
        generation = make_generation(options, model, session, sampler)
        with interrupt_as_request() as request:
            print_pieces(generation, fresh, console, session, request=request)
        console.write_text("\n")
        seconds += generation.prompt_seconds + generation.decode_seconds
        cached = tokens + generation.decoded_ids
        messages.append({"role": "assistant", "content": model.tokenizer.decode(generation.token_ids)})
        if generation.stop_reason is StopReason.CONTEXT_FULL:
            console.warning(f"context full: {session.n_ctx} tokens; raise -c for a longer conversation")
            break
    return seconds


def _questions(first_text: str | None, read_line: Callable[[str], str], console: Console) -> Iterator[str]:
    if first_text is not None:
        yield first_text
    while True:
        try:
            text = read_line(PROMPT_MARK)
        except EOFError:
            return
        except ConfigError as error:
            console.errors(error_lines(error))
            continue
        if text.strip():
            yield text


def _without_cached(tokens: list[int], cached: list[int], session: Session) -> list[int]:
    """The tokens the session has not seen. Templates may rewrite earlier turns: then everything runs again."""
    if len(cached) < len(tokens) and tokens[: len(cached)] == cached:
        return tokens[len(cached) :]
    session.clear()
    return tokens
