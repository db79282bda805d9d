"""Merging by rank with the ``tokenizers`` library, for vocabularies of the GGUF models ``gpt2`` and ``gemma4``.

Splitting off special tokens happens before, in ``kvs_core.tokenizer``; the regexes are in ``kvs_core.pretokenizers``.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as PreSequence

from kvs_core.pretokenizers import GEMMA4_PATTERN
from kvs_core.vocabulary import TokenizerKind, Vocabulary


def _byte_alphabet() -> dict[str, int]:
    """The characters byte-level vocabularies write bytes with: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + idx): byte for idx, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()


class BpeEncoder:
    """A BPE model of the ``tokenizers`` library over the file's merges.

    The library wants every half and every result of a merge to be a token; files may hold merges whose result is not.
    It also forgets bytes that are no token before it merges, so that their neighbours would join. Both get ids behind
    the vocabulary; where one is left at the end it is spelled byte by byte, or dropped if there is no such byte.
    """

    def __init__(self, vocabulary: Vocabulary, byte_ids: Sequence[int | None]) -> None:
        ids = _without_broken(vocabulary.ids)
        merges: Sequence[tuple[str, str]] = vocabulary.merges
        if len(ids) < len(vocabulary.texts) or not _is_text("".join(map("".join, merges))):
            merges = [pair for pair in merges if _is_text("".join(pair))]
        is_byte_level = vocabulary.kind is TokenizerKind.BPE
        needed = {text for pair in merges for text in pair}
        needed.update(map("".join, merges))
        if is_byte_level:
            needed.update(BYTE_OF_CHARACTER)
        missing = sorted(needed - ids.keys())
        n_vocab = len(vocabulary.texts)
        ids.update((text, n_vocab + idx) for idx, text in enumerate(missing))
        if is_byte_level:
            spelling = {text: [vocabulary.ids.get(character) for character in text] for text in missing}
        else:
            spelling = {text: [byte_ids[byte] for byte in text.encode("utf-8")] for text in missing}
        self._spelled = {
            ids[text]: [token_id for token_id in spelled if token_id is not None] for text, spelled in spelling.items()
        }
        pre_tokenizer = vocabulary.pre_tokenizer
        model = BPE(
            ids,
            list(merges),
            ignore_merges=pre_tokenizer is not None and pre_tokenizer.ignore_merges,
            byte_fallback=not is_byte_level,
        )
        self._library = Tokenizer(model)
        patterns = (GEMMA4_PATTERN,) if pre_tokenizer is None else pre_tokenizer.patterns
        steps: list[Split | ByteLevel] = [Split(Regex(pattern), "isolated") for pattern in patterns]
        if is_byte_level:
            steps.append(ByteLevel(add_prefix_space=False, use_regex=False))
        self._library.pre_tokenizer = PreSequence(steps)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text without special tokens (for gemma4, with spaces written as U+2581)."""
        tokens = self._library.encode(text, add_special_tokens=False).ids
        if not self._spelled:
            return tokens
        spelled: list[int] = []
        for token in tokens:
            spelled.extend(self._spelled.get(token, (token,)))
        return spelled


def _is_text(text: str) -> bool:
    """Whether a token is real text; one whose bytes are not UTF-8 was read with lone surrogates in it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _without_broken(ids: dict[str, int]) -> dict[str, int]:
    """A copy without tokens that no text can contain and the library cannot hold."""
    if _is_text("".join(ids)):
        return dict(ids)
    return {text: token_id for text, token_id in ids.items() if _is_text(text)}
