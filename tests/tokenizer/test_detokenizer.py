"""A stream of tokens gives the very text of the whole sequence, in whole characters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.detokenizer import Detokenizer
from tests.tokenizer.vocabularies import STEADY, bpe_metadata, build, spm_metadata

SPM = build(spm_metadata())
BPE = build(bpe_metadata())
LLAMA_BYTES = [3 + byte for byte in "🦙".encode()]  # the byte tokens F0 9F A6 99


def pieces(tokens: list[int], **options: bool) -> list[str]:
    detokenizer = Detokenizer(SPM, **options)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


def test_a_character_appears_when_its_last_byte_does() -> None:
    assert pieces(LLAMA_BYTES) == ["", "", "", "🦙", ""]


@pytest.mark.parametrize(
    ("n_tokens", "wanted"), [(4, "🦙"), (6, "🦙\ufffd"), (7, "🦙\ufffd"), (40, "🦙" * 10), (1, "\ufffd"), (0, "")]
)
def test_a_cut_off_character_becomes_one_replacement_mark_at_the_end(n_tokens: int, wanted: str) -> None:
    streamed = pieces((LLAMA_BYTES * 10)[:n_tokens])
    assert "".join(streamed) == wanted
    assert "\ufffd" not in "".join(streamed[:-1])


def test_a_byte_that_cannot_continue_the_character_is_replaced_at_once() -> None:
    assert pieces([3 + 0xF0, 3 + 0x9F, 3 + ord("a"), 3 + 0x80]) == ["", "", "\ufffda", "\ufffd", ""]


@STEADY
@given(st.lists(st.integers(0, 255)))
def test_the_stream_equals_the_whole_for_any_bytes(data: list[int]) -> None:
    tokens = [3 + byte for byte in data]
    assert "".join(pieces(tokens)) == SPM.decode(tokens) == bytes(data).decode("utf-8", "replace")


@STEADY
@given(st.lists(st.integers(0, BPE.n_vocab - 1)), st.booleans())
def test_the_stream_equals_the_whole_for_any_tokens(tokens: list[int], special: bool) -> None:
    detokenizer = Detokenizer(BPE, special=special)
    streamed = "".join(detokenizer.push(token) for token in tokens) + detokenizer.flush()
    assert streamed == BPE.decode(tokens, special=special)


def test_control_tokens_show_only_on_request() -> None:
    assert pieces([1, 3 + ord("a"), 2]) == ["", "a", "", ""]
    assert pieces([1, 3 + ord("a"), 2], special=True) == ["<s>", "a", "</s>", ""]


def test_after_a_flush_a_new_stream_begins() -> None:
    detokenizer = Detokenizer(SPM)
    assert detokenizer.push(3 + 0xF0) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.push(3 + 0x9F) == "\ufffd"
    assert detokenizer.push(3 + ord("a")) == "a"
