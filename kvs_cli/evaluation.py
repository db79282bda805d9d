"""What ``kvs perplexity`` and ``kvs kl-divergence`` share: text, sessions, state of interrupted runs, the report."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvs_cli.console import Console, find_stream_in, is_terminal
from kvs_cli.environment import cache_folder
from kvs_cli.evaluation_options import compares_files
from kvs_cli.evaluation_progress import ProgressReporter
from kvs_cli.exits import SignalReceived
from kvs_cli.flag_table import FLAGS
from kvs_cli.opening import OpenedModel, announce_plan, check_stores, open_device, open_sessions
from kvs_cli.options import CommandOptions
from kvs_cli.prompt import STANDARD_INPUT, read_file, read_standard_input
from kvs_cli.render import error_to_json
from kvs_cli.version import read_version
from kvs_core.config import RunConfig
from kvs_core.device_budget import DeviceBudget
from kvs_core.errors import CheckFailedError, ConfigError, FileAccessError, KvsError, PlanError, Problem
from kvs_core.evaluate.chunk_run import require_finite
from kvs_core.evaluate.compact_file import CompactLogitsFile
from kvs_core.evaluate.compact_layout import COMPACT_MAGIC
from kvs_core.evaluate.identity import fingerprint_files, fingerprint_tokenizer, identify_logits
from kvs_core.evaluate.journal import Journal, configuration_key
from kvs_core.evaluate.kl_divergence import KldResult, check_thresholds
from kvs_core.evaluate.logits_file import LlamaLogitsFile
from kvs_core.evaluate.partial_file import check_output_path, reporting_os_errors
from kvs_core.evaluate.plot import check_plot_path, plot_divergence
from kvs_core.evaluate.report import kld_to_json
from kvs_core.evaluate.saved_logits import LogitsIdentity, SavedLogits
from kvs_core.plan import RunPlan, plan_run
from kvs_core.prompt_text import decode_prompt_bytes
from kvs_core.session import Session


def has_text(options: CommandOptions) -> bool:
    """Whether -p or -f names the text."""
    return options.prompt.prompt is not None or options.prompt.prompt_file is not None


def read_text(options: CommandOptions) -> str:
    """The text to evaluate, unchanged but for one newline at the end of a file, as llama-perplexity reads it.

    Raises ConfigError when there is none or it is not UTF-8, FileAccessError for what cannot be read.
    """
    if options.prompt.prompt is not None:
        return options.prompt.prompt
    if options.prompt.prompt_file is not None:
        source = f"-f {options.prompt.prompt_file}"
        data = read_file(options.prompt.prompt_file, "text file")
    elif is_terminal(sys.stdin):
        raise ConfigError(
            [Problem(field="-f", value="", reason="is missing, and standard input is a terminal", hint="pass -f FILE")]
        )
    else:
        source, data = STANDARD_INPUT, read_standard_input()
    return decode_prompt_bytes(data.removesuffix(b"\n"), source)


def tokenize(model: OpenedModel, text: str) -> NDArray[np.int32]:
    """Tokens of a text, int32 [n_tokens]: BOS in front where the vocabulary adds it; control tokens are plain text."""
    if model.tokenizer.add_eos:
        raise ConfigError(
            "the vocabulary adds an end token to every text, and llama-perplexity's rules do not say where it belongs"
        )
    return np.array(model.tokenizer.encode(text, add_special=True, parse_special=False), np.int32)


def bos_of(model: OpenedModel) -> int | None:
    """The token that stands in front of every chunk, if the vocabulary adds one."""
    return model.tokenizer.bos_id if model.tokenizer.add_bos else None


@contextmanager
def open_sides(
    options: CommandOptions,
    console: Console,
    model: OpenedModel,
    configs: Sequence[RunConfig],
    *,
    before_loading: Callable[[RunPlan], None] | None = None,
) -> Iterator[tuple[Session, ...]]:
    """A session for each configuration, over the same weights and with one micro-batch size.

    ``before_loading`` gets the last side's plan and may refuse it before any weight is read.
    """
    backend = open_device(options.config, console)
    try:
        plans = plan_sides(model, configs, backend.budget())
        if before_loading is not None:
            before_loading(plans[-1])
        announce_plan(plans[-1], console)
        check_stores(plans, console)
        for line in backend.load_weights(model.file):
            console.info(line)
        with open_sessions(plans, backend, console) as sessions:
            yield sessions
    finally:
        backend.close()


def plan_sides(model: OpenedModel, configs: Sequence[RunConfig], budget: DeviceBudget) -> list[RunPlan]:
    """Plans that fit beside each other; where their micro-batches differ, all take the smallest."""
    plans = _plan_beside(model, configs, budget)
    n_ubatch = min(plan.n_ubatch for plan in plans)
    if any(plan.n_ubatch != n_ubatch for plan in plans):
        plans = _plan_beside(model, [replace(config, n_ubatch=n_ubatch) for config in configs], budget)
    return plans


def _plan_beside(model: OpenedModel, configs: Sequence[RunConfig], budget: DeviceBudget) -> list[RunPlan]:
    plans: list[RunPlan] = []
    for index, config in enumerate(configs):
        with _naming_base_side(configs, index):
            plans.append(plan_run(config, model.shape, budget))
        taken = plans[-1].device_bytes - plans[-1].weights_bytes
        stored = 0 if config.store_path is not None else plans[-1].store_bytes
        if budget.shares_host_memory:
            taken += stored
        budget = replace(budget, free_bytes=budget.free_bytes - taken, host_free_bytes=budget.host_free_bytes - stored)
    return plans


@contextmanager
def _naming_base_side(configs: Sequence[RunConfig], index: int) -> Iterator[None]:
    """A plan of the first of two sides that is refused is said to be the base side's, with its own flag."""
    try:
        yield
    except PlanError as error:
        base, measured = (replace(config, store_path=None) for config in (configs[0], configs[-1]))
        if index == len(configs) - 1 or base == measured:
            raise
        hint = error.hint
        if hint is not None and base.arena != measured.arena:
            hint = hint.replace(FLAGS.spelling_of("arena"), FLAGS.spelling_of("base_arena"))
        sizes = {"required_bytes": error.required_bytes, "available_bytes": error.available_bytes}
        raise PlanError(f"base side: {error}", **sizes, hint=hint) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """Fingerprints of the opened model."""

    model: str
    tokenizer: str


def identify(model: OpenedModel) -> ModelIdentity:
    return ModelIdentity(
        model=fingerprint_files(model.file.paths), tokenizer=fingerprint_tokenizer(model.file.metadata)
    )


def logits_identity(plan: RunPlan, identity: ModelIdentity) -> LogitsIdentity:
    """Who makes the logits of a side, and how its cache is kept."""
    return identify_logits(plan, model=identity.model, tokenizer=identity.tokenizer)


def tell_makers(console: Console, base: SavedLogits, measured: LogitsIdentity | None) -> None:
    """One line about both sides' caches and models, when a base file says how it was made."""
    if base.identity is None or measured is None:
        return
    models = "" if base.identity.model == measured.model else ", of another model file"
    console.info(f"base file: {base.identity.describe_cache()}{models}; measured: {measured.describe_cache()}")


def maker_to_json(saved: SavedLogits) -> dict[str, Any] | None:
    """How a base file was made, where its format says so."""
    return None if saved.identity is None else asdict(saved.identity)


def configuration_of(plan: RunPlan, identity: ModelIdentity) -> dict[str, Any]:
    """What decides a side's logits and what it streams, as JSON. Nothing that differs from one start to the next."""
    config = plan.config
    rope = asdict(config.rope)
    scaling = config.rope.scaling_type
    return {
        "model": plan.shape.file_path,
        "model_fingerprint": identity.model,
        "tokenizer_fingerprint": identity.tokenizer,
        "pre_tokenizer": config.pre_tokenizer,
        "device": plan.budget.kind.value,
        "n_ctx": plan.n_ctx,
        "n_batch": plan.n_batch,
        "n_ubatch": plan.n_ubatch,
        "type_k": config.type_k.value,
        "type_v": config.type_v.value,
        "layer_types": [str(rule) for rule in config.layer_types],
        "kv_rotate": config.kv_rotate,
        "arena_bytes": plan.arena_bytes if plan.arena_requested_bytes else 0,
        "page_tokens": plan.cache.page_tokens,
        "rope": {**rope, "scaling_type": None if scaling is None else scaling.value},
    }


@contextmanager
def open_state(
    options: CommandOptions,
    console: Console,
    configuration: Mapping[str, Any],
    budget: DeviceBudget,
    *,
    dtype: np.dtype[Any],
    path: Path | None = None,
) -> Iterator[Journal | None]:
    """The finished chunks of this command, beside ``path`` or in the cache folder; None under ``--no-resume``.

    Another version of the toolkit or another device may differ in the last bits, so neither goes on with them.

    A cache folder that cannot be used, or no longer, costs only the ability to resume, so it is a warning. ``deliver``
    removes the state of a complete run.
    """
    if not options.evaluation.resumes:
        if path is not None:
            # It tells of chunks that this run is about to write over: a later run must not believe it.
            with reporting_os_errors(path):
                path.unlink(missing_ok=True)
        yield None
        return

    def warn_about_loss(error: FileAccessError) -> None:
        console.warning(f"finished chunks are not kept from here on, should this run be interrupted: {error}")

    makers = {"version": read_version(), "device": budget.name, "compute_capability": budget.compute_capability}
    key = configuration_key({**configuration, "made_by": makers})
    try:
        place = path or cache_folder(os.environ) / "evaluate" / f"{configuration['kind']}-{key.hex()[:32]}.journal"
        journal = Journal(place, key=key, dtype=dtype, on_loss=warn_about_loss if path is None else None)
    except (FileAccessError, RuntimeError) as error:
        if path is not None:
            raise
        console.warning(f"this run cannot be resumed if it is interrupted: {error}")
        yield None
        return
    with journal:
        yield journal


@contextmanager
def reporting(reporter: ProgressReporter, journal: Journal | None) -> Iterator[None]:
    """Clear the progress line at the end; when a signal ends the run, say what is kept."""
    try:
        yield
    except SignalReceived:
        reporter.finish()
        if journal is not None:
            reporter.say_kept(len(journal.records))
        raise
    finally:
        reporter.finish()


def open_saved(path: Path) -> SavedLogits:
    """A base file of either format; raises FileAccessError when it is neither, or not whole."""
    with reporting_os_errors(path):
        if path.exists() and not path.is_file() and not path.is_dir():  # opening a pipe would wait for its writer
            raise FileAccessError(f"{path}: is not a regular file", hint="save it to a file first")
        with path.open("rb") as file:
            start = file.read(len(COMPACT_MAGIC))
    return CompactLogitsFile(path) if start == COMPACT_MAGIC else LlamaLogitsFile(path)


def input_files(options: CommandOptions) -> list[Path]:
    """Files named in the command that it reads; the other parts of a split model are not among them."""
    evaluation = options.evaluation
    named = [options.prompt.prompt_file, evaluation.file_base, evaluation.file_other]
    if evaluation.compares:
        named.append(evaluation.base_file)
    if not compares_files(options.arguments):
        named.append(options.config.model_path)
    return [path for path in named if path is not None]


def check_output(options: CommandOptions, path: Path, *, model_parts: Sequence[str] = ()) -> None:
    """Refuse a result file that cannot be made or whose replacement would destroy something, a redirected stream too.

    Raises FileAccessError or ConfigError.
    """
    check_output_path(path, inputs=[*map(Path, model_parts), *input_files(options)])
    stream = find_stream_in(path)
    if stream is not None:
        raise FileAccessError(f"{path}: is where {stream} goes, which it would replace", hint="name another file")


def check_picture(options: CommandOptions) -> None:
    if options.evaluation.plot is not None:
        check_plot_path(options.evaluation.plot)
        check_output(options, options.evaluation.plot)


def draw_picture(options: CommandOptions, console: Console, result: KldResult, *, title: str) -> None:
    """The picture that was asked for; raises FileAccessError when it cannot be written."""
    if options.evaluation.plot is not None and len(result.rows):
        plot_divergence(result, options.evaluation.plot, title=title)
        console.info(f"picture: {options.evaluation.plot}")


def deliver(
    options: CommandOptions,
    console: Console,
    document: dict[str, Any],
    text: str,
    check: Callable[[], None],
    journal: Journal | None,
) -> None:
    """Print the result, then let ``check`` decide how the command ends; under ``--json`` both are one document.

    With the result out, the state of a complete run is removed: ``journal`` is None for one that is not complete. It
    stays when ``check`` could not write a file, so that the same command makes up for it without computing anything.
    """
    failure: KvsError | None = None
    try:
        check()
    except (CheckFailedError, FileAccessError) as error:
        failure = error
        document["error"] = error_to_json(error)
    if options.output.json:
        console.write_json(document)
        console.json = False  # the document is out: an error needs no second one
    else:
        console.write_text(text)
    if journal is not None and not isinstance(failure, FileAccessError):
        journal.discard()
    if failure is not None:
        raise failure


def warn_about_idle_sides(console: Console, result: KldResult) -> None:
    for side in result.idle_sides:
        console.warning(
            f"the {side} side was asked to stream and streamed nothing: the result says nothing about streaming"
        )


def kld_document(command: str, configuration: Mapping[str, Any], result: KldResult) -> dict[str, Any]:
    return {"command": command, "configuration": dict(configuration), **kld_to_json(result)}


def end_comparison(options: CommandOptions, console: Console, result: KldResult, *, title: str) -> None:
    """What decides how a comparison ends: the picture, rows that are numbers, and the limits that were given."""
    draw_picture(options, console, result, title=title)
    require_finite(result.non_finite, result.plan.n_chunk)
    check_thresholds(result, options.evaluation.thresholds)
