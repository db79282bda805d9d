"""The golden help texts. ``python -m tests.cli.golden`` rewrites them; look at the difference before committing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

GOLDEN = Path(__file__).with_name("golden")
HELP_FILES = {
    "help.txt": ("--help",),
    "help_run.txt": ("run", "--help"),
    "help_validate.txt": ("validate", "--help"),
    "help_perplexity.txt": ("perplexity", "--help"),
    "help_kl_divergence.txt": ("kl-divergence", "--help"),
    "help_doctor.txt": ("doctor", "--help"),
}


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for name, words in HELP_FILES.items():
        command = [sys.executable, "-m", "kvs_cli", *words]
        text = subprocess.run(command, check=True, capture_output=True, env={**os.environ, "COLUMNS": "80"}).stdout
        (GOLDEN / name).write_bytes(text)


if __name__ == "__main__":
    main()
