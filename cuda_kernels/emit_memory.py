"""Loads and stores that ``emit.Emitter`` can emit: global memory, shared memory and copies between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

Value = Any  # an llvmlite value; the package ships no annotations


class MemoryEmitter(ABC):
    """Accesses as single instructions of ``asm``; words of memory are words of registers."""

    @abstractmethod
    def asm(
        self,
        text: str,
        results: str,
        operands: Sequence[str],
        values: Sequence[Value],
        *,
        ordered: bool = False,
    ) -> Any:
        """See ``emit.Emitter.asm``."""

    @abstractmethod
    def as_float(self, word: Value) -> Value:
        """The word's bits as a float32."""

    # -- global memory (64-bit addresses) -------------------------------------------------------------------------

    def load_stream(self, address: Value, offset: int, n_words: int, *, recent: bool = False) -> list[Value]:
        """``n_words`` (1, 2 or 4) read once: not kept in L1, 128 bytes fetched into L2 at a time. Stays in place.

        ``recent``: an earlier kernel may write them while this one waits; the assembler moves other loads before waits.
        """
        path = "" if recent else ".nc"
        return self._load(f"ld.global{path}.L1::no_allocate.L2::128B", address, offset, n_words, ordered=True)

    def load_cached(self, address: Value, offset: int, n_words: int) -> list[Value]:
        """``n_words`` (1, 2 or 4) that this launch does not write and other threads read too."""
        return self._load("ld.global.nc", address, offset, n_words, ordered=False)

    def load_floats(self, address: Value, offset: int, n_floats: int) -> list[Value]:
        """``n_floats`` (1, 2 or 4) that this launch does not write and other threads read too."""
        return [self.as_float(word) for word in self.load_cached(address, offset, n_floats)]

    def load_recent(self, address: Value, offset: int, n_words: int) -> list[Value]:
        """``n_words`` (1, 2 or 4) that the kernel before may have written while this one waited. Stays in place."""
        return self._load("ld.global", address, offset, n_words, ordered=True)

    def load_early(self, address: Value, offset: int) -> Value:
        """A word that a kernel which has ended wrote, read before this one has waited: from the second-level cache."""
        return self.asm(f"ld.global.cg.u32 $0,[$1+{offset}];", "r", "l", [address], ordered=True)

    def load_recent_floats(self, address: Value, offset: int, n_floats: int) -> list[Value]:
        return [self.as_float(word) for word in self.load_recent(address, offset, n_floats)]

    def load_double(self, address: Value) -> Value:
        """A float64 that this launch does not write."""
        return self.asm("ld.global.nc.f64 $0,[$1];", "d", "l", [address])

    def load_half(self, address: Value, offset: int, *, recent: bool = False) -> Value:
        """Two bytes into the low half of a word. Stays in place: it belongs to loads that run ahead of their use."""
        path = "" if recent else ".nc"
        text = f"{{.reg .u16 h; ld.global{path}.u16 h,[$1+{offset}]; cvt.u32.u16 $0,h;}}"
        return self.asm(text, "r", "l", [address], ordered=True)

    def load_byte(self, address: Value, offset: int, *, recent: bool = False) -> Value:
        """A byte as a word, otherwise like ``load_half``."""
        path = "" if recent else ".nc"
        text = f"{{.reg .u16 h; ld.global{path}.u8 h,[$1+{offset}]; cvt.u32.u16 $0,h;}}"
        return self.asm(text, "r", "l", [address], ordered=True)

    def load_float(self, address: Value, offset: int) -> Value:
        """A float32 that this launch may have written."""
        return self.asm(f"ld.global.f32 $0,[$1+{offset}];", "f", "l", [address], ordered=True)

    def store_float(self, address: Value, offset: int, value: Value) -> None:
        self.asm(f"st.global.f32 [$0+{offset}],$1;", "", "lf", [address, value], ordered=True)

    def store_byte_if(self, flag: Value, address: Value, value: Value) -> None:
        """The low byte of a word, where ``flag`` (a word) is not 0."""
        text = "{.reg .pred p; .reg .b16 h; setp.ne.s32 p,$2,0; cvt.u16.u32 h,$1; @p st.global.b8 [$0],h;}"
        self.asm(text, "", "lrr", [address, value, flag], ordered=True)

    def store_half_if(self, flag: Value, address: Value, value: Value) -> None:
        """The low half of a word."""
        text = "{.reg .pred p; .reg .b16 h; setp.ne.s32 p,$2,0; cvt.u16.u32 h,$1; @p st.global.b16 [$0],h;}"
        self.asm(text, "", "lrr", [address, value, flag], ordered=True)

    def store_word_if(self, flag: Value, address: Value, value: Value) -> None:
        text = "{.reg .pred p; setp.ne.s32 p,$2,0; @p st.global.b32 [$0],$1;}"
        self.asm(text, "", "lrr", [address, value, flag], ordered=True)

    def store_two_floats(self, address: Value, offset: int, first: Value, second: Value) -> None:
        self.asm(f"st.global.v2.f32 [$0+{offset}],{{$1,$2}};", "", "lff", [address, first, second], ordered=True)

    def store_words(self, address: Value, offset: int, values: Sequence[Value]) -> None:
        """2 or 4 words."""
        text = f"st.global.v{len(values)}.u32 [$0+{offset}],{_registers(1, len(values))};"
        self.asm(text, "", "l" + "r" * len(values), [address, *values], ordered=True)

    def _load(self, opcode: str, address: Value, offset: int, n_words: int, *, ordered: bool) -> list[Value]:
        if n_words == 1:
            return [self.asm(f"{opcode}.u32 $0,[$1+{offset}];", "r", "l", [address], ordered=ordered)]
        text = f"{opcode}.v{n_words}.u32 {_registers(0, n_words)},[${n_words}+{offset}];"
        return list(self.asm(text, "r" * n_words, "l", [address], ordered=ordered))

    # -- shared memory (32-bit addresses inside the shared window) ------------------------------------------------

    def load_shared_words(self, address: Value, offset: int, n_words: int) -> list[Value]:
        """1, 2 or 4 words."""
        if n_words == 1:
            return [self.asm(f"ld.shared.u32 $0,[$1+{offset}];", "r", "r", [address], ordered=True)]
        text = f"ld.shared.v{n_words}.u32 {_registers(0, n_words)},[${n_words}+{offset}];"
        return list(self.asm(text, "r" * n_words, "r", [address], ordered=True))

    def load_shared_floats(self, address: Value, offset: int, n_floats: int) -> list[Value]:
        return [self.as_float(word) for word in self.load_shared_words(address, offset, n_floats)]

    def load_shared_float(self, address: Value, offset: int) -> Value:
        return self.asm(f"ld.shared.f32 $0,[$1+{offset}];", "f", "r", [address], ordered=True)

    def load_shared_half(self, address: Value) -> Value:
        """Two bytes into the low half of a word."""
        text = "{.reg .u16 h; ld.shared.u16 h,[$1]; cvt.u32.u16 $0,h;}"
        return self.asm(text, "r", "r", [address], ordered=True)

    def load_shared_byte(self, address: Value) -> Value:
        text = "{.reg .u16 h; ld.shared.u8 h,[$1]; cvt.u32.u16 $0,h;}"
        return self.asm(text, "r", "r", [address], ordered=True)

    def load_matrices(self, address: Value, offset: int, *, transposed: bool = False) -> list[Value]:
        """Four 8x8 float16 matrices, one register each; lane i gives the address of row i of the 32."""
        trans = ".trans" if transposed else ""
        text = f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {_registers(0, 4)},[$4+{offset}];"
        return list(self.asm(text, "rrrr", "r", [address], ordered=True))

    def store_shared_words(self, address: Value, offset: int, values: Sequence[Value]) -> None:
        """1, 2 or 4 words."""
        if len(values) == 1:
            self.asm(f"st.shared.u32 [$0+{offset}],$1;", "", "rr", [address, values[0]], ordered=True)
            return
        text = f"st.shared.v{len(values)}.u32 [$0+{offset}],{_registers(1, len(values))};"
        self.asm(text, "", "r" * (1 + len(values)), [address, *values], ordered=True)

    def copy_16_async(self, shared: Value, address: Value, offsets: tuple[int, int], n_bytes: Value) -> None:
        """Start a copy of 16 bytes from global to shared memory; bytes from ``n_bytes`` (0 to 16) on become zeros."""
        text = f"cp.async.cg.shared.global [$0+{offsets[0]}],[$1+{offsets[1]}],16,$2;"
        self.asm(text, "", "rlr", [shared, address, n_bytes], ordered=True)

    def copy_4_async(self, shared: Value, address: Value) -> None:
        """Start a copy of 4 bytes from global to shared memory."""
        self.asm("cp.async.ca.shared.global [$0],[$1],4;", "", "rl", [shared, address], ordered=True)

    def copy_16_async_if(self, flag: Value, shared: Value, address: Value, n_bytes: Value) -> None:
        """The same where ``flag`` (a word) is not 0."""
        text = "{.reg .pred p; setp.ne.s32 p,$3,0; @p cp.async.cg.shared.global [$0],[$1],16,$2;}"
        self.asm(text, "", "rlrr", [shared, address, n_bytes, flag], ordered=True)


def _registers(first: int, n: int) -> str:
    return "{" + ",".join(f"${first + i}" for i in range(n)) + "}"
