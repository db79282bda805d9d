"""Unigram vocabularies: the likeliest pieces against a plain search, and what happens to a text first."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.errors import ModelFileError
from kvs_core.unigram_encoder import CharacterMap
from kvs_core.vocabulary import TokenizerKind, TokenType
from tests.tokenizer.vocabularies import STEADY, build, texts

MARK = "\u2581"
SPECIALS = ("<pad>", "</s>", "<unk>")
PIECES = {"a": -2.0, "b": -2.5, "ab": -3.1, "aba": -6.0, MARK: -3.0, f"{MARK}a": -3.5, "é": -4.0, "\u0301": -5.0}


def metadata(**changes: Any) -> dict[str, Any]:
    """A tiny vocabulary; keyword arguments replace `tokenizer.ggml.*` keys, None removes one."""
    keys: dict[str, Any] = {
        "model": "t5",
        "tokens": [*SPECIALS, *PIECES],
        "scores": np.array([0.0] * len(SPECIALS) + list(PIECES.values()), np.float32),
        "token_type": np.array([3, 3, 2] + [1] * len(PIECES), np.int32),
        "add_space_prefix": True,
        "remove_extra_whitespaces": True,
    } | changes
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items() if value is not None}


def likeliest(text: str, scores: dict[str, float]) -> float:
    """The definition: the best sum over all ways to cut the text; a character that is no piece costs 10 more."""
    unknown = min(scores.values()) - 10.0
    best = [0.0] + [-np.inf] * len(text)
    for end in range(1, len(text) + 1):
        for begin in range(end):
            piece = text[begin:end]
            if piece in scores:
                best[end] = max(best[end], best[begin] + scores[piece])
        if text[end - 1] not in scores:
            best[end] = max(best[end], best[end - 1] + unknown)
    return best[-1]


def packed_map(replacements: dict[str, str]) -> np.ndarray[Any, Any]:
    """The character map that holds these replacements, as SentencePiece would write it."""
    trie: dict[int, Any] = {}
    for sequence in replacements:
        node = trie
        for byte in sequence.encode():
            node = node.setdefault(byte, {})
        node[0] = sequence
    strings = b"".join(text.encode() + b"\0" for text in replacements.values())
    starts, at = {}, 0
    for sequence, text in replacements.items():
        starts[sequence] = at
        at += len(text.encode()) + 1

    entries: dict[int, int] = {0: 0}
    bases: set[int] = set()  # an entry does not say whose it is: no two nodes may have their followers in one place

    def place(node: dict[int, Any], index: int) -> None:
        free = (b for b in range(1, 1 << 20) if b not in bases and all(b ^ byte not in entries for byte in node))
        base = next(free)
        bases.add(base)
        entries[index] |= (base ^ index) << 10 | (0x100 if 0 in node else 0)
        for byte in node:
            entries[base ^ byte] = byte
        for byte, child in node.items():
            if byte == 0:
                entries[base] = 0x80000000 | starts[child]
            else:
                place(child, base ^ byte)

    place(trie, 0)
    array = np.zeros(max(entries) // 256 * 256 + 256, dtype="<u4")
    for index, entry in entries.items():
        array[index] = entry
    array[array == 0] = 0xFF  # no byte leads here but 0xFF, which no text has
    raw = array.tobytes()
    return np.frombuffer(len(raw).to_bytes(4, "little") + raw + strings, dtype=np.uint8)


@STEADY
@given(text=st.text(alphabet="ab é", max_size=12))
def test_pieces_are_the_likeliest(text: str) -> None:
    tokenizer = build(metadata(remove_extra_whitespaces=False, add_space_prefix=False))
    found = texts(tokenizer, text)
    assert "".join(found) == text.replace(" ", MARK)
    assert sum(PIECES[piece] for piece in found) == pytest.approx(likeliest(text.replace(" ", MARK), PIECES))


@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_the_likeliest_in_random_vocabularies(seed: int) -> None:
    rng = random.Random(seed)
    pieces = {char: -rng.uniform(1, 5) for char in "abc"}
    for _ in range(15):
        pieces["".join(rng.choices("abc", k=rng.randint(2, 5)))] = -rng.uniform(1, 12)
    keys = metadata(
        tokens=[*SPECIALS, *pieces],
        scores=np.array([0.0] * 3 + list(pieces.values()), np.float32),
        token_type=np.array([3, 3, 2] + [1] * len(pieces), np.int32),
        remove_extra_whitespaces=False,
        add_space_prefix=False,
    )
    tokenizer = build(keys)
    for _ in range(20):
        text = "".join(rng.choices("abc", k=rng.randint(1, 15)))
        found = texts(tokenizer, text)
        assert "".join(found) == text
        assert sum(pieces[piece] for piece in found) == pytest.approx(likeliest(text, pieces), rel=1e-5)


@pytest.mark.parametrize(
    ("prefix", "merges", "wanted"),
    [
        (True, True, "▁ab▁a"),
        (False, True, "▁ab▁a"),
        (True, False, "▁▁▁ab▁▁a▁"),
        (False, False, "▁▁ab▁▁a▁"),
    ],
)
def test_spaces_are_merged_and_put_in_front_as_the_file_says(prefix: bool, merges: bool, wanted: str) -> None:
    tokenizer = build(metadata(add_space_prefix=prefix, remove_extra_whitespaces=merges))
    assert "".join(texts(tokenizer, "  ab  a ")) == wanted


def test_unknown_characters_in_a_row_are_one_unknown_token() -> None:
    assert texts(build(metadata()), "axyzb") == [f"{MARK}a", "<unk>", "b"]


def test_control_text_is_no_piece_and_a_user_defined_token_always_is() -> None:
    keys = metadata()
    keys["tokenizer.ggml.tokens"] = [*keys["tokenizer.ggml.tokens"], "aXb"]
    keys["tokenizer.ggml.scores"] = np.append(keys["tokenizer.ggml.scores"], np.float32(-99.0))
    keys["tokenizer.ggml.token_type"] = np.append(keys["tokenizer.ggml.token_type"], np.int32(TokenType.USER_DEFINED))
    tokenizer = build(keys)
    assert "</s>" not in texts(tokenizer, "a</s>")
    assert texts(tokenizer, "a</s>", parse_special=True) == [f"{MARK}a", "</s>"]
    assert texts(tokenizer, "aaXb") == [f"{MARK}a", "aXb"]


def test_eos_goes_behind_and_no_bos_in_front_unless_the_file_says_otherwise() -> None:
    tokenizer = build(metadata())
    assert tokenizer.kind is TokenizerKind.UNIGRAM
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos, tokenizer.add_eos) == (None, 1, False, True)
    assert tokenizer.encode("a", add_special=True, parse_special=False)[-1] == 1
    assert tokenizer.encode("a", add_special=False, parse_special=False)[-1] != 1


def test_a_text_comes_back_with_marks_as_spaces() -> None:
    tokenizer = build(metadata())
    assert tokenizer.decode(tokenizer.encode("ab a", add_special=True, parse_special=False)) == " ab a"


def test_the_longest_sequence_of_the_character_map_is_replaced() -> None:
    packed = packed_map({"e\u0301": "é", "e": "a", "\t": " ", "ﬁ": "ab", "x": "", "\u0301": "b"})
    characters = CharacterMap(packed.tobytes())
    assert characters.apply("e\u0301eﬁ\tx\u0301z🦙") == "éaab bz🦙"
    assert CharacterMap(b"").apply("e") == "e"
    tokenizer = build(metadata(precompiled_charsmap=packed))
    assert texts(tokenizer, "e\u0301\te") == [MARK, "é", f"{MARK}a"]


def test_a_damaged_character_map_is_named() -> None:
    packed = packed_map({"e": "a"})
    far = np.frombuffer((4).to_bytes(4, "little") + (0x80000001).to_bytes(4, "little") + b"\0", dtype=np.uint8)
    for damaged in (packed[:-1], packed[:20]):
        with pytest.raises(ModelFileError, match=r"precompiled_charsmap: the character map is cut off"):
            build(metadata(precompiled_charsmap=damaged))
    with pytest.raises(ModelFileError, match=r"precompiled_charsmap is not an array of bytes"):
        build(metadata(precompiled_charsmap=packed.astype(np.int32)))
    with pytest.raises(ModelFileError, match=r"precompiled_charsmap: the character map points outside itself"):
        build(metadata(precompiled_charsmap=far))


@STEADY
@given(damage=st.binary(min_size=8, max_size=120), text=st.text(max_size=8))
def test_no_character_map_that_is_accepted_fails_later(damage: bytes, text: str) -> None:
    n_bytes = len(damage) // 2 // 4 * 4
    packed = n_bytes.to_bytes(4, "little") + damage + b"\0"
    try:
        characters = CharacterMap(packed)
    except ValueError:
        return
    assert isinstance(characters.apply(text), str)
