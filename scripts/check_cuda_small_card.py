"""Check runs on a CUDA device most of whose memory is taken, as on a small card: what fits runs with the same bits.

    python -m scripts.check_cuda_small_card MODEL [--free GIB ...] [--ctx N] [--kernels-of MAJOR.MINOR]

First a run with the whole device and no arena; then, for each size, memory is allocated until so much is free, and a
fresh process opens the model with ``--kv-stream-arena-mib auto``, runs a prompt that fills the context and decodes.
Logits of the last prompt tokens and of every decoded one must be the same bits, the bytes streamed must be what the
plan predicted, above 0 in one run at least, and what does not fit must be refused with both figures before weights are
loaded. ``--kernels-of`` takes the kernels of another device generation. Exit code 1 when a line says FAIL.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from kvs_cli.environment import cache_root
from kvs_core.backend import open_backend
from kvs_core.config import ArenaMode, ArenaRequest, RunConfig
from kvs_core.errors import PlanError
from kvs_core.kernel_files import KernelFiles
from kvs_core.model_file import open_model
from kvs_core.model_reader import read_model_shape
from kvs_core.plan import plan_run
from kvs_core.session import Session
from kvs_core.units import GIB, MIB
from scripts.cuda_checks import other_generation
from scripts.cuda_checks.sessions import rows_of, verdict


@contextmanager
def only_free(n_bytes: int) -> Iterator[None]:
    """All device memory but ``n_bytes`` taken."""
    from cuda.bindings import driver

    def done(result: tuple[Any, ...]) -> Any:
        if int(result[0]):
            raise SystemExit(f"error: the driver says {result[0].name}")
        return result[1] if len(result) == 2 else result[1:]

    done((*driver.cuInit(0), None))
    device = done(driver.cuDeviceGet(0))
    done((*driver.cuCtxSetCurrent(done(driver.cuDevicePrimaryCtxRetain(device))), None))
    free, _ = done(driver.cuMemGetInfo())
    taken = done(driver.cuMemAlloc(free - n_bytes)) if free > n_bytes else None
    try:
        yield
    finally:
        if taken is not None:
            driver.cuMemFree(taken)
        driver.cuDevicePrimaryCtxRelease(device)


def run_child(arguments: argparse.Namespace) -> dict[str, Any]:
    """One run in a process of its own, with the whole cache on the device or with an arena of ``auto``."""
    rng = np.random.default_rng(1)
    kernel_files = KernelFiles(cache_root(os.environ), report=lambda _: None)
    backend = open_backend("cuda", n_threads=None, kernel_files=kernel_files)
    try:
        with open_model(arguments.model) as model_file:
            shape = read_model_shape(model_file)
            config = RunConfig(model_path=arguments.model, n_ctx=arguments.ctx)
            if arguments.child == "auto":
                config = replace(config, arena=ArenaRequest(mode=ArenaMode.AUTO))
            free = backend.budget().free_bytes
            try:
                plan = plan_run(config, shape, backend.budget())
            except PlanError as refused:
                return {"free": free, "refused": str(refused), "needs": refused.required_bytes}
            backend.load_weights(model_file)
            prompt = rng.integers(3, shape.n_vocab, arguments.ctx - arguments.decode).tolist()
            forced = rng.integers(3, shape.n_vocab, arguments.decode).tolist()
            with Session(plan, backend) as session:
                session.warm_up()
                begun = perf_counter()
                rows = rows_of(session, prompt, forced)
                seconds = perf_counter() - begun
                counters = session.counters
                return {
                    "free": free,
                    "arena": plan.arena_bytes,
                    "n_ubatch": plan.n_ubatch,
                    "bits": hashlib.blake2b(rows.tobytes(), digest_size=8).hexdigest(),
                    "finite": bool(np.isfinite(rows).all()),
                    "streamed": counters.bytes_streamed,
                    "predicted": plan.streamed_bytes_of_run(len(prompt), len(forced)),
                    "seconds": seconds,
                    "left": backend.budget().free_bytes,
                }
    finally:
        backend.close()


def start_child(arguments: argparse.Namespace, what: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "scripts.check_cuda_small_card", str(arguments.model), "--child", what]
    command += ["--ctx", str(arguments.ctx), "--decode", str(arguments.decode)]
    if arguments.kernels_of is not None:
        command += ["--kernels-of", ".".join(map(str, arguments.kernels_of))]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(name: str, run: dict[str, Any], bits: str) -> bool:
    if "refused" in run:
        good = run["needs"] > run["free"]
        print(f"{verdict(good)} {name}: refused, {run['refused']}", flush=True)
        return good
    is_predicted = run["streamed"] == run["predicted"]
    good = run["bits"] == bits and run["finite"] and is_predicted
    print(
        f"{verdict(good)} {name}: arena {run['arena'] / MIB:.0f} MiB, -ub {run['n_ubatch']}, {run['seconds']:.1f} s, "
        f"{run['streamed'] / 1e9:.2f} GB streamed, as predicted {is_predicted}; {run['left'] / MIB:.0f} MiB left; "
        f"bits {run['bits']}{'' if run['bits'] == bits else ' DIFFER'}",
        flush=True,
    )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--free", type=float, nargs="+", default=[24, 16, 12, 8, 6, 5], metavar="GIB")
    parser.add_argument("--ctx", type=int, default=65536)
    parser.add_argument("--decode", type=int, default=16)
    parser.add_argument("--child", choices=["off", "auto"], help=argparse.SUPPRESS)
    other_generation.add_option(parser)
    arguments = parser.parse_args()
    other_generation.apply_option(arguments)
    if arguments.child:
        print(json.dumps(run_child(arguments)))
        return 0
    free_run = start_child(arguments, "off")
    bits = free_run.get("bits", "")
    passed, n_streamed = report("everything free, arena off", free_run, bits), 0
    for size in arguments.free:
        with only_free(int(size * GIB)):
            run = start_child(arguments, "auto")
        passed &= report(f"{size:g} GiB free, arena auto", run, bits)
        n_streamed += run.get("streamed", 0) > 0
    print(f"{verdict(n_streamed > 0)} {n_streamed} of {len(arguments.free)} runs streamed")
    return 0 if passed and n_streamed else 1


if __name__ == "__main__":
    sys.exit(main())
