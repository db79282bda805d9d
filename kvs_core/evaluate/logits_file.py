"""llama.cpp's file of saved logits, read and written. All sizes are Python integers: they pass 2**31 soon.

Layout, little endian::

    8 B     "_logits_"
    int32   n_ctx | n_vocab | n_chunk
    int32   tokens [n_chunk * n_ctx]                 the text's own tokens, without BOS in their place
    uint16  rows [n_chunk * (n_ctx - 1 - n_ctx / 2)][n_vocab rounded up to even, + 4]

    a row   float32 scale, float32 lowest log-probability, then a code for each token:
            log p = code * scale + lowest; everything 16 nats or more below the most probable token has code 0
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from kvs_core.errors import ConfigError, FileAccessError
from kvs_core.evaluate.choices import LogitsFormat
from kvs_core.evaluate.partial_file import PartialFile, check_free_space, reporting_os_errors
from kvs_core.evaluate.row_math import (
    LLAMA_LOG_PROB_FLOOR,
    RowWorkers,
    compare_llama_rows,
    encode_llama_rows,
    sum_llama_probs,
)
from kvs_core.evaluate.saved_logits import LogitsIdentity, StoredRows

LLAMA_MAGIC = b"_logits_"
_HEADER_BYTES = len(LLAMA_MAGIC) + 12
_INT32_MAX = 2**31 - 1
_PROB_SUM_TOLERANCE = 0.01  # rounding to codes moves a sum by 1.2e-4 at most


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsFileLayout:
    """Where everything lies in a file of ``n_chunk`` chunks; all in bytes unless named otherwise."""

    n_ctx: int
    n_vocab: int
    n_chunk: int

    @property
    def rows_per_chunk(self) -> int:
        return self.n_ctx - 1 - self.n_ctx // 2

    @property
    def row_codes(self) -> int:
        """uint16 entries of one row, the two floats in front included."""
        return 2 * ((self.n_vocab + 1) // 2) + 4

    @property
    def row_bytes(self) -> int:
        return 2 * self.row_codes

    @property
    def chunk_bytes(self) -> int:
        return self.rows_per_chunk * self.row_bytes

    @property
    def data_offset(self) -> int:
        return _HEADER_BYTES + 4 * self.n_chunk * self.n_ctx

    @property
    def n_bytes(self) -> int:
        return self.chunk_offset(self.n_chunk)

    def chunk_offset(self, chunk_idx: int) -> int:
        return self.data_offset + chunk_idx * self.chunk_bytes

    def head(self, tokens: NDArray[np.int32]) -> bytes:
        """Everything before the rows."""
        return (
            LLAMA_MAGIC + struct.pack("<iii", self.n_ctx, self.n_vocab, self.n_chunk) + tokens.astype("<i4").tobytes()
        )


class LlamaLogitsWriter:
    """Writes the file chunk by chunk; see ``LogitsWriter``. Free space is checked on construction."""

    def __init__(self, path: Path, *, layout: LogitsFileLayout, tokens: NDArray[np.int32], keeps: bool = True) -> None:
        """``tokens`` int32 [n_chunk * n_ctx]; ``keeps`` as for PartialFile."""
        if max(layout.n_ctx, layout.n_vocab, layout.n_chunk) > _INT32_MAX:
            raise ConfigError("a context, vocabulary or chunk count above 2^31 - 1 does not fit llama.cpp's file")
        self.path = path
        self._layout = layout
        self._head = layout.head(tokens)
        self._file = PartialFile(path, keeps=keeps)
        try:
            self._n_complete = self._count_complete_chunks()
            kept = layout.chunk_offset(self._n_complete) if self._n_complete else 0
            check_free_space(path, needed_bytes=layout.n_bytes - kept, what="the base file")
        except BaseException:
            self._file.close()
            raise

    @property
    def n_complete_chunks(self) -> int:
        return self._n_complete

    def begin_at(self, chunk_idx: int) -> None:
        if chunk_idx == 0:
            self._file.truncate(0)
            self._file.write(self._head)
        else:
            self._file.truncate(self._layout.chunk_offset(chunk_idx))

    def write_rows(
        self, logits: NDArray[np.float32], targets: NDArray[np.int32], workers: RowWorkers
    ) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
        n = len(logits)
        codes = np.empty((n, self._layout.row_codes), np.uint16)
        nll = np.empty(n, np.float64)
        finite = np.empty(n, np.uint8)
        workers.run(lambda begin, end: encode_llama_rows(logits, targets, codes, nll, finite, begin, end), n)
        if finite.all():
            self._file.write(codes.astype("<u2", copy=False).data)
        return nll, finite

    def finish_chunk(self) -> None:
        self._file.sync()

    def publish(self) -> None:
        if self._file.n_bytes != self._layout.n_bytes:
            raise FileAccessError(f"{self.path}: {self._file.n_bytes} bytes written, needs {self._layout.n_bytes}")
        self._file.publish()

    def close(self) -> None:
        self._file.close()

    def _count_complete_chunks(self) -> int:
        if self._file.read_at(0, len(self._head)) != self._head or not self._layout.chunk_bytes:
            return 0
        whole = (self._file.n_bytes - self._layout.data_offset) // self._layout.chunk_bytes
        return min(whole, self._layout.n_chunk)


class LlamaLogitsFile:
    """A file of llama.cpp's format, opened and checked; see ``SavedLogits``."""

    format = LogitsFormat.LLAMA
    identity: LogitsIdentity | None = None
    log_prob_floor = LLAMA_LOG_PROB_FLOOR

    def __init__(self, path: Path) -> None:
        """Raises FileAccessError when the file is not of this format, or shorter or longer than its header says."""
        self.path = path
        with reporting_os_errors(path):
            self._file: BinaryIO = path.open("rb")
        try:
            with reporting_os_errors(path):
                self.layout, self.tokens = self._read_head()
        except BaseException:
            self._file.close()
            raise
        self.n_ctx = self.layout.n_ctx
        self.n_vocab = self.layout.n_vocab
        self.n_chunk = self.layout.n_chunk

    def __enter__(self) -> LlamaLogitsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    @property
    def has_exact_targets(self) -> bool:
        return False

    def open_chunk(self, chunk_idx: int) -> LlamaStoredChunk:
        return LlamaStoredChunk(self, self.layout.chunk_offset(chunk_idx))

    def read_rows(self, offset: int, n_rows: int) -> NDArray[np.uint16]:
        """uint16 [n_rows, row_codes] starting at byte ``offset``."""
        n_bytes = n_rows * self.layout.row_bytes
        with reporting_os_errors(self.path):
            self._file.seek(offset)
            data = self._file.read(n_bytes)
        if len(data) != n_bytes:
            raise FileAccessError(f"{self.path}: {len(data)} of {n_bytes} bytes at {offset}: the file became shorter")
        return np.frombuffer(data, "<u2").astype(np.uint16, copy=False).reshape(n_rows, self.layout.row_codes)

    def _read_head(self) -> tuple[LogitsFileLayout, NDArray[np.int32]]:
        head = self._file.read(_HEADER_BYTES)
        present = self._file.seek(0, 2)
        if head[: len(LLAMA_MAGIC)] != LLAMA_MAGIC or len(head) < _HEADER_BYTES:
            raise FileAccessError(
                f"{self.path}: not a file of saved logits, starts with {head[:8]!r}",
                hint="make one with kvs perplexity --kl-divergence-base FILE",
            )
        n_ctx, n_vocab, n_chunk = struct.unpack("<iii", head[len(LLAMA_MAGIC) :])
        for name, value, least in (("n_ctx", n_ctx, 3), ("n_vocab", n_vocab, 1), ("n_chunk", n_chunk, 1)):
            if value < least:
                raise FileAccessError(f"{self.path}: header field {name} is {value}, needs at least {least}")
        layout = LogitsFileLayout(n_ctx=n_ctx, n_vocab=n_vocab, n_chunk=n_chunk)
        if present != layout.n_bytes:
            whole = max(0, min(n_chunk, (present - layout.data_offset) // layout.chunk_bytes))
            raise FileAccessError(
                f"{self.path}: {present} bytes, its header (n_ctx {n_ctx}, n_vocab {n_vocab}, n_chunk {n_chunk}) "
                f"needs {layout.n_bytes}: {whole} of {n_chunk} chunks are whole",
                hint="the file was cut short or changed: make it again",
            )
        self._file.seek(_HEADER_BYTES)
        tokens = np.frombuffer(self._file.read(4 * n_chunk * n_ctx), "<i4").astype(np.int32)
        if ((tokens < 0) | (tokens >= n_vocab)).any():
            bad = int(tokens[(tokens < 0) | (tokens >= n_vocab)][0])
            raise FileAccessError(f"{self.path}: field tokens holds {bad}, outside its vocabulary of {n_vocab}")
        return layout, tokens


class LlamaStoredChunk:
    """See ``StoredChunk``."""

    def __init__(self, file: LlamaLogitsFile, offset: int) -> None:
        self._file = file
        self._offset = offset
        self._largest_scale = 0.0

    @property
    def kld_floor(self) -> float:
        """Half a code step, the largest error of any stored log-probability; 1.2e-4 once a row spans 16 nats."""
        return 0.5 * self._largest_scale

    def take(self, targets: NDArray[np.int32], workers: RowWorkers) -> StoredRows:
        n = len(targets)
        codes = self._next_rows(n, workers)
        log_probs = np.empty((n, self._file.n_vocab), np.float64)

        def decode(begin: int, end: int) -> None:
            for r in range(begin, end):
                scale, low = codes[r, :4].copy().view(np.float32)
                log_probs[r] = codes[r, 4 : 4 + self._file.n_vocab].astype(np.float32) * scale + low

        workers.run(decode, n)
        return StoredRows(
            log_probs=log_probs,
            nll=-log_probs[np.arange(n), targets],
            top=log_probs.argmax(axis=1).astype(np.int32),
            clamped=(codes[np.arange(n), 4 + targets] == 0).astype(np.uint8),
            hashes=None,
        )

    def compare(
        self,
        logits: NDArray[np.float32],
        targets: NDArray[np.int32],
        out: NDArray[Any],
        finite: NDArray[np.uint8],
        workers: RowWorkers,
    ) -> None:
        codes = self._next_rows(len(logits), workers)
        workers.run(lambda begin, end: compare_llama_rows(logits, codes, targets, out, finite, begin, end), len(logits))

    def _next_rows(self, n_rows: int, workers: RowWorkers) -> NDArray[np.uint16]:
        """Raises FileAccessError for a row whose probabilities do not add up to 1: this format has no hashes."""
        codes = self._file.read_rows(self._offset, n_rows)
        sums = np.empty(n_rows, np.float64)
        n_vocab = self._file.n_vocab
        workers.run(lambda begin, end: sum_llama_probs(codes, n_vocab, sums, begin, end), n_rows)
        tolerance = _PROB_SUM_TOLERANCE + n_vocab * math.exp(LLAMA_LOG_PROB_FLOOR)
        damaged = np.flatnonzero(~(np.abs(sums - 1.0) <= tolerance))
        if len(damaged):
            at = self._offset + int(damaged[0]) * self._file.layout.row_bytes
            raise FileAccessError(
                f"{self._file.path}: damaged at byte {at}: probabilities of this row add up to "
                f"{sums[damaged[0]]:.6g}, not 1",
                hint="make it again",
            )
        self._offset += n_rows * self._file.layout.row_bytes
        scales = np.ascontiguousarray(codes[:, :2]).view(np.float32)
        self._largest_scale = max(self._largest_scale, float(scales.max(initial=0.0)))
        return codes
