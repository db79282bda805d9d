"""Text of one flag or variable to a value, strictly. No flag names here: whoever asked adds them to the error.

Every reader raises ValueError with a reason that also says what is allowed.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import TypeVar

from kvs_core.config import ArenaMode, ArenaRequest, FlashAttention
from kvs_core.devices import find_device_problem
from kvs_core.kv_layer_types import LayerTypes, parse_layer_types
from kvs_core.kv_types import KvType
from kvs_core.messages import show_text
from kvs_core.sampling import SAMPLER_LETTERS, SAMPLER_NAMES, SEED_MAX
from kvs_core.units import MIB, parse_integer

INT32_MAX = 2**31 - 1
_SHOWN = 40  # characters of a value in a message

_REAL = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_ON = ("on", "enabled", "true", "1")
_OFF = ("off", "disabled", "false", "0")
_SAMPLER_ALIASES = {"temp": "temperature", "nucleus": "top_p"}
_LLAMA_SAMPLERS = ("dry", "top_n_sigma", "typ_p", "typical", "typical_p", "xtc", "infill", "adaptive_p", "mirostat")

Reader = Callable[[str], object]
EnumT = TypeVar("EnumT", bound=Enum)


def integer(low: int, high: int = INT32_MAX, *, named: Mapping[str, object] | None = None) -> Reader:
    """Reader of a whole number in ``low..high``; ``named`` gives some spellings another value."""
    names = named or {}

    def read(text: str) -> object:
        if text in names:
            return names[text]
        try:
            return parse_integer(text, low=low, high=high)
        except ValueError as error:
            words = [name for name in names if not name.lstrip("-").isdecimal()] or names
            raise ValueError(f"{error}{''.join(f', or {word}' for word in words)}") from None

    return read


def real(low: float, high: float, *, above: bool = False, named: Mapping[str, object] | None = None) -> Reader:
    """Reader of a decimal number in ``low..high``, or above ``low`` when ``above``; never NaN or infinite."""
    names = named or {}

    def read(text: str) -> object:
        if text in names:
            return names[text]
        if high == math.inf:
            allowed = f"allowed: numbers {'above' if above else 'from'} {low:g}"
        else:
            allowed = f"allowed: {low:g} to {high:g}"
        if not _REAL.fullmatch(text):
            raise ValueError(f"'{show_text(text, _SHOWN)}' is not a number; {allowed}")
        value = float(text)
        if not math.isfinite(value) or not low <= value <= high or (above and value == low):
            raise ValueError(f"{show_text(text, _SHOWN)} is out of range; {allowed}")
        return value + 0.0  # turns -0.0 into 0.0

    return read


def one_of(enum: type[EnumT]) -> Callable[[str], EnumT]:
    """Reader of one value of an enum; the case counts, as in llama.cpp."""

    def read(text: str) -> EnumT:
        for member in enum:
            if member.value == text:
                return member
        raise ValueError(f"{text!r} is not known; allowed: {', '.join(str(member.value) for member in enum)}")

    return read


def read_text(text: str) -> str:
    """The bytes the shell passed, as UTF-8 whatever the locale; refused when they are not."""
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError as error:
        raise ValueError(f"is not valid UTF-8: byte offset {getattr(error, 'start', 0)}") from None


def read_stop_text(text: str) -> str:
    """A text to stop at; an empty one would match everywhere."""
    if not text:
        raise ValueError("is empty; a stop text needs at least one character")
    return read_text(text)


def read_path(text: str) -> Path:
    """A path with a leading ``~`` expanded."""
    if not text:
        raise ValueError("is empty; a path is needed")
    if "\0" in text:
        raise ValueError("holds a NUL character; no path does")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(f"cannot be expanded: {error}") from None


def read_switch(text: str) -> bool:
    """on or off, in llama.cpp's spellings."""
    if text in _ON or text in _OFF:
        return text in _ON
    raise ValueError(f"{text!r} is not known; allowed: on, off")


def read_flash_attention(text: str) -> FlashAttention:
    """on, off or auto, in llama.cpp's spellings."""
    if text in ("auto", "-1"):
        return FlashAttention.AUTO
    if text in _ON or text in _OFF:
        return FlashAttention.ON if text in _ON else FlashAttention.OFF
    raise ValueError(f"{text!r} is not known; allowed: on, off, auto")


def read_kv_type(text: str) -> KvType:
    """One of the KV types this version has, in lower case."""
    return one_of(KvType)(text)


def read_layer_types(text: str) -> tuple[LayerTypes, ...]:
    """Types of single layers, or one of the modes by number; see ``kvs_core.kv_layer_types``."""
    return parse_layer_types(text)


def read_arena(text: str) -> ArenaRequest:
    """Whole MiB, 0 for off, or ``auto``."""
    if text == "auto":
        return ArenaRequest(mode=ArenaMode.AUTO)
    try:
        n_mib = parse_integer(text, low=0, high=INT32_MAX)
    except ValueError as error:
        raise ValueError(f"{error} (MiB), or auto") from None
    return ArenaRequest(mode=ArenaMode.FIXED, n_bytes=n_mib * MIB) if n_mib else ArenaRequest()


def read_mib(text: str) -> int:
    """Whole MiB, as bytes."""
    return parse_integer(text, low=1, high=INT32_MAX) * MIB


def read_seed(text: str) -> int | None:
    """A seed, or None to draw one: -1, and 4294967295 which is the same to llama.cpp."""
    seed = parse_integer(text, low=-1, high=SEED_MAX + 1)
    return None if seed in (-1, SEED_MAX + 1) else seed


def read_samplers(text: str) -> tuple[str, ...]:
    """Names separated by semicolons, in the order they run; dashes equal underscores."""
    names = [_SAMPLER_ALIASES.get(name, name) for name in text.replace("-", "_").split(";") if name]
    for name in names:
        if name in _LLAMA_SAMPLERS:
            raise ValueError(f"the sampler {name} is not supported yet; supported: {';'.join(SAMPLER_NAMES)}")
        if name not in SAMPLER_NAMES:
            raise ValueError(f"{name!r} is not a sampler; allowed: {';'.join(SAMPLER_NAMES)}")
    return tuple(names)


def read_sampler_letters(text: str) -> tuple[str, ...]:
    """llama.cpp's one-letter names, in the order they run."""
    for letter in text:
        if letter not in SAMPLER_LETTERS:
            known = ", ".join(f"{letter} {name}" for letter, name in SAMPLER_LETTERS.items())
            raise ValueError(f"the letter {letter!r} stands for no supported sampler; allowed: {known}")
    return tuple(SAMPLER_LETTERS[letter] for letter in text)


def read_device(text: str) -> str:
    """auto, cpu, cuda, cuda:N or cuda: and the start of a UUID."""
    problem = find_device_problem(text)
    if problem is None:
        return text
    raise ValueError(f"{text!r} is {problem}")
