"""Prompt bytes are taken as they are or refused with their place; nothing is changed on the way."""

from __future__ import annotations

import os

import pytest

from kvs_core.errors import ConfigError
from kvs_core.prompt_text import decode_prompt_bytes
from tests.fixtures.refusals import check_form
from tests.tokenizer.vocabularies import build, spm_metadata


@pytest.mark.parametrize("text", ["", "a\x00b\x00", "a\r\nb\rc\n", "\ufeffa", "naïve 🦙", "\u2028\x85\x1a"])
def test_valid_text_is_not_changed(text: str) -> None:
    assert decode_prompt_bytes(text.encode(), "p.txt") == text


def test_nul_does_not_end_the_tokens() -> None:
    tokenizer = build(spm_metadata())
    text = decode_prompt_bytes(b"th\0an\0", "p.txt")
    tokens = tokenizer.encode(text, add_special=False, parse_special=False)
    assert tokenizer.decode(tokens) == " th\0an\0"


@pytest.mark.parametrize(
    ("data", "fragments"),
    [
        (b"\xe6\xad", ("cut off at the end", "byte offset 0", "e6 ad")),
        (b"good \xe6\xad", ("cut off at the end", "byte offset 5")),
        (b"lim\xf3n", ("not valid UTF-8", "byte offset 3", "f3 6e")),
        (b"\x9d", ("not valid UTF-8", "byte offset 0", "9d")),
        (b"ab\xed\xa0\x80", ("not valid UTF-8", "byte offset 2")),  # an encoded surrogate
        ("\ufeffhi".encode("utf-16-le"), ("UTF-16 (little-endian)", "ff fe")),
        ("\ufeffhi".encode("utf-16-be"), ("UTF-16 (big-endian)", "fe ff")),
        ("\ufeffhi".encode("utf-32-le"), ("UTF-32 (little-endian)",)),
        ("\ufeffhi".encode("utf-32-be"), ("UTF-32 (big-endian)",)),
        (os.fsencode("lim\udcf3n"), ("byte offset 3",)),  # how a stray byte in a command-line word arrives
    ],
)
def test_other_bytes_are_refused_with_name_and_place(data: bytes, fragments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        decode_prompt_bytes(data, "p.txt")
    check_form(caught.value)
    for fragment in ("p.txt", *fragments):
        assert fragment in str(caught.value)
    assert "iconv" in (caught.value.problems[0].hint or "")
