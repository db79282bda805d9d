"""Text to tokens and back, built from GGUF metadata; equal to llama.cpp's tokens (docs/tokenizer.md says where not).

Reading the token table is in ``kvs_core.vocabulary``, streaming output in ``kvs_core.detokenizer``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from kvs_core.bpe_encoder import BYTE_OF_CHARACTER, BpeEncoder
from kvs_core.errors import ConfigError, IntegrityError, ModelFileError, Problem
from kvs_core.spm_merge import SpmMerger
from kvs_core.unigram_encoder import UnigramEncoder
from kvs_core.vocabulary import TokenizerKind, TokenType, Vocabulary, read_vocabulary

_SPACE_MARK = "\u2581"  # how SentencePiece-style vocabularies write a space
_ASCII_SPACE = " \t\n\v\f\r"
# Special tokens are looked for by groups with a common beginning: vocabularies hold thousands, texts hold few.
_GROUP_LENGTH = 4


class _FragmentEncoder(Protocol):
    """Encodes text that holds no special token."""

    def encode(self, text: str) -> list[int]: ...


class Tokenizer:
    """Encodes and decodes with one model's vocabulary.

    Steps of encoding: special tokens are cut out of the raw text, longest first, user-defined ones always and control
    tokens only on request; what is between them is encoded piece by piece; BOS and EOS go around it as the file says.
    """

    def __init__(self, vocabulary: Vocabulary, *, path: str) -> None:
        self._vocabulary = vocabulary
        self._path = path
        self._byte_ids = [vocabulary.ids.get(f"<0x{byte:02X}>") for byte in range(256)]
        self._encoder: _FragmentEncoder
        if vocabulary.kind is TokenizerKind.SPM:
            unknown_id = vocabulary.unknown_id or 0  # a vocabulary of this kind always has one
            self._encoder = SpmMerger(vocabulary.ids, vocabulary.scores.tolist(), self._byte_ids, unknown_id)
        elif vocabulary.kind is TokenizerKind.UNIGRAM:
            self._encoder = _open_unigram(vocabulary, path)
        else:
            self._encoder = BpeEncoder(vocabulary, self._byte_ids)
        self._special_groups = _group_specials(vocabulary)
        self._bytes_cache: dict[int, bytes] = {}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], *, path: str, pre_override: str | None = None) -> Tokenizer:
        """Build from the ``tokenizer.*`` keys of a GGUF file; ``path`` is only for messages.

        ``pre_override`` replaces the file's pre-tokenizer name.
        Raises UnsupportedModelError for an unknown tokenizer model or pre-tokenizer, ModelFileError for damaged keys.
        """
        return cls(read_vocabulary(metadata, path=path, pre_override=pre_override), path=path)

    @property
    def kind(self) -> TokenizerKind:
        return self._vocabulary.kind

    @property
    def pre(self) -> str | None:
        """Name of the pre-tokenizer in use; None for kinds without one."""
        return self._vocabulary.pre

    @property
    def n_vocab(self) -> int:
        return len(self._vocabulary.texts)

    @property
    def bos_id(self) -> int | None:
        return self._vocabulary.bos_id

    @property
    def eos_id(self) -> int | None:
        return self._vocabulary.eos_id

    @property
    def add_bos(self) -> bool:
        return self._vocabulary.add_bos

    @property
    def add_eos(self) -> bool:
        return self._vocabulary.add_eos

    @property
    def eog_ids(self) -> frozenset[int]:
        """Tokens that end a generation."""
        return self._vocabulary.end_ids

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should know about this vocabulary, one line each."""
        return self._vocabulary.warnings

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of ``text``.

        ``add_special`` puts BOS in front and EOS behind where the file says so; a text that itself begins with BOS
        then has two, as in llama.cpp (see ``has_double_bos``). ``parse_special`` turns the text of control tokens into
        the tokens; without it that text is ordinary text. User-defined tokens match either way.
        Raises ConfigError when the text holds a lone surrogate, which no UTF-8 file can.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ConfigError(
                [
                    Problem(
                        field="text",
                        value="",
                        reason=f"character {error.start} is U+{ord(text[error.start]):04X}, which is not a character",
                        hint="the text must be valid UTF-8",
                    )
                ]
            ) from error
        tokens = self._affix(self.bos_id) if add_special and self.add_bos else []
        spaced = self._vocabulary.add_space_prefix and self.kind is TokenizerKind.SPM
        begins = True
        for fragment in self._partition(text, parse_special):
            if isinstance(fragment, int):
                tokens.append(fragment)
                begins = True
                continue
            tokens.extend(self._encode_fragment(f" {fragment}" if spaced and begins else fragment))
            begins = False
        if add_special and self.add_eos:
            tokens.extend(self._affix(self.eos_id))
        return tokens

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a rendered chat template: control tokens count, BOS stands in front exactly once if the file
        asks for it, and EOS is not added, since the template already says where turns end.
        """
        tokens = self.encode(text, add_special=False, parse_special=True)
        if self.add_bos and tokens[:1] != [self.bos_id]:
            tokens = self._affix(self.bos_id) + tokens
        return tokens

    def has_double_bos(self, tokens: Sequence[int]) -> bool:
        """Whether encoded tokens begin with two BOS: one from the text and one that was added."""
        return self.add_bos and len(tokens) >= 2 and tokens[0] == tokens[1] == self.bos_id

    def token_text(self, token_id: int) -> str:
        """The token as the file spells it; for templates and messages, not for output."""
        self._check_id(token_id)
        return self._vocabulary.texts[token_id]

    def token_bytes(self, token_id: int, *, special: bool = False) -> bytes:
        """What a token adds to the output: UTF-8, perhaps only a part of a character.

        Control and unknown tokens add nothing unless ``special``.
        """
        self._check_id(token_id)
        kind = self._vocabulary.types[token_id]
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            return self._vocabulary.texts[token_id].encode("utf-8", "surrogateescape") if special else b""
        found = self._bytes_cache.get(token_id)
        if found is None:
            found = self._bytes_cache[token_id] = self._compute_bytes(token_id, kind)
        return found

    def decode(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """Text of a whole sequence; incomplete or invalid UTF-8 becomes U+FFFD.

        Nothing is tidied: a space prefix stays, so SPM text that begins with a word comes back with a space before it.
        """
        return b"".join(self.token_bytes(token, special=special) for token in tokens).decode("utf-8", "replace")

    def _affix(self, token_id: int | None) -> list[int]:
        if token_id is None:
            raise IntegrityError("a vocabulary that adds BOS or EOS was read without its id")
        return [token_id]

    def _check_id(self, token_id: int) -> None:
        if not 0 <= token_id < self.n_vocab:
            raise ConfigError(f"token {token_id} is outside the vocabulary of {self.n_vocab} tokens")

    def _encode_fragment(self, text: str) -> list[int]:
        marks_spaces = self.kind in (TokenizerKind.SPM, TokenizerKind.GEMMA4)
        return self._encoder.encode(text.replace(" ", _SPACE_MARK) if marks_spaces else text)

    def _partition(self, text: str, parse_special: bool) -> list[str | int]:
        """Cut out special tokens, longest first over the whole text; what is left are non-empty strings."""
        fragments: list[str | int] = [text] if text else []
        for token_id in self._present_specials(text, parse_special):
            special = self._vocabulary.texts[token_id]
            strips = token_id in self._vocabulary.strip_after
            cut: list[str | int] = []
            for fragment in fragments:
                if isinstance(fragment, int) or special not in fragment:
                    cut.append(fragment)
                    continue
                first, *others = fragment.split(special)
                if first:
                    cut.append(first)
                for piece in others:
                    cut.append(token_id)
                    piece = piece.lstrip(_ASCII_SPACE) if strips else piece
                    if piece:
                        cut.append(piece)
            fragments = cut
        return fragments

    def _present_specials(self, text: str, parse_special: bool) -> Iterator[int]:
        """Special tokens that occur in the text, longest (in bytes) first."""
        texts, types = self._vocabulary.texts, self._vocabulary.types
        present = [
            token_id
            for beginning, token_ids in self._special_groups.items()
            if beginning in text
            for token_id in token_ids
            if (parse_special or types[token_id] == TokenType.USER_DEFINED) and texts[token_id] in text
        ]
        return iter(sorted(present, key=lambda token_id: (-len(texts[token_id].encode("utf-8")), token_id)))

    def _compute_bytes(self, token_id: int, kind: int) -> bytes:
        text = self._vocabulary.texts[token_id]
        if kind == TokenType.BYTE:
            return self._byte_of(text)
        if kind == TokenType.USER_DEFINED:
            return text.encode("utf-8", "surrogateescape")
        if kind != TokenType.NORMAL:
            return b""
        if self.kind is not TokenizerKind.BPE:
            return text.replace(_SPACE_MARK, " ").encode("utf-8", "surrogateescape")
        if all(character in BYTE_OF_CHARACTER for character in text):
            return bytes(BYTE_OF_CHARACTER[character] for character in text)
        return text.encode("utf-8", "surrogateescape")  # an added token that old converters marked as normal

    def _byte_of(self, text: str) -> bytes:
        try:
            return bytes([self._byte_ids.index(self._vocabulary.ids[text])])
        except ValueError:
            raise ModelFileError(
                f"{self._path}: token {text!r} is marked as a byte, needs a name from <0x00> to <0xFF>",
                path=self._path,
                key="tokenizer.ggml.tokens",
            ) from None


def _open_unigram(vocabulary: Vocabulary, path: str) -> UnigramEncoder:
    try:
        return UnigramEncoder(vocabulary)
    except ValueError as error:
        key = "tokenizer.ggml.precompiled_charsmap"
        raise ModelFileError(f"{path}: {key}: {error}", path=path, key=key) from error


def _group_specials(vocabulary: Vocabulary) -> dict[str, list[int]]:
    """Ids of all special tokens by the beginning of their text."""
    groups: dict[str, list[int]] = {}
    marked = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)
    for token_id, kind in enumerate(vocabulary.types):
        if kind in marked:
            groups.setdefault(vocabulary.texts[token_id][:_GROUP_LENGTH], []).append(token_id)
    return groups
