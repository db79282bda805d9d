"""The whole error hierarchy. Exit codes live in ``kvs_cli.exits``; messages are built where the failure is seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong with a configuration: which field, the value seen, why it cannot be, what to change."""

    field: str
    value: str
    reason: str
    hint: str | None = None

    def __str__(self) -> str:
        return f"{self.field} {self.value}: {self.reason}" if self.value else f"{self.field}: {self.reason}"


class KvsError(Exception):
    """Base of every error the toolkit raises on purpose; ``hint`` is one actionable sentence or None."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(KvsError, ValueError):
    """User input that cannot be used; ``problems`` lists everything found, not only the first."""

    def __init__(self, problems: Sequence[Problem] | str, *, hint: str | None = None) -> None:
        if isinstance(problems, str):
            self.problems: tuple[Problem, ...] = ()
            super().__init__(problems, hint=hint)
        else:
            self.problems = tuple(problems)
            super().__init__("\n".join(str(problem) for problem in problems), hint=hint)


class UnsupportedError(ConfigError):
    """Recognised and deliberately refused: an architecture, a type pair, a flag."""


class UnsupportedModelError(UnsupportedError):
    """A whole, valid model file of an architecture, a variant or a tokenizer that is refused by name."""


class ModelFileError(KvsError):
    """A GGUF file is missing, damaged, or lacks a key; ``path`` and ``key`` say where."""

    def __init__(self, message: str, *, path: str, key: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.path = path
        self.key = key


class PlanError(KvsError):
    """The run does not fit; both byte counts are kept for callers that want to react."""

    def __init__(self, message: str, *, required_bytes: int, available_bytes: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.required_bytes = required_bytes
        self.available_bytes = available_bytes


class BackendError(KvsError):
    """A device or its driver failed."""


class BackendUnavailableError(BackendError):
    """No driver or no device."""


class DeviceMemoryError(BackendError):
    """The driver refused an allocation."""


class KernelArgumentError(BackendError, TypeError):
    """Arrays handed to a kernel disagree in shape, type, contiguity or residence."""


class StateError(KvsError, RuntimeError):
    """A call out of order, a stale generation, or use after close."""


class FileAccessError(KvsError, OSError):
    """A file or stream of a run could not be created, written or read, or does not hold what it should."""


class HostStoreError(FileAccessError):
    """The host store could not be created, written or read."""


class IntegrityError(KvsError, AssertionError):
    """Our own bug: the message lists the invariant that broke."""


class CheckFailedError(KvsError):
    """A check the user asked for (a threshold, a comparison) did not hold."""
