"""The float64 reference against what llama.cpp said: each vouches for the other, and for the tiny models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.fixtures.tiny_models import tiny_catalogue
from tests.oracles.llama_float64 import LlamaFloat64

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "llama_logits.npz")
NAMES = sorted(key.removesuffix("/logits") for key in GOLDEN.files if key.endswith("/logits"))


@pytest.mark.parametrize("name", NAMES)
def test_float64_reference_gives_llama_cpp_logits(name: str, tmp_path: Path) -> None:
    path = tiny_catalogue()[name](tmp_path / "model.gguf")

    logits = LlamaFloat64(path).logits(GOLDEN["tokens"].tolist())[:, GOLDEN[f"{name}/columns"]]

    error = np.abs(logits - GOLDEN[f"{name}/logits"])
    worst = np.unravel_index(error.argmax(), error.shape)
    # llama.cpp computes in float32: its logits of size 5 to 8 came out 2e-6 to 4e-5 from exact, growing with head_dim
    assert error.max() < 1e-4, f"{name}: {worst} {logits[worst]} {GOLDEN[f'{name}/logits'][worst]}"
