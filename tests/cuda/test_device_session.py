"""One session on a real device: streaming changes no bit; ``scripts/check_cuda_session.py`` climbs longer ladders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")
pytest.importorskip("nvmath", reason="the extra 'cuda' is not installed")

from gguf import GGMLQuantizationType
from numba import cuda

from kvs_core.backend import Backend, open_backend
from kvs_core.config import RunConfig
from kvs_core.kv_layer_types import parse_layer_types
from kvs_core.kv_types import KvType
from kvs_core.model_file import open_model
from kvs_core.session import Session
from kvs_core.units import MIB
from scripts.check_cuda_session import plan_on, rows_of
from tests.fixtures.tiny_hybrid_models import tiny_hybrid_models
from tests.fixtures.tiny_models import TinyModel, write_model
from tests.fixtures.tiny_window_models import tiny_window_models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda.is_available(), reason="no CUDA device or no driver"),
]

DENSE = TinyModel(
    n_layer=4,
    n_head=8,
    n_head_kv=4,
    head_dim=128,
    n_ctx_train=4096,
    weight_std=0.08,
    weight_type=GGMLQuantizationType.Q8_0,
)
MODELS = {
    "dense": DENSE,
    "heads of 80": replace(DENSE, head_dim=80),
    "hybrid": replace(tiny_hybrid_models(n_layer=24)["qwen35"], n_ctx_train=4096),
    "windows": replace(tiny_window_models(n_layer=24, head_dims=(128, 128))["gpt-oss"], n_head_kv=4, n_ctx_train=4096),
}
N_VOCAB = 259
PROMPT = [int(token) for token in np.random.default_rng(1).integers(3, N_VOCAB, 1500)]
FORCED = [int(token) for token in np.random.default_rng(2).integers(3, N_VOCAB, 80)]


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "session.gguf", MODELS[request.param])


@pytest.fixture(scope="module")
def backend(path: Path) -> Iterator[Backend]:
    backend = open_backend("cuda", n_threads=None)
    with open_model(path) as model_file:
        backend.load_weights(model_file)
    yield backend
    backend.close()


CACHES = {
    "f16": {"type_k": KvType.F16, "type_v": KvType.F16},
    "q8_0": {"type_k": KvType.Q8_0, "type_v": KvType.Q8_0},
    "q4_0/turbo3": {"type_k": KvType.Q4_0, "type_v": KvType.TURBO3},
    "layers": {"type_k": KvType.TURBO4, "layer_types": parse_layer_types("first1:q8_0,last1:iq4_nl/bf16")},
}


@pytest.mark.parametrize("cache", CACHES)
def test_streamed_logits_have_the_bits_of_resident_ones(cache: str, path: Path, backend: Backend) -> None:
    config = RunConfig(model_path=path, n_ctx=2048, n_ubatch=200, page_tokens=64, paranoid=True, **CACHES[cache])
    free = plan_on(backend, config)
    with Session(free, backend) as session:
        resident = rows_of(session, PROMPT, FORCED)
    assert np.isfinite(resident).all()
    for step in (1, 4):
        plan = plan_on(backend, config, free.minimum_arena_bytes // MIB * MIB)
        with Session(plan, backend) as session:
            streamed = rows_of(session, PROMPT, FORCED, step=step)
            counters = session.counters
        assert counters.bytes_streamed == counters.predicted_bytes_streamed > 0
        assert streamed.tobytes() == resident.tobytes(), f"steps of {step}"
