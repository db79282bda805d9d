"""Bytes, numbers and strings read one after the other from a file of which no length is believed.

What the numbers mean is gguf_header.py's subject.
"""

from __future__ import annotations

import struct
from mmap import mmap

from kvs_core.errors import ModelFileError

MAX_KEY_BYTES = 65535  # the format's own limit for keys; names get the same
# Limits no real file comes near (the largest known vocabulary has 262144 tokens and half a million merges, and
# its header 16 MB). They bound time and memory when a damaged length happens to fit a file of many gigabytes.
MAX_HEADER_BYTES = 1 << 28
MAX_STRINGS = 1 << 22

INCOMPLETE_HINT = "the file is incomplete or was damaged on the way; download or copy it again and compare its size"
MALFORMED_HINT = "the file does not keep to the GGUF format; use another conversion of the model"
U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")


class Cursor:
    """A position in the file that only moves past bytes the file has."""

    def __init__(self, data: mmap | bytes, path: str, shown_path: str) -> None:
        self.data = data
        self.size = len(data)
        self.pos = 0
        self._limit = min(self.size, MAX_HEADER_BYTES)
        self._n_strings = 0
        self._path = path
        self._shown_path = shown_path

    def error(self, message: str, *, key: str | None = None, hint: str | None = None) -> ModelFileError:
        return ModelFileError(f"{self._shown_path}: {message}", path=self._path, key=key, hint=hint)

    def expect(self, n_bytes: int, what: str) -> None:
        """Raise unless ``n_bytes`` more bytes are there for ``what``."""
        if self.pos + n_bytes <= self._limit:
            return
        if self.pos + n_bytes <= self.size:
            raise self.error(
                f"{what} would make the header longer than {MAX_HEADER_BYTES} bytes",
                hint="no known model has such a header; the file was probably damaged on the way",
            )
        raise self.error(
            f"{what} needs {n_bytes} bytes at byte {self.pos}, but the file ends at byte {self.size}",
            hint=INCOMPLETE_HINT,
        )

    def skip(self, n_bytes: int, what: str) -> int:
        """Move past ``n_bytes`` bytes and return where they begin."""
        self.expect(n_bytes, what)
        begin = self.pos
        self.pos += n_bytes
        return begin

    def number(self, kind: struct.Struct, what: str) -> int | float:
        value: int | float = kind.unpack_from(self.data, self.skip(kind.size, what))[0]
        return value

    def integer(self, kind: struct.Struct, what: str) -> int:
        return int(self.number(kind, what))

    def take(self, n_bytes: int, what: str) -> bytes:
        begin = self.skip(n_bytes, what)
        return self.data[begin : begin + n_bytes]

    def name(self, what: str) -> str:
        """A key or a tensor name: short, and UTF-8 without exception because messages and look-ups use it."""
        self._count_strings(1, what)
        n_bytes = self.integer(U64, f"the length of {what}")
        if n_bytes > MAX_KEY_BYTES:
            raise self.error(f"{what} has a length of {n_bytes}; at most {MAX_KEY_BYTES}", hint=INCOMPLETE_HINT)
        raw = self.take(n_bytes, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as cause:
            raise self.error(f"{what} is not UTF-8: {raw[:32]!r}", hint=INCOMPLETE_HINT) from cause

    def strings(self, count: int, what: str) -> list[str]:
        """``count`` strings in a row. Half of a header is token strings, so the loop is written for speed."""
        self.expect(count * U64.size, f"{what} with {count} strings")
        self._count_strings(count, what)
        data, limit, unpack, pos = self.data, self._limit, U64.unpack_from, self.pos
        texts: list[str] = []
        append = texts.append
        for idx in range(count):
            begin = pos + 8
            end = begin + unpack(data, pos)[0] if begin <= limit else begin
            if end > limit:
                self.pos = pos
                self.expect(end - pos, f"string {idx} of {count} of {what}")
            append(data[begin:end].decode("utf-8", "surrogateescape"))
            pos = end
        self.pos = pos
        return texts

    def _count_strings(self, count: int, what: str) -> None:
        self._n_strings += count
        if self._n_strings > MAX_STRINGS:
            raise self.error(
                f"{what} brings the header to {self._n_strings} strings; at most {MAX_STRINGS} are read",
                hint="no known model has so many; the file was probably damaged on the way",
            )
