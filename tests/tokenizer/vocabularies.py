"""Small vocabularies as metadata, changed key by key; the plain ones come from fixtures/tiny_vocab.py."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

from kvs_core.tokenizer import Tokenizer
from kvs_core.vocabulary import TokenType
from tests.fixtures.tiny_vocab import bpe_vocab, spm_vocab

STEADY = settings(deadline=None, derandomize=True)
"""The same examples on every run, however busy the machine is."""


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
