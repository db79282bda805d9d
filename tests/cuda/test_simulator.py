"""Plain kernels under Numba's CUDA simulator, which has to be switched on before Numba is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")


@pytest.mark.parametrize("module", ["simulated_checks", "simulated_stream", "simulated_experts"])
def test_plain_kernels_are_right_in_the_simulator(module: str) -> None:
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    command = [sys.executable, "-m", f"tests.cuda.{module}"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert ", 0 failed" in result.stdout
