"""The same bits for every arena: one prompt and forced tokens, climbed from no arena over the minimum to everything."""

from __future__ import annotations

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
from kvs_core.plan import RunPlan
from kvs_core.session import Session
from kvs_core.units import MIB
from scripts.cuda_checks.sessions import plan_on, rows_of, verdict
from tests.fixtures.tiny_hybrid_models import tiny_hybrid_models
from tests.fixtures.tiny_latent_models import tiny_latent_models
from tests.fixtures.tiny_models import TinyModel, write_model
from tests.fixtures.tiny_window_models import tiny_window_models

MODEL = TinyModel(
    n_layer=6, n_head=8, n_head_kv=4, head_dim=128, n_ctx_train=1 << 18, weight_std=0.08, weight_type=Q.Q8_0
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """One context and its arenas.

    crossings_min   with this, the arena off and the minimum only, and decode has to cross so many page boundaries
    """

    name: str
    kv_type: KvType
    n_ctx: int
    n_prompt: int
    n_forced: int
    n_ubatch: int
    page_tokens: int
    crossings_min: int = 0
    model: TinyModel = MODEL

    @property
    def n_crossings(self) -> int:
        """Page boundaries that the forced tokens cross."""
        return (self.n_prompt + self.n_forced) // self.page_tokens - self.n_prompt // self.page_tokens

    def arenas(self, free_plan: RunPlan) -> list[int]:
        """In MiB, 0 for off; the run without an arena comes twice."""
        low, high = free_plan.minimum_arena_bytes // MIB, free_plan.useful_arena_bytes // MIB
        if self.crossings_min:
            return [0, low]
        kv = free_plan.kv_bytes // MIB
        return [0, 0, low, low + kv // 10, low + kv // 2, high - 1, high]


def _windowed(architecture: str, head_dims: tuple[int, int] = (128, 128)) -> TinyModel:
    """Every second layer streams, the others keep a window that ends in pages and partitions."""
    model = tiny_window_models(n_layer=16, head_dims=head_dims)[architecture]
    keys = model.extra_keys | {"attention.sliding_window": 700}
    return replace(model, n_head_kv=4, n_ctx_train=1 << 18, extra_keys=keys)


_LATENT = replace(tiny_latent_models(n_layer=24, q_rank=96)["deepseek-v3"], n_ctx_train=1 << 18)

LADDERS = (
    Ladder(name="8K", kv_type=KvType.F16, n_ctx=8192, n_prompt=6000, n_forced=600, n_ubatch=512, page_tokens=256),
    Ladder(name="20K", kv_type=KvType.Q8_0, n_ctx=20480, n_prompt=17000, n_forced=64, n_ubatch=1000, page_tokens=128),
    Ladder(name="132K", kv_type=KvType.F16, n_ctx=135168, n_prompt=133000, n_forced=64, n_ubatch=4096, page_tokens=256),
    Ladder(
        name="boundaries",
        kv_type=KvType.F16,
        n_ctx=8192,
        n_prompt=6000,
        n_forced=1320,
        n_ubatch=128,
        page_tokens=64,
        crossings_min=20,
    ),
    Ladder(
        name="hybrid",
        kv_type=KvType.F16,
        n_ctx=8192,
        n_prompt=6000,
        n_forced=150,
        n_ubatch=200,
        page_tokens=64,
        model=replace(tiny_hybrid_models(n_layer=24)["qwen35"], n_ctx_train=1 << 18),
    ),
    Ladder(
        name="windows and caps",
        kv_type=KvType.F16,
        n_ctx=8192,
        n_prompt=6000,
        n_forced=150,
        n_ubatch=200,
        page_tokens=64,
        model=_windowed("gemma2"),
    ),
    Ladder(
        name="windows and sinks",
        kv_type=KvType.Q8_0,
        n_ctx=20480,
        n_prompt=17000,
        n_forced=64,
        n_ubatch=512,
        page_tokens=128,
        model=_windowed("gpt-oss"),
    ),
    Ladder(
        name="windows and heads of 512",
        kv_type=KvType.F16,
        n_ctx=8192,
        n_prompt=6000,
        n_forced=150,
        n_ubatch=200,
        page_tokens=64,
        model=_windowed("gemma4", (256, 512)),
    ),
    Ladder(
        name="latent",
        kv_type=KvType.F16,
        n_ctx=8192,
        n_prompt=6000,
        n_forced=150,
        n_ubatch=200,
        page_tokens=64,
        model=_LATENT,
    ),
    Ladder(
        name="latent, q8_0",
        kv_type=KvType.Q8_0,
        n_ctx=20480,
        n_prompt=17000,
        n_forced=64,
        n_ubatch=512,
        page_tokens=128,
        model=_LATENT,
    ),
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
    n_vocab = len(ladder.model.vocab.tokens)
    prompt = [int(t) for t in rng.integers(3, n_vocab, ladder.n_prompt)]
    forced = [int(t) for t in rng.integers(3, n_vocab, ladder.n_forced)]
    free_plan = plan_on(backend, config)
    low, high = free_plan.minimum_arena_bytes // MIB, free_plan.useful_arena_bytes // MIB
    passed, reference = True, None
    for arena in ladder.arenas(free_plan):
        plan = plan_on(backend, config, arena * MIB)
        started = perf_counter()
        with Session(plan, backend) as session:
            logits = rows_of(session, prompt, forced)
            seconds = perf_counter() - started
            counters = session.counters
            reference = logits if reference is None else reference
            predicted = plan.streamed_bytes_of_run(len(prompt), len(forced))
            identical = logits.tobytes() == reference.tobytes()
            good = identical and bool(np.isfinite(logits).all())
            good &= counters.bytes_streamed == counters.predicted_bytes_streamed == predicted
            passed &= good
            print(
                f"{verdict(good)} {ladder.name} {ladder.kv_type.value} arena {arena or 'off'} MiB of {low}..{high}: "
                f"identical {identical}, streamed {counters.bytes_streamed / MIB:.0f} MiB, "
                f"predicted {predicted / MIB:.0f}, {plan.decode.resident_pages[0]} pages resident, {seconds:.1f} s",
                flush=True,
            )
            if not good:
                different = np.flatnonzero((logits != reference).any(axis=1))
                print(f"     rows that differ: {different[:20]} of {len(logits)}", flush=True)
    assert reference is not None
    if ladder.crossings_min:
        passed &= check_crossings(ladder, plan_on(backend, config, low * MIB))
    passed &= check_grouped_steps(ladder, plan_on(backend, config, low * MIB), backend, prompt, forced, reference)
    return passed


def check_crossings(ladder: Ladder, plan: RunPlan) -> bool:
    """Every one of the crossings must happen while decode streams, or it shows nothing."""
    step_bytes = plan.streamed_bytes_of_step(plan.decode.phase, ladder.n_prompt)
    good = ladder.n_crossings >= ladder.crossings_min and step_bytes > 0
    print(
        f"{verdict(good)} {ladder.name}: decode crossed {ladder.n_crossings} page boundaries of "
        f"{ladder.crossings_min}, with {plan.decode.ring_bytes / MIB:.1f} MiB of ring and "
        f"{step_bytes / MIB:.1f} MiB streamed in its first step",
        flush=True,
    )
    return good


def check_grouped_steps(
    ladder: Ladder,
    plan: RunPlan,
    backend: Backend,
    prompt: Sequence[int],
    forced: Sequence[int],
    reference: np.ndarray,
) -> bool:
    with Session(plan, backend) as session:
        grouped = rows_of(session, prompt, forced[: len(forced) // 4 * 4], step=4)
    good = grouped.tobytes() == reference[: len(grouped)].tobytes()
    print(f"{verdict(good)} {ladder.name}: steps of 4 tokens have the bits of four steps", flush=True)
    return good


def run_ladders(names: Sequence[str], device: str) -> bool:
    passed = True
    for ladder in LADDERS:
        if ladder.name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = write_model(Path(folder) / "ladder.gguf", ladder.model)
            backend = open_backend(device, n_threads=None)
            try:
                with open_model(path) as model_file:
                    backend.load_weights(model_file)
                passed &= climb(ladder, path, backend)
            finally:
                backend.close()
    return passed
