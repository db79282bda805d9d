"""The script that compares decode with transformers: what it judges, and that a part which cannot run is a failure."""

from __future__ import annotations

import argparse
from pathlib import Path

from scripts.compare_transformers import (
    KVS_ARENA,
    KVS_OFF,
    OFFLOADED,
    PARTS,
    PLAIN,
    describe,
    judge,
    rows_of,
    run_parts,
)

ROWS = {
    PLAIN: {"name": PLAIN, "steps": [9.0, 0.07, 0.06, 0.2], "what": "bf16"},
    OFFLOADED: {"name": OFFLOADED, "steps": [9.0, 2.0, 2.0], "what": "bf16"},
    KVS_ARENA: {"name": KVS_ARENA, "steps": [9.0, 0.4, 0.4], "what": "Q4_K"},
    KVS_OFF: {"name": KVS_OFF, "steps": [9.0, 0.0071, 0.007], "what": "Q4_K"},
}


def test_medians_are_judged_by_the_ratio_that_is_needed() -> None:
    assert judge(ROWS) == [
        (True, f"{KVS_ARENA} against {OFFLOADED}: 5.00 times, 5 needed"),
        (True, f"{KVS_OFF} against {PLAIN}: 9.93 times, 3 needed"),
    ]
    slower = ROWS | {KVS_ARENA: {"name": KVS_ARENA, "steps": [0.1, 0.5, 0.5, 0.1], "what": ""}}
    assert judge(slower)[0] == (False, f"{KVS_ARENA} against {OFFLOADED}: 4.00 times, 5 needed")
    assert "14.29 t/s, median of 3; first step 9000.0 ms, then 60.00 to 200.00; bf16" in describe(ROWS[PLAIN])


def test_a_row_that_did_not_run_says_why_and_fails_what_it_is_judged_by() -> None:
    rows = ROWS | {OFFLOADED: {"name": OFFLOADED, "error": "ImportError: no such cache"}}
    assert "did not run: ImportError: no such cache" in describe(rows[OFFLOADED])
    verdicts = judge(rows)
    assert [good for good, _ in verdicts] == [False, True]
    assert "not measured" in verdicts[0][1]


def test_parts_in_processes_of_their_own_hand_back_their_reasons(tmp_path: Path) -> None:
    arguments = argparse.Namespace(model=tmp_path / "none.gguf", ctx=64, decode=2, arena=8, layers=1, device="no-such")
    arguments.only_streamed, arguments.type = False, "f16"
    rows = run_parts(arguments)
    assert set(rows) == set(ROWS)
    assert all(row["error"] for row in rows.values())
    assert "BackendUnavailableError" in rows[KVS_OFF]["error"] or "UnsupportedError" in rows[KVS_OFF]["error"]
    assert [good for good, _ in judge(rows)] == [False, False]


def test_rows_that_were_not_asked_for_are_not_judged() -> None:
    arguments = argparse.Namespace(only_streamed=True)
    assert [rows_of(arguments, part) for part in PARTS] == [[], [OFFLOADED], [KVS_ARENA]]
    assert [text for _, text in judge({name: ROWS[name] for name in (OFFLOADED, KVS_ARENA)})] == [
        f"{KVS_ARENA} against {OFFLOADED}: 5.00 times, 5 needed"
    ]
