"""Turning a stream of tokens into text without ever splitting a character.

What bytes a token stands for is in ``kvs_core.tokenizer``.
"""

from __future__ import annotations

import codecs
from typing import Protocol


class TokenBytes(Protocol):
    """What a detokenizer needs of a tokenizer."""

    def token_bytes(self, token_id: int, *, special: bool = False) -> bytes: ...


class Detokenizer:
    """Text of a growing sequence, token by token.

    A token may end inside a character; its bytes are then held back until the rest arrives. Bytes that cannot begin or
    continue a character become U+FFFD exactly where decoding the whole sequence at once would put it, so all pieces
    joined equal ``Tokenizer.decode`` of all tokens.
    """

    def __init__(self, tokenizer: TokenBytes, *, special: bool = False) -> None:
        """``special`` also shows control tokens."""
        self._tokenizer = tokenizer
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Add a token; the characters that are now complete."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id, special=self._special))

    def flush(self) -> str:
        """End the stream: U+FFFD if a character was cut off, else nothing. The next push starts a new stream."""
        tail = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return tail
