"""Measure device and host memory of whole runs on a CUDA device against what `kvs validate` predicts.

    python -m scripts.measure_cuda_memory MODEL [--ctx N ...] [--ub N] [--arena MIB] [--decode N]

Each context runs in a fresh process: a prompt that fills it up to the tokens that are decoded. Device memory is what
NVML counts on the whole device above what it counted before the process began, so nothing else may use the device.
Host memory is what no file backs, RssAnon + RssShmem. Both are sampled beside the run; the peak counts. Exit code 1
when a line says FAIL.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Event, Thread
from time import perf_counter
from typing import Any

import numpy as np

from kvs_core.backend import open_backend
from kvs_core.config import RunConfig
from kvs_core.model_file import open_model
from kvs_core.model_reader import read_model_shape
from kvs_core.plan import plan_run, with_arena
from kvs_core.session import Session
from kvs_core.units import MIB
from scripts.cuda_checks.sessions import verdict
from scripts.measure_cuda_session import warm_up

DEVICE_SHARE, HOST_SHARE = 0.01, 0.03
SPREAD_BYTES = 16 * MIB
SAMPLE_SECONDS = 0.01


def device_used(device: str) -> int:
    """Bytes in use on the whole device, the driver's own included; 0 on the CPU."""
    if not device.startswith("cuda"):
        return 0
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByPciBusId(_pci_address(int(device.partition(":")[2] or 0)))
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)


@cache
def _pci_address(index: int) -> bytes:
    """Of a device as CUDA counts: the environment may hide some, which NVML counts, too."""
    from cuda.bindings import driver

    driver.cuInit(0)
    _, device = driver.cuDeviceGet(index)
    _, address = driver.cuDeviceGetPCIBusId(64, device)
    return bytes(address).rstrip(b"\0")


def host_memory() -> dict[str, int]:
    """Resident bytes of this process by kind: RssAnon, RssFile, RssShmem, and the peak of their sum, VmHWM."""
    sizes = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("RssAnon", "RssFile", "RssShmem", "VmHWM"):
            sizes[name] = 1024 * int(value.split()[0])
    return sizes


class Sampler:
    """Peaks of device and host memory while it is open."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._stop = Event()
        self._thread = Thread(target=self._sample, daemon=True)
        self.device_peak = self.host_peak = 0

    def look(self) -> None:
        self.device_peak = max(self.device_peak, device_used(self._device))
        host = host_memory()
        self.host_peak = max(self.host_peak, host["RssAnon"] + host["RssShmem"])

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.look()

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.look()


def run_child(arguments: argparse.Namespace) -> dict[str, Any]:
    """One context, in a process of its own: every figure as JSON."""
    before = device_used(arguments.device)
    n_ctx = arguments.ctx[0]
    rng = np.random.default_rng(n_ctx)
    with Sampler(arguments.device) as sampler:
        backend = open_backend(arguments.device, n_threads=None)
        try:
            with open_model(arguments.model) as model_file:
                shape = read_model_shape(model_file)
                backend.load_weights(model_file)
                config = RunConfig(
                    model_path=arguments.model,
                    n_ctx=n_ctx,
                    n_batch=max(2048, arguments.ub),
                    n_ubatch=arguments.ub,
                )
                plan = plan_run(with_arena(config, arguments.arena * MIB), shape, backend.budget())
                prompt = rng.integers(3, shape.n_vocab, n_ctx - arguments.decode).tolist()
                forced = rng.integers(3, shape.n_vocab, arguments.decode).tolist()
                with Session(plan, backend) as session:
                    warm_up(session, prompt, forced)
                    warm = device_used(arguments.device)
                    session.prefill(prompt)
                    for token in forced:
                        session.decode([token])
                    end, host = device_used(arguments.device), host_memory()
                    streamed = session.counters.bytes_streamed
        finally:
            backend.close()
    return {
        "before": before,
        "warm": warm - before,
        "end": end - before,
        "peak": sampler.device_peak - before,
        "host": host,
        "host_peak": sampler.host_peak,
        "bytes_streamed": streamed,
        "notes": list(backend.notes),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A context's prediction and figures, in bytes; ``process`` is None when the plan does not predict it."""

    n_ctx: int
    weights: int
    arena: int
    constant: int
    store: int
    process: int | None
    figures: dict[str, Any]

    @property
    def predicted(self) -> int:
        return self.weights + self.arena + self.constant

    @property
    def beside(self) -> int:
        """Device bytes beside weights and the arena as it was asked for, page tables of the host store included."""
        return int(self.figures["peak"]) - self.weights - self.arena


def measure(arguments: argparse.Namespace, n_ctx: int) -> Measured:
    plan = predict(arguments, n_ctx)
    command = [
        *(sys.executable, "-m", "scripts.measure_cuda_memory", str(arguments.model), "--ctx", str(n_ctx), "--child"),
        *("--ub", str(arguments.ub), "--arena", str(arguments.arena), "--decode", str(arguments.decode)),
        *("--device", arguments.device),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return Measured(
        n_ctx=n_ctx,
        weights=plan["weights_bytes"],
        arena=plan["arena"]["allocated_bytes"] + plan["arena"]["store_table_bytes"],
        constant=plan["device_context_bytes"],
        store=plan["host_store_bytes"],
        process=plan["process_bytes"],
        figures=json.loads(done.stdout),
    )


def predict(arguments: argparse.Namespace, n_ctx: int) -> dict[str, Any]:
    """The plan as `kvs validate --json` prints it."""
    command = [
        *(sys.executable, "-m", "kvs_cli", "validate", "-m", str(arguments.model), "-c", str(n_ctx)),
        *("-b", str(max(2048, arguments.ub)), "-ub", str(arguments.ub), "--device", arguments.device),
        *("--kv-stream-arena-mib", str(arguments.arena), "--json"),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    plan: dict[str, Any] = json.loads(done.stdout)["plan"]
    return plan


def report(one: Measured, seconds: float) -> bool:
    figures, host = one.figures, one.figures["host"]
    off = figures["peak"] / one.predicted - 1
    device_good = abs(off) <= DEVICE_SHARE
    print(
        f"{verdict(device_good)} c {one.n_ctx} device: before {mib(figures['before'])} MiB; after warm-up "
        f"+{mib(figures['warm'])}, at the end +{mib(figures['end'])}, peak +{mib(figures['peak'])}; predicted "
        f"{mib(one.predicted)} = weights {mib(one.weights)} + arena {mib(one.arena)} + {mib(one.constant)}: "
        f"{off:+.2%} of {DEVICE_SHARE:.0%}; beside weights and arena {mib(one.beside)}",
        flush=True,
    )
    kinds = ", ".join(f"{name} {mib(host[name])}" for name in ("RssAnon", "RssShmem", "RssFile", "VmHWM"))
    own = f"own memory at most {mib(figures['host_peak'])} MiB ({kinds}), of it the store {mib(one.store)}"
    if one.process is None:
        print(f"FAIL c {one.n_ctx} host: {own}; the plan predicts no figure for this device", flush=True)
        host_good = False
    else:
        off = figures["host_peak"] / one.process - 1
        host_good = abs(off) <= HOST_SHARE
        print(
            f"{verdict(host_good)} c {one.n_ctx} host: {own}; predicted {mib(one.process)}: {off:+.2%} of "
            f"{HOST_SHARE:.0%}",
            flush=True,
        )
    streamed = figures["bytes_streamed"] / 1e9
    print(f"     c {one.n_ctx}: {streamed:.1f} GB streamed, {seconds:.1f} s", *figures["notes"], sep="; ", flush=True)
    return device_good and host_good


def mib(n_bytes: int) -> str:
    return f"{n_bytes / MIB:.0f}"


def compare_contexts(measured: Sequence[Measured]) -> bool:
    """What is beside weights and arena, an arena that is capped at short contexts being taken out, must not grow."""
    beside = [one.beside for one in measured]
    spread = max(beside) - min(beside)
    good = spread <= SPREAD_BYTES
    print(
        f"{verdict(good)} device memory beside weights and arena: {', '.join(mib(n) for n in beside)} MiB at "
        f"{', '.join(str(one.n_ctx) for one in measured)} tokens, spread {spread / MIB:.1f} of {mib(SPREAD_BYTES)} MiB"
    )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--ctx", type=int, nargs="+", default=[8192, 65536, 131072])
    parser.add_argument("--ub", type=int, default=4096)
    parser.add_argument("--arena", type=int, default=2048, help="MiB")
    parser.add_argument("--decode", type=int, default=8)
    parser.add_argument("--device", default="cuda", help="cuda[:N], or cpu to try the script itself")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(run_child(arguments)))
        return 0
    passed, measured = True, []
    for n_ctx in arguments.ctx:
        started = perf_counter()
        measured.append(measure(arguments, n_ctx))
        passed &= report(measured[-1], perf_counter() - started)
    passed &= compare_contexts(measured)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
