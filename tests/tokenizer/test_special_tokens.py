"""Which special tokens match where, BOS and EOS, and what tokens print."""

from __future__ import annotations

import pytest

from kvs_core.errors import ConfigError
from kvs_core.tokenizer import Tokenizer
from kvs_core.vocabulary import TokenType
from tests.tokenizer.vocabularies import bpe_metadata, build, spm_metadata, texts, with_tokens

MARKED = with_tokens(
    bpe_metadata(pre="gpt-2"),
    {
        "<tool>": TokenType.USER_DEFINED,
        "<|im_start|>": TokenType.CONTROL,
        "<|im": TokenType.CONTROL,
        "start|>the": TokenType.CONTROL,
        "<odd>": TokenType.UNKNOWN,
        "<filler>": TokenType.UNUSED,
    },
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build(MARKED)


def test_control_text_is_plain_text_unless_asked_for(tokenizer: Tokenizer) -> None:
    plain = texts(tokenizer, "<|im_start|><odd>")
    assert "".join(plain) == "<|im_start|><odd>"
    assert "<|im_start|>" not in plain
    assert "<odd>" not in plain
    assert texts(tokenizer, "<|im_start|><odd>", parse_special=True) == ["<|im_start|>", "<odd>"]


def test_user_defined_text_matches_either_way(tokenizer: Tokenizer) -> None:
    assert texts(tokenizer, "the<tool>the") == ["t", "he", "<tool>", "t", "he"]
    assert texts(tokenizer, "the<tool>the", parse_special=True) == ["t", "he", "<tool>", "t", "he"]


def test_unused_tokens_never_match(tokenizer: Tokenizer) -> None:
    assert "<filler>" not in texts(tokenizer, "<filler>", parse_special=True)


def test_the_longest_special_token_wins_over_an_earlier_one(tokenizer: Tokenizer) -> None:
    # "<|im_start|>" (12 bytes) beats "<|im" at its own place and "start|>the" (10 bytes) that overlaps its end.
    assert texts(tokenizer, "<|im_start|>the", parse_special=True) == ["<|im_start|>", "t", "he"]
    # "start|>the" beats "<|im", which begins earlier but is shorter; both fit here.
    assert texts(tokenizer, "<|imstart|>the", parse_special=True) == ["<|im", "start|>the"]


def test_repeated_and_touching_special_tokens_are_all_found(tokenizer: Tokenizer) -> None:
    assert texts(tokenizer, "<tool><tool>a<tool>") == ["<tool>", "<tool>", "a", "<tool>"]


def test_bos_and_eos_are_added_as_the_file_says() -> None:
    metadata = bpe_metadata(add_bos_token=True, add_eos_token=True)
    tokenizer = build(metadata)
    assert (tokenizer.add_bos, tokenizer.add_eos) == (True, True)
    assert tokenizer.encode("a", add_special=True, parse_special=False) == [
        tokenizer.bos_id,
        *tokenizer.encode("a", add_special=False, parse_special=False),
        tokenizer.eos_id,
    ]
    assert tokenizer.encode("", add_special=True, parse_special=False) == [tokenizer.bos_id, tokenizer.eos_id]
    assert build(bpe_metadata(add_bos_token=False)).encode("", add_special=True, parse_special=True) == []


def test_a_text_that_begins_with_bos_gets_two_and_says_so() -> None:
    tokenizer = build(spm_metadata())
    doubled = tokenizer.encode("<s>the", add_special=True, parse_special=True)
    assert doubled[:2] == [1, 1]
    assert tokenizer.has_double_bos(doubled)
    assert not tokenizer.has_double_bos(tokenizer.encode("the", add_special=True, parse_special=True))
    assert not tokenizer.has_double_bos(tokenizer.encode("<s>the", add_special=True, parse_special=False))
    assert not build(spm_metadata(add_bos_token=False)).has_double_bos([1, 1])


@pytest.mark.parametrize("text", ["<s>the", "the"])
def test_a_rendered_template_has_one_bos_and_no_eos(text: str) -> None:
    tokenizer = build(spm_metadata(add_eos_token=True))
    tokens = tokenizer.encode_rendered(text)
    assert tokens[0] == 1
    assert [tokenizer.token_text(token) for token in tokens[1:]] == ["▁the"]


def test_a_rendered_template_gets_no_bos_that_the_model_does_not_want() -> None:
    tokenizer = build(spm_metadata(add_bos_token=False))
    assert tokenizer.encode_rendered("the") == tokenizer.encode("the", add_special=False, parse_special=True)


def test_control_and_unknown_tokens_print_only_on_request(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("<|im_start|>a<tool><odd>", add_special=False, parse_special=True)
    assert tokenizer.decode(tokens) == "a<tool>"
    assert tokenizer.decode(tokens, special=True) == "<|im_start|>a<tool><odd>"
    assert tokenizer.token_bytes(tokenizer.n_vocab - 1) == b""  # unused


@pytest.mark.parametrize("token_id", [-1, 10_000])
def test_an_id_outside_the_vocabulary_is_refused(tokenizer: Tokenizer, token_id: int) -> None:
    with pytest.raises(ConfigError, match=str(token_id)):
        tokenizer.token_bytes(token_id)


def test_a_lone_surrogate_is_refused_with_its_place(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"character 3 is U\+DCF3"):
        tokenizer.encode("lim\udcf3n", add_special=False, parse_special=False)


def test_phi3_markers_swallow_the_white_space_behind_them() -> None:
    phi3 = with_tokens(spm_metadata(**{"general.name": "Phi-3 mini"}), {"<|user|>": TokenType.CONTROL})
    tokenizer = build(phi3)
    assert texts(tokenizer, "<|user|>\n the", parse_special=True) == ["<|user|>", "▁the"]
    assert texts(tokenizer, "<s> the", parse_special=True) == ["<s>", "▁", "▁the"]
    other = build(phi3 | {"general.name": "another"})
    assert texts(other, "<|user|> the", parse_special=True) == ["<|user|>", "▁", "▁the"]
