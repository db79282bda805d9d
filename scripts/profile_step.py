"""Where a prefill micro-batch and a decode step spend their time on a CUDA device, and what limits each part.

    python -m scripts.profile_step MODEL [--ctx N] [--ub N ...] [--arena MIB ...] [--series]

The prompt fills the context in whole micro-batches; its last micro-batch and a later decode step are profiled: events
around every operation, inside the recorded graph where the step is a recorded one. "limit" is the time that the
operation's bytes need at the rate of the driver's device-to-device copy, or its multiplications at the rate of a large
float16 product, whichever is longer, both measured in the same run. "between" is time in which no operation ran: gaps
between launches and, when streaming, waiting for copies. ``--series`` also prints every micro-batch of the prompt.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from cuda.bindings import driver
from numba import cuda

from cuda_kernels.backend import CudaBackend
from cuda_kernels.device import DeviceMemory, Event, checked, raw_stream
from cuda_kernels.operations import CudaOperations
from cuda_kernels.products import LtProducts
from cuda_kernels.step_arrays import Rows
from kvs_core.backend import open_backend
from kvs_core.config import RunConfig
from kvs_core.cuda_scratch import LT_WORKSPACE_BYTES
from kvs_core.kv_types import KvType, PageGeometry
from kvs_core.model_file import open_model
from kvs_core.model_reader import read_model_shape
from kvs_core.model_shape import ModelShape
from kvs_core.plan import DeviceBudget, RunPlan, plan_run, with_arena
from kvs_core.session import Session
from kvs_core.units import GIB, MIB
from scripts.cuda_checks.timing import copy_gigabytes_per_second

N_DECODE = 4
"""Forced tokens: the first loads kernels, the second is recorded, the later ones are replayed."""


@dataclass(slots=True)
class Part:
    """One kind of operation within a step."""

    calls: int = 0
    seconds: float = 0.0
    limit: float = 0.0
    bound: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """The events around one operation; ``limit`` in seconds."""

    label: str
    limit: float
    bound: str
    is_recorded: bool
    begin: Event
    end: Event

    def record(self, event: Event, stream: Any) -> None:
        flag = driver.CUevent_record_flags
        mode = flag.CU_EVENT_RECORD_EXTERNAL if self.is_recorded else flag.CU_EVENT_RECORD_DEFAULT
        checked(driver.cuEventRecordWithFlags(event.handle, stream, int(mode)), "recording an event")


@dataclass(frozen=True, slots=True)
class Peaks:
    bytes_per_second: float
    operations_per_second: float

    def limit(self, n_bytes: float, n_operations: float) -> tuple[float, str]:
        """Seconds, and what takes them."""
        memory, compute = n_bytes / self.bytes_per_second, n_operations / self.operations_per_second
        return (memory, "memory") if memory >= compute else (compute, "compute")


class Profiled:
    """Operations with an event before and after each; everything else goes through unchanged."""

    TIMED = frozenset(
        name
        for name in dir(CudaOperations)
        if not name.startswith("_")
        and name
        not in {
            "bind",
            "replays_steps",
            "begin_step",
            "run_step",
            "end_part",
            "replay_part",
            "buffer",
            "rows",
            "has_weight",
            "weight_rows",
            "begin_attention",
            "finish_attention",
            "to_host",
            "synchronise",
            "close",
        }
    )

    def __init__(self, inner: CudaOperations, plan: RunPlan, peaks: Peaks, stream: Any) -> None:
        self._inner = inner
        self._plan = plan
        self._peaks = peaks
        self._stream = stream
        self._marks: list[Mark] = []
        self._n_keys = self._n_tokens = 0
        self._started = self._launched = 0.0
        self.is_on = False
        self.profiled_position = -1
        self.steps: list[tuple[float, float]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in self.TIMED:
            return found

        def timed(*args: Any, **options: Any) -> Any:
            if not self.is_on:
                return found(*args, **options)
            label, n_bytes, n_operations = self._cost(name, args)
            limit, bound = self._peaks.limit(n_bytes, n_operations)
            mark = Mark(label, limit, bound, self._is_recording(), Event(timed=True), Event(timed=True))
            mark.record(mark.begin, self._stream)
            result = found(*args, **options)
            mark.record(mark.end, self._stream)
            self._marks.append(mark)
            return result

        return timed

    def begin_step(self, tokens: Sequence[int], first_pos: int) -> None:
        self._n_tokens, self._n_keys = len(tokens), first_pos + len(tokens)
        self._started = perf_counter()
        self.is_on = first_pos >= self.profiled_position >= 0
        self._inner.begin_step(tokens, first_pos)

    def run_step(self, forward: Callable[[], None]) -> bool:
        result = self._inner.run_step(forward)
        self._launched = perf_counter()
        return result

    def synchronise(self) -> None:
        """Ends a prefill step: ``steps`` gets its seconds, and those until everything was asked for."""
        self._inner.synchronise()
        self.steps.append((perf_counter() - self._started, self._launched - self._started))

    def take(self) -> tuple[dict[str, Part], float]:
        """Times by kind of operation since the last call, and the seconds from the first event to the last."""
        self._inner.synchronise()
        parts: dict[str, Part] = {}
        for mark in self._marks:
            part = parts.setdefault(mark.label, Part(bound=mark.bound))
            part.calls += 1
            part.seconds += mark.end.seconds_since(mark.begin)
            part.limit += mark.limit
        total = self._marks[-1].end.seconds_since(self._marks[0].begin)
        return parts, total

    def forget(self, *, recorded: bool) -> None:
        """Drop the events of past steps; those inside a recorded step happen again at every replay."""
        self._inner.synchronise()
        for mark in self._marks:
            if recorded or not mark.is_recorded:
                mark.begin.close()
                mark.end.close()
        self._marks = [mark for mark in self._marks if mark.is_recorded and not recorded]

    def _is_recording(self) -> bool:
        status = checked(driver.cuStreamIsCapturing(self._stream), "asking about a recording")
        return bool(status == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE)

    def _cost(self, name: str, args: Sequence[Any]) -> tuple[str, float, float]:
        """(label, bytes read and written, multiply-add operations counted twice) of a call."""
        rows = [r for arg in args for r in (arg if isinstance(arg, tuple | list) else (arg,)) if isinstance(r, Rows)]
        n_bytes = float(sum(4 * r.n_rows * r.width for r in rows))
        names = [n for arg in args for n in (arg if isinstance(arg, tuple | list) else (arg,)) if isinstance(n, str)]
        matrices = [self._inner._matrices[n] for n in names if n in self._inner._matrices]
        if name == "embed":
            return name, 2 * n_bytes, 0.0
        if matrices:
            label = f"{name} {'+'.join(n.rsplit('.', 1)[-1] for n in names if n in self._inner._matrices)}"
            n_weights = sum(m.geometry.n_rows * m.geometry.n_cols for m in matrices)
            n_weight_bytes = sum(m.geometry.n_bytes for m in matrices)
            if name in ("gated_experts", "from_experts"):
                experts = self._inner._chosen()
                n_weights *= experts.n_used / experts.n_expert
                n_weight_bytes *= min(1.0, self._n_tokens * experts.n_used / experts.n_expert)
            return label, n_bytes + n_weight_bytes, 2.0 * self._n_tokens * n_weights
        if name == "delta_net":
            sizes = next(layer.recurrent for layer in self._plan.recurrent_layers if layer.layer_idx == args[0])
            return name, n_bytes + 8.0 * sizes.n_inner * sizes.head_dim, 0.0
        geometry = next((arg for arg in args if isinstance(arg, PageGeometry)), None)
        if name == "attend_span" and geometry is not None:
            page_begin, page_end = args[3], args[4]
            first, last = page_begin * geometry.page_tokens, min(page_end * geometry.page_tokens, self._n_keys)
            widths = geometry.head_dim_k + geometry.head_dim_v
            n_head = rows[-1].width // geometry.head_dim_k
            pairs = _causal_pairs(first, last, self._n_keys - self._n_tokens, self._n_tokens)
            n_pages = page_end - page_begin
            return name, n_bytes + n_pages * geometry.payload_bytes, 2.0 * n_head * widths * pairs
        return name, n_bytes, 0.0


def _causal_pairs(first_key: int, last_key: int, first_query: int, n_queries: int) -> float:
    """Query-key pairs with the key in [first_key, last_key) and not after the query."""
    positions = first_query + np.arange(n_queries)
    return float(np.clip(positions + 1 - first_key, 0, last_key - first_key).sum())


def measure_product_rate(stream: Any) -> float:
    """Operations a second of an 8192 x 8192 x 8192 float16 product, best of five."""
    n, raw = 8192, raw_stream(stream)
    products = LtProducts(LT_WORKSPACE_BYTES)
    weights, inputs = DeviceMemory(2 * n * n, "weights"), DeviceMemory(2 * n * n, "inputs")
    out, workspace = DeviceMemory(4 * n * n, "the product"), DeviceMemory(LT_WORKSPACE_BYTES, "the workspace")
    values = np.random.default_rng(0).standard_normal(n * n, dtype=np.float32).astype(np.float16)
    best = float("inf")
    for memory in (weights, inputs):
        checked(driver.cuMemcpyHtoD(memory.address, values.ctypes.data, values.nbytes), "copying values")
    for _ in range(5):
        begin, end = Event(timed=True), Event(timed=True)
        begin.record(raw)
        products.multiply(
            weights=weights.address,
            inputs=inputs.address,
            out=out.address,
            n_rows=n,
            n_tokens=n,
            n_in=n,
            out_stride=n,
            workspace=workspace.address,
            stream=int(raw),
        )
        end.record(raw)
        end.wait()
        best = min(best, end.seconds_since(begin))
        begin.close()
        end.close()
    for memory in (weights, inputs, out, workspace):
        memory.close()
    products.close()
    return 2.0 * n**3 / best


class ProfilingBackend:
    """A CUDA backend whose sessions get profiled operations."""

    def __init__(self, inner: CudaBackend, peaks: Peaks) -> None:
        self._inner = inner
        self._peaks = peaks
        self.latest: Profiled | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def operations(self, plan: RunPlan, arena: DeviceMemory) -> Any:
        inner = self._inner.operations(plan, arena)
        self.latest = Profiled(inner, plan, self._peaks, inner._raw_stream)
        return self.latest


def print_table(title: str, parts: dict[str, Part], total: float) -> None:
    print(f"\n{title}: {1e3 * total:.3f} ms")
    print(f"  {'part':44} {'calls':>5} {'us':>10} {'us each':>9} {'share':>7} {'limit us':>9}  of limit")
    for label, part in sorted(parts.items(), key=lambda item: -item[1].seconds):
        limit = f"{1e6 * part.limit:9.1f}  {100 * part.limit / part.seconds:5.1f} % {part.bound}"
        print(
            f"  {label:44} {part.calls:5} {1e6 * part.seconds:10.1f} {1e6 * part.seconds / part.calls:9.2f} "
            f"{100 * part.seconds / total:6.1f}% {limit}"
        )
    between = total - sum(part.seconds for part in parts.values())
    limits = sum(part.limit for part in parts.values())
    print(f"  {'between':44} {'':5} {1e6 * between:10.1f} {'':9} {100 * between / total:6.1f}%")
    print(f"  {'all limits':44} {'':5} {'':10} {'':9} {'':7} {1e6 * limits:9.1f}  {100 * limits / total:5.1f} %")


def profile(
    shape: ModelShape, budget: DeviceBudget, backend: ProfilingBackend, config: RunConfig, *, series: bool
) -> None:
    plan = plan_run(config, shape, budget)
    rng = np.random.default_rng(config.n_ctx or 0)
    n_prompt = (plan.n_ctx - N_DECODE) // plan.n_ubatch * plan.n_ubatch
    prompt = [int(t) for t in rng.integers(3, shape.n_vocab, n_prompt)]
    arena = f"{plan.arena_bytes / MIB:.0f} MiB" if plan.arena_requested_bytes else "off"
    print(f"\n== context {plan.n_ctx}, -ub {config.n_ubatch}, arena {arena}, store {plan.store_bytes / GIB:.2f} GiB")
    with Session(plan, backend) as session:  # type: ignore[arg-type]
        operations = backend.latest
        assert operations is not None
        session.prefill(prompt[: config.n_ubatch])  # kernels are compiled, clocks are up
        session.clear()
        sizes = plan.ubatches(n_prompt)
        operations.steps.clear()
        operations.profiled_position = n_prompt - sizes[-1]
        session.prefill(prompt)
        steps = operations.steps
        waits = session.engine.wait_seconds if session.engine else 0.0
        print(f"prefill {sum(s[0] for s in steps):.2f} s, waiting for copies {waits:.2f} s")
        if series:
            print("  ms of each micro-batch:  " + " ".join(f"{1e3 * s[0]:.0f}" for s in steps))
            print("  of it asking for things: " + " ".join(f"{1e3 * s[1]:.0f}" for s in steps))
        print_table(f"last micro-batch, {sizes[-1]} tokens at depth {n_prompt - sizes[-1]}", *operations.take())
        seconds = 0.0
        for index in range(N_DECODE):
            operations.forget(recorded=session.engine is not None or index < 2)
            started = perf_counter()
            session.decode([int(rng.integers(3, shape.n_vocab))])
            seconds = perf_counter() - started
        how = "an eager step" if session.engine else "a recorded step"
        print_table(f"decode at depth {n_prompt}, {how}, {1e3 * seconds:.3f} ms by the clock", *operations.take())
        operations.forget(recorded=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--ctx", type=int, nargs="+", default=[8192])
    parser.add_argument("--ub", type=int, nargs="+", default=[2048])
    parser.add_argument("--arena", type=int, nargs="+", default=[0])
    parser.add_argument("--type", choices=[t.value for t in KvType], default="f16")
    parser.add_argument("--series", action="store_true")
    arguments = parser.parse_args()
    inner = open_backend("cuda", n_threads=None)
    assert isinstance(inner, CudaBackend)
    stream = cuda.stream()
    peaks = Peaks(1e9 * copy_gigabytes_per_second(stream), measure_product_rate(stream))
    backend = ProfilingBackend(inner, peaks)
    with open_model(arguments.model) as model_file:
        shape = read_model_shape(model_file)
        budget = inner.budget()
        inner.load_weights(model_file)
        print(
            f"{budget.name}: copy {peaks.bytes_per_second / 1e9:.0f} GB/s, float16 product "
            f"{peaks.operations_per_second / 1e12:.0f} TFLOP/s, weights {shape.tensors_bytes / GIB:.2f} GiB"
        )
        for n_ctx in arguments.ctx:
            for n_ubatch in arguments.ub:
                for arena in arguments.arena:
                    kv_type = KvType(arguments.type)
                    config = RunConfig(
                        model_path=arguments.model,
                        n_ctx=n_ctx,
                        n_batch=max(2048, n_ubatch),
                        n_ubatch=n_ubatch,
                        type_k=kv_type,
                        type_v=kv_type,
                    )
                    config = with_arena(config, arena * MIB)
                    profile(shape, budget, backend, config, series=arguments.series)
                    sys.stdout.flush()
    inner.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
