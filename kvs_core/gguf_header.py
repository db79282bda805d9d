"""The header of one GGUF file: metadata and tensor table, every length checked before it is believed.
Splits, mapping and "what is this file" are model_file.py's subject; dequantisation is the ``gguf`` package's.

The ``gguf`` package has a reader of its own. It is not used here, because it trusts every length in the file (an
array length of 2**63 makes it allocate until the machine stops) and because one numpy view per string is slow.
Measured on a two-core virtual machine, SmolLM2-135M (49152 tokens, 48900 merges): GGUFReader 2.7 s, this
parser 0.036 s. A made-up vocabulary of 262144 tokens and as many merges: 18.5 s and 0.13 s.

Layout of a file, all little-endian (versions 2 and 3 differ only in that 3 may be big-endian, which is refused)::

    "GGUF" | version u32 | n_tensors u64 | n_keys u64
    n_keys    x  key string | value type u32 | value
    n_tensors x  name string | n_dims u32 | dims u64 x n_dims, ne0 first | type u32 | offset u64
    padding to general.alignment | tensor data, every tensor padded to the same alignment

    string = length u64 | UTF-8 bytes                array = element type u32 | count u64 | elements
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from kvs_core.gguf_cursor import INCOMPLETE_HINT, MALFORMED_HINT, U32, U64, Cursor
from kvs_core.messages import show_text
from kvs_core.units import align_up

MetadataValue = str | int | float | bool | list[str] | npt.NDArray[np.generic]
"""A metadata value in Python's terms; arrays of strings are lists, all other arrays read-only numpy arrays.

Bytes of a string value that are not UTF-8 become lone surrogates (``surrogateescape``), so nothing is lost.
"""

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
_MIN_KEY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8

_NUMBERS = {
    GGUFValueType.UINT8: struct.Struct("<B"),
    GGUFValueType.INT8: struct.Struct("<b"),
    GGUFValueType.UINT16: struct.Struct("<H"),
    GGUFValueType.INT16: struct.Struct("<h"),
    GGUFValueType.UINT32: U32,
    GGUFValueType.INT32: struct.Struct("<i"),
    GGUFValueType.FLOAT32: struct.Struct("<f"),
    GGUFValueType.UINT64: U64,
    GGUFValueType.INT64: struct.Struct("<q"),
    GGUFValueType.FLOAT64: struct.Struct("<d"),
}
_DTYPES = {kind: np.dtype(number.format) for kind, number in _NUMBERS.items()}

# Q8_1 and Q8_K are what llama.cpp quantises activations to; they never are in files and their sizes in the gguf
# package are those of an older layout.
_TENSOR_TYPES = {int(type_): type_ for type_ in GGML_QUANT_SIZES if type_.name not in ("Q8_1", "Q8_K")}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of the file.

    shape        GGML order: ne0 first, the contiguous axis; a numpy view has the reverse
    n_bytes      bytes as stored, padding not included
    shard_idx    which of the model's files holds it, from 0
    file_offset  of its first byte, from the start of that file
    """

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    n_elements: int
    n_bytes: int
    shard_idx: int
    file_offset: int

    @property
    def n_rows(self) -> int:
        """Rows of ``shape[0]`` elements, over all other axes."""
        return self.n_elements // self.shape[0]

    @property
    def row_bytes(self) -> int:
        """Stored bytes of one row: always a whole number of blocks."""
        return self.n_bytes // self.n_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """What one file says about itself; tensors are in file order, ``data_end`` is where the last one stops."""

    version: int
    metadata: dict[str, MetadataValue]
    tensors: tuple[TensorInfo, ...]
    alignment: int
    data_end: int


def parse_header(data: mmap | bytes, *, path: str, shown_path: str, shard_idx: int = 0) -> GgufHeader:
    """Read and check the header of a whole GGUF file given as ``data``, which must begin with the magic.

    ``path`` goes into the error's attribute, ``shown_path`` into its message.
    Raises ModelFileError for anything that is not a complete, consistent file of a supported version.
    """
    cursor = Cursor(data, path, shown_path)
    version = _read_version(cursor)
    n_tensors = cursor.integer(U64, "the tensor count")
    n_keys = cursor.integer(U64, "the metadata key count")
    cursor.expect(n_keys * _MIN_KEY_BYTES, f"a metadata key count of {n_keys}")
    metadata, alignment = _read_metadata(cursor, n_keys)
    cursor.expect(n_tensors * _MIN_TENSOR_BYTES, f"a tensor count of {n_tensors}")
    rows = _read_tensor_table(cursor, n_tensors)
    data_begin = align_up(cursor.pos, alignment)
    if rows and data_begin > cursor.size and alignment > DEFAULT_ALIGNMENT:
        raise cursor.error(
            f"{ALIGNMENT_KEY} {alignment} puts the tensor data at byte {data_begin}, the file ends at {cursor.size}",
            key=ALIGNMENT_KEY,
            hint=INCOMPLETE_HINT,
        )
    tensors = tuple(_check_tensor(cursor, row, data_begin, shard_idx) for row in rows)
    data_end = _check_layout(cursor, tensors, data_begin, alignment)
    return GgufHeader(version=version, metadata=metadata, tensors=tensors, alignment=alignment, data_end=data_end)


def _read_version(cursor: Cursor) -> int:
    cursor.skip(len(MAGIC), "the magic")
    version = cursor.integer(U32, "the version")
    if version in SUPPORTED_VERSIONS:
        return version
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if 0 < swapped < 256:
        raise cursor.error(
            f"big-endian GGUF (version {swapped}); only little-endian files are supported",
            hint="use the little-endian file of this model, or convert the byte order with the gguf package's "
            "gguf_convert_endian script",
        )
    supported = " and ".join(str(known) for known in SUPPORTED_VERSIONS)
    older = version < SUPPORTED_VERSIONS[0]
    raise cursor.error(
        f"GGUF version {version} is not supported; versions {supported} are",
        hint="the file is too old; convert the original model again" if older else "a newer kvs may read it",
    )


def _read_metadata(cursor: Cursor, n_keys: int) -> tuple[dict[str, MetadataValue], int]:
    """All keys and their values, and the alignment that the tensor data has."""
    metadata: dict[str, MetadataValue] = {}
    alignment = DEFAULT_ALIGNMENT
    for idx in range(n_keys):
        key = cursor.name(f"the name of metadata key {idx} of {n_keys}")
        what = f"metadata key {show_text(key)}"
        if key in metadata:
            raise cursor.error(f"{what} appears twice", key=key, hint=MALFORMED_HINT)
        type_id = cursor.integer(U32, f"the type of {what}")
        kind = _value_type(cursor, type_id, what, key)
        value = _read_value(cursor, kind, what, key)
        if key == ALIGNMENT_KEY:
            alignment = _check_alignment(cursor, kind, value)
        metadata[key] = value
    return metadata, alignment


def _value_type(cursor: Cursor, type_id: int, what: str, key: str) -> GGUFValueType:
    try:
        return GGUFValueType(type_id)
    except ValueError as cause:
        known = ", ".join(f"{int(kind)} {kind.name.lower()}" for kind in GGUFValueType)
        raise cursor.error(
            f"{what} has the unknown value type {type_id}; known: {known}", key=key, hint=INCOMPLETE_HINT
        ) from cause


def _read_value(cursor: Cursor, kind: GGUFValueType, what: str, key: str) -> MetadataValue:
    if kind is GGUFValueType.STRING:
        return cursor.strings(1, what)[0]
    if kind is GGUFValueType.BOOL:
        flag = cursor.take(1, what)[0]
        if flag > 1:
            raise cursor.error(f"{what} is a boolean of value {flag}; 0 or 1 needed", key=key, hint=MALFORMED_HINT)
        return bool(flag)
    if kind is not GGUFValueType.ARRAY:
        return cursor.number(_NUMBERS[kind], what)

    element = _value_type(cursor, cursor.integer(U32, f"the element type of {what}"), what, key)
    count = cursor.integer(U64, f"the length of {what}")
    if element is GGUFValueType.ARRAY:
        raise cursor.error(
            f"{what} is an array of arrays, which no model needs and kvs does not read", key=key, hint=MALFORMED_HINT
        )
    if element is GGUFValueType.STRING:
        return cursor.strings(count, what)
    counted = f"{what} with {count} elements"
    if element is GGUFValueType.BOOL:
        flags = np.frombuffer(cursor.take(count, counted), dtype=np.uint8)
        if flags.size and flags.max() > 1:
            raise cursor.error(
                f"{what} has a boolean of value {flags.max()}; 0 or 1 needed", key=key, hint=MALFORMED_HINT
            )
        return flags.view(np.bool_)
    dtype = _DTYPES[element]
    return np.frombuffer(cursor.take(count * dtype.itemsize, counted), dtype=dtype)


def _check_alignment(cursor: Cursor, kind: GGUFValueType, value: MetadataValue) -> int:
    if kind is not GGUFValueType.UINT32 or not isinstance(value, int):
        raise cursor.error(
            f"{ALIGNMENT_KEY} is stored as {kind.name.lower()}; uint32 needed", key=ALIGNMENT_KEY, hint=MALFORMED_HINT
        )
    if value < 8 or value & (value - 1):
        raise cursor.error(
            f"{ALIGNMENT_KEY} is {value}; a power of two, 8 or more, needed", key=ALIGNMENT_KEY, hint=MALFORMED_HINT
        )
    return value


class _Row(NamedTuple):
    """A row of the tensor table as read; ``offset`` counts from the start of the tensor data."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


def _read_tensor_table(cursor: Cursor, n_tensors: int) -> list[_Row]:
    rows: list[_Row] = []
    names: set[str] = set()
    for idx in range(n_tensors):
        name = cursor.name(f"the name of tensor {idx} of {n_tensors}")
        what = f"tensor {show_text(name)}"
        if name in names:
            raise cursor.error(f"{what} appears twice", key=name, hint=MALFORMED_HINT)
        names.add(name)
        n_dims = cursor.integer(U32, f"n_dims of {what}")
        if not 1 <= n_dims <= MAX_DIMS:
            raise cursor.error(f"{what} has n_dims {n_dims}; 1 to {MAX_DIMS} needed", key=name, hint=INCOMPLETE_HINT)
        shape = struct.unpack_from(f"<{n_dims}Q", cursor.data, cursor.skip(8 * n_dims, f"the dims of {what}"))
        type_id = cursor.integer(U32, f"the type of {what}")
        offset = cursor.integer(U64, f"the offset of {what}")
        rows.append(_Row(name, shape, type_id, offset))
    return rows


def _check_tensor(cursor: Cursor, row: _Row, data_begin: int, shard_idx: int) -> TensorInfo:
    """The tensor of one row, its size computed in Python's unbounded integers."""
    what = f"tensor {show_text(row.name)}"
    if row.type_id not in _TENSOR_TYPES:
        known = ", ".join(f"{type_id} {type_.name}" for type_id, type_ in _TENSOR_TYPES.items())
        raise cursor.error(
            f"{what} has the unknown type {row.type_id}; known: {known}",
            key=row.name,
            hint="the type is newer than this kvs or belongs to a fork; use a file quantised by llama.cpp",
        )
    type_ = _TENSOR_TYPES[row.type_id]
    block_elements, block_bytes = GGML_QUANT_SIZES[type_]
    n_elements = math.prod(row.shape)
    if not 0 < n_elements < 1 << 63:
        raise cursor.error(
            f"{what} has dims {show_shape(row.shape)}, {n_elements} elements; 1 to 2^63 - 1 needed",
            key=row.name,
            hint=INCOMPLETE_HINT,
        )
    if row.shape[0] % block_elements:
        raise cursor.error(
            f"{what} has rows of {row.shape[0]} elements; type {type_.name} needs a multiple of {block_elements}",
            key=row.name,
            hint="quantise this tensor to a type whose blocks divide its rows",
        )
    return TensorInfo(
        name=row.name,
        type=type_,
        shape=row.shape,
        n_elements=n_elements,
        n_bytes=n_elements // block_elements * block_bytes,
        shard_idx=shard_idx,
        file_offset=data_begin + row.offset,
    )


def _check_layout(cursor: Cursor, tensors: Sequence[TensorInfo], data_begin: int, alignment: int) -> int:
    """Tensors lie in the file, aligned, one right after the other; returns where the last one ends.

    A gap is refused as an overlap is, as llama.cpp does: where a fork uses a type number for something else, the
    sizes computed here are wrong and the gap is the only sign of it.
    """
    end = data_begin
    where = "the tensor data begins"
    file_end = max((tensor.file_offset + tensor.n_bytes for tensor in tensors), default=data_begin)
    for tensor in sorted(tensors, key=lambda tensor: tensor.file_offset):
        what = f"tensor {show_text(tensor.name)} ({tensor.type.name}, {show_shape(tensor.shape)})"
        begin = tensor.file_offset
        if (begin - data_begin) % alignment:
            raise cursor.error(
                f"{what} begins at data offset {begin - data_begin}; a multiple of {ALIGNMENT_KEY} {alignment} needed",
                key=tensor.name,
                hint=INCOMPLETE_HINT,
            )
        if begin + tensor.n_bytes > cursor.size:
            raise cursor.error(
                f"{what} does not fit: it needs {tensor.n_bytes} bytes at byte {begin}, the file has {cursor.size} "
                f"bytes of the {file_end} that its header asks for",
                key=tensor.name,
                hint=INCOMPLETE_HINT,
            )
        if begin != align_up(end, alignment):
            problem = "overlaps what comes before it" if begin < end else "leaves a gap"
            raise cursor.error(
                f"{what} {problem}: it begins at byte {begin}, {where} at byte {end}",
                key=tensor.name,
                hint="the file is damaged, or comes from a fork that uses a type number for a type of its own",
            )
        end = begin + tensor.n_bytes
        where = f"tensor {show_text(tensor.name)} ends"
    return end


def show_shape(shape: Sequence[int]) -> str:
    """A tensor shape as llama.cpp prints it: ``576 x 49152``, the contiguous axis first."""
    return " x ".join(str(dim) for dim in shape)
