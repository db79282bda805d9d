"""The CPU backend's arena: one anonymous mapping of exactly the planned size."""

from __future__ import annotations

import ctypes
import mmap
from math import prod

import numpy as np
from numpy.typing import NDArray

from kvs_core.errors import DeviceMemoryError, StateError
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

    def locate(self, offset: int, n_bytes: int) -> int:
        """Address of arena bytes; raises StateError when they lie outside, or after ``close``."""
        if offset < 0 or offset + n_bytes > self.n_bytes:
            raise StateError(f"arena bytes {offset}..{offset + n_bytes} lie outside the arena of {self.n_bytes} bytes")
        return self.address + offset

    def move(self, *, source_offset: int, target_offset: int, n_bytes: int) -> None:
        """Copy bytes inside the arena; both places may overlap. Raises StateError as ``locate``."""
        ctypes.memmove(self.locate(target_offset, n_bytes), self.locate(source_offset, n_bytes), n_bytes)

    def poison(self, *, offset: int, n_bytes: int) -> None:
        """Make every float of these bytes NaN, whatever its size. Raises StateError as ``locate``."""
        ctypes.memset(self.locate(offset, n_bytes), 0xFF, n_bytes)

    def close(self) -> None:
        self.bytes = np.empty(0, dtype=np.uint8)
        self.n_bytes = 0
