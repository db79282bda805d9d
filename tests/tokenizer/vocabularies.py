"""Small vocabularies as metadata, changed key by key; the plain ones come from fixtures/tiny_vocab.py."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import settings

from kvs_core.tokenizer import Tokenizer
from kvs_core.vocabulary import TokenType
from tests.fixtures.tiny_vocab import TinyVocab, bpe_vocab, byte_symbols, spm_vocab

STEADY = settings(derandomize=True)
"""The same examples on every run."""


def build(metadata: dict[str, Any], **options: Any) -> Tokenizer:
    return Tokenizer.from_metadata(metadata, path="tiny.gguf", **options)


def bpe_metadata(**changes: Any) -> dict[str, Any]:
    """The tiny BPE vocabulary; keyword arguments replace `tokenizer.ggml.*` keys, None removes one."""
    return _changed(bpe_vocab().metadata(), changes)


def spm_metadata(**changes: Any) -> dict[str, Any]:
    return _changed(spm_vocab().metadata(), changes)


def with_tokens(metadata: dict[str, Any], tokens: dict[str, TokenType]) -> dict[str, Any]:
    """The same vocabulary with more tokens at its end."""
    changed = dict(metadata)
    changed["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], *tokens]
    changed["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], *map(int, tokens.values())]
    if "tokenizer.ggml.scores" in metadata:
        changed["tokenizer.ggml.scores"] = [*metadata["tokenizer.ggml.scores"], *[0.0] * len(tokens)]
    return changed


def texts(tokenizer: Tokenizer, text: str, *, parse_special: bool = False) -> list[str]:
    """The tokens of a text as the file spells them."""
    return [
        tokenizer.token_text(token) for token in tokenizer.encode(text, add_special=False, parse_special=parse_special)
    ]


def _changed(metadata: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for name, value in changes.items():
        key = name if "." in name else f"tokenizer.ggml.{name}"
        if value is None:
            metadata.pop(key, None)
        else:
            metadata[key] = value
    return metadata


def pair_vocab(pre: str, texts: Sequence[str]) -> TinyVocab:
    """A byte-level vocabulary in which any two neighbouring bytes of the texts merge, and nothing longer.

    Its tokens give away where a pre-tokenizer cuts: no pair spans a cut, and a moved cut changes which bytes pair up.
    """
    symbols = byte_symbols()
    pairs = {pair for text in texts for pair in pairwise(text.encode())}
    # Any order will do if it scatters: an odd factor permutes the residues.
    ordered = sorted(pairs, key=lambda pair: (pair[0] * 256 + pair[1]) * 40503 % 65536)
    tokens = [*symbols, *(symbols[left] + symbols[right] for left, right in ordered), "<|begin|>", "<|end|>"]
    return TinyVocab(
        model="gpt2",
        pre=pre,
        tokens=tuple(tokens),
        token_types=(int(TokenType.NORMAL),) * (len(tokens) - 2) + (int(TokenType.CONTROL),) * 2,
        merges=tuple(f"{symbols[left]} {symbols[right]}" for left, right in ordered),
        bos=len(tokens) - 2,
        eos=len(tokens) - 1,
        add_bos=False,
    )
