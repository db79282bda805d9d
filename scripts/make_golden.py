"""Ask llama.cpp for the logits of the tiny models and write them to tests/data: `make_golden.py [OUTPUT]`.

Run it again after a change of a tiny model: the test beside the float64 reference notices when the two differ.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.llama_oracle import LlamaLibrary, LlamaOracle
from tests.fixtures.tiny_models import tiny_catalogue

OUTPUT = Path(__file__).resolve().parents[1] / "tests" / "data" / "llama_logits.npz"
N_POSITIONS = 64
TEXT = b"The keeper wrote 47 lines before dawn; none of them was about the sea."

# All 259 logits of each position for what differs in the arithmetic, every eighth for what differs in sizes only.
WHOLE = ("untied", "tied", "rope-factors", "rope-linear", "rope-yarn", "biases", "head-dim-80", "head-dim-apart")
SPARSE = ("rope-yarn-attn", "rope-base", "gqa-1", "gqa-3", "gqa-4", "head-dim-96", "head-dim-128")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, nargs="?", default=OUTPUT)
    parser.add_argument("--llama-lib", help="libllama.so to ask; without it LLAMA_LIB, then the package xllamacpp")
    arguments = parser.parse_args()

    library = LlamaLibrary(arguments.llama_lib)
    catalogue = tiny_catalogue()
    tokens = [1, *(3 + byte for byte in TEXT)][:N_POSITIONS]
    arrays: dict[str, np.ndarray] = {
        "made_by": np.array(f"llama.cpp, {library.build}, CPU, f32 K and V, flash attention off"),
        "tokens": np.array(tokens, np.int32),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in WHOLE + SPARSE:
            path = catalogue[name](Path(folder) / f"{name}.gguf")
            with LlamaOracle(path, library=library, n_ctx=N_POSITIONS) as oracle:
                rows = oracle.logits(tokens)
            columns = np.arange(0, rows.shape[1], 1 if name in WHOLE else 8, dtype=np.int32)
            arrays[f"{name}/columns"] = columns
            arrays[f"{name}/logits"] = rows[:, columns]
            print(f"{name:16}  logits {rows.shape}, kept {len(columns)} columns, largest {np.abs(rows).max():.3f}")

    np.savez_compressed(arguments.output, **arrays)
    print(f"{arguments.output}  {arguments.output.stat().st_size} bytes  ({arrays['made_by']})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
