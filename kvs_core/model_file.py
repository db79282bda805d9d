"""Opening a GGUF model: finding it, its other parts when it is split, and mapping its tensors.
What the bytes of a header mean is gguf_header.py's subject, what the keys mean model_reader.py's.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from kvs_core.errors import ModelFileError, StateError
from kvs_core.foreign_files import SNIFFED_BYTES, recognise, show_bytes
from kvs_core.gguf_cursor import INCOMPLETE_HINT
from kvs_core.gguf_header import MAGIC, GgufHeader, MetadataValue, TensorInfo, parse_header
from kvs_core.messages import show_text
from kvs_core.units import align_up

SPLIT_NO_KEY = "split.no"
SPLIT_COUNT_KEY = "split.count"
SPLIT_TENSORS_KEY = "split.tensors.count"
MAX_SHARDS = 65535  # split.count is a uint16

_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.DOTALL | re.I)
_RAW_PIECE_NAME = re.compile(r"split-[a-z]{1,2}$|part[-_.]?\d+", re.I)
_SHOWN_MISSING = 3
_NOT_A_MODEL = {
    "adapter": ("a LoRA adapter", "pass the model the adapter was trained on; adapters are not supported"),
    "mmproj": ("a multimodal projector", "pass the text model it belongs to; images are not supported"),
    "imatrix": ("an importance matrix used for quantising", "pass the model itself"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    """One mapped file with its checked header."""

    path: str
    shown_path: str
    data: mmap.mmap
    header: GgufHeader


class ModelFile:
    """An open model: one GGUF file, or all parts of a split one, mapped read-only.

    Tensors are views of the mapping, so nothing is read before it is used. The mapping itself ends when the
    last view is gone, however long after close() that is. A file that another program shortens while it is
    mapped ends the process with SIGBUS; no check at opening can prevent that.
    """

    def __init__(self, shards: tuple[_Shard, ...]) -> None:
        self._shards = shards
        self._is_open = True
        self.path = shards[0].path
        self.paths = tuple(shard.path for shard in shards)
        self.file_bytes = sum(len(shard.data) for shard in shards)
        self.metadata: Mapping[str, MetadataValue] = MappingProxyType(shards[0].header.metadata)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {tensor.name: tensor for shard in shards for tensor in shard.header.tensors}
        )

    def tensor_bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """Stored bytes of one tensor: uint8 [n_bytes], a read-only view of the mapped file.

        Raises ModelFileError for a name the model does not have, StateError after close().
        """
        if not self._is_open:
            raise StateError(f"{show_text(self.path)} was closed; its tensors can no longer be read")
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelFileError(f"{show_text(self.path)}: no tensor {show_text(name)}", path=self.path, key=name)
        data = self._shards[tensor.shard_idx].data
        return np.frombuffer(data, dtype=np.uint8, count=tensor.n_bytes, offset=tensor.file_offset)

    def release_pages(self) -> None:
        """Give back the memory that reading tensors took; they can be read again, from the file."""
        for shard in self._shards:
            shard.data.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Let go of the files; metadata and the tensor table stay readable. May be called again."""
        self._is_open = False
        self._shards = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_model(path: str | os.PathLike[str]) -> ModelFile:
    """Open the GGUF model at ``path``; of a split model, pass the first part.

    A leading ``~`` is expanded. Every header, of all parts, is checked whole before anything is returned.
    Raises ModelFileError, with a one-line message that begins with the path as given.
    """
    given = os.fspath(path)
    if not given:
        raise ModelFileError("the model path is empty", path=given, hint="pass the .gguf file of a model")
    first = _open_shard(given, shard_idx=0)
    kind = first.header.metadata.get("general.type")
    if isinstance(kind, str) and kind in _NOT_A_MODEL:
        what, hint = _NOT_A_MODEL[kind]
        raise _error(first, f"this is {what} (general.type {kind}), not a model", key="general.type", hint=hint)
    n_shards = _check_split_keys(first)
    if n_shards == 1:
        return ModelFile((first,))
    siblings = _find_siblings(first, n_shards)
    rest = (_open_sibling(first, sibling, idx, n_shards) for idx, sibling in enumerate(siblings, start=1))
    shards = (first, *rest)
    _check_tensors_over_shards(shards)
    return ModelFile(shards)


def _error(shard: _Shard, message: str, *, key: str | None = None, hint: str | None = None) -> ModelFileError:
    return ModelFileError(f"{shard.shown_path}: {message}", path=shard.path, key=key, hint=hint)


# --- One file --------------------------------------------------------------------------------------------------


def _open_shard(given: str, shard_idx: int) -> _Shard:
    shown = show_text(given)
    try:
        path = os.path.abspath(os.path.expanduser(given))
    except FileNotFoundError as cause:
        raise ModelFileError(
            f"{shown}: no such file: the directory the command runs in was removed",
            path=given,
            hint="change to a directory that exists",
        ) from cause
    data = _map_file(path, shown)
    try:
        header = parse_header(data, path=path, shown_path=shown, shard_idx=shard_idx)
    except ModelFileError as error:
        if error.hint == INCOMPLETE_HINT and _RAW_PIECE_NAME.search(given):
            error.hint = "the name looks like one piece of a file that was cut up; join all pieces with cat first"
        raise
    shard = _Shard(path=path, shown_path=shown, data=data, header=header)
    for begin in {header.data_end, align_up(header.data_end, header.alignment)}:
        if data[begin : begin + len(MAGIC)] == MAGIC:
            raise _error(
                shard,
                f"another GGUF file begins at byte {begin}, after the last tensor; "
                "parts of a split model cannot be concatenated",
                hint="keep the parts as separate files and pass the first, or join them with llama-gguf-split --merge",
            )
    return shard


def _map_file(path: str, shown: str) -> mmap.mmap:
    """Map a regular file that begins like a GGUF; the path's own problems are told with both its spellings."""
    both = shown if shown == show_text(path) else f"{shown} (resolved to {show_text(path)})"
    try:
        # Looked at before it is opened: opening a named pipe would wait for a writer.
        kind = os.stat(path).st_mode
        if stat.S_ISDIR(kind):
            raise ModelFileError(f"{both}: is a directory", path=path, hint="pass the .gguf file inside it")
        if not stat.S_ISREG(kind):
            raise ModelFileError(
                f"{both}: is not a regular file", path=path, hint="models are mapped, so copy it to a file first"
            )
        with open(path, "rb") as file:
            first_bytes = file.read(SNIFFED_BYTES)
            file_bytes = os.fstat(file.fileno()).st_size
            if first_bytes[: len(MAGIC)] == MAGIC:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as cause:
        reason, hint = "no such file", "check the spelling; a relative path starts where the command runs"
        if os.path.islink(path):
            reason = f"is a link to {show_text(os.path.realpath(path))}, which does not exist"
        raise ModelFileError(f"{both}: {reason}", path=path, hint=hint) from cause
    except PermissionError as cause:
        raise ModelFileError(f"{both}: permission denied", path=path, hint="allow this user to read it") from cause
    except (OSError, ValueError) as cause:
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
        raise ModelFileError(
            f"{both}: cannot be opened: {show_text(reason)}", path=path, hint="check the path and the disk"
        ) from cause
    if not file_bytes:
        raise ModelFileError(f"{shown}: is an empty file", path=path, hint="download or copy it again")
    guess = recognise(first_bytes, file_bytes)
    looks = f"; it looks like {guess.looks_like}" if guess.looks_like else ""
    message = f"{shown}: not a GGUF file: it begins with {show_bytes(first_bytes)}{looks}"
    raise ModelFileError(message, path=path, hint=guess.hint)


# --- Split models ----------------------------------------------------------------------------------------------


def _check_split_keys(first: _Shard) -> int:
    """How many files the model has; refuses any but the first of them."""
    n_shards = _split_number(first, SPLIT_COUNT_KEY, 1) or 1
    number = _split_number(first, SPLIT_NO_KEY, 0)
    if n_shards > MAX_SHARDS or number >= n_shards:
        raise _error(
            first,
            f"{SPLIT_NO_KEY} {number} and {SPLIT_COUNT_KEY} {n_shards} do not go together",
            key=SPLIT_NO_KEY if number >= n_shards else SPLIT_COUNT_KEY,
            hint="split the model again with llama-gguf-split",
        )
    if number:
        name = _SHARD_NAME.fullmatch(os.path.basename(first.shown_path))
        wanted = f"pass the first part, {_shard_name(name, 0, n_shards)}" if name else "pass the first part"
        raise _error(first, f"is part {number + 1} of {n_shards} of a split model", key=SPLIT_NO_KEY, hint=wanted)
    n_tensors = _split_number(first, SPLIT_TENSORS_KEY, len(first.header.tensors))
    if n_shards == 1 and n_tensors != len(first.header.tensors):
        raise _error(
            first,
            f"holds {len(first.header.tensors)} tensors, {SPLIT_TENSORS_KEY} says {n_tensors}",
            key=SPLIT_TENSORS_KEY,
            hint="split the model again with llama-gguf-split",
        )
    return n_shards


def _split_number(shard: _Shard, key: str, default: int) -> int:
    value = shard.header.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _error(
            shard,
            f"{key} is {show_text(str(value), 40)}; a whole number needed",
            key=key,
            hint="split the model again with llama-gguf-split",
        )
    return value


def _shard_name(name: re.Match[str], shard_idx: int, n_shards: int) -> str:
    return f"{name['stem']}-{shard_idx + 1:05}-of-{n_shards:05}{name['suffix']}"


def _find_siblings(first: _Shard, n_shards: int) -> list[str]:
    """Paths of parts 2 and up, which must lie beside the first under the usual names."""
    folder, base = os.path.split(first.path)
    name = _SHARD_NAME.fullmatch(base)
    if not name or base != _shard_name(name, 0, n_shards):
        raise _error(
            first,
            f"is part 1 of {n_shards} of a split model, but its name does not end in "
            f"-00001-of-{n_shards:05}.gguf, so the other parts cannot be found",
            key=SPLIT_COUNT_KEY,
            hint="give all parts their original names, in one folder",
        )
    siblings = [_shard_name(name, idx, n_shards) for idx in range(1, n_shards)]
    missing = [sibling for sibling in siblings if not os.path.exists(os.path.join(folder, sibling))]
    if missing:
        listed = ", ".join(show_text(sibling) for sibling in missing[:_SHOWN_MISSING])
        more = f" and {len(missing) - _SHOWN_MISSING} more" if len(missing) > _SHOWN_MISSING else ""
        raise _error(
            first,
            f"is part 1 of {n_shards} of a split model; missing: {listed}{more}",
            hint="download the missing parts into the same folder, under these names",
        )
    return [os.path.join(folder, sibling) for sibling in siblings]


def _open_sibling(first: _Shard, path: str, shard_idx: int, n_shards: int) -> _Shard:
    shard = _open_shard(path, shard_idx)
    number = _split_number(shard, SPLIT_NO_KEY, 0)
    count = _split_number(shard, SPLIT_COUNT_KEY, 1)
    if (number, count) != (shard_idx, n_shards):
        raise _error(
            shard,
            f"says it is part {number + 1} of {count}; part {shard_idx + 1} of {n_shards} needed beside "
            f"{os.path.basename(first.shown_path)}",
            key=SPLIT_NO_KEY if count == n_shards else SPLIT_COUNT_KEY,
            hint="the parts come from different models or were renamed; restore their original names",
        )
    return shard


def _check_tensors_over_shards(shards: tuple[_Shard, ...]) -> None:
    seen: dict[str, _Shard] = {}
    for shard in shards:
        for tensor in shard.header.tensors:
            if tensor.name in seen:
                raise _error(
                    shard,
                    f"tensor {show_text(tensor.name)} is also in {seen[tensor.name].shown_path}",
                    key=tensor.name,
                    hint="the parts come from different splits; download all of them from one place",
                )
            seen[tensor.name] = shard
    wanted = _split_number(shards[0], SPLIT_TENSORS_KEY, len(seen))
    if wanted != len(seen):
        raise _error(
            shards[0],
            f"the {len(shards)} parts hold {len(seen)} tensors, {SPLIT_TENSORS_KEY} says {wanted}",
            key=SPLIT_TENSORS_KEY,
            hint="the parts come from different splits; download all of them from one place",
        )
