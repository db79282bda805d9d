"""Decode deep in a long context beside Hugging Face transformers: the 8B shape, plain and offloaded cache.

    python -m scripts.compare_transformers MODEL [--ctx N] [--decode N] [--arena MIB] [--layers N]

MODEL is a file that ``make_8b_shape`` wrote, with as many layers. transformers runs the same shape with random bfloat16
weights made on the device, attention ``sdpa``, and a cache that is filled with random numbers instead of by a prompt;
kvs runs its own file with a prompt of random tokens. Every part is a process of its own, so that each finds the device
empty, and decodes at the same depth: the last tokens of the context, one by one, the first ones not timed. A part that
cannot run says why, and what is judged by it has failed. Exit code 1 when a line says FAIL. Needs torch and
transformers, which kvs does not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from inspect import signature
from pathlib import Path
from time import perf_counter
from typing import Any

from scripts.cuda_checks.sessions import verdict
from scripts.make_8b_shape import HEAD_DIM, N_EMBD, N_FF, N_HEAD, N_HEAD_KV, N_VOCAB

PLAIN, OFFLOADED = "transformers, plain cache", "transformers, offloaded cache"
KVS_OFF, KVS_ARENA = "kvs, arena off", "kvs, arena"
NEEDED = ((KVS_ARENA, OFFLOADED, 5.0), (KVS_OFF, PLAIN, 3.0))
"""(what is judged, against what, times as many tokens a second)."""
PARTS = {"plain": (PLAIN,), "offloaded": (OFFLOADED,), "kvs": (KVS_ARENA, KVS_OFF)}
PART_SECONDS = 300
WARM_UP_STEPS = 2

Steps = list[float]
"""Seconds of each timed step."""


def decode_transformers(arguments: argparse.Namespace, *, is_offloaded: bool) -> tuple[Steps, str]:
    """Timed decode steps over a cache of random numbers, and what ran."""
    import torch
    import transformers

    device = torch.device(arguments.device)
    torch.set_default_dtype(torch.bfloat16)
    config = transformers.LlamaConfig(
        vocab_size=N_VOCAB,
        hidden_size=N_EMBD,
        intermediate_size=N_FF,
        num_hidden_layers=arguments.layers,
        num_attention_heads=N_HEAD,
        num_key_value_heads=N_HEAD_KV,
        head_dim=HEAD_DIM,
        max_position_embeddings=1 << 20,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    started = perf_counter()
    with device:
        model = transformers.LlamaForCausalLM(config).eval()
    if {p.dtype for p in model.parameters()} != {torch.bfloat16} or model.config._attn_implementation != "sdpa":
        raise RuntimeError("the model is not bfloat16 with sdpa attention")
    cache = make_offloaded_cache(transformers, config) if is_offloaded else transformers.DynamicCache()
    keyword = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"  # as the version has it
    n_steps = WARM_UP_STEPS + arguments.decode
    filled = arguments.ctx - n_steps
    with torch.inference_mode():
        for layer in range(arguments.layers):
            key, value = (torch.randn(1, N_HEAD_KV, filled, HEAD_DIM, device=device) for _ in range(2))
            cache.update(key, value, layer)
            del key, value
        synchronise = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        synchronise()
        opened = perf_counter() - started
        token = torch.full((1, 1), 3, device=device)
        steps: Steps = []
        for _ in range(n_steps):
            begun = perf_counter()
            logits = model(input_ids=token, use_cache=True, **{keyword: cache}).logits
            token = logits[:, -1].argmax(-1, keepdim=True)
            token.item()  # as generation does: the next step needs it on the host
            synchronise()
            steps.append(perf_counter() - begun)
    if cache.get_seq_length() != arguments.ctx:
        raise RuntimeError(f"the cache holds {cache.get_seq_length()} tokens at the end instead of {arguments.ctx}")
    what = f"torch {torch.__version__}, transformers {transformers.__version__}, bf16; made in {opened:.0f} s"
    return steps[WARM_UP_STEPS:], what


def make_offloaded_cache(transformers: Any, config: Any) -> Any:
    """The offloaded dynamic cache: an option of DynamicCache since 4.56, a class of its own before."""
    if hasattr(transformers, "OffloadedCache"):
        return transformers.OffloadedCache()
    return transformers.DynamicCache(config=config, offloading=True)


def decode_kvs(arguments: argparse.Namespace, n_arena_mib: int) -> tuple[Steps, str]:
    """Timed decode steps after a prompt that fills the context up to them, and what ran."""
    import numpy as np

    from kvs_core.backend import open_backend
    from kvs_core.config import RunConfig
    from kvs_core.model_file import open_model
    from kvs_core.model_reader import read_model_shape
    from kvs_core.plan import plan_run, with_arena
    from kvs_core.session import Session
    from kvs_core.units import MIB

    with ExitStack() as closing:
        backend = open_backend(arguments.device, n_threads=None)
        closing.callback(backend.close)
        model_file = closing.enter_context(open_model(arguments.model))
        shape = read_model_shape(model_file)
        if (shape.n_layer, shape.n_embd) != (arguments.layers, N_EMBD):
            raise RuntimeError(f"{arguments.model} has {shape.n_layer} layers, {shape.n_embd} wide")
        config = RunConfig(model_path=arguments.model, n_ctx=arguments.ctx)
        plan = plan_run(with_arena(config, n_arena_mib * MIB), shape, backend.budget())
        backend.load_weights(model_file)
        session = closing.enter_context(Session(plan, backend))
        session.warm_up()
        n_steps = WARM_UP_STEPS + arguments.decode
        tokens = np.random.default_rng(1).integers(3, shape.n_vocab, plan.n_ctx).tolist()
        begun = perf_counter()
        session.prefill(tokens[:-n_steps])
        prefill = perf_counter() - begun
        steps: Steps = []
        for token in tokens[-n_steps:]:
            begun = perf_counter()
            session.decode([token])
            steps.append(perf_counter() - begun)
        streamed = session.counters.bytes_streamed
        if streamed != plan.streamed_bytes_of_run(plan.n_ctx - n_steps, n_steps):
            raise RuntimeError(f"{streamed} bytes streamed, which is not what the plan says")
    link = f", link {session.copy_rate / 1e9:.1f} GB/s" if session.copy_rate else ""
    per_step = plan.prediction().decode_step_bytes / 1e9
    what = (
        f"Q4_K, f16 cache of {plan.kv_bytes / 1e9:.1f} GB, {per_step:.1f} GB a token streamed{link}; "
        f"prompt {prefill:.1f} s with -ub {plan.n_ubatch}"
    )
    return steps[WARM_UP_STEPS:], what


def run_part(arguments: argparse.Namespace) -> None:
    """Print one JSON line for each row of a part: its name, and seconds and words, or the error."""
    runs: Mapping[str, Callable[[], tuple[Steps, str]]] = {
        PLAIN: lambda: decode_transformers(arguments, is_offloaded=False),
        OFFLOADED: lambda: decode_transformers(arguments, is_offloaded=True),
        KVS_OFF: lambda: decode_kvs(arguments, 0),
        KVS_ARENA: lambda: decode_kvs(arguments, arguments.arena),
    }
    for name in PARTS[arguments.part]:
        try:
            steps, what = runs[name]()
            print(json.dumps({"name": name, "steps": steps, "what": what}), flush=True)
        except Exception as error:  # any reason is worth its line
            print(json.dumps({"name": name, "error": f"{type(error).__name__}: {error}"}), flush=True)


def start_part(arguments: argparse.Namespace, part: str) -> dict[str, dict[str, Any]]:
    """Rows of a part by name; a process that ends without one leaves its exit code."""
    command = [sys.executable, "-m", "scripts.compare_transformers", str(arguments.model), "--part", part]
    for name in ("ctx", "decode", "arena", "layers", "device"):
        command += [f"--{name}", str(getattr(arguments, name))]
    why, output = "", ""
    try:
        finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=PART_SECONDS, check=False)
        why, output = f"ended with {finished.returncode}", finished.stdout
    except subprocess.TimeoutExpired as error:
        why = f"took longer than {PART_SECONDS} s"
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
    rows = [json.loads(line) for line in output.splitlines() if line.startswith('{"name"')]
    found = {row["name"]: row for row in rows}
    return {name: found.get(name, {"name": name, "error": f"the process {why}"}) for name in PARTS[part]}


def rate_of(row: Mapping[str, Any]) -> float | None:
    """Tokens per second by the median step; None for a part that did not run."""
    return 1 / statistics.median(row["steps"]) if row.get("steps") else None


def describe(row: Mapping[str, Any]) -> str:
    rate = rate_of(row)
    if rate is None:
        return f"     {row['name']:31} did not run: {row.get('error', 'no step was timed')}"
    steps = row["steps"]
    return (
        f"     {row['name']:31} {rate:8.2f} t/s, median of {len(steps)}; "
        f"best {1e3 * min(steps):.2f} ms, worst {1e3 * max(steps):.2f} ms; {row['what']}"
    )


def judge(rows: Mapping[str, Mapping[str, Any]]) -> list[tuple[bool, str]]:
    """A verdict for each line of ``NEEDED``."""
    verdicts = []
    for own, other, times in NEEDED:
        own_rate, other_rate = rate_of(rows[own]), rate_of(rows[other])
        if own_rate is None or other_rate is None:
            verdicts.append((False, f"{own} against {other}: not measured, {times:g} times needed"))
            continue
        ratio = own_rate / other_rate
        verdicts.append((ratio >= times, f"{own} against {other}: {ratio:.2f} times, {times:g} needed"))
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--ctx", type=int, default=131072)
    parser.add_argument("--decode", type=int, default=4, help="timed tokens of each row")
    parser.add_argument("--arena", type=int, default=2048, help="MiB")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script itself")
    parser.add_argument("--part", choices=PARTS, help="what one process measures; main starts them")
    arguments = parser.parse_args()
    if not 1 <= arguments.decode < arguments.ctx - WARM_UP_STEPS:
        parser.error("needs a --ctx larger than --decode")
    if arguments.part:
        run_part(arguments)
        return 0
    print(f"decode at depth {arguments.ctx}, {arguments.layers} layers of the 8B shape, arena {arguments.arena} MiB")
    rows: dict[str, dict[str, Any]] = {}
    for part in PARTS:
        started = perf_counter()
        rows |= start_part(arguments, part)
        for name in PARTS[part]:
            print(describe(rows[name]))
        print(f"     ({part}: {perf_counter() - started:.0f} s)", flush=True)
    verdicts = judge(rows)
    for good, text in verdicts:
        print(f"{verdict(good)} {text}")
    return 0 if all(good for good, _ in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
