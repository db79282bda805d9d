"""Check whole sessions on a CUDA device: logits against the CPU backend, and the same bits for every arena.

    python -m scripts.check_cuda_session expect FOLDER     models and CPU logits, on any machine
    python -m scripts.check_cuda_session compare FOLDER    the same models on the device
    python -m scripts.check_cuda_session ladder            arenas from the minimum to everything, on the device

Exit code 1 when a line says FAIL.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np
from gguf import GGMLQuantizationType as Q

from kvs_core.backend import Backend, open_backend
from kvs_core.config import RunConfig
from kvs_core.kv_types import KvType
from kvs_core.model_file import open_model
from kvs_core.model_reader import read_model_shape
from kvs_core.plan import RunPlan, plan_run, with_arena
from kvs_core.session import Session
from kvs_core.units import MIB
from tests.fixtures.tiny_architectures import tiny_architectures
from tests.fixtures.tiny_models import TinyModel, write_model

N_VOCAB = 259
PROMPT = [int(t) for t in np.random.default_rng(1).integers(3, N_VOCAB, 400)]
FORCED = [int(t) for t in np.random.default_rng(2).integers(3, N_VOCAB, 24)]

MODELS = {
    "f32": TinyModel(weight_std=0.08, n_ctx_train=1024),
    "f16-bias": TinyModel(weight_std=0.08, n_ctx_train=1024, weight_type=Q.F16, biases=True, tied=True, seed=2),
    "bf16-factors": TinyModel(weight_std=0.08, n_ctx_train=1024, weight_type=Q.BF16, rope_factors=True, seed=3),
    "q8_0": TinyModel(
        weight_std=0.08, n_ctx_train=1024, weight_type=Q.Q8_0, n_head=8, n_head_kv=2, seed=4, head_dim=64
    ),
    "q4_1-128": TinyModel(weight_std=0.08, n_ctx_train=1024, weight_type=Q.Q4_1, head_dim=128, seed=5),
    **{name: replace(tiny_architectures()[name], n_ctx_train=1024) for name in ("mistral3", "qwen2", "qwen3")},
}
BOUNDS = dict.fromkeys(MODELS, 2e-2) | {"q8_0": 4e-2, "q4_1-128": 4e-2}
"""Largest root-mean-square difference over that of the logits. float16 operands carry 2**-11 each and 8-bit activations
1/254 of a block's largest; over the handful of products in a row that is what remains."""


def rows_of(session: Session, prompt: Sequence[int], forced: Sequence[int], step: int = 1) -> np.ndarray:
    """Logits of the last eight prompt positions and of every forced token, ``step`` tokens at a time."""
    rows = [rows.copy() for _, rows in session.prefill_rows(prompt, output_begin=len(prompt) - 8)]
    rows += [session.decode(forced[i : i + step]) for i in range(0, len(forced), step)]
    return np.concatenate(rows)


def plan_on(backend: Backend, config: RunConfig, arena_bytes: int = 0) -> RunPlan:
    with open_model(config.model_path) as model_file:
        return plan_run(with_arena(config, arena_bytes), read_model_shape(model_file), backend.budget())


def run_model(device: str, path: Path, config: RunConfig) -> np.ndarray:
    backend = open_backend(device, n_threads=2)
    try:
        with open_model(path) as model_file:
            backend.load_weights(model_file)
            with Session(plan_on(backend, config), backend) as session:
                return rows_of(session, PROMPT, FORCED)
    finally:
        backend.close()


def config_for(path: Path, kv_type: KvType) -> RunConfig:
    return RunConfig(
        model_path=path, n_ctx=512, n_ubatch=128, page_tokens=64, type_k=kv_type, type_v=kv_type, n_threads=2
    )


def write_expected(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, model in MODELS.items():
        path = write_model(folder / f"{name}.gguf", model)
        for kv_type in KvType:
            np.save(folder / f"{name}.{kv_type.value}.npy", run_model("cpu", path, config_for(path, kv_type)))
        print(f"made {name}", flush=True)


def compare(folder: Path) -> bool:
    passed = True
    for name in MODELS:
        for kv_type in KvType:
            started = perf_counter()
            exact = np.load(folder / f"{name}.{kv_type.value}.npy").astype(np.float64)
            path = folder / f"{name}.gguf"
            got = run_model("cuda", path, config_for(path, kv_type))
            size = np.sqrt(np.mean(exact**2))
            errors = [
                np.sqrt(np.mean((part - want) ** 2)) / size
                for part, want in zip((got[:8], got[8:]), (exact[:8], exact[8:]), strict=True)
            ]
            same_top = float(np.mean(got.argmax(axis=1) == exact.argmax(axis=1)))
            good = bool(np.isfinite(got).all()) and max(errors) <= BOUNDS[name]
            passed &= good
            print(
                f"{'ok  ' if good else 'FAIL'} {name:14} kv {kv_type.value:5} prefill {errors[0]:.1e} decode "
                f"{errors[1]:.1e} of {BOUNDS[name]:.0e}, same top {same_top:.2f}, {perf_counter() - started:.1f} s",
                flush=True,
            )
    return passed


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """One model, one context, arenas from the minimum to all of it."""

    name: str
    kv_type: KvType
    n_ctx: int
    n_prompt: int
    n_forced: int
    n_ubatch: int
    page_tokens: int


LADDERS = (
    Ladder(name="8K", kv_type=KvType.F16, n_ctx=8192, n_prompt=6000, n_forced=600, n_ubatch=512, page_tokens=256),
    Ladder(name="20K", kv_type=KvType.Q8_0, n_ctx=20480, n_prompt=17000, n_forced=64, n_ubatch=1000, page_tokens=128),
    Ladder(name="132K", kv_type=KvType.F16, n_ctx=135168, n_prompt=133000, n_forced=64, n_ubatch=4096, page_tokens=256),
)


def climb(ladder: Ladder, path: Path, backend: Backend) -> bool:
    config = RunConfig(
        model_path=path,
        n_ctx=ladder.n_ctx,
        n_batch=max(2048, ladder.n_ubatch),
        n_ubatch=ladder.n_ubatch,
        page_tokens=ladder.page_tokens,
        type_k=ladder.kv_type,
        type_v=ladder.kv_type,
        paranoid=True,
    )
    rng = np.random.default_rng(7)
    prompt = [int(t) for t in rng.integers(3, N_VOCAB, ladder.n_prompt)]
    forced = [int(t) for t in rng.integers(3, N_VOCAB, ladder.n_forced)]
    free_plan = plan_on(backend, config)
    low, high = free_plan.minimum_arena_bytes // MIB, free_plan.useful_arena_bytes // MIB
    kv = free_plan.kv_bytes // MIB
    arenas = [0, 0, low, low + kv // 10, low + kv // 2, high - 1, high]
    passed, reference = True, None
    for arena in arenas:
        plan = plan_on(backend, config, arena * MIB)
        started = perf_counter()
        with Session(plan, backend) as session:
            logits = rows_of(session, prompt, forced)
            seconds = perf_counter() - started
            counters = session.counters
            reference = logits if reference is None else reference
            predicted = plan.streamed_bytes_of_run(len(prompt), len(forced))
            good = bool(np.isfinite(logits).all()) and logits.tobytes() == reference.tobytes()
            good &= counters.bytes_streamed == counters.predicted_bytes_streamed == predicted
            passed &= good
            print(
                f"{'ok  ' if good else 'FAIL'} {ladder.name} {ladder.kv_type.value} arena {arena or 'off'} MiB of "
                f"{low}..{high}: identical {logits.tobytes() == reference.tobytes()}, "
                f"streamed {counters.bytes_streamed / MIB:.0f} MiB, predicted {predicted / MIB:.0f}, "
                f"{plan.decode.resident_pages[0]} pages resident, {seconds:.1f} s",
                flush=True,
            )
            if not good:
                different = np.flatnonzero((logits != reference).any(axis=1))
                print(f"     rows that differ: {different[:20]} of {len(logits)}", flush=True)
    with Session(plan_on(backend, config, low * MIB), backend) as session:
        assert reference is not None
        grouped = rows_of(session, prompt, forced[: len(forced) // 4 * 4], step=4)
        good = grouped.tobytes() == reference[: len(grouped)].tobytes()
        passed &= good
        print(f"{'ok  ' if good else 'FAIL'} {ladder.name}: steps of 4 tokens have the bits of four steps", flush=True)
    return passed


def run_ladders(names: Sequence[str]) -> bool:
    passed = True
    with tempfile.TemporaryDirectory() as folder:
        model = TinyModel(
            n_layer=6, n_head=8, n_head_kv=4, head_dim=128, n_ctx_train=1 << 18, weight_std=0.08, weight_type=Q.Q8_0
        )
        path = write_model(Path(folder) / "ladder.gguf", model)
        backend = open_backend("cuda", n_threads=None)
        try:
            with open_model(path) as model_file:
                backend.load_weights(model_file)
            for ladder in LADDERS:
                if ladder.name in names:
                    passed &= climb(ladder, path, backend)
        finally:
            backend.close()
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("expect", "compare", "ladder"))
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--only", nargs="+", default=[ladder.name for ladder in LADDERS])
    arguments = parser.parse_args()
    if arguments.what == "expect":
        write_expected(arguments.folder)
        return 0
    passed = compare(arguments.folder) if arguments.what == "compare" else run_ladders(arguments.only)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
