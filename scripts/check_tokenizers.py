"""Tokenise llama.cpp's vocabulary test files and compare: `check_tokenizers.py DIR` prints one table.

DIR is the folder `models` of a llama.cpp source tree: NAME.gguf without weights, NAME.gguf.inp with texts and
NAME.gguf.out with their tokens. Exit code 1 if a supported file differs. Build times are processor time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvs_core.errors import UnsupportedError
from kvs_core.model_file import open_model
from kvs_core.tokenizer import Tokenizer

SEPARATOR = "\n__ggml_vocab_test__\n"
N_BUILDS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    paths = sorted(arguments.folder.glob("*.gguf"))
    if not paths:
        print(f"error: no .gguf file in {arguments.folder}", file=sys.stderr)
        return 2

    print(f"{'file':<34}{'model':<8}{'pre':<16}{'tokens':>8}{'build ms':>10}{'equal':>9}  first difference")
    n_different = 0
    for path in paths:
        with open_model(path) as model:
            metadata = dict(model.metadata)
        try:
            times = [_timed_build(metadata, path) for _ in range(N_BUILDS)]
        except UnsupportedError as error:
            print(f"{path.name:<34}{error}")
            continue
        tokenizer = times[0][1]
        n_equal, n_cases, difference = _compare(tokenizer, path)
        n_different += n_equal != n_cases
        equal = f"{n_equal}/{n_cases}" if n_cases else "no .out"
        build_ms = 1000 * statistics.median(seconds for seconds, _ in times)
        print(
            f"{path.name:<34}{tokenizer.kind.value:<8}{tokenizer.pre or '-':<16}{tokenizer.n_vocab:>8}{build_ms:>10.0f}"
            f"{equal:>9}  {difference}"
        )
    return 1 if n_different else 0


def _timed_build(metadata: dict[str, object], path: Path) -> tuple[float, Tokenizer]:
    begin = time.process_time()
    tokenizer = Tokenizer.from_metadata(metadata, path=str(path))
    return time.process_time() - begin, tokenizer


def _compare(tokenizer: Tokenizer, path: Path) -> tuple[int, int, str]:
    """Equal cases, all cases, and the first difference in words."""
    answers = path.with_name(path.name + ".out")
    if not answers.exists():
        return 0, 0, ""
    texts = path.with_name(path.name + ".inp").read_bytes().decode("utf-8").split(SEPARATOR)
    n_equal, difference = 0, "-"
    lines = answers.read_text(encoding="utf-8").splitlines()
    # Some files end in a separator, which leaves an empty text behind the last answer.
    if len(texts) not in (len(lines), len(lines) + 1):
        return 0, len(lines), f"{len(texts)} texts but {len(lines)} answers"
    for text, line in zip(texts, lines, strict=False):
        wanted = [int(token) for token in line.split()]
        tokens = tokenizer.encode(text, add_special=False, parse_special=False)
        if tokens == wanted:
            n_equal += 1
        elif difference == "-":
            at = next(
                (idx for idx, pair in enumerate(zip(tokens, wanted, strict=False)) if pair[0] != pair[1]),
                min(len(tokens), len(wanted)),
            )
            difference = f"{text!r}: token {at} is {tokens[at : at + 3]}, needs {wanted[at : at + 3]}"
    return n_equal, len(lines), difference


if __name__ == "__main__":
    sys.exit(main())
