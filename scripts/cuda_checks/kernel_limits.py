"""What kernels promise to stay within on every device generation, and the exceptions with their reasons."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from cuda_kernels.launch import SHARED_LIMIT
from scripts.cuda_checks.assemble import Generation, Usage, name_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StackException:
    """Local memory that the kernels of this name (``fnmatch``) may use on these generations."""

    name: str
    generations: tuple[Generation, ...]
    n_bytes: int
    reason: str


STACK_EXCEPTIONS: tuple[StackException, ...] = ()


def stack_limit(name: str, generation: Generation) -> int:
    """Bytes of local memory a thread of this kernel may use."""
    fitting = (
        exception.n_bytes
        for exception in STACK_EXCEPTIONS
        if fnmatchcase(name, exception.name) and generation in exception.generations
    )
    return max(fitting, default=0)


def find_complaints(name: str, usage: Usage) -> Iterator[str]:
    """Every promise that this usage breaks, one line each."""
    where = f"{name} on {name_of(usage.generation)}"
    if usage.has_calls:
        yield f"{where}: a device function was not inlined"
    if usage.shared_bytes > SHARED_LIMIT:
        yield f"{where}: {usage.shared_bytes} bytes of shared memory, at most {SHARED_LIMIT} are portable"
    limit = stack_limit(name, usage.generation)
    if usage.stack_bytes > limit:
        yield f"{where}: {usage.stack_bytes} bytes of local memory a thread, at most {limit} are accepted"
