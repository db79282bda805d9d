"""The core and the commands never load the kernels, Numba's CUDA part or a driver by being imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import importlib, sys
importlib.import_module({module!r})
banned = [name for name in sys.modules if name.split(".")[0] == "cuda_kernels" or name.startswith("numba.cuda.")]
assert not banned, banned
"""


@pytest.mark.parametrize("module", ["kvs_core.session", "kvs_core.backend", "kvs_core.cpu.backend", "kvs_cli.app"])
def test_importing_does_not_load_the_kernels(module: str) -> None:
    command = [sys.executable, "-c", SCRIPT.format(module=module)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
