"""The body of ``kvs perplexity``: measure a text, write a base file, or compare with one."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvs_cli.console import Console
from kvs_cli.evaluation import (
    bos_of,
    check_output,
    check_picture,
    configuration_of,
    deliver,
    end_comparison,
    has_text,
    identify,
    kld_document,
    logits_identity,
    maker_to_json,
    open_saved,
    open_sides,
    open_state,
    read_text,
    reporting,
    tell_makers,
    tokenize,
    warn_about_idle_sides,
)
from kvs_cli.evaluation_progress import ProgressReporter
from kvs_cli.evaluation_render import (
    chunk_lines,
    describe_divergence,
    describe_perplexity,
    render_divergence,
    render_perplexity,
    render_running_perplexities,
    show_totals,
)
from kvs_cli.flags import PERPLEXITY
from kvs_cli.opening import OpenedModel, check_options, open_checked_model
from kvs_cli.options import CommandOptions
from kvs_core.evaluate.choices import LogitsFormat
from kvs_core.evaluate.chunk_run import require_finite
from kvs_core.evaluate.chunks import ChunkPlan, plan_chunks, plan_saved_chunks, stride_window
from kvs_core.evaluate.compact_layout import make_compact_header
from kvs_core.evaluate.compact_writer import CompactLogitsWriter
from kvs_core.evaluate.identity import fingerprint_files
from kvs_core.evaluate.kl_divergence import compare_with_saved, products_of
from kvs_core.evaluate.logits_file import LlamaLogitsWriter, LogitsFileLayout
from kvs_core.evaluate.partial_file import partial_path
from kvs_core.evaluate.perplexity import NLL_ROW, PerplexityResult, evaluation_configuration, measure_perplexity
from kvs_core.evaluate.report import perplexity_to_json
from kvs_core.evaluate.row_math import KLD_ROW, RowWorkers
from kvs_core.evaluate.saved_logits import LogitsIdentity, LogitsWriter, check_base
from kvs_core.plan import RunPlan


def evaluate_perplexity(options: CommandOptions, console: Console) -> None:
    """Run the command; everything that can be refused is refused before the weights are loaded."""
    check_options(options, console)
    check_picture(options)
    if options.evaluation.compares:
        _compare(options, console)
    else:
        _measure(options, console)


def _measure(options: CommandOptions, console: Console) -> None:
    text = read_text(options)
    n_ctx, stride = options.config.n_ctx, options.evaluation.ppl_stride
    assert n_ctx is not None, "options.py fills it in"
    if stride:
        options = replace(options, config=replace(options.config, n_ctx=stride_window(n_ctx=n_ctx, stride=stride)))
    with ExitStack() as closing:
        model = closing.enter_context(open_checked_model(options, console))
        tokens = tokenize(model, text)
        plan = plan_chunks(n_tokens=len(tokens), n_ctx=n_ctx, n_chunks=options.evaluation.n_chunks, stride=stride)
        console.detail(f"text: {len(tokens)} tokens, {plan.n_chunk} chunks of {plan.n_ctx}")
        identity = identify(model)
        writers: list[LogitsWriter] = []

        def open_writer(run: RunPlan) -> None:
            if options.evaluation.base_file is not None:
                writers.append(_open_writer(options, model, logits_identity(run, identity), plan, tokens))
                closing.callback(writers[0].close)

        (session,) = closing.enter_context(
            open_sides(options, console, model, [options.config], before_loading=open_writer)
        )
        writer = writers[0] if writers else None
        configuration = configuration_of(session.plan, identity)
        base_file = options.evaluation.base_file
        state = evaluation_configuration(
            kind="perplexity",
            plan=plan,
            tokens=tokens,
            bos=bos_of(model),
            run={**configuration, "written": None if writer is None else options.evaluation.kld_format.value},
        )
        journal_path = None if base_file is None else partial_path(base_file).with_suffix(".journal")
        journal = closing.enter_context(
            open_state(options, console, state, session.plan.budget, dtype=NLL_ROW, path=journal_path)
        )
        reporter = ProgressReporter(console, describe_perplexity, render_running_perplexities)
        closing.enter_context(reporting(reporter, journal))
        workers = closing.enter_context(RowWorkers(options.config.n_threads))
        result = measure_perplexity(
            session,
            tokens,
            plan=plan,
            bos=bos_of(model),
            workers=workers,
            writer=writer,
            journal=journal,
            progress=reporter,
        )
        reporter.finish()
        _report_perplexity(options, console, result)
        deliver(
            options,
            console,
            {"command": PERPLEXITY, "configuration": configuration, **perplexity_to_json(result)},
            render_perplexity(result),
            lambda: require_finite(result.non_finite, plan.n_chunk),
            journal if result.non_finite is None else None,
        )


def _report_perplexity(options: CommandOptions, console: Console, result: PerplexityResult) -> None:
    if result.streaming is not None:
        console.info(f"streaming: {show_totals(result.streaming)}")
        if not result.streaming.bytes_streamed:
            console.warning("an arena was asked for and nothing was streamed: everything fits into it")
    base_file = options.evaluation.base_file
    if base_file is not None and result.non_finite is None:
        console.info(f"base file: {base_file}, {base_file.stat().st_size} bytes")


def _open_writer(
    options: CommandOptions,
    model: OpenedModel,
    identity: LogitsIdentity,
    plan: ChunkPlan,
    tokens: NDArray[np.int32],
) -> LogitsWriter:
    path = options.evaluation.base_file
    assert path is not None, "the caller asks for a file only when one is named"
    check_output(options, path, model_parts=model.file.paths)
    used = tokens[: plan.n_chunk * plan.n_ctx]
    sizes = {"n_ctx": plan.n_ctx, "n_chunk": plan.n_chunk, "n_vocab": model.shape.n_vocab}
    if options.evaluation.kld_format is LogitsFormat.LLAMA:
        return LlamaLogitsWriter(path, layout=LogitsFileLayout(**sizes), tokens=used, keeps=options.evaluation.resumes)
    header = make_compact_header(**sizes, tokens=used, identity=identity)
    return CompactLogitsWriter(path, header=header, tokens=used, keeps=options.evaluation.resumes)


def _compare(options: CommandOptions, console: Console) -> None:
    path = options.evaluation.base_file
    assert path is not None, "evaluation_options.py refuses this"
    asked_ctx = options.config.n_ctx if options.arguments.is_given("n_ctx") else None
    text = read_text(options) if has_text(options) else None
    with ExitStack() as closing:
        saved = closing.enter_context(open_saved(path))
        options = replace(options, config=replace(options.config, n_ctx=saved.n_ctx))
        model = closing.enter_context(open_checked_model(options, console))
        identity = identify(model)
        check_base(
            saved,
            n_vocab=model.shape.n_vocab,
            tokenizer=identity.tokenizer,
            n_ctx=asked_ctx,
            tokens=None if text is None else tokenize(model, text),
        )
        plan = plan_saved_chunks(n_ctx=saved.n_ctx, n_present=saved.n_chunk, n_chunks=options.evaluation.n_chunks)
        (session,) = closing.enter_context(open_sides(options, console, model, [options.config]))
        configuration: dict[str, Any] = {
            **configuration_of(session.plan, identity),
            "base_file": str(path),
            "base_format": saved.format.value,
            "base_made_with": maker_to_json(saved),
        }
        tell_makers(console, saved, logits_identity(session.plan, identity))
        state = evaluation_configuration(
            kind="kl-divergence-base",
            plan=plan,
            tokens=saved.tokens,
            bos=bos_of(model),
            run={**configuration, "base_fingerprint": fingerprint_files([str(path)])},
        )
        journal = closing.enter_context(open_state(options, console, state, session.plan.budget, dtype=KLD_ROW))
        reporter = ProgressReporter(console, describe_divergence, chunk_lines(products_of(saved)))
        closing.enter_context(reporting(reporter, journal))
        workers = closing.enter_context(RowWorkers(options.config.n_threads))
        result = compare_with_saved(
            session, saved, plan=plan, bos=bos_of(model), workers=workers, journal=journal, progress=reporter
        )
        reporter.finish()
        warn_about_idle_sides(console, result)
        title = f"{options.config.model_path.name} against {path.name}"
        deliver(
            options,
            console,
            kld_document(PERPLEXITY, configuration, result),
            render_divergence(result),
            lambda: end_comparison(options, console, result, title=title),
            journal if result.non_finite is None else None,
        )
