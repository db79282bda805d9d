"""What the streaming scripts share: a model and its text as tokens, plans by resident share, and where they ran."""

from __future__ import annotations

import platform
import subprocess
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvs_core.backend import Backend, open_backend
from kvs_core.config import RunConfig
from kvs_core.model_file import open_model
from kvs_core.model_reader import read_model_shape
from kvs_core.model_shape import ModelShape
from kvs_core.plan import RunPlan, plan_run, with_arena
from kvs_core.processors import processor_name
from kvs_core.tokenizer import Tokenizer
from kvs_core.units import MIB

ROOT = Path(__file__).resolve().parent.parent
TEXT_FILES = (ROOT / "tests" / "data" / "mixed_text.txt", *sorted((ROOT / "docs").glob("*.md")))


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model whose weights are loaded, and real text as its tokens, repeated when it is too short."""

    path: Path
    shape: ModelShape
    backend: Backend
    tokenizer: Tokenizer
    text: Sequence[int]

    def plan(self, config: RunConfig, arena_mib: int = 0) -> RunPlan:
        return plan_run(with_arena(config, arena_mib * MIB), self.shape, self.backend.budget())

    def tokens(self, n_tokens: int) -> list[int]:
        repeats = -(-n_tokens // len(self.text))
        return list(self.text * repeats)[:n_tokens]


@contextmanager
def open_subject(path: Path, n_threads: int | None) -> Iterator[Subject]:
    backend = open_backend("cpu", n_threads=n_threads)
    try:
        with open_model(path) as model_file:
            backend.load_weights(model_file)
            tokenizer = Tokenizer.from_metadata(model_file.metadata, path=str(path))
            text = "\n".join(file.read_text(encoding="utf-8") for file in TEXT_FILES)
            yield Subject(
                path=path,
                shape=read_model_shape(model_file),
                backend=backend,
                tokenizer=tokenizer,
                text=tuple(tokenizer.encode(text, add_special=True, parse_special=False)),
            )
    finally:
        backend.close()


def resident_share(plan: RunPlan, n_tokens: int) -> float:
    """Resident KV bytes over all KV bytes of a run that ends with ``n_tokens`` in the decode layout, ring excluded."""
    page_tokens = plan.cache.page_tokens
    n_full, n_growing = divmod(n_tokens, page_tokens)
    resident = total = 0
    for n_resident, page_bytes in zip(plan.decode.resident_pages, plan.cache.page_bytes, strict=True):
        resident += page_bytes * (min(n_resident, n_full) * page_tokens + n_growing)
        total += page_bytes * n_tokens
    return resident / total


def find_arena_mib(subject: Subject, config: RunConfig, share: float, n_tokens: int) -> int:
    """The arena in MiB, among those that work, whose resident share at ``n_tokens`` is nearest to ``share``."""
    free = subject.plan(config)
    sizes = range(free.minimum_arena_bytes // MIB, free.useful_arena_bytes // MIB + 1)

    def share_of(arena_mib: int) -> float:
        return resident_share(subject.plan(config, arena_mib), n_tokens)

    above = min(bisect_left(sizes, share, key=share_of), len(sizes) - 1)
    return min(sizes[max(0, above - 1)], sizes[above], key=lambda arena_mib: abs(share_of(arena_mib) - share))


def describe_run(subject: Subject) -> list[str]:
    """The lines a table begins with: processor, commit, model, text."""
    budget = subject.backend.budget()
    texts = ", ".join(str(file.relative_to(ROOT)) for file in TEXT_FILES)
    return [
        f"processor  {processor_name()}, {budget.n_threads} threads, Python {platform.python_version()}",
        f"commit     {_commit()}",
        f"model      {subject.path.name}, {subject.shape.n_layer} layers",
        f"text       {texts}: {len(subject.text)} tokens",
    ]


def _commit() -> str:
    """The commit of the working tree, with a mark when files differ from it; sources out of an archive have none."""
    commands = (["git", "rev-parse", "--short", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"])
    try:
        head, changed = (
            subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for command in commands
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown: not a git checkout"
    return head + (" with changes" if changed else "")
