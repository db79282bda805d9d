"""Our own file of saved logits (``--kld-format kvs``): under a third of llama.cpp's size, and it proves identity.

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
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from kvs_core.errors import HostStoreError
from kvs_core.evaluate.choices import LogitsFormat
from kvs_core.evaluate.compact_codec import (
    ROW_TABLE,
    dequantise_rows,
    hash_row,
    log_level_table,
    pack_levels,
    quantisation_step,
    quantise_rows,
    unpack_levels,
)
from kvs_core.evaluate.partial_file import PartialFile, check_free_space, reporting_os_errors
from kvs_core.evaluate.row_math import (
    IDENTICAL_NO,
    IDENTICAL_YES,
    RowWorkers,
    kl_of_log_probs,
    reduce_rows,
)
from kvs_core.evaluate.saved_logits import LogitsIdentity, StoredRows

COMPACT_MAGIC = b"kvskld1\n"
_END_MAGIC = b"kvskldE\n"
_SEGMENT = struct.Struct("<4sIIIQ")
_SEGMENT_MAGIC = b"SEGM"
_INDEX_MAGIC = b"INDX"
_DIGEST_BYTES = 16
SEGMENT_ROWS = 32
_EXPECTED_BITS_PER_TOKEN = 6
"""For the free-space check only: 4.3 to 5.2 were measured on real models (see compact_codec)."""


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


class CompactLogitsWriter:
    """Writes the file segment by segment; see ``LogitsWriter``. Free space is checked on construction."""

    def __init__(self, path: Path, *, header: CompactHeader, tokens: NDArray[np.int32]) -> None:
        """``tokens`` int32 [n_chunk * n_ctx]."""
        self.path = path
        self._header = header
        self._head = header.to_bytes() + tokens.astype("<i4").tobytes()
        self._log_table = log_level_table()
        self._chunk_idx = 0
        self._row_idx = 0
        self._file = PartialFile(path)
        try:
            self._chunk_offsets = self._find_complete_chunks()
            kept = self._chunk_offsets[-1] if len(self._chunk_offsets) > 1 else 0
            check_free_space(path, needed_bytes=max(0, header.expected_bytes - kept), what="the base file")
        except BaseException:
            self._file.close()
            raise

    @property
    def n_complete_chunks(self) -> int:
        return len(self._chunk_offsets) - 1

    def begin_at(self, chunk_idx: int) -> None:
        if chunk_idx == 0:
            self._file.truncate(0)
            self._file.write(self._head)
            self._chunk_offsets = [self._file.n_bytes]
        else:
            del self._chunk_offsets[chunk_idx + 1 :]
            self._file.truncate(self._chunk_offsets[chunk_idx])
        self._chunk_idx = chunk_idx
        self._row_idx = 0

    def write_rows(
        self, logits: NDArray[np.float32], targets: NDArray[np.int32], workers: RowWorkers
    ) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
        nll = np.empty(len(logits), np.float64)
        finite = np.empty(len(logits), np.uint8)
        for begin in range(0, len(logits), SEGMENT_ROWS):
            part = slice(begin, begin + SEGMENT_ROWS)
            self._write_segment(logits[part], targets[part], nll[part], finite[part], workers)
            if not finite[part].all():
                finite[part.stop :] = 1  # not looked at: the first bad row is what the caller reports
                break
        return nll, finite

    def finish_chunk(self) -> None:
        self._file.sync()
        self._chunk_idx += 1
        self._row_idx = 0
        self._chunk_offsets.append(self._file.n_bytes)

    def publish(self) -> None:
        if self.n_complete_chunks != self._header.n_chunk:
            raise HostStoreError(f"{self.path}: {self.n_complete_chunks} chunks written, needs {self._header.n_chunk}")
        index_offset = self._file.n_bytes
        index = _INDEX_MAGIC + struct.pack(f"<{self._header.n_chunk}Q", *self._chunk_offsets[:-1])
        self._file.write(index + _digest(index) + struct.pack("<Q", index_offset) + _END_MAGIC)
        self._file.publish()

    def close(self) -> None:
        self._file.close()

    def _write_segment(
        self,
        logits: NDArray[np.float32],
        targets: NDArray[np.int32],
        nll: NDArray[np.float64],
        finite: NDArray[np.uint8],
        workers: RowWorkers,
    ) -> None:
        n = len(logits)
        log_sum = np.empty(n, np.float64)
        top = np.empty(n, np.int32)
        workers.run(lambda begin, end: reduce_rows(logits, targets, nll, log_sum, top, finite, begin, end), n)
        if not finite.all():
            return
        levels = np.empty(logits.shape, np.uint16)
        tail = np.empty(n, np.float32)
        bias = np.empty(n, np.float32)
        hashes = np.empty(n, np.uint64)
        payloads = [b""] * n

        def encode(begin: int, end: int) -> None:
            quantise_rows(logits, log_sum, self._header.step, self._log_table, levels, tail, bias, begin, end)
            for r in range(begin, end):
                payloads[r] = pack_levels(levels[r])
                hashes[r] = hash_row(logits[r])

        workers.run(encode, n)
        table = np.empty(n, ROW_TABLE)
        table["payload_bytes"] = [len(payload) for payload in payloads]
        table["top"], table["tail_log_prob"], table["bias"] = top, tail, bias
        table["nll"], table["hash"] = nll, hashes
        payload = b"".join(payloads)
        segment = _SEGMENT.pack(_SEGMENT_MAGIC, self._chunk_idx, self._row_idx, n, len(payload))
        segment += table.tobytes() + payload
        self._file.write(segment + _digest(segment))
        self._row_idx += n

    def _find_complete_chunks(self) -> list[int]:
        """Offsets of the chunks that are whole in the temporary file, and of the byte behind them."""
        offsets = [len(self._head)]
        if self._file.read_at(0, len(self._head)) != self._head:
            return offsets
        offset, row = len(self._head), 0
        while len(offsets) <= self._header.n_chunk:
            segment = _check_segment(self._file.read_at(offset, _SEGMENT.size), len(offsets) - 1, row)
            if segment is None:
                break
            n_rows, n_bytes = segment
            data = self._file.read_at(offset, n_bytes)
            if len(data) != n_bytes or data[-_DIGEST_BYTES:] != _digest(data[:-_DIGEST_BYTES]):
                break
            offset, row = offset + n_bytes, row + n_rows
            if row == self._header.rows_per_chunk:
                offsets.append(offset)
                row = 0
        return offsets


class CompactLogitsFile:
    """A file of our own format, opened and checked; see ``SavedLogits``."""

    format = LogitsFormat.KVS
    log_prob_floor = -np.inf

    def __init__(self, path: Path) -> None:
        """Raises HostStoreError when the file is not of this format, unfinished, or damaged where it is read."""
        self.path = path
        with reporting_os_errors(path):
            self._file: BinaryIO = path.open("rb")
        try:
            with reporting_os_errors(path):
                self.header, self.tokens, self.chunk_offsets = self._read_head()
        except BaseException:
            self._file.close()
            raise
        self.n_ctx = self.header.n_ctx
        self.n_vocab = self.header.n_vocab
        self.n_chunk = self.header.n_chunk
        self.tokenizer: str | None = self.header.identity.tokenizer
        self.log_table = log_level_table()

    def __enter__(self) -> CompactLogitsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    @property
    def has_exact_targets(self) -> bool:
        return True

    def open_chunk(self, chunk_idx: int) -> CompactStoredChunk:
        return CompactStoredChunk(self, chunk_idx, self.chunk_offsets[chunk_idx])

    def read_segment(self, offset: int, chunk_idx: int, row_idx: int) -> tuple[NDArray[Any], list[bytes], int]:
        """``(row table, packed rows, offset of the next segment)`` of the segment at ``offset``."""
        with reporting_os_errors(self.path):
            self._file.seek(offset)
            head = self._file.read(_SEGMENT.size)
            segment = _check_segment(head, chunk_idx, row_idx)
            data = head + self._file.read(segment[1] - len(head)) if segment else b""
        if segment is None or len(data) != segment[1] or data[-_DIGEST_BYTES:] != _digest(data[:-_DIGEST_BYTES]):
            raise HostStoreError(
                f"{self.path}: damaged at byte {offset}, chunk {chunk_idx + 1}, row {row_idx}", hint="make it again"
            )
        table = np.frombuffer(data, ROW_TABLE, count=segment[0], offset=_SEGMENT.size)
        begin = _SEGMENT.size + table.nbytes
        ends = begin + np.cumsum(table["payload_bytes"], dtype=np.int64)
        payloads = [data[end - size : end] for end, size in zip(ends.tolist(), table["payload_bytes"], strict=True)]
        return table, payloads, offset + segment[1]

    def _read_head(self) -> tuple[CompactHeader, NDArray[np.int32], tuple[int, ...]]:
        start = self._file.read(len(COMPACT_MAGIC) + 4)
        present = self._file.seek(0, 2)
        if start[: len(COMPACT_MAGIC)] != COMPACT_MAGIC or len(start) < len(COMPACT_MAGIC) + 4:
            raise HostStoreError(f"{self.path}: not a file of kvs logits, starts with {start[:8]!r}")
        (n_text,) = struct.unpack("<I", start[len(COMPACT_MAGIC) :])
        self._file.seek(len(start))
        text = self._file.read(min(n_text, present))
        if len(text) != n_text or self._file.read(32) != hashlib.sha256(text).digest():
            raise HostStoreError(f"{self.path}: the header does not match its hash", hint="make it again")
        header = self._parse_header(text)
        data = self._file.read(4 * header.n_chunk * header.n_ctx)
        if hashlib.sha256(data).hexdigest() != header.tokens_sha256:
            raise HostStoreError(f"{self.path}: field tokens does not match its hash", hint="make it again")
        offsets = self._read_index(header, present)
        if offsets is None:
            raise HostStoreError(
                f"{self.path}: {present} bytes, does not end with the index of its chunks: "
                f"{self._count_whole_chunks(header, present)} of {header.n_chunk} chunks are whole",
                hint="the file was cut short or changed: make it again",
            )
        return header, np.frombuffer(data, "<i4").astype(np.int32), offsets

    def _parse_header(self, text: bytes) -> CompactHeader:
        try:
            fields = json.loads(text)
            header = CompactHeader(**{**fields, "identity": LogitsIdentity(**fields["identity"])})
            is_sound = header.n_ctx >= 3 and header.n_vocab >= 1 and header.n_chunk >= 1 and 0 < header.step < 1
        except (ValueError, TypeError, KeyError) as error:
            raise HostStoreError(f"{self.path}: the header cannot be read: {error}") from error
        if not is_sound:
            raise HostStoreError(f"{self.path}: the header holds impossible values: {header}")
        return header

    def _count_whole_chunks(self, header: CompactHeader, present: int) -> int:
        """Chunks whose segments all fit in the file; only for the message about a short one."""
        self._file.seek(len(header.to_bytes()) + 4 * header.n_chunk * header.n_ctx)
        n_whole, row = 0, 0
        while True:
            segment = _check_segment(self._file.read(_SEGMENT.size), n_whole, row)
            if segment is None or self._file.tell() - _SEGMENT.size + segment[1] > present:
                return n_whole
            self._file.seek(segment[1] - _SEGMENT.size, 1)
            row += segment[0]
            if row == header.rows_per_chunk:
                n_whole, row = n_whole + 1, 0

    def _read_index(self, header: CompactHeader, present: int) -> tuple[int, ...] | None:
        n_index = len(_INDEX_MAGIC) + 8 * header.n_chunk + _DIGEST_BYTES
        if present < n_index + 16:
            return None
        self._file.seek(present - n_index - 16)
        tail = self._file.read(n_index + 16)
        index, digest = tail[: n_index - _DIGEST_BYTES], tail[n_index - _DIGEST_BYTES : n_index]
        if tail[n_index:] != struct.pack("<Q", present - n_index - 16) + _END_MAGIC or digest != _digest(index):
            return None
        return struct.unpack(f"<{header.n_chunk}Q", index[len(_INDEX_MAGIC) :])


class CompactStoredChunk:
    """See ``StoredChunk``."""

    def __init__(self, file: CompactLogitsFile, chunk_idx: int, offset: int) -> None:
        self._file = file
        self._chunk_idx = chunk_idx
        self._offset = offset
        self._row_idx = 0
        self._table = np.empty(0, ROW_TABLE)
        self._payloads: list[bytes] = []
        self._largest_bias = 0.0

    @property
    def kld_floor(self) -> float:
        """Largest KL divergence between a stored row and the exact one, as measured when they were written."""
        return self._largest_bias

    def take(self, targets: NDArray[np.int32], workers: RowWorkers) -> StoredRows:
        table, payloads = self._next_rows(len(targets))
        return StoredRows(
            log_probs=self._decode(table, payloads, workers),
            nll=table["nll"].astype(np.float64),
            top=table["top"].astype(np.int32),
            clamped=np.zeros(len(table), np.uint8),
            hashes=table["hash"].astype(np.uint64),
        )

    def compare(
        self,
        logits: NDArray[np.float32],
        targets: NDArray[np.int32],
        out: NDArray[Any],
        finite: NDArray[np.uint8],
        workers: RowWorkers,
    ) -> None:
        n = len(logits)
        table, payloads = self._next_rows(n)
        log_probs = self._decode(table, payloads, workers)
        nll = np.empty(n, np.float64)
        log_sum = np.empty(n, np.float64)
        top = np.empty(n, np.int32)
        kld = np.empty(n, np.float64)
        hashes = np.empty(n, np.uint64)

        def measure(begin: int, end: int) -> None:
            reduce_rows(logits, targets, nll, log_sum, top, finite, begin, end)
            kl_of_log_probs(log_probs, logits, log_sum, -np.inf, kld, begin, end)
            for r in range(begin, end):
                hashes[r] = hash_row(logits[r])

        workers.run(measure, n)
        is_identical = hashes == table["hash"]
        out["nll"] = nll
        out["nll_base"] = table["nll"]
        out["kld"] = np.where(is_identical, 0.0, kld - table["bias"])
        out["p_diff"] = np.where(is_identical, 0.0, np.exp(-nll) - np.exp(-table["nll"]))
        out["same_top"] = top == table["top"]
        out["identical"] = np.where(is_identical, IDENTICAL_YES, IDENTICAL_NO)
        out["clamped"] = 0

    def _decode(self, table: NDArray[Any], payloads: list[bytes], workers: RowWorkers) -> NDArray[np.float64]:
        levels = np.empty((len(table), self._file.n_vocab), np.uint16)
        log_probs = np.empty(levels.shape, np.float64)
        tail = np.ascontiguousarray(table["tail_log_prob"])

        def decode(begin: int, end: int) -> None:
            for r in range(begin, end):
                try:
                    unpack_levels(payloads[r], levels[r])
                except ValueError as error:
                    raise HostStoreError(f"{self._file.path}: chunk {self._chunk_idx + 1}: {error}") from error
            dequantise_rows(levels, tail, self._file.log_table, log_probs, begin, end)

        workers.run(decode, len(table))
        return log_probs

    def _next_rows(self, n_rows: int) -> tuple[NDArray[Any], list[bytes]]:
        """The next rows' table entries and payloads; reads as many segments as that takes."""
        tables, payloads = [self._table], self._payloads
        while sum(len(table) for table in tables) < n_rows:
            table, more, self._offset = self._file.read_segment(self._offset, self._chunk_idx, self._row_idx)
            self._row_idx += len(table)
            tables.append(table)
            payloads = payloads + more
        joined = np.concatenate(tables)
        self._table, self._payloads = joined[n_rows:], payloads[n_rows:]
        self._largest_bias = max(self._largest_bias, float(joined["bias"][:n_rows].max(initial=0.0)))
        return joined[:n_rows], payloads[:n_rows]


def _check_segment(head: bytes, chunk_idx: int, row_idx: int) -> tuple[int, int] | None:
    """``(rows, bytes of the whole segment)``, or None when ``head`` does not begin the segment expected there."""
    if len(head) != _SEGMENT.size:
        return None
    magic, chunk, first_row, n_rows, n_payload = _SEGMENT.unpack(head)
    if magic != _SEGMENT_MAGIC or chunk != chunk_idx or first_row != row_idx or not 1 <= n_rows <= SEGMENT_ROWS:
        return None
    return n_rows, _SEGMENT.size + n_rows * ROW_TABLE.itemsize + n_payload + _DIGEST_BYTES


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
