"""Bytes of our own file of saved logits: header, segments, index. Reading and writing are in compact_file and _writer.

Layout, little endian; the rows themselves are ``compact_codec``'s::

    8 B    "kvskld1\\n"
    u32    bytes of the header | header, JSON | 32 B SHA-256 of it
    int32  tokens [n_chunk * n_ctx]                   their SHA-256 is in the header
    segments of up to 32 rows, in order:
           4 B "SEGM" | u32 chunk | u32 first row | u32 rows | u64 payload bytes
           row table (compact_codec.ROW_TABLE) | packed rows | 16 B BLAKE2b of the segment before it
    index: 4 B "INDX" | u64 offset of each chunk's first segment | 16 B BLAKE2b
    u64    offset of the index | 8 B "kvskldE\\n"

The index and the end mark are written last, so a file without them is known to be unfinished. Every part carries a
hash, so a damaged file is refused where the damage is met, never taken for a difference between models.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from kvs_core.evaluate.compact_codec import ROW_TABLE, quantisation_step
from kvs_core.evaluate.saved_logits import LogitsIdentity

COMPACT_MAGIC = b"kvskld1\n"
END_MAGIC = b"kvskldE\n"
SEGMENT = struct.Struct("<4sIIIQ")
SEGMENT_MAGIC = b"SEGM"
INDEX_MAGIC = b"INDX"
DIGEST_BYTES = 16
SEGMENT_ROWS = 32
_EXPECTED_BITS_PER_TOKEN = 6
"""For the free-space check only: 3.0 to 4.6 were measured on real models (docs/perplexity.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactHeader:
    """What the file says about itself."""

    n_ctx: int
    n_vocab: int
    n_chunk: int
    step: float
    tokens_sha256: str
    identity: LogitsIdentity

    @property
    def rows_per_chunk(self) -> int:
        return self.n_ctx - 1 - self.n_ctx // 2

    @property
    def expected_bytes(self) -> int:
        """A cautious guess of the finished size; the real one depends on the model and the text."""
        row = ROW_TABLE.itemsize + _EXPECTED_BITS_PER_TOKEN * self.n_vocab // 8
        return 4 * self.n_chunk * self.n_ctx + self.n_chunk * self.rows_per_chunk * row

    def to_bytes(self) -> bytes:
        text = json.dumps(asdict(self), sort_keys=True).encode()
        return COMPACT_MAGIC + struct.pack("<I", len(text)) + text + hashlib.sha256(text).digest()


def make_compact_header(
    *, n_ctx: int, n_chunk: int, n_vocab: int, tokens: NDArray[np.int32], identity: LogitsIdentity
) -> CompactHeader:
    """Header of a new file; ``tokens`` int32 [n_chunk * n_ctx]."""
    return CompactHeader(
        n_ctx=n_ctx,
        n_vocab=n_vocab,
        n_chunk=n_chunk,
        step=quantisation_step(n_vocab),
        tokens_sha256=hashlib.sha256(tokens.astype("<i4").tobytes()).hexdigest(),
        identity=identity,
    )


def check_segment(head: bytes, chunk_idx: int, row_idx: int) -> tuple[int, int] | None:
    """``(rows, bytes of the whole segment)``, or None when ``head`` does not begin the segment expected there."""
    if len(head) != SEGMENT.size:
        return None
    magic, chunk, first_row, n_rows, n_payload = SEGMENT.unpack(head)
    if magic != SEGMENT_MAGIC or chunk != chunk_idx or first_row != row_idx or not 1 <= n_rows <= SEGMENT_ROWS:
        return None
    return n_rows, SEGMENT.size + n_rows * ROW_TABLE.itemsize + n_payload + DIGEST_BYTES


def part_digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
