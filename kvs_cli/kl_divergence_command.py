"""The body of ``kvs kl-divergence``: two configurations in lock-step, or two saved files."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from kvs_cli.console import Console
from kvs_cli.evaluation import (
    bos_of,
    check_picture,
    configuration_of,
    deliver,
    end_comparison,
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
from kvs_cli.evaluation_options import compares_files
from kvs_cli.evaluation_progress import ProgressReporter
from kvs_cli.evaluation_render import chunk_lines, describe_divergence, render_divergence
from kvs_cli.flag_table import FLAGS
from kvs_cli.flags import KL_DIVERGENCE
from kvs_cli.opening import check_options, open_checked_model
from kvs_cli.options import CommandOptions, name_flags
from kvs_core.config import ArenaMode, RunConfig
from kvs_core.errors import ConfigError, Problem
from kvs_core.evaluate.chunks import plan_chunks, plan_saved_chunks
from kvs_core.evaluate.kl_divergence import compare_files, compare_sources
from kvs_core.evaluate.perplexity import evaluation_configuration
from kvs_core.evaluate.row_math import KLD_ROW, RowWorkers
from kvs_core.evaluate.saved_logits import check_pair
from kvs_core.session import Session
from kvs_core.validate import validate


def evaluate_kl_divergence(options: CommandOptions, console: Console) -> None:
    """Run the command; everything that can be refused is refused before the weights are loaded."""
    check_options(options, console)
    check_picture(options)
    if compares_files(options.arguments):
        _compare_files(options, console)
    else:
        _compare_sides(options, console)


def base_config_of(options: CommandOptions) -> RunConfig:
    """The base side: the measured side's configuration with the --base-… flags applied.

    Types given for the base side hold in all of its layers. A host store in a file belongs to one side: the base side's
    gets a name of its own beside it, shares a directory, and is left out where the base side does not stream. Where it
    alone streams, the file is the base side's.
    """
    config, evaluation = options.config, options.evaluation
    has_own_types = evaluation.base_type_k is not None or evaluation.base_type_v is not None
    arena = evaluation.base_arena if evaluation.base_arena is not None else config.arena
    store_path = evaluation.base_store
    if config.store_path is not None and arena.mode is not ArenaMode.OFF:
        is_shared = config.store_path.is_dir()
        store_path = config.store_path if is_shared else Path(f"{config.store_path}.base")
    return replace(
        config,
        type_k=evaluation.base_type_k or config.type_k,
        type_v=evaluation.base_type_v or config.type_v,
        layer_types=() if has_own_types else config.layer_types,
        arena=arena,
        store_path=store_path,
    )


def _blame_base_flags(problem: Problem, options: CommandOptions) -> Problem:
    """A problem of the base side under the --base-… flag, where one was given, that the user would change."""
    hint, field = problem.hint, f"base_{problem.field}"
    for name in ("type_k", "type_v", "arena"):
        if hint is not None and options.arguments.is_given(f"base_{name}"):
            hint = hint.replace(FLAGS.spelling_of(name), FLAGS.spelling_of(f"base_{name}"))
    reason = f"{problem.reason} (base side)"
    if field not in ("base_type_k", "base_type_v", "base_arena") or not options.arguments.is_given(field):
        return replace(name_flags(problem), reason=reason, hint=hint)
    return replace(problem, field=FLAGS.spelling_of(field), reason=reason, hint=hint)


def _compare_sides(options: CommandOptions, console: Console) -> None:
    base_config = base_config_of(options)
    text = read_text(options)
    assert options.config.n_ctx is not None, "options.py fills it in"
    with ExitStack() as closing:
        model = closing.enter_context(open_checked_model(options, console))
        problems = validate(base_config, model.shape)
        if problems:
            raise ConfigError([_blame_base_flags(problem, options) for problem in problems])
        tokens = tokenize(model, text)
        plan = plan_chunks(n_tokens=len(tokens), n_ctx=options.config.n_ctx, n_chunks=options.evaluation.n_chunks)
        identity = identify(model)
        base, other = closing.enter_context(open_sides(options, console, model, [base_config, options.config]))
        configuration = {
            "base": configuration_of(base.plan, identity),
            "measured": configuration_of(other.plan, identity),
        }
        sides = [
            f"{logits_identity(side.plan, identity).describe_cache()}, {_show_arena(side)}" for side in (base, other)
        ]
        console.info(f"base side: {sides[0]}; measured side: {sides[1]}")
        state = evaluation_configuration(
            kind="kl-divergence", plan=plan, tokens=tokens, bos=bos_of(model), run=configuration
        )
        journal = closing.enter_context(open_state(options, console, state, other.plan.budget, dtype=KLD_ROW))
        reporter = ProgressReporter(console, describe_divergence, chunk_lines())
        closing.enter_context(reporting(reporter, journal))
        workers = closing.enter_context(RowWorkers(options.config.n_threads))
        result = compare_sources(
            base, other, tokens, plan=plan, bos=bos_of(model), workers=workers, journal=journal, progress=reporter
        )
        reporter.finish()
        warn_about_idle_sides(console, result)
        deliver(
            options,
            console,
            kld_document(KL_DIVERGENCE, configuration, result),
            render_divergence(result),
            lambda: end_comparison(options, console, result, title=" against ".join(sides)),
            journal if result.non_finite is None else None,
        )


def _compare_files(options: CommandOptions, console: Console) -> None:
    path_base, path_other = options.evaluation.file_base, options.evaluation.file_other
    assert path_base is not None, "evaluation_options.py refuses this"
    assert path_other is not None, "evaluation_options.py refuses this"
    with (
        open_saved(path_base) as base,
        open_saved(path_other) as other,
        RowWorkers(options.config.n_threads) as workers,
    ):
        check_pair(base, other)
        plan = plan_saved_chunks(
            n_ctx=base.n_ctx, n_present=min(base.n_chunk, other.n_chunk), n_chunks=options.evaluation.n_chunks
        )
        if base.n_chunk != other.n_chunk:
            console.warning(
                f"{path_base} has {base.n_chunk} chunks, {path_other} {other.n_chunk}: comparing {plan.n_chunk}"
            )
        tell_makers(console, base, other.identity)
        reporter = ProgressReporter(console, describe_divergence, chunk_lines())
        with reporting(reporter, None):
            result = compare_files(base, other, plan=plan, workers=workers, progress=reporter)
        title = f"{path_base.name} against {path_other.name}"
        configuration = {
            side: {"file": str(saved.path), "format": saved.format.value, "made_with": maker_to_json(saved)}
            for side, saved in (("base", base), ("measured", other))
        }
        deliver(
            options,
            console,
            kld_document(KL_DIVERGENCE, configuration, result),
            render_divergence(result),
            lambda: end_comparison(options, console, result, title=title),
            None,
        )


def _show_arena(side: Session) -> str:
    arena = side.plan.config.arena
    return f"arena {arena.n_bytes >> 20} MiB" if arena.n_bytes else f"arena {arena.mode.value}"
