"""Reading tokenizer keys: what is refused, what is only warned about, and which tokens end a generation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvs_core.errors import ConfigError, ModelFileError, UnsupportedError, UnsupportedModelError
from kvs_core.pretokenizers import PRE_TOKENIZERS
from kvs_core.vocabulary import TokenizerKind, TokenType
from tests.fixtures.refusals import check_form
from tests.tokenizer.vocabularies import bpe_metadata, build, spm_metadata, with_tokens


def test_metadata_arrays_may_be_numpy_arrays() -> None:
    lists = spm_metadata()
    arrays = lists | {
        "tokenizer.ggml.scores": np.array(lists["tokenizer.ggml.scores"], np.float32),
        "tokenizer.ggml.token_type": np.array(lists["tokenizer.ggml.token_type"], np.int32),
    }
    text = "the sea and the </s>"
    assert build(arrays).encode(text, add_special=True, parse_special=True) == build(lists).encode(
        text, add_special=True, parse_special=True
    )


@pytest.mark.parametrize("name", ["bert", "rwkv", "plamo2", "none", "made-up"])
def test_an_unknown_tokenizer_model_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        build(spm_metadata(model=name))
    check_form(caught.value)
    for fragment in (repr(name), "gpt2", "llama", "gemma4"):
        assert fragment in str(caught.value)


def test_a_missing_pre_tokenizer_warns_once_and_is_the_default() -> None:
    tokenizer = build(bpe_metadata(pre=None))
    assert tokenizer.pre == "default"
    (warning,) = tokenizer.warnings
    assert "tokenizer.ggml.pre is missing" in warning
    assert "--pre-tokenizer" in warning


def test_an_unknown_pre_tokenizer_is_refused_with_the_known_ones_and_the_way_out() -> None:
    with pytest.raises(UnsupportedError) as caught:
        build(bpe_metadata(pre="made-up-2027"))
    check_form(caught.value)
    assert "made-up-2027" in str(caught.value)
    assert all(name in str(caught.value) for name in PRE_TOKENIZERS)
    assert "--pre-tokenizer" in (caught.value.hint or "")


def test_the_override_replaces_the_files_pre_tokenizer() -> None:
    assert build(bpe_metadata(pre="made-up-2027"), pre_override="qwen2").pre == "qwen2"
    assert build(bpe_metadata(pre=None), pre_override="smollm").warnings == ()
    with pytest.raises(UnsupportedError, match="--pre-tokenizer 'nope'") as caught:
        build(bpe_metadata(), pre_override="nope")
    assert not isinstance(caught.value, UnsupportedModelError), "the command is wrong, not the file"


def test_an_override_without_a_pre_tokenizer_to_replace_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        build(spm_metadata(), pre_override="qwen2")
    check_form(caught.value)
    assert caught.value.problems[0].field == "--pre-tokenizer"


@pytest.mark.parametrize(
    ("changes", "key", "fragment"),
    [
        ({"model": None}, "model", "missing"),
        ({"model": 3}, "model", "string"),
        ({"pre": 3}, "pre", "string"),
        ({"tokens": None}, "tokens", "missing"),
        ({"tokens": []}, "tokens", "empty"),
        ({"tokens": np.zeros(3)}, "tokens", "array of strings"),
        ({"tokens": ["a", "b", "a"]}, "tokens", "'a' twice"),
        ({"token_type": [1, 1]}, "token_type", "2 entries"),
        ({"token_type": "x"}, "token_type", "array of numbers"),
        ({"merges": None}, "merges", "missing"),
        ({"merges": ["t h", "th"]}, "merges", "entry 1 is 'th'"),
        ({"merges": ["t "]}, "merges", "entry 0"),
        ({"bos_token_id": "x"}, "bos_token_id", "whole number"),
        ({"add_bos_token": 1}, "add_bos_token", "true or false"),
    ],
)
def test_a_damaged_key_is_named(changes: dict[str, Any], key: str, fragment: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        build(bpe_metadata(**changes))
    check_form(caught.value)
    assert caught.value.key == f"tokenizer.ggml.{key}"
    assert caught.value.path == "tiny.gguf"
    assert "tiny.gguf" in str(caught.value)
    assert fragment in str(caught.value)


def test_too_few_scores_are_refused() -> None:
    with pytest.raises(ModelFileError, match="2 entries") as caught:
        build(spm_metadata(scores=[0.0, 1.0]))
    assert caught.value.key == "tokenizer.ggml.scores"


def test_a_score_that_is_no_number_is_refused() -> None:
    scores = list(spm_metadata()["tokenizer.ggml.scores"])
    with pytest.raises(ModelFileError, match="entry 2 is nan") as caught:
        build(spm_metadata(scores=[*scores[:2], float("nan"), *scores[3:]]))
    assert caught.value.key == "tokenizer.ggml.scores"


def test_a_byte_token_with_another_name_is_refused_when_it_is_printed() -> None:
    metadata = with_tokens(spm_metadata(), {"oops": TokenType.BYTE})
    tokenizer = build(metadata)
    with pytest.raises(ModelFileError, match="'oops'"):
        tokenizer.token_bytes(tokenizer.n_vocab - 1)


def test_an_id_outside_the_vocabulary_is_warned_about_and_not_used() -> None:
    tokenizer = build(spm_metadata(eos_token_id=999_999))
    assert tokenizer.eos_id == 2
    assert "eos_token_id is 999999" in tokenizer.warnings[0]


def test_missing_ids_take_the_defaults_of_the_kind() -> None:
    spm = build(spm_metadata(bos_token_id=None, eos_token_id=None, add_bos_token=None))
    assert (spm.kind, spm.bos_id, spm.eos_id, spm.add_bos, spm.add_eos) == (TokenizerKind.SPM, 1, 2, True, False)
    assert "bos_token_id is missing" in spm.warnings[0]
    bpe = build(bpe_metadata(pre="gpt-2", bos_token_id=None, eos_token_id=None, add_bos_token=None))
    assert (bpe.kind, bpe.bos_id, bpe.eos_id, bpe.add_bos) == (TokenizerKind.BPE, 11, 11, False)
    assert bpe.warnings == ()


@pytest.mark.parametrize(("pre", "add_bos"), [("llama-bpe", True), ("tekken", True), ("qwen2", False)])
def test_some_pre_tokenizers_bring_a_bos(pre: str, add_bos: bool) -> None:
    assert build(bpe_metadata(pre=pre, add_bos_token=None)).add_bos is add_bos


def test_a_bos_that_must_be_added_but_does_not_exist_is_refused() -> None:
    with pytest.raises(ModelFileError) as caught:
        build(bpe_metadata(pre="glm4", bos_token_id=None, add_bos_token=True))
    assert caught.value.key == "tokenizer.ggml.bos_token_id"


def test_an_empty_token_gets_a_name() -> None:
    metadata = with_tokens(bpe_metadata(), {"": TokenType.NORMAL})
    tokenizer = build(metadata)
    assert tokenizer.token_text(tokenizer.n_vocab - 1) == f"[EMPTY_{tokenizer.n_vocab - 1}]"


def end_texts(tokens: dict[str, TokenType], **changes: Any) -> set[str]:
    tokenizer = build(with_tokens(bpe_metadata(**changes), tokens))
    return {tokenizer.token_text(token_id) for token_id in tokenizer.eog_ids}


def test_known_end_markers_end_a_generation_whatever_their_type() -> None:
    tokens = {"<|im_end|>": TokenType.NORMAL, "<|fim_pad|>": TokenType.NORMAL, "<|fim_prefix|>": TokenType.NORMAL}
    assert end_texts(tokens) == {"<|end|>", "<|im_end|>", "<|fim_pad|>"}
    tokenizer = build(with_tokens(bpe_metadata(), tokens))
    encoded = tokenizer.encode("<|im_end|><|fim_prefix|>", add_special=False, parse_special=True)
    assert len(encoded) == 2
    assert tokenizer.decode(encoded) == ""


def test_ids_of_the_file_end_a_generation() -> None:
    tokens = {"<turn>": TokenType.CONTROL}
    n_vocab = build(bpe_metadata()).n_vocab
    assert end_texts(tokens, eot_token_id=n_vocab) == {"<|end|>", "<turn>"}
    assert end_texts(tokens, eom_token_id=n_vocab) == {"<|end|>", "<turn>"}
    assert end_texts(tokens, fim_sep_token_id=n_vocab) == {"<|end|>", "<turn>"}
    assert end_texts(tokens, fim_pre_token_id=n_vocab) == {"<|end|>"}


def test_gpt_oss_ends_with_return_and_call_but_not_with_end() -> None:
    tokens = dict.fromkeys(("<|return|>", "<|call|>", "<|channel|>"), TokenType.CONTROL)
    assert end_texts(tokens) == {"<|return|>", "<|call|>"}
    tokenizer = build(with_tokens(bpe_metadata(), tokens))
    assert tokenizer.decode(tokenizer.encode("<|channel|><|end|>", add_special=False, parse_special=True)) == (
        "<|channel|><|end|>"
    )


def test_gemma4s_html_tag_is_ordinary_text() -> None:
    tokens = {"</s>": TokenType.NORMAL, "<|tool_response>": TokenType.CONTROL}
    assert end_texts(tokens) == {"<|end|>", "<|tool_response>"}
    assert end_texts({"</s>": TokenType.NORMAL}) == {"<|end|>", "</s>"}
