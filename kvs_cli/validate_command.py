"""The body of ``kvs validate``: the checks and the plan of ``kvs run``, a given prompt included, without weights."""

from __future__ import annotations

from dataclasses import replace

from kvs_cli.console import Console
from kvs_cli.opening import announce_plan, check_options, check_stores, open_checked_model
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
from kvs_cli.render import render_plan
from kvs_core.backend import open_backend
from kvs_core.config import RunConfig
from kvs_core.device_budget import DeviceBudget, DeviceKind
from kvs_core.errors import BackendUnavailableError, ConfigError, PlanError
from kvs_core.host_memory import free_host_bytes
from kvs_core.plan import plan_run
from kvs_core.plan_json import plan_to_json


def validate_model(options: CommandOptions, console: Console) -> None:
    """Print the plan. A run that does not fit is refused here like any other configuration: exit code 2.

    Files that cannot be read or made end it as they end a run, a host store among them.
    """
    check_options(options, console)
    prompt = read_prompt(options.prompt) if has_prompt(options.prompt) else None
    options = resolve_stop_texts(options)
    with open_checked_model(options, console) as model:
        tokens: list[int] = []
        if prompt is not None:
            tokens = encode_prompt(options.prompt, console, model.tokenizer, model.file.metadata, prompt)
        elif uses_template(options.prompt):
            choose_chat_template(options.prompt, model.file.metadata)
        budget = read_budget(options.config)
        try:
            plan = plan_run(options.config, model.shape, budget)
            announce_plan(plan, console)
            check_prompt_length(len(tokens), plan.n_ctx)
            if options.config.device_memory_bytes is None:
                check_stores([plan], console)
        except PlanError as error:
            raise ConfigError(str(error), hint=error.hint) from error
        if options.config.device_memory_bytes is not None:
            console.info("planned for an assumed device; nothing on a real one was checked")
        if options.output.json:
            console.write_json({"command": "validate", "plan": plan_to_json(plan)})
        else:
            console.write_text(render_plan(plan))


def read_budget(config: RunConfig) -> DeviceBudget:
    """What the device has, or what ``--device-memory-mib`` says it has: then a GPU unless ``--device cpu`` is given."""
    assumed = config.device_memory_bytes
    if assumed is None:
        try:
            backend = open_backend(config.device, n_threads=config.n_threads)
        except BackendUnavailableError as error:
            hint = "plan for a card that is not here with --device-memory-mib N"
            raise BackendUnavailableError(str(error), hint=hint) from error
        try:
            return backend.budget()
        finally:
            backend.close()
    if config.device == "cpu":
        present = read_budget(replace(config, device_memory_bytes=None))
        return replace(present, name="assumed", total_bytes=assumed, free_bytes=assumed, host_free_bytes=assumed)
    return DeviceBudget(
        kind=DeviceKind.CUDA,
        name="assumed",
        total_bytes=assumed,
        free_bytes=assumed,
        host_free_bytes=free_host_bytes(),
    )
