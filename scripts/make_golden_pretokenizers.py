"""Golden tokens for every pre-tokenizer, from llama.cpp, on a vocabulary that shows where text is cut.

Writes tests/data/pretokenizer_tokens.json. llama.cpp is found as scripts/llama_oracle.py says.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvs_core.pretokenizers import PRE_TOKENIZERS
from scripts.llama_oracle import LlamaLibrary, LlamaOracle
from tests.fixtures.tiny_models import TinyModel, write_model
from tests.tokenizer.vocabularies import pair_vocab

OUTPUT = Path(__file__).resolve().parents[1] / "tests" / "data" / "pretokenizer_tokens.json"
CHOSEN = (
    "I'll say we've DON'T they'RE it's o'clock 'S 'LL",
    "HTTPServer fooBar snake_case x=1; // done\n\n\t\treturn f(a[0]) != None\r\n",
    "1 12 123 1234 1234567 3.14 2024-07-26 0x7F",
    "x  12  345\n\n6",
    "a\n\nb\n \n\n  c \t\n   d",
    "end of text   \n",
    "naïve café ÉCOLE Straße ǅ",
    "Ελληνικά Русский հայերեն ქართული",
    "你好，世界。 한국어 にほんご カタカナ",
    "हिन्दी العربية ไทย עברית",
    "🦙👍🏽 👩‍👩‍👧 ☃ © € ½ Ⅷ ٣ ²",
    "a\u00a0b\u2003c\u3000d\u200be\ufefff\u0085g",
    "e\u0301a\u0308 \u0301x",
    "$100 + 50% = ~#@^`|<>{}",
    "\x00\x01\x7f\x0b\x0c",
)
POOLS = (
    "abcXYZ",
    "sStTmMdDlLvVrReE'",
    "0123456789",
    "  \t\n\r",
    ".,!?-_/()[]<>|^~`$+=",
    "éÜñßŁſ",
    "αДя",
    "世界。，",
    "かカー",
    "한नि्",
    "🦙½Ⅷ٣",
    "\u00a0\u3000\u200b",
    "\u0301ªʰ",
)
N_RANDOM = 40


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-lib", help="libllama.so to ask; without it LLAMA_LIB, then the package xllamacpp")
    arguments = parser.parse_args()

    texts = [*CHOSEN, *random_texts()]
    library = LlamaLibrary(arguments.llama_lib)
    tokens: dict[str, list[list[int]]] = {}
    for name in sorted({family.names[0] for family in PRE_TOKENIZERS.values()}):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "pairs.gguf"
            write_model(path, TinyModel(vocab=pair_vocab(name, texts), n_layer=1))
            with LlamaOracle(path, library=library) as oracle:
                tokens[name] = [oracle.tokenize(text, add_special=False, parse_special=False) for text in texts]
    rows = [f'"made_by": {json.dumps(f"llama.cpp, {library.build}")}', f'"texts": {json.dumps(texts)}']
    rows += [f"{json.dumps(name)}: {json.dumps(ids, separators=(',', ':'))}" for name, ids in tokens.items()]
    OUTPUT.write_text("{" + ",\n".join(rows) + "}\n", encoding="utf-8")
    return 0


def random_texts() -> list[str]:
    """Short mixtures of few kinds of character, where rules meet."""
    rng = random.Random(5)
    texts = []
    for _ in range(N_RANDOM):
        pools = rng.sample(POOLS, rng.choice((2, 3, 4)))
        runs = ("".join(rng.choices(rng.choice(pools), k=rng.choice((1, 1, 2, 3, 5)))) for _ in range(8))
        texts.append("".join(runs))
    return texts


if __name__ == "__main__":
    sys.exit(main())
