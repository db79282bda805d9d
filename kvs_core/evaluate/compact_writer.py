"""Writing our own file of saved logits; its bytes are described in compact_layout, its rows in compact_codec."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvs_core.errors import FileAccessError
from kvs_core.evaluate.compact_codec import ROW_TABLE, hash_row, log_level_table, pack_levels, quantise_rows
from kvs_core.evaluate.compact_layout import (
    DIGEST_BYTES,
    END_MAGIC,
    INDEX_MAGIC,
    SEGMENT,
    SEGMENT_MAGIC,
    SEGMENT_ROWS,
    CompactHeader,
    check_segment,
    part_digest,
)
from kvs_core.evaluate.partial_file import PartialFile, check_free_space
from kvs_core.evaluate.row_math import RowWorkers, reduce_rows


class CompactLogitsWriter:
    """Writes the file segment by segment; see ``LogitsWriter``. Free space is checked on construction."""

    def __init__(self, path: Path, *, header: CompactHeader, tokens: NDArray[np.int32], keeps: bool = True) -> None:
        """``tokens`` int32 [n_chunk * n_ctx]; ``keeps`` as for PartialFile."""
        self.path = path
        self._header = header
        self._head = header.to_bytes() + tokens.astype("<i4").tobytes()
        self._log_table = log_level_table()
        self._chunk_idx = 0
        self._row_idx = 0
        self._file = PartialFile(path, keeps=keeps)
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
            raise FileAccessError(f"{self.path}: {self.n_complete_chunks} chunks written, needs {self._header.n_chunk}")
        index_offset = self._file.n_bytes
        index = INDEX_MAGIC + struct.pack(f"<{self._header.n_chunk}Q", *self._chunk_offsets[:-1])
        self._file.write(index + part_digest(index) + struct.pack("<Q", index_offset) + END_MAGIC)
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
        segment = SEGMENT.pack(SEGMENT_MAGIC, self._chunk_idx, self._row_idx, n, len(payload))
        segment += table.tobytes() + payload
        self._file.write(segment + part_digest(segment))
        self._row_idx += n

    def _find_complete_chunks(self) -> list[int]:
        """Offsets of the chunks that are whole in the temporary file, and of the byte behind them."""
        offsets = [len(self._head)]
        if self._file.read_at(0, len(self._head)) != self._head:
            return offsets
        offset, row = len(self._head), 0
        while len(offsets) <= self._header.n_chunk:
            segment = check_segment(self._file.read_at(offset, SEGMENT.size), len(offsets) - 1, row)
            if segment is None:
                break
            n_rows, n_bytes = segment
            data = self._file.read_at(offset, n_bytes)
            if len(data) != n_bytes or data[-DIGEST_BYTES:] != part_digest(data[:-DIGEST_BYTES]):
                break
            offset, row = offset + n_bytes, row + n_rows
            if row == self._header.rows_per_chunk:
                offsets.append(offset)
                row = 0
        return offsets
