"""A tiny model on disk, and the ``kvs`` command run inside the test process."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvs_cli.app import run_command_line
from kvs_cli.environment import OTHER_VARIABLES, VARIABLES
from tests.fixtures.tiny_models import TinyModel, make_cycle_model, make_text, write_model


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A command's exit code and what it wrote."""

    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode("utf-8")


Kvs = Callable[..., Finished]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny.gguf", TinyModel())


@pytest.fixture(scope="session")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its f32 cache of 512 tokens takes 4 MiB, more than the smallest arena."""
    return write_model(tmp_path_factory.mktemp("models") / "deep.gguf", TinyModel(n_layer=4, n_head_kv=4))


@pytest.fixture(scope="session")
def cycle_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Greedy decoding walks through the four bytes of one emoji, round and round."""
    ids = [3 + byte for byte in "🦙".encode()]
    return make_cycle_model(tmp_path_factory.mktemp("models") / "cycle.gguf", ids)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text of 160 tokens: two chunks of 64."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(make_text(160), encoding="utf-8")
    return path


@pytest.fixture
def kvs(capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Kvs:
    """Run ``kvs`` with words; ``stdin`` None is one that is not a terminal and empty."""
    for name in (*VARIABLES, *OTHER_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words: str | Path, stdin: bytes = b"") -> Finished:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        capfdbinary.readouterr()
        code = run_command_line([str(word) for word in words])
        out, err = capfdbinary.readouterr()
        return Finished(code=code, out=out, err=err.decode("utf-8"))

    return run
