"""Streaming is exact: whatever the arena, the logits are the same bits, and every byte was predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvs_core.backend import CopyEngine
from kvs_core.config import RunConfig
from kvs_core.cpu import backend as cpu_backend
from kvs_core.cpu.copy_engine import CpuCopyEngine
from kvs_core.cpu.team_copy_engine import TeamCopyEngine
from kvs_core.errors import StateError
from kvs_core.kv_cache import StreamCounters
from kvs_core.kv_layer_types import parse_layer_types
from kvs_core.kv_types import KvType
from kvs_core.plan import RunPlan
from kvs_core.units import MIB
from tests.fixtures.tiny_models import TinyModel, write_model
from tests.session.harness import open_session, plan_for, random_tokens, run, run_tokens

PROMPT = random_tokens(700, 259, seed=1)
FORCED = random_tokens(40, 259, seed=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many layers of small heads, so that KV bytes outweigh the workspace."""
    path = tmp_path_factory.mktemp("models") / "stream.gguf"
    write_model(path, TinyModel(n_layer=8, n_ctx_train=1024, n_head=4, n_head_kv=4, weight_std=0.08))
    return path


@pytest.fixture
def config(model: Path) -> RunConfig:
    return RunConfig(model_path=model, n_ctx=1024, n_ubatch=64, page_tokens=16, n_threads=2, paranoid=True)


def arenas(plan: RunPlan) -> list[int]:
    """MiB from the smallest arena that works to one that holds everything."""
    low, high = plan.minimum_arena_bytes // MIB, plan.useful_arena_bytes // MIB
    return sorted({low, low + 1, (2 * low + high) // 3, (low + high) // 2, high - 1, high})


@pytest.mark.parametrize(
    ("type_k", "type_v"),
    [
        (KvType.F16, KvType.F16),
        (KvType.Q8_0, KvType.Q8_0),
        (KvType.Q5_1, KvType.Q4_0),
        (KvType.IQ4_NL, KvType.Q5_0),
        (KvType.BF16, KvType.Q4_1),
        (KvType.TURBO4, KvType.TURBO3),
        (KvType.Q8_0, KvType.TURBO2),
    ],
)
def test_logits_do_not_depend_on_the_arena(model: Path, config: RunConfig, type_k: KvType, type_v: KvType) -> None:
    config = replace(config, type_k=type_k, type_v=type_v)
    free = run(plan_for(model, config), PROMPT, FORCED)
    assert free.counters.bytes_streamed == 0
    assert np.isfinite(free.logits).all()
    streamed = []
    for arena_mib in arenas(free.plan):
        outcome = run(plan_for(model, config, arena_mib), PROMPT, FORCED)
        np.testing.assert_array_equal(outcome.logits, free.logits, err_msg=f"arena {arena_mib} MiB")
        counters = outcome.counters
        assert counters.bytes_streamed == counters.predicted_bytes_streamed
        assert counters.bytes_streamed == outcome.plan.streamed_bytes_of_run(len(PROMPT), len(FORCED))
        assert counters.decode_steps_in_decode_layout == counters.decode_steps == len(FORCED)
        streamed.append(counters.bytes_streamed)
    assert streamed == sorted(streamed, reverse=True)
    assert streamed[0] > 0
    assert streamed[-1] == 0


def test_layers_of_different_types_stream_through_one_ring(model: Path, config: RunConfig) -> None:
    config = replace(
        config, type_k=KvType.Q8_0, type_v=KvType.TURBO4, layer_types=parse_layer_types("first2:f16,last1:f32/q4_1")
    )
    free = run(plan_for(model, config), PROMPT[:300], FORCED[:10])
    tight = run(plan_for(model, config, free.plan.minimum_arena_bytes // MIB), PROMPT[:300], FORCED[:10])
    assert len(set(tight.plan.cache.page_bytes)) == 3
    np.testing.assert_array_equal(tight.logits, free.logits)
    assert tight.counters.bytes_streamed == tight.counters.predicted_bytes_streamed > 0


@pytest.mark.parametrize(("n_processors", "engine"), [(2, TeamCopyEngine), (3, CpuCopyEngine)])
def test_logits_do_not_depend_on_who_copies(
    model: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch, n_processors: int, engine: type[CopyEngine]
) -> None:
    monkeypatch.setattr(cpu_backend, "available_processors", lambda: n_processors)
    free = run(plan_for(model, config), PROMPT, FORCED)
    with open_session(plan_for(model, config, free.plan.minimum_arena_bytes // MIB)) as session:
        assert type(session.engine) is engine
        np.testing.assert_array_equal(run_tokens(session, PROMPT, FORCED), free.logits)
        assert session.counters.bytes_streamed == session.counters.predicted_bytes_streamed > 0
        assert session.engine.copy_seconds > 0


@pytest.mark.parametrize("n_tokens", [15, 16, 17, 63, 64, 65, 255, 256, 257])
def test_lengths_around_page_and_micro_batch_boundaries(model: Path, config: RunConfig, n_tokens: int) -> None:
    minimum = plan_for(model, config).minimum_arena_bytes // MIB
    free = run(plan_for(model, config), PROMPT[:n_tokens], FORCED[:20])
    tight = run(plan_for(model, config, minimum), PROMPT[:n_tokens], FORCED[:20])
    np.testing.assert_array_equal(tight.logits, free.logits)
    assert tight.counters.bytes_streamed == tight.counters.predicted_bytes_streamed


def test_a_changed_byte_in_the_store_changes_the_logits(model: Path, config: RunConfig) -> None:
    plan = plan_for(model, config, plan_for(model, config).minimum_arena_bytes // MIB)
    page = plan.decode.resident_pages[3] + 1
    assert page < len(PROMPT) // config.page_tokens
    logits = []
    for flip in (0x00, 0x40):
        with open_session(plan) as session:
            session.prefill(PROMPT)
            assert session.store is not None
            byte = np.zeros(1, dtype=np.uint8)
            session.store.read(plan.store_offset(3, page) + 1, byte.ctypes.data, 1)
            byte ^= flip
            session.store.write(plan.store_offset(3, page) + 1, byte.ctypes.data, 1)
            logits.append(session.decode(FORCED[:1]))
    assert not np.array_equal(logits[0], logits[1])


def test_prefill_after_decode_switches_back_and_stays_exact(model: Path, config: RunConfig) -> None:
    minimum = plan_for(model, config).minimum_arena_bytes // MIB
    results = []
    for arena_mib in (0, minimum, minimum + 1):
        with open_session(plan_for(model, config, arena_mib)) as session:
            rows = [run_tokens(session, PROMPT[:200], FORCED[:9])]
            rows.append(run_tokens(session, PROMPT[200:333], FORCED[9:30]))
            results.append(np.concatenate(rows))
            assert session.counters.bytes_streamed == session.counters.predicted_bytes_streamed
            assert session.counters.phase_switches == 3
    np.testing.assert_array_equal(results[1], results[0])
    np.testing.assert_array_equal(results[2], results[0])


def test_a_step_of_several_tokens_gives_each_the_bits_of_single_steps(model: Path, config: RunConfig) -> None:
    minimum = plan_for(model, config).minimum_arena_bytes // MIB
    with open_session(plan_for(model, config, minimum)) as session:
        session.prefill(PROMPT[:250])
        single = np.concatenate([session.decode([token]) for token in FORCED[:12]])
    with open_session(plan_for(model, config, minimum)) as session:
        session.prefill(PROMPT[:250])
        grouped = np.concatenate([session.decode(FORCED[begin : begin + 4]) for begin in (0, 4, 8)])
    np.testing.assert_array_equal(grouped, single)


def test_a_decode_step_beyond_the_plan_is_refused_and_breaks_nothing(model: Path, config: RunConfig) -> None:
    plan = plan_for(model, replace(config, n_ubatch=4))
    with open_session(plan) as session:
        session.prefill([5, 6, 7])
        for tokens in ([], [8] * 5):
            with pytest.raises(StateError, match=f"a decode step takes 1 to 4 tokens, not {len(tokens)}"):
                session.decode(tokens)
        assert len(session.decode([8] * 4)) == 4
        assert session.n_past == 7


def test_a_file_store_gives_the_same_bits_and_leaves_nothing_behind(
    model: Path, config: RunConfig, tmp_path: Path
) -> None:
    minimum = plan_for(model, config).minimum_arena_bytes // MIB
    free = run(plan_for(model, config), PROMPT, FORCED)
    stored = run(plan_for(model, replace(config, store_path=tmp_path / "store"), minimum), PROMPT, FORCED)
    np.testing.assert_array_equal(stored.logits, free.logits)
    assert stored.counters.bytes_streamed > 0
    assert list(tmp_path.iterdir()) == []


def test_the_arena_is_exactly_as_large_as_asked(model: Path, config: RunConfig) -> None:
    minimum = plan_for(model, config).minimum_arena_bytes // MIB
    with open_session(plan_for(model, config, minimum + 1)) as session:
        assert session.arena.n_bytes == (minimum + 1) * MIB


@pytest.mark.parametrize("extra_mib", [None, 0])
def test_a_warm_up_changes_nothing(config: RunConfig, extra_mib: int | None) -> None:
    roomy = plan_for(config.model_path, config)
    plan = roomy if extra_mib is None else plan_for(config.model_path, config, roomy.minimum_arena_bytes // MIB)
    expected = run(plan, PROMPT, FORCED)
    with open_session(plan) as session:
        session.warm_up()
        assert (session.n_past, session.prefill_seconds, session.decode_seconds) == (0, 0.0, 0.0)
        assert session.counters == StreamCounters()
        assert run_tokens(session, PROMPT, FORCED).tobytes() == expected.logits.tobytes()
        assert session.counters == expected.counters
