"""The emitter of the CUDA kernels, carried out by numpy on the 32 lanes of a warp: fragments checked without a device.

A register is an array of 32 lanes: uint32 words, float32, int64 addresses, bool conditions. Global memory is one array
of bytes and an address an offset into it; shared memory is another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from cuda_kernels.emit import Emitter

LANES = np.arange(32)


class NumpyEmitter(Emitter):
    """Overrides every primitive that the fragments use; what is composed of primitives is inherited."""

    def __init__(self, memory: np.ndarray, shared: np.ndarray | None = None) -> None:
        self.memory = memory
        self.shared = np.zeros(0, np.uint8) if shared is None else shared
        self._active = np.ones(32, bool)

    def asm(self, text: str, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"no numpy version of {text}")

    def word(self, value: int) -> np.ndarray:
        return np.full(32, value & 0xFFFFFFFF, np.uint32)

    def held_words(self, values: Sequence[int], number: np.ndarray) -> list[np.ndarray]:
        return [self.word(value) for value in values]

    def float(self, value: float) -> np.ndarray:
        return np.full(32, value, np.float32)

    @staticmethod
    def _like(a: np.ndarray, b: Any) -> Any:
        return np.array(b & 0xFFFFFFFF if a.dtype == np.uint32 else b).astype(a.dtype) if isinstance(b, int) else b

    def add(self, a: np.ndarray, b: Any) -> np.ndarray:
        return np.asarray(a + self._like(a, b), a.dtype)

    def subtract(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a - b

    def multiply(self, a: np.ndarray, b: int) -> np.ndarray:
        return np.asarray(a * self._like(a, b), a.dtype)

    def divide(self, a: np.ndarray, b: int) -> np.ndarray:
        return a // self._like(a, b)

    def remainder(self, a: np.ndarray, b: int) -> np.ndarray:
        return a % self._like(a, b)

    def clamp(self, a: np.ndarray, low: int, high: int) -> np.ndarray:
        return np.clip(a.view(np.int32), low, high).view(np.uint32)

    def shift_left(self, a: np.ndarray, n_bits: Any) -> np.ndarray:
        return a << self._like(a, n_bits)

    def shift_right(self, a: np.ndarray, n_bits: Any) -> np.ndarray:
        return a >> self._like(a, n_bits)

    def shift_right_signed(self, a: np.ndarray, n_bits: int) -> np.ndarray:
        return (a.view(np.int32) >> n_bits).view(np.uint32)

    def rotate_right(self, a: np.ndarray, n_bits: Any) -> np.ndarray:
        n = self._like(a, n_bits)
        return (a >> n) | (a << (np.uint32(32) - n) % np.uint32(32))

    def bit_and(self, a: np.ndarray, mask: int) -> np.ndarray:
        return a & self._like(a, mask)

    def bit_or(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a | b

    def bit_select(self, mask: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (a & np.uint32(mask)) | (b & ~np.uint32(mask))

    def bit_xor(self, a: np.ndarray, b: Any) -> np.ndarray:
        return a ^ self._like(a, b)

    def narrow(self, a: np.ndarray) -> np.ndarray:
        return a.astype(np.uint32)

    def maximum(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.maximum(a.view(np.int32), b.view(np.int32)).view(np.uint32)

    def warp_maximum(self, a: np.ndarray) -> np.ndarray:
        return np.full(32, a.view(np.int32).max(), np.int32).view(np.uint32)

    def warp_minimum(self, a: np.ndarray) -> np.ndarray:
        return np.full(32, a.view(np.int32).min(), np.int32).view(np.uint32)

    def widen(self, a: np.ndarray) -> np.ndarray:
        return a.view(np.int32).astype(np.int64)

    def is_shared(self, address: np.ndarray) -> bool:
        return address.dtype == np.uint32

    def less(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.asarray(a.view(np.int32) < b.view(np.int32))

    def is_not_zero(self, a: np.ndarray) -> np.ndarray:
        return a != 0

    @contextmanager
    def when(self, condition: np.ndarray) -> Iterator[None]:
        """Stores within are made by lanes where the condition holds."""
        before = self._active
        self._active = before & condition
        yield
        self._active = before

    def equal(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.asarray(a == b)

    def select(self, condition: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.where(condition, a, b)

    def fma(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        return (a.astype(np.float64) * b + c).astype(np.float32)

    def float_multiply(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a * b

    def float_add(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a + b

    def float_subtract(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a - b

    def round_to_int(self, a: np.ndarray) -> np.ndarray:
        return np.rint(a).astype(np.int32).view(np.uint32)

    def float_negate(self, a: np.ndarray) -> np.ndarray:
        return -a

    def float_minimum(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.fmin(a, b)

    def float_maximum(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.fmax(a, b)

    def float_divide(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            return a / b

    def float_reciprocal(self, a: np.ndarray) -> np.ndarray:
        return np.float32(1.0) / a

    def exp2(self, a: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return np.exp2(a)

    def float_absolute(self, a: np.ndarray) -> np.ndarray:
        return np.abs(a)

    def float_square_root(self, a: np.ndarray) -> np.ndarray:
        return np.sqrt(a)

    def float_to_int(self, a: np.ndarray) -> np.ndarray:
        return np.trunc(np.where(np.isfinite(a), a, 0)).astype(np.int32).view(np.uint32)

    def float_less(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.asarray(a < b)

    def float_equal(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.asarray(a == b)

    def flag(self, condition: np.ndarray) -> np.ndarray:
        return condition.astype(np.uint32)

    def from_lane(self, a: np.ndarray, lane: np.ndarray) -> np.ndarray:
        return a[lane]

    def ballot(self, condition: np.ndarray) -> np.ndarray:
        return self.word(int(np.sum(condition.astype(np.uint64) << LANES.astype(np.uint64))))

    def lowest_bit(self, a: np.ndarray) -> np.ndarray:
        return np.array([(int(x) & -int(x)).bit_length() - 1 if x else 32 for x in a], np.uint32)

    def int_to_float(self, a: np.ndarray) -> np.ndarray:
        return a.view(np.int32).astype(np.float32)

    def as_float(self, word: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(word).view(np.float32)

    def as_word(self, value: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(value).view(np.uint32)

    def pack_half2(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            return _join(low.astype(np.float16), high.astype(np.float16))

    def float_to_half(self, a: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return a.astype(np.float16).view(np.uint16).astype(np.uint32)

    def pack_finite_half2(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        largest = np.float32(np.finfo(np.float16).max)
        return self.pack_half2(low.clip(-largest, largest), high.clip(-largest, largest))

    def low_half_to_float(self, word: np.ndarray) -> np.ndarray:
        return _halves(word)[0].astype(np.float32)

    def high_half_to_float(self, word: np.ndarray) -> np.ndarray:
        return _halves(word)[1].astype(np.float32)

    def half2_subtract(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return _join(*(x - y for x, y in zip(_halves(a), _halves(b), strict=True)))

    def half2_multiply(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return _join(*(x * y for x, y in zip(_halves(a), _halves(b), strict=True)))

    def half2_fma(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        parts = zip(_halves(a), _halves(b), _halves(c), strict=True)
        return _join(*(x.astype(np.float64) * y + z for x, y, z in parts))

    def permute(self, a: np.ndarray, b: np.ndarray, selector: Any) -> np.ndarray:
        digits = self.word(selector) if isinstance(selector, int) else selector
        pool = np.stack([a, b], axis=-1).astype("<u4").view(np.uint8).reshape(32, 8)
        places = np.stack([digits >> np.uint32(4 * i) & np.uint32(15) for i in range(4)], axis=-1).astype(np.int64)
        picked = np.take_along_axis(pool, places & 7, axis=-1)
        picked = np.where(places < 8, picked, (picked.view(np.int8) >> 7).view(np.uint8))
        return np.ascontiguousarray(picked).view("<u4")[:, 0]

    def dot4(self, a: np.ndarray, b: np.ndarray, accumulator: np.ndarray) -> np.ndarray:
        products = _signed_bytes(a) * _signed_bytes(b)
        return (accumulator.view(np.int32) + products.sum(axis=-1, dtype=np.int32)).view(np.uint32)

    def dot2(self, a: np.ndarray, b: np.ndarray, accumulator: np.ndarray, *, upper: bool) -> np.ndarray:
        halves, some = a.view(np.int16).reshape(-1, 2), b.view(np.int8).reshape(-1, 4)
        products = halves.astype(np.int32) * some[:, 2 * upper : 2 * upper + 2]
        return (accumulator.view(np.int32) + products.sum(axis=1, dtype=np.int32)).view(np.uint32)

    def add_byte_times_128(self, word: np.ndarray, i: int, base: np.ndarray) -> np.ndarray:
        return base + (word >> np.uint32(8 * i) & np.uint32(255)) * np.uint32(128)

    def transpose(self, a: np.ndarray) -> np.ndarray:
        matrix = np.stack(_halves(a), axis=-1).reshape(8, 8)
        pairs = np.ascontiguousarray(matrix.T).reshape(32, 2)
        return _join(pairs[:, 0], pairs[:, 1])

    def mma(self, a: Sequence[np.ndarray], b: Sequence[np.ndarray], c: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The layout of ``mma.m16n8k16``: lane 4 g + t holds rows g and g + 8, columns 2t and 2t + 1 and 8 further."""
        g, t = LANES // 4, LANES % 4
        left, right = np.zeros((16, 16)), np.zeros((16, 8))
        for i, register in enumerate(a):
            for j, half in enumerate(_halves(register)):
                left[g + 8 * (i % 2), 2 * t + j + 8 * (i // 2)] = half
        for i, register in enumerate(b):
            for j, half in enumerate(_halves(register)):
                right[2 * t + j + 8 * i, g] = half
        product = left @ right
        return [(c[i] + product[g + 8 * (i // 2), 2 * t + i % 2]).astype(np.float32) for i in range(4)]

    def mma_bytes(self, a: Sequence[np.ndarray], b: np.ndarray, c: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The layout of ``mma.m16n8k16`` for bytes: lane 4 g + t has bytes 4t to 4t + 3 of rows g and g + 8."""
        g, t = LANES // 4, LANES % 4
        left, right = np.zeros((16, 16), np.int32), np.zeros((16, 8), np.int32)
        for j in range(4):
            for i, register in enumerate(a):
                left[g + 8 * i, 4 * t + j] = register.view(np.int8).reshape(32, 4)[:, j]
            right[4 * t + j, g] = b.view(np.int8).reshape(32, 4)[:, j]
        product = left @ right
        return [(c[i].view(np.int32) + product[g + 8 * (i // 2), 2 * t + i % 2]).view(np.uint32) for i in range(4)]

    def exchange(self, a: np.ndarray, lane_mask: int) -> np.ndarray:
        return a[LANES ^ lane_mask]

    def load_stream(self, address: np.ndarray, offset: int, n_words: int, *, recent: bool = False) -> list[np.ndarray]:
        return self._words_at(self.memory, address + offset, n_words)

    def load_cached(self, address: np.ndarray, offset: int, n_words: int) -> list[np.ndarray]:
        return self._words_at(self.memory, address + offset, n_words)

    def load_recent(self, address: np.ndarray, offset: int, n_words: int) -> list[np.ndarray]:
        return self._words_at(self.memory, address + offset, n_words)

    def load_float(self, address: np.ndarray, offset: int) -> np.ndarray:
        return self._words_at(self.memory, address + offset, 1)[0].view(np.float32)

    def load_early(self, address: np.ndarray, offset: int) -> np.ndarray:
        return self._words_at(self.memory, address + offset, 1)[0]

    def load_half(self, address: np.ndarray, offset: int, *, recent: bool = False) -> np.ndarray:
        at = address + offset
        assert not np.any(at % 2)
        return self.memory[at[:, None] + np.arange(2)].view("<u2")[:, 0].astype(np.uint32)

    def load_byte(self, address: np.ndarray, offset: int, *, recent: bool = False) -> np.ndarray:
        return self.memory[address + offset].astype(np.uint32)

    def store_byte_if(self, flag: np.ndarray, address: np.ndarray, value: np.ndarray) -> None:
        self._store_if(flag, address, value, 1)

    def store_half_if(self, flag: np.ndarray, address: np.ndarray, value: np.ndarray) -> None:
        self._store_if(flag, address, value, 2)

    def store_word_if(self, flag: np.ndarray, address: np.ndarray, value: np.ndarray) -> None:
        self._store_if(flag, address, value, 4)

    def _store_if(self, flag: np.ndarray, address: np.ndarray, value: np.ndarray, n_bytes: int) -> None:
        assert not np.any(address % n_bytes)
        stored = np.ascontiguousarray(value).astype("<u4").view(np.uint8).reshape(32, 4)[:, :n_bytes]
        self.memory[(address[:, None] + np.arange(n_bytes))[flag != 0]] = stored[flag != 0]

    def load_shared_words(self, address: np.ndarray, offset: int, n_words: int) -> list[np.ndarray]:
        return self._words_at(self.shared, address.astype(np.int64) + offset, n_words)

    def load_matrices(self, address: np.ndarray, offset: int, *, transposed: bool = False) -> list[np.ndarray]:
        pieces = np.stack(self._words_at(self.shared, address.astype(np.int64) + offset, 4), axis=-1)
        if transposed:
            halves = np.ascontiguousarray(pieces).view(np.float16).reshape(4, 8, 8).transpose(0, 2, 1)
            words = np.ascontiguousarray(halves).view("<u4")
            return [words[i].reshape(32) for i in range(4)]
        return [np.ascontiguousarray(pieces[8 * i + LANES // 4, LANES % 4]) for i in range(4)]

    def store_shared_words(self, address: np.ndarray, offset: int, values: Sequence[np.ndarray]) -> None:
        at = address.astype(np.int64) + offset
        assert not np.any(at % (4 * len(values)))
        data = np.stack(values, axis=-1).astype("<u4").view(np.uint8)
        self.shared[(at[:, None] + np.arange(4 * len(values)))[self._active]] = data[self._active]

    def store_words(self, address: np.ndarray, offset: int, values: Sequence[np.ndarray]) -> None:
        at = address + offset
        data = np.stack(values, axis=-1).astype("<u4").view(np.uint8)
        self.memory[(at[:, None] + np.arange(4 * len(values)))[self._active]] = data[self._active]

    def copy_16_async(
        self, shared: np.ndarray, address: np.ndarray, offsets: tuple[int, int], n_bytes: np.ndarray
    ) -> None:
        """Arrives at once."""
        target, source = shared.astype(np.int64) + offsets[0], address + offsets[1]
        assert not np.any(target % 16)
        assert not np.any(source % 16)
        counted = np.arange(16) < n_bytes.astype(np.int64)[:, None]
        read = np.where(counted, source[:, None] + np.arange(16), 0)
        self.shared[target[:, None] + np.arange(16)] = np.where(counted, self.memory[read], 0)

    def copy_16_async_if(self, flag: np.ndarray, shared: np.ndarray, address: np.ndarray, n_bytes: np.ndarray) -> None:
        for lane in np.flatnonzero(flag):
            target, source, n = int(shared[lane]), int(address[lane]), int(n_bytes[lane])
            self.shared[target : target + 16] = 0
            self.shared[target : target + n] = self.memory[source : source + n]

    def load_shared_half(self, address: np.ndarray) -> np.ndarray:
        assert not np.any(address % 2)
        return self.shared[address.astype(np.int64)[:, None] + np.arange(2)].view("<u2")[:, 0].astype(np.uint32)

    def load_shared_byte(self, address: np.ndarray) -> np.ndarray:
        return self.shared[address.astype(np.int64)].astype(np.uint32)

    @staticmethod
    def _words_at(memory: np.ndarray, at: np.ndarray, n_words: int) -> list[np.ndarray]:
        assert not np.any(at % (4 * n_words)), "a load of several words must be aligned to all of them"
        loaded = memory[at[:, None] + np.arange(4 * n_words)].view("<u4")
        return [np.ascontiguousarray(loaded[:, i]) for i in range(n_words)]


def _halves(word: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    pairs = np.ascontiguousarray(word).astype("<u4").view(np.float16).reshape(32, 2)
    return pairs[:, 0], pairs[:, 1]


def _join(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.stack([low, high], axis=-1).astype(np.float16)).view("<u4")[:, 0]


def _signed_bytes(word: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(word).astype("<u4").view(np.int8).reshape(32, 4).astype(np.int32)
