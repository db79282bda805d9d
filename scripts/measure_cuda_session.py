"""Measure whole sessions on a CUDA device: prefill, decode, share of the link, device and host memory.

    python -m scripts.measure_cuda_session MODEL [--ctx N ...] [--ub N] [--arena MIB ...] [--decode N] [--type f16]

One line a run; arena 0 means off. The prompt fills the context up to the tokens that are decoded. Logits of the last
prompt token and of every decoded one are compared bit for bit with those of the first arena of the same context.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from time import perf_counter

import numpy as np
import psutil
import pynvml

from kvs_core.backend import open_backend
from kvs_core.config import RunConfig
from kvs_core.kv_types import KvType
from kvs_core.model_file import open_model
from kvs_core.model_reader import read_model_shape
from kvs_core.plan import plan_run, with_arena
from kvs_core.session import Session
from kvs_core.units import GIB, MIB


def used_device_bytes() -> int:
    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--ctx", type=int, nargs="+", default=[131072])
    parser.add_argument("--ub", type=int, default=4096)
    parser.add_argument("--arena", type=int, nargs="+", default=[0, 2048])
    parser.add_argument("--decode", type=int, default=16)
    parser.add_argument("--type", choices=[t.value for t in KvType], default="f16")
    arguments = parser.parse_args()
    before = used_device_bytes()
    backend = open_backend("cuda", n_threads=None)
    kv_type, passed = KvType(arguments.type), True
    with open_model(arguments.model) as model_file:
        shape = read_model_shape(model_file)
        budget = backend.budget()
        started = perf_counter()
        backend.load_weights(model_file)
        print(f"{budget.name}: weights {shape.tensors_bytes / GIB:.2f} GiB loaded in {perf_counter() - started:.1f} s")
        print(
            f"link {backend.measure_copy_rate() / 1e9:.1f} GB/s; device memory used before {before / MIB:.0f} MiB",
            flush=True,
        )
        for n_ctx in arguments.ctx:
            rng = np.random.default_rng(n_ctx)
            n_prompt = n_ctx - arguments.decode
            prompt = [int(t) for t in rng.integers(3, shape.n_vocab, n_prompt)]
            forced = [int(t) for t in rng.integers(3, shape.n_vocab, arguments.decode)]
            reference: np.ndarray | None = None
            for arena in arguments.arena:
                config = RunConfig(
                    model_path=arguments.model,
                    n_ctx=n_ctx,
                    n_batch=max(2048, arguments.ub),
                    n_ubatch=arguments.ub,
                    type_k=kv_type,
                    type_v=kv_type,
                )
                plan = plan_run(with_arena(config, arena * MIB), shape, budget)
                opened = perf_counter()
                with Session(plan, backend) as session:
                    opened = perf_counter() - opened
                    started = perf_counter()
                    rows = [session.prefill(prompt)]
                    prefill = perf_counter() - started
                    engine, streamed = session.engine, session.counters.bytes_streamed
                    copied = engine.copy_seconds if engine else 0.0
                    rows.append(session.decode(forced[:1])[0])  # compiles and switches the phase
                    begun, waited = session.counters.bytes_streamed, engine.wait_seconds if engine else 0.0
                    decoded = perf_counter()
                    rows += [session.decode([token])[0] for token in forced[1:]]
                    decoded = perf_counter() - decoded
                    moved = session.counters.bytes_streamed - begun
                    logits = np.stack(rows)
                    reference = logits if reference is None else reference
                    same = logits.tobytes() == reference.tobytes()
                    exact = session.counters.bytes_streamed == plan.streamed_bytes_of_run(n_prompt, arguments.decode)
                    passed &= same and exact and bool(np.isfinite(logits).all())
                    link = session.copy_rate or 0.0
                    rate = moved / decoded
                    finite = bool(np.isfinite(logits).all())
                    used = (used_device_bytes() - before) / MIB
                    lines = (
                        f"c {n_ctx} ub {arguments.ub} {kv_type.value} arena {arena or 'off'}: open {opened:.1f} s",
                        f"prefill {prefill:.2f} s ({n_prompt / prefill:.0f} t/s, {streamed / 1e9:.1f} GB streamed, "
                        f"copying {copied:.1f} s)",
                        f"decode {(arguments.decode - 1) / decoded:.2f} t/s, {rate / 1e9:.1f} GB/s of {link / 1e9:.1f} "
                        f"({100 * rate / link if link else 0:.1f} %), waits "
                        f"{engine.wait_seconds - waited if engine else 0:.2f} of {decoded:.2f} s",
                        f"identical {same}, as predicted {exact}, finite {finite}",
                        f"device +{used:.0f} MiB (weights and arena {plan.device_bytes / MIB:.0f})",
                        f"host {psutil.Process().memory_info().rss / GIB:.2f} GiB (store {plan.store_bytes / GIB:.2f})",
                        *backend.notes,
                    )
                    print("; ".join(lines), flush=True)
    backend.close()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
