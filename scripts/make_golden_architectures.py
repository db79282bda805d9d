"""llama.cpp's logits of one tiny model per architecture: `make_golden_architectures.py [--only KIND] [OUTPUT]`.

A prompt of 96 tokens in one batch, then 32 more tokens one by one. Kept are every eighth logit and the best token of
each position, and all logits of every sixteenth position, which is what a KL divergence needs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.llama_oracle import LlamaLibrary, LlamaOracle
from tests.fixtures.tiny_architectures import tiny_architectures
from tests.fixtures.tiny_hybrid_models import tiny_hybrid_models
from tests.fixtures.tiny_latent_models import tiny_latent_models
from tests.fixtures.tiny_models import write_model
from tests.fixtures.tiny_window_models import tiny_window_models

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
N_PROMPT, N_DECODED = 96, 32
KEPT_COLUMNS = slice(None, None, 8)
KEPT_ROWS = slice(15, None, 16)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, nargs="?", help="default: a file of tests/data")
    parser.add_argument(
        "--only", choices=("window", "hybrid", "latent"), help="models of this kind instead of the plain ones"
    )
    parser.add_argument("--llama-lib", help="libllama.so to ask; without it LLAMA_LIB, then the package xllamacpp")
    arguments = parser.parse_args()
    kinds = {
        None: tiny_architectures,
        "window": tiny_window_models,
        "hybrid": tiny_hybrid_models,
        "latent": tiny_latent_models,
    }
    models = kinds[arguments.only]()
    output = arguments.output or DATA / f"{arguments.only or 'architecture'}_logits.npz"

    library = LlamaLibrary(arguments.llama_lib)
    n_tokens = N_PROMPT + N_DECODED
    tokens = [1, *np.random.default_rng(7).integers(3, 259, n_tokens - 1).tolist()]
    arrays: dict[str, np.ndarray] = {
        "made_by": np.array(f"llama.cpp, {library.build}, CPU, f32 K and V, flash attention off"),
        "tokens": np.array(tokens, np.int32),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, model in models.items():
            path = write_model(Path(folder) / f"{name}.gguf", model)
            with LlamaOracle(path, library=library, n_ctx=n_tokens) as oracle:
                rows = [oracle.logits(tokens[:N_PROMPT])]
                rows += [oracle.decode(tokens[pos : pos + 1], begin=pos) for pos in range(N_PROMPT, n_tokens)]
            logits = np.concatenate(rows)
            arrays[f"{name}/columns"] = logits[:, KEPT_COLUMNS]
            arrays[f"{name}/rows"] = logits[KEPT_ROWS]
            arrays[f"{name}/best"] = logits.argmax(axis=1).astype(np.int32)
            print(f"{name:10}  largest {np.abs(logits).max():.3f}")

    np.savez_compressed(output, **arrays)
    print(f"{output}  {output.stat().st_size} bytes  ({arrays['made_by']})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
