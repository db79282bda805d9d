"""Finished chunks of an evaluation, kept so that the same command goes on where an earlier one ended.

One file per run configuration, appended to after each chunk; nothing here knows what the rows mean::

    8 B    magic
    32 B   SHA-256 of the configuration
    then for each finished chunk
        u32    bytes of the payload
        16 B   BLAKE2b of the payload
        payload: u32 bytes of the notes | notes as JSON | rows as raw bytes

A record cut short or damaged (the process or the machine stopped while it was being written) ends the list: it and
everything after it is dropped and computed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvs_core.errors import FileAccessError
from kvs_core.evaluate.partial_file import lock_or_refuse, open_or_create, reporting_os_errors, write_all

_MAGIC = b"kvsjrnl1"
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRecord:
    """One finished chunk: its rows and whatever its maker noted beside them (JSON values)."""

    rows: NDArray[Any]
    notes: Mapping[str, Any]


def configuration_key(configuration: Mapping[str, Any]) -> bytes:
    """SHA-256 over every value that decides a run's result; equal configurations may share finished chunks."""
    text = json.dumps(configuration, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


class Journal:
    """The finished chunks of one run. ``records`` holds those found at the start; ``append`` adds one durably.

    The file stays locked while it is open. A file of another configuration or dtype is started afresh.

    on_loss  told once when a chunk cannot be added, for want of space say; the run goes on, and that chunk and later
             ones are not kept. Without it ``append`` raises FileAccessError.
    """

    def __init__(
        self,
        path: Path,
        *,
        key: bytes,
        dtype: np.dtype[Any],
        on_loss: Callable[[FileAccessError], None] | None = None,
    ) -> None:
        self.path = path
        self._dtype = dtype
        self._on_loss = on_loss
        self._is_lost = False
        with reporting_os_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_or_create(path)
            try:
                lock_or_refuse(self._file.fileno(), path)
                self.records: list[ChunkRecord] = self._load(_MAGIC + key)
            except BaseException:
                self._file.close()
                raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, record: ChunkRecord) -> None:
        """Add a finished chunk; when it is among ``records``, it survives a crash of the machine."""
        if self._is_lost:
            return
        notes = json.dumps(dict(record.notes), sort_keys=True).encode()
        payload = struct.pack("<I", len(notes)) + notes + np.ascontiguousarray(record.rows, self._dtype).tobytes()
        try:
            with reporting_os_errors(self.path):
                write_all(self._file, struct.pack("<I", len(payload)) + _digest(payload) + payload)
                os.fsync(self._file.fileno())
        except FileAccessError as error:
            if self._on_loss is None:
                raise
            self._is_lost = True
            self._on_loss(error)
        else:
            self.records.append(record)

    def keep_first(self, n_records: int) -> None:
        """Forget the records from ``n_records`` on."""
        end = len(_MAGIC) + 32
        with reporting_os_errors(self.path):
            for _ in range(n_records):
                self._file.seek(end)
                end += 4 + _DIGEST_BYTES + int(struct.unpack("<I", self._file.read(4))[0])
            self._file.seek(end)
            self._file.truncate()
        del self.records[n_records:]

    def close(self) -> None:
        """May be called twice; a file without a finished chunk goes away."""
        with reporting_os_errors(self.path):
            if not self._file.closed and not self.records:
                self.path.unlink(missing_ok=True)
            self._file.close()

    def discard(self) -> None:
        """Remove the file: the run is complete and its result handed over."""
        with reporting_os_errors(self.path):
            self.path.unlink(missing_ok=True)
            self._file.close()

    def _load(self, head: bytes) -> list[ChunkRecord]:
        self._file.seek(0)
        if self._file.read(len(head)) != head:
            self._file.seek(0)
            self._file.truncate()
            write_all(self._file, head)
            return []
        records: list[ChunkRecord] = []
        while True:
            begin = self._file.tell()
            record = self._read_record()
            if record is None:
                self._file.seek(begin)
                self._file.truncate()
                return records
            records.append(record)

    def _read_record(self) -> ChunkRecord | None:
        prefix = self._file.read(4 + _DIGEST_BYTES)
        if len(prefix) < 4 + _DIGEST_BYTES:
            return None
        n_bytes = int(struct.unpack("<I", prefix[:4])[0])
        if n_bytes > os.fstat(self._file.fileno()).st_size - self._file.tell():
            return None
        payload = self._file.read(n_bytes)
        if _digest(payload) != prefix[4:]:
            return None
        n_notes = int(struct.unpack("<I", payload[:4])[0])
        rows = np.frombuffer(payload, self._dtype, offset=4 + n_notes)
        return ChunkRecord(rows=rows, notes=json.loads(payload[4 : 4 + n_notes]))


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=_DIGEST_BYTES).digest()
