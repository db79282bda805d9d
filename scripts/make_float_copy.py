"""Copy a GGUF with its quantised matrices written out as F16 or F32: `make_float_copy.py SRC DST [--type f16|f32]`.

On such a copy two programs can be compared closely: with quantised weights each rounds the activations in its own way.
The F32 copy holds exactly the values of the source. The F16 copy rounds them, and the script says by how much.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

FILE_TYPES = {"f16": gguf.LlamaFileType.MOSTLY_F16, "f32": gguf.LlamaFileType.ALL_F32}
FLOAT_TYPES = {"f16": np.float16, "f32": np.float32}
# the writer makes these itself
WRITTEN_KEYS = ("general.architecture", "GGUF.version", "GGUF.tensor_count", "GGUF.kv_count")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """How many matrix values a copy changed, and the largest change as a share of its matrix's largest value."""

    n_values: int
    n_rounded: int
    worst: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--type", choices=FLOAT_TYPES, default="f16")
    arguments = parser.parse_args()

    rounding = write_float_copy(arguments.source, arguments.target, arguments.type)
    share = rounding.n_rounded / max(1, rounding.n_values)
    print(f"{arguments.target}  {arguments.target.stat().st_size} bytes")
    print(
        f"{share:.1%} of {rounding.n_values} matrix values rounded, "
        f"by {rounding.worst:.1e} of a matrix's largest value at most"
    )
    return 0


def write_float_copy(source: Path, target: Path, kind: str) -> Rounding:
    """Write `target` with every quantised matrix of `source` as `kind` ("f16" or "f32"); vectors stay as they are.

    Raises   ValueError if a value does not fit float16
    """
    reader = gguf.GGUFReader(str(source))
    writer = gguf.GGUFWriter(str(target), reader.fields["general.architecture"].contents())
    _copy_metadata(reader, writer, FILE_TYPES[kind])

    n_values = n_rounded = 0
    worst = 0.0
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        written = values
        if tensor.tensor_type is not GGMLQuantizationType.F32 and values.ndim > 1:
            largest = float(np.abs(values).max())
            if largest > np.finfo(FLOAT_TYPES[kind]).max:
                raise ValueError(f"{tensor.name} does not fit {kind}: its largest value is {largest}")
            written = values.astype(FLOAT_TYPES[kind])
            difference = np.abs(written.astype(np.float32) - values)
            n_values += values.size
            n_rounded += int(np.count_nonzero(difference))
            worst = max(worst, float(difference.max()) / largest)
        writer.add_tensor(tensor.name, written)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Rounding(n_values=n_values, n_rounded=n_rounded, worst=worst)


def _copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter, file_type: gguf.LlamaFileType) -> None:
    for key, entry in reader.fields.items():
        if key in WRITTEN_KEYS:
            continue
        value = int(file_type) if key == "general.file_type" else entry.contents()
        is_array = entry.types[0] is GGUFValueType.ARRAY
        writer.add_key_value(key, value, entry.types[0], entry.types[-1] if is_array else None)


if __name__ == "__main__":
    raise SystemExit(main())
