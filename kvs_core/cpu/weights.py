"""Weight matrices as the CPU kernels read them: the file's own blocks, wherever they lie in memory.

No arithmetic beyond unpacking rows; products are in ``matmul``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from kvs_core.cpu import weight_rows
from kvs_core.cpu.weight_blocks import BLOCK_KINDS, BlockKind
from kvs_core.errors import KernelArgumentError, UnsupportedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

FAST_WEIGHT_TYPES: frozenset[GGMLQuantizationType] = frozenset(GGMLQuantizationType[name] for name in BLOCK_KINDS)

_EXPAND_CHUNK_WEIGHTS = 1 << 22  # bounds the float32 copy that expanding makes to 16 MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuWeight:
    """One matrix [n_out, n_in], row by row in a fast weight type.

    type          how ``data`` is packed
    source_type   how the file packs it; differs from ``type`` when the matrix was expanded to F16
    data          uint8 [n_out, row_bytes], read-only, C-contiguous; a view of the memory map unless expanded
    """

    type: GGMLQuantizationType
    source_type: GGMLQuantizationType
    n_out: int
    n_in: int
    data: NDArray[np.uint8]
    kind: BlockKind

    @property
    def row_bytes(self) -> int:
        return int(self.data.shape[1])

    @property
    def n_bytes(self) -> int:
        return self.n_out * self.row_bytes

    @property
    def is_expanded(self) -> bool:
        """Whether the matrix occupies memory of its own, as F16; worth one line to the user."""
        return self.type is not self.source_type

    def rows(self, begin: int, end: int) -> CpuWeight:
        """The matrix of rows ``begin`` to ``end``, without a copy: one expert, or one part of a fused matrix."""
        if not 0 <= begin < end <= self.n_out:
            raise KernelArgumentError(f"rows {begin}:{end} of a weight with {self.n_out} rows")
        return CpuWeight(
            type=self.type,
            source_type=self.source_type,
            n_out=end - begin,
            n_in=self.n_in,
            data=self.data[begin:end],
            kind=self.kind,
        )


def load_weight(
    weight_type: GGMLQuantizationType, *, n_out: int, n_in: int, data: NDArray[Any] | bytes | memoryview
) -> CpuWeight:
    """Make a matrix from a tensor's bytes.

    data    the whole tensor, C-contiguous, of any item type
    A fast type is used in place and ``data`` is kept alive. Any other type that ``gguf`` can dequantise is
    expanded to F16, in chunks.
    Raises  KernelArgumentError when the bytes do not make ``n_out`` rows of whole blocks;
            UnsupportedError when the type cannot be read, or its values do not fit F16.
    """
    block_weights, block_bytes = GGML_QUANT_SIZES[weight_type]
    if n_out < 1 or n_in < 1 or n_in % block_weights:
        raise KernelArgumentError(
            f"{weight_type.name} weight of {n_out} rows, {n_in} columns: columns must be a multiple of {block_weights}"
        )
    row_bytes = n_in // block_weights * block_bytes
    flat = np.frombuffer(data, dtype=np.uint8)
    if flat.size != n_out * row_bytes:
        raise KernelArgumentError(
            f"{weight_type.name} weight of {n_out} rows, {n_in} columns: {flat.size} bytes, needs {n_out * row_bytes}"
        )
    packed = flat.reshape(n_out, row_bytes)
    stored_type = weight_type
    if weight_type not in FAST_WEIGHT_TYPES:
        stored_type = GGMLQuantizationType.F16
        packed = _expand_to_f16(packed, weight_type, n_in)
    packed.flags.writeable = False  # so that every weight has the same Numba type: one compilation per kind
    return CpuWeight(
        type=stored_type,
        source_type=weight_type,
        n_out=n_out,
        n_in=n_in,
        data=packed,
        kind=BLOCK_KINDS[stored_type.name],
    )


def _expand_to_f16(packed: NDArray[np.uint8], weight_type: GGMLQuantizationType, n_in: int) -> NDArray[np.uint8]:
    n_out = packed.shape[0]
    expanded = np.empty((n_out, n_in), dtype=np.float16)
    chunk_rows = max(1, _EXPAND_CHUNK_WEIGHTS // n_in)
    for begin in range(0, n_out, chunk_rows):
        end = min(begin + chunk_rows, n_out)
        with np.errstate(over="ignore", invalid="ignore"):  # judged below, with a message
            try:
                values = dequantize(packed[begin:end], weight_type)
            except NotImplementedError as error:
                raise UnsupportedError(
                    f"weights of type {weight_type.name} cannot be read", hint="convert the model to another type"
                ) from error
            expanded[begin:end] = values
        if not np.isfinite(expanded[begin:end]).all():
            largest = float(np.abs(values).max())
            raise UnsupportedError(
                f"weights of type {weight_type.name} reach {largest:g}, beyond the F16 they are expanded to (65504)",
                hint="convert the model to Q8_0 or BF16",
            )
    return expanded.view(np.uint8)


def embed_rows(weight: CpuWeight, token_ids: NDArray[np.int32], out: NDArray[np.float32]) -> None:
    """Unpack one row per token.

    token_ids   int32 [n_tokens], each below ``weight.n_out``
    out         float32 [n_tokens, n_in], C-contiguous
    Raises      KernelArgumentError if shapes or types disagree or an id is out of range.
    """
    if token_ids.dtype != np.int32 or token_ids.ndim != 1 or not token_ids.flags.c_contiguous:
        raise KernelArgumentError(
            f"token_ids must be contiguous int32 [n_tokens], got {token_ids.dtype} {token_ids.shape}"
        )
    if out.dtype != np.float32 or out.shape != (token_ids.size, weight.n_in) or not out.flags.c_contiguous:
        raise KernelArgumentError(
            f"out must be contiguous float32 {(token_ids.size, weight.n_in)}, got {out.dtype} {out.shape}"
        )
    lowest, highest = (int(token_ids.min()), int(token_ids.max())) if token_ids.size else (0, 0)
    if lowest < 0 or highest >= weight.n_out:
        raise KernelArgumentError(f"token ids {lowest}..{highest} for an embedding of {weight.n_out} rows")
    weight_rows.embed_rows_kernel(weight.kind, weight.data, token_ids, out)
