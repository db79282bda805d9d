"""The CPU backend's arena: one anonymous mapping of exactly the planned size."""

from __future__ import annotations

import ctypes
import mmap
from math import prod

import numpy as np
from numpy.typing import NDArray

from kvs_core.errors import DeviceMemoryError
from kvs_core.workspace import PlacedArray


class CpuArena:
    """``bytes`` is the whole arena as uint8 [n_bytes]; ``array`` views a part of it."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        try:
            buffer = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise DeviceMemoryError(
                f"{n_bytes} bytes for KV cache and workspace cannot be allocated: {reason}",
                hint="this process may be limited (ulimit -v): lower the context (-c) or --kv-stream-arena-mib",
            ) from error
        # The arrays own the mapping: it is unmapped when the arena and every view of it are gone.
        self.bytes: NDArray[np.uint8] = np.frombuffer(buffer, dtype=np.uint8)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))

    def array(self, placed: PlacedArray, base: int) -> NDArray[np.float32] | NDArray[np.uint8]:
        """The workspace array ``placed``, of a workspace that starts at byte ``base``."""
        begin = base + placed.offset
        raw = self.bytes[begin : begin + placed.spec.n_bytes]
        view: NDArray[np.float32] = raw.view(placed.spec.dtype).reshape(placed.spec.shape)
        return view

    def floats(self, offset: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Float32 of that shape from byte ``offset`` on."""
        return self.bytes[offset : offset + 4 * prod(shape)].view(np.float32).reshape(shape)

    def close(self) -> None:
        self.bytes = np.empty(0, dtype=np.uint8)
        self.n_bytes = 0
