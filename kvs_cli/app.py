"""The command tree: run, validate, perplexity, kl-divergence. Each body builds options, calls the core, and renders.

Typer gives the tree; a command's words are matched by arguments.py, and its help is made from the same flag table.
The heavy modules of a command are imported when it runs, so that ``kvs --help`` is quick and needs no model library.
"""

from __future__ import annotations

import difflib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvs_cli.arguments import Arguments, read_arguments
from kvs_cli.console import Console, open_standard_streams
from kvs_cli.environment import (
    OTHER_VARIABLES,
    VARIABLES,
    cache_root,
    find_unknown,
    read_environment,
    rewrites_lines,
    wants_colour,
)
from kvs_cli.exits import CHECK_FAILED, DONE, EXIT_HELP, SIGNAL_BASE, SignalReceived, exit_code_of
from kvs_cli.flag_table import FLAGS
from kvs_cli.flags import DOCTOR, KL_DIVERGENCE, PERPLEXITY, RUN, VALIDATE, Flag, Section
from kvs_cli.options import CommandOptions, build_options, find_overwritten_input
from kvs_cli.signals import describe_signal, install_signal_handlers, restore_default_signals
from kvs_cli.version import read_version
from kvs_core.errors import CheckFailedError, ConfigError, Problem

_HELP_WORDS = ("-h", "--help")


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """What every command gets: where to write, and whether settings of the whole process are its to make."""

    console: Console
    owns_process: bool


class TableCommand(TyperCommand):
    """A command whose words are matched against the flag table instead of by Typer's own parser.

    Contexts and formatters are ``Any``: their classes lie in a package that differs between versions of Typer.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        console = ctx.obj.console
        arguments = read_arguments(str(self.name), args, FLAGS, read_environment(os.environ))
        console.json = bool(arguments.get("json"))
        console.verbose = bool(arguments.get("verbose"))
        if arguments.get("help"):
            console.write_text(self.get_help(ctx) + "\n")
            raise typer.Exit()
        unknown = find_unknown(os.environ)
        if unknown is not None:
            console.warning(unknown)
        ctx.meta["arguments"] = arguments
        return super().parse_args(ctx, [])

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        formatter.write_usage(ctx.command_path, "[FLAGS]")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        flags = FLAGS.of_command(str(self.name))
        for section in Section:
            rows = [(_show_flag(flag), flag.help) for flag in flags if flag.section is section]
            if rows:
                with formatter.section(section.value):
                    formatter.write_dl(rows)
        with formatter.section("Environment"):
            rows = [(name, f"{text}; a flag is stronger") for name, (_, text) in VARIABLES.items()]
            rows += OTHER_VARIABLES.items()
            formatter.write_dl([(name, f"{text[0].upper()}{text[1:]}.") for name, text in rows])
            formatter.write_text("An empty variable counts as unset.")
        with formatter.section("Exit codes"):
            formatter.write_text(EXIT_HELP)


class TableGroup(TyperGroup):
    """The root: a command's name first, and a suggestion when it is misspelt."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        console = ctx.obj.console
        if args and args[0] in _HELP_WORDS:
            console.write_text(self.get_help(ctx) + "\n")
            raise typer.Exit()
        if args and args[0] == "--version":
            console.write_text(f"kvs {read_version()}\n")
            raise typer.Exit()
        if not args or args[0] not in self.commands:
            console.json = "--json" in args
            raise ConfigError([_missing_command(args, list(self.commands))])
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        formatter.write_usage("kvs", "COMMAND [FLAGS]")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        rows = [("-h, --help", "Show this help and exit."), ("--version", "Show the version and exit.")]
        with formatter.section("Flags"):
            formatter.write_dl(rows)
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(200)) for name, command in self.commands.items()])
        with formatter.section("Exit codes"):
            formatter.write_text(EXIT_HELP)


def _missing_command(args: Sequence[str], commands: list[str]) -> Problem:
    known = ", ".join(commands)
    if not args:
        return Problem(field="kvs", value="", reason=f"needs a command: {known}", hint="kvs --help shows them")
    if args[0].startswith("-"):
        return Problem(
            field=args[0], value="", reason=f"stands before the command; first one of: {known}", hint="kvs run -m ..."
        )
    near = difflib.get_close_matches(args[0], commands, n=1)
    hint = f"did you mean kvs {near[0]}?" if near else "kvs --help shows them"
    return Problem(field=args[0], value="", reason=f"is not a command; known: {known}", hint=hint)


def _show_flag(flag: Flag) -> str:
    names = ", ".join(flag.spellings) + (f" / {', '.join(flag.negative)}" if flag.negative else "")
    metavar = f"[{flag.metavar}]" if flag.bare is not None else flag.metavar
    return f"{names} {metavar}".rstrip()


app = typer.Typer(
    cls=TableGroup,
    help="Run GGUF models whose KV cache does not fit the device: exact attention over streamed pages.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _options_of(ctx: typer.Context) -> tuple[CommandOptions, Console]:
    arguments: Arguments = ctx.meta["arguments"]
    invocation: Invocation = ctx.obj
    console = invocation.console
    options = build_options(arguments)
    if options.output.log_file is not None:
        overwritten = find_overwritten_input(options)
        if overwritten is not None:
            raise ConfigError([overwritten])
        console.open_log(options.output.log_file)
    if invocation.owns_process and not options.problems:
        _use_kernel_cache(console)
    return options, console


def _use_kernel_cache(console: Console) -> None:
    """Choose where compiled kernels are kept, before any of them is imported; a wait for the compiler is explained."""
    from kvs_core.cpu.kernel_cache import configure_kernel_cache, report_compilation

    cache = configure_kernel_cache(cache_root(os.environ))
    if cache.warning is not None:
        console.warning(cache.warning)
    line = f"compiling kernels, which counts in this run's times; later runs take them from {cache.path}"
    report_compilation(lambda: console.info(line))


@app.command(RUN, cls=TableCommand)
def run(ctx: typer.Context) -> None:
    """Generate text from a prompt."""
    options, console = _options_of(ctx)

    from kvs_cli.run import run_model

    run_model(options, console)


@app.command(VALIDATE, cls=TableCommand)
def validate(ctx: typer.Context) -> None:
    """Check a configuration and print its memory plan, without loading weights."""
    options, console = _options_of(ctx)

    from kvs_cli.validate_command import validate_model

    validate_model(options, console)


@app.command(PERPLEXITY, cls=TableCommand)
def perplexity(ctx: typer.Context) -> None:
    """Measure how well a model predicts a text; save its logits, or compare with saved ones."""
    options, console = _options_of(ctx)

    from kvs_cli.perplexity_command import evaluate_perplexity

    evaluate_perplexity(options, console)


@app.command(KL_DIVERGENCE, cls=TableCommand)
def kl_divergence(ctx: typer.Context) -> None:
    """Compare two configurations of a model in lock-step, or two saved files."""
    options, console = _options_of(ctx)

    from kvs_cli.kl_divergence_command import evaluate_kl_divergence

    evaluate_kl_divergence(options, console)


@app.command(DOCTOR, cls=TableCommand)
def doctor(ctx: typer.Context) -> None:
    """Look at the GPU and its packages, measure its copy rates, and say whether CUDA runs can work."""
    arguments: Arguments = ctx.meta["arguments"]
    if arguments.problems:
        raise ConfigError(arguments.problems)

    from kvs_cli.doctor import examine

    examine(str(arguments.get("device") or "cuda"), ctx.obj.console)


def run_command_line(argv: Sequence[str], *, owns_process: bool = False) -> int:
    """Run one command; returns the exit code. No exception leaves, not even one that nobody expected.

    ``owns_process`` lets it choose the folder of compiled kernels, which a process can do once.
    """
    with Console(colour=wants_colour(os.environ), rewrites_lines=rewrites_lines(os.environ)) as console:
        try:
            return _run(argv, Invocation(console=console, owns_process=owns_process))
        except SignalReceived as received:
            console.progress("")
            if received.signal_number != signal.SIGPIPE:
                line = describe_signal(received.signal_number)
                console.info(line)
                if console.json:
                    from kvs_cli.render import error_to_json

                    console.write_error_document({**error_to_json(received), "message": line})
            return SIGNAL_BASE + received.signal_number


def _run(argv: Sequence[str], invocation: Invocation) -> int:
    command = typer.main.get_command(app)
    try:
        code = command.main(args=list(argv), prog_name="kvs", standalone_mode=False, obj=invocation)
    except Exception as error:
        code = exit_code_of(error)
        report_error(error, invocation.console)
    return code if isinstance(code, int) else DONE


def report_error(error: Exception, console: Console) -> None:
    """Lines on standard error, and the document on standard output when JSON was asked for."""
    from kvs_cli.render import error_lines, error_to_json

    console.progress("")
    if exit_code_of(error) == CHECK_FAILED and not isinstance(error, CheckFailedError):
        console.detail("".join(traceback.format_exception(error)).rstrip())
    console.errors(error_lines(error))
    if console.json:
        console.write_error_document(error_to_json(error))


def main() -> None:
    """Entry point of the ``kvs`` command."""
    open_standard_streams()
    install_signal_handlers()
    code = run_command_line(sys.argv[1:], owns_process=True)
    restore_default_signals()
    sys.exit(code)
