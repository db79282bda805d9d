"""Merging by score against a plain search over all pairs, and against a BPE model where the two must agree."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.spm_merge import SpmMerger
from tests.fixtures.tiny_vocab import SPM_PIECES
from tests.tokenizer.test_bpe import U11_TEXTS
from tests.tokenizer.vocabularies import STEADY, build, spm_metadata, texts

BYTE_IDS = list(range(256))


def merged_by_search(text: str, ids: dict[str, int], scores: list[float]) -> list[str]:
    """The definition: again and again the best pair of all, the leftmost among equals. No pieces, no queue."""
    symbols = list(text)
    while True:
        pairs = [
            (-scores[ids[left + right]], at)
            for at, (left, right) in enumerate(pairwise(symbols))
            if left + right in ids
        ]
        if not pairs:
            return symbols
        _, at = min(pairs)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


def tokens_by_search(text: str, ids: dict[str, int], scores: list[float]) -> list[int]:
    tokens: list[int] = []
    for symbol in merged_by_search(text, ids, scores):
        tokens.extend([ids[symbol]] if symbol in ids else symbol.encode())
    return tokens


def random_vocabulary(seed: int, *, equal_scores: bool) -> tuple[dict[str, int], list[float]]:
    """Pieces over a few letters, each of two or more joined from smaller ones; some single letters are no token."""
    rng = random.Random(seed)
    pieces = rng.sample(list("ab▁é"), 3)
    for _ in range(rng.randint(1, 25)):
        joined = rng.choice(pieces) + rng.choice(pieces)
        if len(joined) <= 8 and joined not in pieces:
            pieces.append(joined)
    ids = {piece: 256 + idx for idx, piece in enumerate(pieces)}
    ranks = list(range(len(pieces)))
    rng.shuffle(ranks)
    scores = [0.0] * 256 + [float(-(rank // 3 if equal_scores else rank)) for rank in ranks]
    return ids, scores


@STEADY
@given(st.integers(0, 1 << 30), st.booleans(), st.lists(st.text("ab▁éz", max_size=40), min_size=1, max_size=5))
def test_merging_equals_the_definition_with_distinct_and_equal_scores(
    seed: int, equal_scores: bool, examples: list[str]
) -> None:
    ids, scores = random_vocabulary(seed, equal_scores=equal_scores)
    merger = SpmMerger(ids, scores, BYTE_IDS, 0)
    for text in examples:
        assert merger.encode(text) == tokens_by_search(text, ids, scores)


@STEADY
@given(st.text("etaonisr hd\n1é", max_size=60))
def test_with_distinct_scores_a_bpe_model_with_derived_merges_agrees(text: str) -> None:
    text = text.replace(" ", "▁")
    assert [SPM_PIECES[token - 259] if token >= 259 else token for token in TINY_MERGER.encode(text)] == [
        SPM_PIECES[token - 259] if token >= 259 else token
        for token in DERIVED_BPE.encode(text, add_special_tokens=False).ids
    ]


def derived_bpe() -> tokenizers.Tokenizer:
    """The tiny vocabulary as a BPE model: every split of every piece is a merge, best score first."""
    tokens = spm_metadata()["tokenizer.ggml.tokens"]
    vocab = {text: idx for idx, text in enumerate(tokens)}
    merges = [
        (piece[:at], piece[at:])
        for piece in SPM_PIECES
        for at in range(1, len(piece))
        if piece[:at] in vocab and piece[at:] in vocab
    ]
    return tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )


DERIVED_BPE = derived_bpe()
TINY_MERGER = SpmMerger(
    {text: idx for idx, text in enumerate(spm_metadata()["tokenizer.ggml.tokens"])},
    spm_metadata()["tokenizer.ggml.scores"],
    range(3, 259),
    0,
)


def test_runs_of_spaces_with_equal_scores_grow_from_the_left() -> None:
    # Llama 2's own vocabulary scores all runs of 2 to 16 spaces alike.
    runs = ["▁" * length for length in range(1, 17)]
    ids = {run: idx for idx, run in enumerate(runs)}
    merger = SpmMerger(ids, [0.0, *[-1e9] * 15], BYTE_IDS, 0)
    for length in range(1, 60):
        wanted = [16] * (length // 16) + ([length % 16] if length % 16 else [])
        assert [len(runs[token]) for token in merger.encode("▁" * length)] == wanted


@pytest.mark.parametrize("text", [text for text in U11_TEXTS if text])
def test_texts_come_back_behind_the_space_prefix(text: str) -> None:
    tokenizer = build(spm_metadata())
    assert tokenizer.decode(tokenizer.encode(text, add_special=False, parse_special=False)) == " " + text
    plain = build(spm_metadata(add_space_prefix=False))
    assert plain.decode(plain.encode(text, add_special=False, parse_special=False)) == text


def test_the_space_prefix_belongs_to_the_first_text_and_to_text_behind_a_special_token() -> None:
    tokenizer = build(spm_metadata())
    assert texts(tokenizer, "the</s>the<s>", parse_special=True) == ["▁the", "</s>", "▁the", "<s>"]
    assert texts(tokenizer, "", parse_special=True) == []
    assert texts(tokenizer, " the") == ["▁", "▁the"]


def test_control_text_is_spelled_out_unless_asked_for() -> None:
    assert texts(build(spm_metadata()), "</s>") == ["▁", "<0x3C>", "<0x2F>", "s", "<0x3E>"]


def test_a_character_without_byte_tokens_becomes_the_unknown_token() -> None:
    tokens = ["<unk>", "<s>", "</s>", "▁", "a"]
    metadata = spm_metadata(tokens=tokens, token_type=[2, 3, 3, 1, 1], scores=[0.0] * 5)
    assert texts(build(metadata), "aé") == ["▁", "a", "<unk>", "<unk>"]
