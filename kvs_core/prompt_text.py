"""Prompt and corpus bytes to text, changing nothing: no newline translation, no byte-order mark removed.

Tokenising the text is in ``kvs_core.tokenizer``.
"""

from __future__ import annotations

import codecs

from kvs_core.errors import ConfigError, Problem

# Longest first: the UTF-32 mark begins with the UTF-16 one.
_WIDE_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32 (little-endian)"),
    (codecs.BOM_UTF32_BE, "UTF-32 (big-endian)"),
    (codecs.BOM_UTF16_LE, "UTF-16 (little-endian)"),
    (codecs.BOM_UTF16_BE, "UTF-16 (big-endian)"),
)


_SAVE_AS_UTF8 = "save it as UTF-8, for example with iconv -f LATIN1 -t UTF-8"


def decode_prompt_bytes(data: bytes, source: str, *, advice: str = _SAVE_AS_UTF8) -> str:
    """Decode UTF-8 strictly; every byte, NUL included, is part of the text.

    Invalid bytes are refused rather than replaced, as a replaced text is not the one that was asked about.
    ``source`` names where the bytes came from, for the message, and ``advice`` says what to do about invalid ones.
    Command-line words go through ``os.fsencode`` first.
    Raises ConfigError with the offset of the first bad byte, or the encoding that a byte-order mark gives away.
    """
    for mark, encoding in _WIDE_MARKS:
        if data.startswith(mark):
            raise ConfigError(
                [
                    Problem(
                        field=source,
                        value="",
                        reason=f"the text is {encoding} (it begins with {mark.hex(' ')}); UTF-8 is needed",
                        hint="convert it, for example with iconv -t UTF-8",
                    )
                ]
            )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        shown = data[error.start : error.start + 4].hex(" ")
        cut_off = error.end == len(data) and "unexpected end" in error.reason
        what = "a character is cut off at the end" if cut_off else "the text is not valid UTF-8"
        raise ConfigError(
            [
                Problem(
                    field=source,
                    value="",
                    reason=f"{what}: byte offset {error.start}, bytes {shown}",
                    hint=advice,
                )
            ]
        ) from error
