"""Fragments of decode attention that pass through shared memory on their way: loads run further ahead of their use.

A lane copies exactly what its own fragment consists of, asynchronously, to a place of its own, and takes it from there
when it is needed: shared memory serves as registers that are not there. Nobody else reads it, so no barrier is needed.

    stage    | piece 0 of lane 0, 1, ... 31 | piece 1 of lane 0, 1, ... 31 | ...        4, 8 or 16 bytes each

``StagedLoads`` turns a tile's ``load`` (``decode_tiles``) into its two halves, by carrying it out with emitters whose
loads from global memory start a copy, or read what a copy has brought.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.cuda import types

from cuda_kernels.emit import Emitter, Value, emitted, words

Load = Callable[[Any, Value, Value, Value], list[Value]]
"""``load(emit, region, slot, lane)`` of a tile."""


class _Pieces:
    """Hands out places, and passes everything else on to an emitter."""

    def __init__(self, emit: Emitter | None, stage: Value = None, lane: Value = None) -> None:
        self._emit, self._stage, self._lane = emit, stage, lane
        self.n_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._emit, name) if self._emit is not None else lambda *_: None

    def load_stream(self, address: Value, offset: int, n_words: int) -> list[Value]:
        first = self.n_bytes
        self.n_bytes += 32 * 4 * n_words
        return self.carry(address, offset, n_words, first)

    def load_half(self, address: Value, offset: int) -> Value:
        return self._narrow(address, offset, 0xFFFF)

    def load_byte(self, address: Value, offset: int) -> Value:
        return self._narrow(address, offset, 0xFF)

    def carry(self, address: Value, offset: int, n_words: int, first: int) -> list[Value]:
        return [None] * max(1, n_words)

    def narrow(self, word: Value, address: Value, offset: int, mask: int) -> Value:
        return word

    def _narrow(self, address: Value, offset: int, mask: int) -> Value:
        """A copy brings the whole word that the bytes lie in."""
        first = self.n_bytes
        self.n_bytes += 32 * 4
        (word,) = self.carry(address, offset, 0, first)[:1]
        return self.narrow(word, address, offset, mask)

    def _place(self, n_words: int) -> Value:
        assert self._emit is not None
        return self._emit.add(self._stage, self._emit.multiply(self._lane, 4 * n_words))


class _Start(_Pieces):
    def carry(self, address: Value, offset: int, n_words: int, first: int) -> list[Value]:
        emit = self._emit
        assert emit is not None
        if n_words == 0:
            address, offset, n_words = emit.bit_and(emit.add(address, offset), -4), 0, 1
        emit.copy_words_async(self._place(n_words), address, (first, offset), n_words)
        return [None] * n_words


class _Take(_Pieces):
    def carry(self, address: Value, offset: int, n_words: int, first: int) -> list[Value]:
        assert self._emit is not None
        n_words = n_words or 1
        return self._emit.load_shared_words(self._place(n_words), first, n_words)

    def narrow(self, word: Value, address: Value, offset: int, mask: int) -> Value:
        """Regions start at multiples of 16 bytes, so the place in the row says where in its word a byte is."""
        emit = self._emit
        assert emit is not None
        shift = emit.multiply(emit.bit_and(emit.narrow(emit.add(address, offset)), 3), 8)
        return emit.bit_and(emit.shift_right(word, shift), mask)


class StagedLoads:
    """``start`` and ``take`` in place of a tile's ``load``.

    n_bytes                            of one stage of one warp
    start(region, slot, lane, stage)   intrinsic: this lane's copies to the stage at a shared address
    take(slot, lane, stage)            intrinsic: what ``load`` gives, once the copies have arrived
    """

    def __init__(self, load: Load, n_words: int) -> None:
        counted = _Pieces(None)
        load(counted, None, None, None)
        self.n_bytes = counted.n_bytes
        i32, i64, u32 = types.int32, types.int64, types.uint32

        def start(emit: Emitter, region_at: Value, slot: Value, lane: Value, stage: Value) -> None:
            load(_Start(emit, stage, lane), region_at, slot, lane)

        def take(emit: Emitter, slot: Value, lane: Value, stage: Value) -> list[Value]:
            return load(_Take(emit, stage, lane), emit.zero_address(slot), slot, lane)

        self.start_body, self.take_body = start, take
        self.start = emitted(types.void, i64, i32, i32, u32)(start)
        self.take = emitted(words(n_words), i32, i32, u32)(take)
