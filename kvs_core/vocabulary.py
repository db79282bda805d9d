"""The token table of a GGUF file: texts, types, special ids and the flags that steer encoding, checked on reading.

Turning text into ids is in ``kvs_core.tokenizer``; which keys exist is llama.cpp's convention.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvs_core.errors import ConfigError, Problem, UnsupportedError, UnsupportedModelError
from kvs_core.metadata_reader import MetadataReader
from kvs_core.pretokenizers import DEFAULT_PRE_TOKENIZER, PRE_TOKENIZERS, PreTokenizer

_PREFIX = "tokenizer.ggml."

# Tokens that end a generation wherever they occur in a vocabulary, whatever the file's own end ids say.
_END_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<｜end▁of▁sentence｜>",
        "[e~[",
    }
)
# Markers of fill-in-the-middle. The last three kinds end a generation too; all are control tokens even in files that
# call them normal. Used where the file gives no id of its own.
_FILL_TEXTS: dict[str, tuple[str, ...]] = {
    "fim_pre": (
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<｜fim▁begin｜>",
        "<PRE>",
        "▁<PRE>",
        "<|code_prefix|>",
        "<|prefix|>",
    ),
    "fim_suf": (
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<｜fim▁hole｜>",
        "<SUF>",
        "▁<SUF>",
        "<|code_suffix|>",
        "<|suffix|>",
    ),
    "fim_mid": (
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<｜fim▁end｜>",
        "<MID>",
        "▁<MID>",
        "<|code_middle|>",
        "<|middle|>",
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_OLD_FILL_KEYS = {"fim_pre": "prefix_token_id", "fim_suf": "suffix_token_id", "fim_mid": "middle_token_id"}
_ENDING_FILLS = ("fim_pad", "fim_rep", "fim_sep")
# gpt-oss wraps its answer in these; hiding them would glue the channels together.
_ALWAYS_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


class TokenizerKind(enum.Enum):
    """The tokenizer models that are supported, by their name in ``tokenizer.ggml.model``."""

    BPE = "gpt2"
    SPM = "llama"
    GEMMA4 = "gemma4"
    UNIGRAM = "t5"


class TokenType(enum.IntEnum):
    """GGUF's token types. Control and unknown tokens print nothing; user-defined ones match in every text."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A checked token table.

    ``ids``           text -> id, one to one with ``texts``
    ``pre``           name of the pre-tokenizer that is used, None for kinds that have none
    ``merges``        pairs in rank order (BPE kinds)
    ``scores``        float32 [n_vocab] (SPM, unigram), else empty
    ``character_map`` what replaces which characters first (unigram), else empty
    ``merges_spaces`` runs of spaces count as one, those at the ends as none (unigram)
    ``strip_after``   tokens that swallow the white space behind them
    ``end_ids``       tokens that end a generation
    ``warnings``      one line each, to be shown once
    """

    kind: TokenizerKind
    pre: str | None
    pre_tokenizer: PreTokenizer | None
    texts: tuple[str, ...]
    ids: dict[str, int]
    types: tuple[int, ...]
    scores: np.ndarray[Any, np.dtype[np.float32]]
    merges: tuple[tuple[str, str], ...]
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    character_map: bytes
    merges_spaces: bool
    strip_after: frozenset[int]
    end_ids: frozenset[int]
    warnings: tuple[str, ...]


class _Keys(MetadataReader):
    """The metadata with look-ups for what only tokenizers have."""

    def optional_text(self, key: str) -> str | None:
        return self.text(key) if self.has(key) else None

    def whole(self, key: str) -> int | None:
        """A whole number of any size, or None: ids outside the vocabulary are judged by the caller."""
        value = self.value(key) if self.has(key) else None
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise self.error(key, "is not a whole number")

    def strings(self, key: str) -> Sequence[str] | None:
        value: object = self.value(key) if self.has(key) else None
        if value is None:
            return None
        if isinstance(value, (list, tuple)) and set(map(type, value)) <= {str}:
            return value
        raise self.error(key, "is not an array of strings")

    def numbers(self, key: str, n_needed: int) -> np.ndarray[Any, Any] | None:
        """An array with one number per token, or None; a shorter one is an error."""
        if not self.has(key):
            return None
        array = np.asarray(self.value(key))
        if array.ndim != 1 or array.dtype.kind not in "iuf":
            raise self.error(key, "is not an array of numbers")
        if len(array) < n_needed:
            raise self.error(key, f"has {len(array)} entries; {n_needed} needed, one per token")
        return array[:n_needed]

    def raw_bytes(self, key: str) -> bytes:
        """An array of bytes, signed or not; none if the key is missing."""
        if not self.has(key):
            return b""
        array = np.asarray(self.value(key))
        if array.ndim != 1 or array.dtype not in (np.uint8, np.int8):
            raise self.error(key, "is not an array of bytes")
        return array.tobytes()


def read_vocabulary(metadata: Mapping[str, Any], *, path: str, pre_override: str | None = None) -> Vocabulary:
    """Read and check the ``tokenizer.*`` keys.

    ``path`` is only for messages. ``pre_override`` replaces ``tokenizer.ggml.pre``.
    Raises UnsupportedModelError for a tokenizer model or pre-tokenizer that is not known, ModelFileError for keys that
    are missing, of a wrong type, or contradict each other.
    """
    keys = _Keys(metadata, path)
    warnings: list[str] = []
    kind = _read_kind(keys)
    pre, pre_tokenizer = _read_pre(keys, kind, pre_override, warnings)
    texts, ids = _read_texts(keys)
    types = _read_types(keys, len(texts))
    scores = np.zeros(0, np.float32)
    merges: tuple[tuple[str, str], ...] = ()
    if kind in (TokenizerKind.SPM, TokenizerKind.UNIGRAM):
        read = keys.numbers(_PREFIX + "scores", len(texts))
        scores = np.zeros(len(texts), np.float32) if read is None else read.astype(np.float32)
        if np.isnan(scores).any():
            raise keys.error(_PREFIX + "scores", f"entry {int(np.isnan(scores).argmax())} is nan; a number needed")
    else:
        merges = _read_merges(keys)

    special = _read_special_ids(keys, kind, pre_tokenizer, len(texts), warnings)
    end_ids = _settle_types(ids, types, special)
    add_bos = kind in (TokenizerKind.SPM, TokenizerKind.GEMMA4)
    if pre_tokenizer is not None:
        add_bos = pre_tokenizer.default_add_bos
    add_bos = keys.flag(_PREFIX + "add_bos_token", add_bos)
    if kind is TokenizerKind.GEMMA4 and not add_bos:
        add_bos = True
        warnings.append("tokenizer.ggml.add_bos_token is false; a gemma4 model is useless without BOS, so it is added")
    add_eos = keys.flag(_PREFIX + "add_eos_token", kind is TokenizerKind.UNIGRAM)
    _check_added_ids(keys, special, add_bos=add_bos, add_eos=add_eos, warnings=warnings)
    return Vocabulary(
        kind=kind,
        pre=pre,
        pre_tokenizer=pre_tokenizer,
        texts=texts,
        ids=ids,
        types=tuple(types),
        scores=scores,
        merges=merges,
        bos_id=special["bos"],
        eos_id=special["eos"],
        unknown_id=special["unk"],
        add_bos=add_bos,
        add_eos=add_eos,
        add_space_prefix=keys.flag(_PREFIX + "add_space_prefix", kind is TokenizerKind.SPM),
        character_map=keys.raw_bytes(_PREFIX + "precompiled_charsmap"),
        merges_spaces=keys.flag(_PREFIX + "remove_extra_whitespaces", False),
        strip_after=_stripping_tokens(keys, ids, types),
        end_ids=end_ids,
        warnings=tuple(warnings),
    )


def _read_kind(keys: _Keys) -> TokenizerKind:
    key = _PREFIX + "model"
    name = keys.text(key)
    try:
        return TokenizerKind(name)
    except ValueError:
        known = ", ".join(kind.value for kind in TokenizerKind)
        raise UnsupportedModelError(
            [Problem(field=key, value=repr(name), reason=f"this tokenizer model is not supported; known: {known}")]
        ) from None


def _read_pre(
    keys: _Keys, kind: TokenizerKind, pre_override: str | None, warnings: list[str]
) -> tuple[str | None, PreTokenizer | None]:
    if kind is not TokenizerKind.BPE:
        if pre_override is not None:
            raise ConfigError(
                [
                    Problem(
                        field="--pre-tokenizer",
                        value=pre_override,
                        reason=f"a {kind.value!r} vocabulary has no pre-tokenizer to replace",
                        hint="drop --pre-tokenizer",
                    )
                ]
            )
        return None, None
    key = _PREFIX + "pre"
    field = key if pre_override is None else "--pre-tokenizer"
    name = keys.optional_text(key) if pre_override is None else pre_override
    if not name:
        warnings.append(
            f"{key} is missing: using the pre-tokenizer {DEFAULT_PRE_TOKENIZER!r}, so tokens may differ from those the "
            "model was trained on; --pre-tokenizer NAME names the right one"
        )
        name = DEFAULT_PRE_TOKENIZER
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise (UnsupportedModelError if pre_override is None else UnsupportedError)(
            [Problem(field=field, value=repr(name), reason=f"this pre-tokenizer is not known; known: {known}")],
            hint="--pre-tokenizer NAME chooses one of the known pre-tokenizers instead",
        )
    return name, PRE_TOKENIZERS[name]


def _read_texts(keys: _Keys) -> tuple[tuple[str, ...], dict[str, int]]:
    read = keys.strings(_PREFIX + "tokens")
    if not read:
        raise keys.error(_PREFIX + "tokens", "is missing or empty; a list of tokens needed")
    texts = tuple(read) if all(read) else tuple(text or f"[EMPTY_{idx}]" for idx, text in enumerate(read))
    ids = {text: idx for idx, text in enumerate(texts)}
    if len(ids) != len(texts):
        twice = next(text for idx, text in enumerate(texts) if ids[text] != idx)
        raise keys.error(_PREFIX + "tokens", f"holds {twice!r} twice; every token is needed once")
    return texts, ids


def _read_types(keys: _Keys, n_vocab: int) -> list[int]:
    read = keys.numbers(_PREFIX + "token_type", n_vocab)
    if read is None:
        return [int(TokenType.NORMAL)] * n_vocab
    known = (read >= TokenType.NORMAL) & (read <= TokenType.BYTE)
    types: list[int] = np.where(known, read, int(TokenType.UNDEFINED)).astype(np.int64).tolist()
    return types


def _read_merges(keys: _Keys) -> tuple[tuple[str, str], ...]:
    read = keys.strings(_PREFIX + "merges")
    if read is None:
        raise keys.error(_PREFIX + "merges", "is missing; a BPE vocabulary needs its merges")
    pairs: dict[tuple[str, str], None] = {}  # the first rank of a pair counts
    for rank, merge in enumerate(read):
        left, space, right = merge.partition(" ")
        if not left:  # the left half begins with a space: the separator is the next one
            left, space, right = merge[1:].partition(" ")
            left = " " + left
        if not space or not right:
            raise keys.error(_PREFIX + "merges", f"entry {rank} is {merge!r}; two halves with a space between needed")
        pairs[left, right] = None
    return tuple(pairs)


def _read_special_ids(
    keys: _Keys, kind: TokenizerKind, pre_tokenizer: PreTokenizer | None, n_vocab: int, warnings: list[str]
) -> dict[str, int | None]:
    """The ids named by the file, or llama.cpp's defaults; an id outside the vocabulary is not used, with a warning."""
    defaults: dict[str, int | None] = {}
    if kind is TokenizerKind.SPM:
        defaults = {"bos": 1, "eos": 2, "unk": 0}
    elif kind is TokenizerKind.UNIGRAM:
        defaults = {"eos": 1, "unk": 2}
    elif kind is TokenizerKind.BPE:
        defaults = {"bos": 11 if pre_tokenizer is not None and pre_tokenizer.default_bos else None, "eos": 11}
    ids: dict[str, int | None] = {}
    for name in ("bos", "eos", "eot", "eom", "unk", *_FILL_TEXTS):
        default = defaults.get(name)
        if default is not None and default >= n_vocab:
            default = None
        key = _PREFIX + {"unk": "unknown_token_id"}.get(name, f"{name}_token_id")
        value = keys.whole(key)
        if value is None and name in _OLD_FILL_KEYS:
            key = _PREFIX + _OLD_FILL_KEYS[name]
            value = keys.whole(key)
        if value is not None and not 0 <= value < n_vocab:
            warnings.append(f"{key} is {value}, outside the vocabulary of {n_vocab} tokens: not used")
            value = None
        ids[name] = default if value is None else value
    return ids


def _settle_types(ids: dict[str, int], types: list[int], special: dict[str, int | None]) -> frozenset[int]:
    """Give well-known markers the type they must have, in place, and return the ids that end a generation."""
    for name, texts in _FILL_TEXTS.items():
        if special[name] is None:
            found = next((ids[text] for text in texts if text in ids), None)
            if found is not None:
                special[name] = found
                types[found] = TokenType.CONTROL
    named = [special[name] for name in (*_ENDING_FILLS, "eos", "eot", "eom")]
    end_ids = {token_id for token_id in named if token_id is not None}
    for text in _END_TEXTS & ids.keys():
        end_ids.add(ids[text])
        types[ids[text]] = TokenType.CONTROL
    for text in _ALWAYS_SHOWN:
        if text in ids:
            types[ids[text]] = TokenType.USER_DEFINED

    # Where a reply is framed by stronger markers, the weaker one only separates its parts.
    has = {text: ids.get(text) in end_ids for text in ("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|end|>")}
    if has["<|end|>"] and (has["<|call|>"] or has["<|calls|>"]) and (has["<|return|>"] or has["<|flush|>"]):
        end_ids.discard(ids["<|end|>"])
        types[ids["<|end|>"]] = TokenType.USER_DEFINED
    if "</s>" in ids and ids.get("<|tool_response>") in end_ids:  # gemma4: an HTML tag like any other
        end_ids.discard(ids["</s>"])
        types[ids["</s>"]] = TokenType.NORMAL
    return frozenset(end_ids)


def _check_added_ids(
    keys: _Keys, special: dict[str, int | None], *, add_bos: bool, add_eos: bool, warnings: list[str]
) -> None:
    for name, added in (("bos", add_bos), ("eos", add_eos)):
        if not added:
            continue
        key = f"{_PREFIX}{name}_token_id"
        if special[name] is None:
            raise keys.error(key, f"is missing, but {name.upper()} is to be added to every text")
        if not keys.has(key):
            warnings.append(f"{key} is missing: {name.upper()} is taken to be token {special[name]}")


def _stripping_tokens(keys: _Keys, ids: dict[str, int], types: Sequence[int]) -> frozenset[int]:
    """phi-3 was trained with white space removed after its markers; its files say so only by the model's name."""
    name = keys.text("general.name", "").lower()
    if "phi-3" not in name and "phi3" not in name:
        return frozenset()
    marked = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
    kept = {ids.get(text) for text in ("<unk>", "<s>", "<|endoftext|>")}
    return frozenset(idx for idx, kind in enumerate(types) if kind in marked and idx not in kept)
