"""The verdicts of ``measure_cuda_speed``: medians by their ratio to a baseline."""

from __future__ import annotations

from scripts.measure_cuda_speed import Goal

GOAL = Goal(baseline=1000.0, required=0.9, stretch=1.3)


def test_a_median_is_judged_by_its_ratio() -> None:
    good, text = GOAL.judge("tokens", [900.0, 5000.0, 100.0])
    assert good
    assert text == (
        "tokens: 900 t/s, median of 3 (best 5000, worst 100); 0.90 times 1000, 0.9 needed; stretch 1.3 missed"
    )
    assert not GOAL.judge("tokens", [899.0])[0]
    assert GOAL.judge("tokens", [1300.0])[1].endswith("stretch 1.3 reached")
