"""The script that compares KV types with llama.cpp: what it has measured is kept, found again, and told apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import compare_kv_types
from scripts.compare_kv_types import Case, Loss, Results, print_table

SETTING: dict[str, object] = {"model": "m.gguf", "text": "t.txt", "n_ctx": 64}
CASES = [Case(kv_type="q8_0", rotates=True), Case(kv_type="q8_0", rotates=False), Case(kv_type="turbo4", rotates=True)]
PRINTED = """
Mean    KLD:   {kld:.6f} ±   0.000012
Same top p: 99.250 ± 0.1 %
"""


def run_programs(folder: Path, monkeypatch: pytest.MonkeyPatch, *, breaks_at: int = -1) -> list[list[str]]:
    """Measure CASES with programs that print figures; returns their command lines. One of them may fail."""
    commands: list[list[str]] = []

    def execute(command: list[str], *, rotates: bool = True) -> str:
        if len(commands) == breaks_at:
            raise SystemExit("killed")
        commands.append(command)
        if "--save-all-logits" in command:
            Path(command[-1]).write_bytes(b"base")
        return PRINTED.format(kld=0.001 if rotates else 0.002)

    monkeypatch.setattr(compare_kv_types, "execute", execute)
    results = Results(folder, SETTING)
    compare_kv_types.measure(CASES, ["-c", "64"], folder, Path("bin"), results, base_name="2-chunks")
    return commands


def test_a_comparison_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run_programs(tmp_path / "whole", monkeypatch)
    assert len(whole) == 1 + 3 + 1 + 2  # base files, and turbo4 is measured here only
    assert [command[-1] for command in whole].count("--no-kv-rotate") == 1
    folder = tmp_path / "stopped"
    with pytest.raises(SystemExit, match="killed"):
        run_programs(folder, monkeypatch, breaks_at=5)
    rest = run_programs(folder, monkeypatch)
    assert [command[0] for command in rest] == ["bin/llama-perplexity"] * 2
    assert run_programs(folder, monkeypatch) == []

    capsys.readouterr()
    print_table(CASES, Results(folder, SETTING), "2 chunks")
    rows = capsys.readouterr().out.splitlines()[2:]
    assert rows[0] == "| q8_0 | yes | 0.001000 ± 0.000012 | 99.25 % | 0.001000 ± 0.000012 | 99.25 % | 1.000 |"
    assert rows[2] == "| turbo4 | yes | 0.001000 ± 0.000012 | 99.25 % |  |  |  |"


def test_figures_of_another_run_are_not_taken_for_this_one_s(tmp_path: Path) -> None:
    results = Results(tmp_path, SETTING)
    results.add("here, 2 chunks, q8_0 rotated", Loss(kld=0.5, error=0.1, same_top=90.0))
    assert Results(tmp_path, SETTING).get("here, 2 chunks, q8_0 rotated") == Loss(kld=0.5, error=0.1, same_top=90.0)
    assert Results(tmp_path, SETTING).get("here, 4 chunks, q8_0 rotated") is None
    with pytest.raises(SystemExit, match="is of"):
        Results(tmp_path, {**SETTING, "n_ctx": 128})
