"""Check whole sessions on a CUDA device: logits against the CPU backend, and the same bits for every arena.

    python -m scripts.check_cuda_session expect FOLDER     models and CPU logits, on any machine
    python -m scripts.check_cuda_session compare FOLDER    the same models on the device
    python -m scripts.check_cuda_session ladder            arenas from the minimum to everything, on the device
    python -m scripts.check_cuda_session expect-real MODEL FOLDER   SmolLM2: CPU logits and llama.cpp's, on any machine
    python -m scripts.check_cuda_session real MODEL FOLDER          the same on the device, and greedy text streamed

Exit code 1 when a line says FAIL.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np
from gguf import GGMLQuantizationType as Q

from kvs_core.backend import open_backend
from kvs_core.config import RunConfig
from kvs_core.kv_types import KvType
from kvs_core.model_file import open_model
from kvs_core.session import Session
from scripts.cuda_checks import other_generation, real_model
from scripts.cuda_checks.ladder import LADDERS, run_ladders
from scripts.cuda_checks.sessions import PROMPT_ROWS, plan_on, rows_of, verdict
from tests.fixtures.tiny_architectures import tiny_architectures
from tests.fixtures.tiny_hybrid_models import tiny_hybrid_models
from tests.fixtures.tiny_latent_models import dense_latent_model, tiny_latent_models
from tests.fixtures.tiny_models import TinyModel, write_model
from tests.fixtures.tiny_window_models import tiny_window_models, without_window

N_VOCAB = 259
PROMPT = [int(t) for t in np.random.default_rng(1).integers(3, N_VOCAB, 400)]
FORCED = [int(t) for t in np.random.default_rng(2).integers(3, N_VOCAB, 24)]

_WINDOWED = {name: replace(model, n_ctx_train=1024) for name, model in tiny_window_models(head_dims=(64, 128)).items()}
_EXPERT_PARTS = ("gate", "up", "down")
_HYBRID = replace(tiny_hybrid_models()["qwen35"], n_ctx_train=1024)
_Q_RANK = 96
_LATENT = {name: replace(model, n_ctx_train=1024) for name, model in tiny_latent_models(q_rank=_Q_RANK).items()}


def take_every_expert(model: TinyModel) -> TinyModel:
    """The same, with no choice of experts."""
    return replace(model, extra_keys=model.extra_keys | {"expert_used_count": model.extra_keys["expert_count"]})


def takes_some_experts(model: TinyModel) -> bool:
    keys = model.extra_keys
    return keys.get("expert_used_count") != keys.get("expert_count")


def _large(gate: str, up: str, down: str) -> dict[str, float]:
    """Factors with which gated rows exceed the largest float16, 65504."""
    return {f"ffn_{gate}": 200.0, f"ffn_{up}": 200.0, f"ffn_{down}": 2.0**-8}


MODELS = {
    "f32": TinyModel(weight_std=0.08, n_ctx_train=1024),
    "f16-bias": TinyModel(weight_std=0.08, n_ctx_train=1024, weight_type=Q.F16, biases=True, tied=True, seed=2),
    "bf16-factors": TinyModel(weight_std=0.08, n_ctx_train=1024, weight_type=Q.BF16, rope_factors=True, seed=3),
    "q8_0": TinyModel(
        weight_std=0.08, n_ctx_train=1024, weight_type=Q.Q8_0, n_head=8, n_head_kv=2, seed=4, head_dim=64
    ),
    "q4_1-128": TinyModel(weight_std=0.08, n_ctx_train=1024, weight_type=Q.Q4_1, head_dim=128, seed=5),
    **{name: replace(tiny_architectures()[name], n_ctx_train=1024) for name in ("mistral3", "qwen2", "qwen3")},
    **{name: replace(tiny_architectures()[name], n_ctx_train=1024) for name in ("mixtral", "qwen2moe", "qwen3moe")},
    **{name: replace(model, n_ctx_train=1024) for name, model in tiny_hybrid_models().items()},
    "qwen35-q8_0": replace(
        _HYBRID,
        weight_type=Q.Q8_0,
        tensor_types={name: Q.F32 for name in _HYBRID.layer_shapes if "ssm_conv1d" in name},
    ),
    **_WINDOWED,
    **{f"{name}-all": take_every_expert(_WINDOWED[name]) for name in ("gemma4-moe", "gpt-oss", "laguna")},
    "gemma4-wide": replace(tiny_window_models(head_dims=(64, 512))["gemma4"], n_ctx_train=1024),
    "gemma2-q8_0": replace(_WINDOWED["gemma2"], weight_type=Q.Q8_0),
    "gemma3-q8_0": replace(without_window(_WINDOWED["gemma3"]), weight_type=Q.Q8_0),
    "gpt-oss-mxfp4": replace(
        _WINDOWED["gpt-oss"],
        weight_type=Q.Q8_0,
        tensor_types={f"blk.{idx}.ffn_{part}_exps.weight": Q.MXFP4 for idx in range(4) for part in _EXPERT_PARTS},
    ),
    **{name: _LATENT[name] for name in ("deepseek-v2-lite", "deepseek-v3")},
    "deepseek-dense": replace(dense_latent_model(q_rank=_Q_RANK), n_ctx_train=1024),
    "deepseek-q8_0": replace(_LATENT["deepseek-v3"], weight_type=Q.Q8_0),
    "large": TinyModel(weight_std=0.08, n_ctx_train=1024, factors=_large("gate.weight", "up.weight", "down.weight")),
    "large-experts": replace(
        tiny_architectures()["mixtral"],
        n_ctx_train=1024,
        factors=_large("gate_exps.weight", "up_exps.weight", "down_exps.weight"),
    ),
    "large-residual": replace(
        _WINDOWED["gemma4-e2b"], factors=_WINDOWED["gemma4-e2b"].factors | {"post_ffw_norm.weight": 1e4}
    ),
}
CACHE_TYPES = (KvType.F32, KvType.F16, KvType.Q8_0)
BOUNDS = dict.fromkeys(MODELS, 2e-2) | {
    "q8_0": 4e-2,
    "q4_1-128": 4e-2,
    "qwen35-q8_0": 1e-1,
    "gemma2-q8_0": 1e-1,
    "gemma3-q8_0": 1e-1,
    "gpt-oss-mxfp4": 1e-1,
    "deepseek-q8_0": 1e-1,
    "deepseek-v2-lite": 1e-1,
    "gemma4-wide": 1e-1,
}
"""Largest difference of a row over the row's size, root-mean-square over elements and rows. float16 operands carry
2**-11 each and 8-bit activations 1/254 of a block's largest; over the handful of products in a row that is what
remains. A hybrid's state carries that on from token to token: with activations rounded to 8 bits in decode the CPU
backend is 6.9e-2 from itself without. 26 layers add up too: a cache rounded to float16 moves V2-Lite on the CPU by
1.2e-2. Scores of gemma4 have no scale, so attention is sharp: a q8_0 cache moves it by 1.1e-1.

Of models with experts the median row is judged: where two experts are close, rounding chooses the other one, and that
row moves by a lot. On the CPU, weights rounded to float16 move the worst row of gemma4-moe by 2.7e-1 and of laguna-m by
3.2e-1, their median rows by 4e-3 and 1e-2. Where every token takes every expert ("-all") all rows are judged.

Where quantising the cache moves the CPU's own logits further than that from those with an f32 cache, this distance is
the bound, and twice as many rows may have another best token: both are roundings of their own of what float32 caches
hold. On the CPU, weights rounded to float16 change 12 of 32 best tokens of laguna-m with a q8_0 cache, that cache 8."""
LEAST_SAME_TOP = 0.9


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
        model_path=path,
        n_ctx=512,
        n_ubatch=128,
        page_tokens=64,
        type_k=kv_type,
        type_v=kv_type,
        n_threads=2,
    )


def write_expected(folder: Path, names: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = write_model(folder / f"{name}.gguf", MODELS[name])
        for kv_type in CACHE_TYPES:
            np.save(folder / f"{name}.{kv_type.value}.npy", run_model("cpu", path, config_for(path, kv_type)))
        print(f"made {name}", flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """Of logits from others: over the rows of the prompt, of the steps, of one row; and how many best tokens agree."""

    prompt: float
    steps: float
    worst_row: float
    same_top: float

    @classmethod
    def of(cls, got: np.ndarray, exact: np.ndarray, mean: Callable[[np.ndarray], float]) -> Distance:
        by_row = np.sqrt(np.mean((got - exact) ** 2, axis=1) / np.mean(exact**2, axis=1))
        prompt, steps = (float(mean(part)) for part in np.split(by_row, [PROMPT_ROWS]))
        same_top = float(np.mean(got.argmax(axis=1) == exact.argmax(axis=1)))
        return cls(prompt=prompt, steps=steps, worst_row=float(by_row.max()), same_top=same_top)


def compare(folder: Path, device: str, names: Sequence[str], kv_types: Sequence[KvType]) -> bool:
    passed = True
    for name in names:
        for kv_type in kv_types:
            started = perf_counter()
            unrounded, exact = (
                np.load(folder / f"{name}.{cached.value}.npy").astype(np.float64) for cached in (KvType.F32, kv_type)
            )
            path = folder / f"{name}.gguf"
            got = run_model(device, path, config_for(path, kv_type))
            mean = np.median if takes_some_experts(MODELS[name]) else _root_mean_square
            found, own = Distance.of(got, exact, mean), Distance.of(exact, unrounded, mean)
            bound = max(BOUNDS[name], own.prompt, own.steps)
            good = bool(np.isfinite(got).all()) and max(found.prompt, found.steps) <= bound
            good &= found.same_top >= min(LEAST_SAME_TOP, 2.0 * own.same_top - 1.0)
            passed &= good
            print(
                f"{verdict(good)} {name:14} kv {kv_type.value:5} prefill {found.prompt:.1e} decode "
                f"{found.steps:.1e} of {bound:.0e}, worst row {found.worst_row:.1e}, same top {found.same_top:.2f}, "
                f"{perf_counter() - started:.1f} s",
                flush=True,
            )
    return passed


def _root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="what", required=True)

    def add(name: str, help_text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help_text)
        if not name.startswith("expect"):
            command.add_argument("--device", default="cuda", help="cuda[:N], or cpu to try the check itself")
            other_generation.add_option(command)
        return command

    for name, help_text in (
        ("expect", "write the tiny models and their CPU logits"),
        ("compare", "run the tiny models"),
    ):
        command = add(name, help_text)
        command.add_argument("folder", type=Path)
        command.add_argument("--only", nargs="+", choices=list(MODELS), default=list(MODELS))
        if name == "compare":
            kv_types = [kv_type.value for kv_type in CACHE_TYPES]
            command.add_argument("--types", nargs="+", choices=kv_types, default=kv_types)
    for name, help_text in (
        ("expect-real", "write logits of SmolLM2 by the CPU backend and llama.cpp"),
        ("real", "run SmolLM2"),
    ):
        command = add(name, help_text)
        command.add_argument("model", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf")
        command.add_argument("folder", type=Path)
    names = [ladder.name for ladder in LADDERS]
    add("ladder", "the same bits for every arena").add_argument("--only", nargs="+", choices=names, default=names)
    arguments = parser.parse_args()

    if arguments.what == "expect":
        write_expected(arguments.folder, arguments.only)
        return 0
    if arguments.what == "expect-real":
        real_model.write_expected(arguments.model, arguments.folder)
        return 0
    other_generation.apply_option(arguments)
    if arguments.what == "compare":
        kv_types = [KvType(name) for name in arguments.types]
        passed = compare(arguments.folder, arguments.device, arguments.only, kv_types)
    elif arguments.what == "real":
        passed = real_model.check_real(arguments.model, arguments.folder, arguments.device)
    else:
        passed = run_ladders(arguments.only, arguments.device)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
