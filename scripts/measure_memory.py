"""Where the memory of a CUDA run goes: device and host memory after each stage, beside what the plan says.

    python -m scripts.measure_memory MODEL [--ctx 65536] [--arena 2048] [--ub 2048] [--decode 48]

One line a stage. Device memory is what the driver counts for the whole device, so nothing else may use it. Host memory
is split as the kernel does: anonymous, shared (page-locked memory of the driver is there on some systems), file pages.
Exit code 1 when a prediction is off by more than it may be: 1 % of the device memory, 3 % of the host memory.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from time import perf_counter

import numpy as np
import pynvml

from kvs_core.backend import open_backend
from kvs_core.config import RunConfig
from kvs_core.model_file import open_model
from kvs_core.model_reader import read_model_shape
from kvs_core.plan import plan_run, with_arena
from kvs_core.session import Session
from kvs_core.units import MIB

_FIELDS = ("RssAnon", "RssShmem", "RssFile", "VmHWM", "VmLck", "VmPin")


def host_bytes() -> dict[str, int]:
    """Sizes of this process by the kernel's names."""
    found = dict.fromkeys(_FIELDS, 0)
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in found:
            found[name] = 1024 * int(rest.split()[0])
    return found


def device_bytes(index: int = 0) -> int:
    """Memory in use on the whole device."""
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index)).used)


class Stages:
    """Prints the memory after each stage and keeps the device's before the first."""

    def __init__(self) -> None:
        self.first_device_bytes = device_bytes()
        self._started = perf_counter()
        self.show("start")

    @property
    def taken_bytes(self) -> int:
        return device_bytes() - self.first_device_bytes

    def show(self, stage: str) -> None:
        host = ", ".join(f"{name} {size / MIB:.0f}" for name, size in host_bytes().items())
        seconds = perf_counter() - self._started
        print(f"{stage:34} device +{self.taken_bytes / MIB:.0f}; host {host} MiB; {seconds:.1f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--ctx", type=int, default=65536)
    parser.add_argument("--arena", type=int, default=2048, help="MiB; 0: off")
    parser.add_argument("--ub", type=int, default=2048)
    parser.add_argument("--decode", type=int, default=48, help="tokens after a prompt that fills the rest")
    arguments = parser.parse_args()
    pynvml.nvmlInit()
    stages = Stages()
    backend = open_backend("cuda", n_threads=None)
    stages.show("context")
    config = with_arena(
        RunConfig(
            model_path=arguments.model, n_ctx=arguments.ctx, n_ubatch=arguments.ub, n_batch=max(2048, arguments.ub)
        ),
        arguments.arena * MIB,
    )
    with open_model(arguments.model) as model_file:
        plan = plan_run(config, read_model_shape(model_file), backend.budget())
        stages.show("plan")
        backend.load_weights(model_file)
    stages.show("weights")
    with Session(plan, backend) as session:
        stages.show("session")
        session.warm_up()
        stages.show("warm-up")
        warm = stages.taken_bytes
        n_prompt = plan.n_ctx - arguments.decode
        tokens = np.random.default_rng(1).integers(3, plan.shape.n_vocab, plan.n_ctx).tolist()
        session.prefill(tokens[:n_prompt])
        stages.show(f"prompt of {n_prompt} tokens")
        for index, token in enumerate(tokens[n_prompt:], start=1):
            session.decode([token])
            if index in (1, 2, arguments.decode):
                stages.show(f"{index} tokens")
        taken, host = stages.taken_bytes, host_bytes()
        own = host["RssAnon"] + host["RssShmem"]
        constant = taken - plan.device_bytes
        print(f"device beside weights and arena: {constant / MIB:.0f} MiB, planned {plan.context_bytes / MIB:.0f}")
        print(f"device growth after the warm-up: {(taken - warm) / MIB:.0f} MiB")
        print(f"process without file pages: {own / MIB:.0f} MiB, planned {plan.process_bytes / MIB:.0f}")
        context = plan.host_context_bytes + own - plan.process_bytes
        print(f"host_context_bytes that fit: {context / MIB:.0f} MiB, planned {plan.host_context_bytes / MIB:.0f}")
        print(*backend.notes, sep="\n", flush=True)
        good = abs(taken - plan.device_bytes - plan.context_bytes) <= 0.01 * taken
        good &= abs(own - plan.process_bytes) <= 0.03 * own
    stages.show("session closed")
    backend.close()
    stages.show("backend closed")
    print("ok" if good else "FAIL", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
