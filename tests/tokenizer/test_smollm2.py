"""The real vocabulary of SmolLM2 against token ids that llama.cpp made; tests/data says which build."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvs_core.chat_template import choose_template, render_chat
from kvs_core.model_file import open_model
from kvs_core.tokenizer import Tokenizer

DATA = Path(__file__).resolve().parents[1] / "data"


@pytest.fixture(scope="module")
def metadata(smollm2: Path) -> dict[str, Any]:
    with open_model(smollm2) as model:
        return dict(model.metadata)


@pytest.fixture(scope="module")
def tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_metadata(metadata, path="smollm2.gguf")


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads((DATA / "mixed_text_smollm2_tokens.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def mixed_text() -> str:
    return (DATA / "mixed_text.txt").read_bytes().decode("utf-8")


def test_every_line_has_llama_cpps_tokens(tokenizer: Tokenizer, golden: dict[str, Any], mixed_text: str) -> None:
    lines = mixed_text.split("\n")
    assert len(lines) == len(golden["lines"]) > 200
    different = [
        (number, line)
        for number, (line, wanted) in enumerate(zip(lines, golden["lines"], strict=True), start=1)
        if tokenizer.encode(line, add_special=True, parse_special=False) != wanted
    ]
    assert different == []


@pytest.mark.parametrize(("parse_special", "key"), [(False, "whole"), (True, "whole_parse_special")])
def test_the_whole_text_has_llama_cpps_tokens(
    tokenizer: Tokenizer, golden: dict[str, Any], mixed_text: str, parse_special: bool, key: str
) -> None:
    assert tokenizer.encode(mixed_text, add_special=True, parse_special=parse_special) == golden[key]


def test_plain_encoding_decodes_to_the_very_text(tokenizer: Tokenizer, mixed_text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(mixed_text, add_special=False, parse_special=False)) == mixed_text


def test_the_models_own_template_gives_one_turn_per_message(metadata: dict[str, Any], tokenizer: Tokenizer) -> None:
    rendered = render_chat(choose_template(metadata), [{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    tokens = tokenizer.encode_rendered(rendered)
    assert [token for token in tokens if token in (1, 2)] == [1, 2, 1, 2, 1]
    assert tokenizer.decode(tokens, special=True) == rendered


def test_end_of_generation_holds_every_end_marker(tokenizer: Tokenizer) -> None:
    texts = {tokenizer.token_text(token_id) for token_id in tokenizer.eog_ids}
    assert texts == {"<|endoftext|>", "<|im_end|>", "<reponame>"}
