"""How long ``kvs run --device cuda`` takes to its first token: with no compiled kernels, and with those of that start.

    python -m scripts.check_cuda_startup [MODEL ...]

A tiny model and every MODEL: two fresh processes each over one empty cache folder, with the lines they say about
compiling and loading. Exit code 1 when a line says FAIL.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from time import perf_counter

from gguf import GGMLQuantizationType as Q

from tests.fixtures.tiny_models import TinyModel, write_model

FIRST_SECONDS, SECOND_SECONDS = 90.0, 5.0
DEADLINE_SECONDS = 150.0
TOLD = ("compiling", "load time", "warning:", "error:", "hint:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One process. ``seconds`` from its start to the first byte of text, or to its end if the token has no text."""

    seconds: float
    exit_code: int
    lines: list[str]

    @property
    def compiles(self) -> bool:
        return any(line.startswith("compiling") for line in self.lines)


def start(model: Path, device: str, cache: Path) -> Start:
    arguments = ["run", "-m", str(model), "--device", device, "-p", "Once upon a time", "-n", "1", "-c", "512"]
    arguments += ["--temp", "0", "--no-display-prompt"]
    began = perf_counter()
    with (
        tempfile.TemporaryFile() as messages,
        subprocess.Popen(
            [sys.executable, "-m", "kvs_cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=messages,
            env={**os.environ, "KVS_CACHE_DIR": str(cache)},
        ) as process,
    ):
        watchdog = Timer(DEADLINE_SECONDS, process.kill)
        watchdog.start()
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = perf_counter() - began
        process.stdout.read()
        exit_code = process.wait()
        watchdog.cancel()
        messages.seek(0)
        lines = [line.strip() for line in messages.read().decode(errors="replace").splitlines()]
    return Start(seconds=seconds, exit_code=exit_code, lines=lines)


def check(model: Path, device: str) -> bool:
    passed = True
    with tempfile.TemporaryDirectory() as cache:
        for what, limit, compiles in (("first", FIRST_SECONDS, True), ("second", SECOND_SECONDS, False)):
            seen = start(model, device, Path(cache))
            good = seen.exit_code == 0 and seen.seconds <= limit and seen.compiles == compiles
            passed &= good
            print(
                f"{'ok  ' if good else 'FAIL'} {model.name}: {what} start {seen.seconds:.2f} s to the first token, "
                f"at most {limit:.0f}; compiles {seen.compiles}, exit code {seen.exit_code}",
                flush=True,
            )
            for line in seen.lines:
                if line.startswith(TOLD):
                    print(f"     {line}", flush=True)
        kept = list(Path(cache).glob("kvs/cuda-kernels/*/*.cubin"))
        print(f"     {len(kept)} kernels kept, {sum(path.stat().st_size for path in kept) / 1e6:.2f} MB", flush=True)
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tiny = write_model(Path(folder) / "tiny.gguf", TinyModel(weight_type=Q.Q8_0, weight_std=0.08))
        results = [check(model, arguments.device) for model in (tiny, *arguments.models)]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
