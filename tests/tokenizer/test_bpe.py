"""Byte-level BPE and gemma4: pieces, merges, round trips, and vocabularies the library cannot hold as they are."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.pretokenizers import PRE_TOKENIZERS
from kvs_core.vocabulary import TokenType
from tests.fixtures.tiny_vocab import BPE_MERGES, byte_symbols
from tests.tokenizer.vocabularies import STEADY, bpe_metadata, build, texts, with_tokens

U11_TEXTS = (
    "a\n\nb",
    "a\n\n\n\n",
    "  x",
    "\t\tx",
    "12345",
    "I'll",
    "naïve café",
    "🦙🦙",
    "你好，世界。",
    "e\u0301a\u0308",
    "a\u00a0b",
    "",
    " ",
    "\r\n\r\n",
    "a\x00b",
)
# The llama-bpe expression as the original files spell it, with a case-folding group.
ORIGINAL_LLAMA_BPE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def hugging_face() -> tokenizers.Tokenizer:
    """The same vocabulary as Hugging Face's own files build it."""
    merges = [tuple(merge.split("|")) for merge in BPE_MERGES]
    vocab = {text: idx for idx, text in enumerate([*byte_symbols(), *map("".join, merges)])}
    reachable = [(left, right) for left, right in merges if left in vocab and right in vocab]
    model = tokenizers.models.BPE(vocab, reachable, ignore_merges=True)
    built = tokenizers.Tokenizer(model)
    built.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(ORIGINAL_LLAMA_BPE), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return built


@pytest.mark.parametrize("text", U11_TEXTS)
def test_tokens_equal_hugging_faces(hugging_face: tokenizers.Tokenizer, text: str) -> None:
    tokens = build(bpe_metadata()).encode(text, add_special=False, parse_special=False)
    assert tokens == hugging_face.encode(text, add_special_tokens=False).ids


def test_runs_of_newlines_take_the_longest_merge() -> None:
    tokenizer = build(bpe_metadata())
    assert texts(tokenizer, "a\n\n\n\nb") == ["a", "ĊĊĊĊ", "b"]
    assert texts(tokenizer, "a\n\n\nb") == ["a", "ĊĊĊ", "b"]


BPE = build(bpe_metadata())


@STEADY
@given(st.text())
def test_every_text_comes_back(text: str) -> None:
    assert BPE.decode(BPE.encode(text, add_special=False, parse_special=False)) == text


@pytest.mark.parametrize("pre", sorted({family.names[0] for family in PRE_TOKENIZERS.values()}))
def test_every_pre_tokenizer_keeps_every_text(pre: str) -> None:
    tokenizer = build(bpe_metadata(pre=pre))
    for text in U11_TEXTS:
        assert tokenizer.decode(tokenizer.encode(text, add_special=False, parse_special=False)) == text


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("llama-bpe", ["123", "45"]),
        ("qwen2", ["1", "2", "3", "4", "5"]),
        ("smollm", ["1", "2", "3", "4", "5"]),
        ("gpt-2", ["12345"]),
        ("default", ["123", "45"]),
    ],
)
def test_digits_are_cut_as_the_pre_tokenizer_says(pre: str, pieces: list[str]) -> None:
    digits = [f"{left}|{right}" for left, right in (("1", "2"), ("12", "3"), ("4", "5"), ("123", "45"))]
    metadata = bpe_metadata(
        pre=pre,
        tokens=[*byte_symbols(), *(pair.replace("|", "") for pair in digits)],
        token_type=None,
        merges=[pair.replace("|", " ") for pair in digits],
        bos_token_id=0,
        eos_token_id=0,
    )
    assert texts(build(metadata), "12345") == pieces


def test_a_whole_piece_that_is_a_token_needs_no_merges() -> None:
    metadata = with_tokens(bpe_metadata(), {"Ġzebra": TokenType.NORMAL})
    assert texts(build(metadata), " zebra") == ["Ġzebra"]
    metadata["tokenizer.ggml.pre"] = "qwen2"
    assert texts(build(metadata), " zebra") == ["Ġ", "z", "e", "b", "r", "a"]


def test_a_merge_whose_result_is_no_token_is_spelled_in_bytes() -> None:
    metadata = bpe_metadata(
        tokens=[*byte_symbols(), "abc"], token_type=None, merges=["a b", "ab c"], bos_token_id=0, eos_token_id=0
    )
    tokenizer = build(metadata)
    assert texts(tokenizer, "abab") == ["a", "b", "a", "b"]
    assert texts(tokenizer, "abc") == ["abc"]


def test_a_byte_without_a_token_is_dropped_but_keeps_its_neighbours_apart() -> None:
    tokens = [symbol for symbol in byte_symbols() if symbol != "-"]
    metadata = bpe_metadata(
        pre="gpt-2", tokens=[*tokens, "ab"], token_type=None, merges=["a b"], bos_token_id=0, eos_token_id=0
    )
    tokenizer = build(metadata)
    assert texts(tokenizer, "ab") == ["ab"]
    assert texts(tokenizer, "a-b") == ["a", "b"]
    metadata["tokenizer.ggml.pre"] = "deepseek-coder"  # its pieces hold no break between "," and "-"
    metadata["tokenizer.ggml.tokens"] = [*tokens, ",."]
    metadata["tokenizer.ggml.merges"] = [", ."]
    assert texts(build(metadata), ",-.") == [",", "."]


def test_a_left_half_may_begin_with_a_space() -> None:
    metadata = bpe_metadata(
        tokens=[*byte_symbols(), " ", " x"], token_type=None, merges=["  x"], bos_token_id=0, eos_token_id=0
    )
    assert build(metadata).n_vocab == 258


def test_the_first_rank_of_a_repeated_merge_counts() -> None:
    tokens = [*byte_symbols(), "ab", "bc"]
    metadata = bpe_metadata(
        tokens=tokens, token_type=None, merges=["a b", "b c", "a b"], bos_token_id=0, eos_token_id=0
    )
    assert texts(build(metadata), "abc") == ["ab", "c"]


def test_tokens_with_broken_utf8_do_no_harm() -> None:
    metadata = with_tokens(bpe_metadata(), {"\udcff\udcfe": TokenType.NORMAL, "\udcfd": TokenType.USER_DEFINED})
    tokenizer = build(metadata)
    assert tokenizer.decode(tokenizer.encode("hello", add_special=False, parse_special=True)) == "hello"
    assert tokenizer.token_bytes(tokenizer.n_vocab - 2) == b"\xff\xfe"


GEMMA4_TOKENS = [
    "<pad>",
    "<eos>",
    "<bos>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    *"▁ehlo\n",
    "▁h",
    "el",
    "▁hel",
    "\n\n",
    "</s>",
]
GEMMA4 = {
    "tokenizer.ggml.model": "gemma4",
    "tokenizer.ggml.tokens": GEMMA4_TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 3, *[6] * 256, *[1] * (len(GEMMA4_TOKENS) - 259)],
    "tokenizer.ggml.merges": ["▁ h", "e l", "▁h el", "\n \n"],
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.eos_token_id": 1,
}


def test_gemma4_merges_characters_and_spells_unknown_ones_in_bytes() -> None:
    tokenizer = build(GEMMA4)
    assert texts(tokenizer, " hello") == ["▁hel", "l", "o"]
    assert texts(tokenizer, "h\n\n\nh") == ["h", "\n\n", "\n", "h"]
    assert texts(tokenizer, "é") == ["<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode(" hello é\n", add_special=False, parse_special=False)) == " hello é\n"


def test_gemma4_gets_its_bos_even_if_the_file_says_no() -> None:
    tokenizer = build(GEMMA4 | {"tokenizer.ggml.add_bos_token": False})
    assert tokenizer.encode("h", add_special=True, parse_special=False)[0] == 2
    assert "add_bos_token" in tokenizer.warnings[0]


def test_a_merge_that_no_text_can_contain_is_left_out() -> None:
    metadata = bpe_metadata()
    merges = metadata["tokenizer.ggml.merges"]
    whole = build(metadata)
    broken = build(metadata | {"tokenizer.ggml.merges": [*merges, "\udcff a", "a \udc80"]})
    for text in ("hello world", "aa a"):
        assert broken.encode(text, add_special=False, parse_special=False) == whole.encode(
            text, add_special=False, parse_special=False
        )
