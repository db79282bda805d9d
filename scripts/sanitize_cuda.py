"""Run the small cases of `check_cuda` under compute-sanitizer: memcheck, and racecheck for shared memory.

    python -m scripts.sanitize_cuda [--tools memcheck racecheck] [--slices N] [--timeout SECONDS]

Every tool runs ``--slices`` processes side by side, which mostly compile. One line a process: the tool's summary and
the check's own. Exit code 1 when a process found something, failed or was not done in time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import IO

from scripts.cuda_checks.sessions import verdict

TOOLS = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY: 0 hazards displayed"}
"""What the last line of a tool says when it found nothing."""
FOUND_EXIT_CODE = 86
USUAL_PLACE = Path("/usr/local/cuda/bin/compute-sanitizer")
SHOWN_LINES = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    tool: str
    part: str
    process: subprocess.Popen[bytes]
    output: IO[bytes]


def find_sanitizer() -> str:
    found = shutil.which("compute-sanitizer") or (str(USUAL_PLACE) if USUAL_PLACE.exists() else None)
    if found is None:
        sys.exit("error: compute-sanitizer is neither on PATH nor in /usr/local/cuda/bin; install the CUDA toolkit")
    return found


def start(sanitizer: str, tool: str, part: str) -> Job:
    output = tempfile.TemporaryFile()  # noqa: SIM115 (closed in finish)
    command = [
        *(sanitizer, "--tool", tool, "--error-exitcode", str(FOUND_EXIT_CODE), "--print-limit", "20"),
        # errors that the driver returns on purpose, such as a question whether something is supported
        *(("--report-api-errors", "no") if tool == "memcheck" else ()),
        *(sys.executable, "-m", "scripts.check_cuda", "--small", "--failures", "--slice", part),
    ]
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    return Job(tool=tool, part=part, process=process, output=output)


def finish(job: Job, deadline: float, started: float) -> bool:
    """Wait until the deadline, then print the job's line; its output, too, when something is wrong."""
    try:
        code: int | None = job.process.wait(max(0.1, deadline - perf_counter()))
    except subprocess.TimeoutExpired:
        os.killpg(job.process.pid, signal.SIGKILL)  # the tool and the program under it
        job.process.wait()
        code = None
    job.output.seek(0)
    lines = job.output.read().decode(errors="replace").splitlines()
    job.output.close()
    summary = next((line.strip("= ") for line in reversed(lines) if "SUMMARY" in line), "no summary")
    checked = next((line for line in reversed(lines) if " passed, " in line), "no check ended")
    good = code == 0 and summary.startswith(TOOLS[job.tool])
    ended = "not done in time" if code is None else f"exit {code}"
    print(
        f"{verdict(good)} {job.tool} slice {job.part}: {summary}; {checked}; {ended}, {perf_counter() - started:.0f} s",
        flush=True,
    )
    if not good:
        print(*(f"     {line}" for line in lines[-SHOWN_LINES:]), sep="\n", flush=True)
    return good


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", nargs="+", choices=tuple(TOOLS), default=tuple(TOOLS))
    parser.add_argument("--slices", type=int, default=6)
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for everything")
    arguments = parser.parse_args(argv)
    sanitizer, started = find_sanitizer(), perf_counter()
    parts = [f"{i}/{arguments.slices}" for i in range(1, arguments.slices + 1)]
    jobs = [start(sanitizer, tool, part) for tool in arguments.tools for part in parts]
    results = [finish(job, started + arguments.timeout, started) for job in jobs]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
