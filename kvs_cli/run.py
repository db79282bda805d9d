"""The body of ``kvs run``: prompt, model, plan, session, text. Conversations are in conversation.py."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from kvs_cli.console import Console, is_terminal
from kvs_cli.exits import SignalReceived
from kvs_cli.generate import Generation, StopReason
from kvs_cli.opening import (
    OpenedModel,
    announce_plan,
    check_options,
    check_stores,
    open_checked_model,
    open_device,
    open_sessions,
)
from kvs_cli.options import CommandOptions
from kvs_cli.prompt import (
    check_prompt_length,
    choose_chat_template,
    encode_prompt,
    has_prompt,
    read_prompt,
    resolve_stop_texts,
    uses_template,
)
from kvs_cli.report import StreamingReport, Timings
from kvs_cli.signals import StopRequest
from kvs_core.detokenizer import Detokenizer
from kvs_core.plan import plan_run
from kvs_core.plan_json import counters_to_json, plan_to_json
from kvs_core.sampling import Sampler
from kvs_core.session import Session
from kvs_core.units import show_size

PROGRESS_SECONDS = 0.5


def run_model(options: CommandOptions, console: Console) -> None:
    """Run one completion or one conversation."""
    started = perf_counter()
    check_options(options, console)
    converses = _converses(options, console)
    prompt = None if converses and not has_prompt(options.prompt) else read_prompt(options.prompt)
    options = resolve_stop_texts(options)
    with open_checked_model(options, console) as model:
        metadata = model.file.metadata
        template: str | None = None
        tokens: list[int] = []
        if converses or prompt is None:
            template = choose_chat_template(options.prompt, metadata)
        else:
            tokens = encode_prompt(options.prompt, console, model.tokenizer, metadata, prompt)
        with _open_session(options, console, model, n_prompt=len(tokens)) as session:
            sampler = make_sampler(options, model, session)
            console.info(f"seed: {sampler.seed}")
            load_seconds = perf_counter() - started
            if template is not None:
                from kvs_cli.conversation import converse

                seconds = converse(options, console, model, session, sampler, template, first_text=prompt)
                _report_streaming(console, session, seconds)
                return
            generation = _generate(options, console, model, session, sampler, tokens)
            timings = Timings(
                load_seconds=load_seconds,
                prompt_seconds=generation.prompt_seconds,
                decode_seconds=generation.decode_seconds,
                total_seconds=perf_counter() - started,
                n_prompt=len(tokens),
                n_generated=len(generation.token_ids),
                n_decode_steps=len(generation.decoded_ids),
            )
            _report(options, console, session, sampler, generation, timings)


def make_sampler(options: CommandOptions, model: OpenedModel, session: Session) -> Sampler:
    return Sampler(options.sampling, n_vocab=session.n_vocab, n_ctx=session.n_ctx, eog_ids=model.tokenizer.eog_ids)


def make_generation(options: CommandOptions, model: OpenedModel, session: Session, sampler: Sampler) -> Generation:
    """One answer with the command's limits; under ``--ignore-eos`` the sampler never chooses an end token."""
    return Generation(
        session,
        sampler,
        Detokenizer(model.tokenizer),
        stop_texts=options.output.stop_texts,
        end_ids=model.tokenizer.eog_ids,
        n_predict=options.output.n_predict,
    )


def _converses(options: CommandOptions, console: Console) -> bool:
    if not options.prompt.conversation:
        return False
    if is_terminal(sys.stdin):
        return True
    console.warning("-cnv: standard input is not a terminal, so this is one turn, as with --chat")
    return False


@contextmanager
def _open_session(options: CommandOptions, console: Console, model: OpenedModel, *, n_prompt: int) -> Iterator[Session]:
    backend = open_device(options.config, console)
    try:
        plan = plan_run(options.config, model.shape, backend.budget())
        announce_plan(plan, console)
        check_stores([plan], console)
        check_prompt_length(n_prompt, plan.n_ctx)
        for line in backend.load_weights(model.file):
            console.info(line)
        with open_sessions((plan,), backend, console) as (session,):
            yield session
    finally:
        backend.close()


def _generate(
    options: CommandOptions,
    console: Console,
    model: OpenedModel,
    session: Session,
    sampler: Sampler,
    tokens: list[int],
) -> Generation:
    """Print the prompt, if wanted, and the answer as it comes; under ``--json`` nothing yet."""
    generation = make_generation(options, model, session, sampler)
    shows_prompt = options.output.display_prompt
    if shows_prompt is None:
        shows_prompt = not uses_template(options.prompt)
    if shows_prompt and not options.output.json:
        console.write_text(model.tokenizer.decode(tokens))
    print_pieces(generation, tokens, console, session, silent=options.output.json)
    if generation.stop_reason is StopReason.CONTEXT_FULL:
        console.warning(
            f"context full: {len(tokens)} prompt and {len(generation.token_ids)} generated tokens "
            f"fill all {session.n_ctx}; raise -c for more"
        )
    console.detail(f"generated: {' '.join(map(str, generation.token_ids))}")
    return generation


def print_pieces(
    generation: Generation,
    tokens: list[int],
    console: Console,
    session: Session,
    *,
    silent: bool = False,
    request: StopRequest | None = None,
) -> None:
    """Print an answer piece by piece, until it ends or ``request`` is made.

    Text that was held back comes out then, and also when a signal ends the run.
    """
    pieces = generation.pieces(tokens)
    write = _discard if silent else console.write_text
    try:
        with _prompt_progress(console, session, len(tokens)):
            first = next(pieces)  # this runs the prompt
        write(first)
        while request is None or not request.is_made:
            if (piece := next(pieces, None)) is None:
                return
            write(piece)
    except SignalReceived:
        write(generation.flush())
        raise
    pieces.close()
    write(generation.flush())


def _discard(text: str) -> None:
    """Under ``--json`` the text is printed once, inside the document."""


@contextmanager
def _prompt_progress(console: Console, session: Session, n_prompt: int) -> Iterator[None]:
    """Show how much of the prompt has run; only on a terminal, and only when it takes a while."""
    if not console.shows_progress:
        yield
        return
    done = threading.Event()
    begin = session.n_past

    def show() -> None:
        while not done.wait(PROGRESS_SECONDS):
            console.progress(f"prompt: {session.n_past - begin} of {n_prompt} tokens")

    thread = threading.Thread(target=show, name="kvs-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        console.progress("")


def _report(
    options: CommandOptions,
    console: Console,
    session: Session,
    sampler: Sampler,
    generation: Generation,
    timings: Timings,
) -> None:
    for line in timings.lines():
        console.info(line)
    streaming = _report_streaming(console, session, timings.prompt_seconds + timings.decode_seconds)
    if options.output.json:
        assert generation.stop_reason is not None
        console.write_json(
            {
                "command": "run",
                "text": generation.text,
                "n_prompt": timings.n_prompt,
                "n_generated": timings.n_generated,
                "token_ids": generation.token_ids,
                "stop_reason": generation.stop_reason.value,
                "stop_text": generation.stop_text,
                "seed": sampler.seed,
                "plan": plan_to_json(session.plan),
                "streaming": None if streaming is None else _streaming_json(streaming),
                "timings": timings.to_json(),
            }
        )


def _report_streaming(console: Console, session: Session, seconds: float) -> StreamingReport | None:
    """What streamed while the model ran for ``seconds``; None, and no line, without an arena."""
    if session.streaming_counters is None:
        return None
    report = StreamingReport(counters=session.streaming_counters, seconds=seconds, copy_rate=session.copy_rate)
    console.info(_streaming_line(report))
    return report


def _streaming_line(report: StreamingReport) -> str:
    counters = report.counters
    if not counters.pages_streamed:
        return f"streaming: {counters.pages_resident} pages resident, nothing streamed: every page fitted"
    line = (
        f"streaming: {counters.pages_resident} pages resident, {counters.pages_streamed} pages "
        f"({show_size(counters.bytes_streamed)}) streamed"
    )
    if report.bytes_per_second is not None:
        line += f", {show_size(report.bytes_per_second)}/s"
    if report.share_of_copy_rate is not None:
        line += f", {report.share_of_copy_rate:.1%} of the measured copy rate"
    return line


def _streaming_json(report: StreamingReport) -> dict[str, Any]:
    return {**counters_to_json(report.counters), **report.to_json()}
