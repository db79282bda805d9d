"""A CUDA device as a backend: its budget, its weights, and the parts a session opens."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
from cuda.bindings import driver
from numba import cuda

from cuda_kernels.copy_engine import CudaCopyEngine
from cuda_kernels.device import (
    DeviceMemory,
    Event,
    PinnedBuffer,
    checked,
    device_name,
    memory_info,
    open_device,
    raw_stream,
)
from cuda_kernels.device_weights import DeviceWeights
from cuda_kernels.launch import keep_kernels, prepare_kernels
from cuda_kernels.locked_store import LockedStore
from cuda_kernels.needed_kernels import needed_kernels
from cuda_kernels.operations import CudaOperations, DeviceRope
from cuda_kernels.overlap import OVERLAP_CAPABILITY
from cuda_kernels.products import LtProducts
from cuda_kernels.rope import RopePairing
from kvs_core.cuda_scratch import LT_WORKSPACE_BYTES
from kvs_core.device_budget import DeviceBudget, DeviceKind
from kvs_core.devices import DeviceName
from kvs_core.errors import StateError, UnsupportedError
from kvs_core.host_memory import free_host_bytes
from kvs_core.host_store import HostStore, RamStore
from kvs_core.kernel_files import KernelFiles
from kvs_core.model_file import ModelFile
from kvs_core.model_shape import RopeKind
from kvs_core.plan import RunPlan
from kvs_core.rope import RopeTable, rope_table_of
from kvs_core.units import MIB

_COPY_PROBE_BYTES = 256 * MIB
_PAIRINGS = {RopeKind.NORM: RopePairing.ADJACENT, RopeKind.NEOX: RopePairing.HALVES}


class CudaBackend:
    """Implements ``kvs_core.backend.Backend``; every session computes on the same stream."""

    def __init__(self, wanted: DeviceName, *, kernel_files: KernelFiles | None = None) -> None:
        """``kernel_files`` keeps compiled kernels for the next start; without it every start compiles."""
        self._kernel_files = kernel_files
        keep_kernels(kernel_files)
        self._device = open_device(wanted)
        self.name = f"cuda:{self._device.id}"
        self._stream = cuda.stream()
        self._products = LtProducts(LT_WORKSPACE_BYTES)
        self._weights: DeviceWeights | None = None
        self._closing = ExitStack()
        self._closing.callback(self._products.close)
        self._notes: list[str] = []

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes)

    @property
    def _compute_capability(self) -> tuple[int, int]:
        major, minor = self._device.compute_capability
        return int(major), int(minor)

    def budget(self) -> DeviceBudget:
        free, total = memory_info()
        return DeviceBudget(
            kind=DeviceKind.CUDA,
            name=device_name(self._device),
            total_bytes=total,
            free_bytes=free,
            host_free_bytes=free_host_bytes(),
            compute_capability=self._compute_capability,
        )

    def load_weights(self, model_file: ModelFile) -> tuple[str, ...]:
        if self._weights is not None:
            raise StateError("weights are loaded already")
        self._weights = DeviceWeights(model_file, self._stream)
        self._closing.callback(self._weights.close)
        return tuple(
            f"{type_name} weights have no fast kernel and were expanded to F16: {n_bytes / MIB:.0f} MiB"
            for type_name, n_bytes in self._weights.expanded_bytes.items()
        )

    def open_arena(self, n_bytes: int) -> DeviceMemory:
        return DeviceMemory(n_bytes, "arena")

    def open_copy_engine(self, plan: RunPlan, arena: DeviceMemory, store: HostStore) -> CudaCopyEngine:
        if not isinstance(store, RamStore):
            raise UnsupportedError(
                "a host store in a file cannot be copied to a GPU", hint="leave --kv-stream-store out"
            )
        locked = LockedStore(store, plan.store_layer_offsets, report=self._notes.append)
        try:
            return CudaCopyEngine(arena, locked, raw_stream(self._stream))
        except BaseException:
            locked.close()
            raise

    def operations(self, plan: RunPlan, arena: DeviceMemory) -> CudaOperations:
        if self._weights is None:
            raise StateError("weights are not loaded")
        shape, weights = plan.shape, self._weights
        table = rope_table_of(shape.rope, plan.config.rope, factors=weights.host_vectors.get("rope_freqs"))
        in_window = rope_table_of(shape.rope_in_window or shape.rope)
        pairing = _PAIRINGS[shape.rope.kind]
        n_pairs = {False: len(table.freqs), True: len(in_window.freqs)}
        prepare_kernels(needed_kernels(plan, weights.matrices, weights.vectors, pairing, n_pairs))
        self._note_unkept_kernels()
        return CudaOperations(
            plan,
            arena,
            matrices=weights.matrices,
            vectors=weights.vectors,
            taps=weights.taps,
            rope=_rope_on_device(table, pairing),
            rope_in_window=_rope_on_device(in_window, pairing),
            products=self._products,
            stream=self._stream,
            overlaps=self._compute_capability >= OVERLAP_CAPABILITY,
        )

    def _note_unkept_kernels(self) -> None:
        warning = None if self._kernel_files is None else self._kernel_files.warning
        if warning is not None and warning not in self.notes:
            self._notes.append(warning)

    def measure_copy_rate(self) -> float:
        stream = raw_stream(self._stream)
        best = float("inf")
        with ExitStack() as closing:
            source = PinnedBuffer(_COPY_PROBE_BYTES)
            closing.callback(source.close)
            target = DeviceMemory(_COPY_PROBE_BYTES, "the copy probe")
            closing.callback(target.close)
            for _ in range(4):
                begin, end = Event(timed=True), Event(timed=True)
                begin.record(stream)
                checked(
                    driver.cuMemcpyHtoDAsync(target.address, source.address, _COPY_PROBE_BYTES, stream), "a probe copy"
                )
                end.record(stream)
                end.wait()
                best = min(best, end.seconds_since(begin))
                begin.close()
                end.close()
        return _COPY_PROBE_BYTES / best

    def close(self) -> None:
        self.synchronise()
        self._closing.close()
        self._weights = None

    def synchronise(self) -> Any:
        """Everything asked for has been computed."""
        return checked(driver.cuStreamSynchronize(raw_stream(self._stream)), "a step")


def _rope_on_device(table: RopeTable, pairing: RopePairing) -> DeviceRope:
    frequencies = cuda.to_device(table.freqs.astype(np.float64))
    return DeviceRope(frequencies=frequencies, magnitude=table.magnitude, pairing=pairing)
