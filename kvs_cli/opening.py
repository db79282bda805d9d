"""From options to a planned model: the part that ``run`` and ``validate`` share, so that their numbers agree."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from kvs_cli.console import Console
from kvs_cli.environment import cache_root
from kvs_cli.options import CommandOptions, describe_settings, find_model_warnings
from kvs_core.backend import Backend, open_backend, resolve_device
from kvs_core.config import RunConfig
from kvs_core.device_budget import DeviceKind
from kvs_core.errors import ConfigError
from kvs_core.host_store import check_store_path
from kvs_core.kernel_files import KernelFiles
from kvs_core.model_file import ModelFile, open_model
from kvs_core.model_reader import read_model_shape
from kvs_core.model_shape import ModelShape
from kvs_core.plan import RunPlan
from kvs_core.plan_memory import check_after_warm_up
from kvs_core.processors import available_processors
from kvs_core.session import Session
from kvs_core.tokenizer import Tokenizer
from kvs_core.validate import validate


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedModel:
    """A model whose header is read and accepted; no weight has been touched."""

    file: ModelFile
    shape: ModelShape
    tokenizer: Tokenizer


def check_options(options: CommandOptions, console: Console) -> None:
    """Say what is worth saying; raise ConfigError with all problems that need no model."""
    for line in describe_settings(options):
        console.detail(line)
    for remark in options.arguments.remarks:
        console.warning(remark)
    for warning in options.warnings:
        console.warning(str(warning))
    n_threads, n_cores = options.config.n_threads or 0, available_processors()
    if n_threads > n_cores:
        console.warning(f"-t {n_threads}: more threads than the {n_cores} cores this run may use only make it slower")
    if options.problems:
        raise ConfigError(options.problems)


@contextmanager
def open_checked_model(options: CommandOptions, console: Console) -> Iterator[OpenedModel]:
    """Open the model and judge the configuration against it; the file stays open inside the ``with``."""
    with open_model(options.config.model_path) as file:
        shape = read_model_shape(file)
        config = _resolve_device(options.config)
        problems = validate(config, shape)
        if problems:
            raise ConfigError(problems)
        for warning in find_model_warnings(config, shape):
            console.warning(f"{warning}" + (f" ({warning.hint})" if warning.hint else ""))
        tokenizer = Tokenizer.from_metadata(
            file.metadata, path=str(options.config.model_path), pre_override=options.config.pre_tokenizer
        )
        for line in tokenizer.warnings:
            console.warning(line)
        yield OpenedModel(file=file, shape=shape, tokenizer=tokenizer)


def _resolve_device(config: RunConfig) -> RunConfig:
    """``auto`` as the device that will be taken, so that the rules of that device are judged."""
    assumes_gpu = config.device == "auto" and config.device_memory_bytes is not None
    return replace(config, device="cuda" if assumes_gpu else resolve_device(config.device))


def open_device(config: RunConfig, console: Console) -> Backend:
    """The device that was asked for; what its kernels cost to compile is said, and kept for the next start."""
    kernel_files = KernelFiles(cache_root(os.environ), report=console.info)
    return open_backend(config.device, n_threads=config.n_threads, kernel_files=kernel_files)


def check_stores(plans: Sequence[RunPlan], console: Console) -> None:
    """Whether the file of ``--kv-stream-store`` is needed and can be made, by every side; raises HostStoreError.

    The files of two sides lie in one folder, so it needs room for both.
    """
    paths = [(plan, plan.config.store_path) for plan in plans if plan.config.store_path is not None]
    n_bytes = 0
    for plan, path in paths:
        if plan.streams:
            n_bytes += plan.store_bytes
            check_store_path(path, n_bytes)
    if paths and not n_bytes:
        console.warning("--kv-stream-store changes nothing: every page fits in the arena, so nothing is stored")


def announce_plan(plan: RunPlan, console: Console) -> None:
    """The lines every run starts with: what was chosen for the user."""
    config, shape = plan.config, plan.shape
    if config.device == "auto" and config.device_memory_bytes is None:
        on_cpu = plan.budget.kind is DeviceKind.CPU
        why = "no usable GPU was found; kvs doctor says why" if on_cpu else "no other was asked for"
        console.info(f"device: {plan.budget.kind.value} ({why})")
    asked = "the largest that fits" if config.n_ctx is None and config.fit else str(config.n_ctx or "training length")
    console.info(f"context: {plan.n_ctx} tokens (requested {asked}, training length {shape.n_ctx_train})")
    if plan.chose_ubatch:
        is_known = plan.budget.compute_capability is not None
        why = "chosen for this model, cache and device" if is_known else "a real device may choose more"
        console.info(f"micro-batch: {plan.n_ubatch} tokens ({why}; -ub sets another)")


@contextmanager
def open_sessions(plans: Sequence[RunPlan], backend: Backend, console: Console) -> Iterator[tuple[Session, ...]]:
    """A session for each plan, warmed up on a GPU, where free memory is then looked at again; raises PlanError.

    What the backend has to say is said when the sessions are open, and what it noted later when they end.
    """
    n_said = 0
    try:
        with ExitStack() as closing:
            sessions = tuple(closing.enter_context(Session(plan, backend)) for plan in plans)
            if not plans[-1].budget.shares_host_memory:
                for session in sessions:
                    session.warm_up()
                check_after_warm_up(plans[-1], backend.budget())
            gc.freeze()  # what is there stays: no collection between two tokens need look at it again
            for line in backend.notes:
                console.warning(line)
                n_said += 1
            yield sessions
    finally:
        for line in backend.notes[n_said:]:
            console.warning(line)
