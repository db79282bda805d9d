"""Token ids that llama.cpp gives to awkward strings with the two tiny vocabularies: tests/data/tiny_tokens.json.

`make_golden_tokens.py [--llama-lib FILE]`; several pre-tokenizers share the tiny byte-level BPE vocabulary.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.llama_oracle import LlamaLibrary, LlamaOracle
from tests.fixtures.tiny_models import TinyModel, write_model
from tests.fixtures.tiny_vocab import bpe_vocab, spm_vocab

OUTPUT = Path(__file__).resolve().parents[1] / "tests" / "data" / "tiny_tokens.json"
PRE_TOKENIZERS = (
    "llama-bpe",
    "smollm",
    "gpt-2",
    "qwen2",
    "qwen35",
    "deepseek-llm",
    "deepseek-coder",
    "starcoder",
    "falcon",
)
STRINGS = (
    "a\n\nb",
    "a\n\n\n\n",
    "\n\n\n\n\n\n\n",
    "  x",
    " x",
    "x  ",
    "a    b         c",
    "\t\tx",
    " \n \n x",
    "a \n\n  b\n",
    "12345",
    "1200 1919 00000 3.14, 10:45",
    "I'll say it's what they'd've done, ISN'T IT",
    "naïve café",
    "e\u0301tude, n\u0303o",
    "🦙🦙",
    "👩\u200d🚀 and 🇫🇷",
    "今天的海很平静，你好吗？",
    "今日は静かです",
    "a\u00a0b\u00a0\u00a0c",
    "the others were in the harbour and the rain was there",
    "The  Theatre; the\nthe\tthe",
    "...!!! (a)[b]{c} <d> x_y-z",
    "<s>marked</s> <|begin|>twice<|end|>",
    "\u2581already marked\u2581",
    "a\x00b",
    "",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-lib", help="libllama.so to ask; without it LLAMA_LIB, then the package xllamacpp")
    arguments = parser.parse_args()

    library = LlamaLibrary(arguments.llama_lib)
    vocabularies = {"spm": spm_vocab()} | {f"bpe/{pre}": bpe_vocab(pre=pre) for pre in PRE_TOKENIZERS}
    answers: dict[str, dict[str, list[list[int]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, vocab in vocabularies.items():
            path = write_model(Path(folder) / "model.gguf", TinyModel(vocab=vocab, n_layer=1, n_ff=32))
            with LlamaOracle(path, library=library) as oracle:
                answers[name] = {
                    "plain": [oracle.tokenize(text) for text in STRINGS],
                    "special": [oracle.tokenize(text, add_special=True, parse_special=True) for text in STRINGS],
                }
    header = {"made_by": f"llama.cpp, {library.build}", "strings": list(STRINGS)}
    lines = [f'"{key}": {json.dumps(value)}' for key, value in header.items()]
    lines += [f'"{name}": {json.dumps(value, separators=(",", ":"))}' for name, value in answers.items()]
    OUTPUT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{OUTPUT}  {OUTPUT.stat().st_size} bytes, {len(vocabularies)} vocabularies x {len(STRINGS)} strings")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
