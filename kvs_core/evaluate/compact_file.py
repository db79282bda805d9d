"""Reading our own file of saved logits; its bytes are described in compact_layout, its rows in compact_codec."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from kvs_core.errors import FileAccessError
from kvs_core.evaluate.choices import LogitsFormat
from kvs_core.evaluate.compact_codec import ROW_TABLE, dequantise_rows, hash_row, log_level_table, unpack_levels
from kvs_core.evaluate.compact_layout import (
    COMPACT_MAGIC,
    DIGEST_BYTES,
    END_MAGIC,
    INDEX_MAGIC,
    SEGMENT,
    CompactHeader,
    check_segment,
    part_digest,
)
from kvs_core.evaluate.partial_file import reporting_os_errors
from kvs_core.evaluate.row_math import IDENTICAL_NO, IDENTICAL_YES, RowWorkers, kl_of_log_probs, reduce_rows
from kvs_core.evaluate.saved_logits import LogitsIdentity, StoredRows


class CompactLogitsFile:
    """A file of our own format, opened and checked; see ``SavedLogits``."""

    format = LogitsFormat.KVS
    log_prob_floor = -np.inf

    def __init__(self, path: Path) -> None:
        """Raises FileAccessError when the file is not of this format, unfinished, or damaged where it is read."""
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
        self.identity: LogitsIdentity | None = self.header.identity
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
            head = self._file.read(SEGMENT.size)
            segment = check_segment(head, chunk_idx, row_idx)
            data = head + self._file.read(segment[1] - len(head)) if segment else b""
        if segment is None or len(data) != segment[1] or data[-DIGEST_BYTES:] != part_digest(data[:-DIGEST_BYTES]):
            raise FileAccessError(
                f"{self.path}: damaged at byte {offset}, chunk {chunk_idx + 1}, row {row_idx}", hint="make it again"
            )
        table = np.frombuffer(data, ROW_TABLE, count=segment[0], offset=SEGMENT.size)
        begin = SEGMENT.size + table.nbytes
        ends = begin + np.cumsum(table["payload_bytes"], dtype=np.int64)
        payloads = [data[end - size : end] for end, size in zip(ends.tolist(), table["payload_bytes"], strict=True)]
        return table, payloads, offset + segment[1]

    def _read_head(self) -> tuple[CompactHeader, NDArray[np.int32], tuple[int, ...]]:
        start = self._file.read(len(COMPACT_MAGIC) + 4)
        present = self._file.seek(0, 2)
        if start[: len(COMPACT_MAGIC)] != COMPACT_MAGIC or len(start) < len(COMPACT_MAGIC) + 4:
            raise FileAccessError(f"{self.path}: not a file of kvs logits, starts with {start[:8]!r}")
        (n_text,) = struct.unpack("<I", start[len(COMPACT_MAGIC) :])
        self._file.seek(len(start))
        text = self._file.read(min(n_text, present))
        if len(text) != n_text or self._file.read(32) != hashlib.sha256(text).digest():
            raise FileAccessError(f"{self.path}: the header does not match its hash", hint="make it again")
        header = self._parse_header(text)
        data = self._file.read(4 * header.n_chunk * header.n_ctx)
        if hashlib.sha256(data).hexdigest() != header.tokens_sha256:
            raise FileAccessError(f"{self.path}: field tokens does not match its hash", hint="make it again")
        rows_begin = self._file.tell()
        offsets = self._read_index(header, present)
        if offsets is None:
            raise FileAccessError(
                f"{self.path}: {present} bytes, does not end with the index of its chunks: "
                f"{self._count_whole_chunks(header, rows_begin, present)} of {header.n_chunk} chunks are whole",
                hint="the file was cut short or changed: make it again",
            )
        return header, np.frombuffer(data, "<i4").astype(np.int32), offsets

    def _parse_header(self, text: bytes) -> CompactHeader:
        try:
            fields = json.loads(text)
            header = CompactHeader(**{**fields, "identity": LogitsIdentity(**fields["identity"])})
            is_sound = header.n_ctx >= 3 and header.n_vocab >= 1 and header.n_chunk >= 1 and 0 < header.step < 1
        except (ValueError, TypeError, KeyError) as error:
            raise FileAccessError(f"{self.path}: the header cannot be read: {error}") from error
        if not is_sound:
            raise FileAccessError(f"{self.path}: the header holds impossible values: {header}")
        return header

    def _count_whole_chunks(self, header: CompactHeader, rows_begin: int, present: int) -> int:
        """Chunks whose segments all fit in the file; only for the message about a short one."""
        self._file.seek(rows_begin)
        n_whole, row = 0, 0
        while True:
            segment = check_segment(self._file.read(SEGMENT.size), n_whole, row)
            if segment is None or self._file.tell() - SEGMENT.size + segment[1] > present:
                return n_whole
            self._file.seek(segment[1] - SEGMENT.size, 1)
            row += segment[0]
            if row == header.rows_per_chunk:
                n_whole, row = n_whole + 1, 0

    def _read_index(self, header: CompactHeader, present: int) -> tuple[int, ...] | None:
        n_index = len(INDEX_MAGIC) + 8 * header.n_chunk + DIGEST_BYTES
        if present < n_index + 16:
            return None
        self._file.seek(present - n_index - 16)
        tail = self._file.read(n_index + 16)
        index, stored = tail[: n_index - DIGEST_BYTES], tail[n_index - DIGEST_BYTES : n_index]
        if tail[n_index:] != struct.pack("<Q", present - n_index - 16) + END_MAGIC or stored != part_digest(index):
            return None
        return struct.unpack(f"<{header.n_chunk}Q", index[len(INDEX_MAGIC) :])


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
                    raise FileAccessError(f"{self._file.path}: chunk {self._chunk_idx + 1}: {error}") from error
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
