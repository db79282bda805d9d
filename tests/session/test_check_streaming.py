"""The script that proves streaming exact: it passes on a tiny model, and a broken claim makes it fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvs_core.kv_cache import KvCache
from kvs_core.plan import RunPlan
from scripts import check_streaming
from tests.fixtures.tiny_models import TinyModel, write_model

SMALL = ("--prompt", "492", "--decode", "8", "--page-tokens", "16", "--ubatch", "32", "--types", "f32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "check.gguf"
    return write_model(path, TinyModel(n_layer=8, n_head=4, n_head_kv=4, weight_std=0.08, n_ctx_train=1024))


def run_check(model: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    code = check_streaming.main(["--model", str(model), *SMALL])
    return code, capsys.readouterr().out.splitlines()


def test_the_table_shows_every_arena_and_all_is_well(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = run_check(model, capsys)
    assert (code, lines[-1]) == (0, "everything held")
    rows = [line for line in lines if line.startswith("32 ")]
    names = ["off", "everything", "half", "a tenth", "smallest", "a tenth, --paranoid", "a tenth, 1 bit flipped"]
    assert [row.split("492 ")[1].strip().split("  ")[0] for row in rows] == names
    assert all(row.endswith(" ok") for row in rows)
    digests = [row.split()[-2] for row in rows]
    assert len(set(digests[:-1])) == 1
    assert digests[-1] != digests[0]


def test_bytes_that_were_not_planned_are_a_failure(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = RunPlan.streamed_bytes_of_run
    monkeypatch.setattr(RunPlan, "streamed_bytes_of_run", lambda plan, *counts: planned(plan, *counts) + 1)
    code, lines = run_check(model, capsys)
    assert (code, lines[-1]) == (1, "FAILED")
    assert any("DIFFERS" in line and " bytes streamed, " in line for line in lines)


def test_a_span_that_is_skipped_is_a_failure(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = KvCache.spans
    monkeypatch.setattr(KvCache, "spans", lambda cache, layer: (s for s in spans(cache, layer) if s[0] == 0))
    code, lines = run_check(model, capsys)
    assert (code, lines[-1]) == (1, "FAILED")
    assert any("positions differ, first at " in line for line in lines)
