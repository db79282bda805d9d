"""Typed look-ups in GGUF metadata, with a message that names the key; which keys exist is model_reader.py's subject."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvs_core.errors import ModelFileError, Problem, UnsupportedModelError
from kvs_core.messages import show_text

if TYPE_CHECKING:
    from kvs_core.gguf_header import MetadataValue

MAX_COUNT = (1 << 31) - 1
"""Largest size or count read from a key: what llama.cpp's 32-bit fields hold."""


class MetadataReader:
    """Reads keys of one model; ``prefix`` is its architecture, which most keys begin with."""

    def __init__(self, metadata: Mapping[str, MetadataValue], path: str, prefix: str = "") -> None:
        self.path = path
        self.prefix = prefix
        self._metadata = metadata

    def full_key(self, key: str) -> str:
        """The key as it stands in the file: with the architecture in front, unless it is a general one."""
        return key if key.startswith(("general.", "tokenizer.")) else f"{self.prefix}.{key}"

    def error(self, key: str, message: str) -> ModelFileError:
        """The error for one key; its message begins with the file and the key."""
        full = self.full_key(key)
        hint = "the keys of this file do not describe a model kvs can run; use another conversion of the model"
        return ModelFileError(f"{show_text(self.path)}: {full} {message}", path=self.path, key=full, hint=hint)

    def unsupported(self, key: str, value: str, reason: str) -> UnsupportedModelError:
        """The refusal, by name, of a whole and valid file that kvs has no code for."""
        hint = "use a model of a supported kind"
        problem = Problem(
            field=self.full_key(key), value=show_text(value, 60), reason=f"{reason} ({show_text(self.path)})", hint=hint
        )
        return UnsupportedModelError([problem], hint=hint)

    def has(self, key: str) -> bool:
        return self.full_key(key) in self._metadata

    def value(self, key: str) -> MetadataValue:
        """The value of a required key."""
        full = self.full_key(key)
        if full not in self._metadata:
            raise self.error(key, "is missing")
        return self._metadata[full]

    def text(self, key: str, default: str | None = None) -> str:
        value = default if default is not None and not self.has(key) else self.value(key)
        if not isinstance(value, str):
            raise self.error(key, f"is {_show(value)}; a string needed")
        return value

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_COUNT) -> int:
        value = default if default is not None and not self.has(key) else self.value(key)
        return self._checked_integer(key, value, low, high)

    def number(
        self, key: str, default: float | None = None, *, low: float = 0.0, high: float = sys.float_info.max
    ) -> float:
        """A finite number from ``low`` to ``high``."""
        value = default if default is not None and not self.has(key) else self.value(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            most = f"{low:g} or more" if high == sys.float_info.max else f"{low:g} to {high:g}"
            raise self.error(key, f"is {_show(value)}; a finite number, {most}, needed")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.value(key) if self.has(key) else default
        if not isinstance(value, bool):
            raise self.error(key, f"is {_show(value)}; true or false needed")
        return value

    def per_layer(self, key: str, n_layer: int, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """One count for each layer, from an array or from a single value that holds for all."""
        if default is not None and not self.has(key):
            return default
        value = self.value(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return (self._checked_integer(key, value, 1, MAX_COUNT),) * n_layer
        if isinstance(value, str | float | bool | list) or value.dtype.kind not in "iu":
            raise self.error(key, f"is {_show(value)}; a whole number, or one for each layer, needed")
        if len(value) != n_layer:
            raise self.error(key, f"has {len(value)} entries; {self.full_key('block_count')} is {n_layer}")
        return tuple(self._checked_integer(key, int(entry), 1, MAX_COUNT) for entry in value)

    def length(self, key: str) -> int:
        """Number of elements of a required array."""
        value = self.value(key)
        if isinstance(value, str | int | float):
            raise self.error(key, f"is {_show(value)}; an array needed")
        return len(value)

    def _checked_integer(self, key: str, value: MetadataValue | None, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, f"is {_show(value)}; a whole number from {low} to {high} needed")
        return value


def _show(value: object) -> str:
    if isinstance(value, str):
        return f'the string "{show_text(value, 60)}"'
    if isinstance(value, bool | int | float):
        return str(value).lower()
    return "an array"
