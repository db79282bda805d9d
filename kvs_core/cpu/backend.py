"""The CPU as a device: its memory budget, its weights, and the parts a session opens."""

from __future__ import annotations

import ctypes
from time import perf_counter

import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

from kvs_core.backend import CopyEngine
from kvs_core.cpu.arena import CpuArena
from kvs_core.cpu.copy_engine import CpuCopyEngine
from kvs_core.cpu.kernel_cache import find_unsaved_note
from kvs_core.cpu.operations import CpuOperations
from kvs_core.cpu.recurrent import LayerState
from kvs_core.cpu.team_copy_engine import TeamCopyEngine
from kvs_core.cpu.threads import ThreadTeam
from kvs_core.cpu.weights import CpuWeight, load_weight
from kvs_core.device_budget import DeviceBudget, DeviceKind
from kvs_core.errors import StateError
from kvs_core.host_memory import free_host_bytes, total_host_bytes
from kvs_core.host_store import HostStore, RamStore
from kvs_core.model_file import ModelFile
from kvs_core.model_tensors import CONVOLUTION
from kvs_core.plan import RunPlan
from kvs_core.processors import available_processors, processor_name
from kvs_core.recurrent_state import RecurrentLayer
from kvs_core.rope import rope_table_of
from kvs_core.units import MIB
from kvs_core.weight_vectors import read_vector

_COPY_PROBE_BYTES = 64 * MIB
_COPY_PROBE_TARGET_BYTES = 8 * MIB


def cpu_budget(n_threads: int | None) -> DeviceBudget:
    """What this machine offers now; needs no kernels."""
    free = free_host_bytes()
    return DeviceBudget(
        kind=DeviceKind.CPU,
        name=processor_name(),
        total_bytes=total_host_bytes(),
        free_bytes=free,
        host_free_bytes=free,
        n_threads=n_threads or available_processors(),
    )


class CpuBackend:
    """Implements ``kvs_core.backend.Backend``. Weights stay in the file's mapping, quantised as they are."""

    name = "cpu"

    def __init__(self, n_threads: int | None = None, *, notes: tuple[str, ...] = ()) -> None:
        self._budget = cpu_budget(n_threads)
        self._team = ThreadTeam(self._budget.n_threads)
        self._notes = notes
        self._matrices: dict[str, CpuWeight] = {}
        self._vectors: dict[str, NDArray[np.float32]] = {}
        self._expert_biases: dict[str, NDArray[np.float32]] = {}
        self._taps: dict[str, NDArray[np.float32]] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        unsaved = find_unsaved_note()
        return self._notes if unsaved is None else (*self._notes, unsaved)

    def budget(self) -> DeviceBudget:
        return self._budget

    def load_weights(self, model_file: ModelFile) -> tuple[str, ...]:
        """Map every tensor; ``blk.0.attn_q.weight`` is known as ``blk.0.attn_q``, its bias as ``blk.0.attn_q.bias``.

        A matrix of one row is known as a vector too: converters write the gate of a shared expert either way.
        The taps of a convolution are turned so that those of all channels lie side by side.
        Raises ModelFileError as ``read_vector``.
        """
        expanded: dict[str, int] = {}
        for name, info in model_file.tensors.items():
            key = name.removesuffix(".weight")
            raw = model_file.tensor_bytes(name)
            if info.n_rows == 1:
                self._vectors[key] = read_vector(model_file, name).reshape(-1)
            if len(info.shape) == 1:
                continue
            if key.endswith(CONVOLUTION):
                self._taps[key] = np.ascontiguousarray(dequantize(raw, info.type).reshape(info.n_rows, -1).T)
                continue
            if key.endswith(".bias"):
                self._expert_biases[key] = read_vector(model_file, name).reshape(info.n_rows, info.shape[0])
                continue
            weight = load_weight(info.type, n_out=info.n_rows, n_in=info.shape[0], data=raw)
            self._matrices[key] = weight
            if weight.is_expanded:
                expanded[info.type.name] = expanded.get(info.type.name, 0) + weight.n_bytes
        return tuple(
            f"{type_name} weights have no fast kernel and were expanded to F16: {n_bytes / MIB:.0f} MiB"
            for type_name, n_bytes in expanded.items()
        )

    def open_arena(self, n_bytes: int) -> CpuArena:
        return CpuArena(n_bytes)

    def open_copy_engine(self, plan: RunPlan, arena: CpuArena, store: HostStore) -> CopyEngine:
        """A copy thread where it has a processor of its own, or where copies wait for a disk."""
        if isinstance(store, RamStore) and self._team.n_threads >= available_processors():
            return TeamCopyEngine(arena, store, self._team)
        return CpuCopyEngine(arena, store)

    def operations(self, plan: RunPlan, arena: CpuArena) -> CpuOperations:
        if not self._matrices:
            raise StateError("weights are not loaded")
        shape = plan.shape
        return CpuOperations(
            self._matrices,
            self._vectors,
            self._expert_biases,
            self._taps,
            arena,
            recurrent={layer.layer_idx: _state_of(layer, arena) for layer in plan.recurrent_layers},
            rope=rope_table_of(shape.rope, plan.config.rope, factors=self._vectors.get("rope_freqs")),
            rope_in_window=rope_table_of(shape.rope_in_window or shape.rope),
            rope_kind=shape.rope.kind,
            rms_eps=shape.rms_eps,
            team=self._team,
        )

    def measure_copy_rate(self) -> float:
        """The best of three copies from the mapped weights, which cost no memory, to a buffer of a ring's size."""
        if not self._matrices:
            raise StateError("weights are not loaded")
        target = np.ones(_COPY_PROBE_TARGET_BYTES, dtype=np.uint8)
        sources: list[tuple[int, int]] = []
        n_bytes = 0
        for weight in sorted(self._matrices.values(), key=lambda weight: weight.n_bytes, reverse=True):
            for begin in range(0, weight.n_bytes, target.nbytes):
                sources.append((weight.data.ctypes.data + begin, min(target.nbytes, weight.n_bytes - begin)))
                n_bytes += sources[-1][1]
            if n_bytes >= _COPY_PROBE_BYTES:
                break
        best = float("inf")
        for _ in range(3):
            started = perf_counter()
            for address, size in sources:
                ctypes.memmove(target.ctypes.data, address, size)
            best = min(best, perf_counter() - started)
        return n_bytes / best

    def close(self) -> None:
        self._team.close()
        self._matrices.clear()
        self._vectors.clear()
        self._expert_biases.clear()
        self._taps.clear()


def _state_of(layer: RecurrentLayer, arena: CpuArena) -> LayerState:
    sizes = layer.recurrent
    return LayerState(
        recurrent=sizes,
        inputs=arena.floats(layer.arena_offset, sizes.conv_shape),
        matrices=arena.floats(layer.state_offset, sizes.state_shape),
    )
