"""Weights in device memory: one allocation for all of them, quantised as in the file, in the layout kernels read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from cuda.bindings import driver
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from cuda_kernels.device import DeviceMemory, checked, raw_stream
from cuda_kernels.weights import FAST_TYPES, WeightGeometry, lay_out
from kvs_core.cpu.weights import load_weight
from kvs_core.gguf_header import TensorInfo
from kvs_core.model_file import ModelFile
from kvs_core.model_tensors import CONVOLUTION
from kvs_core.units import MIB, align_up
from kvs_core.weight_vectors import read_vector

_ALIGNMENT = 256
_STAGING_BYTES = 64 * MIB
_SHARED_GATE = ".ffn_gate_inp_shexp.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMatrix:
    """``data`` uint8 [geometry.n_bytes]."""

    data: Any
    geometry: WeightGeometry


class DeviceWeights:
    """Every tensor by its name without ``.weight``: matrices quantised, vectors and biases as float32.

    ``taps``: the taps of convolutions, float32 [n_taps, n_channels], those of all channels side by side.
    """

    def __init__(self, model_file: ModelFile, stream: Any) -> None:
        self.matrices: dict[str, DeviceMatrix] = {}
        self.vectors: dict[str, Any] = {}
        self.taps: dict[str, Any] = {}
        self.host_vectors: dict[str, NDArray[np.float32]] = {}
        self.expanded_bytes: dict[str, int] = {}
        geometries, places, end = _place(model_file)
        self.memory = DeviceMemory(end, "weights")
        staging = DeviceMemory(_STAGING_BYTES, "the loader's window")
        try:
            for name, info in model_file.tensors.items():
                model_file.release_pages()  # of the tensor before: a run keeps nothing of the file in memory
                key, offset = name.removesuffix(".weight"), places[name]
                raw = model_file.tensor_bytes(name)
                if _is_vector(name, info):
                    values = read_vector(model_file, name)
                    self.host_vectors[key] = values
                    self._copy(self.memory.address + offset, values.view(np.uint8), stream)
                    shape = info.shape[:1] if info.n_rows == 1 else (info.n_rows, info.shape[0])
                    self.vectors[key] = self.memory.view(offset, shape, np.float32)
                    continue
                if key.endswith(CONVOLUTION):
                    turned = np.ascontiguousarray(dequantize(raw, info.type).reshape(info.n_rows, -1).T, np.float32)
                    self._copy(self.memory.address + offset, turned.reshape(-1).view(np.uint8), stream)
                    self.taps[key] = self.memory.view(offset, turned.shape, np.float32)
                    continue
                geometry = geometries[name]
                if info.type is not geometry.weight_type:
                    raw = load_weight(info.type, n_out=info.n_rows, n_in=info.shape[0], data=raw).data
                    self.expanded_bytes[info.type.name] = self.expanded_bytes.get(info.type.name, 0) + geometry.n_bytes
                blocks = np.frombuffer(raw, dtype=np.uint8).reshape(geometry.n_rows, -1)
                self._upload(geometry, offset, blocks, staging, stream)
                data = self.memory.view(offset, (geometry.n_bytes,), np.uint8)
                self.matrices[key] = DeviceMatrix(data=data, geometry=geometry)
        except BaseException:
            self.memory.close()
            raise
        finally:
            checked(driver.cuStreamSynchronize(raw_stream(stream)), "loading weights")
            model_file.release_pages()
            staging.close()

    def close(self) -> None:
        self.memory.close()

    def _upload(
        self, geometry: WeightGeometry, offset: int, blocks: NDArray[np.uint8], staging: DeviceMemory, stream: Any
    ) -> None:
        if geometry.is_as_in_file:
            self._copy(self.memory.address + offset, blocks, stream)
            return
        unit_bytes = np.dtype(geometry.unit).itemsize
        matrix = self.memory.view(offset, (geometry.n_bytes // unit_bytes,), geometry.unit)
        row_bytes = blocks.shape[1]
        step = max(1, staging.n_bytes // row_bytes)
        for first_row in range(0, geometry.n_rows, step):
            part = blocks[first_row : first_row + step]
            self._copy(staging.address, part, stream)
            units = staging.view(0, (part.size // unit_bytes,), geometry.unit)
            lay_out(units, matrix, geometry=geometry, first_row=first_row, stream=stream)

    def _copy(self, address: int, data: NDArray[np.uint8], stream: Any) -> None:
        """From ordinary memory, in order with the stream's kernels."""
        contiguous = np.ascontiguousarray(data)
        checked(
            driver.cuMemcpyHtoDAsync(address, contiguous.ctypes.data, contiguous.nbytes, raw_stream(stream)),
            "copying weights",
        )


def _is_vector(name: str, info: TensorInfo) -> bool:
    """Whether a tensor is float32 on the device: vectors, biases of experts, the one row that gates a shared expert."""
    is_shared_gate = name.endswith(_SHARED_GATE) and info.n_rows == 1
    return len(info.shape) == 1 or name.endswith(".bias") or is_shared_gate


def _place(model_file: ModelFile) -> tuple[dict[str, WeightGeometry], dict[str, int], int]:
    """Geometry of each matrix, offset of each tensor, bytes of all."""
    geometries: dict[str, WeightGeometry] = {}
    places: dict[str, int] = {}
    end = 0
    for name, info in model_file.tensors.items():
        places[name] = end
        if _is_vector(name, info) or name.removesuffix(".weight").endswith(CONVOLUTION):
            n_bytes = 4 * info.shape[0] * info.n_rows
        else:
            weight_type = info.type if info.type in FAST_TYPES else GGMLQuantizationType.F16
            geometry = WeightGeometry(weight_type=weight_type, n_rows=info.n_rows, n_cols=info.shape[0])
            geometry.check()
            geometries[name] = geometry
            n_bytes = geometry.n_bytes
        end = align_up(end + n_bytes, _ALIGNMENT)
    return geometries, places, end
