"""Timing lines, streaming lines and their JSON."""

from __future__ import annotations

import json

from kvs_cli.report import StreamingReport, Timings
from kvs_core.kv_cache import StreamCounters

TIMINGS = Timings(
    load_seconds=0.5,
    prompt_seconds=2.0,
    decode_seconds=4.0,
    total_seconds=7.0,
    n_prompt=1000,
    n_generated=81,
    n_decode_steps=80,
)
NOTHING = Timings(
    load_seconds=0.5,
    prompt_seconds=0.0,
    decode_seconds=0.0,
    total_seconds=0.5,
    n_prompt=0,
    n_generated=0,
    n_decode_steps=0,
)


def test_timing_lines_read_like_those_of_llama_cpp() -> None:
    assert TIMINGS.lines() == [
        "       load time =     500.00 ms",
        "prompt eval time =    2000.00 ms /  1000 tokens (    2.00 ms per token,   500.00 tokens per second)",
        "       eval time =    4000.00 ms /    80 runs   (   50.00 ms per token,    20.00 tokens per second)",
        "      total time =    7000.00 ms /  1081 tokens",
    ]
    assert NOTHING.lines()[2] == "       eval time =       0.00 ms /     0 runs  "


def test_timings_as_json_have_no_rate_without_time() -> None:
    assert TIMINGS.to_json() == {
        "load_ms": 500.0,
        "prompt_ms": 2000.0,
        "prompt_tokens_per_second": 500.0,
        "decode_ms": 4000.0,
        "decode_tokens_per_second": 20.0,
        "total_ms": 7000.0,
    }
    assert NOTHING.to_json()["decode_tokens_per_second"] is None
    json.dumps(NOTHING.to_json(), allow_nan=False)


def test_the_share_of_the_copy_rate_needs_a_measured_rate() -> None:
    counters = StreamCounters(bytes_streamed=6 * 10**9)
    report = StreamingReport(counters=counters, seconds=2.0, copy_rate=12e9)
    assert report.bytes_per_second == 3e9
    assert report.share_of_copy_rate == 0.25
    assert StreamingReport(counters=counters, seconds=2.0, copy_rate=None).share_of_copy_rate is None
    assert StreamingReport(counters=counters, seconds=0.0, copy_rate=12e9).share_of_copy_rate is None
