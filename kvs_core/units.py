"""Byte and count arithmetic shared by everyone; no parsing of whole commands, no I/O."""

from __future__ import annotations

import re

from kvs_core.messages import show_text

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

_INTEGER = re.compile(r"[+-]?[0-9]+")
_SHOWN_DIGITS = 40  # no value of ours has more; Python itself refuses to read thousands


def ceil_div(value: int, divisor: int) -> int:
    """Smallest integer not below ``value / divisor``; ``divisor`` > 0."""
    return -(-value // divisor)


def align_up(value: int, alignment: int) -> int:
    """Smallest multiple of ``alignment`` not below ``value``."""
    return ceil_div(value, alignment) * alignment


def parse_integer(text: str, *, low: int, high: int) -> int:
    """Plain decimal integer in ``low..high``; raises ValueError saying what is allowed.

    Spaces, underscores, exponents, hexadecimal digits and unit suffixes are refused: a script that
    meant ``64M`` should hear about it rather than run with 64.
    """
    if not _INTEGER.fullmatch(text):
        raise ValueError(f"'{show_text(text, _SHOWN_DIGITS)}' is not a whole number; allowed: {low} to {high}")
    digits = text.lstrip("+-").lstrip("0") or "0"
    value = int(digits[: _SHOWN_DIGITS + 1]) * (-1 if text.startswith("-") else 1)
    if not low <= value <= high:
        raise ValueError(f"{show_text(text, _SHOWN_DIGITS)} is out of range; allowed: {low} to {high}")
    return value


def show_size(n_bytes: float) -> str:
    """A size for people: three digits and a unit."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if n_bytes >= size:
            return f"{n_bytes / size:.2f} {unit}"
    return f"{n_bytes:.0f} B"
