"""Speed and memory of a model on a CUDA device, each context one line beside its limits and its plan.

    python -m scripts.measure_cuda_model MODEL [--ctx N ...] [--ub N ...] [--arena MIB ...] [--type f16]

A prompt fills the context up to the tokens that are decoded; nothing is sampled. The limits: for decode the bytes that
a token reads (its weights, with the experts it takes; keys, values and states at that depth) at the rate of the
driver's device-to-device copy, for the prompt its multiplications at the rate of a large float16 product, both measured
at the end. Device memory is what NVML counts above what it counted before, against weights, arena and constant of the
plan; the device must be used by nothing else. Exit code 1 when memory is more than 1 % off.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import perf_counter

import numpy as np
from numba import cuda

from kvs_core.backend import Backend, open_backend
from kvs_core.config import DEFAULT_BATCH_TOKENS, RunConfig
from kvs_core.gguf_header import TensorInfo
from kvs_core.kv_types import KvType
from kvs_core.model_file import open_model
from kvs_core.model_reader import read_model_shape
from kvs_core.model_shape import LayerShape, ModelShape
from kvs_core.plan import RunPlan, plan_run, with_arena
from kvs_core.session import Session
from kvs_core.units import GIB, MIB
from scripts.cuda_checks.sessions import verdict
from scripts.cuda_checks.timing import copy_gigabytes_per_second
from scripts.measure_cuda_memory import DEVICE_SHARE, device_used
from scripts.measure_cuda_session import warm_up
from scripts.profile_step import Peaks, measure_product_rate

_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
_OUTPUT = "output.weight"
_EXPERTS = "_exps.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWeights:
    """What one token takes of the weights: bytes, and elements of matrices, those of logits excepted.

    A prompt has logits for its last token alone.
    """

    n_bytes: float
    n_elements: float

    @classmethod
    def of(cls, shape: ModelShape, tensors: Sequence[TensorInfo]) -> TokenWeights:
        n_bytes = n_elements = 0.0
        for tensor in tensors:
            share = 1.0
            if tensor.name in _EMBEDDINGS and not (tensor.name == _EMBEDDINGS[0] and shape.tied_output):
                share = 1.0 / tensor.n_rows
            elif tensor.name.endswith(_EXPERTS):
                experts = shape.layers[int(tensor.name.split(".")[1])].experts
                assert experts is not None
                share = experts.n_used / experts.n_expert
            n_bytes += share * tensor.n_bytes
            if tensor.n_rows > 1 and tensor.name not in (*_EMBEDDINGS, _OUTPUT):
                n_elements += share * tensor.n_elements
        return cls(n_bytes=n_bytes, n_elements=n_elements)


def cache_bytes(plan: RunPlan, n_past: int) -> float:
    """Bytes of keys, values and states that a token after ``n_past`` others reads, and of states writes."""
    total = 2.0 * plan.recurrent_bytes
    for layer in plan.shape.layers:
        geometry = next((one.geometry for one in plan.kv_layers if one.layer_idx == _source(layer)), None)
        if geometry is None:
            geometry = next((one.geometry for one in plan.window_layers if one.layer_idx == _source(layer)), None)
        if geometry is not None:
            n_seen = min(n_past, layer.n_swa) if layer.n_swa else n_past
            total += n_seen * geometry.payload_bytes / geometry.page_tokens
    return total


def _source(layer: LayerShape) -> int:
    return layer.layer_idx if layer.kv_from is None else layer.kv_from


def attention_operations(shape: ModelShape, n_tokens: int) -> float:
    """Multiplications and additions of a prompt's attention."""
    total = 0.0
    for layer in shape.layers:
        n_seen = min(n_tokens, layer.n_swa) if layer.n_swa else n_tokens
        pairs = n_tokens * n_seen - n_seen * (n_seen - 1) / 2
        total += 2.0 * layer.n_head * (layer.head_dim_k + layer.head_dim_v) * pairs
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Tokens per second, and device memory at the end in bytes above what there was before."""

    prefill: float
    decode: float
    device_bytes: int


def run(plan: RunPlan, backend: Backend, n_decoded: int, before: int, device: str) -> Speed:
    rng = np.random.default_rng(plan.n_ctx)
    prompt = rng.integers(3, plan.shape.n_vocab, plan.n_ctx - n_decoded).tolist()
    forced = rng.integers(3, plan.shape.n_vocab, n_decoded).tolist()
    with Session(plan, backend) as session:
        warm_up(session, prompt, forced)
        begun = perf_counter()
        session.prefill(prompt)
        prefilled = perf_counter()
        session.decode(forced[:1])  # switches the phase
        started = perf_counter()
        for token in forced[1:]:
            session.decode([token])
        seconds = perf_counter() - started
        used = device_used(device) - before
    return Speed(prefill=len(prompt) / (prefilled - begun), decode=(n_decoded - 1) / seconds, device_bytes=used)


def report(plan: RunPlan, speed: Speed, weights: TokenWeights, peaks: Peaks, n_decoded: int) -> bool:
    n_prompt = plan.n_ctx - n_decoded
    read = weights.n_bytes + cache_bytes(plan, n_prompt)
    operations = 2.0 * weights.n_elements + attention_operations(plan.shape, n_prompt) / n_prompt
    decode_limit, prefill_limit = peaks.bytes_per_second / read, peaks.operations_per_second / operations
    planned = plan.device_bytes + plan.context_bytes
    off = speed.device_bytes / planned - 1.0
    good = abs(off) <= DEVICE_SHARE
    arena = f"{plan.arena_requested_bytes / MIB:.0f}" if plan.arena_requested_bytes else "off"
    print(
        f"{verdict(good)} {plan.n_ctx:7} {plan.n_ubatch:5} {arena:>6} {speed.prefill:9.0f} {prefill_limit:9.0f} "
        f"{speed.prefill / prefill_limit:6.1%} {speed.decode:8.1f} {decode_limit:8.1f} "
        f"{speed.decode / decode_limit:6.1%} {read / 1e9:7.2f} {speed.device_bytes / MIB:9.0f} {planned / MIB:9.0f} "
        f"{off:+7.2%}",
        flush=True,
    )
    return good


HEADING = (
    f"     {'context':>7} {'-ub':>5} {'arena':>6} {'pp t/s':>9} {'limit':>9} {'of it':>6} {'tg t/s':>8} {'limit':>8} "
    f"{'of it':>6} {'GB/tok':>7} {'MiB used':>9} {'planned':>9} {'off':>7}"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--ctx", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--arena", type=int, nargs="+", default=[0], help="MiB; 0 is off")
    parser.add_argument("--ub", type=int, nargs="+", default=[0], help="default, and for 0: what the plan chooses")
    parser.add_argument("--type", choices=[t.value for t in KvType], default="f16")
    parser.add_argument("--decode", type=int, default=64, help="tokens, at least 2")
    parser.add_argument("--device", default="cuda", help="cuda[:N]")
    arguments = parser.parse_args()
    before = device_used(arguments.device)
    backend = open_backend(arguments.device, n_threads=None)
    kv_type = KvType(arguments.type)
    found: list[tuple[RunPlan, Speed]] = []
    try:
        with open_model(arguments.model) as model_file:
            shape = read_model_shape(model_file)
            weights = TokenWeights.of(shape, list(model_file.tensors.values()))
            started = perf_counter()
            backend.load_weights(model_file)
        say(f"{shape.tensors_bytes / GIB:.2f} GiB loaded in {perf_counter() - started:.1f} s")
        for n_ctx, ub, arena in product(arguments.ctx, arguments.ub, arguments.arena):
            config = RunConfig(
                model_path=arguments.model,
                n_ctx=n_ctx,
                n_batch=max(DEFAULT_BATCH_TOKENS, ub) if ub else None,
                n_ubatch=ub or None,
                type_k=kv_type,
                type_v=kv_type,
            )
            plan = plan_run(with_arena(config, arena * MIB), shape, backend.budget())
            found.append((plan, run(plan, backend, arguments.decode, before, arguments.device)))
            say(f"{n_ctx} tokens: {found[-1][1].prefill:.0f} and {found[-1][1].decode:.1f} t/s")
        notes, name = backend.notes, backend.budget().name
        stream = cuda.stream()
        peaks = Peaks(1e9 * copy_gigabytes_per_second(stream), measure_product_rate(stream))
    finally:
        backend.close()
    print(
        f"{name}, {arguments.model.name}: copy {peaks.bytes_per_second / 1e9:.0f} GB/s, float16 product "
        f"{peaks.operations_per_second / 1e12:.0f} TFLOP/s; K and V {kv_type.value}\n{HEADING}"
    )
    passed = [report(plan, speed, weights, peaks, arguments.decode) for plan, speed in found]
    for line in notes:
        print(f"     {line}")
    return 0 if all(passed) else 1


def say(text: str) -> None:
    """Progress, beside the table."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
