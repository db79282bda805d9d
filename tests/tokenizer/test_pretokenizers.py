"""Where every pre-tokenizer cuts, against llama.cpp on a vocabulary of byte pairs; the golden file names its build."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvs_core.pretokenizers import PRE_TOKENIZERS
from tests.fixtures.tiny_vocab import byte_symbols
from tests.tokenizer.vocabularies import bpe_metadata, build, pair_vocab, texts

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).resolve().parents[1] / "data" / "pretokenizer_tokens.json").read_text(encoding="utf-8")
)
TEXTS: list[str] = GOLDEN["texts"]
FAMILIES = sorted({family.names[0] for family in PRE_TOKENIZERS.values()})


def is_cut_differently_by_llama_cpp(name: str, text: str) -> bool:
    """The two documented differences (docs/tokenizer.md), as wide as they can be."""
    if name in ("gpt-4o", "tekken"):
        return not text.isascii()
    if name in ("deepseek-llm", "deepseek-coder"):
        return any(character.isspace() and not character.isascii() for character in text)
    return False


@pytest.mark.parametrize("name", FAMILIES)
def test_cuts_are_llama_cpps(name: str) -> None:
    tokenizer = build(pair_vocab(name, TEXTS).metadata())
    compared = [
        (text, tokenizer.encode(text, add_special=False, parse_special=False), wanted)
        for text, wanted in zip(TEXTS, GOLDEN[name], strict=True)
        if not is_cut_differently_by_llama_cpp(name, text)
    ]
    assert len(compared) >= 5
    assert [(text, tokens, wanted) for text, tokens, wanted in compared if tokens != wanted] == []


def test_the_golden_texts_tell_the_families_apart() -> None:
    # Names may differ only in defaults, or spell one rule in two ways; this vocabulary has no piece that is one token.
    alike = {("bailingmoe", "qwen2"), ("chatglm-bpe", "dbrx", "glm4", "llama-bpe")}
    groups: dict[str, list[str]] = {}
    for name in FAMILIES:
        groups.setdefault(json.dumps(GOLDEN[name]), []).append(name)
    assert {tuple(names) for names in groups.values() if len(names) > 1} == alike


def is_cut_between(name: str, left: str, right: str) -> bool:
    """Whether a piece ends between two texts: the only merge joins the bytes on either side."""
    symbols = byte_symbols()
    pair = (symbols[left.encode()[-1]], symbols[right.encode()[0]])
    metadata = bpe_metadata(
        pre=name, tokens=[*symbols, "".join(pair)], token_type=None, merges=[" ".join(pair)], bos_token_id=0
    )
    return "".join(pair) not in texts(build(metadata | {"tokenizer.ggml.eos_token_id": 0}), left + right)


def test_a_wide_space_belongs_to_chinese_punctuation_in_deepseek_llm() -> None:
    # As the original expression says; llama.cpp takes U+3000 for any other white space there.
    assert not is_cut_between("deepseek-llm", "。", "\u3000。")
    assert is_cut_between("deepseek-llm", "。", "世")


@pytest.mark.parametrize("name", ["gpt-4o", "tekken"])
def test_a_capital_inside_a_word_cuts_it_in_any_alphabet(name: str) -> None:
    # As the original expressions say; llama.cpp sees the case of ASCII letters only.
    for left, right in (("foo", "Bar"), ("зря", "Бар")):
        assert is_cut_between(name, left, right)
        assert not is_cut_between(name, left, right.lower())
