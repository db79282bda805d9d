"""Launches of a step kept with their parameters, so that later steps of its kind ask for them again at little cost."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvs_core.errors import StateError

LaunchCall = Callable[[tuple[Any, ...]], None]


@dataclass(frozen=True, slots=True)
class _Launch:
    """``arguments`` of the driver's call, which point into ``values`` and ``pointers``."""

    arguments: tuple[Any, ...]
    values: Any
    pointers: Any


class LaunchList:
    """Launches in the order in which they were made, in parts between which the host has other things to ask for.

    Parameters are kept as they were: addresses, counts and flags of the step that was kept. Values in device memory
    (tokens, positions, page tables) are read anew.
    """

    def __init__(self, call: LaunchCall) -> None:
        self._call = call
        self._parts: list[list[_Launch]] = [[]]

    def __len__(self) -> int:
        """Parts, the last one included."""
        return len(self._parts)

    def add(self, function: Any, sizes: tuple[int, ...], stream: int, values: Any) -> None:
        """Keep a launch of the driver's ``function``; ``sizes``: grid, block, dynamic bytes; ``values`` are copied."""
        own = type(values).from_buffer_copy(values)
        base = ctypes.addressof(own)
        pointers = (ctypes.c_void_p * len(own))(*(base + 8 * i for i in range(len(own))))
        arguments = (function, *sizes, stream, ctypes.addressof(pointers), 0)
        self._parts[-1].append(_Launch(arguments, own, pointers))

    def end_part(self) -> None:
        self._parts.append([])

    def replay(self, part: int) -> None:
        for launch in self._parts[part]:
            self._call(launch.arguments)


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
