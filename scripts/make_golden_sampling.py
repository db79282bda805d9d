"""Tokens that llama.cpp's own samplers draw from fixed logits: tests/data/sampling.json.

`make_golden_sampling.py [--llama-lib FILE]`. The logits come from a numpy seed, so the file holds only settings and
tokens; every token drawn is fed back, so that the repeat penalty has something to do.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvs_core.config import SamplingConfig
from scripts.llama_oracle import LlamaLibrary

OUTPUT = Path(__file__).resolve().parents[1] / "tests" / "data" / "sampling.json"
N_VOCAB = 2000
N_DRAWS = 40
CONFIGS = (
    SamplingConfig(seed=1),
    SamplingConfig(seed=4294967294, temperature=1.5),
    SamplingConfig(seed=7, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
    SamplingConfig(seed=8, temperature=1.2, top_k=0, top_p=0.9, min_p=0.0),
    SamplingConfig(seed=9, temperature=1.2, top_k=0, top_p=1.0, min_p=0.02),
    SamplingConfig(seed=10, temperature=0.0),
    SamplingConfig(seed=11, repeat_penalty=1.3),
    SamplingConfig(seed=12, repeat_penalty=1.5, repeat_last_n=4, top_k=10),
    SamplingConfig(seed=13, temperature=2.0, samplers=("temperature", "top_p", "top_k")),
    SamplingConfig(seed=14, temperature=3.0, repeat_penalty=1.2, samplers=("temperature", "min_p", "penalties")),
)


class TokenData(ctypes.Structure):
    """llama_token_data."""

    _fields_ = [("id", ctypes.c_int32), ("logit", ctypes.c_float), ("p", ctypes.c_float)]


class TokenDataArray(ctypes.Structure):
    """llama_token_data_array."""

    _fields_ = [
        ("data", ctypes.POINTER(TokenData)),
        ("size", ctypes.c_size_t),
        ("selected", ctypes.c_int64),
        ("sorted", ctypes.c_bool),
    ]


class ChainParams(ctypes.Structure):
    """llama_sampler_chain_params."""

    _fields_ = [("no_perf", ctypes.c_bool)]


def make_logits(draw: int) -> np.ndarray:
    """float32 [N_VOCAB]; the test makes the same ones."""
    return np.random.default_rng(1000 + draw).normal(0.0, 3.0, N_VOCAB).astype(np.float32)


def declare(library: ctypes.CDLL) -> None:
    for name, arguments in {
        "chain_init": [ChainParams],
        "init_penalties": [ctypes.c_int32, ctypes.c_int32, ctypes.c_float, ctypes.c_float, ctypes.c_float],
        "init_top_k": [ctypes.c_int32],
        "init_top_p": [ctypes.c_float, ctypes.c_size_t],
        "init_min_p": [ctypes.c_float, ctypes.c_size_t],
        "init_temp": [ctypes.c_float],
        "init_dist": [ctypes.c_uint32],
    }.items():
        function = getattr(library, f"llama_sampler_{name}")
        function.argtypes, function.restype = arguments, ctypes.c_void_p
    library.llama_sampler_chain_add.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.llama_sampler_apply.argtypes = [ctypes.c_void_p, ctypes.POINTER(TokenDataArray)]
    library.llama_sampler_accept.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    library.llama_sampler_free.argtypes = [ctypes.c_void_p]


def draw_tokens(library: ctypes.CDLL, config: SamplingConfig) -> list[int]:
    steps = {
        "penalties": lambda: library.llama_sampler_init_penalties(
            N_VOCAB, config.repeat_last_n, config.repeat_penalty, 0.0, 0.0
        ),
        "top_k": lambda: library.llama_sampler_init_top_k(config.top_k),
        "top_p": lambda: library.llama_sampler_init_top_p(config.top_p, 1),
        "min_p": lambda: library.llama_sampler_init_min_p(config.min_p, 1),
        "temperature": lambda: library.llama_sampler_init_temp(config.temperature),
    }
    chain = library.llama_sampler_chain_init(ChainParams(no_perf=True))
    for name in config.samplers:
        library.llama_sampler_chain_add(chain, steps[name]())
    library.llama_sampler_chain_add(chain, library.llama_sampler_init_dist(config.seed))
    tokens = []
    for draw in range(N_DRAWS):
        entries = (TokenData * N_VOCAB)()
        for token, logit in enumerate(make_logits(draw)):
            entries[token] = TokenData(token, logit, 0.0)
        candidates = TokenDataArray(entries, N_VOCAB, -1, False)
        library.llama_sampler_apply(chain, ctypes.byref(candidates))
        tokens.append(candidates.data[candidates.selected].id)
        library.llama_sampler_accept(chain, tokens[-1])
    library.llama_sampler_free(chain)
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-lib")
    library = LlamaLibrary(parser.parse_args().llama_lib)
    declare(library.lib)
    cases = [{"config": asdict(config), "tokens": draw_tokens(library.lib, config)} for config in CONFIGS]
    lines = ",\n".join(json.dumps(case) for case in cases)
    head = f'{{"source": {json.dumps(library.build)}, "n_vocab": {N_VOCAB}, "cases": [\n'
    OUTPUT.write_text(f"{head}{lines}\n]}}\n", encoding="utf-8")
    print(f"{OUTPUT}: {len(cases)} cases of {N_DRAWS} tokens")


if __name__ == "__main__":
    main()
