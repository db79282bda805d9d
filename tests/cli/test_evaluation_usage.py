"""Contradictions in ``kvs perplexity`` and ``kvs kl-divergence`` are refused before anything is opened."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Kvs


@pytest.mark.parametrize(
    ("words", "errors"),
    [
        (["perplexity", "-m", "x", "--kl-divergence"], ["--kl-divergence: needs a base file"]),
        (
            ["perplexity", "-m", "x", "--max-kld", "1", "--plot", "a.png"],
            ["--max-kld: is about a comparison", "--plot: is about a comparison"],
        ),
        (["perplexity", "-m", "x", "--kld-format", "kvs"], ["--kld-format: is for writing a base file"]),
        (["perplexity", "-m", "x", "--kld-format", "zip"], ["--kld-format: 'zip' is not known; allowed: llama, kvs"]),
        (
            ["perplexity", "-m", "x", "--save-all-logits", "y", "--ppl-stride", "4"],
            ["--ppl-stride: cannot go with a base file"],
        ),
        (["perplexity", "-f", "x"], ["-m: is missing"]),
        (["perplexity", "-m", "x", "-n", "3"], ["-n: belongs to kvs run and kvs validate"]),
        (["perplexity", "-m", "x", "-c", "0"], ["-c: 0 is out of range"]),
        (["perplexity", "-m", "x", "--chunks", "0"], ["--chunks: 0 is out of range; allowed: -1 (all)"]),
        (["perplexity", "-m", "x", "--min-same-top", "0.99"], ["--min-same-top: 0.99 is a percentage"]),
        (["perplexity", "-m", "x", "--max-kld", "nan"], ["--max-kld: 'nan' is not a number"]),
        (["perplexity", "-m", "x", "--plot", "out.bmp"], ["--plot: 'out.bmp' does not end in"]),
        (["perplexity", "-m", "x", "--hellaswag"], ["--hellaswag: belongs to llama-perplexity"]),
        (["kl-divergence", "--base", "x"], ["--base: needs --other"]),
        (
            ["kl-divergence", "--base", "x", "--other", "y", "-m", "z", "-ctk", "q8_0"],
            ["-m: has no place where two files", "-ctk: has no place where two files"],
        ),
        (
            ["kl-divergence", "--base", "x", "--other", "y", "-ub", "64", "--no-kv-rotate", "--rope-scale", "2"],
            [f"{name}: has no place where two files" for name in ("-ub", "--no-kv-rotate", "--rope-scale")],
        ),
    ],
)
def test_contradictions_are_refused_before_anything_is_opened(kvs: Kvs, words: list[str], errors: list[str]) -> None:
    finished = kvs(*words)
    assert finished.code == 2
    assert finished.out == b""
    found = [line.removeprefix("error: ") for line in finished.err.splitlines() if line.startswith("error: ")]
    assert len(found) == len(errors), finished.err
    for line, error in zip(found, errors, strict=True):
        assert line.startswith(error)
