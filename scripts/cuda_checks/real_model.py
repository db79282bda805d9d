"""SmolLM2's own file and a float16 copy of it, on the device against the CPU backend and llama.cpp.

The expected logits are made on any machine with llama.cpp at hand, as two small files; the float16 copy is made again
where it is compared, because it is several times larger than its source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from kvs_core.backend import Backend, open_backend
from kvs_core.config import RunConfig
from kvs_core.kv_types import KvType
from kvs_core.model_file import open_model
from kvs_core.session import Session
from kvs_core.tokenizer import Tokenizer
from kvs_core.units import MIB
from scripts.cuda_checks.sessions import PROMPT_ROWS, plan_on, rows_of, verdict
from scripts.llama_oracle import LlamaOracle
from scripts.make_float_copy import write_float_copy
from scripts.streaming_runs import TEXT_FILES

KINDS = ("q4_1", "f16")
REFERENCES = ("cpu", "llama")
N_PROMPT, N_FORCED = 512, 32
PREFILL_ROWS, DECODE_ROWS = slice(PROMPT_ROWS), slice(PROMPT_ROWS, None)
N_LONG, N_GREEDY = 3000, 64
"""Tokens of the long prompt, so many that decode streams with the minimum arena, and of greedy text after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """How far logits are from reference logits, over the same rows.

    rms        root mean square of the difference over that of the reference
    same_top   share of rows with the same largest logit
    mean_kld   mean KL divergence in nats
    """

    rms: float
    same_top: float
    mean_kld: float

    def within(self, bound: Distance) -> bool:
        return self.rms <= bound.rms and self.same_top >= bound.same_top and self.mean_kld <= bound.mean_kld

    def __str__(self) -> str:
        return f"rms {self.rms:.1e}, same top {self.same_top:.3f}, mean KLD {self.mean_kld:.1e}"


BOUNDS = {
    "f16": Distance(rms=5e-3, same_top=0.95, mean_kld=5e-5),
    "q4_1": Distance(rms=5e-2, same_top=0.85, mean_kld=1.5e-2),
}
"""What may remain between two correct programs. Weights in float16: both round activations or K and V to float16,
2**-11 each. Weights in Q4_1: a program may round activations to 8 bits in each of 210 products, 1/254 of a block's
largest each; llama.cpp against itself with another attention kernel then has a mean KLD of 0.005 and 96 % same top.
Here llama.cpp and the CPU backend, which keeps activations in float32, are 0.005 apart too (rms 1.5e-2, 37 of 40 rows
with the same top), 4.8e-6 in float16 (rms 5.3e-4, all 40): the bounds are three times that and more."""


def measure_distance(got: np.ndarray, reference: np.ndarray) -> Distance:
    a, b = (_log_softmax(rows.astype(np.float64)) for rows in (reference, got))
    difference = got.astype(np.float64) - reference
    return Distance(
        rms=float(np.sqrt(np.mean(difference**2) / np.mean(reference.astype(np.float64) ** 2))),
        same_top=float(np.mean(got.argmax(axis=1) == reference.argmax(axis=1))),
        mean_kld=float(np.mean(np.sum(np.exp(a) * (a - b), axis=1))),
    )


def _log_softmax(rows: np.ndarray) -> np.ndarray:
    shifted = rows - rows.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


# -- expected logits


def write_expected(model: Path, folder: Path) -> None:
    """``real-q4_1.npz`` and ``real-f16.npz`` in ``folder``: tokens, the file's hash, logits of both references."""
    folder.mkdir(parents=True, exist_ok=True)
    text = read_tokens(model)
    for kind in KINDS:
        path = model_of_kind(model, kind, folder)
        prompt, forced = text[:N_PROMPT], text[N_PROMPT : N_PROMPT + N_FORCED]
        rows = {"cpu": run_backend("cpu", path, prompt, forced), "llama": run_llama(path, prompt, forced)}
        packed: dict[str, np.ndarray] = {}
        for name, logits in rows.items():
            packed |= pack_rows(name, logits)
        target = folder / f"real-{kind}.npz"
        np.savez_compressed(target, text=np.array(text, np.int32), sha256=np.array(hash_of(path)), **packed)
        print(f"{target}  {target.stat().st_size / MIB:.1f} MiB")
        print(f"     {kind:5} llama.cpp against cpu: {measure_distance(rows['llama'], rows['cpu'])}", flush=True)


def read_tokens(model: Path) -> list[int]:
    """The first tokens of the test text and the project's documents."""
    with open_model(model) as model_file:
        tokenizer = Tokenizer.from_metadata(model_file.metadata, path=str(model))
    text = "\n".join(file.read_text(encoding="utf-8") for file in TEXT_FILES)
    return tokenizer.encode(text, add_special=True, parse_special=False)[:N_LONG]


def model_of_kind(model: Path, kind: str, folder: Path) -> Path:
    """The model's own file, or its float16 copy in ``folder``, made when it is not there."""
    if kind == "q4_1":
        return model
    path = folder / f"{model.stem}-f16.gguf"
    if not path.exists():
        partial = path.with_suffix(".partial")
        write_float_copy(model, partial, "f16")
        partial.rename(path)
    return path


def hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def run_llama(path: Path, prompt: Sequence[int], forced: Sequence[int]) -> np.ndarray:
    """The rows of ``rows_of`` from llama.cpp on the CPU, with a float16 cache."""
    with LlamaOracle(path, n_ctx=1024, type_k="f16", type_v="f16") as oracle:
        rows = [oracle.decode(prompt, begin=0, n_skip=len(prompt) - PROMPT_ROWS)]
        rows += [oracle.decode([token], begin=len(prompt) + i) for i, token in enumerate(forced)]
    return np.concatenate(rows)


def pack_rows(name: str, logits: np.ndarray) -> dict[str, np.ndarray]:
    """Differences to each row's largest logit in float16: the likely tokens lose least, 2**-12 of the difference."""
    largest = logits.max(axis=1)
    return {f"{name}_rows": (logits - largest[:, None]).astype(np.float16), f"{name}_largest": largest}


def unpack_rows(name: str, packed: dict[str, np.ndarray]) -> np.ndarray:
    return np.asarray(packed[f"{name}_rows"].astype(np.float32) + packed[f"{name}_largest"][:, None])


# -- on the device


@contextmanager
def loaded(device: str, path: Path) -> Iterator[Backend]:
    backend = open_backend(device, n_threads=None)
    try:
        with open_model(path) as model_file:
            backend.load_weights(model_file)
            yield backend
    finally:
        backend.close()


def config_for(path: Path, n_ctx: int) -> RunConfig:
    return RunConfig(
        model_path=path, n_ctx=n_ctx, n_ubatch=128, page_tokens=64, type_k=KvType.F16, type_v=KvType.F16, paranoid=True
    )


def run_backend(device: str, path: Path, prompt: Sequence[int], forced: Sequence[int]) -> np.ndarray:
    with loaded(device, path) as backend, Session(plan_on(backend, config_for(path, 1024)), backend) as session:
        return rows_of(session, prompt, forced)


def check_real(model: Path, folder: Path, device: str) -> bool:
    passed = True
    for kind in KINDS:
        with np.load(folder / f"real-{kind}.npz") as file:
            expected = dict(file)
        path = model_of_kind(model, kind, folder)
        if hash_of(path) != str(expected["sha256"]):
            print(f"FAIL {kind}: {path} is not the file that the expected logits were made with", flush=True)
            passed = False
            continue
        text = [int(token) for token in expected["text"]]
        passed &= compare_rows(kind, path, text, expected, device)
        passed &= compare_greedy(kind, path, text, device)
    return passed


def compare_rows(kind: str, path: Path, text: Sequence[int], expected: dict[str, np.ndarray], device: str) -> bool:
    started = perf_counter()
    got = run_backend(device, path, text[:N_PROMPT], text[N_PROMPT : N_PROMPT + N_FORCED])
    seconds = perf_counter() - started
    passed, bound = bool(np.isfinite(got).all()), BOUNDS[kind]
    cpu, llama = (unpack_rows(name, expected) for name in REFERENCES)
    print(f"     {kind:5} llama.cpp against cpu: {measure_distance(llama, cpu)}")
    for name, reference in zip(REFERENCES, (cpu, llama), strict=True):
        distance = measure_distance(got, reference)
        phases = [measure_distance(got[part], reference[part]).rms for part in (PREFILL_ROWS, DECODE_ROWS)]
        good = distance.within(bound) and max(phases) <= bound.rms
        passed &= good
        print(
            f"{verdict(good)} {kind:5} {device} against {name:5}: {distance} (rms prefill {phases[0]:.1e}, decode "
            f"{phases[1]:.1e}); bound {bound}",
            flush=True,
        )
    print(f"     {kind:5} {N_PROMPT} + {N_FORCED} tokens, load and kernels included: {seconds:.1f} s", flush=True)
    return passed


def compare_greedy(kind: str, path: Path, text: Sequence[int], device: str) -> bool:
    """Greedy text after a long prompt: the same tokens and logits without an arena and with the smallest."""
    config = config_for(path, N_LONG + N_GREEDY + 64)
    results, n_streamed = [], 0
    with loaded(device, path) as backend:
        low = plan_on(backend, config).minimum_arena_bytes
        for arena_bytes in (0, low):
            plan = plan_on(backend, config, arena_bytes)
            with Session(plan, backend) as session:
                row = session.prefill(text[:N_LONG])
                before = session.counters.bytes_streamed
                tokens, rows = [], [row]
                for _ in range(N_GREEDY):
                    tokens.append(int(rows[-1].argmax()))
                    rows.append(session.decode(tokens[-1:])[0])
                n_streamed = session.counters.bytes_streamed - before
                predicted = plan.streamed_bytes_of_run(N_LONG, N_GREEDY)
                as_predicted = session.counters.bytes_streamed == predicted
            results.append((tokens, np.stack(rows).tobytes(), as_predicted))
    same_tokens, same_bits = results[0][0] == results[1][0], results[0][1] == results[1][1]
    good = same_tokens and same_bits and all(result[2] for result in results) and n_streamed > 0
    print(
        f"{verdict(good)} {kind:5} {device} greedy, {N_LONG} + {N_GREEDY} tokens, arena off and {low / MIB:.0f} MiB: "
        f"same tokens {same_tokens}, same bits {same_bits}, {n_streamed / MIB:.0f} MiB streamed in decode, "
        f"as predicted {results[1][2]}",
        flush=True,
    )
    return good
