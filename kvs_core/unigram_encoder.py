"""The likeliest pieces of a text with the ``tokenizers`` library, for vocabularies of the GGUF model ``t5``.

Splitting off special tokens happens before, in ``kvs_core.tokenizer``. What SentencePiece does to a text first is done
here: the library's own reader of the character map looks at whole graphemes, SentencePiece at the longest beginning.
"""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import Unigram

from kvs_core.vocabulary import TokenType, Vocabulary

_SPACE_MARK = "\u2581"
_MATCHED_TYPES = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
_IS_REPLACEMENT = 1 << 31
_NOT_A_CHARACTER = "\ufdd0"  # begins the stand-in of a token that no text may become


class CharacterMap:
    """Replacements of character sequences, as SentencePiece precompiles them.

    The bytes are a length, a double array of that many bytes in 32-bit entries, and replacements that end in NUL. An
    entry holds the byte that leads to it (bits 0-7), whether a sequence ends there (8), how far its followers are
    displaced (10-30, times 256 if bit 9 is set); behind the end of a sequence stands where its replacement begins, with
    bit 31.
    Raises    ValueError for a map that is cut off or names a replacement outside it
    Source    Kanda 2018, "Space- and Time-Efficient String Dictionaries"; the format of SentencePiece.
    """

    def __init__(self, packed: bytes) -> None:
        n_bytes = int.from_bytes(packed[:4], "little")
        if packed and (n_bytes % 4 or 4 + n_bytes > len(packed) or not packed.endswith(b"\0")):
            raise ValueError("the character map is cut off")
        entries = np.frombuffer(packed[4 : 4 + n_bytes], dtype="<u4")
        self._replacements = packed[4 + n_bytes :]
        if (entries[entries >= _IS_REPLACEMENT] - _IS_REPLACEMENT >= len(self._replacements)).any():
            raise ValueError("the character map points outside itself")
        self._entries: list[int] = entries.tolist()

    def apply(self, text: str) -> str:
        """``text`` with the longest sequence that begins at each place replaced."""
        if not self._entries:
            return text
        raw, out, at = text.encode("utf-8"), bytearray(), 0
        while at < len(raw):
            end, replacement = self._longest(raw, at)
            if replacement is None:
                end = at + 1
                while end < len(raw) and raw[end] & 0xC0 == 0x80:
                    end += 1
                out += raw[at:end]
            else:
                out += replacement
            at = end
        return out.decode("utf-8", "replace")

    def _longest(self, raw: bytes, begin: int) -> tuple[int, bytes | None]:
        entries, end, replacement_at = self._entries, begin, -1
        node = _displacement(entries[0])
        for at in range(begin, len(raw)):
            byte = raw[at]
            node ^= byte
            if byte == 0 or node >= len(entries) or entries[node] & (_IS_REPLACEMENT | 0xFF) != byte:
                break
            is_end = entries[node] >> 8 & 1
            node ^= _displacement(entries[node])
            if is_end and node < len(entries) and entries[node] >= _IS_REPLACEMENT:
                end, replacement_at = at + 1, entries[node] - _IS_REPLACEMENT
        if replacement_at < 0:
            return begin, None
        return end, self._replacements[replacement_at : self._replacements.index(b"\0", replacement_at)]


def _displacement(entry: int) -> int:
    return entry >> 10 << ((entry & 0x200) >> 6)


class UnigramEncoder:
    """A Unigram model of the ``tokenizers`` library over the file's pieces and their log probabilities."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._characters = CharacterMap(vocabulary.character_map)
        self._adds_prefix = vocabulary.add_space_prefix
        self._merges_spaces = vocabulary.merges_spaces
        pieces = [
            (text if kind in _MATCHED_TYPES else f"{_NOT_A_CHARACTER}{token_id}", score)
            for token_id, (text, kind, score) in enumerate(
                zip(vocabulary.texts, vocabulary.types, _scores_of(vocabulary), strict=True)
            )
        ]
        self._library = Tokenizer(Unigram(pieces, unk_id=vocabulary.unknown_id))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text without special tokens."""
        return self._library.encode(self.normalise(text), add_special_tokens=False).ids

    def normalise(self, text: str) -> str:
        """What the pieces are looked for in: characters replaced, spaces marked and, where the file says so, merged."""
        text = self._characters.apply(text)
        if self._merges_spaces:
            return "".join(_SPACE_MARK + word for word in text.split(" ") if word)
        marked = text.replace(" ", _SPACE_MARK)
        n_leading = len(text) - len(text.lstrip(" "))
        if self._adds_prefix and n_leading < len(text):
            return marked[:n_leading] + _SPACE_MARK + marked[n_leading:]
        return marked


def _scores_of(vocabulary: Vocabulary) -> list[float]:
    """Log probabilities; user-defined pieces are certain, and those of no text must not be the least likely."""
    return [
        float(score) if kind in (TokenType.NORMAL, TokenType.UNUSED) else 0.0
        for kind, score in zip(vocabulary.types, vocabulary.scores, strict=True)
    ]
