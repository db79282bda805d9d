"""Options of ``kvs perplexity`` and ``kvs kl-divergence``, and what contradicts what among them. Nothing is opened."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from kvs_cli.arguments import Arguments
from kvs_cli.flags import KL_DIVERGENCE, PERPLEXITY
from kvs_core.config import ArenaMode, ArenaRequest, RunConfig
from kvs_core.errors import Problem
from kvs_core.evaluate.choices import KldThresholds, LogitsFormat
from kvs_core.kv_types import KvType


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions:
    """What is measured, against what, and which limits make it fail; None is "not given"."""

    n_chunks: int = -1
    ppl_stride: int = 0
    base_file: Path | None = None
    compares: bool = False
    kld_format: LogitsFormat = LogitsFormat.LLAMA
    base_type_k: KvType | None = None
    base_type_v: KvType | None = None
    base_arena: ArenaRequest | None = None
    base_store: Path | None = None
    """The file of --kv-stream-store where only the base side streams; it is no flag of its own."""
    file_base: Path | None = None
    file_other: Path | None = None
    max_kld: float | None = None
    max_mean_kld: float | None = None
    min_same_top: float | None = None
    plot: Path | None = None
    resumes: bool = True

    @property
    def thresholds(self) -> KldThresholds:
        return KldThresholds(max_kld=self.max_kld, max_mean_kld=self.max_mean_kld, min_same_top=self.min_same_top)


def compares_files(arguments: Arguments) -> bool:
    """Whether two saved files are compared, so that no model is needed."""
    return arguments.is_given("file_base") or arguments.is_given("file_other")


def give_store_to_base(config: RunConfig, evaluation: EvaluationOptions) -> tuple[RunConfig, EvaluationOptions]:
    """Both as they were, or with ``--kv-stream-store`` moved to the base side where that alone streams."""
    base_arena = evaluation.base_arena
    if config.arena.mode is not ArenaMode.OFF or base_arena is None or base_arena.mode is ArenaMode.OFF:
        return config, evaluation
    return replace(config, store_path=None), replace(evaluation, base_store=config.store_path)


def find_evaluation_problems(arguments: Arguments) -> list[Problem]:
    """Flags of one evaluation command that contradict or miss each other."""
    if arguments.command == PERPLEXITY:
        return _find_perplexity_problems(arguments)
    if arguments.command == KL_DIVERGENCE:
        return _find_kl_divergence_problems(arguments)
    return []


def _find_perplexity_problems(arguments: Arguments) -> list[Problem]:
    problems = []
    compares = bool(arguments.get("compares"))
    has_base = arguments.is_given("base_file")
    if compares and not has_base:
        problems.append(_problem(arguments, "compares", "needs a base file", "add --kl-divergence-base FILE"))
    if not compares:
        for dest in ("max_kld", "max_mean_kld", "min_same_top", "plot"):
            if arguments.is_given(dest):
                problems.append(
                    _problem(arguments, dest, "is about a comparison", "add --kl-divergence, or use kvs kl-divergence")
                )
    if arguments.is_given("kld_format") and (compares or not has_base):
        problems.append(
            _problem(arguments, "kld_format", "is for writing a base file; when reading it is recognised", None)
        )
    if arguments.get("ppl_stride") and has_base:
        problems.append(
            _problem(arguments, "ppl_stride", "cannot go with a base file, whose rows are those of whole chunks", None)
        )
    return problems


_OF_TWO_FILES = (
    *("help", "json", "verbose", "log_file", "n_threads"),
    *("file_base", "file_other", "n_chunks", "plot", "resumes"),
    *("max_kld", "max_mean_kld", "min_same_top"),
)
"""Settings that mean something where two saved files are compared; every other one is about a model's run."""


def _find_kl_divergence_problems(arguments: Arguments) -> list[Problem]:
    if not compares_files(arguments):
        return []
    problems = []
    for dest, other in (("file_base", "--other"), ("file_other", "--base")):
        missing = "file_other" if dest == "file_base" else "file_base"
        if arguments.is_given(dest) and not arguments.is_given(missing):
            problems.append(_problem(arguments, dest, f"needs {other}, the file to compare with", f"add {other} FILE"))
    for dest, setting in arguments.settings.items():
        if dest not in _OF_TWO_FILES and not setting.origin.startswith("variable "):
            problems.append(_problem(arguments, dest, "has no place where two files are compared", "leave it out"))
    return problems


def _problem(arguments: Arguments, dest: str, reason: str, hint: str | None) -> Problem:
    return Problem(field=arguments.settings[dest].origin, value="", reason=reason, hint=hint)
