"""Write the tiny test models of tests/fixtures to a folder: `make_tiny_models.py OUTDIR [name ...]`.

Without names all are written, and `text.txt` beside them. The same call always writes the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fixtures.tiny_architectures import tiny_architectures
from tests.fixtures.tiny_hybrid_models import tiny_hybrid_models
from tests.fixtures.tiny_latent_models import tiny_latent_models
from tests.fixtures.tiny_models import make_text, tiny_catalogue, write_model
from tests.fixtures.tiny_window_models import tiny_window_models


def main() -> int:
    catalogue = tiny_catalogue()
    models = tiny_architectures() | tiny_window_models() | tiny_hybrid_models() | tiny_latent_models()
    catalogue |= {name: lambda path, model=model: write_model(path, model) for name, model in models.items()}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("outdir", type=Path)
    parser.add_argument("names", nargs="*", metavar="name", help=f"any of: {', '.join(catalogue)}")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(catalogue)):
        parser.error(f"unknown model {', '.join(unknown)}; known: {', '.join(catalogue)}")

    arguments.outdir.mkdir(parents=True, exist_ok=True)
    for name in arguments.names or catalogue:
        path = catalogue[name](arguments.outdir / f"{name}.gguf")
        print(f"{path}  {path.stat().st_size} bytes")
    if not arguments.names:
        text_path = arguments.outdir / "text.txt"
        text_path.write_text(make_text(), encoding="utf-8")
        print(f"{text_path}  {text_path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
