"""Launches of a step kept with their parameters, so that later steps of its kind ask for them again at little cost."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from kvs_core.errors import StateError

LaunchCall = Callable[[tuple[Any, ...]], None]
VALUE_BYTES = 8


class _Part:
    """Launches that follow each other. Few objects, since a step has thousands of launches."""

    def __init__(self) -> None:
        self._kept: list[tuple[Any, tuple[int, ...], int, bytes]] = []
        self._calls: list[tuple[Any, ...]] = []
        self._memory: tuple[Any, Any] | None = None

    def add(self, function: Any, sizes: tuple[int, ...], stream: int, values: bytes) -> None:
        self._kept.append((function, sizes, stream, values))

    def calls(self) -> list[tuple[Any, ...]]:
        """Arguments of the driver's call, one tuple a launch; they point into memory that lives as long as the part."""
        if self._memory is None:
            content = b"".join(values for *_, values in self._kept)
            values = ctypes.create_string_buffer(content, max(len(content), 1))
            base, n_values = ctypes.addressof(values), len(content) // VALUE_BYTES
            pointers = (ctypes.c_void_p * n_values)(*range(base, base + len(content), VALUE_BYTES))
            at = ctypes.addressof(pointers)
            for function, sizes, stream, own in self._kept:
                self._calls.append((function, *sizes, stream, at, 0))
                at += len(own) // VALUE_BYTES * ctypes.sizeof(ctypes.c_void_p)
            self._memory = values, pointers
            self._kept.clear()
        return self._calls


class LaunchList:
    """Launches in the order in which they were made, in parts between which the host has other things to ask for.

    Parameters are kept as they were: addresses, counts and flags of the step that was kept. Values in device memory
    (tokens, positions, page tables) are read anew.
    """

    def __init__(self, call: LaunchCall) -> None:
        self._call = call
        self._parts = [_Part()]

    def __len__(self) -> int:
        """Parts, the last one included."""
        return len(self._parts)

    def add(self, function: Any, sizes: tuple[int, ...], stream: int, values: bytes) -> None:
        """Keep a launch of the driver's ``function``.

        sizes    grid, block, dynamic bytes
        values   eight bytes for every parameter
        """
        self._parts[-1].add(function, sizes, stream, values)

    def end_part(self) -> None:
        self._parts.append(_Part())

    def replay(self, part: int) -> None:
        for arguments in self._parts[part].calls():
            self._call(arguments)


kept_in: LaunchList | None = None
"""The list that launches are kept in, besides being made; None most of the time."""


@contextmanager
def keeping_launches(launches: LaunchList) -> Iterator[None]:
    """Launches made within go into ``launches``, too."""
    global kept_in
    kept_in = launches
    try:
        yield
    finally:
        kept_in = None


class KeptSteps:
    """The launches of the latest kind of step, for steps that follow each other without a gap."""

    def __init__(self, call: LaunchCall) -> None:
        self._call = call
        self._key: Hashable = None
        self._launches = LaunchList(call)
        self._end = -1
        self._next_part = 0

    def begin(self, key: Hashable, first_pos: int, end: int) -> bool:
        """Whether the step from ``first_pos`` to ``end`` is a replay: it follows the last one and is of its kind."""
        if key != self._key or first_pos != self._end:
            return False
        self._end = end
        self._next_part = 0
        return True

    def keep(self, key: Hashable, end: int, step: Callable[[], None]) -> None:
        """Run a step and keep its launches instead of earlier ones."""
        self.forget()
        launches = LaunchList(self._call)
        with keeping_launches(launches):
            step()
        self._key, self._launches, self._end = key, launches, end

    def replay_part(self) -> None:
        """Make the launches of the next part again."""
        if self._next_part >= len(self._launches):
            raise StateError("a replayed step has more parts than the one that was kept")
        self._launches.replay(self._next_part)
        self._next_part += 1

    def forget(self) -> None:
        self._key, self._launches, self._end = None, LaunchList(self._call), -1
